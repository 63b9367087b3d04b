"""Commands by name, streams, chunks and the hold."""

import numpy as np
import pytest

from flashrt_core.errors import ActionNonFinite
from flashrt_core.errors import BadJoints
from flashrt_core.errors import BadSize
from flashrt_core.tabletop.commands import CommandPlayer
from flashrt_core.tabletop.commands import read_points
from flashrt_core.tabletop.kinematics import JOINT_NAMES

REST = np.array([0.1, 0.2, 0.3, 0.0])
GOAL = np.array([0.5, 0.6, 0.7, 1.0])


def _player() -> CommandPlayer:
    return CommandPlayer(hold_after_s=0.2)


def test_joints_are_read_by_name_in_any_order():
    names = ['gripper', 'wrist', 'shoulder', 'elbow']
    points = read_points(names, [[1.0, 0.3, 0.1, 0.2]])
    assert points.tolist() == [[0.1, 0.2, 0.3, 1.0]]


@pytest.mark.parametrize('names', [
    [], ['shoulder', 'elbow', 'wrist'], [*JOINT_NAMES, 'finger'],
    ['shoulder', 'shoulder', 'wrist', 'gripper'], ['q1', 'q2', 'q3', 'gripper'],
])
def test_missing_unknown_and_repeated_names_are_refused(names):
    with pytest.raises(BadJoints, match='shoulder'):
        read_points(names, [[0.0] * len(names)])


@pytest.mark.parametrize('rows', [
    [], [[]], [[0.0] * 3], [[0.0] * 4, [0.0] * 3], [[0.0] * 4] * 5000,
])
def test_rows_of_another_size_and_too_many_points_are_refused(rows):
    with pytest.raises(BadSize, match='positions'):
        read_points(JOINT_NAMES, rows)


@pytest.mark.parametrize('bad', [np.nan, np.inf])
def test_one_element_that_is_not_finite_refuses_the_whole_command(bad):
    with pytest.raises(ActionNonFinite, match='1 positions'):
        read_points(JOINT_NAMES, [[0.0] * 4, [0.0, bad, 0.0, 0.0]])


def test_without_a_command_the_arm_rests_and_that_is_no_hold():
    player = _player()
    assert np.array_equal(player.target(0.0, REST), REST)
    assert np.array_equal(player.target(99.0, GOAL), REST)
    assert not player.holding and player.holds == 0


def test_a_single_point_is_the_target_at_once():
    player = _player()
    player.accept(GOAL[None], [0.5], 1.0, 1.0, REST)
    assert np.array_equal(player.target(1.0, REST), GOAL)


def test_silence_holds_the_arm_where_it_comes_to_rest_and_keeps_the_gripper():
    player = _player()
    player.accept(GOAL[None], [0.0], 1.0, 1.0, REST)
    assert np.array_equal(player.target(1.2, REST), GOAL)
    resting = np.array([0.4, 0.4, 0.4, 0.5])
    held = player.target(1.201, resting)
    assert held.tolist() == [0.4, 0.4, 0.4, 1.0]
    assert player.holding and player.holds == 1
    assert np.array_equal(player.target(50.0, REST), held)
    assert player.holds == 1


def test_the_next_command_ends_a_hold():
    player = _player()
    player.accept(GOAL[None], [0.0], 1.0, 1.0, REST)
    player.target(2.0, REST)
    player.accept(REST[None], [0.0], 3.0, 3.0, GOAL)
    assert not player.holding
    assert np.array_equal(player.target(3.1, GOAL), REST)


def test_a_chunk_is_played_by_its_times_from_the_resting_pose_and_then_holds():
    player = _player()
    player.accept(np.array([GOAL, REST]), [0.1, 0.3], 1.0, 1.0, REST)
    assert player.target(1.0, REST) == pytest.approx(REST)
    assert player.target(1.05, REST) == pytest.approx((REST + GOAL) / 2)
    assert player.target(1.1, REST) == pytest.approx(GOAL)
    assert player.target(1.2, REST) == pytest.approx((REST + GOAL) / 2)
    assert player.target(1.49, REST) == pytest.approx(REST)
    assert not player.holding
    player.target(1.51, REST)
    assert player.holding


def test_a_newer_chunk_takes_over_from_the_running_one_without_a_jump():
    player = _player()
    player.accept(np.array([GOAL, GOAL]), [0.1, 0.3], 0.0, 0.0, REST)
    before = player.target(0.05, REST)
    player.accept(np.array([REST, REST]), [0.02, 0.3], 0.05, 0.05, REST)
    assert player.target(0.05, REST) == pytest.approx(before)
    assert player.target(0.07, REST) == pytest.approx(REST)


def test_points_of_a_chunk_that_have_passed_are_dropped():
    player = _player()
    player.accept(np.array([GOAL, REST]), [0.0, 0.2], 1.0, 1.1, GOAL)
    assert player.target(1.15, GOAL) == pytest.approx((GOAL + REST) / 2)


def test_a_chunk_that_has_ended_is_refused_and_the_old_one_goes_on():
    player = _player()
    player.accept(GOAL[None], [0.0], 5.0, 5.0, REST)
    with pytest.raises(BadJoints, match='ago'):
        player.accept(np.array([REST, REST]), [0.0, 0.2], 1.0, 5.0, REST)
    assert np.array_equal(player.target(5.1, REST), GOAL)


@pytest.mark.parametrize('times', [[0.1, 0.1], [0.2, 0.1], [-0.1, 0.1], [0.1], [np.nan, 0.1]])
def test_times_that_do_not_increase_are_refused(times):
    with pytest.raises(BadSize, match='time_from_start'):
        _player().accept(np.array([GOAL, REST]), times, 0.0, 0.0, REST)
