"""Start one executor: ``ros2 launch flashrt_ros executor.launch.py namespace:=arm1``."""

from flashrt_ros.launch_actions import declared
from flashrt_ros.launch_actions import described
from flashrt_ros.launch_actions import large_messages
from flashrt_ros.launch_actions import overrides
from flashrt_ros.launch_actions import parameter_file
from flashrt_ros.launch_actions import process
from flashrt_ros.launch_arguments import NAMESPACE
from flashrt_ros.launch_arguments import POLICY
from flashrt_ros.launch_arguments import POLICY_PARAMETERS
from flashrt_ros.launch_arguments import PROCESS
from flashrt_ros.launch_arguments import START
from flashrt_ros.launch_arguments import START_PARAMETERS
from launch import LaunchDescription

ARGUMENTS = (NAMESPACE, *POLICY, *START, *PROCESS)
PARAMETERS = (*POLICY_PARAMETERS, *START_PARAMETERS)


def generate_launch_description() -> LaunchDescription:
    """Declare the arguments and start the node."""
    executor = process('executor', name='executor', parameters=[overrides(ARGUMENTS, PARAMETERS)])
    return described(
        __file__, *declared(ARGUMENTS), parameter_file('executor'), large_messages(), executor)
