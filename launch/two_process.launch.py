"""Executor and planner as two processes: ``ros2 launch flashrt_ros two_process.launch.py``.

The form for two machines, and for a planner that may end without the robot: subgoals go over ROS,
and the executor holds when none comes within a subgoal's deadline. On one GPU bringup.launch.py
keeps the planner's work away from the executor's ticks, which two processes cannot.
"""

from launch.actions import DeclareLaunchArgument
from launch.actions import SetEnvironmentVariable
from launch.substitutions import LaunchConfiguration
from launch.substitutions import PathJoinSubstitution
from launch_ros.actions import Node
from launch_ros.parameter_descriptions import ParameterValue
from launch_ros.substitutions import FindPackageShare

from launch import LaunchDescription

ARGUMENTS = (
    ('namespace', '', 'of the robot; all topics and services lie below it', None),
    ('policy', 'pi0', 'policy family', None),
    ('policy_config', 'tiny', 'named size of the policy, or a YAML file', None),
    ('embodiment', 'embodiments/tabletop.yaml', 'robot YAML: a path, or below config/', None),
    ('output_mode', 'chunk', 'chunk: a trajectory per tick; stream: a point per step',
     ('chunk', 'stream')),
    ('planner', 'qwen3_5', 'planner family', None),
    ('planner_config', 'planner_bytes/planner.yaml',
     'named size of the planner, or a YAML file: a path, or below config/', None),
    ('grammar', 'tabletop', 'of plans: tabletop, none, or a .lark or .regex file', None),
    ('link', 'topic', 'how subgoals reach the executor', ('topic', 'service')),
    ('python', '', 'interpreter that runs the nodes, an absolute path; empty: the one on PATH',
     None),
    ('respawn', 'true', 'start a process anew when it ends by itself (a lost GPU)',
     ('true', 'false')),
    ('log_level', 'info', 'of both nodes', ('debug', 'info', 'warn', 'error')),
)  # fmt: skip
PARAMETERS = {
    'policy': 'executor', 'policy_config': 'executor', 'embodiment': 'executor',
    'output_mode': 'executor', 'planner': 'planner', 'planner_config': 'planner',
    'grammar': 'planner', 'link': 'planner',
}  # fmt: skip


def generate_launch_description() -> LaunchDescription:
    """Declare the arguments and start both, parameter files first, arguments second."""
    share = FindPackageShare('flashrt_ros')
    actions = [
        DeclareLaunchArgument(name, default_value=default, description=text, choices=choices)
        for name, default, text, choices in ARGUMENTS
    ]
    actions.append(SetEnvironmentVariable(
        'FASTRTPS_DEFAULT_PROFILES_FILE',
        PathJoinSubstitution([share, 'config', 'fastdds_shm.xml']),
    ))
    for name in ('executor', 'planner'):
        actions.append(DeclareLaunchArgument(
            f'{name}_params_file',
            default_value=PathJoinSubstitution([share, 'config', f'{name}.yaml']),
            description=f'parameters under /**/{name}:',
        ))
        overrides = {
            key: ParameterValue(LaunchConfiguration(key), value_type=str)
            for key, node in PARAMETERS.items() if node == name
        }
        actions.append(Node(
            package='flashrt_ros',
            executable=name,
            name=name,
            namespace=LaunchConfiguration('namespace'),
            prefix=LaunchConfiguration('python'),
            # As an argument a missing file is refused; as a parameter launch only warns of it.
            ros_arguments=['--params-file', LaunchConfiguration(f'{name}_params_file'),
                           '--log-level', LaunchConfiguration('log_level')],
            parameters=[overrides],
            respawn=LaunchConfiguration('respawn'),
            respawn_delay=1.0,
            output='screen',
            emulate_tty=True,
        ))
    return LaunchDescription(actions)

