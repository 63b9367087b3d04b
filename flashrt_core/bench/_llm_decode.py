"""Tables of decoding: one token a step, with drafts, in branches; and what all of it takes up."""
from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
import time

import numpy as np

from flashrt_core.bench._llm_setup import Bench
from flashrt_core.bench._llm_setup import device_bytes
from flashrt_core.bench._llm_setup import GREEDY
from flashrt_core.bench._llm_setup import MARKS
from flashrt_core.bench._report import percentiles
from flashrt_core.planners import Options
from flashrt_core.planners import Step

MB = 1e6


@dataclass
class Run:
    """Steps of one run: wall milliseconds, device milliseconds, tokens, drafts."""

    wall: list[float]
    device: list[float]
    tokens: list[int]
    drafted: int = 0
    accepted: int = 0


def decode(bench: Bench) -> None:
    """Steps at the shortest length: plain, with MTP's drafts, with the right drafts given."""
    length = min(bench.arguments.lengths)
    expected: list[int] = []
    cases: list[tuple[str, int]] = [('none', 0)]
    drafts = [K for K in bench.arguments.drafts if K <= bench.session.settings.draft_tokens]
    cases += [('MTP', K) for K in drafts] if bench.session.mtp else []
    cases += [('given', K) for K in drafts]
    for source, K in cases:
        bench.attempt('decode', {'length': length, 'drafts': source, 'K': K},
                      partial(_decode, bench, length, source, K, expected))


def _decode(bench: Bench, length: int, source: str, K: int, expected: list[int]) -> None:
    count = bench.arguments.decode_tokens
    if source != 'none' and not expected:
        raise RuntimeError('the run without drafts gave no tokens to compare with')
    bench.ready(length)
    run = _steps(bench, count, source, K, expected)
    if source == 'none':
        expected[:] = run.tokens
    floor_s = bench.sizes.step(length, rows=K + 1).seconds(bench.ceilings)
    if source == 'MTP':
        floor_s += bench.sizes.drafts(length, K).seconds(bench.ceilings)
    per_step = (len(run.tokens) - 1) / len(run.wall)
    found = percentiles(run.wall)
    bench.report.add(
        table='decode', length=length, drafts=source, K=K, steps=found['n'],
        tokens_per_step=per_step, acceptance=run.accepted / run.drafted if run.drafted else None,
        step_p50_ms=found['p50'], step_p99_ms=found['p99'],
        device_p50_ms=float(np.median(run.device)), step_floor_ms=floor_s * 1e3,
        of_floor=floor_s * 1e3 / found['p50'],
        ms_per_token=sum(run.wall) / (len(run.tokens) - 1),
        same_tokens=run.tokens[: len(expected)] == expected[: len(run.tokens)])


def _steps(bench: Bench, count: int, source: str, K: int, expected: Sequence[int]) -> Run:
    """Decode ``count`` tokens after the first one, which is sampled before the clock starts."""
    session, run = bench.session, Run([], [], [])
    run.tokens.append(bench.next_token())
    options = Options(draft_tokens=K) if source == 'MTP' else GREEDY
    while len(run.tokens) <= count:
        given = expected[len(run.tokens) :][:K] if source == 'given' else ()
        if source == 'given' and len(given) < K:
            break
        begin = time.perf_counter()
        step: Step = session.decode(options, drafts=given).result()
        run.wall.append((time.perf_counter() - begin) * 1e3)
        run.device.append(step.us / 1e3)
        run.tokens += step.tokens
        run.drafted += step.drafted
        run.accepted += step.accepted
    return run


def fork(bench: Bench) -> None:
    """Steps of branches that share one KV, beside a step of the trunk alone."""
    lengths = sorted({min(bench.arguments.lengths), max(bench.arguments.lengths)})
    for length in lengths:
        alone: list[float] = []
        rows = [0, 1, bench.session.settings.branches]
        for count in dict.fromkeys(rows) if rows[-1] else ():
            bench.attempt('fork', {'length': length, 'branches': count},
                          partial(_fork, bench, length, count, alone))


def _fork(bench: Bench, length: int, rows: int, alone: list[float]) -> None:
    bench.ready(length)
    count = min(bench.arguments.decode_tokens, bench.session.settings.tail_tokens)
    fork_ms = None
    if rows:
        begin = time.perf_counter()
        branches = bench.session.fork(range(rows))
        fork_ms = (time.perf_counter() - begin) * 1e3
        try:
            wall, device = _timed(lambda: branches.step(GREEDY).result().us, count)
        finally:
            branches.drop()
    else:
        wall, device = _timed(lambda: bench.session.decode(GREEDY).result().us, count)
        alone[:] = [percentiles(wall)['p50']]
    found = percentiles(wall)
    floor_ms = bench.sizes.step(length, max(1, rows), max(1, rows)).seconds(bench.ceilings) * 1e3
    bench.report.add(
        table='fork', length=length, branches=rows, n=found['n'], fork_ms=fork_ms,
        step_p50_ms=found['p50'], step_p99_ms=found['p99'], device_p50_ms=float(np.median(device)),
        floor_ms=floor_ms, of_floor=floor_ms / found['p50'],
        over_one=found['p50'] / alone[0] if alone else None)


def _timed(step: Callable[[], float], count: int) -> tuple[list[float], list[float]]:
    """Return wall and device milliseconds of steps, after one that only samples."""
    step()
    wall, device = [], []
    for _ in range(count):
        begin = time.perf_counter()
        device.append(step() / 1e3)
        wall.append((time.perf_counter() - begin) * 1e3)
    return wall, device


def memory(bench: Bench) -> None:
    """What the session and its capsules take up, beside the arithmetic of the sizes."""
    bench.attempt('memory', {'part': 'all'}, partial(_memory, bench))


def _memory(bench: Bench) -> None:
    found, sizes, s = bench.session.memory(), bench.sizes, bench.session.settings
    gpu = bench.gpu.usage()['gpu'].budget_bytes
    rows: list[tuple[str, int, int | None]] = [
        ('weights', sizes.weights, found['weights']),
        (f'state of {bench.c.context} tokens', sizes.state(), found['state']),
        ('state kept to undo a step', sizes.small, found['undo']),
        (f'{MARKS} marks', MARKS * sizes.small, None),
        (f'{s.branches} branches, tails of {s.tail_tokens}', sizes.branches(s),
         found['branches']),
        ('capsules on the device', bench.gpu_bytes, gpu),
    ]
    for part, arithmetic, measured in rows:
        _memory_row(bench, part, arithmetic, measured)
    total = sum(arithmetic for _, arithmetic, _ in rows)
    host = bench.low.usage()['host'].budget_bytes
    _memory_row(bench, 'inputs, outputs, other buffers', None, found['other_buffers'])
    _memory_row(bench, 'capsules in host memory (pinned)', None, host)
    if bench.session.lane.backend.name == 'cuda':
        for name, now in device_bytes().items():
            _memory_row(bench, f'all of it: {name}', total, now - bench.before[name])
    else:
        _memory_row(bench, 'all of it', total, None)


def _memory_row(bench: Bench, part: str, arithmetic: int | None, measured: int | None) -> None:
    ratio = None if arithmetic is None or measured is None or not arithmetic else (
        measured / arithmetic)
    bench.report.add(
        table='memory', part=part, arithmetic_mb=None if arithmetic is None else arithmetic / MB,
        measured_mb=None if measured is None else measured / MB, ratio=ratio)
