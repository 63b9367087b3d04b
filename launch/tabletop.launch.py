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
PARAMETERS = ('seed', 'lock_step')


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
    # Without a type: a value of the wrong one is refused by the node, which says what it takes.
    overrides = {name: ParameterValue(LaunchConfiguration(name)) for name in PARAMETERS}
    robot = Node(
        package='flashrt_ros',
        executable='tabletop',
        name='tabletop',
        namespace=LaunchConfiguration('namespace'),
        prefix=LaunchConfiguration('python'),
        # As an argument a missing file is refused; as a parameter launch only warns of it.
        ros_arguments=['--params-file', LaunchConfiguration('params_file')],
        parameters=[overrides],
        output='screen',
        emulate_tty=True,
    )
    return LaunchDescription([*declared, params_file, robot])
