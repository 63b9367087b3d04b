"""Actions that the launch files share; needs ``launch`` and ``launch_ros``.

Parameter files come first and arguments second, so that what is given on the command line counts.
"""

from collections.abc import Iterable
from collections.abc import Sequence
from pathlib import Path
import sys
from typing import Any

from launch.actions import DeclareLaunchArgument
from launch.actions import EmitEvent
from launch.actions import OpaqueFunction
from launch.actions import SetEnvironmentVariable
from launch.events import matches_action
from launch.events.process import ProcessExited
from launch.events.process import ShutdownProcess
from launch.substitutions import LaunchConfiguration
from launch.substitutions import PathJoinSubstitution
from launch_ros.actions import Node
from launch_ros.parameter_descriptions import ParameterValue
from launch_ros.substitutions import FindPackageShare

from flashrt_core.errors import ConfigError
from flashrt_ros.launch_arguments import Argument
from flashrt_ros.launch_arguments import refusal_of_unknown
from flashrt_ros.launch_arguments import TRUTH
from flashrt_ros.main import EXIT_CONFIG
from launch import LaunchContext
from launch import LaunchDescription


def described(file: str, *actions: Any) -> LaunchDescription:
    """Return the description of a launch file, which refuses arguments that it does not declare.

    :param file: its ``__file__``.
    """
    names = [argument.name for argument in LaunchDescription(actions).get_launch_arguments()]

    def check(context: LaunchContext) -> None:
        """:raises ConfigError: naming the argument and the nearest one."""
        refusal = refusal_of_unknown(Path(file).name, names, context.argv, sys.argv)
        if refusal:
            raise ConfigError(refusal)

    return LaunchDescription([OpaqueFunction(function=check), *actions])


def declared(arguments: Iterable[Argument]) -> list[DeclareLaunchArgument]:
    """Return the declarations of a launch file's arguments."""
    return [
        DeclareLaunchArgument(name, description=text, choices=choices,
                              **({} if default is None else {'default_value': default}))
        for name, default, text, choices in arguments
    ]


def parameter_file(node: str, argument: str = 'params_file') -> DeclareLaunchArgument:
    """Declare the argument for a node's parameter file, by default the one below config/."""
    return DeclareLaunchArgument(
        argument, default_value=_shared('config', f'{node}.yaml'),
        description=f'parameters under /**/{node}:')


def overrides(arguments: Sequence[Argument], names: Iterable[str]) -> dict[str, ParameterValue]:
    """Return the parameters that arguments of the same name stand for, with their types."""
    truths = {name for name, _, _, choices in arguments if choices == TRUTH}
    return {name: ParameterValue(LaunchConfiguration(name),
                                 value_type=bool if name in truths else str) for name in names}


def process(executable: str, files: Sequence[str] = ('params_file',), ros_arguments: Any = (),
            **options: Any) -> Node:
    """Return the process of a node of this package.

    :param files: arguments that name parameter files. :param options: of launch_ros' Node.
    """
    # As an argument a missing file is refused; as a parameter launch only warns of it.
    named = [part for file in files for part in ('--params-file', LaunchConfiguration(file))]
    return Node(
        package='flashrt_ros',
        executable=executable,
        namespace=LaunchConfiguration('namespace'),
        prefix=LaunchConfiguration('python'),
        ros_arguments=[*named, *ros_arguments, '--log-level', LaunchConfiguration('log_level')],
        respawn=LaunchConfiguration('respawn'),
        respawn_delay=1.0,
        on_exit=unless_refused,
        # A load or a last hold may take longer than the 5 s that launch gives by itself.
        sigterm_timeout='15',
        output='screen',
        emulate_tty=True,
        **options,
    )


def unless_refused(event: ProcessExited, _context: LaunchContext) -> list[EmitEvent] | None:
    """Start a process no more that has refused its parameters: the next one would do so too."""
    if event.returncode != EXIT_CONFIG:
        return None
    return [EmitEvent(event=ShutdownProcess(process_matcher=matches_action(event.action)))]


def large_messages() -> SetEnvironmentVariable:
    """Give Fast DDS the profile under which camera images go through shared memory."""
    return SetEnvironmentVariable(
        'FASTRTPS_DEFAULT_PROFILES_FILE', _shared('config', 'fastdds_shm.xml'))


def _shared(*parts: str) -> PathJoinSubstitution:
    return PathJoinSubstitution([FindPackageShare('flashrt_ros'), *parts])
