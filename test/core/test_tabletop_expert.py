"""The scripted teacher solves pick-and-place, also after mishaps."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from flashrt_core.tabletop.expert import Expert
from flashrt_core.tabletop.expert import expert_action
from flashrt_core.tabletop.kinematics import inverse
from flashrt_core.tabletop.kinematics import LOWER_LIMITS
from flashrt_core.tabletop.kinematics import UPPER_LIMITS
from flashrt_core.tabletop.world import World

STEP_LIMIT = 300


def _steps_to_solve(
    world: World,
    disturb: Callable[[World, int], None] = lambda world, step: None,
    limit: int = STEP_LIMIT,
) -> int | None:
    teacher = Expert(world)
    for step in range(limit):
        if world.solved():
            return step
        disturb(world, step)
        world.step(teacher.action())
    return None


@pytest.mark.parametrize('blocks', [1, 2, 3])
def test_it_solves_at_least_99_percent_of_200_worlds(blocks, stress):
    count = stress(200)
    failed = [
        seed for seed in range(count)
        if _steps_to_solve(World(seed, blocks, zones=1 + seed % 3)) is None
    ]
    assert len(failed) <= 0.01 * count, failed


def test_it_recovers_when_the_arm_is_displaced_and_the_block_slips(stress):
    def disturb(world: World, step: int) -> None:
        if step in (30, 60):
            rng = np.random.Generator(np.random.PCG64(world.seed))
            low, high = np.array(LOWER_LIMITS), np.array(UPPER_LIMITS)
            world.displace(low + rng.random(4) * (high - low))
        if step == 100:
            world.slip()

    count = stress(200)
    failed = [
        seed for seed in range(count)
        if _steps_to_solve(World(seed, 1 + seed % 3), disturb) is None
    ]
    assert len(failed) <= 0.01 * count, failed


def test_it_follows_a_block_that_is_taken_from_the_gripper():
    world = World(21, 1)
    taken = []

    def disturb(world: World, step: int) -> None:
        if world.snapshot().held >= 0 and not taken:
            taken.append(step)
            world.move_block(world.snapshot().block_names[0], 0.3, -0.25)

    assert _steps_to_solve(world, disturb) is not None
    assert taken


def test_it_works_through_a_sequence_of_goals_and_goes_home():
    world = World(8, 3, zones=3)
    blocks, zones = world.snapshot().block_names, world.snapshot().zone_names
    task = ', then '.join(
        [*(f'put the {b} block in the {z} zone' for b, z in zip(blocks, zones, strict=True)),
         'go home'])
    world.set_task(task)
    assert _steps_to_solve(world, limit=3 * STEP_LIMIT) is not None
    state = world.snapshot()
    assert state.joints[3] < 0.1 and state.lift == 1.0


def test_it_puts_several_blocks_in_one_zone():
    world = World(8, 3, zones=1)
    blocks, zone = world.snapshot().block_names, world.snapshot().zone_names[0]
    world.set_task(', then '.join(f'put the {b} block in the {zone} zone' for b in blocks[:2]))
    assert _steps_to_solve(world, limit=3 * STEP_LIMIT) is not None


def test_it_picks_a_block_up_and_keeps_it():
    world = World(4, 2)
    name = world.snapshot().block_names[1]
    world.set_task(f'pick up the {name} block')
    assert _steps_to_solve(world) is not None
    for _ in range(50):
        world.step(Expert(world).action())
    assert world.solved()


def test_it_depends_on_the_state_alone():
    world = World(5, 2)
    teacher = Expert(world)
    for _ in range(80):
        action = teacher.action()
        assert np.array_equal(action, expert_action(world.snapshot(), world.goals))
        assert np.array_equal(action, teacher.action())
        world.step(action)


def test_lowered_fingers_open_and_rise_before_the_arm_travels():
    world = World(21, 1)
    lowered = replace(world.snapshot(), lift=0.0, joints=np.array([*inverse(0.4, 0.0), 0.9]))
    action = expert_action(lowered, world.goals)
    assert action[:3] == pytest.approx(lowered.joints[:3])
    assert action[3] == 0.0


@pytest.mark.parametrize(('gripper', 'speed', 'command'), [
    (0.0, 0.0, 1.0),  # open: close
    (0.3, 2.0, 1.0),  # closing: go on
    (0.9, 2.0, 0.0),  # past the block's width with nothing in between: missed
    (0.3, -2.0, 0.0),  # opening for the next try: go on
    (0.3, 0.0, 0.0),  # stalled on something: open
])
def test_over_a_block_it_closes_and_after_a_miss_it_opens_for_the_next_try(
    gripper, speed, command
):
    world = World(21, 1)
    state = world.snapshot()
    x, y, _ = state.blocks[0]
    over = replace(
        state, joints=np.array([*inverse(x, y), gripper]),
        velocities=np.array([0.0, 0.0, 0.0, speed]), lift=0.0 if gripper else 1.0)
    assert expert_action(over, world.goals)[3] == command


def test_it_solves_through_the_rate_limit_of_the_shipped_embodiment(stress):
    rate = np.array([2.5, 2.5, 2.5, 5.0]) * 0.02
    for seed in range(stress(50)):
        world = World(seed, 2)
        command = world.joints
        for _ in range(STEP_LIMIT):
            command = command + np.clip(Expert(world).action() - command, -rate, rate)
            world.step(command)
            if world.solved():
                break
        assert world.solved(), seed
