"""Executor and planner in one process: ``ros2 launch flashrt_ros bringup.launch.py``.

The form for one GPU: subgoals are written into the executor's slot without a message, and planner
segments run only where they end before the executor's next tick is due.
"""

from launch.actions import DeclareLaunchArgument
from launch.actions import SetEnvironmentVariable
from launch.substitutions import LaunchConfiguration
from launch.substitutions import PathJoinSubstitution
from launch_ros.actions import Node
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
    ('python', '', 'interpreter that runs the nodes, an absolute path; empty: the one on PATH',
     None),
    ('respawn', 'true', 'start anew when the process ends by itself (a lost GPU)',
     ('true', 'false')),
    ('log_level', 'info', 'of both nodes', ('debug', 'info', 'warn', 'error')),
)  # fmt: skip
# In one process a parameter goes to the node whose name stands before it.
PARAMETERS = {
    'policy': 'executor', 'policy_config': 'executor', 'embodiment': 'executor',
    'output_mode': 'executor', 'planner': 'planner', 'planner_config': 'planner',
    'grammar': 'planner',
}  # fmt: skip


def generate_launch_description() -> LaunchDescription:
    """Declare the arguments and start the process, parameter files first, arguments second."""
    share = FindPackageShare('flashrt_ros')
    declared = [
        DeclareLaunchArgument(name, default_value=default, description=text, choices=choices)
        for name, default, text, choices in ARGUMENTS
    ]
    files = [
        DeclareLaunchArgument(
            f'{node}_params_file',
            default_value=PathJoinSubstitution([share, 'config', f'{node}.yaml']),
            description=f'parameters under /**/{node}:',
        )
        for node in ('executor', 'planner')
    ]
    overrides = [
        part
        for name, node in PARAMETERS.items()
        for part in ('-p', [f'{node}:{name}:=', LaunchConfiguration(name)])
    ]
    both = Node(
        package='flashrt_ros',
        executable='bringup',
        # No `name`: it would rename both nodes of the process.
        namespace=LaunchConfiguration('namespace'),
        prefix=LaunchConfiguration('python'),
        ros_arguments=['--params-file', LaunchConfiguration('executor_params_file'),
                       '--params-file', LaunchConfiguration('planner_params_file'),
                       *overrides, '--log-level', LaunchConfiguration('log_level')],
        respawn=LaunchConfiguration('respawn'),
        respawn_delay=1.0,
        output='screen',
        emulate_tty=True,
    )
    profile = SetEnvironmentVariable(
        'FASTRTPS_DEFAULT_PROFILES_FILE',
        PathJoinSubstitution([share, 'config', 'fastdds_shm.xml']),
    )
    return LaunchDescription([*declared, *files, profile, both])
