"""Where ROS 2 is on this machine and which of its domains is free."""

from __future__ import annotations

from collections.abc import Mapping
import fcntl
import importlib.util
import os
from pathlib import Path
import socket
import sys
import tempfile
from typing import IO

from flashrt_core.errors import ConfigError
from flashrt_core.errors import FlashrtError

SOURCE_ROOT = Path(__file__).resolve().parent.parent
# Above 101 the ports of a domain lie in Linux's ephemeral range, where anybody may hold one.
DOMAINS = range(1, 101)
PARTICIPANTS = 8  # of a domain, whose ports are asked for


class NoFreeDomain(FlashrtError):
    """Every ROS domain in the range is in use on this machine."""

    code = 'no_free_domain'


class RosMissing(FlashrtError):
    """rclpy cannot be imported here."""

    code = 'ros_missing'


def wheel_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Copy ``environ`` so that rclpy finds its libraries and this package is importable.

    Covers the three ways to install ROS: an apt prefix (nothing to add), wheels in a venv (their
    own .pth does it) and wheels in a plain ``--target`` folder, where no .pth is read.
    """
    env = dict(os.environ if environ is None else environ)
    paths = [p for p in env.get('PYTHONPATH', '').split(os.pathsep) if p]
    if str(SOURCE_ROOT) not in paths:
        env['PYTHONPATH'] = os.pathsep.join([str(SOURCE_ROOT), *paths])
    spec = importlib.util.find_spec('rclpy')
    if spec is None or spec.origin is None:
        return env
    site = Path(spec.origin).absolute().parent.parent
    libs = sorted(str(p) for p in site.glob('ros_*.libs'))
    if not libs:
        return env
    prefixes = [site, *site.parents[2:3], Path(sys.prefix)]
    prefix = next((p for p in prefixes if (p / 'lib' / 'librcl.so').exists()), Path(sys.prefix))
    wanted = [*libs, str(prefix / 'lib')]
    held = [p for p in env.get('LD_LIBRARY_PATH', '').split(os.pathsep) if p]
    env['LD_LIBRARY_PATH'] = os.pathsep.join([*held, *(p for p in wanted if p not in held)])
    env.setdefault('AMENT_PREFIX_PATH', str(prefix))
    # The wheels' .pth would otherwise start every child a second time to set the same paths.
    env['_ROS_WHEELS_BOOTSTRAP_COMPLETE'] = '1'
    return env


def require_ros() -> None:
    """Import rclpy, starting this process anew with the wheels' library path when it needs one.

    :raises RosMissing: when ROS 2 is not installed for this interpreter, or our messages are not.
    """
    try:
        import rclpy  # noqa: F401

        _require_interfaces()
        return
    except ImportError as err:
        cause = str(err).splitlines()[0]
    env = wheel_environment()
    guard = 'FLASHRT_ROS_REEXEC'
    if env.get('LD_LIBRARY_PATH') != os.environ.get('LD_LIBRARY_PATH') and guard not in os.environ:
        sys.stdout.flush()
        os.execve(sys.executable, sys.orig_argv, {**env, guard: '1'})
    raise RosMissing(
        f'rclpy cannot be imported by {sys.executable} ({cause}); on a laptop run `make demo` '
        'once, on a robot `source /opt/ros/jazzy/setup.bash` before the venv is activated'
    )


def _require_interfaces() -> None:
    if importlib.util.find_spec('flashrt_ros.msg') is None:
        raise RosMissing(
            'the messages of flashrt_ros are not built for this interpreter '
            f'({sys.executable}); run `make build` here, or colcon build and source its '
            'install/setup.bash')


def check_domain() -> None:
    """Check ROS_DOMAIN_ID, with which Fast DDS would end the process without a word.

    :raises ConfigError: naming the value and the range.
    """
    text = os.environ.get('ROS_DOMAIN_ID', '') or '0'
    if not text.isdecimal() or int(text) > 232:
        raise ConfigError(
            f'ROS_DOMAIN_ID is {text!r:.40}; give 0 to 232, on Linux best 0 to 101')


class DomainLease:
    """A ROS domain id that no other lease of this user and no live participant here uses."""

    def __init__(self, domain_id: int | None = None) -> None:
        """Take ``domain_id``, or the first free one.

        :raises ConfigError: for an id outside 0..232.
        :raises NoFreeDomain: when the whole range is taken.
        """
        self._lock: IO[str] | None = None
        if domain_id is not None:
            if not 0 <= domain_id <= 232:
                raise ConfigError(f'ROS domain id {domain_id} is outside 0..232; choose another')
            self.id = domain_id
            return
        folder = Path(tempfile.gettempdir()) / f'flashrt_ros_domains_{os.getuid()}'
        folder.mkdir(mode=0o700, exist_ok=True)
        offset = os.getpid() * 7
        for i in range(len(DOMAINS)):
            candidate = DOMAINS[(offset + i) % len(DOMAINS)]
            lock = open(folder / f'{candidate}.lock', 'w')
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                lock.close()
                continue
            if domain_in_use(candidate):
                lock.close()
                continue
            self._lock, self.id = lock, candidate
            return
        raise NoFreeDomain(
            f'all ROS domains {DOMAINS.start}..{DOMAINS.stop - 1} are in use on this machine; '
            'end the ROS processes you no longer need or give a domain id'
        )

    def close(self) -> None:
        """Let others have the domain."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def domain_in_use(domain_id: int) -> bool:
    """Say whether a DDS participant of this machine already listens on ``domain_id``.

    Asks for the metatraffic ports of the first participants (RTPS 2.3, section 9.6.1.1): the one
    that came first may have ended while another still talks.
    """
    for participant in range(PARTICIPANTS):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.bind(('', 7400 + 250 * domain_id + 10 + 2 * participant))
            except OSError:
                return True
    return False
