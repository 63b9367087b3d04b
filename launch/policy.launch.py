"""Run a published policy on a robot of yours, weights and all.

``ros2 launch flashrt_ros policy.launch.py policy:=pi05 checkpoint:=~/models/pi05_base
embodiment:=embodiments/so101.yaml``. Without a checkpoint it says what to download, and under
which licence; ``checkpoint:=random`` measures without one.
"""

from flashrt_ros.launch_actions import declared
from flashrt_ros.launch_actions import described
from flashrt_ros.launch_actions import large_messages
from flashrt_ros.launch_actions import overrides
from flashrt_ros.launch_actions import parameter_file
from flashrt_ros.launch_actions import process
from flashrt_ros.launch_arguments import changed
from flashrt_ros.launch_arguments import NAMESPACE
from flashrt_ros.launch_arguments import POLICY
from flashrt_ros.launch_arguments import POLICY_PARAMETERS
from flashrt_ros.launch_arguments import PROCESS
from flashrt_ros.launch_arguments import START
from flashrt_ros.launch_arguments import START_PARAMETERS
from flashrt_ros.launch_arguments import TRUTH
from launch import LaunchDescription

ARGUMENTS = (
    NAMESPACE,
    # Nobody's robot is the right one to fall back on: the embodiment must be named.
    *changed(POLICY, policy_config='', checkpoint='', embodiment=None),
    ('prompt', '', 'the task in words', None),
    ('fit_to_robot', 'true', 'the policy takes joints and cameras of the embodiment, no others',
     TRUTH),
    *START,
    *PROCESS,
)
PARAMETERS = (*POLICY_PARAMETERS, 'prompt', 'fit_to_robot', *START_PARAMETERS)


def generate_launch_description() -> LaunchDescription:
    """Declare the arguments and start the executor."""
    executor = process('executor', name='executor', parameters=[overrides(ARGUMENTS, PARAMETERS)])
    return described(
        __file__, *declared(ARGUMENTS), parameter_file('executor'), large_messages(), executor)
