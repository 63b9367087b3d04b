"""What snapshot and restore cost in each tier, beside the copy that they cannot beat."""
from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
import os
from pathlib import Path
import tempfile
import time
from typing import Any

import numpy as np
import torch

from flashrt_core.bench._report import percentiles
from flashrt_core.bench._report import Report
from flashrt_core.capsule import Boundary
from flashrt_core.capsule import CapsuleStore
from flashrt_core.capsule import files
from flashrt_core.capsule import Identity
from flashrt_core.capsule.hashing import WORKERS
from flashrt_core.command_line import whole_number
from flashrt_core.runtime import Backend
from flashrt_core.runtime import BufferSet
from flashrt_core.runtime import BufferSpec
from flashrt_core.runtime import Kind
from flashrt_core.runtime import Lane
from flashrt_core.runtime import pick_backend
from flashrt_core.runtime import Role

MB = 1_000_000
TOKEN = (2, 4, 256)                     # bf16: 4,096 bytes per token and layer
SHAPES_MB = {16: (4, 12), 300: (154, 16), 1300: (154, 16)}  # size: (small state, KV layers)
TARGETS = {'gpu': 1.3, 'host': 1.15, 'disk': 1.3}
SMALL_US = 40.0
STATISTICS = ('allocation.all.allocated', 'allocation.all.freed', 'num_device_alloc',
              'num_device_free', 'reserved_bytes.all.current')


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument('--device', choices=('auto', 'cpu', 'cuda'), default='auto')
    parser.add_argument('--sizes-mb', type=whole_number(1), nargs='+', default=[16, 300, 1300],
                        help='boundaries (default 16 300 1300)')
    parser.add_argument('--runs', type=whole_number(1), default=500,
                        help='of each verb at 16 MB, fewer for larger ones (default 500)')
    parser.add_argument('--cycles', type=whole_number(1), default=10_000,
                        help='mixed snapshot, restore, drop at 95 %% of the budget')
    parser.add_argument('--disk', type=Path, default=None,
                        help='directory on the disk to measure (default: a temporary one)')
    parser.add_argument('--quick', action='store_true', help='one small boundary, a few runs')


def run(arguments: argparse.Namespace) -> Report:
    """Measure and return the report."""
    if arguments.quick:
        arguments.sizes_mb, arguments.runs, arguments.cycles = [2], 5, 60
    report = Report('capsule', details={'runs': arguments.runs})
    backend = pick_backend(arguments.device)
    for size in arguments.sizes_mb:
        with Lane(backend, 'bench') as lane, tempfile.TemporaryDirectory(
                dir=arguments.disk, prefix='capsule-bench-') as folder:
            Bench(report, backend, lane, size, arguments.runs, Path(folder)).measure()
    with Lane(backend, 'bench') as lane:
        _cycles(report, backend, lane, arguments.cycles)
    report.notes += [
        'Times span the whole verb on the lane thread: lookup, checks, submission, completion.',
        'Floors: gpu and host, one plain copy of the same bytes in a row of such copies '
        '(device to device; pinned host memory); disk, raw parallel or single-threaded write plus '
        'fsync, or read, of the same bytes, whichever is faster, without digests.',
        'Disk loads: warm finds the file in the page cache, cold after posix_fadvise(DONTNEED); '
        'saves count from host memory to the synced directory.',
    ]
    return report


class Bench:
    """One boundary size through all tiers."""

    def __init__(self, report: Report, backend: Backend, lane: Lane, size_mb: int, runs: int,
                 folder: Path) -> None:
        self.report, self.backend, self.lane = report, backend, lane
        self.runs = max(5, min(runs, runs * 16 // size_mb))
        self.folder = folder
        small, layers = SHAPES_MB.get(size_mb, (size_mb // 4, 4))
        tokens = (size_mb - small) * MB // layers // 4096
        self.buffers = _buffers(backend, small * MB // 4, layers, tokens)
        self.boundary = _boundary(self.buffers, lane, layers, tokens)
        self.nbytes = sum(size for _, size in self.boundary.ranges())
        room = self.nbytes + (8 << 20)
        self.store = CapsuleStore(
            backend, 2 * room, 2 * room, disk_bytes=8 * room, directory=folder, allow_disk=True)

    def measure(self) -> None:
        """Add the rows of every tier."""
        for tier in ('gpu', 'host'):
            self._memory(tier)
        self._disk()
        self.store.close()

    def _on_lane(self, fn: Callable[[], Any]) -> Any:
        return self.lane.call(fn).result()

    def _row(self, what: str, samples: list[float], floor_us: float, tier: str) -> None:
        found = percentiles(samples)
        ratio = found['p50'] / floor_us
        small = tier == 'gpu' and self.nbytes < 32 * MB
        met = found['p50'] <= SMALL_US if small else ratio <= TARGETS[tier]
        self.report.add(
            what=what, mb=round(self.nbytes / MB, 1), n=found['n'], p50_us=found['p50'],
            p99_us=found['p99'], floor_us=floor_us, ratio=ratio,
            gb_per_s=self.nbytes / found['p50'] / 1e3,
            target=f'{SMALL_US:.0f} us' if small else f'{TARGETS[tier]}x', met=met)

    def _memory(self, tier: str) -> None:
        store, boundary = self.store, self.boundary

        def verbs() -> tuple[list[float], list[float]]:
            out, back = [], []
            for _ in range(self.runs + 3):
                started = time.perf_counter()
                store.snapshot(boundary, 'x', tier=tier)
                middle = time.perf_counter()
                capsule = store._ledger.find('', 'x')
                # A lease keeps a host capsule in its tier; promotion is measured by its own row.
                with store._tiers.leased(capsule), store._tiers.leased(capsule):
                    begun = time.perf_counter()
                    store.restore(boundary, 'x')
                    back.append((time.perf_counter() - begun) * 1e6)
                out.append((middle - started) * 1e6)
                store.drop('x')
            return out[3:], back[3:]

        out, back = self._on_lane(verbs)
        self._row(f'snapshot {tier}', out, self._copy_us(tier, down=True), tier)
        self._row(f'restore {tier}', back, self._copy_us(tier, down=False), tier)
        if tier == 'gpu':
            self._again()

    def _again(self) -> None:
        """Restore of one capsule over and over: what every reset after the first costs."""
        def verbs() -> list[float]:
            self.store.snapshot(self.boundary, 'x')
            samples = [self.store.restore(self.boundary, 'x').us for _ in range(self.runs + 3)]
            self.store.drop('x')
            return samples[3:]

        self._row('reset gpu', self._on_lane(verbs), self._copy_us('gpu', down=False), 'gpu')

    def _copy_us(self, tier: str, down: bool) -> float:
        """Microseconds of a plain copy of the same bytes."""
        host = tier == 'host'
        source = self.backend.empty((self.nbytes,), torch.uint8, host=host and not down).fill_(1)
        target = self.backend.empty((self.nbytes,), torch.uint8, host=host and down).fill_(0)
        begin, end, count = self.backend.event(), self.backend.event(), 10

        def copies() -> float:
            target.copy_(source, non_blocking=True)
            begin.record(self.lane.stream)
            for _ in range(count):
                target.copy_(source, non_blocking=True)
            end.record(self.lane.stream)
            end.wait(60.0)
            return begin.elapsed_us(end) / count

        self.backend.synchronize()
        return float(self._on_lane(copies))

    def _disk(self) -> None:
        store, count = self.store, max(3, min(30, self.runs // 10))
        self._on_lane(lambda: store.snapshot(self.boundary, 'x', tier='host'))
        data = store._tiers.staging.views(store._ledger.find('', 'x').place)  # type: ignore[arg-type]
        saves, raw_saves = [], []
        for _ in range(count):
            raw_saves.append(min(self._raw_write(data, threads) for threads in (1, WORKERS)))
            started = time.perf_counter()
            store.move('x', 'disk')
            saves.append((time.perf_counter() - started) * 1e6)
            store.prefetch('x')
            self._forget_file()
        self._row('save disk', saves, float(np.median(raw_saves)), 'disk')
        self._raw_write(data, WORKERS, keep=True)
        self._on_lane(lambda: store.move('x', 'disk'))
        for state in ('warm', 'cold'):
            loads, raw_loads = [], []
            for _ in range(count):
                self._cache(state)
                raw_loads.append(min(self._raw_read(data, threads, state)
                                     for threads in (1, WORKERS)))
                self._cache(state)
                started = time.perf_counter()
                store.prefetch('x')
                loads.append((time.perf_counter() - started) * 1e6)
                store.move('x', 'disk')
            self._row(f'load disk {state}', loads, float(np.median(raw_loads)), 'disk')

    def _forget_file(self) -> None:
        """Delete the file only, so that the next save writes it again."""
        disk, capsule = self.store._tiers.disk, self.store._ledger.find('', 'x')
        assert disk is not None
        disk.drop(capsule.key)
        capsule.on_disk = False

    def _cache(self, state: str) -> None:
        for path in self.folder.iterdir():
            fd = os.open(path, os.O_RDONLY)
            if state == 'cold':
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while os.read(fd, 64 << 20):
                    pass
            os.close(fd)

    def _raw_write(self, data: list[memoryview], threads: int, keep: bool = False) -> float:
        path = self.folder / 'raw'
        started = time.perf_counter()
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        in_pieces(data, threads, lambda view, at: os.pwrite(fd, view, at))
        os.fsync(fd)
        elapsed_us = (time.perf_counter() - started) * 1e6
        os.close(fd)
        if not keep:
            path.unlink()
        return elapsed_us

    def _raw_read(self, data: list[memoryview], threads: int, state: str) -> float:
        self._cache(state)
        fd = os.open(self.folder / 'raw', os.O_RDONLY)
        started = time.perf_counter()
        in_pieces(data, threads, lambda view, at: os.preadv(fd, [view], at))
        elapsed_us = (time.perf_counter() - started) * 1e6
        os.close(fd)
        return elapsed_us


def in_pieces(data: list[memoryview], threads: int,
               do: Callable[[memoryview, int], int]) -> None:
    """Read or write all of `data` at its place, in pieces of 4 MiB by so many threads."""
    jobs, at = [], 0
    for view in data:
        for begin in range(0, len(view), files.PIECE_BYTES):
            jobs.append((view[begin:begin + files.PIECE_BYTES], at + begin))
        at += len(view)
    if threads == 1:
        done = [do(*job) for job in jobs]
    else:
        with ThreadPoolExecutor(threads) as pool:
            done = list(pool.map(lambda job: do(*job), jobs))
    if sum(done) != at:
        raise OSError(f'{sum(done)} of {at} bytes were moved')


def _buffers(backend: Backend, small: int, layers: int, tokens: int) -> BufferSet:
    return BufferSet(backend, [
        BufferSpec('tick', Role.STATE, torch.int64, (), kind=Kind.META),
        BufferSpec('recurrent', Role.STATE, torch.float32, (max(1, small),), kind=Kind.RECURRENT),
        *(BufferSpec(f'kv.{layer}', Role.STATE, torch.bfloat16, (tokens, *TOKEN), kind=Kind.KV)
          for layer in range(layers)),
    ], name='bench')


def _boundary(buffers: BufferSet, lane: Lane, layers: int, tokens: int) -> Boundary:
    extents = {f'kv.{layer}': tokens for layer in range(layers)}
    return Boundary(buffers, Identity({'config': 'bench'}), lambda: extents, lambda: 0, lane=lane)


def _cycles(report: Report, backend: Backend, lane: Lane, cycles: int) -> None:
    """Mixed cycles with 95 % of the gpu pages in use; the allocator must not notice."""
    buffers = _buffers(backend, 250_000, 4, 200)
    boundary = _boundary(buffers, lane, 4, 200)
    need = -(-boundary.packing(boundary.extents()).nbytes // (2 << 20))
    store = CapsuleStore(backend, 40 * need * (2 << 20), 4 * need * (2 << 20))
    names = [f'k{number}' for number in range(38)]
    rng = np.random.default_rng(5)

    def turn(count: int) -> None:
        for number in range(count):
            name = names[number % len(names)]
            store.drop(name)
            store.snapshot(boundary, name)
            store.restore(boundary, names[int(rng.integers(len(names)))])
            store.mark(boundary)

    def statistics() -> dict[str, int]:
        found = torch.cuda.memory_stats() if backend.name == 'cuda' else {}
        return {key: int(found.get(key, 0)) for key in STATISTICS}

    def work() -> tuple[dict[str, int], dict[str, int], float]:
        for name in names:
            store.snapshot(boundary, name)
        turn(len(names))
        before = statistics()
        started = time.perf_counter()
        turn(cycles)
        return before, statistics(), time.perf_counter() - started

    before, after, elapsed_s = lane.call(work).result()
    used = store.usage()['gpu']
    same = before == after
    report.details['allocator'] = {'before': before, 'after': after}
    report.notes.append(
        f'{cycles} cycles of drop, snapshot, restore and mark at '
        f'{used.used_bytes / used.budget_bytes:.0%} of the gpu budget: '
        f'{elapsed_s / cycles * 1e6:.0f} us each, allocator statistics '
        f'{"unchanged" if same else f"CHANGED from {before} to {after}"}'
        f'{"" if backend.name == "cuda" else " (no CUDA allocator here)"}.')
