"""One kernel that copies a table of (source, target, bytes), at the rate of a plain memcpy."""
from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any
from typing import TYPE_CHECKING

import numpy as np
import torch

from flashrt_core.errors import ContractError
from flashrt_core.kernels._table import DeviceTable
from flashrt_core.kernels._table import raw_bytes
from flashrt_core.kernels._triton import lazy_jit
from flashrt_core.kernels._triton import triton_selected
from flashrt_core.kernels._triton import Variant
from flashrt_core.runtime.backend import Backend
from flashrt_core.runtime.backend import Event

if TYPE_CHECKING:
    import triton.language as tl

PIECE = 2 << 20    # bytes; a longer range is cut into pieces of this
CHUNK = 8 << 10    # bytes that one program moves at a time: 2 loads of 16 bytes per thread
NUM_WARPS = 8
FEW = 64           # pieces; cutting so few is faster without numpy
# Few pieces are latency: one wave. Many are bandwidth: short programs keep every processor busy.
PROGRAMS_PER_SM = {True: 8, False: 64}


@lazy_jit
def copy_ranges(table, programs,  # type: ignore[no-untyped-def]
                PIECE: tl.constexpr, CHUNK: tl.constexpr):
    """Copy every (source, target, bytes <= PIECE) row; row 0 of the table holds the count."""
    CHUNKS: tl.constexpr = PIECE // CHUNK
    BYTES: tl.constexpr = 2048
    count = tl.load(table)
    for work in range(tl.program_id(0), count * CHUNKS, programs):
        entry = table + 3 + (work // CHUNKS) * 3
        at = (work % CHUNKS) * CHUNK
        left = tl.load(entry + 2) - at
        if left > 0:
            source = tl.load(entry) + at
            target = tl.load(entry + 1) + at
            left = tl.minimum(left, CHUNK)
            moved = left * 0
            if ((source | target) & 15) == 0:
                moved = (left // 16) * 16
                words = (left // 16) * 2
                source64 = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), 16)
                target64 = tl.multiple_of(target.to(tl.pointer_type(tl.int64)), 16)
                word = tl.arange(0, CHUNK // 8)
                value = tl.load(source64 + word, mask=word < words)
                tl.store(target64 + word, value, mask=word < words)
            source8 = source.to(tl.pointer_type(tl.int8))
            target8 = target.to(tl.pointer_type(tl.int8))
            for start in range(moved, left, BYTES):
                byte = start + tl.arange(0, BYTES)
                rest = tl.load(source8 + byte, mask=byte < left)
                tl.store(target8 + byte, rest, mask=byte < left)


VARIANTS = (
    Variant(copy_ranges,
            {'table': '*i64', 'programs': 'i32', 'PIECE': 'constexpr', 'CHUNK': 'constexpr'},
            {'PIECE': PIECE, 'CHUNK': CHUNK}, num_warps=NUM_WARPS),
)


@dataclass(frozen=True, eq=False)
class Pieces:
    """Copies cut to the kernel's piece size: int64 ``[n, 3]``, never written again."""

    rows: np.ndarray


class CopyTable:
    """
    Copies many ranges of one device in one submission; allocates nothing after it was made.

    Make it in configure. ``fill`` then ``submit``, one thread at a time; on cuda that costs one
    graph replay (table to the device, one kernel), on cpu the copies are done on return.

    :param capacity: pieces of at most 2 MiB that one submission can hold.
    """

    def __init__(self, backend: Backend, capacity: int) -> None:
        self._backend = backend
        self._device = backend.device
        self._table = DeviceTable(backend, capacity, columns=3)
        self.capacity = capacity
        self._kernel = triton_selected('copy_ranges', self._device, self._check)
        if self._kernel:
            self._table.capture(self._launch)

    @property
    def bytes(self) -> int:
        """Return the bytes of the ranges filled in last."""
        return int(self._table.rows[:, 2].sum())

    def fill(self, ranges: np.ndarray | Pieces) -> int:
        """
        Write the ranges of the next submission and return the number of pieces.

        Waits for the submission before, if the device still reads its table.

        :param ranges: int64 ``[n, 3]`` of (source address, target address, bytes). Ranges must
            not overlap one another; empty ones are left out, long ones are cut. Pieces are taken
            as they are, and not uploaded again when they were the last ones filled.
        :raises ContractError: another shape or dtype, negative bytes, more than ``capacity``.
        """
        ready = ranges if isinstance(ranges, Pieces) else pieces(ranges)
        self._table.fill(ready.rows, ready)
        return len(ready.rows)

    @property
    def event(self) -> Event:
        """The end of the last submission."""
        return self._table.event

    def submit(self, stream: Any) -> None:
        """
        Copy what ``fill`` wrote, in ``stream`` order; nothing is waited for (cpu: done).

        ``event`` is then done when this and all earlier work of the stream is.
        """
        if self._device.type == 'cpu':
            for source, target, count in self._table.rows.tolist():
                ctypes.memmove(target, source, count)
        elif self._kernel and len(self._table.rows):
            self._table.replay(stream)
        else:
            with self._backend.use(stream):
                for source, target, count in self._table.rows.tolist():
                    raw_bytes(target, count).copy_(raw_bytes(source, count), non_blocking=True)
            self._table.record(stream)

    def _launch(self, table: torch.Tensor, small: bool) -> None:
        processors = torch.cuda.get_device_properties(self._device).multi_processor_count
        programs = processors * PROGRAMS_PER_SM[small]
        copy_ranges[(programs,)](table, programs, PIECE=PIECE, CHUNK=CHUNK, num_warps=NUM_WARPS)

    def _check(self) -> bool:
        """Copy odd, empty, unaligned and long ranges and compare every byte, gaps included."""
        size = PIECE + 70_001
        source = torch.randint(0, 256, (4 * size,), dtype=torch.uint8, device=self._device)
        target, expected = torch.zeros_like(source), torch.zeros_like(source)
        rows = []
        for at, to, count in ((0, 16, 1), (33, 64, 7), (256, 1024, 0), (512, 4096, 16_387),
                              (40_001, 40_003, 20_000), (size, size, PIECE + 5)):
            rows.append((source.data_ptr() + at, target.data_ptr() + to, count))
            expected[to:to + count] = source[at:at + count]
        table = torch.zeros((len(rows) + 2, 3), dtype=torch.int64)
        cut = pieces(np.array(rows, np.int64)).rows
        table[0, 0] = len(cut)
        table[1:1 + len(cut)] = torch.from_numpy(cut)
        table = table.to(self._device)
        same = True
        for small in PROGRAMS_PER_SM:
            target.zero_()
            self._launch(table, small)
            same = same and torch.equal(target, expected)
        return same


def pieces(ranges: np.ndarray) -> Pieces:
    """
    Leave out empty ranges and cut long ones.

    :raises ContractError: another shape or dtype, negative bytes.
    """
    if ranges.dtype != np.int64 or ranges.ndim != 2 or ranges.shape[1] != 3:
        raise ContractError(
            f'copy ranges are {ranges.dtype} {list(ranges.shape)}; use int64 [n, 3] of (source, '
            'target, bytes)')
    nbytes = ranges[:, 2]
    if len(ranges) and nbytes.min() < 0:
        raise ContractError(f'copy range {int(nbytes.argmin())} has {int(nbytes.min())} bytes')
    if not len(ranges) or (nbytes.min() > 0 and nbytes.max() <= PIECE):
        return Pieces(ranges.copy())
    total = int(nbytes.sum())
    if total // PIECE + len(ranges) <= FEW:
        return Pieces(np.array([
            (source + at, target + at, min(PIECE, count - at))
            for source, target, count in ranges.tolist() for at in range(0, count, PIECE)
        ], np.int64).reshape(-1, 3))
    counts = -(-nbytes // PIECE)
    index = np.repeat(np.arange(len(ranges)), counts)
    at = (np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)) * PIECE
    cut = ranges[index]
    cut[:, :2] += at[:, None]
    cut[:, 2] = np.minimum(cut[:, 2] - at, PIECE)
    return Pieces(cut)
