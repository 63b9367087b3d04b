"""Bridges between threads that finish work and the rclpy executor that awaits it.

rclpy polls awaited futures each time the executor wakes, but nothing wakes it when another thread
resolves one. Every helper here pairs the result with ``executor.wake()`` so that an ``async def``
callback goes on at once, also in a node without timers.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
import threading
from typing import Any

from rclpy.node import Node
from rclpy.task import Future


def wake(node: Node) -> None:
    """Wake the executor that spins ``node``; any thread, nothing to wake is fine."""
    executor = node.executor
    if executor is not None:
        executor.wake()


def run_in_thread(node: Node, function: Callable[[], Any], name: str) -> Future:
    """Run ``function`` on a thread of its own; return a future to await in a callback."""
    future = Future()
    threading.Thread(
        target=_settle, args=(node, future, function), name=name, daemon=True).start()
    return future


def run_in_pool(node: Node, pool: ThreadPoolExecutor, function: Callable[[], Any]) -> Future:
    """Run ``function`` on a thread of ``pool``; return a future to await in a callback."""
    future = Future()
    pool.submit(_settle, node, future, function)
    return future


def _settle(node: Node, future: Future, function: Callable[[], Any]) -> None:
    try:
        result = function()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
    wake(node)
