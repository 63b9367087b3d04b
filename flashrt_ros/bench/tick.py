"""``bench tick``: what is not inference between an image's stamp and the published command.

And whether the plan was kept: inference rate, age of the action at each executed step, share of
steps from a chunk older than planned, deadlines missed, steps repeated.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from collections.abc import Sequence
import time
from typing import Any

import numpy as np

from flashrt_core.bench import percentiles
from flashrt_core.bench import Report
from flashrt_core.errors import ConfigError
from flashrt_ros.bench.rig import resident_mib
from flashrt_ros.bench.rig import Rig
from flashrt_ros.bench.rig import rig

STAGES = (
    ('transport: stamp to callback', lambda t: t['entry_ros'] - t['stamp']),
    ('decode', lambda t: t['decoded'] - t['entry']),
    ('wait for the tick to be due', lambda t: max(0, t['begun'] - t['decoded'])),
    ('collect and submit', lambda t: t['submitted'] - t['begun']),
    ('inference', lambda t: t['inferred'] - t['submitted']),
    ('check and publish', lambda t: t['published'] - t['inferred']),
)
WAIT, INFERENCE = STAGES[2][0], STAGES[4][0]


def stage_table(ticks: Sequence[Mapping[str, int]]) -> dict[str, np.ndarray]:
    """Milliseconds of every stage and of the sums, float64 ``[ticks]`` each."""
    table = {
        name: np.array([measure(tick) for tick in ticks], dtype=np.float64) / 1e6
        for name, measure in STAGES
    }
    total = sum(table.values())
    table['stamp to command'] = total
    table['not inference, from the stamp'] = total - table[INFERENCE] - table[WAIT]
    table['not inference, from the callback'] = (
        table['not inference, from the stamp'] - table[STAGES[0][0]]
    )
    return table


def inference_rate_hz(ticks: Sequence[Mapping[str, int]]) -> float:
    """Inferences that ended per second, from the first end to the last; 0 for fewer than two."""
    ends = [tick['inferred'] for tick in ticks]
    span = (max(ends) - min(ends)) / 1e9 if ends else 0.0
    return (len(ends) - 1) / span if span > 0 else 0.0


def plan_rows(
    timing: Mapping[str, float], steps: Mapping[str, Any], counters: Mapping[str, int],
    rate_hz: float,
) -> list[dict[str, Any]]:
    """Rows of the tables ``chunks in play`` and ``plan kept``.

    :param timing: of ``ChunkTiming.figures``. :param steps: of the step thread's report.
    :param counters: of the executor, by name.
    """
    played, ticks = int(timing['plan_steps_played']), int(counters['ticks'])
    older = timing['share_older_than_planned']
    ages = {name: timing[f'chunk_age_{name}_steps'] for name in ('p50', 'p99', 'max')}
    rows: list[dict[str, Any]] = [{
        'table': 'chunks in play', 'what': 'age of the action at each executed step', 'n': played,
        **{f'{name}_steps': age for name, age in ages.items()},
        'planned_below_steps': timing['planned_age_steps'],
        'expected_delay_steps': timing['expected_delay_steps'], 'inferences_per_s': rate_hz}]
    for what, count, of in (
        ('tick deadlines missed', counters['tick_deadline_missed'], ticks),
        ('step deadlines missed', steps['missed'], steps['steps']),
        ('steps repeated', timing['plan_steps_repeated'], played),
        ('steps skipped', timing['plan_steps_skipped'], played),
        ('periods without an action', timing['periods_without_action'], steps['steps']),
        ('steps from a chunk older than planned', round(older * played), played),
        ('chunks later than expected', timing['chunks_later_than_expected'], ticks),
    ):
        rows.append({'table': 'plan kept', 'what': what, 'count': int(count), 'of': int(of),
                     'share': count / of if of else 0.0})
    return rows


def run(arguments: argparse.Namespace) -> Report:
    """Run the rig for ``seconds`` and report.

    :raises ConfigError: nothing was measured.
    """
    arrivals: list[int] = []
    with rig(arguments, output_mode=arguments.output_mode) as running:
        conductor = running.conductor
        reset = conductor.executor('reset', set_seed=True, seed=0)
        conductor.wait(
            lambda: any(c.epoch == reset.reply.epoch for c in conductor.heard.chunks),
            60.0,
            'the first chunk',
        )
        conductor.on_command = lambda message, now_ns: arrivals.append(now_ns)
        memory = resident_mib(running.executor)
        end = time.monotonic() + arguments.seconds
        while time.monotonic() < end:
            conductor.wait_a_moment(0.5)
            conductor.clear_heard()
        growth = resident_mib(running.executor) - memory
    return _report(arguments, running, growth, len(arrivals))


def _report(arguments: argparse.Namespace, running: Rig, growth: float, heard: int) -> Report:
    samples: dict[str, Any] = running.samples
    # A chunk that came too late for its hold was published nowhere: its command is an older one.
    played = [t for t in samples.get('ticks', []) if t['published'] >= t['inferred']]
    warm = [tick for tick in played if not tick['resync']][5:]
    if not warm:
        raise ConfigError(
            f'no tick was measured in {arguments.seconds:g} s; give more --seconds, or see why '
            'the executor holds'
        )
    report = Report('tick')
    for name, values in stage_table(warm).items():
        p = percentiles(values)
        report.add(stage=name, n=p['n'], p50_ms=p['p50'], p99_ms=p['p99'], max_ms=p['max'])
    steps = samples['steps']
    report.add(
        stage='step jitter (wake-up late by)',
        n=steps['steps'],
        p50_ms=steps['lateness_p50_ms'],
        p99_ms=steps['lateness_p99_ms'],
        max_ms=steps['lateness_max_ms'],
    )
    report.rows += plan_rows(
        samples['timing'], steps, samples['counters'], inference_rate_hz(warm))
    late = steps['late'] + steps['missed']
    report.notes += [
        f'{arguments.policy} {arguments.policy_config} on {running.device}; '
        f'another process is {running.cameras}, images of 224x224; steps at 50 Hz; '
        f'{arguments.seconds:g} s; a tick every {arguments.tick_period_steps} steps or as soon as '
        'the last one ends.',
        'chunks in play and plan kept: counted from the reset on; a tick is late when it ends '
        f'after the next one is due, {arguments.tick_period_steps} steps after its begin.',
        f'steps late by more than 2 ms or missed: {late} of {steps["steps"]} '
        f'({100 * late / max(1, steps["steps"]):.3f} %); real time: '
        f'{steps["realtime_reason"] or "SCHED_FIFO"}.',
        f'{heard} trajectories heard by another process; memory of the executor '
        f'{growth:+.1f} MiB.',
        'The wait is the age of the newest image when a tick falls due: sampling, not work; it is '
        'in "stamp to command", not in "not inference".',
    ]
    report.details = {
        'arguments': {k: str(v) for k, v in vars(arguments).items()},
        'steps': steps,
        'counters': samples['counters'],
        'timing': samples['timing'],
        'ticks': warm,
    }
    return report
