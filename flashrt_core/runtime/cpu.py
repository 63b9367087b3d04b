"""The CPU backend: the same plan, run eagerly; every event is done when it is recorded."""
from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextlib import nullcontext
import math
import time
from typing import Any

import torch

from flashrt_core.errors import CaptureFailed
from flashrt_core.errors import FlashrtError
from flashrt_core.runtime.backend import Holder
from flashrt_core.runtime.backend import Holders
from flashrt_core.runtime.backend import host_memory
from flashrt_core.runtime.backend import MemoryInfo


class CpuStream:
    """Stands for a stream: work is done when it is submitted."""


class CpuEvent:
    """An event of a stream without a queue; holds the time it was recorded."""

    def __init__(self) -> None:
        self._at = 0.0

    def record(self, stream: Any) -> None:
        """Note the time."""
        self._at = time.perf_counter()

    def query(self) -> bool:
        """Return True: the work before it is done."""
        return True

    def wait(self, timeout_s: float, expected_s: float = 0.0) -> bool:
        """Return True at once."""
        return True

    def elapsed_us(self, later: Any) -> float:
        """Return the microseconds between the two records."""
        return float((later._at - self._at) * 1e6)


class CpuGraph:
    """A "captured" body: replay calls it."""

    def __init__(self, fn: Callable[[], None]) -> None:
        self._fn = fn

    def replay(self) -> None:
        """Run the body."""
        self._fn()


class CpuBackend:
    """Host memory and eager execution, with the behaviour of the CUDA backend."""

    name = 'cpu'

    def __init__(self) -> None:
        self.device = torch.device('cpu')
        self._holders = Holders()

    def empty(self, shape: Sequence[int], dtype: torch.dtype, host: bool = False) -> torch.Tensor:
        """Allocate host memory, checked against MemAvailable first (Linux overcommits)."""
        nbytes = math.prod(shape) * dtype.itemsize
        self.reserve(nbytes, 'an allocation')
        try:
            return torch.empty(tuple(shape), dtype=dtype)
        except RuntimeError as error:
            raise self._holders.error(nbytes, 'an allocation', self.memory(), 'host memory'
                                      ) from error

    def reserve(self, nbytes: int, name: str, host: bool = False) -> None:
        """Raise OutOfMemory if ``nbytes`` is more than is available."""
        info = self.memory()
        if nbytes > info.free:
            raise self._holders.error(nbytes, name, info, 'host memory')

    def register(self, holder: Holder) -> None:
        """Name a holder in out-of-memory messages."""
        self._holders.add(holder)

    def stream(self, priority: int = 0) -> CpuStream:
        """Make a stand-in stream."""
        return CpuStream()

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        """Do nothing; there is no current stream."""
        return nullcontext()

    def enter_thread(self, stream: Any) -> None:
        """Do nothing; there is no current stream."""

    def event(self) -> CpuEvent:
        """Make an event."""
        return CpuEvent()

    def pool(self) -> None:
        """Return None: nothing is captured."""

    def capture(self, fn: Callable[[], None], stream: Any, pool: Any) -> CpuGraph:
        """Run ``fn`` once, so that its errors show in configure as they would on cuda."""
        try:
            fn()
        except FlashrtError:
            raise
        except Exception as error:
            raise CaptureFailed(f'the body raised {type(error).__name__}: {error}') from error
        return CpuGraph(fn)

    def synchronize(self) -> None:
        """Do nothing; work is done when it is submitted."""

    def fault(self) -> str | None:
        """Return None: a host has no sticky errors."""
        return None

    def memory(self) -> MemoryInfo:
        """Return MemTotal and MemAvailable; host and device are one."""
        total, free = host_memory()
        return MemoryInfo(total=total, free=free, integrated=True)
