"""``make demo``: a robot and its policy over real ROS 2, reset and rolled back by capsules."""

from __future__ import annotations

import sys

__all__ = ['main']


def main(argv: list[str] | None = None) -> int:
    """Run the demo; 0 when all it shows holds, 1 when not, 2 when it could not run."""
    from flashrt_core.command_line import run

    return run('demo', lambda: _play(sys.argv[1:] if argv is None else argv))


def _play(argv: list[str]) -> int:
    from flashrt_core.errors import FlashrtError
    from flashrt_ros.demo.terminal import Terminal
    from flashrt_ros.ros_environment import require_ros

    terminal = Terminal()
    try:
        require_ros()
        from flashrt_ros.demo.play import play

        return play(argv, terminal)
    except FlashrtError as error:
        terminal.error(f'[{error.code}] {error}')
        return 2
    except KeyboardInterrupt:
        terminal.error('interrupted; the robot and the executor were ended')
        return 130
