"""``bench reset``: ``~/reset`` again and again while inference runs and steps go on at 50 Hz."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
import time
from typing import Any

from flashrt_core.bench import percentiles
from flashrt_core.bench import Report
from flashrt_core.errors import ConfigError
from flashrt_ros.bench.rig import resident_mib
from flashrt_ros.bench.rig import Rig
from flashrt_ros.bench.rig import rig

WARM_UP = 20
ALLOWANCE_MS = 5.0


def order_violations(orders: Sequence[Sequence[Any]]) -> dict[str, int]:
    """Count what must not happen after a reset has returned in the executor.

    ``orders`` are ``(when, 'change'|'chunk'|'command', epoch)``. A chunk of an older epoch, or any
    command before the first chunk of the new one, is an action of the past.
    """
    found = {'old chunks': 0, 'commands before the new chunk': 0}
    epoch, waiting = 1, False
    for _, kind, of in sorted(orders, key=lambda order: order[0]):
        if kind == 'change':
            waiting = waiting or of > epoch
            epoch = max(epoch, of)
        elif kind == 'chunk':
            if of < epoch:
                found['old chunks'] += 1
            else:
                waiting = False
        elif waiting:
            found['commands before the new chunk'] += 1
    return found


def run(arguments: argparse.Namespace) -> Report:
    """Reset ``count`` times, each while a tick of the episode before runs or is about to."""
    if arguments.count < 1:
        raise ConfigError(f'--count is {arguments.count}; give at least 1')
    calls: list[dict[str, float]] = []
    refused: list[str] = []
    wrong_epochs = 0
    with rig(arguments, output_mode='stream') as running:
        conductor = running.conductor
        memory = 0.0
        wall = time.monotonic()
        for number in range(-WARM_UP, arguments.count):
            if number == 0:
                memory = resident_mib(running.executor)
                calls.clear()
                wall = time.monotonic()
            conductor.clear_heard()
            answer = conductor.try_call(
                'executor/reset', 30.0, set_seed=True, seed=number + WARM_UP
            )
            reply = answer.reply
            if not reply.success:
                refused.append(f'[{reply.code}] {reply.message}')
                continue
            calls.append(
                {
                    'round_trip_us': answer.round_trip_us,
                    'service_us': float(reply.duration_us),
                    'restore_us': float(reply.restore_us),
                }
            )
            wrong_epochs += not _next_chunk_is_new(running, int(reply.epoch))
        wall = time.monotonic() - wall
        growth = resident_mib(running.executor) - memory
    return _report(arguments, running, calls, refused, wrong_epochs, wall, growth)


def _next_chunk_is_new(running: Rig, epoch: int) -> bool:
    """Wait for the first chunk of ``epoch``; False when one after it is older."""
    chunks = running.conductor.heard.chunks
    running.conductor.wait(
        lambda: any(c.epoch == epoch for c in chunks), 30.0, f'a chunk of epoch {epoch}'
    )
    seen = [int(c.epoch) for c in chunks]
    return all(e == epoch for e in seen[seen.index(epoch) :])


def _report(
    arguments: argparse.Namespace,
    running: Rig,
    calls: list[dict[str, float]],
    refused: list[str],
    wrong_epochs: int,
    wall_s: float,
    growth_mib: float,
) -> Report:
    samples = running.samples
    inference = [(tick['inferred'] - tick['submitted']) / 1e6 for tick in samples.get('ticks', [])]
    if not calls or not inference:
        raise ConfigError(f'nothing was measured; refusals: {refused[:3]}')
    report = Report('reset')
    for key, name in (
        ('round_trip_us', 'service round trip'),
        ('service_us', 'inside the executor'),
        ('restore_us', 'the restore alone'),
    ):
        p = percentiles(call[key] for call in calls)
        report.add(what=name, n=p['n'], p50_us=p['p50'], p99_us=p['p99'], max_us=p['max'])
    one = percentiles(inference)
    report.add(
        what='one inference',
        n=one['n'],
        p50_us=1e3 * one['p50'],
        p99_us=1e3 * one['p99'],
        max_us=1e3 * one['max'],
    )
    spent = sum(call['round_trip_us'] for call in calls) / 1e6
    bound = len(calls) * (one['p50'] + ALLOWANCE_MS) / 1e3
    violations = order_violations(samples['orders'])
    steps = samples['steps']
    late = steps['late'] + steps['missed']
    report.notes += [
        f'{arguments.policy} {arguments.policy_config} on {running.device}; '
        f'{len(calls)} of {arguments.count} resets succeeded'
        + (f'; first refusal: {refused[0]}' if refused else ''),
        f'time in resets {spent:.2f} s, bound {bound:.2f} s = {len(calls)} x (one inference p50 + '
        f'{ALLOWANCE_MS:g} ms): {"kept" if spent <= bound else "NOT kept"}; wall time with a '
        f'chunk awaited after each: {wall_s:.1f} s.',
        f'after a reset had returned: {violations["old chunks"]} chunks of an older epoch, '
        f'{violations["commands before the new chunk"]} commands before the new chunk; next chunk '
        f'of another epoch: {wrong_epochs}.',
        f'steps late by more than 2 ms or missed: {late} of {steps["steps"]} '
        f'({100 * late / max(1, steps["steps"]):.3f} %); real time: '
        f'{steps["realtime_reason"] or "SCHED_FIFO"}.',
        f'memory of the executor {growth_mib:+.1f} MiB over the run.',
    ]
    report.details = {
        'arguments': {k: str(v) for k, v in vars(arguments).items()},
        'steps': steps,
        'counters': samples['counters'],
        'calls': calls,
        'violations': violations,
        'refused': refused,
        'bound_s': bound,
        'spent_s': spent,
        'growth_mib': growth_mib,
    }
    return report
