"""What the commands share: numbers with limits, a place to write to, a mistake in one line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor
import contextlib
import math
import os
from pathlib import Path
import signal
import sys
from types import FrameType

from flashrt_core.errors import ConfigError
from flashrt_core.errors import FlashrtError
from flashrt_core.starting import begun
from flashrt_core.starting import STOPPED


def whole_number(least: int) -> Callable[[str], int]:
    """Return an argparse type: a whole number from ``least`` on."""
    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(
                f'{text!r:.80} is refused; give a whole number from {least} on')
        return value

    return read


def number(least: float, most: float = math.inf, above: bool = False) -> Callable[[str], float]:
    """Return an argparse type: a number from ``least`` to ``most``, or above ``least``."""
    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (least < value if above else least <= value) or not value <= most:
            end = '' if most == math.inf else f' to at most {most:g}'
            raise argparse.ArgumentTypeError(
                f'{text!r:.80} is refused; give a number {"above" if above else "from"} '
                f'{least:g}{end or ("" if above else " on")}')
        return value

    return read


def check_output(path: Path, what: str) -> None:
    """Verify, before the work that makes it, that a file can be written; nothing is created.

    :raises ConfigError: it is a folder, its folder does not exist, or may not be written to.
    """
    folder = path.absolute().parent
    reason = ''
    if path.is_dir():
        reason = 'it is a folder'
    elif not folder.is_dir():
        reason = f'{folder} is no folder'
    elif not os.access(folder, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        reason = 'permission denied'
    if reason:
        raise ConfigError(f'{what} cannot be written to {path}: {reason}; name a file in a folder '
                          'that exists')


def make_folder(path: Path, what: str) -> None:
    """Make a folder to write to, and those above it.

    :raises ConfigError: it cannot be made, is a file, or may not be written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f'{what} {path} cannot be made: {error.strerror}; name a folder that '
                          'can be') from error
    if not os.access(path, os.W_OK):
        raise ConfigError(f'{what} {path} may not be written to; name another folder')


def tell_missing(name: str, error: ModuleNotFoundError) -> None:
    """Print that a package is not installed, and where; a module of our own is no user's mistake.

    :raises ModuleNotFoundError: it is one of our own.
    """
    if (error.name or '').startswith('flashrt_'):
        raise error
    print(f'{name}: {sys.executable} has no module {error.name!r}; activate the virtual '
          'environment, or install there what requirements-gpu.txt names [module_missing]',
          file=sys.stderr)


def run(name: str, action: Callable[[], int], refused: int = 2) -> int:
    """Return what ``action`` does, ``refused`` and one line for what the user can mend, 130 for
    Ctrl-C.

    That is a FlashrtError, what the file system refuses, output that nobody reads, a package that
    is not installed, and a worker process that was killed.
    """
    try:
        begun()
        return action()
    except FlashrtError as error:
        print(f'{name}: {error} [{error.code}]', file=sys.stderr)
        return refused
    except BrokenPipeError:
        # What is still buffered must not fail again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f'{name}: ended, for nobody reads its output any more [file]', file=sys.stderr)
        return refused
    except OSError as error:
        at = f' {error.filename}' if error.filename else ''
        print(f'{name}: the file system refuses{at}: {error.strerror or error}; check the path, '
              'its permissions and the free space [file]', file=sys.stderr)
        return refused
    except ModuleNotFoundError as error:
        tell_missing(name, error)
        return refused
    except BrokenExecutor:
        print(f'{name}: a worker process was ended before its work was done, perhaps for want of '
              'memory; give fewer --workers, or see what it printed above [worker_lost]',
              file=sys.stderr)
        return refused
    except KeyboardInterrupt:
        print(f'{name}: stopped', file=sys.stderr)
        return STOPPED


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Have Ctrl-C only be noted, so that what runs ends at a point of its own; main thread.

    Gives a function that says whether it came. A second Ctrl-C interrupts as ever.
    """
    came = False

    def note(signum: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: came
    finally:
        signal.signal(signal.SIGINT, before)
