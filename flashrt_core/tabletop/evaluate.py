"""``python -m flashrt_core.tabletop.evaluate``: how often the trained models do as they are told.

The policy runs as it does on the robot: bound, captured plans, in lock-step with the world, told
its subgoal's end by itself alone. The scripted expert cannot be imported meanwhile. Seeds are
fixed: tables here begin at 2**41, training ends below 2**40. ``skills``: one subgoal a table,
begun with the arm at home (but for 'home' itself); also with pairs of colours, and with a block
lying in a place, that training never showed. ``episodes``: an instruction that has each of 1 to 3
blocks put somewhere, a plan by the trained planner, its subgoals one after the other, the next one
when the policy says that it is done; judged by what the instruction asks for. The scene text that
the planner gets is an oracle's: it is written from the table's true state.
"""

import argparse
from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass
import json
import os
from pathlib import Path
import sys

import numpy as np

from flashrt_core.command_line import check_output
from flashrt_core.command_line import run
from flashrt_core.command_line import whole_number
from flashrt_core.errors import ConfigError
from flashrt_core.tabletop.driver import Driver
from flashrt_core.tabletop.driver import one_thread
from flashrt_core.tabletop.instructions import describe
from flashrt_core.tabletop.instructions import draw_task
from flashrt_core.tabletop.instructions import Example
from flashrt_core.tabletop.models import config_of
from flashrt_core.tabletop.plan_writer import PlanWriter
from flashrt_core.tabletop.subgoals import draw_goal
from flashrt_core.tabletop.subgoals import in_held_out_spot
from flashrt_core.tabletop.subgoals import MOST_IN_A_ZONE
from flashrt_core.tabletop.subgoals import REPLAN
from flashrt_core.tabletop.tasks import Goal
from flashrt_core.tabletop.tasks import goal_reached
from flashrt_core.tabletop.tasks import task_solved
from flashrt_core.tabletop.training import Score
from flashrt_core.tabletop.workers import pool
from flashrt_core.tabletop.world import World

FIRST_SEED = 2**41
LONGEST = 260    # steps that a subgoal may take
KINDS = ('put', 'put, colours held out', 'put, place held out', 'pick', 'home')
EXPERT = 'flashrt_core.tabletop.expert'


@dataclass(frozen=True)
class Episode:
    """What became of one: ``planned``: the plan is the one asked for; ``steps`` in all."""

    blocks: int
    planned: bool
    solved: bool
    steps: int


Task = tuple[str, int]  # a kind of skill or 'episode', and its number

_driver: Driver | None = None
_writer: PlanWriter | None = None


def pursue(driver: Driver, world: World, goal: Goal) -> bool:
    """Drive until the policy says it is done; return whether the goal is reached then.

    It is asked after each chunk; a goal that takes more than LONGEST steps is missed.
    """
    for step in range(LONGEST):
        if step and step % REPLAN == 0 and driver.done:
            return goal_reached(goal, world.snapshot())
        world.step(driver.act(world.snapshot(), goal))
    return False


def table(number: int, kind: str) -> tuple[World, Goal]:
    """Return the table of a try of this kind of skill, and the subgoal."""
    rng = np.random.default_rng([number, KINDS.index(kind)])
    verb = kind.split(',')[0]
    pairs = 'held out' if 'colours' in kind else 'seen'
    while True:
        world = World(FIRST_SEED + int(rng.random() * 2**40), blocks=1 + int(rng.random() * 3),
                      zones=1 + int(rng.random() * 3))
        state = world.snapshot()
        if in_held_out_spot(state) == ('place' in kind):
            goal = Goal('home') if verb == 'home' else draw_goal(rng, state, verb, pairs)
            if goal is not None:
                return world, goal


def skill(driver: Driver, number: int, kind: str) -> bool:
    """Try one subgoal of a kind on a table of its own; home begins where the arm was moved to."""
    world, goal = table(number, kind)
    if goal.verb == 'home':
        driver.reset(number)
        away = Goal('pick', world.snapshot().block_names[0])
        for _ in range(24):
            world.step(driver.act(world.snapshot(), away))
    driver.reset(number)
    return pursue(driver, world, goal)


def request(number: int) -> tuple[World, Example]:
    """Return the table of an episode and what is asked for there."""
    rng = np.random.default_rng([number, 9])
    blocks = 1 + number % 3
    zones = max(-(-blocks // MOST_IN_A_ZONE), 1 + int(rng.random() * 3))
    world = World(FIRST_SEED + int(rng.random() * 2**40), blocks=blocks, zones=zones)
    return world, draw_task(rng, describe(world.snapshot()), MOST_IN_A_ZONE)


def whole(driver: Driver, number: int, writer: PlanWriter | None) -> Episode:
    """Have an instruction planned and carried out, each subgoal once.

    :param writer: None takes the plan that is asked for.
    """
    world, example = request(number)
    plan = example.plan
    if writer is not None:
        plan = writer.write(example.scene, example.instruction).goals or ()
    driver.reset(number)
    for goal in plan:
        pursue(driver, world, goal)
    return Episode(len(example.scene.blocks), plan == example.plan,
                   task_solved(example.plan, world.snapshot()), world.step_count)


def forbid_expert() -> None:
    """Have every import of the expert fail in this process.

    :raises ConfigError: it is imported already.
    """
    if sys.modules.get(EXPERT) is not None:
        raise ConfigError(f'{EXPERT} is imported in this process; evaluate in one of its own')
    sys.modules[EXPERT] = None  # type: ignore[assignment]


def _bind(policy: Path, planner: Path | None, best_of: int) -> None:
    global _driver, _writer
    forbid_expert()
    one_thread()
    _driver = Driver(policy, best_of=best_of)
    _writer = None if planner is None else PlanWriter(planner)


def _attempt(task: Task) -> bool | Episode:
    assert _driver is not None
    kind, number = task
    return whole(_driver, number, _writer) if kind == 'episode' else skill(_driver, number, kind)


def attempts(policy: Path, planner: Path | None, tasks: Sequence[Task], workers: int,
             best_of: int = 1) -> Iterator[bool | Episode]:
    """Give the results in order; every process binds models of its own."""
    with pool(workers, _bind, policy, planner, best_of) as processes:
        for count, result in enumerate(processes.map(_attempt, tasks), start=1):
            if count % 100 == 0:
                print(f'  {count}/{len(tasks)}', flush=True)
            yield result


def report(tasks: Sequence[Task], results: Sequence[bool | Episode]) -> dict[str, Score]:
    """Return the scores by name."""
    by_name: dict[str, list[bool]] = {}
    for (kind, _), result in zip(tasks, results, strict=True):
        if isinstance(result, Episode):
            for name in (f'episodes, {result.blocks} blocks', 'episodes'):
                by_name.setdefault(name, []).append(result.solved)
            by_name.setdefault('plans of episodes', []).append(result.planned)
        else:
            by_name.setdefault(kind, []).append(result)
    return {name: Score(sum(some), len(some)) for name, some in by_name.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the evaluation; 0 fine, 2 refused."""
    parser = argparse.ArgumentParser('evaluate', description=__doc__)
    parser.add_argument('--policy', type=Path, help='config or its folder; the shipped one')
    parser.add_argument('--planner', type=Path, help='likewise')
    parser.add_argument('--true-plans', action='store_true', help='without the planner')
    parser.add_argument('--episodes', type=whole_number(0), default=500,
                        help='whole episodes; 0 for none')
    parser.add_argument('--skills', type=whole_number(0), default=200,
                        help='tries of each skill; 0 for none')
    parser.add_argument('--best-of', type=whole_number(1), default=1,
                        help='candidates of each tick')
    parser.add_argument('--workers', type=whole_number(1), default=os.cpu_count() or 1,
                        help='processes')
    parser.add_argument('--json', type=Path, help='file for the scores')
    o = parser.parse_args(argv)
    return run('evaluate', lambda: _evaluate(o))


def _evaluate(o: argparse.Namespace) -> int:
    if not o.episodes + o.skills:
        raise ConfigError('episodes and skills are 0; give one of them a number to try')
    if o.json is not None:
        check_output(o.json, 'scores')
    policy = config_of(o.policy, 'policy')
    planner = None if o.true_plans or not o.episodes else config_of(o.planner, 'planner')
    forbid_expert()
    Driver(policy, best_of=o.best_of).close()  # what is wrong with it is told once, and here
    if planner is not None:
        PlanWriter(planner).close()
    tasks = [(kind, number) for kind in KINDS for number in range(o.skills)]
    tasks += [('episode', number) for number in range(o.episodes)]
    results = list(attempts(policy, planner, tasks, o.workers, o.best_of))
    scores = report(tasks, results)
    for name, score in scores.items():
        print(f'{name}: {score}')
    missed = [number for (kind, number), result in zip(tasks, results, strict=True)
              if isinstance(result, Episode) and not result.solved]
    print(f'episodes missed: {missed}', flush=True)
    if o.json is not None:
        o.json.write_text(json.dumps(
            {name: vars(score) for name, score in scores.items()}, indent=1) + '\n')
    return 0


if __name__ == '__main__':
    sys.exit(main())
