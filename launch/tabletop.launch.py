"""Start the built-in robot: ``ros2 launch flashrt_ros tabletop.launch.py namespace:=arm1``."""

from launch.actions import DeclareLaunchArgument
from launch.substitutions import LaunchConfiguration
from launch.substitutions import PathJoinSubstitution
from launch_ros.actions import Node
from launch_ros.parameter_descriptions import ParameterValue
from launch_ros.substitutions import FindPackageShare

from launch import LaunchDescription

ARGUMENTS = (
    ('namespace', '', 'of the robot; all topics and services lie below it', None),
    ('seed', '0', 'of the first world', None),
    ('lock_step', 'false', 'the world moves only by ~/step', ('true', 'false')),
    ('python', '', 'interpreter that runs the node; empty: the one on PATH', None),
)
TYPED = {'seed': int, 'lock_step': bool}


def generate_launch_description() -> LaunchDescription:
    """Declare the arguments and start the node."""
    declared = [
        DeclareLaunchArgument(name, default_value=default, description=text, choices=choices)
        for name, default, text, choices in ARGUMENTS
    ]
    params_file = DeclareLaunchArgument(
        'params_file',
        default_value=PathJoinSubstitution(
            [FindPackageShare('flashrt_ros'), 'config', 'tabletop.yaml']
        ),
        description='parameters under /**/tabletop:',
    )
    overrides = {
        name: ParameterValue(LaunchConfiguration(name), value_type=kind)
        for name, kind in TYPED.items()
    }
    robot = Node(
        package='flashrt_ros',
        executable='tabletop',
        name='tabletop',
        namespace=LaunchConfiguration('namespace'),
        prefix=LaunchConfiguration('python'),
        parameters=[LaunchConfiguration('params_file'), overrides],
        output='screen',
        emulate_tty=True,
    )
    return LaunchDescription([*declared, params_file, robot])
