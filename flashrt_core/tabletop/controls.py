"""``python -m flashrt_core.tabletop.controls``: what capsules buy, against honest controls.

On the same tables with the same seeds: a slipped block retried with the policy rolled back to its
mark, told anew, or left alone; the best of eight candidates against one; a reset by restore, by
clearing, by loading again; the planner's first token from the capsule of a scene or cold; its
speculation. Equal is an allowed result. Two rates differ only where their intervals part.
"""

import argparse
from collections.abc import Callable
from collections.abc import Sequence
import json
import os
from pathlib import Path
import sys
import time

import numpy as np

from flashrt_core.bench import percentiles
from flashrt_core.command_line import check_output
from flashrt_core.command_line import run
from flashrt_core.command_line import whole_number
from flashrt_core.policies.pi0.session import reset_state
from flashrt_core.tabletop.driver import Driver
from flashrt_core.tabletop.driver import one_thread
from flashrt_core.tabletop.evaluate import attempts
from flashrt_core.tabletop.evaluate import forbid_expert
from flashrt_core.tabletop.evaluate import LONGEST
from flashrt_core.tabletop.evaluate import table
from flashrt_core.tabletop.instructions import draw_example
from flashrt_core.tabletop.models import config_of
from flashrt_core.tabletop.plan_writer import PlanWriter
from flashrt_core.tabletop.subgoals import REPLAN
from flashrt_core.tabletop.tasks import goal_reached
from flashrt_core.tabletop.training import Score
from flashrt_core.tabletop.workers import pool

RETRIES = ('left alone', 'told anew', 'rolled back')
SEED = 20_261_201
CANDIDATES = 8

Row = dict[str, object]

_driver: Driver | None = None


def retry(driver: Driver, number: int, how: str) -> int | None:
    """Pick up a block that slips once, then do as ``how`` says; return the steps, None if missed.

    It is done with the first chunk after the slip, as by one who sees it. left alone: nothing.
    told anew: the same subgoal again, the state as it is. rolled back: the policy goes to its mark
    at the subgoal's begin, and the subgoal again, under another seed.
    """
    world, goal = table(number, 'pick')
    driver.reset(number)
    mark = driver.mark()
    slipped = seen = False
    for step in range(LONGEST):
        if step and step % REPLAN == 0:
            if driver.done:
                return step if goal_reached(goal, world.snapshot()) else None
            if slipped and not seen:
                seen = True
                if how == 'rolled back':
                    driver.rollback(mark, number + 2**20)
                elif how == 'told anew':
                    driver.tell_anew()
        world.step(driver.act(world.snapshot(), goal))
        if not slipped and world.snapshot().held >= 0 and world.snapshot().lift > 0.5:
            slipped = True
            world.slip()
    return None


def _bind(policy: Path) -> None:
    global _driver
    forbid_expert()
    one_thread()
    _driver = Driver(policy)


def _retry(task: tuple[int, str]) -> int | None:
    assert _driver is not None
    return retry(_driver, *task)


def retries(policy: Path, count: int, workers: int) -> list[Row]:
    """Compare what is done about a slip."""
    tasks = [(number, how) for how in RETRIES for number in range(count)]
    with pool(workers, _bind, policy) as processes:
        results = list(processes.map(_retry, tasks))
    rows = []
    for at, how in enumerate(RETRIES):
        some = results[at * count : (at + 1) * count]
        taken = [steps for steps in some if steps is not None]
        rows.append({**_rate(f'retry after a slip, {how}', [s is not None for s in some]),
                     'steps': _median(taken) if taken else '-'})
    return rows


def candidates(policy: Path, count: int, workers: int) -> list[Row]:
    """Compare one candidate a tick with the one that the selector keeps of eight."""
    tasks = [('put', number) for number in range(count)]
    return [_rate(f'put, best of {n}',
                  [result is True for result in attempts(policy, None, tasks, workers, n)])
            for n in (1, CANDIDATES)]


def resets(policy: Path, count: int, device: str) -> list[Row]:
    """Time three ways to an episode's beginning, and the first action after each."""
    world, goal = table(0, 'put')
    state = world.snapshot()
    driver = Driver(policy, device)

    def clear() -> None:
        session = driver.session
        session.lane.call(lambda: reset_state(session.buffers, session.config)).result()
        driver.forget(0)

    def load() -> None:
        nonlocal driver
        driver.close()
        driver = Driver(policy, device)
        driver.reset(0)

    rows = []
    try:
        driver.act(state, goal)
        ways: tuple[tuple[str, Callable[[], None], int], ...] = (
            ('restore', lambda: driver.reset(0), count), ('clear and reseed', clear, count),
            ('load again', load, max(2, count // 20)))
        for name, way, times in ways:
            reset_ms, action_ms = [], []
            for _ in range(times):
                started = time.perf_counter()
                way()
                between = time.perf_counter()
                driver.act(state, goal)
                reset_ms.append(1e3 * (between - started))
                action_ms.append(1e3 * (time.perf_counter() - between))
            rows.append({'what': f'reset by {name}', 'n': times, 'reset_ms': _median(reset_ms),
                         'first_action_ms': _median(action_ms)})
    finally:
        driver.close()
    return rows


def first_tokens(planner: Path, count: int, device: str) -> list[Row]:
    """Time the planner's first token, the scene read anew or restored; the plans must be equal."""
    writer = PlanWriter(planner, device)
    rng = np.random.default_rng([SEED, 1])
    cold, kept, equal = [], [], 0
    try:
        for at in range(count + 1):
            example = draw_example(rng)
            one = writer.write_cold(example.scene, example.instruction)
            writer.keep_scene(example.scene)
            two = writer.write_from_scene(example.scene, example.instruction)
            if at:  # the first one warms up
                equal += one.tokens == two.tokens
                cold.append(1e3 * one.first_s)
                kept.append(1e3 * two.first_s)
    finally:
        writer.close()
    return [{'what': f'planner, {name}', 'n': count, 'ttft_ms': _median(times),
             'same_tokens': f'{equal}/{count}'}
            for name, times in (('cold', cold), ('scene from its capsule', kept))]


def speculation(planner: Path, count: int, device: str) -> list[Row]:
    """Write the same plans with and without drafts; the tokens must be the same."""
    found = {}
    for drafts in (0, 3):
        writer = PlanWriter(planner, device, drafts)
        rng = np.random.default_rng([SEED, 2])
        try:
            found[drafts] = [writer.write(e.scene, e.instruction) for e in
                             (draw_example(rng) for _ in range(count + 1))][1:]
        finally:
            writer.close()
    same = sum(a.tokens == b.tokens for a, b in zip(found[0], found[3], strict=True))
    rows = []
    for drafts, written in found.items():
        tokens = sum(len(w.tokens) + 1 for w in written)
        drafted = sum(w.drafted for w in written)
        seconds = sum(w.first_s + w.rest_s for w in written)
        rest = sum(w.rest_s for w in written)
        rows.append({
            'what': f'planner, {drafts} drafts', 'n': count,
            'tokens_a_step': round(tokens / sum(w.steps for w in written), 2),
            'accepted': f'{sum(w.accepted for w in written) / drafted:.1%}' if drafted else '-',
            'decode_ms': round(1e3 * rest / count, 2), 'plan_ms': round(1e3 * seconds / count, 2),
            'same_tokens': f'{same}/{count}'})
    return rows


def _rate(what: str, results: Sequence[bool]) -> Row:
    return {'what': what, 'n': len(results), 'success': str(Score(sum(results), len(results)))}


def _median(values: Sequence[float]) -> float:
    return round(percentiles(values)['p50'], 3)


def main(argv: Sequence[str] | None = None) -> int:
    """Run every comparison; 0 fine, 2 refused."""
    parser = argparse.ArgumentParser('controls', description=__doc__)
    parser.add_argument('--policy', type=Path, help='config or its folder; the shipped one')
    parser.add_argument('--planner', type=Path, help='likewise')
    parser.add_argument('--count', type=whole_number(1), default=200,
                        help='tries of each')
    parser.add_argument('--device', default='auto', choices=('auto', 'cpu', 'cuda'))
    parser.add_argument('--workers', type=whole_number(1), default=os.cpu_count() or 1,
                        help='processes')
    parser.add_argument('--json', type=Path, help='file for the rows')
    o = parser.parse_args(argv)
    return run('controls', lambda: _compare(o))


def _compare(o: argparse.Namespace) -> int:
    if o.json is not None:
        check_output(o.json, 'rows')
    policy, planner = config_of(o.policy, 'policy'), config_of(o.planner, 'planner')
    forbid_expert()
    Driver(policy, o.device, best_of=CANDIDATES).close()  # what is wrong is told before the work
    PlanWriter(planner, o.device).close()
    rows: list[Row] = []
    for part in (lambda: retries(policy, o.count, o.workers),
                 lambda: candidates(policy, o.count, o.workers),
                 lambda: resets(policy, o.count, o.device),
                 lambda: first_tokens(planner, o.count, o.device),
                 lambda: speculation(planner, o.count, o.device)):
        for row in part():
            rows.append(row)
            print('  '.join(f'{name} {value}' for name, value in row.items()), flush=True)
        if o.json is not None:
            o.json.write_text(json.dumps(rows, indent=1) + '\n')
    return 0


if __name__ == '__main__':
    sys.exit(main())
