"""Tables of reuse: cold against capsule, what it costs, what is in it, and what it must hold."""
from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
import os
from pathlib import Path
import time

import numpy as np
import torch
from torch import Tensor

from flashrt_core.bench._llm_setup import Bench
from flashrt_core.bench._llm_setup import timed_ms
from flashrt_core.bench._report import Cell
from flashrt_core.bench._report import percentiles
from flashrt_core.bench.capsule import in_pieces
from flashrt_core.capsule import CapsuleStore
from flashrt_core.capsule.hashing import WORKERS
from flashrt_core.planners.layout import MTP_KV
from flashrt_core.runtime import Kind

MB = 1e6
DISK_REPEATS = 5     # each reads the file three times from the disk
IN_TURN = 'host, in turn'  # the append begins when the restore has ended
ROLLED_BACK = 2      # tokens decoded between a mark and the rollback to it


@dataclass(frozen=True)
class Visit:
    """Milliseconds of one visit and of its parts."""

    total: float
    restore: float
    append: float
    token: float
    raw: float = 0.0


# -- cold against capsule ---------------------------------------------------------------------


def ttft(bench: Bench, paths: Sequence[str] = ('cold', 'gpu', 'host', IN_TURN), repeats: int = 0,
         table: str = 'ttft') -> None:
    """From host token ids to the first token id on the host, after other contexts ran.

    :param repeats: 0 takes those of the arguments.
    """
    repeats = repeats or bench.arguments.repeats
    bench.drop_all()
    bench.keep_others()
    for length in bench.arguments.lengths:
        for path in paths:
            measure = _cold if path == 'cold' else _warm
            bench.attempt(table, {'mtp': bench.c.mtp, 'length': length, 'path': path},
                          partial(measure, bench, length, path, repeats))
    bench.drop_all()


def disk(bench: Bench) -> None:
    """The same from a file that is not in the page cache; last, since a disk may be slow."""
    ttft(bench, ('disk',), min(bench.arguments.repeats, DISK_REPEATS), 'disk')


def _cold(bench: Bench, length: int, path: str, repeats: int) -> None:
    session, ids = bench.session, bench.tokens(length, length)

    def visit() -> Visit:
        bench.run_others()
        begin = time.perf_counter()
        session.prefill(ids).result()
        middle = time.perf_counter()
        bench.next_token()
        end = time.perf_counter()
        return Visit((end - begin) * 1e3, 0.0, (middle - begin) * 1e3, (end - middle) * 1e3)

    visits = bench.samples(repeats, visit)
    work = bench.sizes.first_token(0, length)
    floor_ms = work.seconds(bench.ceilings) * 1e3
    cold_ms = percentiles(v.total for v in visits)['p50']
    bench.cold[length] = cold_ms, work.computing(bench.ceilings) * 1e3 / cold_ms
    _row(bench, length, path, visits, floor_ms)


def _warm(bench: Bench, length: int, path: str, repeats: int) -> None:
    store = bench.gpu if path == 'gpu' else bench.low
    bench.ready(length)
    nbytes = bench.snapshot(store, 'visited', path.split(',')[0])
    session = bench.session.boundary.session
    try:
        if path == 'disk':
            store.saved('visited', session).result()
            visits = bench.samples(repeats, lambda: _from_disk(bench, store, session), warm=0)
        else:
            visit = _overlapped if path == 'host' else _visit
            visits = bench.samples(repeats, lambda: visit(bench, store))
    finally:
        store.drop('visited', session)
    ceilings = bench.ceilings
    host_s = nbytes / ceilings.host
    restore_s = {'gpu': 2 * nbytes / ceilings.bytes, 'host': host_s, IN_TURN: host_s,
                 'disk': float(np.median([v.raw for v in visits])) / 1e3}[path]
    work_s = bench.sizes.first_token(length, len(bench.suffix)).seconds(ceilings)
    floor_s = max(restore_s, work_s) if path == 'host' else restore_s + work_s
    _row(bench, length, path, visits, floor_s * 1e3, nbytes)


def _visit(bench: Bench, store: CapsuleStore, raw_ms: float = 0.0) -> Visit:
    bench.run_others()
    begin = time.perf_counter()
    bench.restore(store, 'visited')
    restored = time.perf_counter()
    bench.session.append(bench.suffix).result()
    appended = time.perf_counter()
    bench.next_token()
    end = time.perf_counter()
    return Visit((end - begin) * 1e3, (restored - begin) * 1e3, (appended - restored) * 1e3,
                 (end - appended) * 1e3, raw_ms)


def _overlapped(bench: Bench, store: CapsuleStore) -> Visit:
    """Visit with the append beside the restore; its part is what the restore leaves of both."""
    bench.run_others()
    begin = time.perf_counter()
    done = bench.session.restore_and_append(store, 'visited', bench.suffix).result()
    appended = time.perf_counter()
    bench.next_token()
    end = time.perf_counter()
    assert done.restored is not None
    restore_ms = done.restored.us / 1e3
    return Visit((end - begin) * 1e3, restore_ms, (appended - begin) * 1e3 - restore_ms,
                 (end - appended) * 1e3)


def _from_disk(bench: Bench, store: CapsuleStore, session: str) -> Visit:
    """Visit with the file out of the page cache; its raw read was just timed the same way."""
    store.move('visited', 'disk', session)
    (file,) = (path for path in bench.folder.iterdir() if path.stat().st_size > 0)
    raw_ms = min(raw_read_ms(file, threads) for threads in (1, WORKERS))
    _forget(file)
    return _visit(bench, store, raw_ms)


def raw_read_ms(file: Path, threads: int) -> float:
    """Read a file that is not in the page cache, in pieces by so many threads."""
    _forget(file)
    into = np.ones(file.stat().st_size, np.uint8).data  # its pages are there already
    fd = os.open(file, os.O_RDONLY)
    try:
        return timed_ms(lambda: in_pieces(
            [into], threads, lambda view, at: os.preadv(fd, [view], at)))
    finally:
        os.close(fd)


def _forget(file: Path) -> None:
    fd = os.open(file, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def _row(bench: Bench, length: int, path: str, visits: list[Visit], floor_ms: float,
         nbytes: int = 0) -> None:
    found = percentiles(v.total for v in visits)
    cold_ms, cold_mfu = bench.cold.get(length, (None, None))
    name = f'{path} {length}{"" if bench.c.mtp else " without MTP"}, ms'
    bench.report.details[name] = [v.total for v in visits]
    restore, append, token, raw = (float(np.median([getattr(v, name) for v in visits]))
                                   for name in ('restore', 'append', 'token', 'raw'))
    of_disk: dict[str, Cell] = {} if path != 'disk' else {
        'raw_read_ms': raw, 'raw_gb_s': nbytes / raw / 1e6,
        'over_raw': found['p50'] / (raw + append + token)}
    bench.report.add(
        table='disk' if path == 'disk' else 'ttft', mtp=bench.c.mtp, length=length, path=path,
        n=found['n'], p50_ms=found['p50'], p99_ms=found['p99'], floor_ms=floor_ms,
        of_floor=floor_ms / found['p50'], cold_mfu=cold_mfu,
        speedup=None if cold_ms is None else cold_ms / found['p50'],
        restore_ms=restore, append_ms=append, token_ms=token, **of_disk)


# -- what a capsule holds and costs -----------------------------------------------------------


def sizes(bench: Bench) -> None:
    """Bytes of a capsule by what they are, beside the arithmetic."""
    for length in bench.arguments.lengths:
        bench.attempt('sizes', {'mtp': bench.c.mtp, 'length': length},
                      partial(_sizes, bench, length))


def _sizes(bench: Bench, length: int) -> None:
    boundary = bench.session.boundary
    bench.ready(length)
    extents = boundary.extents()
    spent = dict.fromkeys(('kv', 'mtp_kv', 'recurrent', 'conv', 'rest'), 0)
    for entry in boundary.entries:
        part = 'mtp_kv' if entry.name == MTP_KV else entry.kind
        nbytes = entry.token_bytes * extents[entry.name] if entry.tokens else entry.nbytes
        spent[part if part in spent else 'rest'] += nbytes
    total = boundary.packing(extents).payload
    spent['rest'] += total - sum(spent.values())  # alignment of the small state
    arithmetic = bench.sizes.capsule(length)
    bench.report.add(
        table='sizes', mtp=bench.c.mtp, length=length,
        **{f'{name}_mb': nbytes / MB for name, nbytes in spent.items()},
        capsule_mb=total / MB, arithmetic_mb=arithmetic / MB, ratio=total / arithmetic)


def cost(bench: Bench) -> None:
    """Each verb alone, on the lane thread, beside the bytes that it moves."""
    for length in bench.arguments.lengths:
        bench.drop_all()
        for what, measure in (('snapshot gpu', _snapshots), ('restore gpu', _restores),
                              ('restore host', _restores), ('rollback', _rollbacks),
                              ('append', _appends)):
            bench.attempt('cost', {'length': length, 'what': what},
                          partial(measure, bench, length, what))
    bench.drop_all()


def _cost_row(bench: Bench, length: int, what: str, wall_us: list[float], copy_us: list[float],
              nbytes: float, floor_s: float) -> None:
    found = percentiles(wall_us)
    bench.report.add(
        table='cost', length=length, what=what, n=found['n'], mb=nbytes / MB, p50_us=found['p50'],
        p99_us=found['p99'], copy_p50_us=float(np.median(copy_us)) if copy_us else None,
        floor_us=floor_s * 1e6, over_floor=found['p50'] / floor_s / 1e6)


def _snapshots(bench: Bench, length: int, what: str) -> None:
    bench.ready(length)
    boundary, name = bench.session.boundary, bench.session.boundary.session
    nbytes = bench.sizes.capsule(length)

    def once() -> float:
        us = bench.on_lane(lambda: timed_ms(
            lambda: bench.gpu.snapshot(boundary, 'x', tier='gpu'))) * 1e3
        bench.gpu.drop('x', name)
        return us

    _cost_row(bench, length, what, bench.samples(bench.arguments.repeats, once), [], nbytes,
              2 * nbytes / bench.ceilings.bytes)


def _restores(bench: Bench, length: int, what: str) -> None:
    bench.ready(length)
    tier = what.split()[-1]
    store = bench.gpu if tier == 'gpu' else bench.low
    nbytes = bench.snapshot(store, 'x', tier)
    try:
        found = bench.samples(bench.arguments.repeats, lambda: bench.restore(store, 'x'))
    finally:
        store.drop('x', bench.session.boundary.session)
    ceilings = bench.ceilings
    floor_s = 2 * nbytes / ceilings.bytes if tier == 'gpu' else nbytes / ceilings.host
    _cost_row(bench, length, what, [r.us for r in found], [r.copy_us for r in found], nbytes,
              floor_s)


def _rollbacks(bench: Bench, length: int, what: str) -> None:
    bench.ready(length)
    boundary, store = bench.session.boundary, bench.gpu
    mark = bench.on_lane(lambda: store.mark(boundary))

    def once() -> tuple[float, float]:
        bench.greedy(ROLLED_BACK)
        report = bench.on_lane(lambda: store.rollback(boundary, to=mark))
        return report.us, report.copy_us

    found = bench.samples(bench.arguments.repeats, once)
    nbytes = bench.sizes.small
    _cost_row(bench, length, what, [us for us, _ in found], [us for _, us in found], nbytes,
              2 * nbytes / bench.ceilings.bytes)


def _appends(bench: Bench, length: int, what: str) -> None:
    def once() -> tuple[float, float]:
        bench.ready(length)
        begin = time.perf_counter()
        appended = bench.session.append(bench.suffix).result()
        return (time.perf_counter() - begin) * 1e6, sum(appended.chunks_us)

    found = bench.samples(bench.arguments.repeats, once)
    work = bench.sizes.tokens(length, len(bench.suffix))
    _cost_row(bench, length, what, [us for us, _ in found], [us for _, us in found], work.bytes,
              work.seconds(bench.ceilings))


def working_set(bench: Bench) -> None:
    """Contexts revisited in turn: the first token must cost what it costs with one."""
    length = min(bench.arguments.lengths)
    bench.drop_all()
    one: list[float] = []
    for count in sorted({1, *bench.arguments.contexts}):
        bench.attempt('working_set', {'contexts': count, 'length': length},
                      partial(_round_robin, bench, count, length, one))
    bench.drop_all()


def _round_robin(bench: Bench, count: int, length: int, one: list[float]) -> None:
    held = {info.id for info in bench.gpu.list('gpu')}
    for i in range(count):
        if f'context-{i}' not in held:
            bench.session.prefill(bench.tokens(length, 1000 + i)).result()
            bench.snapshot(bench.gpu, f'context-{i}', 'gpu')
    turn = 0

    def visit() -> float:
        nonlocal turn
        turn += 1
        begin = time.perf_counter()
        bench.restore(bench.gpu, f'context-{turn % count}')
        bench.continue_with(bench.suffix)
        return (time.perf_counter() - begin) * 1e3

    found = percentiles(bench.samples(max(bench.arguments.repeats, count), visit))
    one[:] = one or [found['p50']]
    bench.report.add(table='working_set', contexts=count, length=length, n=found['n'],
                     p50_ms=found['p50'], p99_ms=found['p99'], ratio=found['p50'] / one[0])


# -- what happens without the rest ------------------------------------------------------------


def ablation(bench: Bench) -> None:
    """Restore everything, then put back other recurrent state behind the API's back.

    Restoring the KV alone is impossible through the API: a capsule is the whole boundary.
    """
    length, count = min(bench.arguments.lengths), bench.arguments.decode_tokens
    bench.drop_all()
    other: dict[str, Tensor] = {}
    expected: list[tuple[list[int], Tensor]] = []

    def prepare() -> None:
        bench.session.prefill(bench.tokens(length, length + 1)).result()
        bench.snapshot(bench.gpu, 'theirs', 'gpu')
        other.update(bench.on_lane(lambda: {
            b.name: b.row(0).clone() for b in bench.session.buffers.state()
            if b.kind in (Kind.RECURRENT, Kind.CONV)}))
        bench.session.prefill(bench.tokens(length, length)).result()
        bench.snapshot(bench.gpu, 'mine', 'gpu')
        expected.append(_outcome(bench, count))  # without a restore

    bench.attempt('ablation', {'length': length, 'restored': 'nothing, the reference'}, prepare)
    if not expected:
        return

    def spoil(kinds: tuple[Kind, ...], empty: bool) -> None:
        for b in bench.session.buffers.state():
            if b.kind in kinds:
                b.row(0).zero_() if empty else b.row(0).copy_(other[b.name])

    both = (Kind.RECURRENT, Kind.CONV)
    cases: list[tuple[str, Callable[[], None]]] = [
        ('everything', lambda: None),
        ("KV only, another context's state stays", lambda: spoil(both, empty=False)),
        ('KV only, empty state', lambda: spoil(both, empty=True)),
        ('all but the recurrent state', lambda: spoil((Kind.RECURRENT,), empty=False)),
        ('all but the convolution', lambda: spoil((Kind.CONV,), empty=False)),
    ]
    for name, change in cases:
        bench.attempt('ablation', {'length': length, 'restored': name},
                      partial(_compare, bench, name, change, expected[0], length))
    bench.drop_all()


def _outcome(bench: Bench, count: int) -> tuple[list[int], Tensor]:
    """Append the suffix; the logits after it and the greedy tokens that follow."""
    bench.session.append(bench.suffix).result()
    logits = bench.logits()
    return bench.greedy(count), logits


def _compare(bench: Bench, name: str, change: Callable[[], None],
             expected: tuple[list[int], Tensor], length: int) -> None:
    bench.restore(bench.gpu, 'theirs')  # what the session did last
    bench.restore(bench.gpu, 'mine')
    bench.on_lane(change)
    tokens, logits = _outcome(bench, len(expected[0]))
    differ = [i for i, pair in enumerate(zip(tokens, expected[0])) if pair[0] != pair[1]]
    gap = (logits - expected[1]).double()
    a, b = logits.double(), expected[1].double()
    bench.report.add(
        table='ablation', length=length, restored=name, tokens=len(tokens),
        diverging=len(differ), first_divergence=differ[0] if differ else None,
        logit_max_difference=float(gap.abs().max()),
        logit_difference_of_spread=float(gap.norm() / (b - b.mean()).norm()),
        logit_cosine=float(torch.dot(a, b) / a.norm() / b.norm()))
