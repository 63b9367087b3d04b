"""The CUDA backend: torch captures, private pools, pinned host memory, bounded waits."""
from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
from contextlib import AbstractContextManager
import ctypes
import gc
import math
import mmap
import threading
import time
from typing import Any
import weakref

import torch

from flashrt_core.errors import CaptureFailed
from flashrt_core.errors import ConfigError
from flashrt_core.errors import ContractError
from flashrt_core.errors import FlashrtError
from flashrt_core.errors import OutOfMemory
from flashrt_core.runtime.backend import Holder
from flashrt_core.runtime.backend import Holders
from flashrt_core.runtime.backend import host_memory
from flashrt_core.runtime.backend import MemoryInfo

WARMUP_RUNS = 2
SPIN_S = 100e-6        # polls without a pause after the expected end, the GIL released at each
PAUSE_S = 30e-6        # between polls after that
REGISTER_NBYTES = 1 << 20  # larger pinned buffers get pages of their own, not a power of two
PR_SET_TIMERSLACK = 29

# torch lends its streams round-robin: two holders of one would share a cuBLAS workspace.
TORCH_STREAMS = 32
_held_streams: set[int] = set()

# Captures end with a device-wide synchronise, which may not meet another thread's capture.
_capture_lock = threading.Lock()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Keep dead graphs in cycles until later: their end on this thread breaks a capture."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


class PrivateStream(torch.cuda.Stream):
    """
    A stream that no other holder has as long as this object lives.

    Never hold a torch stream or event by a weak reference: up to torch 2.11 its end leaves the
    reference dangling (pytorch#183403), and the process crashes at exit.
    """

    def __del__(self, held: set[int] = _held_streams) -> None:
        """Lend the stream again."""
        held.discard(self.cuda_stream)


class CudaEvent:
    """A timed CUDA event; created by its first record."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)

    def record(self, stream: Any) -> None:
        """Place it behind the work now in ``stream``."""
        self._event.record(stream)

    def query(self) -> bool:
        """Return whether the work before it is done; raises on a sticky device error."""
        return bool(self._event.query())

    def wait(self, timeout_s: float, expected_s: float = 0.0) -> bool:
        """
        Poll with the GIL released between polls; return False after ``timeout_s``.

        Sleeps through all but the end of ``expected_s``, spins until shortly after it, then
        pauses between polls.
        """
        now = time.perf_counter()
        deadline = now + timeout_s
        spin_until = now + expected_s + SPIN_S
        asleep_s = min(expected_s - max(0.2e-3, 0.05 * expected_s), timeout_s)
        if asleep_s > 0.0 and not self.query():
            time.sleep(asleep_s)
        while not self.query():
            now = time.perf_counter()
            if now >= deadline:
                return self.query()
            time.sleep(0.0 if now < spin_until else PAUSE_S)
        return True

    def elapsed_us(self, later: Any) -> float:
        """Return the device's microseconds from this event to ``later``, both done."""
        return float(self._event.elapsed_time(later._event)) * 1e3


class CudaBackend:
    """
    One CUDA device.

    :param index: of the device.
    :param priority: added to that of every stream.
    :raises ConfigError: no such device, or a torch without CUDA.
    """

    name = 'cuda'

    def __init__(self, index: int = 0, priority: int = 0) -> None:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not 0 <= index < count:
            raise ConfigError(
                f'CUDA device {index} does not exist: torch {torch.__version__} sees {count}; '
                "install a CUDA build of torch and its driver, or use device 'cpu'")
        self.device = torch.device('cuda', index)
        self._priority = priority
        self._holders = Holders()
        self._integrated = bool(torch.cuda.get_device_properties(index).is_integrated)
        self._registers = _host_register_supported(index)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, host: bool = False) -> torch.Tensor:
        """Allocate device memory, or pinned host memory."""
        nbytes = math.prod(shape) * dtype.itemsize
        try:
            if not host:
                return torch.empty(tuple(shape), dtype=dtype, device=self.device)
            registers = self._registers and nbytes >= REGISTER_NBYTES
            pinned = _pinned(nbytes, self.device, registers)
            return pinned.view(dtype)[:math.prod(shape)].view(tuple(shape))
        except (torch.OutOfMemoryError, MemoryError, OSError) as error:
            raise self._out_of_memory(nbytes, 'an allocation', host) from error

    def reserve(self, nbytes: int, name: str, host: bool = False) -> None:
        """Raise OutOfMemory if ``nbytes`` is more than is free."""
        free = host_memory()[1] if host else self.memory().free
        if nbytes > free:
            raise self._out_of_memory(nbytes, name, host)

    def register(self, holder: Holder) -> None:
        """Name a holder in out-of-memory messages."""
        self._holders.add(holder)

    def _out_of_memory(self, nbytes: int, name: str, host: bool) -> OutOfMemory:
        if not host:
            return self._holders.error(nbytes, name, self.memory(), f'{self.device} memory')
        info = MemoryInfo(*host_memory(), integrated=self._integrated)
        return self._holders.error(nbytes, name, info, 'pinned host memory')

    def stream(self, priority: int = 0) -> torch.cuda.Stream:
        """
        Make a stream that no other holder has; -1 is served before 0.

        :raises ContractError: all of torch's streams of that priority are held.
        """
        priority += self._priority
        for sweep in (False, True):
            if sweep:
                gc.collect()  # closed lanes lie in cycles and hold their streams until then
            for _ in range(TORCH_STREAMS):
                lent = torch.cuda.Stream(device=self.device, priority=priority)
                if lent.cuda_stream not in _held_streams:
                    _held_streams.add(lent.cuda_stream)
                    return PrivateStream(stream_id=lent.stream_id, device_index=lent.device_index,
                                         device_type=lent.device_type)
        raise ContractError(
            f'all {TORCH_STREAMS} streams of priority {priority} on {self.device} are held; '
            'close sessions that are no longer used')

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        """Make ``stream`` and its device current on the calling thread."""
        return torch.cuda.stream(stream)

    def enter_thread(self, stream: Any) -> None:
        """Make device and ``stream`` current on this thread and its sleeps precise."""
        torch.cuda.set_device(self.device)
        torch.cuda.set_stream(stream)
        try:
            ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0)
        except (OSError, AttributeError):
            pass  # sleeps are then 50 us longer

    def event(self) -> CudaEvent:
        """Make an event."""
        return CudaEvent()

    def pool(self) -> Any:
        """Make a private pool for the graphs of one lane."""
        return torch.cuda.graph_pool_handle()

    def capture(self, fn: Callable[[], None], stream: Any, pool: Any) -> torch.cuda.CUDAGraph:
        """
        Warm ``fn`` up on ``stream``, capture it there into ``pool``, replay it once (upload).

        Thread-local capture mode: other threads go on using the device. One capture at a time.

        :raises CaptureFailed: ``fn`` raised, or did what a capture forbids.
        :raises OutOfMemory: the pool does not fit.
        """
        failures: list[Exception] = []

        def body() -> None:
            try:
                fn()
            except Exception as error:
                failures.append(error)
                raise

        graph = torch.cuda.CUDAGraph()
        try:
            with _capture_lock, torch.cuda.device(self.device):
                torch.cuda.synchronize()
                with torch.cuda.stream(stream):
                    for _ in range(WARMUP_RUNS):
                        body()
                stream.synchronize()
                with _no_collection(), torch.cuda.graph(
                        graph, pool=pool, stream=stream, capture_error_mode='thread_local'):
                    body()
                with torch.cuda.stream(stream):
                    graph.replay()
                stream.synchronize()
        except Exception as error:
            first = failures[0] if failures else error
            if isinstance(first, FlashrtError):
                raise first from error
            if isinstance(first, torch.OutOfMemoryError):
                raise self._out_of_memory(0, 'a capture', host=False) from first
            raise CaptureFailed(f'{type(first).__name__}: {first}') from first
        return graph

    def synchronize(self) -> None:
        """Wait for all work of the device, without limit."""
        torch.cuda.synchronize(self.device)

    def fault(self) -> str | None:
        """Return the text of a sticky error: the one that survives a fresh, trivial request."""
        try:
            probe = torch.cuda.Event()
            probe.record(torch.cuda.current_stream(self.device))
            probe.query()
        except RuntimeError as error:
            return str(error).splitlines()[0]
        return None

    def memory(self) -> MemoryInfo:
        """Return the driver's figures plus torch's cache; MemAvailable on integrated GPUs."""
        free, total = torch.cuda.mem_get_info(self.device)
        if self._integrated:
            total, free = host_memory()
        cached = (torch.cuda.memory_reserved(self.device)
                  - torch.cuda.memory_allocated(self.device))
        return MemoryInfo(total=total, free=free + cached, integrated=self._integrated)


class _Pages(mmap.mmap):
    """Anonymous pages that a finalizer can watch."""


def _host_register_supported(index: int) -> bool:
    """Whether the device can page-lock memory that it did not allocate; Jetson cannot."""
    from cuda.bindings import runtime
    attribute = runtime.cudaDeviceAttr.cudaDevAttrHostRegisterSupported
    status, supported = runtime.cudaDeviceGetAttribute(attribute, index)
    return int(status) == 0 and bool(supported)


def _pinned(nbytes: int, device: torch.device, registers: bool) -> torch.Tensor:
    """Return page-locked uint8 ``[n >= nbytes]``; from torch's pool where pages cannot be had."""
    pages = _registered(nbytes) if registers else None
    if pages is not None:
        return pages
    if registers:
        # The refusal is still the thread's last CUDA error: the next launch takes and reports it.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=device)
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        raise MemoryError(str(error)) from error


def _registered(nbytes: int) -> torch.Tensor | None:
    """Return uint8 ``[n >= nbytes]`` in page-locked pages of its own, released with the tensor.

    None where the driver refuses to lock them.
    """
    size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = _Pages(-1, size)
    tensor = torch.frombuffer(pages, dtype=torch.uint8)
    address = tensor.data_ptr()
    runtime = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(address, size, 0)) != 0:
        return None
    # The finalizer runs before the pages are unmapped; the storage of every view holds them.
    weakref.finalize(pages, runtime.cudaHostUnregister, address).atexit = False
    return tensor
