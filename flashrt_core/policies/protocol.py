"""What a policy family promises: ports, the input and output of a tick, the session.

The ROS side configures itself from ``Session.ports``; it knows no family by name.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from dataclasses import field
from enum import StrEnum
from typing import Any
from typing import Protocol
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from flashrt_core.capsule import Boundary
    from flashrt_core.policies.embeddings import Embedding
    from flashrt_core.policies.text import Tokenizer
    from flashrt_core.runtime import Backend
    from flashrt_core.runtime import BufferSet
    from flashrt_core.runtime import BufferSpec
    from flashrt_core.runtime import Lane

Progress = Callable[[str, float], None]
GUIDANCE_LIMIT = 100.0  # of TickInput.guidance


class Modality(StrEnum):
    """What a port carries."""

    IMAGE = 'image'
    STATE = 'state'
    TEXT = 'text'
    SUBGOAL = 'subgoal'
    SUBGOAL_EMBEDDING = 'subgoal_embedding'
    ACTION = 'action'
    NOISE = 'noise'
    GUIDANCE = 'guidance'


@dataclass(frozen=True)
class PortSpec:
    """One input or output of a policy; ``shape`` is without the row axis.

    ``name`` of an image port is the view's name (``top``), the key of ``TickInput.images``.
    """

    name: str
    modality: Modality
    dtype: str
    shape: tuple[int, ...]
    unit: str


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that a session allocates; graphs and workspaces come on top.

    ``constants``: weights and tables. ``buffers``: the rest on the device. ``pinned``: in host
    memory, which is the device's own where the two are one.
    """

    constants: int
    buffers: int
    pinned: int

    @classmethod
    def of(cls, specs: Iterable[BufferSpec], rows: int) -> MemoryNeed:
        """Add up the buffers of a session with so many rows."""
        sizes = {'constants': 0, 'buffers': 0, 'pinned': 0}
        for spec in specs:
            part = 'constants' if spec.role == 'constant' else 'buffers'
            sizes['pinned' if spec.host else part] += spec.row_nbytes * (rows if spec.rows else 1)
        return cls(**sizes)


class Frame(Protocol):
    """Which camera frame an image is: two of one stamp and one digest hold the same pixels.

    ``stamp_ns``: when it was taken. ``digest``: of the image as the tick gives it; read where the
    stamps are equal and no sooner, so it may be computed then.
    """

    @property
    def stamp_ns(self) -> int: ...

    @property
    def digest(self) -> int: ...


@dataclass(frozen=True)
class SubgoalWrite:
    """One write into the subgoal slot: token ids and the planner's sequence number.

    ``embedding``: what the policy reads in the tokens' place, row by row; the tokens are then kept
    for the record alone. Only for a session with a port of that modality.
    """

    sequence: int
    tokens: Sequence[int]
    embedding: Embedding | None = None


@dataclass(frozen=True)
class TickInput:
    """All that a tick depends on besides the session's state.

    ``images``: view -> uint8 [H, W, 3] RGB at the port's size; an absent view or None is masked.
    ``state``: float32 [state_dim], joints in physical units.
    ``steps_executed``: control steps of the previous chunk played since it came into play, up to
    this observation; negative where it came sooner than its tick's ``delay_steps`` said.
    ``delay_steps``: control steps that will pass before this tick's chunk comes into play.
    ``subgoal``, ``prompt``, ``seed``: written into the state by this tick; None keeps what is
    latched. ``seed`` and both texts reach every row evaluated.
    ``noise``: float32 [rows, horizon, action_width], replaces the generated noise (parity tests).
    ``best_of``: candidates of row 0 evaluated together, of which one is kept (``rows`` stays 1).
    ``guidance``: how strongly prompt and subgoal steer, 1 as trained, above 1 more; written into
    the state, None keeps what is there. Only for a session with a port of that modality.
    ``frames``: view -> which frame its image is. A session that reuses vision results does not
    encode a frame that it encoded last; a view without a frame is always encoded.
    The arrays are read when the tick starts: do not change them before its future is done.
    """

    images: Mapping[str, NDArray[np.uint8] | None]
    state: NDArray[np.float32]
    steps_executed: int = 0
    delay_steps: int = 0
    subgoal: SubgoalWrite | None = None
    prompt: Sequence[int] | None = None
    seed: int | None = None
    noise: NDArray[np.float32] | None = None
    rows: int = 1
    best_of: int = 1
    frames: Mapping[str, Frame] = field(default_factory=dict)
    guidance: float | None = None


@dataclass(frozen=True)
class Candidates:
    """What a tick chose from, ``TickInput.best_of`` chunks of one observation.

    ``actions``: float32 [n, horizon, action_dim]; the first is what a tick without choice gives.
    ``scores``: float32 [n], of the session's selector, larger is better. ``spread``: how far they
    disagree, the mean RMS distance of all pairs, in standard deviations of the actions.
    """

    actions: NDArray[np.float32]
    scores: NDArray[np.float32]
    spread: float
    selected: int


@dataclass(frozen=True)
class Chunk:
    """The actions of one tick; every array is a copy, never a view of a live buffer.

    ``actions``: float32 [rows, horizon, action_dim], absolute targets in physical units.
    ``tick``: number of ticks committed before this one. ``subgoal_sequence``: of the latched one.
    ``segments_us``: microseconds of each segment. ``graph_keys``: segment -> ShapeKey replayed.
    ``reused_views``: views whose frame was encoded by an earlier tick; their segment did not run.
    ``candidates``: what ``actions`` were chosen from, None where there was no choice.
    """

    actions: NDArray[np.float32]
    tick: int
    subgoal_sequence: int
    segments_us: Mapping[str, float] = field(default_factory=dict)
    graph_keys: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    candidates: Candidates | None = None
    reused_views: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        return int(self.actions.shape[0])


class Session(Protocol):
    """A bound policy: buffers, captured graphs, one lane."""

    @property
    def config(self) -> Any: ...

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Turn a prompt or subgoal into the ids that this policy reads; None takes ids alone."""
        ...

    @property
    def ports(self) -> tuple[PortSpec, ...]: ...

    @property
    def lane(self) -> Lane: ...

    @property
    def buffers(self) -> BufferSet: ...

    @property
    def boundary(self) -> Boundary: ...

    @property
    def plan_keys(self) -> Mapping[int, Mapping[str, tuple[Any, ...]]]: ...

    @property
    def best_of_keys(self) -> Mapping[int, Mapping[str, tuple[Any, ...]]]: ...

    def submit(self, tick_input: TickInput, rows: int | None = None) -> Future[Chunk]:
        """Check the input and queue one tick; any thread."""
        ...

    def tick(self, tick_input: TickInput, timeout_s: float = 10.0) -> Chunk:
        """Submit and wait; any thread but the lane's."""
        ...

    def set_branches(
        self, rows: Sequence[int], seeds: Sequence[int], branches: Sequence[int] | None = None
    ) -> Future[None]:
        """Copy row 0's state to ``rows`` and give each its own seed."""
        ...

    def commit_branch(self, row: int) -> Future[None]:
        """Copy the state of ``row`` to row 0."""
        ...

    def close(self) -> None:
        """End the lane; the buffers are freed with the session."""
        ...


class Policy(Protocol):
    """A family: turns a config into a session."""

    @property
    def name(self) -> str: ...

    def ports(self, config: Any) -> tuple[PortSpec, ...]:
        """Return the ports that a session of this config will have; loads nothing."""
        ...

    def memory(self, config: Any) -> MemoryNeed:
        """Return what a session of this config will allocate; loads nothing."""
        ...

    def bind(self, backend: Backend, config: Any, progress: Progress | None = None) -> Session:
        """Load weights, allocate, warm up and capture; ``progress(stage, fraction)`` is told."""
        ...
