"""Copies between live memory, pages and the host arena: one submission each, nothing allocated."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
import contextlib
import ctypes
import functools
import threading
import time
from typing import Any

import numpy as np
import torch

from ..errors import CapsuleError
from ..kernels.copy import CopyTable
from ..kernels.copy import PIECE
from ..kernels.copy import Pieces
from ..kernels.copy import pieces
from ..kernels.digest import DigestTable
from ..runtime import Backend
from ..runtime import Event
from .boundary import Piece

TIMEOUT_S = 30.0
SPIN_S = 1e-3
CAPACITY = 2048
Segment = tuple[int, int, int]
"""(packed position, address, bytes)."""


def match(pieces: Iterable[Piece], segments: Sequence[Segment], row: int) -> np.ndarray:
    """Copies from stored form to live memory: int64 [n, 3] of (stored, live, bytes).

    :param segments: the stored form in packed order; each range is contiguous on both sides.
    """
    found: list[tuple[int, int, int]] = []
    at = 0
    for piece in pieces:
        begin, end = piece.packed, piece.packed + piece.nbytes
        live = piece.address + row * piece.row_stride
        while segments[at][0] + segments[at][2] <= begin:
            at += 1
        here = at
        while begin < end:
            start, address, size = segments[here]
            count = min(end, start + size) - begin
            found.append((address + begin - start, live, count))
            begin, live, here = begin + count, live + count, here + 1
    return np.array(found, np.int64).reshape(-1, 3)


def stretches(
    sources: Sequence[Segment], targets: Sequence[Segment], nbytes: int
) -> np.ndarray:
    """Copies from one stored form to another: int64 [n, 3] of (source, target, bytes)."""
    found: list[tuple[int, int, int]] = []
    at = left = right = 0
    while at < nbytes:
        s, t = sources[left], targets[right]
        count = min(s[0] + s[2], t[0] + t[2], nbytes) - at
        found.append((s[1] + at - s[0], t[1] + at - t[0], count))
        at += count
        left += at == s[0] + s[2]
        right += at == t[0] + t[2]
    return np.array(found, np.int64).reshape(-1, 3)


def coalesce(ranges: np.ndarray) -> list[tuple[int, int, int]]:
    """Join copies that go on where the one before ended, on both sides; empty ones go."""
    found: list[tuple[int, int, int]] = []
    for source, target, size in ranges.tolist():
        if found:
            s, t, n = found[-1]
            if s + n == source and t + n == target:
                found[-1] = (s, t, n + size)
                continue
        if size:
            found.append((source, target, size))
    return found


class Copies:
    """A list of copies prepared for both ways of moving; made once, used again by each restore.

    :param ranges: int64 [n, 3] of (source, target, bytes).
    """

    def __init__(self, ranges: np.ndarray) -> None:
        self.nbytes = int(ranges[:, 2].sum())
        self.parts = [pieces(part) for part in _parts(ranges, self.nbytes)]
        self._first: tuple[Copies, int, int] | None = None

    def reversed(self) -> Copies:
        """The same copies the other way."""
        return self._with([Pieces(part.rows[:, [1, 0, 2]]) for part in self.parts])

    def moved(self, source: int, target: int) -> Copies:
        """The same copies between addresses so many bytes further on."""
        by = np.array((source, target, 0), np.int64)
        moved = self._with([Pieces(part.rows + by) for part in self.parts])
        moved._first = (self, source, target)
        return moved

    def _with(self, parts: list[Pieces]) -> Copies:
        made = object.__new__(Copies)
        made.nbytes, made.parts, made._first = self.nbytes, parts, None
        return made

    @functools.cached_property
    def joined(self) -> list[tuple[int, int, int]]:
        """The copies for DMA: neighbours joined, empty ones left out."""
        if self._first is None:
            return coalesce(np.concatenate([part.rows for part in self.parts]))
        first, source, target = self._first
        return [(s + source, t + target, n) for s, t, n in first.joined]


class Way:
    """Copies between one row of live memory and its stored form, all but for where that lies.

    Nearly every capsule lies in one run of pages; then only an address is added for each.

    :param found: the pieces of a packing.
    """

    def __init__(self, found: Sequence[Piece], row: int) -> None:
        self._pieces, self._row = found, row
        self._down = Copies(np.array(
            [(p.packed, p.address + row * p.row_stride, p.nbytes) for p in found], np.int64
        ).reshape(-1, 3))
        self._up = self._down.reversed()

    def down(self, segments: Sequence[Segment]) -> Copies:
        """From stored form to live memory."""
        if len(segments) != 1:
            return Copies(match(self._pieces, segments, self._row))
        return self._down.moved(segments[0][1], 0)

    def up(self, segments: Sequence[Segment]) -> Copies:
        """From live memory to stored form."""
        if len(segments) != 1:
            return self.down(segments).reversed()
        return self._up.moved(0, segments[0][1])


class Unended(CapsuleError):
    """A copy that did not end in time: the device may still write to where it goes."""


def nothing() -> None:
    """Do nothing meanwhile."""


class Mover:
    """The ways bytes move: the table kernel on the device, DMA between it and the host.

    Made once per store; allocates nothing afterwards. Calls return when the copy is done, also
    when they raise, but for `Unended`; they may come from any thread. One device and one host
    submission may be in flight: a long DMA of one session does not hold up the reset of another.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._cuda = backend.name == 'cuda'
        self._device_lock, self._host_lock = threading.Lock(), threading.Lock()
        self._stream = backend.stream(0)
        self._host_event, self._device_event = backend.event(), backend.event()
        self._table = CopyTable(backend, CAPACITY)
        self._digests = DigestTable(backend, CAPACITY)

    def device(self, copies: Copies, stream: Any = None,
               meanwhile: Callable[[], None] = nothing) -> None:
        """Copy within device memory and wait: one submission per 2,048 pieces of 2 MiB.

        :param stream: the lane's where live memory is touched, None for the store's own.
        :param meanwhile: called while the device copies; reads none of what is written.
        """
        stream = stream or self._stream
        with self._device_lock:
            try:
                for part in copies.parts:
                    self._table.fill(part)
                    self._table.submit(stream)
                meanwhile()
            except BaseException:
                _settle(self._device_event, stream, copies.nbytes)
                raise
            wait_for(self._table.event, copies.nbytes)

    def host(self, copies: Copies, stream: Any = None,
             meanwhile: Callable[[], None] = nothing) -> None:
        """Copy between device and pinned host memory and wait; parameters as of `device`."""
        if not self._cuda:
            for source, target, size in copies.joined:
                ctypes.memmove(target, source, size)
            meanwhile()
            return
        stream = stream or self._stream
        with self._host_lock:
            try:
                self._submit_host(copies.joined, stream.cuda_stream)
                self._host_event.record(stream)
                meanwhile()
            except BaseException:
                _settle(self._host_event, stream, copies.nbytes)
                raise
            wait_for(self._host_event, copies.nbytes)

    def start(self, ranges: list[tuple[int, int, int]], stream: Any) -> None:
        """Submit (source, target, bytes) in this order to a stream; on the cpu they are done."""
        if self._cuda:
            self._submit_host(ranges, stream.cuda_stream)
            return
        for source, target, size in ranges:
            ctypes.memmove(target, source, size)

    def wait(self, stream: Any = None) -> None:
        """Wait for what torch has submitted to a stream, by the device's or the lane's."""
        with self._device_lock:
            self._device_event.record(stream or self._stream)
            wait_for(self._device_event, 0)

    def digest(self, copies: Copies, side: int, stream: Any = None) -> tuple[int, ...]:
        """Digests of one side of copies (0 source, 1 target): equal lists of equal cuts agree."""
        found = []
        with self._device_lock:
            for part in copies.parts:
                self._digests.fill(part.rows[:, [side, 2]])
                self._digests.submit(stream or self._stream)
                found.append(self._digests.result())
        return tuple(found)

    def _submit_host(self, ranges: list[tuple[int, int, int]], stream: int) -> None:
        from cuda.bindings import runtime

        # One call a range: the first bytes move while the next ranges are submitted. A batch call
        # (cudaMemcpyBatchAsync) spends 120 us on 13 ranges before it starts (H200, cuda-bindings).
        with torch.cuda.device(self._backend.device):
            for source, target, size in ranges:
                (status,) = runtime.cudaMemcpyAsync(
                    target, source, size, runtime.cudaMemcpyKind.cudaMemcpyDefault, stream
                )
                if int(status) != 0:
                    raise CapsuleError(f'the driver refused a copy of {size} bytes: {status}')


def _settle(event: Event, stream: Any, nbytes: int) -> None:
    """Wait for what was submitted before a failure: its pages go back next."""
    with contextlib.suppress(RuntimeError):  # of a lost device, which writes nothing any more
        event.record(stream)
        wait_for(event, nbytes)


def wait_for(event: Event, nbytes: int) -> None:
    """Wait for a submission, the first millisecond without a pause; raises Unended."""
    spin_until = time.perf_counter() + SPIN_S
    while not event.query():
        if time.perf_counter() > spin_until:
            break
        time.sleep(0.0)
    else:
        return
    if not event.wait(TIMEOUT_S):
        raise Unended(
            f'a capsule copy of {nbytes} bytes did not finish within {TIMEOUT_S} s: the device '
            'is stuck, restart the process'
        )


def _parts(ranges: np.ndarray, nbytes: int) -> list[np.ndarray]:
    """Cut a list of copies so that each part fits the table; nearly always one part."""
    if nbytes // PIECE + len(ranges) <= CAPACITY:
        return [ranges]
    step = CAPACITY // 4 * PIECE
    cut = np.array([
        (source + at, target + at, min(step, size - at))
        for source, target, size in ranges.tolist()
        for at in range(0, size, step)
    ], np.int64)
    part = np.cumsum(-(-cut[:, 2] // PIECE)) // (CAPACITY // 2)
    return [cut[part == number] for number in np.unique(part)]
