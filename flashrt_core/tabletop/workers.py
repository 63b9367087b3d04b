"""Processes that work for one command, and end with it however it ends."""

from collections.abc import Callable
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
import contextlib
import multiprocessing
from multiprocessing.context import SpawnContext
from multiprocessing.context import SpawnProcess
import os
import signal
import threading
from typing import Any


class _Process(SpawnProcess):
    """A process that Ctrl-C does not reach while it imports: SIGINT is blocked until _begin."""

    def start(self) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            super().start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Context(SpawnContext):
    Process = _Process


def make_pool(count: int, begin: Callable[..., object] | None = None,
              *given: Any) -> ProcessPoolExecutor:
    """Return ``count`` processes, started afresh, each of which calls ``begin(*given)`` first.

    A forked process would inherit the parent's lanes and devices. Ctrl-C is left to the process
    that made the pool; when that one is killed they end.
    """
    return ProcessPoolExecutor(
        count, _Context(), _begin, (begin, given))


@contextlib.contextmanager
def pool(count: int, begin: Callable[..., object] | None = None,
         *given: Any) -> Iterator[ProcessPoolExecutor]:
    """Give a pool of ``make_pool``; what has not begun when the block ends is not done."""
    made = make_pool(count, begin, *given)
    try:
        yield made
    finally:
        made.shutdown(cancel_futures=True)


def _begin(begin: Callable[..., object] | None, given: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if begin is not None:
        begin(*given)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
