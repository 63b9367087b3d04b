"""The executables of setup.cfg: each imports its program only when Ctrl-C can end it quietly."""

import importlib
from pathlib import Path
import sys

from flashrt_core.starting import command_begins
from flashrt_core.starting import node_begins


def executor() -> int:
    """Run the executor node."""
    node_begins()
    return _main_of('flashrt_ros.executor_node')


def planner() -> int:
    """Run the planner node."""
    node_begins()
    return _main_of('flashrt_ros.planner_node')


def bringup() -> int:
    """Run executor and planner in one process."""
    node_begins()
    return _main_of('flashrt_ros.bringup')


def tabletop() -> int:
    """Run the robot of the demo."""
    node_begins()
    return _main_of('flashrt_ros.tabletop_node')


def demo() -> int:
    """Run the demo."""
    command_begins()
    return _main_of('flashrt_ros.demo')


def doctor() -> int:
    """Run the doctor."""
    command_begins()
    return _main_of('flashrt_ros.doctor')


def capsule() -> int:
    """Run the capsule command."""
    command_begins()
    return _main_of('flashrt_ros.capsule_cli')


def bag() -> int:
    """Run the bag command."""
    command_begins()
    return _main_of('flashrt_ros.bag.__main__')


def _main_of(module: str) -> int:
    """Return the exit status of a program, 2 where a package that it needs is not installed."""
    try:
        program = importlib.import_module(module)
    except ModuleNotFoundError as error:
        from flashrt_core.command_line import tell_missing

        tell_missing(Path(sys.argv[0]).name, error)
        return 2
    return int(program.main())
