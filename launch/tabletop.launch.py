"""Start the built-in robot: ``ros2 launch flashrt_ros tabletop.launch.py namespace:=arm1``."""

from launch.substitutions import LaunchConfiguration
from launch_ros.parameter_descriptions import ParameterValue

from flashrt_ros.launch_actions import declared
from flashrt_ros.launch_actions import described
from flashrt_ros.launch_actions import parameter_file
from flashrt_ros.launch_actions import process
from flashrt_ros.launch_arguments import NAMESPACE
from flashrt_ros.launch_arguments import PROCESS
from flashrt_ros.launch_arguments import TRUTH
from launch import LaunchDescription

ARGUMENTS = (
    NAMESPACE,
    ('seed', '0', 'of the first world', None),
    ('lock_step', 'false', 'the world moves only by ~/step', TRUTH),
    *PROCESS,
)
PARAMETERS = ('seed', 'lock_step')


def generate_launch_description() -> LaunchDescription:
    """Declare the arguments and start the node."""
    # Without a type: a value of the wrong one is refused by the node, which says what it takes.
    given = {name: ParameterValue(LaunchConfiguration(name)) for name in PARAMETERS}
    robot = process('tabletop', name='tabletop', parameters=[given])
    return described(__file__, *declared(ARGUMENTS), parameter_file('tabletop'), robot)
