"""Start this package's nodes as separate processes: own ROS domain, own logs, no orphans.

Used by the demo, the benches and the end-to-end tests, because launch is not to be had as a wheel.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import ctypes
from dataclasses import dataclass
from dataclasses import field
import json
import os
from pathlib import Path
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from types import TracebackType
from typing import Any
from typing import TYPE_CHECKING
from typing import TypeVar

from flashrt_core.errors import ConfigError
from flashrt_core.errors import FlashrtError
from flashrt_ros.ros_environment import DomainLease
from flashrt_ros.ros_environment import wheel_environment

if TYPE_CHECKING:
    from rclpy.context import Context

T = TypeVar('T')

MODULES = {
    'executor': 'flashrt_ros.executor_node',
    'tabletop': 'flashrt_ros.tabletop_node',
    'planner': 'flashrt_ros.planner_node',
    'bringup': 'flashrt_ros.bringup',
}
TAIL_LINES = 25
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
_ANSI = re.compile(r'\x1b\[[0-9;]*m')


class ProcessError(FlashrtError):
    """A child process could not do what was asked."""

    code = 'process'


class ProcessDied(ProcessError):
    """A child ended by itself; the message carries the end of its log."""

    code = 'process_died'


class WaitTimeout(ProcessError):
    """A condition did not come true in time; the message carries the end of every log."""

    code = 'wait_timeout'


def yaml_value(value: object) -> str:
    """Write a parameter value so that rcl reads back the same type (a JSON value is YAML).

    :raises ConfigError: for a value that no ROS parameter holds.
    """
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return f'{value:.1f}'
    if isinstance(value, (bool, int, float, str)):
        return json.dumps(value)
    if isinstance(value, Sequence):
        return '[' + ', '.join(yaml_value(v) for v in value) + ']'
    raise ConfigError(f'parameter value {value!r} ({type(value).__name__}) is not a ROS type')


@dataclass
class Process:
    """One child; ``expected_end`` is set by whoever ends it, so a death by itself stands out."""

    name: str
    popen: subprocess.Popen[bytes]
    log_path: Path
    command: tuple[str, ...]
    started: float = field(default_factory=time.monotonic)
    expected_end: bool = False

    @property
    def pid(self) -> int:
        """Process id."""
        return self.popen.pid

    @property
    def exit_code(self) -> int | None:
        """None while running; negative signal number when killed by a signal."""
        return self.popen.poll()

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self.popen.poll() is None

    def log(self) -> str:
        """All it has written so far, colours removed."""
        try:
            return _ANSI.sub('', self.log_path.read_text(errors='replace'))
        except OSError:
            return ''

    def tail(self, lines: int = TAIL_LINES) -> str:
        """Last lines of its log, indented for an error message."""
        found = self.log().splitlines()[-lines:]
        return '\n'.join(f'    {line}' for line in found) or '    (nothing written)'

    def send(self, number: int) -> None:
        """Send a signal that is not meant to end it."""
        if self.running:
            self.popen.send_signal(number)

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """Ask it to end; a later exit is no error."""
        self.expected_end = True
        self.send(number)

    def kill(self) -> None:
        """SIGKILL to it and to all it started."""
        self.expected_end = True
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def wait(self, timeout_s: float) -> int | None:
        """Exit code, or None when it still runs after ``timeout_s``."""
        try:
            return self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None


class ProcessGroup:
    """Children that share one ROS domain; leaving the block ends them all.

    ::

        with ProcessGroup(log_dir=out / 'log') as group:
            group.start('tabletop', namespace='arm', params={'use_sim_time': True})
            group.wait_for(lambda: node.seen, 20, 'the first joint state')

    Discovery stays on this host. Start children from a thread that lives as long as they do: the
    kernel sends the parent-death signal when the *thread* that forked ends.
    """

    def __init__(
        self,
        log_dir: str | Path | None = None,
        *,
        domain_id: int | None = None,
        env: Mapping[str, str] | None = None,
        python: str = sys.executable,
        stop_timeout_s: float = 8.0,
    ) -> None:
        self._temporary = None
        if log_dir is None:
            self._temporary = tempfile.TemporaryDirectory(prefix='flashrt_ros_log_')
            log_dir = self._temporary.name
        self.log_dir = Path(log_dir)
        self.python = python
        self.stop_timeout_s = stop_timeout_s
        self.processes: list[Process] = []
        self._lease = DomainLease(domain_id)
        self.env = wheel_environment()
        self.env.update(
            ROS_DOMAIN_ID=str(self.domain_id),
            ROS_AUTOMATIC_DISCOVERY_RANGE='LOCALHOST',
            ROS_LOG_DIR=str(self.log_dir / 'ros'),
            RCUTILS_COLORIZED_OUTPUT='0',
            RCUTILS_LOGGING_BUFFERED_STREAM='0',
            PYTHONUNBUFFERED='1',
            **(env or {}),
        )
        self.env.pop('ROS_LOCALHOST_ONLY', None)

    @property
    def domain_id(self) -> int:
        """ROS domain of every child."""
        return self._lease.id

    def __enter__(self) -> ProcessGroup:
        self.log_dir.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def context(self) -> Context:
        """Give an initialised rclpy context on this group's domain for nodes of the parent itself.

        The caller shuts it down. Signal handlers of the parent stay its own.
        """
        import rclpy
        from rclpy.context import Context
        from rclpy.signals import SignalHandlerOptions

        context = Context()
        keys = ('ROS_AUTOMATIC_DISCOVERY_RANGE', 'ROS_LOG_DIR')
        held = {key: os.environ.get(key) for key in keys}
        os.environ.update({key: self.env[key] for key in keys})
        try:
            rclpy.init(
                context=context,
                domain_id=self.domain_id,
                signal_handler_options=SignalHandlerOptions.NO,
            )
        finally:
            for key, old in held.items():
                if old is None:
                    os.environ.pop(key, None)
                else:
                    os.environ[key] = old
        return context

    def start(
        self,
        executable: str,
        *,
        name: str | None = None,
        namespace: str = '',
        params: Mapping[str, object] | None = None,
        params_files: Sequence[str | Path] = (),
        remaps: Mapping[str, str] | None = None,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> Process:
        """Start a node (``executor``, ``planner``, ...) or any module given with dots.

        Parameter files come first, then ``params``; ``args`` go before ``--ros-args``.

        :raises ProcessError: when the interpreter or the prefix command does not exist.
        """
        module = executable if '.' in executable else MODULES.get(executable)
        if module is None:
            raise ProcessError(
                f'executable {executable!r} is unknown; give one of {sorted(MODULES)} or a module '
                'path with dots'
            )
        command = [*prefix, self.python, '-m', module, *args]
        ros: list[str] = []
        if namespace:
            ros += ['-r', f'__ns:=/{namespace.strip("/")}']
        for old, new in (remaps or {}).items():
            ros += ['-r', f'{old}:={new}']
        for path in params_files:
            ros += ['--params-file', str(path)]
        for key, value in (params or {}).items():
            ros += ['-p', f'{key}:={yaml_value(value)}']
        if ros:
            command += ['--ros-args', *ros]
        return self.start_command(command, name=name or executable.rsplit('.', 1)[-1], env=env)

    def start_command(
        self, command: Sequence[str], *, name: str, env: Mapping[str, str] | None = None
    ) -> Process:
        """Start any command in the group's environment, its output in ``<log_dir>/<name>.log``."""
        taken = {p.name for p in self.processes}
        unique, count = name, 1
        while unique in taken:
            count += 1
            unique = f'{name}_{count}'
        self.log_dir.mkdir(parents=True, exist_ok=True)
        log_path = self.log_dir / f'{unique}.log'
        parent = os.getpid()

        def tie_to_parent() -> None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)

        with open(log_path, 'wb') as log:
            log.write(f'$ {shlex.join(command)}\n'.encode())
            log.flush()
            try:
                popen = subprocess.Popen(
                    list(command),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**self.env, **(env or {})},
                    start_new_session=True,
                    preexec_fn=tie_to_parent,
                )
            except OSError as err:
                raise ProcessError(
                    f'process {unique!r} did not start ({err}); command: {shlex.join(command)}'
                ) from err
        process = Process(unique, popen, log_path, tuple(command))
        self.processes.append(process)
        return process

    def __getitem__(self, name: str) -> Process:
        for process in self.processes:
            if process.name == name:
                return process
        raise ProcessError(f'no process {name!r}; started: {[p.name for p in self.processes]}')

    def check(self) -> None:
        """Raise ``ProcessDied`` for a child that has ended by itself."""
        for process in self.processes:
            code = process.exit_code
            if code is not None and not process.expected_end:
                raise ProcessDied(
                    f'process {process.name!r} ended with {_describe_exit(code)} after '
                    f'{time.monotonic() - process.started:.1f} s; the end of its log '
                    f'({process.log_path}):\n{process.tail()}'
                )

    def wait_for(
        self,
        condition: Callable[[], T],
        timeout_s: float,
        what: str,
        *,
        poll_s: float = 0.005,
    ) -> T:
        """Poll ``condition`` until it is truthy and return its value.

        :raises ProcessDied: as soon as a child ends meanwhile.
        :raises WaitTimeout: after ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        pause = threading.Event()
        while True:
            value = condition()
            if value:
                return value
            self.check()
            if time.monotonic() > deadline:
                raise self.timeout_error(timeout_s, what)
            pause.wait(poll_s)

    def timeout_error(self, timeout_s: float, what: str) -> WaitTimeout:
        """Make the error of a wait in vain, with the end of every log."""
        logs = [f'  {p.name} ({p.log_path}):\n{p.tail(12)}' for p in self.processes]
        told = ('the logs end with\n' + '\n'.join(logs) if logs else
                'nothing was started here: see that the nodes run, on ROS domain '
                f'{self.domain_id} as this does')
        return WaitTimeout(f'waited {timeout_s:g} s in vain for {what}; {told}')

    def stop(self, timeout_s: float | None = None) -> dict[str, int]:
        """Interrupt the children, last started first, then kill; exit codes by name."""
        limit = self.stop_timeout_s if timeout_s is None else timeout_s
        for process in reversed(self.processes):
            process.interrupt()
        deadline = time.monotonic() + limit
        codes: dict[str, int] = {}
        for process in reversed(self.processes):
            code = process.wait(max(0.0, deadline - time.monotonic()))
            if code is None:
                process.kill()
                code = process.popen.wait()
            codes[process.name] = code
        self._lease.close()
        return codes

    def describe(self) -> list[dict[str, Any]]:
        """Name, pid, command and exit code of each child, for reports."""
        return [
            {'name': p.name, 'pid': p.pid, 'command': shlex.join(p.command), 'exit': p.exit_code}
            for p in self.processes
        ]


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f'exit code {code}'
    try:
        return f'signal {signal.Signals(-code).name}'
    except ValueError:
        return f'signal {-code}'
