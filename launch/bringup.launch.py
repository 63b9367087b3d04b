"""Executor and planner in one process: ``ros2 launch flashrt_ros bringup.launch.py``.

The form for one GPU: subgoals are written into the executor's slot without a message, and planner
segments run only where they end before the executor's next tick is due.
"""

from launch.substitutions import LaunchConfiguration

from flashrt_ros.launch_actions import declared
from flashrt_ros.launch_actions import described
from flashrt_ros.launch_actions import large_messages
from flashrt_ros.launch_actions import parameter_file
from flashrt_ros.launch_actions import process
from flashrt_ros.launch_arguments import NAMESPACE
from flashrt_ros.launch_arguments import PLANNER
from flashrt_ros.launch_arguments import PLANNER_PARAMETERS
from flashrt_ros.launch_arguments import POLICY
from flashrt_ros.launch_arguments import POLICY_PARAMETERS
from flashrt_ros.launch_arguments import PROCESS
from launch import LaunchDescription

ARGUMENTS = (NAMESPACE, *POLICY, *PLANNER, *PROCESS)
# In one process a parameter goes to the node whose name stands before it.
PARAMETERS = {'executor': POLICY_PARAMETERS, 'planner': PLANNER_PARAMETERS}


def generate_launch_description() -> LaunchDescription:
    """Declare the arguments and start the process."""
    files = [f'{node}_params_file' for node in PARAMETERS]
    given = [
        part
        for node, names in PARAMETERS.items()
        for name in names
        for part in ('-p', [f'{node}:{name}:=', LaunchConfiguration(name)])
    ]
    return described(
        __file__,
        *declared(ARGUMENTS),
        *(parameter_file(node, file) for node, file in zip(PARAMETERS, files, strict=True)),
        large_messages(),
        # No `name`: it would rename both nodes of the process.
        process('bringup', files, given),
    )
