"""The backend seam: where buffers live and how a captured graph runs (cpu or cuda)."""
from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
import os
from typing import Any
from typing import Protocol
import weakref

import torch

from flashrt_core.errors import ConfigError
from flashrt_core.errors import OutOfMemory


@dataclass(frozen=True)
class MemoryInfo:
    """
    The memory of a device, in bytes.

    ``free`` is what an allocation can still get: MemAvailable on the CPU and on integrated GPUs
    (CPU and GPU share one memory there), else the driver's free memory plus torch's own cache.
    """

    total: int
    free: int
    integrated: bool


class Event(Protocol):
    """A point in a stream's work that any thread can ask about."""

    def record(self, stream: Any) -> None:
        """Place the event behind the work now in ``stream``; nothing is waited for."""

    def query(self) -> bool:
        """Return whether the work before the event is done."""

    def wait(self, timeout_s: float, expected_s: float = 0.0) -> bool:
        """
        Wait with the GIL released; return False if ``timeout_s`` passed first.

        ``expected_s`` is the duration of the last such work: most of it is slept through.
        """

    def elapsed_us(self, later: Any) -> float:
        """Return the microseconds from this event to a ``later`` one, both done."""


class Captured(Protocol):
    """One captured variant of a graph."""

    def replay(self) -> None:
        """Launch it on the current stream (cpu: run it now)."""


class Holder(Protocol):
    """Something that holds device or host memory and can say how much."""

    name: str

    @property
    def nbytes(self) -> int:
        """Bytes held."""


class Backend(Protocol):
    """One device. Methods may be called from any thread unless they say otherwise."""

    name: str
    device: torch.device

    def empty(self, shape: Sequence[int], dtype: torch.dtype, host: bool = False) -> torch.Tensor:
        """Allocate; ``host`` gives pinned host memory on cuda. Raises OutOfMemory."""

    def reserve(self, nbytes: int, name: str, host: bool = False) -> None:
        """Raise OutOfMemory if ``nbytes`` for ``name`` cannot fit; allocates nothing."""

    def register(self, holder: Holder) -> None:
        """Name a holder in out-of-memory messages for as long as it lives."""

    def stream(self, priority: int = 0) -> Any:
        """Make a stream; a lower number is served first (cuda)."""

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        """Make ``stream`` current on the calling thread."""

    def enter_thread(self, stream: Any) -> None:
        """Make device and ``stream`` current for the rest of the calling thread's life."""

    def event(self) -> Event:
        """Make an event that can be timed."""

    def pool(self) -> Any:
        """Make a private memory pool for the graphs of one lane."""

    def capture(self, fn: Callable[[], None], stream: Any, pool: Any) -> Captured:
        """Run ``fn`` to warm it up, then capture it. Configure only. Raises CaptureFailed."""

    def synchronize(self) -> None:
        """Wait for all work of the device, without limit. Configure and tests only."""

    def fault(self) -> str | None:
        """Return the text of a sticky device error, None while the device works."""

    def memory(self) -> MemoryInfo:
        """Return total and free memory."""


class Holders:
    """Who holds memory on one device; the part of a backend that words OutOfMemory."""

    def __init__(self) -> None:
        self._held: weakref.WeakSet[Any] = weakref.WeakSet()

    def add(self, holder: Holder) -> None:
        """Name ``holder`` until it is collected."""
        self._held.add(holder)

    def error(self, asked: int, name: str, info: MemoryInfo, where: str) -> OutOfMemory:
        """Word the error: asked, free, and who holds the rest."""
        held = sorted(((h.nbytes, h.name) for h in list(self._held)), reverse=True)
        rest = max(0, info.total - info.free - sum(nbytes for nbytes, _ in held))
        holders = [f'{holder!r} {_mib(nbytes)}' for nbytes, holder in held]
        holders.append(f'others (weights, graph pools, other processes) {_mib(rest)}')
        return OutOfMemory(
            f'{name!r} asked for {_mib(asked)} of {where}; free {_mib(info.free)} of '
            f'{_mib(info.total)}; held by {", ".join(holders)}; use fewer rows, a shorter '
            'context or smaller capsule budgets')


def _mib(nbytes: int) -> str:
    return f'{nbytes / 2**20:.1f} MiB ({nbytes} bytes)'


def host_memory() -> tuple[int, int]:
    """Return (total, available) bytes of host memory: MemTotal and MemAvailable."""
    try:
        with open('/proc/meminfo', encoding='ascii') as lines:
            fields = {key: int(rest.split()[0]) * 1024 for key, rest in
                      (line.split(':', 1) for line in lines)}
        return fields['MemTotal'], fields['MemAvailable']
    except (OSError, KeyError):
        page = os.sysconf('SC_PAGE_SIZE')
        return page * os.sysconf('SC_PHYS_PAGES'), page * os.sysconf('SC_AVPHYS_PAGES')


def cpu_backend() -> Backend:
    """Return a backend that runs plans eagerly on the host."""
    from flashrt_core.runtime.cpu import CpuBackend
    return CpuBackend()


def cuda_backend(index: int = 0, priority: int = 0) -> Backend:
    """
    Return a backend on CUDA device ``index``; ``priority`` is added to that of its streams.

    :raises ConfigError: no such device, or a torch without CUDA.
    """
    from flashrt_core.runtime.cuda import CudaBackend
    return CudaBackend(index, priority)


def pick_backend(device: str, priority: int = 0) -> Backend:
    """
    Return the backend called 'cpu', 'cuda' or 'auto' (cuda where there is one, else cpu).

    :param priority: added to that of every stream (cuda): -1 is served before 0.
    :raises ConfigError: another name, or 'cuda' without a CUDA device.
    """
    if device == 'auto':
        device = 'cuda' if torch.cuda.is_available() else 'cpu'
    if device == 'cpu':
        return cpu_backend()
    if device == 'cuda':
        return cuda_backend(priority=priority)
    raise ConfigError(f"device is {device!r}; use 'auto', 'cpu' or 'cuda'")
