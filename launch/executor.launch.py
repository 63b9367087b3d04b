"""Start one executor: ``ros2 launch flashrt_ros executor.launch.py namespace:=arm1``."""

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
    ('device', 'auto', 'where the policy runs', ('auto', 'cpu', 'cuda')),
    ('output_mode', 'chunk', 'chunk: a trajectory per tick; stream: a point per step',
     ('chunk', 'stream')),
    ('use_sim_time', 'false', 'follow /clock', ('true', 'false')),
    ('autostart', 'true', 'configure and activate at start', ('true', 'false')),
    ('python', '', 'interpreter that runs the node, an absolute path; empty: the one on PATH',
     None),
    ('respawn', 'true', 'start anew when the process ends by itself (a lost GPU)',
     ('true', 'false')),
    ('log_level', 'info', 'of the node', ('debug', 'info', 'warn', 'error')),
)  # fmt: skip
TYPED = {'use_sim_time': bool, 'autostart': bool}
PARAMETERS = ('policy', 'policy_config', 'embodiment', 'device', 'output_mode', 'use_sim_time',
              'autostart')  # fmt: skip


def generate_launch_description() -> LaunchDescription:
    """Declare the arguments and start the node, parameter file first, arguments second."""
    share = FindPackageShare('flashrt_ros')
    declared = [
        DeclareLaunchArgument(name, default_value=default, description=text, choices=choices)
        for name, default, text, choices in ARGUMENTS
    ]
    params_file = DeclareLaunchArgument(
        'params_file',
        default_value=PathJoinSubstitution([share, 'config', 'executor.yaml']),
        description='parameters under /**/executor:',
    )
    overrides = {
        name: ParameterValue(LaunchConfiguration(name), value_type=TYPED.get(name, str))
        for name in PARAMETERS
    }
    executor = Node(
        package='flashrt_ros',
        executable='executor',
        name='executor',
        namespace=LaunchConfiguration('namespace'),
        prefix=LaunchConfiguration('python'),
        # As an argument a missing file is refused; as a parameter launch only warns of it.
        ros_arguments=['--params-file', LaunchConfiguration('params_file'),
                       '--log-level', LaunchConfiguration('log_level')],
        parameters=[overrides],
        respawn=LaunchConfiguration('respawn'),
        respawn_delay=1.0,
        output='screen',
        emulate_tty=True,
    )
    profile = SetEnvironmentVariable(
        'FASTRTPS_DEFAULT_PROFILES_FILE',
        PathJoinSubstitution([share, 'config', 'fastdds_shm.xml']),
    )
    return LaunchDescription([*declared, params_file, profile, executor])
