"""``bench bringup``: what executor and planner cost each other in one process on one device.

Phases: the executor ticks alone, the planner decodes alone while the robot holds, both together,
then interrupts at random moments while both work. Plans are dry runs of free text, one after the
other, so that the planner always has a token to decode. A tick's deadline is the next one's begin.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
import contextlib
import threading
import time
from typing import Any

from flashrt_core.bench import Report
from flashrt_core.bench._report import percentiles
from flashrt_core.errors import ConfigError
from flashrt_core.errors import LaneBusy
from flashrt_ros.bench.interrupts import interrupt
from flashrt_ros.bench.interrupts import PARTS
from flashrt_ros.bench.interrupts import Taken
from flashrt_ros.bench.interrupts import written
from flashrt_ros.bench.pair import Pair
from flashrt_ros.bench.pair import pair
from flashrt_ros.planner_plan import PlanRequest
from flashrt_ros.statistics import Summary

WARM_UP_S = 1.0
WRITES = 200
SHARE_WANTED = 0.7  # of its solo tokens that the planner is to keep, with no deadline missed
COUNTED = ('ticks', 'tick_deadline_missed', 'exhausted', 'tokens', 'segments_waited',
           'segments_oversize', 'segments_starved')
Row = dict[str, Any]
Stages = dict[str, Summary]


def run(arguments: argparse.Namespace) -> Report:
    """Run the phases and return their rows, the executor's stages side by side, the interrupts."""
    if min(arguments.seconds, arguments.solo_seconds) <= 0 or arguments.interrupts < 1:
        raise ConfigError(
            f'--seconds is {arguments.seconds}, --solo-seconds {arguments.solo_seconds} and '
            f'--interrupts {arguments.interrupts}; give positive numbers')
    report = Report('bringup')
    with pair(arguments) as now:
        report.details['arguments'] = {k: str(v) for k, v in vars(arguments).items()}
        report.details['ready_after_s'] = {
            'executor': now.executor.ready_after_s, 'planner': now.planner.ready_after_s}
        ticking, stages_alone = _phase(now, report, 'executor alone', arguments.solo_seconds)
        with _held(now), _planning(now, arguments.prompt):
            planning, _ = _phase(now, report, 'planner alone', arguments.solo_seconds)
        with _planning(now, arguments.prompt):
            both, stages = _phase(now, report, 'together', arguments.seconds)
            now.say(f'{arguments.interrupts} interrupts')
            taken = interrupt(now, arguments.interrupts)
            found = percentiles(written(now, WRITES))
        _side_by_side(report, stages_alone, stages)
        share = both['tokens_per_s'] / max(planning['tokens_per_s'], 1e-9)
        missed = ', '.join(f'{both[name]} {name.replace("_", " ")}'
                           for name in ('missed_deadlines', 'missed_steps', 'exhausted'))
        report.notes.append(
            f'together the planner keeps {share:.1%} of its tokens ({SHARE_WANTED:.0%} wanted); '
            f'of {both["ticks"]} ticks together: {missed} (0 wanted), of {ticking["ticks"]} alone '
            f'{ticking["missed_deadlines"]} late')
        segments = now.planner.admission.p99_us() if now.planner.admission is not None else {}
        longest_ms = max([*(s.p99 for name, s in stages.items() if name.startswith('segment')),
                          *segments.values()]) / 1e3
        _latency(report, taken, longest_ms, stages['inference'].p99 / 1e3,
                 now.executor.engine.embodiment.step_period_s * 1e3)
        report.notes.append(
            f'a subgoal from the planner into the slot: p50 {found["p50"]:.0f} us, p99 '
            f'{found["p99"]:.0f} us of {WRITES}; the next tick copies it in, new or not')
        report.notes.append('planner segments p99: ' + ', '.join(
            f'{name} {us / 1e3:.2f} ms' for name, us in sorted(segments.items())))
        report.details['interrupts_ms'] = [one.parts_ms for one in taken]
        report.details['counters'] = _all_counts(now)
    return report


def _phase(now: Pair, report: Report, name: str, seconds: float) -> tuple[Row, Stages]:
    """Measure for so long; returns the row and the executor's stages in microseconds."""
    executor, planner = now.executor, now.planner
    assert executor.engine is not None and planner.engine is not None
    assert executor.step_thread is not None and planner.admission is not None
    now.say(f'{name}, {seconds:g} s')
    now.wait(WARM_UP_S)
    # The rings belong to their threads: a sample that is being written may survive the clear.
    rings = {name: ring for name, ring in executor.engine.times.rings.items()
             if not name.startswith('interrupt')}
    token, waits = planner.engine.rings['token'], planner.admission.waits
    for ring in (*rings.values(), token, waits):
        ring.clear()
    before, missed = _all_counts(now), executor.step_thread.report().missed
    begun = time.monotonic()
    now.wait(seconds)
    took = time.monotonic() - begun
    delta = {name: count - before[name] for name, count in _all_counts(now).items()
             if name in COUNTED}
    tokens, waited = token.summary(), waits.summary()
    row: Row = {
        'phase': name, 'seconds': took, 'ticks': delta['ticks'],
        'ticks_due': round(took / now.period_s) if delta['ticks'] else 0,
        'missed_deadlines': delta['tick_deadline_missed'],
        'missed_steps': executor.step_thread.report().missed - missed,
        'exhausted': delta['exhausted'], 'tokens_per_s': delta['tokens'] / took,
        'token_p50_ms': tokens.p50 / 1e3, 'token_p99_ms': tokens.p99 / 1e3,
        'segments_waited': delta['segments_waited'],
        'segments_oversize': delta['segments_oversize'],
        'segments_starved': delta['segments_starved'], 'wait_p99_ms': waited.p99 / 1e3}
    report.add(table='phases', **row)
    return row, {name: ring.summary() for name, ring in rings.items()}


def _side_by_side(report: Report, alone: Stages, together: Stages) -> None:
    for stage, summary in alone.items():
        beside = together[stage]
        report.add(table='executor, ms', stage=stage,
                   alone_p50=summary.p50 / 1e3, together_p50=beside.p50 / 1e3,
                   alone_p99=summary.p99 / 1e3, together_p99=beside.p99 / 1e3,
                   alone_n=summary.count, together_n=beside.count)


def _latency(report: Report, taken: list[Taken], segment_ms: float, inference_ms: float,
             step_ms: float) -> None:
    """Add the parts of the interrupts' latency, and the bound beside their sum."""
    whole = 0.0
    for part, values in zip(PARTS, zip(*(one.parts_ms for one in taken), strict=True),
                            strict=True):
        found = percentiles(values)
        whole = found['p99']
        report.add(table='interrupts, ms', part=part, p50=found['p50'], p99=whole,
                   max=found['max'])
    bound = segment_ms + inference_ms + step_ms
    most = max(one.steps_meanwhile for one in taken)
    report.notes.append(
        f'{len(taken)} interrupts, each answered once, at most {most} commands of the old goal '
        f'meanwhile: call to first new command p99 {whole:.1f} ms, '
        f'{"within" if whole <= bound else "BEYOND"} the bound of {bound:.1f} ms = one segment '
        f'{segment_ms:.1f} + one inference {inference_ms:.1f} + one step {step_ms:g}')


def _all_counts(now: Pair) -> dict[str, int]:
    return {**now.executor.report.counters.snapshot(), **now.planner.report.counters.snapshot()}


@contextlib.contextmanager
def _held(now: Pair) -> Iterator[None]:
    """The robot holds, so no ticks come; afterwards it runs again."""
    assert now.executor.control is not None
    now.executor.control.hold('bench')
    yield
    now.executor.control.clear('bench')
    now.until_ticking()


@contextlib.contextmanager
def _planning(now: Pair, prompt: str) -> Iterator[None]:
    """One plan after the other is decoded."""
    engine, ending = now.planner.engine, threading.Event()
    assert engine is not None

    def plan_on() -> None:
        while not ending.is_set():
            try:
                plan = engine.start(PlanRequest(prompt, dry_run=True), lambda told: None)
            except LaneBusy:
                continue
            plan.ended.result()

    worker = threading.Thread(target=plan_on, daemon=True)
    worker.start()
    try:
        yield
    finally:
        ending.set()
        engine.stop('cancelled', 'the bench goes on')
        worker.join(30.0)
