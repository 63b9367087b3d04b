"""The executables of setup.cfg: each imports its program only when Ctrl-C can end it quietly."""

from collections.abc import Callable
import importlib
from pathlib import Path
import sys

from flashrt_core.starting import command_begins
from flashrt_core.starting import node_begins


def _program(begins: Callable[[], None], module: str) -> Callable[[], int]:
    """Return what runs a module's main: its exit status, 2 where a package is not installed."""
    def run() -> int:
        begins()
        try:
            program = importlib.import_module(module)
        except ModuleNotFoundError as error:
            from flashrt_core.command_line import tell_missing

            tell_missing(Path(sys.argv[0]).name, error)
            return 2
        return int(program.main())

    return run


executor = _program(node_begins, 'flashrt_ros.executor_node')
planner = _program(node_begins, 'flashrt_ros.planner_node')
bringup = _program(node_begins, 'flashrt_ros.bringup')
tabletop = _program(node_begins, 'flashrt_ros.tabletop_node')
demo = _program(command_begins, 'flashrt_ros.demo')
doctor = _program(command_begins, 'flashrt_ros.doctor')
capsule = _program(command_begins, 'flashrt_ros.capsule_cli')
bag = _program(command_begins, 'flashrt_ros.bag.__main__')
