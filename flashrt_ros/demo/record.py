"""What a run of the demo leaves behind: plain data that the report draws and JSON keeps."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from dataclasses import field
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass
class VerbCall:
    """One capsule verb as the demo saw it. Times in microseconds."""

    verb: str  # reset, snapshot, restore, rollback, fork
    capsule: str
    episode: int
    epoch: int  # after the call
    at_s: float  # since the start of the run
    round_trip_us: float
    service_us: float  # duration_us of the reply
    restore_us: float = 0.0  # the copies alone; 0 where none were made
    bytes: int = 0


@dataclass
class Episode:
    """One episode of the run."""

    title: str
    driver: str  # policy, expert
    seed: int
    task: str
    steps: int = 0
    ticks: int = 0
    solved: bool = False
    began_s: float = 0.0
    ended_s: float = 0.0
    epochs: list[int] = field(default_factory=list)
    note: str = ''
    strip_png: bytes = b''


@dataclass
class ReplayProof:
    """Rollback, same observations again: are the chunks the same bits?"""

    capsule: str
    ticks: int
    first_epoch: int
    second_epoch: int
    first_digest: str  # BLAKE2b over the float32 bytes of all chunks
    second_digest: str
    inputs_equal: bool  # digests of the observations in both runs

    @property
    def equal(self) -> bool:
        """Same inputs, same bits, later epoch."""
        same = self.inputs_equal and self.first_digest == self.second_digest
        return same and self.ticks > 0 and self.second_epoch > self.first_epoch


@dataclass
class ForkResult:
    """Branches of one capsule on one observation."""

    capsule: str
    seeds: list[int]
    scores: list[float]
    spread: float
    selected: int
    distinct: int  # different chunks among the branches
    chunks: list[list[list[float]]] = field(default_factory=list)  # [branch][step][joint]
    joint_names: list[str] = field(default_factory=list)


@dataclass
class RealTime:
    """Samples of the real-time episode."""

    period_ms: float
    seconds: float = 0.0
    arrival_gap_ms: list[float] = field(default_factory=list)  # between commands at the robot side
    latency_ms: list[float] = field(default_factory=list)  # image stamp to command, ROS time
    inference_ms: list[float] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)


@dataclass
class Capsule:
    """A capsule held at the end."""

    id: str
    label: str
    tier: str
    parent: str
    position: int
    bytes: int
    pinned: bool


@dataclass
class Run:
    """The whole run."""

    started: str
    command: str
    policy: str = ''
    device: str = ''
    trained: bool = False
    domain_id: int = 0
    quick: bool = False
    seconds: float = 0.0
    machine: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    startup: dict[str, float] = field(default_factory=dict)  # seconds by phase
    episodes: list[Episode] = field(default_factory=list)
    verbs: list[VerbCall] = field(default_factory=list)
    proofs: list[ReplayProof] = field(default_factory=list)
    forks: list[ForkResult] = field(default_factory=list)
    capsules: list[Capsule] = field(default_factory=list)
    real_time: RealTime | None = None
    processes: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write all but the pictures as JSON."""

        def plain(value: object) -> object:
            return None if isinstance(value, bytes) else str(value)

        data = dataclasses.asdict(self)
        for episode in data['episodes']:
            episode.pop('strip_png')
        path.write_text(json.dumps(data, indent=1, default=plain) + '\n')


def percentile(values: list[float], percent: float) -> float:
    """Nearest-rank percentile; NaN for no values."""
    if not values:
        return float('nan')
    ordered = sorted(values)
    rank = max(1, int(np.ceil(percent / 100.0 * len(ordered))))
    return ordered[min(rank, len(ordered)) - 1]


def spread_of(chunks: list[NDArray[np.float32]]) -> int:
    """Count the different ones among arrays, by their bytes."""
    return len({chunk.tobytes() for chunk in chunks})
