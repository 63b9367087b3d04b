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

from flashrt_core.tabletop import CONTROL_PERIOD_S


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
    restore_us: float = 0.0
    bytes: int = 0


@dataclass
class Subgoal:
    """One subgoal from its writing to its end; places are steps of the episode, or seconds."""

    sequence: int
    text: str
    writer: str  # planner, conductor
    written: float
    interrupt: bool = False
    latched: float | None = None  # by the tick of that place; None: by none
    ended: float | None = None
    outcome: str = 'open'  # done, superseded, timed out, open
    holds: bool | None = None  # whether the world agrees with a policy that says done


@dataclass
class PlanMade:
    """One goal of ~/plan. Times in microseconds."""

    episode: int
    instruction: str
    scene: str
    at: float  # step, or seconds in real time
    code: str = ''  # of its result
    subgoals: list[str] = field(default_factory=list)
    replans: int = 0
    capsule_hit: bool = False
    context_tokens: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    restore_us: float = 0.0
    append_us: float = 0.0
    ttft_us: float = 0.0
    decode_us: float = 0.0

    def take(self, result: Any) -> None:
        """Take over what the action's result says."""
        self.code, self.subgoals = result.code, list(result.subgoals)
        self.replans, self.capsule_hit = int(result.replans), bool(result.capsule_hit)
        for name in ('context_tokens', 'prompt_tokens', 'tokens'):
            setattr(self, name, int(getattr(result, name)))
        for name in ('restore_us', 'append_us', 'ttft_us', 'decode_us'):
            setattr(self, name, float(getattr(result, name)))

    @property
    def tokens_per_s(self) -> float:
        """Of the decode behind the first token; NaN where there is none."""
        behind = self.tokens - 1
        return behind / self.decode_us * 1e6 if behind > 0 and self.decode_us else float('nan')


@dataclass
class Episode:
    """One episode of the run."""

    title: str
    driver: str  # policy, expert
    seed: int
    task: str  # the instruction
    steps: int = 0
    ticks: int = 0
    solved: bool = False
    began_s: float = 0.0
    ended_s: float = 0.0
    epochs: list[int] = field(default_factory=list)
    subgoals: list[Subgoal] = field(default_factory=list)
    marks: list[tuple[float, str]] = field(default_factory=list)  # place, what happened there
    note: str = ''
    frame_times_s: list[float] = field(default_factory=list)  # of the strip, since the begin
    strip_png: bytes = b''

    @property
    def real_time_factor(self) -> float:
        """Seconds of the robot's time in one second of the clock on the wall, plans included."""
        wall = self.ended_s - self.began_s
        return self.steps * CONTROL_PERIOD_S / wall if wall > 0 else float('nan')


@dataclass
class Comparison:
    """An episode and the same again: digests of all that went in and came out, by name."""

    first: str
    again: str
    rows: list[tuple[str, int, str, str]] = field(default_factory=list)  # what, count, digests

    @property
    def equal(self) -> bool:
        """Whether there is something to compare, and no digest differs."""
        return bool(self.rows) and all(
            count > 0 and before == after for _, count, before, after in self.rows)


@dataclass
class RollbackProof:
    """Rolled back twice on the same observation: are the candidates the same bits?"""

    capsule: str
    candidates: int
    first_epoch: int
    second_epoch: int
    first_digest: str  # BLAKE2b over the float32 bytes of all candidates
    second_digest: str

    @property
    def equal(self) -> bool:
        """Same bits in a later epoch."""
        return (self.candidates > 0 and self.second_epoch > self.first_epoch
                and self.first_digest == self.second_digest)


@dataclass
class ForkResult:
    """Branches of one capsule on one observation."""

    capsule: str
    scores: list[float]
    spread: float
    selected: int
    distinct: int  # different chunks among the branches
    chunks: list[list[list[float]]] = field(default_factory=list)  # [branch][step][joint]
    joint_names: list[str] = field(default_factory=list)
    units: list[str] = field(default_factory=list)  # of the joints: rad, m or ratio


@dataclass
class Interrupt:
    """One priority subgoal in real time; milliseconds as the conductor saw them."""

    sequence: int
    text: str
    to_reply_ms: float  # from the call to the executor's answer
    to_command_ms: float  # from the call to the first command after the new goal's first chunk


@dataclass
class RealTime:
    """Samples of the real-time episode."""

    period_ms: float
    seconds: float = 0.0
    arrival_gap_ms: list[float] = field(default_factory=list)  # between commands at the robot side
    latency_ms: list[float] = field(default_factory=list)  # image stamp to command, ROS time
    latch_ms: list[float] = field(default_factory=list)  # subgoal written to chunk in play
    interrupts: list[Interrupt] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)

    def latencies(self) -> list[tuple[str, list[float]]]:
        """Return name and samples, in milliseconds, of all that was waited for."""
        return [
            ('image stamp to chunk', self.latency_ms),
            ('subgoal written to its first chunk', self.latch_ms),
            ('interrupt: call to reply', [i.to_reply_ms for i in self.interrupts]),
            ('interrupt: call to first command of the new goal',
             [i.to_command_ms for i in self.interrupts]),
        ]


@dataclass
class Capsule:
    """A capsule held at the end."""

    owner: str  # executor, planner
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
    planner: str = ''
    untrained: str = ''  # which of the two have random weights
    device: str = ''
    domain_id: int = 0
    quick: bool = False
    seconds: float = 0.0
    machine: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    startup: dict[str, float] = field(default_factory=dict)  # seconds by phase
    episodes: list[Episode] = field(default_factory=list)
    plans: list[PlanMade] = field(default_factory=list)
    verbs: list[VerbCall] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    proofs: list[RollbackProof] = field(default_factory=list)
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
