"""The physics of the built-in robot."""

import hashlib
import math

import numpy as np
import pytest

from flashrt_core.errors import ActionNonFinite
from flashrt_core.errors import BadJoints
from flashrt_core.errors import ParameterInvalid
from flashrt_core.tabletop.contacts import block_overlap
from flashrt_core.tabletop.contacts import disc_overlap
from flashrt_core.tabletop.contacts import HALF
from flashrt_core.tabletop.contacts import TRAY_X_M
from flashrt_core.tabletop.contacts import TRAY_Y_M
from flashrt_core.tabletop.kinematics import forward
from flashrt_core.tabletop.kinematics import HOME
from flashrt_core.tabletop.kinematics import inverse
from flashrt_core.tabletop.kinematics import LOWER_LIMITS
from flashrt_core.tabletop.kinematics import MAX_VELOCITIES
from flashrt_core.tabletop.kinematics import UPPER_LIMITS
from flashrt_core.tabletop.world import CONTROL_PERIOD_S
from flashrt_core.tabletop.world import finger_discs
from flashrt_core.tabletop.world import HOLD_GRIPPER
from flashrt_core.tabletop.world import World


def _go(world: World, x: float, y: float, gripper: float, steps: int = 120) -> None:
    target = [*inverse(x, y), gripper]
    for _ in range(steps):
        world.step(target)


def _wander(world: World, seed: int, steps: int, visit=lambda world: None) -> str:
    """Random targets over the tray, fingers open and closed; return the digest of all states."""
    rng = np.random.Generator(np.random.PCG64(seed))
    digest = hashlib.sha256()
    target = list(HOME)
    for step in range(steps):
        if step % 15 == 0:
            u, v, g = rng.random(3)
            x = TRAY_X_M[0] + u * (TRAY_X_M[1] - TRAY_X_M[0])
            y = TRAY_Y_M[0] + v * (TRAY_Y_M[1] - TRAY_Y_M[0])
            target = [*inverse(x * 0.97, y * 0.97), round(g)]
        world.step(target)
        digest.update(world.snapshot().to_vector().tobytes())
        visit(world)
    return digest.hexdigest()


def test_the_same_seed_and_targets_give_the_same_bits():
    digests = {_wander(World(9, 3, zones=3), 1, 300) for _ in range(2)}
    assert len(digests) == 1
    assert _wander(World(10, 3, zones=3), 1, 300) not in digests


def test_a_restored_world_goes_on_as_if_nothing_had_happened():
    world = World(2, 3)
    _wander(world, 3, 90)
    state = world.snapshot()
    first = _wander(world, 4, 90)
    world.restore(state)
    assert _wander(world, 4, 90) == first


def test_layouts_leave_room_between_things(stress):
    for seed in range(stress(1000)):
        state = World(seed, 3, zones=3).snapshot()
        blocks, zones = state.blocks.tolist(), state.zones.tolist()
        assert len(set(state.block_colours)) == len(set(state.zone_colours)) == 3
        for index, block in enumerate(blocks):
            assert all(math.dist(block[:2], other[:2]) >= 0.11 for other in blocks[index + 1:])
            assert all(math.dist(block[:2], zone) >= 0.10 for zone in zones)


def test_no_joint_moves_faster_than_its_limit_and_all_arrive():
    world = World(0)
    target = [1.2, 1.0, -1.5, 1.0]
    before = world.joints
    for _ in range(150):
        world.step(target)
        moved = np.abs(world.joints - before) / CONTROL_PERIOD_S
        assert (moved <= np.array(MAX_VELOCITIES) + 1e-9).all()
        before = world.joints
    assert world.joints == pytest.approx(target, abs=1e-6)
    assert world.joint_velocities == pytest.approx(np.zeros(4), abs=1e-4)


def test_a_servo_does_not_overshoot():
    world = World(0)
    goal = world.joints[0] + 0.8
    highest = -math.inf
    for _ in range(120):
        world.step([goal, *world.joints[1:]])
        highest = max(highest, world.joints[0])
    assert goal - 1e-6 < highest < goal + 0.01


def test_an_arm_sent_to_its_resting_point_brakes_without_turning_back():
    world = World(0)
    for _ in range(25):
        world.step([2.0, 0.5, 0.5, 0.0])
    rest = world.resting_joints
    assert world.joint_velocities[0] > 1.0
    for _ in range(60):
        world.step(rest)
        assert world.joint_velocities[0] > -0.02
    assert world.joints == pytest.approx(rest, abs=1e-3)


def test_targets_beyond_the_limits_stop_at_them():
    world = World(0)
    for _ in range(400):
        world.step([9.0, 9.0, 9.0, 9.0])
    assert world.joints == pytest.approx(UPPER_LIMITS)
    for _ in range(400):
        world.step([-9.0, -9.0, -9.0, -9.0])
    assert world.joints == pytest.approx(LOWER_LIMITS)


@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
def test_a_target_that_is_not_finite_is_refused_and_nothing_moves(bad):
    world = World(0)
    before = world.snapshot().to_vector()
    with pytest.raises(ActionNonFinite, match='not finite'):
        world.step([0.0, bad, 0.0, 0.0])
    assert np.array_equal(world.snapshot().to_vector(), before)


def test_a_target_of_another_size_is_refused():
    with pytest.raises(BadJoints, match='shoulder'):
        World(0).step([0.0, 0.0, 0.0])


def test_closing_over_a_block_lifts_it_and_opening_drops_it_where_it_is():
    world = World(21, 1)
    x, y, _ = world.snapshot().blocks[0]
    _go(world, x, y, 0.0)
    assert world.snapshot().lift == 1.0
    _go(world, x, y, 1.0, 40)
    state = world.snapshot()
    assert state.held == 0 and state.lift > 0.9
    assert state.joints[3] == pytest.approx(HOLD_GRIPPER)
    _go(world, 0.45, 0.1, 1.0)
    tool = forward(world.joints)
    carried = world.snapshot().blocks[0]
    assert math.dist(carried[:2], (tool.x, tool.y)) < 0.03
    _go(world, 0.45, 0.1, 0.0, 40)
    state = world.snapshot()
    assert state.held == -1
    assert math.dist(state.blocks[0, :2], carried[:2]) < 1e-3


def test_closing_beside_a_block_holds_nothing_and_closes_fully():
    world = World(21, 1)
    x, y, _ = world.snapshot().blocks[0]
    _go(world, x - 0.07, y, 0.0)
    _go(world, x - 0.07, y, 1.0, 40)
    assert world.snapshot().held == -1
    assert world.joints[3] == pytest.approx(1.0, abs=1e-3)


def test_closed_fingers_push_a_block_and_open_ones_pass_above_it():
    for gripper, moves in ((1.0, True), (0.0, False)):
        world = World(21, 1)
        world.move_block(world.snapshot().block_names[0], 0.45, 0.0)
        before = world.snapshot().blocks[0].copy()
        world.displace([*inverse(0.45, -0.15), gripper])
        _go(world, 0.45, -0.15, gripper, 40)
        _go(world, 0.45, 0.1, gripper)
        moved = math.dist(world.snapshot().blocks[0, :2], before[:2])
        assert (moved > 0.05) is moves


def test_a_held_block_passes_above_the_others():
    world = World(3, 2)
    names = world.snapshot().block_names
    world.move_block(names[0], 0.45, -0.2)
    world.move_block(names[1], 0.45, 0.0)
    _go(world, 0.45, -0.2, 0.0)
    _go(world, 0.45, -0.2, 1.0, 40)
    before = world.snapshot().blocks[1].copy()
    _go(world, 0.45, 0.25, 1.0)
    assert world.snapshot().held == 0
    assert np.array_equal(world.snapshot().blocks[1], before)


def test_whatever_the_arm_does_blocks_stay_in_the_tray_and_nothing_interpenetrates(stress):
    def visit(world: World) -> None:
        state = world.snapshot()
        blocks = state.blocks.tolist()
        discs = finger_discs(forward(state.joints), state.joints[3]) if state.lift < 0.5 else []
        for index, (x, y, angle) in enumerate(blocks):
            if index == state.held:
                continue
            extent = HALF * (abs(math.cos(angle)) + abs(math.sin(angle))) - 1e-9
            assert TRAY_X_M[0] + extent <= x <= TRAY_X_M[1] - extent
            assert TRAY_Y_M[0] + extent <= y <= TRAY_Y_M[1] - extent
            others = [b for at, b in enumerate(blocks) if at not in (index, state.held)]
            assert all(block_overlap(blocks[index], other)[0] < 2e-3 for other in others)
            assert all(disc_overlap(blocks[index], disc)[0] < 4e-3 for disc in discs)

    for seed in range(stress(60)):
        _wander(World(seed, 3), seed, 400, visit)


def test_a_displaced_arm_rests_at_its_new_place_and_keeps_what_it_holds():
    world = World(21, 1)
    x, y, _ = world.snapshot().blocks[0]
    _go(world, x, y, 0.0)
    _go(world, x, y, 1.0, 40)
    elsewhere = [*inverse(0.5, -0.2), 1.0]
    world.displace(elsewhere)
    state = world.snapshot()
    assert state.held == 0
    assert state.joints[:3] == pytest.approx(elsewhere[:3])
    assert not state.velocities.any()
    tool = forward(state.joints)
    assert math.dist(state.blocks[0, :2], (tool.x, tool.y)) < 0.03


def test_the_arm_cannot_be_displaced_beyond_its_limits():
    with pytest.raises(BadJoints, match='within'):
        World(0).displace([3.0, 0.0, 0.0, 0.0])


@pytest.mark.parametrize(('arguments', 'named'), [
    ({'seed': -1}, 'seed'),
    ({'seed': 2**64}, 'seed'),
    ({'blocks': 0}, 'blocks'),
    ({'blocks': 4}, 'blocks'),
    ({'zones': 0}, 'zones'),
    ({'seed': 1.5}, 'seed'),
])
def test_a_world_out_of_range_is_refused_naming_what_is_wrong(arguments, named):
    with pytest.raises(ParameterInvalid, match=named):
        World(**arguments)


@pytest.mark.parametrize('joints', [
    'abc', None, [1, 2, 3], ['a'] * 4, [1j] * 4, [10**400] * 4, [[0, 0, 0, 0]], [[1], [2, 3]]])
def test_targets_that_are_not_four_numbers_are_refused_and_move_nothing(joints):
    world = World(0)
    before = world.snapshot().to_vector()
    for verb in (world.step, world.displace):
        with pytest.raises(BadJoints, match='joints'):
            verb(joints)
    assert np.array_equal(world.snapshot().to_vector(), before)


def test_what_is_no_task_place_or_size_is_refused():
    world = World(0)
    name = world.snapshot().block_names[0]
    for wrong in (lambda: world.set_task(5), lambda: world.move_block(name, math.nan, 0.0),
                  lambda: world.move_block(name, 0.0, math.inf), lambda: world.render('top', 84.5),
                  lambda: world.render('top', '84')):
        with pytest.raises(ParameterInvalid):
            wrong()
