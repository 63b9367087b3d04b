"""What the doctor may look at: files, commands, environment, child processes; live or recorded.

Every check reads the machine through ``Machine`` alone, so a board's recording replays its report
on any computer (``doctor --record board.json``).
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
import json
import os
from pathlib import Path
import platform
import subprocess
import sys
import time
from typing import Any
from typing import Protocol

from flashrt_core.errors import ConfigError
from flashrt_ros.ros_environment import wheel_environment

RECORDED_ENV = (
    'ROS_DISTRO',
    'RMW_IMPLEMENTATION',
    'LD_LIBRARY_PATH',
    'FASTRTPS_DEFAULT_PROFILES_FILE',
    'PYTHONNOUSERSITE',
    'CONDA_PREFIX',
    'TRITON_PTXAS_BLACKWELL_PATH',
    'CUDA_VISIBLE_DEVICES',
    'ROS_DOMAIN_ID',
    'ROS_AUTOMATIC_DISCOVERY_RANGE',
    'ROS_SECURITY_ENABLE',
)


@dataclass(frozen=True)
class Interpreter:
    """The Python that runs the doctor."""

    version: tuple[int, int, int]
    executable: str
    prefix: str
    base_prefix: str
    machine: str  # x86_64, aarch64

    @property
    def in_venv(self) -> bool:
        """Whether a virtual environment is active."""
        return self.prefix != self.base_prefix


class Machine(Protocol):
    """Seam between checks and the machine they look at."""

    interpreter: Interpreter
    env: Mapping[str, str]

    def read(self, path: str) -> str | None:
        """Text of a file, NULs removed, or None."""

    def listing(self, folder: str) -> list[str]:
        """Names in a folder, sorted; empty when there is none."""

    def exists(self, path: str) -> bool:
        """Whether a path exists."""

    def command(self, *argv: str) -> str | None:
        """Output of a command that exits 0 within 5 s, else None."""

    def numbers(self) -> Mapping[str, float]:
        """Disk and limits: ``disk_free_gb``, ``shm_gb``, ``rtprio``, ``memlock``, ``cores``."""

    def probe(self, name: str, timeout_s: float) -> dict[str, Any]:
        """Answer of a probe child; ``{'error': ...}`` when it failed or ran past its time."""


class LiveMachine:
    """This computer. All probes together end before ``budget_s``."""

    def __init__(self, budget_s: float = 58.0, python: str = sys.executable) -> None:
        self.interpreter = Interpreter(
            version=sys.version_info[:3],
            executable=python,
            prefix=sys.prefix,
            base_prefix=sys.base_prefix,
            machine=platform.machine(),
        )
        self.env: Mapping[str, str] = {k: os.environ[k] for k in RECORDED_ENV if k in os.environ}
        self._deadline = time.monotonic() + budget_s

    def read(self, path: str) -> str | None:
        try:
            return Path(path).read_text(errors='replace').replace('\0', '')
        except OSError:
            return None

    def listing(self, folder: str) -> list[str]:
        try:
            return sorted(os.listdir(folder))
        except OSError:
            return []

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def command(self, *argv: str) -> str | None:
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=5, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout if done.returncode == 0 else None

    def numbers(self) -> Mapping[str, float]:
        import resource

        found: dict[str, float] = {'cores': float(len(os.sched_getaffinity(0)))}
        for key, path in (('disk_free_gb', os.path.expanduser('~')), ('shm_gb', '/dev/shm')):
            try:
                stat = os.statvfs(path)
            except OSError:
                continue
            blocks = stat.f_bavail if key == 'disk_free_gb' else stat.f_blocks
            found[key] = round(blocks * stat.f_frsize / 1e9, 2)
        found['rtprio'] = float(resource.getrlimit(resource.RLIMIT_RTPRIO)[0])
        found['memlock'] = float(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
        return found

    def probe(self, name: str, timeout_s: float) -> dict[str, Any]:
        limit = min(timeout_s, self._deadline - time.monotonic())
        if limit < 1.0:
            return {'error': 'not run: the time of the doctor is used up'}
        command = [self.interpreter.executable, '-m', 'flashrt_ros.doctor.probes', name]
        child = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            env=wheel_environment(),
            start_new_session=True,
        )
        try:
            out, err = child.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            _kill_group(child)
            return {'error': f'no answer within {limit:.0f} s'}
        except KeyboardInterrupt:
            _kill_group(child)  # which the terminal's Ctrl-C does not reach
            raise
        lines = out.strip().splitlines()
        if child.returncode == 0 and lines:
            try:
                return dict(json.loads(lines[-1]))
            except ValueError:
                pass
        last = err.strip().splitlines()[-1:] or [f'exit code {child.returncode}']
        return {'error': last[0][:300]}


def _kill_group(child: subprocess.Popen[str]) -> None:
    try:
        os.killpg(child.pid, 9)
    except ProcessLookupError:
        pass
    try:
        child.communicate(timeout=2)
    except subprocess.TimeoutExpired:
        # A process stuck in the driver cannot even be killed; leave it and go on.
        pass


@dataclass
class Recording:
    """A machine as a JSON file: what was asked and what it answered."""

    interpreter: Interpreter
    env: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    folders: dict[str, list[str]] = field(default_factory=dict)
    commands: dict[str, str] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    probes: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def load(cls, path: str | Path) -> Recording:
        """Read one.

        :raises ConfigError: when it cannot be read, or is no recording.
        """
        try:
            data = json.loads(Path(path).read_text(encoding='utf-8'))
            interpreter = data.pop('interpreter')
            interpreter['version'] = tuple(interpreter['version'])
            if not all(isinstance(value, dict) for value in data.values()):
                raise ValueError('its parts are no mappings')
            return cls(interpreter=Interpreter(**interpreter), **data)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f'recording {path} cannot be read ({error}); give a file that '
                              'doctor --record has written') from error

    def save(self, path: str | Path) -> None:
        """Write it, keys sorted."""
        data = {**self.__dict__, 'interpreter': self.interpreter.__dict__}
        Path(path).write_text(json.dumps(data, indent=1, sort_keys=True) + '\n')

    def read(self, path: str) -> str | None:
        return self.files.get(path)

    def listing(self, folder: str) -> list[str]:
        return list(self.folders.get(folder, []))

    def exists(self, path: str) -> bool:
        parent, name = os.path.split(path)
        return path in self.files or path in self.folders or name in self.folders.get(parent, [])

    def command(self, *argv: str) -> str | None:
        return self.commands.get(' '.join(argv))

    def numbers(self) -> Mapping[str, float]:
        return self.limits

    def probe(self, name: str, timeout_s: float) -> dict[str, Any]:
        return self.probes.get(name, {'error': f'probe {name} was not recorded'})


class Recorder:
    """Passes every question on to ``machine`` and keeps the answers."""

    def __init__(self, machine: LiveMachine) -> None:
        self._machine = machine
        self.interpreter = machine.interpreter
        self.env = machine.env
        self.recording = Recording(machine.interpreter, dict(machine.env))

    def read(self, path: str) -> str | None:
        text = self._machine.read(path)
        if text is not None:
            self.recording.files[path] = text
        return text

    def listing(self, folder: str) -> list[str]:
        names = self._machine.listing(folder)
        if names:
            self.recording.folders[folder] = names
        return names

    def exists(self, path: str) -> bool:
        found = self._machine.exists(path)
        if found and not self.recording.exists(path):
            parent, name = os.path.split(path)
            self.recording.folders.setdefault(parent, []).append(name)
        return found

    def command(self, *argv: str) -> str | None:
        text = self._machine.command(*argv)
        if text is not None:
            self.recording.commands[' '.join(argv)] = text
        return text

    def numbers(self) -> Mapping[str, float]:
        self.recording.limits = dict(self._machine.numbers())
        return self.recording.limits

    def probe(self, name: str, timeout_s: float) -> dict[str, Any]:
        answer = self._machine.probe(name, timeout_s)
        self.recording.probes[name] = answer
        return answer


def version_tuple(text: str | None, length: int = 2) -> tuple[int, ...]:
    """Leading numbers of a version text: ``'2.13.0+cpu'`` -> ``(2, 13)``; zeros where none."""
    numbers: Sequence[int] = []
    for part in (text or '').split('+')[0].split('.'):
        digits = ''.join(c for c in part if c.isdigit())
        if not digits:
            break
        numbers = [*numbers, int(digits)]
    return tuple([*numbers, *([0] * length)][:length])
