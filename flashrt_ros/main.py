"""The main function that every node of this package shares: signals, spinning, an orderly end.

Exit status: 0 after SIGINT, SIGTERM or a requested end; 2 for a configuration error; 75 when the
device is lost (EX_TEMPFAIL: a supervisor starts the node anew, which captures and loads C0 again).
"""

from collections.abc import Callable
from collections.abc import Sequence
import os
import signal
import socket
import sys
import threading
from typing import Protocol

import rclpy
from rclpy.executors import ExternalShutdownException
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.signals import SignalHandlerOptions

from flashrt_core.errors import FlashrtError
from flashrt_ros.qos import use_large_message_profile

EXIT_OK = 0
EXIT_CONFIG = 2
EXIT_DEVICE_LOST = 75
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Why and with which exit status the process is to end; the first reason stands."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._wake: Callable[[], None] = lambda: None
        self.reason = ''
        self.exit_code = EXIT_OK

    def set(self, reason: str, exit_code: int = EXIT_OK) -> None:
        """Ask for the end; any thread."""
        if not self._event.is_set():
            self.reason, self.exit_code = reason, exit_code
            self._event.set()
        self._wake()

    def is_set(self) -> bool:
        """Whether the end was asked for."""
        return self._event.is_set()

    def on_set(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` with each request."""
        self._wake = wake


class StoppableNode(Protocol):
    """What ``run_node`` needs of a node besides rclpy's Node."""

    def stop(self, timeout_s: float) -> bool:
        """Publish the hold, wait for its acknowledgement, free everything; False when late."""
        ...


def listen_for_signals(stop: StopRequest) -> None:
    """Turn SIGINT and SIGTERM into a stop request, the second one into an immediate exit.

    Call on the main thread. The C handler writes to the pipe in whatever thread a signal lands in
    (numeric libraries start some at import), while the main thread may be waiting inside DDS.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    for number in _SIGNALS:
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

    def wait(pipe: socket.socket = writer) -> None:
        # The default of `pipe` keeps the writing end open as long as this thread lives.
        number = reader.recv(1)[0]
        stop.set(signal.Signals(number).name)
        number = reader.recv(1)[0]
        os._exit(128 + number)

    threading.Thread(target=wait, name='signals', daemon=True).start()


def run_node(
    make_node: Callable[[StopRequest], Node],
    argv: Sequence[str] | None = None,
    stop_timeout_s: float = 5.0,
) -> int:
    """Make a node, spin it until a stop request, end it in order; return the exit status.

    :param make_node: called after ``rclpy.init``; the node may itself set the stop request.
    :param stop_timeout_s: for the acknowledged hold and the teardown together.
    """
    stop = StopRequest()
    listen_for_signals(stop)
    use_large_message_profile()
    rclpy.init(args=list(sys.argv if argv is None else argv),
               signal_handler_options=SignalHandlerOptions.NO)
    executor = SingleThreadedExecutor()
    stop.on_set(executor.wake)
    try:
        node = make_node(stop)
    except FlashrtError as error:
        rclpy.logging.get_logger('flashrt_ros').fatal(f'[{error.code}] {error}')
        rclpy.shutdown()
        return EXIT_CONFIG
    executor.add_node(node)
    try:
        while not stop.is_set():
            executor.spin_once()
    except ExternalShutdownException:
        pass
    node.get_logger().info(f'ending: {stop.reason or "context shut down"}')
    ended = node.stop(stop_timeout_s)
    if not ended or stop.exit_code == EXIT_DEVICE_LOST:
        # A wedged device would block the destructors of its own libraries.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(stop.exit_code)
    executor.remove_node(node)
    node.destroy_node()
    executor.shutdown()
    rclpy.try_shutdown()
    return stop.exit_code
