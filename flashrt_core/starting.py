"""Ctrl-C while a program still imports its modules, which takes seconds: a quiet end.

Imports nothing that takes time itself. At that point nothing is held that would have to be given
back, while an exception raised within an import prints a traceback or is taken for another one.
"""

from collections.abc import Callable
import os
from pathlib import Path
import signal
import sys
from types import FrameType

STOPPED = 130  # the exit status of what Ctrl-C ended
_before: dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None] = {}


def node_begins() -> None:
    """Have SIGINT and SIGTERM end this process at once with status 0, as they end a node.

    Until ``begun``; main thread.
    """
    _end_at((signal.SIGINT, signal.SIGTERM), lambda number, frame: os._exit(0))


def command_begins() -> None:
    """Have SIGINT end this process at once with one line and status 130, as it ends a command.

    Until ``begun``; main thread.
    """
    def end(number: int, frame: FrameType | None) -> None:
        os.write(2, f'{Path(sys.argv[0]).name}: stopped\n'.encode())
        os._exit(STOPPED)

    _end_at((signal.SIGINT,), end)


def begun() -> None:
    """Give the signals back to who had them: from here on a program ends in order; main thread."""
    while _before:
        signal.signal(*_before.popitem())


def _end_at(numbers: tuple[signal.Signals, ...],
            end: Callable[[int, FrameType | None], object]) -> None:
    for number in numbers:
        if signal.getsignal(number) != signal.SIG_IGN:  # as a shell has it for what it puts aside
            _before[number] = signal.signal(number, end)
