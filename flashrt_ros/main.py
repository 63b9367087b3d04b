"""The main function that every node of this package shares: signals, spinning, an orderly end.

Exit status: 0 after SIGINT, SIGTERM or a requested end; 2 for a configuration error; 75 when the
device is lost (EX_TEMPFAIL: a supervisor starts the node anew, which captures and loads C0 again).
"""

from collections.abc import Callable
from collections.abc import Sequence
import os
from pathlib import Path
import signal
import socket
import sys
import threading
from typing import Protocol

import rclpy
from rclpy.exceptions import NameValidationException
from rclpy.exceptions import ParameterException
from rclpy.executors import ExternalShutdownException
from rclpy.executors import ShutdownException
from rclpy.executors import SingleThreadedExecutor
from rclpy.impl.implementation_singleton import rclpy_implementation
from rclpy.node import Node
from rclpy.signals import SignalHandlerOptions
from rclpy.utilities import remove_ros_args

from flashrt_core.errors import ConfigError
from flashrt_core.errors import FlashrtError
from flashrt_ros.config_files import parameter_files_for_others
from flashrt_ros.qos import use_large_message_profile
from flashrt_ros.ros_environment import check_domain

EXIT_OK = 0
EXIT_CONFIG = 2
EXIT_DEVICE_LOST = 75
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
USAGE = """usage: {name} [--ros-args [-p NAME:=VALUE] [--params-file FILE] [-r __ns:=/ROBOT] ...]

Every parameter, its range and unit: doc/parameters.md (executor), doc/planner_parameters.md,
config/tabletop.yaml (robot).
SIGINT or SIGTERM ends the node after an acknowledged hold."""
_REFUSED_BY_ROS = (
    rclpy_implementation.RCLError, rclpy_implementation.UnknownROSArgsError,
    rclpy_implementation.RCLInvalidROSArgsError, NameValidationException, ParameterException)


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
    # First: a signal between the two would be heard by nobody.
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    for number in _SIGNALS:
        signal.signal(number, lambda *_: None)

    def wait(pipe: socket.socket = writer) -> None:
        # The default of `pipe` keeps the writing end open as long as this thread lives.
        number = reader.recv(1)[0]
        stop.set(signal.Signals(number).name)
        number = reader.recv(1)[0]
        os._exit(128 + number)

    threading.Thread(target=wait, name='signals', daemon=True).start()


def refusal_text(error: Exception) -> str:
    """Return the sentence with which a start that ROS or this package refuses ends."""
    if isinstance(error, FlashrtError):
        return f'[{error.code}] {error}'
    reason = str(error).split(', at /')[0]
    return (f'[{ConfigError.code}] ROS refuses the start: {reason}; correct what follows '
            '--ros-args, the parameter files it names, or the ROS_* variables')


def run_node(
    make_node: Callable[[StopRequest], Node],
    argv: Sequence[str] | None = None,
    stop_timeout_s: float = 5.0,
) -> int:
    """Make a node, spin it until a stop request, end it in order; return the exit status.

    :param make_node: called after ``rclpy.init``; the node may itself set the stop request.
    :param stop_timeout_s: for the acknowledged hold and the teardown together.
    """
    return run_nodes(lambda stop: (make_node(stop),), argv, stop_timeout_s)


def run_nodes(
    make_nodes: Callable[[StopRequest], Sequence[Node]],
    argv: Sequence[str] | None = None,
    stop_timeout_s: float = 5.0,
) -> int:
    """Run several nodes in one process as ``run_node`` runs one.

    Each is spun by a thread of its own, the first one by the main thread, so that none delays
    another's callbacks. They end in the opposite order.
    """
    arguments = list(sys.argv if argv is None else argv)
    stop = StopRequest()
    listen_for_signals(stop)
    try:
        own = remove_ros_args(arguments)[1:]
        if {'-h', '--help'} & set(own):
            print(USAGE.format(name=Path(arguments[0]).name))
            return 0
        if own:
            raise ConfigError(f'argument {own[0]!r} is unknown; what a node takes follows '
                              '--ros-args, see --help')
        check_domain()
        use_large_message_profile()
        rclpy.init(args=arguments,
                   signal_handler_options=SignalHandlerOptions.NO)
        nodes = make_nodes(stop)
    except (FlashrtError, *_REFUSED_BY_ROS) as error:
        # Logging may be what failed.
        print(f'[FATAL] {refusal_text(error)}', file=sys.stderr, flush=True)
        rclpy.try_shutdown()
        return EXIT_CONFIG
    names = [node.get_fully_qualified_name() for node in nodes]
    for sentence in parameter_files_for_others(arguments, *names):
        nodes[0].get_logger().warning(sentence)
    executors = []
    for node in nodes:
        executors.append(SingleThreadedExecutor())
        executors[-1].add_node(node)
    # A task, since a wake alone lets no node out that has neither timer nor message to wait for.
    stop.on_set(lambda: [executor.create_task(_nothing) for executor in executors])
    # They end with the executors' shutdown: a node that ends may still wait for a callback, and
    # what it owes, the result of a goal, is sent from one.
    spinning = [_spun(executor) for executor in executors[1:]]
    _spin(executors[0], stop.is_set)
    nodes[0].get_logger().info(f'ending: {stop.reason or "context shut down"}')
    spinning.append(_spun(executors[0]))
    ended = all([node.stop(stop_timeout_s) for node in reversed(nodes)])
    if not ended or stop.exit_code == EXIT_DEVICE_LOST:
        # A wedged device would block the destructors of its own libraries.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(stop.exit_code)
    for executor in executors:
        _let_out(executor)
        executor.shutdown(timeout_sec=1.0)
    for thread in spinning:
        thread.join(1.0)
    for executor, node in zip(executors, nodes, strict=True):
        executor.remove_node(node)
        node.destroy_node()
    rclpy.try_shutdown()
    return stop.exit_code


def _nothing() -> None:
    pass


def _spun(executor: SingleThreadedExecutor) -> threading.Thread:
    """Return a thread that spins until the executor is shut down."""
    thread = threading.Thread(target=_spin, args=(executor, lambda: False), daemon=True)
    thread.start()
    return thread


def _let_out(executor: SingleThreadedExecutor) -> None:
    """Wait until every callback that can go on has done so; not on the spinning thread.

    A pass of the executor takes the newest task first, so between two of ours lies a whole one.
    """
    for _ in range(2):
        passed = threading.Event()
        executor.create_task(passed.set)
        if not passed.wait(1.0):
            return


def _spin(executor: SingleThreadedExecutor, ended: Callable[[], bool]) -> None:
    try:
        while not ended():
            executor.spin_once()
    except (ExternalShutdownException, ShutdownException):
        pass
