"""Executor and planner as two processes: ``ros2 launch flashrt_ros two_process.launch.py``.

The form for two machines, and for a planner that may end without the robot: subgoals go over ROS,
and the executor holds when none comes within a subgoal's deadline. On one GPU bringup.launch.py
keeps the planner's work away from the executor's ticks, which two processes cannot.
"""

from flashrt_ros.launch_actions import declared
from flashrt_ros.launch_actions import described
from flashrt_ros.launch_actions import large_messages
from flashrt_ros.launch_actions import overrides
from flashrt_ros.launch_actions import parameter_file
from flashrt_ros.launch_actions import process
from flashrt_ros.launch_arguments import NAMESPACE
from flashrt_ros.launch_arguments import PLANNER
from flashrt_ros.launch_arguments import PLANNER_PARAMETERS
from flashrt_ros.launch_arguments import POLICY
from flashrt_ros.launch_arguments import POLICY_PARAMETERS
from flashrt_ros.launch_arguments import PROCESS
from launch import LaunchDescription

ARGUMENTS = (
    NAMESPACE,
    *POLICY,
    *PLANNER,
    ('link', 'topic', 'how subgoals reach the executor', ('topic', 'service')),
    *PROCESS,
)
PARAMETERS = {'executor': POLICY_PARAMETERS, 'planner': (*PLANNER_PARAMETERS, 'link')}


def generate_launch_description() -> LaunchDescription:
    """Declare the arguments and start both nodes."""
    actions = [*declared(ARGUMENTS), large_messages()]
    for name, names in PARAMETERS.items():
        file = f'{name}_params_file'
        actions += [
            parameter_file(name, file),
            process(name, [file], name=name, parameters=[overrides(ARGUMENTS, names)]),
        ]
    return described(__file__, *actions)
