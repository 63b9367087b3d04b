"""
A 64-bit digest of a list of memory ranges, equal on cpu and cuda; not cryptographic.

Formula, all modulo 2**64: range ``r`` of ``n`` bytes, zero-padded, is words ``w[0..]`` of 8 bytes,
little-endian. total = sum over r, j of mix(w[j] + (j + 1) * C1 + (r + 1) * C2)
+ sum over r of mix(n + (r + 1) * C3); digest = mix(total). ``mix`` is the finaliser of
MurmurHash3 (A. Appleby, public domain). A sum of integers has one value in every order, so the
kernel's schedule does not show; the order of ranges and words does.
"""
from __future__ import annotations

from collections.abc import Iterable
import ctypes
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

if TYPE_CHECKING:
    import triton.language as tl

C1, C2, C3 = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0x8CB92BA72F3D8DD7
M1, M2 = 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53
MASK = (1 << 64) - 1
PIECE = 2 << 20
CHUNK = 8 << 10
PROGRAMS_PER_SM = 8
NUM_WARPS = 4
REFERENCE_WORDS = 1 << 17


@lazy_jit
def digest_ranges(table, partial, programs,  # type: ignore[no-untyped-def]
                  PIECE: tl.constexpr, CHUNK: tl.constexpr):
    """
    Sum the mixed words of every (address, bytes <= PIECE, first word, range) row.

    Row 0 of the table holds the count; program p writes partial[p].
    """
    CHUNKS: tl.constexpr = PIECE // CHUNK
    WORDS: tl.constexpr = CHUNK // 8
    count = tl.load(table)
    index = tl.arange(0, WORDS)
    total = tl.zeros([WORDS], tl.uint64)
    for work in range(tl.program_id(0), count * CHUNKS, programs):
        entry = table + 4 + (work // CHUNKS) * 4
        at = (work % CHUNKS) * CHUNK
        left = tl.load(entry + 1) - at
        if left > 0:
            address = tl.load(entry) + at
            left = tl.minimum(left, CHUNK)
            first = tl.load(entry + 2) + at // 8 + 1
            salt = (tl.load(entry + 3) + 1).to(tl.uint64) * 0xD1B54A32D192ED03
            place = (first + index).to(tl.uint64) * 0x9E3779B97F4A7C15 + salt
            if ((address & 15) == 0) & (left % 8 == 0):
                words = tl.multiple_of(address.to(tl.pointer_type(tl.int64)), 16)
                word = tl.load(words + index, mask=index < left // 8, other=0).to(tl.uint64)
            else:
                octets = address.to(tl.pointer_type(tl.uint8))
                word = tl.zeros([WORDS], tl.uint64)
                for b in tl.static_range(8):
                    octet = tl.load(octets + index * 8 + b, mask=index * 8 + b < left, other=0)
                    word += octet.to(tl.uint64) << (8 * b)
            x = word + place
            x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCD
            x = (x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53
            total += tl.where(index * 8 < left, x ^ (x >> 33), 0)
    tl.store(partial + tl.program_id(0), tl.sum(total.to(tl.int64)))


VARIANTS = (
    Variant(digest_ranges,
            {'table': '*i64', 'partial': '*i64', 'programs': 'i32', 'PIECE': 'constexpr',
             'CHUNK': 'constexpr'},
            {'PIECE': PIECE, 'CHUNK': CHUNK}, num_warps=NUM_WARPS),
)


class DigestTable:
    """
    Digests many ranges of one device in one submission; allocates nothing where Triton works.

    Make it in configure. ``fill``, ``submit``, ``result``, one thread at a time.

    :param capacity: pieces of at most 2 MiB that one submission can hold.
    """

    def __init__(self, backend: Backend, capacity: int) -> None:
        self._backend = backend
        self._device = backend.device
        self._table = DeviceTable(backend, capacity, columns=4)
        self._lengths: list[int] = []
        self._sum = 0
        self._kernel = triton_selected('digest_ranges', self._device, self._check)
        if self._kernel:
            self._programs = _programs(self._device)
            self._partial = backend.empty((self._programs,), torch.int64).zero_()
            self._host_partial = backend.empty((self._programs,), torch.int64, host=True)
            self._table.capture(lambda table, small: self._launch(table), self._download)

    def fill(self, ranges: np.ndarray) -> None:
        """
        Write the ranges of the next submission; waits for the one before.

        :param ranges: int64 ``[n, 2]`` of (address, bytes).
        :raises ContractError: another shape or dtype, negative bytes, more than ``capacity``.
        """
        self._table.fill(_pieces(ranges))
        self._lengths = ranges[:, 1].tolist()

    def submit(self, stream: Any) -> None:
        """Start the digest in ``stream`` order."""
        if self._kernel:
            self._table.replay(stream)
            return
        with self._backend.use(stream):
            sums = [_sum_words(self._view(int(address), int(count)), int(first), int(number))
                    for address, count, first, number in self._table.rows]
        self._sum = sum(sums) & MASK

    def result(self) -> int:
        """Wait for the submission and return the digest. Raises LaneTimeout."""
        if self._kernel:
            self._table.wait()
            self._sum = int(self._host_partial.numpy().sum()) & MASK
        return finish(self._sum, self._lengths)

    def _view(self, address: int, count: int) -> torch.Tensor:
        if self._device.type == 'cuda':
            return raw_bytes(address, count)
        return torch.frombuffer((ctypes.c_uint8 * count).from_address(address), dtype=torch.uint8)

    def _launch(self, table: torch.Tensor) -> None:
        digest_ranges[(self._programs,)](
            table, self._partial, self._programs, PIECE=PIECE, CHUNK=CHUNK, num_warps=NUM_WARPS)

    def _download(self) -> None:
        self._host_partial.copy_(self._partial, non_blocking=True)

    def _check(self) -> bool:
        """Compare with the reference on long, odd, empty and unaligned ranges."""
        data = torch.randint(0, 256, (PIECE + 100_000,), dtype=torch.uint8, device=self._device)
        cuts = ((0, PIECE + 8_200), (256, 65_536), (512, 0), (1024, 13), (77, 20_001))
        rows = np.array([(data.data_ptr() + at, n) for at, n in cuts], np.int64)
        pieces = _pieces(rows)
        table = np.zeros((len(pieces) + 1, 4), np.int64)
        table[0, 0], table[1:] = len(pieces), pieces
        programs = _programs(self._device)
        partial = torch.empty(programs, dtype=torch.int64, device=self._device)
        digest_ranges[(programs,)](torch.from_numpy(table).to(self._device), partial, programs,
                                   PIECE=PIECE, CHUNK=CHUNK, num_warps=NUM_WARPS)
        mine = finish(int(partial.sum()), [n for _, n in cuts])
        return mine == digest(data[at:at + n] for at, n in cuts)


def digest(ranges: Iterable[torch.Tensor]) -> int:
    """Return the digest of uint8 tensors ``[n]`` (of any device) in plain torch operations."""
    total, lengths = 0, []
    for number, data in enumerate(ranges):
        total += _sum_words(data, 0, number)
        lengths.append(data.numel())
    return finish(total, lengths)


def finish(total: int, lengths: Iterable[int]) -> int:
    """Return the digest from the sum over words and the ranges' lengths in bytes."""
    for number, length in enumerate(lengths):
        total += mix(length + (number + 1) * C3)
    return mix(total)


def mix(x: int) -> int:
    """Return the MurmurHash3 finaliser of ``x`` modulo 2**64."""
    x &= MASK
    x = ((x ^ (x >> 33)) * M1) & MASK
    x = ((x ^ (x >> 33)) * M2) & MASK
    return x ^ (x >> 33)


def _sum_words(data: torch.Tensor, first: int, number: int) -> int:
    """Return the sum over the words of a piece whose first word is word ``first``."""
    whole = data.numel() // 8 * 8
    total = 0
    for at in range(0, whole, REFERENCE_WORDS * 8):
        block = data[at:min(at + REFERENCE_WORDS * 8, whole)]
        if block.data_ptr() % 8:
            block = block.clone()
        total += _sum_block(block.view(torch.int64), first + at // 8, number)
    if whole < data.numel():
        last = torch.zeros(8, dtype=torch.uint8, device=data.device)
        last[:data.numel() - whole] = data[whole:]
        total += _sum_block(last.view(torch.int64), first + whole // 8, number)
    return total & MASK


def _sum_block(words: torch.Tensor, first: int, number: int) -> int:
    place = torch.arange(first + 1, first + 1 + len(words), device=words.device)
    x = words + place * _signed(C1) + _signed((number + 1) * C2)
    x = (x ^ _shifted(x)) * _signed(M1)
    x = (x ^ _shifted(x)) * _signed(M2)
    return int((x ^ _shifted(x)).sum())


def _shifted(x: torch.Tensor) -> torch.Tensor:
    """Return the logical right shift by 33; torch shifts int64 arithmetically."""
    return (x >> 33) & ((1 << 31) - 1)


def _signed(x: int) -> int:
    x &= MASK
    return x - (1 << 64) if x >> 63 else x


def _programs(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count * PROGRAMS_PER_SM


def _pieces(ranges: np.ndarray) -> np.ndarray:
    """Cut ranges into int64 ``[pieces, 4]`` rows of (address, bytes, first word, range)."""
    if ranges.dtype != np.int64 or ranges.ndim != 2 or ranges.shape[1] != 2:
        raise ContractError(
            f'digest ranges are {ranges.dtype} {list(ranges.shape)}; use int64 [n, 2] of '
            '(address, bytes)')
    nbytes = ranges[:, 1]
    if len(ranges) and nbytes.min() < 0:
        raise ContractError(f'digest range {int(nbytes.argmin())} has {int(nbytes.min())} bytes')
    counts = -(-nbytes // PIECE)
    index = np.repeat(np.arange(len(ranges)), counts)
    at = (np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)) * PIECE
    return np.stack([ranges[index, 0] + at, np.minimum(nbytes[index] - at, PIECE), at // 8, index],
                    axis=1)
