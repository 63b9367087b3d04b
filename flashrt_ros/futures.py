"""Bridges between threads that finish work and the rclpy executor that awaits it.

rclpy polls awaited futures each time the executor wakes, but nothing wakes it when another thread
resolves one. Every helper here pairs the result with ``executor.wake()`` so that an ``async def``
callback goes on at once, also in a node without timers.
"""

from collections.abc import Callable
import concurrent.futures
import threading
import time
from typing import Any

from rclpy.node import Node
from rclpy.task import Future

from flashrt_core.errors import LaneTimeout


def wake(node: Node) -> None:
    """Wake the executor that spins ``node``; any thread, nothing to wake is fine."""
    executor = node.executor
    if executor is not None:
        executor.wake()


def run_in_thread(node: Node, function: Callable[[], Any], name: str) -> Future:
    """Run ``function`` on a thread of its own; return a future to await in a callback."""
    future = Future()

    def body() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)
        wake(node)

    threading.Thread(target=body, name=name, daemon=True).start()
    return future


class PendingFutures:
    """Futures of other threads awaited by callbacks, each with a deadline.

    ``bridge`` and ``expire`` run on the executor thread; results arrive from any thread. A future
    that misses its deadline raises LaneTimeout in the awaiting callback, so that a client gets its
    answer even when the device is wedged.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[Future, float, str]] = {}

    def bridge(
        self, source: 'concurrent.futures.Future[Any]', what: str, timeout_s: float
    ) -> Future:
        """Return an awaitable of ``source``; ``what`` names the work in the timeout's message."""
        target = Future()
        key = id(target)
        with self._lock:
            self._waiting[key] = (target, time.monotonic() + timeout_s, what)

        def done(finished: 'concurrent.futures.Future[Any]') -> None:
            if self._forget(key) is None:
                return
            error = (
                LaneTimeout(f'{what} was cancelled; ask again')
                if finished.cancelled() else finished.exception()
            )
            if error is not None:
                target.set_exception(error)
            else:
                target.set_result(finished.result())
            wake(self._node)

        source.add_done_callback(done)
        return target

    def expire(self) -> None:
        """Fail every future whose deadline has passed; called from a timer."""
        now = time.monotonic()
        with self._lock:
            late = [key for key, (_, deadline, _) in self._waiting.items() if deadline <= now]
        for key in late:
            entry = self._forget(key)
            if entry is not None:
                target, _, what = entry
                target.set_exception(LaneTimeout(
                    f'{what} did not finish within its time limit; the device may be wedged: '
                    'look at /diagnostics, then restart the node'))
        if late:
            wake(self._node)

    def _forget(self, key: int) -> 'tuple[Future, float, str] | None':
        with self._lock:
            return self._waiting.pop(key, None)
