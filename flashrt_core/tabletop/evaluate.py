"""``python -m flashrt_core.tabletop.evaluate``: how often the trained policy does as it is told.

The policy runs as it does on the robot: bound, captured plans, in lock-step with the world. The
scripted expert cannot be imported meanwhile. Seeds are fixed: tables here begin at 2**41, training
ends below 2**40. ``skills``: one subgoal a table, begun with the arm at home (but for 'home'
itself); also with pairs of colours, and with a block lying in a place, that training never showed.
``episodes``: every block of a table put into a zone, at most two into each, then home, one subgoal
after the other, the next one when the policy says that it is done. The order is drawn from the
table's true state: it stands in for a planner.
"""

import argparse
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
import multiprocessing
import os
from pathlib import Path
import sys
from typing import TypeVar

import numpy as np

from flashrt_core.errors import ConfigError
from flashrt_core.errors import FlashrtError
from flashrt_core.tabletop.driver import Driver
from flashrt_core.tabletop.subgoals import draw_goal
from flashrt_core.tabletop.subgoals import draw_puts
from flashrt_core.tabletop.subgoals import in_held_out_spot
from flashrt_core.tabletop.subgoals import REPLAN
from flashrt_core.tabletop.tasks import Goal
from flashrt_core.tabletop.tasks import goal_reached
from flashrt_core.tabletop.training import Score
from flashrt_core.tabletop.world import World

FIRST_SEED = 2**41
LONGEST = 260    # steps that a subgoal may take
KINDS = ('put', 'put, colours held out', 'put, place held out', 'pick', 'home')
EXPERT = 'flashrt_core.tabletop.expert'

Task = TypeVar('Task')
Result = TypeVar('Result')

_driver: Driver | None = None


def pursue(driver: Driver, world: World, goal: Goal) -> bool:
    """Drive until the policy says it is done; return whether the goal is reached then.

    It is asked after each chunk; a goal that takes more than LONGEST steps is missed.
    """
    for step in range(LONGEST):
        if step and step % REPLAN == 0 and driver.done:
            return goal_reached(goal, world.snapshot())
        world.step(driver.act(world.snapshot(), goal))
    return False


def skill(driver: Driver, seed: int, kind: str) -> bool:
    """Try one subgoal of a kind on a table of its own; home begins where the arm was moved to."""
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    verb = kind.split(',')[0]
    pairs = 'held out' if 'colours' in kind else 'seen'
    goal: Goal | None = None
    while goal is None:
        world = World(FIRST_SEED + int(rng.random() * 2**40), blocks=1 + int(rng.random() * 3),
                      zones=1 + int(rng.random() * 3))
        state = world.snapshot()
        if in_held_out_spot(state) == ('place' in kind):
            goal = Goal('home') if verb == 'home' else draw_goal(rng, state, verb, pairs)
    if verb == 'home':
        driver.reset(seed)
        away = Goal('pick', state.block_names[0])
        for _ in range(24):
            world.step(driver.act(world.snapshot(), away))
    driver.reset(seed)
    return pursue(driver, world, goal)


def whole(driver: Driver, seed: int) -> tuple[int, bool]:
    """Put every block of a table into a zone, then go home; (blocks, whether all is as asked)."""
    rng = np.random.default_rng([seed, 9])
    blocks = 1 + seed % 3
    zones = max((blocks + 1) // 2, 1 + int(rng.random() * 3))
    world = World(FIRST_SEED + int(rng.random() * 2**40), blocks=blocks, zones=zones)
    goals = [*draw_puts(rng, world.snapshot()), Goal('home')]
    driver.reset(seed)
    for goal in goals:
        pursue(driver, world, goal)
    after = world.snapshot()
    return blocks, all(goal_reached(goal, after) for goal in goals)


def forbid_expert() -> None:
    """Have every import of the expert fail in this process.

    :raises ConfigError: it is imported already.
    """
    if sys.modules.get(EXPERT) is not None:
        raise ConfigError(f'{EXPERT} is imported in this process; evaluate in one of its own')
    sys.modules[EXPERT] = None  # type: ignore[assignment]


def _bind(config: Path) -> None:
    global _driver
    forbid_expert()
    _driver = Driver(config)


def _skill(task: tuple[int, str]) -> bool:
    assert _driver is not None
    return skill(_driver, *task)


def _whole(seed: int) -> tuple[int, bool]:
    assert _driver is not None
    return whole(_driver, seed)


def in_processes(config: Path, work: Callable[[Task], Result], tasks: Sequence[Task],
                 workers: int) -> Iterator[Result]:
    """Give the results in order; every process binds a policy of its own."""
    context = multiprocessing.get_context('spawn')
    with ProcessPoolExecutor(workers, context, _bind, (config,)) as pool:
        for count, result in enumerate(pool.map(work, tasks), start=1):
            if count % 50 == 0:
                print(f'  {count}/{len(tasks)}', flush=True)
            yield result


def main(argv: Sequence[str] | None = None) -> int:
    """Run the evaluation; 0 fine, 2 refused."""
    parser = argparse.ArgumentParser('evaluate', description=__doc__)
    parser.add_argument('--policy', type=Path, required=True, help='folder with policy.yaml')
    parser.add_argument('--episodes', type=int, default=500, help='whole episodes; 0 for none')
    parser.add_argument('--skills', type=int, default=200, help='tries of each skill; 0 for none')
    parser.add_argument('--workers', type=int, default=os.cpu_count() or 1, help='processes')
    o = parser.parse_args(argv)
    config = o.policy / 'policy.yaml' if o.policy.is_dir() else o.policy
    try:
        forbid_expert()
        Driver(config).close()  # what is wrong with it is told once, and here
        for kind in KINDS if o.skills else ():
            tasks = [(seed, kind) for seed in range(o.skills)]
            good = sum(map(bool, in_processes(config, _skill, tasks, o.workers)))
            print(f'{kind}: {Score(good, o.skills)}', flush=True)
        if o.episodes:
            found = list(in_processes(config, _whole, range(o.episodes), o.workers))
            for blocks in (1, 2, 3):
                some = [good for count, good in found if count == blocks]
                if some:
                    print(f'episodes with {blocks} blocks: {Score(sum(some), len(some))}')
            total = Score(sum(good for _, good in found), o.episodes)
            print(f'all episodes: {total}', flush=True)
    except FlashrtError as error:
        print(f'error [{error.code}]: {error}', file=sys.stderr)
        return 2
    return 0


if __name__ == '__main__':
    sys.exit(main())
