"""Counters and rings of samples that the step and tick threads write and diagnostics read.

Recording allocates no array and takes at most one uncontended lock; percentiles are computed by
the reader.
"""

from collections.abc import Iterable
from collections.abc import Mapping
from dataclasses import dataclass
import threading

import numpy as np

from flashrt_core.errors import ConfigError


@dataclass(frozen=True)
class Summary:
    """Percentiles of what a ring holds, in the unit that was recorded; zeros while it is empty."""

    count: int  # samples ever recorded, warm-up excluded
    p50: float
    p99: float
    mean: float
    maximum: float  # of what the ring holds
    last: float


_EMPTY = Summary(0, 0.0, 0.0, 0.0, 0.0, 0.0)


class Ring:
    """The last ``capacity`` samples of one quantity.

    One thread records, any thread summarises; a summary may miss the sample being written.
    """

    def __init__(self, capacity: int = 4096, *, warm_up: int = 0) -> None:
        """Allocate the ring.

        :param capacity: samples kept.
        :param warm_up: first samples that are not recorded (a first inference is not like the
            others).
        :raises ConfigError: when a number is out of range.
        """
        if capacity < 1:
            raise ConfigError(f'ring capacity is {capacity}; give at least 1')
        if warm_up < 0:
            raise ConfigError(f'ring warm_up is {warm_up}; give 0 or more')
        self._samples = np.zeros(capacity, dtype=np.float64)
        self._scratch = np.zeros(capacity, dtype=np.float64)
        self._scratch_lock = threading.Lock()
        self._capacity = capacity
        self._to_skip = self._warm_up = warm_up
        self._count = 0

    def record(self, value: float) -> None:
        """Keep one sample. Writer thread only."""
        if self._to_skip:
            self._to_skip -= 1
            return
        self._samples[self._count % self._capacity] = value
        self._count += 1

    def clear(self) -> None:
        """Forget all samples and start the warm-up again. Writer thread only."""
        self._count = 0
        self._to_skip = self._warm_up

    @property
    def count(self) -> int:
        """Samples recorded since the start or the last clear."""
        return self._count

    def summary(self) -> Summary:
        """Return count, percentiles, mean, maximum and last of the samples held. Any thread."""
        with self._scratch_lock:
            count = self._count
            ordered = self._ordered()
            held = len(ordered)
            if not held:
                return _EMPTY
            return Summary(
                count=count,
                p50=float(ordered[_rank(50.0, held)]),
                p99=float(ordered[_rank(99.0, held)]),
                mean=float(ordered.mean()),
                maximum=float(ordered[-1]),
                last=float(self._samples[(count - 1) % self._capacity]),
            )

    def _ordered(self) -> np.ndarray:
        held = min(self._count, self._capacity)
        ordered = self._scratch[:held]
        ordered[:] = self._samples[:held]
        ordered.sort()
        return ordered


def _rank(percent: float, held: int) -> int:
    return min(held - 1, max(0, int(np.ceil(percent / 100.0 * held)) - 1))


class Histogram:
    """Counts per bucket; bucket i holds values below ``edges[i]``, the last all others."""

    def __init__(self, edges: Iterable[float]) -> None:
        """Allocate the buckets.

        :param edges: upper edges, strictly increasing, in the unit that is recorded.
        :raises ConfigError: when the edges are empty or do not increase.
        """
        self.edges = tuple(float(edge) for edge in edges)
        if not self.edges or any(b <= a for a, b in zip(self.edges, self.edges[1:], strict=False)):
            raise ConfigError(
                f'histogram edges are {self.edges}; give strictly increasing numbers'
            )
        self._counts = [0] * (len(self.edges) + 1)

    def record(self, value: float) -> None:
        """Count one sample. Writer thread only."""
        bucket = 0
        for edge in self.edges:
            if value < edge:
                break
            bucket += 1
        self._counts[bucket] += 1

    def clear(self) -> None:
        """Set all buckets to zero. Writer thread only."""
        for bucket in range(len(self._counts)):
            self._counts[bucket] = 0

    @property
    def counts(self) -> tuple[int, ...]:
        """One count per edge and one for all values at or above the last edge."""
        return tuple(self._counts)


class Counters:
    """Named counts that only grow; names are declared, so that a misspelt one fails."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        """Start all names at zero."""
        self._lock = threading.Lock()
        self._values = {name: 0 for name in names}

    def declare(self, names: Iterable[str]) -> None:
        """Add names that are not held yet. Any thread."""
        with self._lock:
            for name in names:
                self._values.setdefault(name, 0)

    def add(self, name: str, amount: int = 1) -> None:
        """Count ``amount`` more of ``name``. Any thread.

        :raises KeyError: when the name was not declared.
        """
        with self._lock:
            self._values[name] += amount

    def __getitem__(self, name: str) -> int:
        """Return the count of ``name``."""
        return self._values[name]

    def snapshot(self) -> Mapping[str, int]:
        """Return a copy of all counts, in the order declared. Any thread."""
        with self._lock:
            return dict(self._values)
