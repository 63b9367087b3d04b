"""What a planner family promises, and what its shared session gives back.

The ROS side configures itself from ``Session.ports``; it knows no family by name.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any
from typing import Protocol
from typing import TYPE_CHECKING

from flashrt_core.errors import ConfigError
from flashrt_core.planners.chunks import check_keys
from flashrt_core.planners.chunks import Chunk
from flashrt_core.planners.options import DRAFTS_LIMIT
from flashrt_core.planners.options import Options
from flashrt_core.policies.protocol import PortSpec

if TYPE_CHECKING:
    from torch import Tensor

    from flashrt_core.capsule import Boundary
    from flashrt_core.capsule import CapsuleStore
    from flashrt_core.capsule import RestoreReport
    from flashrt_core.runtime import Backend
    from flashrt_core.runtime import BufferSet
    from flashrt_core.runtime import Lane

Progress = Callable[[str, float], None]

STOP_IDS_LIMIT = 16


@dataclass(frozen=True)
class Settings:
    """How a session of any family runs its model; part of no weight.

    ``prefill_keys``, ``ridge``, ``smallest_span``: see ``chunks``; part of the numerics.
    ``draft_tokens``: the most of one step, 0 captures no speculation.
    ``branches``: rows of a fork at most, 0 allocates none. ``tail_tokens``: of each of them.
    ``stop_ids``: token ids that end a stream; no draft is accepted beyond one.
    ``known_tokens``: ids from there on are never sampled (a padded vocabulary), 0: all are known.
    ``cpu_threads``: of torch on the cpu backend, 0 leaves torch's own choice.

    :raises ConfigError: a value out of range.
    """

    prefill_keys: tuple[int, ...] = (16, 64, 256, 1024, 2048)
    ridge: int = 192
    smallest_span: int = 2048
    draft_tokens: int = 0
    branches: int = 0
    tail_tokens: int = 256
    stop_ids: tuple[int, ...] = ()
    known_tokens: int = 0
    cpu_threads: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, 'prefill_keys', tuple(sorted(self.prefill_keys)))
        object.__setattr__(self, 'stop_ids', tuple(self.stop_ids))
        for name, low, high in (
            ('draft_tokens', 0, DRAFTS_LIMIT),
            ('branches', 0, 1024),
            ('tail_tokens', 1, 2**31),
            ('known_tokens', 0, 2**31),
            ('cpu_threads', 0, 4096),
        ):
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                raise ConfigError(f'{name} is {value!r}; give a whole number from {low} to {high}')
        if len(self.stop_ids) > STOP_IDS_LIMIT:
            raise ConfigError(
                f'{len(self.stop_ids)} stop_ids are given; give at most {STOP_IDS_LIMIT}'
            )

    def check(self, context: int, vocab: int) -> None:
        """Raise ConfigError where the settings do not fit the model."""
        check_keys(self.prefill_keys, context, self.ridge, self.smallest_span)
        bad = [i for i in self.stop_ids if type(i) is not int or not 0 <= i < vocab]
        if bad:
            raise ConfigError(f'stop_ids {bad} are not tokens; give ids from 0 to {vocab - 1}')

    @property
    def branch_keys(self) -> tuple[int, ...]:
        """Captured row counts of a fork: powers of two, and ``branches`` itself."""
        powers = [2**i for i in range(11) if 2**i < self.branches]
        return (*powers, self.branches) if self.branches else ()


@dataclass(frozen=True)
class Appended:
    """What ``prefill`` or ``append`` did; ``chunks_us`` are device microseconds of each chunk.

    ``restored``: of ``restore_and_append``; where it overlapped, the first chunk waited for it.
    """

    position: int
    chunks: tuple[Chunk, ...]
    chunks_us: tuple[float, ...]
    restored: RestoreReport | None = None


@dataclass(frozen=True)
class Step:
    """The tokens of one decode step, all given out; the last one is pending.

    ``position``: tokens in the state afterwards. ``drafted`` and ``accepted``: of speculation.
    ``us``: device microseconds of its segments. ``epoch``: restores and resets so far.
    """

    tokens: tuple[int, ...]
    position: int
    drafted: int = 0
    accepted: int = 0
    us: float = 0.0
    epoch: int = 0


@dataclass(frozen=True)
class BranchStep:
    """One token of every branch; ``position`` counts tokens in each branch's state."""

    tokens: tuple[int, ...]
    position: int
    us: float = 0.0


@dataclass(frozen=True)
class Token:
    """One token of a stream: where it stands, and the text that became complete with it."""

    id: int
    text: str
    position: int


class Session(Protocol):
    """A bound planner: buffers, captured graphs, one lane. One operation at a time."""

    @property
    def config(self) -> Any: ...

    @property
    def ports(self) -> tuple[PortSpec, ...]: ...

    @property
    def lane(self) -> Lane: ...

    @property
    def buffers(self) -> BufferSet: ...

    @property
    def boundary(self) -> Boundary: ...

    @property
    def position(self) -> int: ...

    @property
    def pending(self) -> int | None: ...

    def memory(self) -> dict[str, int]:
        """Return bytes by purpose, those of a capsule among them."""
        ...

    def prefill(self, tokens: Sequence[int]) -> Future[Appended]:
        """Start from the empty state and take the tokens in."""
        ...

    def append(self, tokens: Sequence[int]) -> Future[Appended]:
        """Take more tokens in, after the pending one if there is one."""
        ...

    def restore_and_append(
        self, store: CapsuleStore, id: str, tokens: Sequence[int], *, numerics: str = 'same'
    ) -> Future[Appended]:
        """Restore a capsule and take tokens in behind it; from host memory both at once."""
        ...

    def decode(
        self, options: Options | None = None, *, limit: int | None = None,
        mask: Tensor | None = None, matcher: Any = None, revocable: bool = False,
        epoch: int | None = None,
    ) -> Future[Step]:
        """Sample the next token, or several with speculation."""
        ...

    def keep(self, count: int) -> Future[Step]:
        """Take back all but the first tokens of the last step, which was revocable."""
        ...

    def stream(
        self, options: Options | None = None, *, tokenizer: Any = None
    ) -> Iterator[Token]:
        """Decode token by token until something ends it."""
        ...

    def reset(self) -> Future[None]:
        """Make the state empty."""
        ...

    def close(self) -> None:
        """End the lane; the buffers are freed with the session."""
        ...


class Planner(Protocol):
    """A family: turns a config into a session."""

    @property
    def name(self) -> str: ...

    def bind(self, backend: Backend, config: Any, progress: Progress | None = None) -> Session:
        """Load weights, allocate, warm up and capture; ``progress(stage, fraction)`` is told."""
        ...
