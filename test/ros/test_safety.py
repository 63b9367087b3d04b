"""Tests of flashrt_ros.safety: the guard of chunks and the limiter of steps."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
import numpy as np
import pytest
import yaml

from flashrt_core.errors import ActionJump
from flashrt_core.errors import ActionNonFinite
from flashrt_core.errors import ActionOutOfLimits
from flashrt_core.errors import ConfigError
from flashrt_ros.embodiment import parse_embodiment
from flashrt_ros.safety import ActionGuard
from flashrt_ros.safety import StepLimiter
from flashrt_ros.statistics import Counters

ROBOT = parse_embodiment(yaml.safe_dump({
    'format': 1, 'name': 'arm', 'control_rate_hz': 50.0, 'pose_gap': 0.3, 'joints': [
        {'name': 'a', 'unit': 'rad', 'position': {'min': -1.0, 'max': 1.0}, 'max_velocity': 2.0},
        {'name': 'b', 'unit': 'm', 'position': {'min': 0.0, 'max': 0.5}, 'max_velocity': 1.0},
    ]}))  # max_step: 0.04 rad, 0.02 m
NAN, INF = float('nan'), float('inf')


def guard(limits='clamp'):
    counters = Counters()
    return ActionGuard(ROBOT, limits=limits, counters=counters), counters


def still(horizon=5):
    return np.tile([0.0, 0.2], (horizon, 1))


def test_a_chunk_within_the_limits_passes_unchanged():
    subject, counters = guard('reject')
    actions = np.cumsum(np.full((5, 2), 0.02), axis=0)
    result = subject.check(actions)
    assert np.array_equal(result.actions, actions) and result.actions is not actions
    assert (result.clamped, result.limited) == (0, 0)
    assert counters['chunks_checked'] == 1


@given(st.sampled_from([NAN, INF, -INF]), st.integers(0, 4), st.integers(0, 1))
def test_one_bad_element_anywhere_drops_the_whole_chunk(value, row, column):
    subject, counters = guard()
    actions = still()
    actions[row, column] = value
    with pytest.raises(ActionNonFinite, match=f'action {row} of {"ab"[column]}'):
        subject.check(actions, first_step=2)
    assert counters['chunks_non_finite'] == 1 and not subject.must_latch


def test_the_second_bad_chunk_in_a_row_latches():
    subject, _ = guard()
    bad = still() * NAN
    for expected in (False, True):
        with pytest.raises(ActionNonFinite):
            subject.check(bad)
        assert subject.must_latch is expected
    subject.reset()
    assert not subject.must_latch


def test_a_good_chunk_between_two_bad_ones_breaks_the_run():
    subject, _ = guard()
    for chunk in (still() * NAN, still(), still() * NAN):
        try:
            subject.check(chunk)
        except ActionNonFinite:
            pass
    assert not subject.must_latch


def test_a_huge_but_finite_target_is_clamped_and_counted():
    subject, counters = guard()
    actions = still()
    actions[:, 0] = 1e30
    result = subject.check(actions)
    assert (result.actions[:, 0] == 1.0).all()
    assert result.clamped == counters['actions_clamped'] == 5


def test_a_target_beyond_its_limit_is_refused_when_rejecting():
    subject, counters = guard('reject')
    actions = still()
    actions[3, 1] = 0.21
    actions[4, 1] = -0.01
    with pytest.raises(ActionOutOfLimits, match=r'b target -0\.0100 m lies outside 0\.0 to 0\.5'):
        subject.check(actions)
    assert counters['chunks_out_of_limits'] == 1


def test_a_target_exactly_on_its_limit_passes():
    subject, _ = guard('reject')
    subject.check(np.tile([1.0, 0.5], (3, 1)))


def test_past_rows_are_not_judged_by_limits():
    subject, _ = guard('reject')
    actions = still()
    actions[0] = [5.0, 5.0]
    subject.check(actions, first_step=1)


def test_a_jump_inside_the_chunk_is_led_up_at_the_step_limit():
    subject, counters = guard()
    actions = still()
    actions[2:, 0] = 0.1
    result = subject.check(actions)
    assert result.actions[:, 0].tolist() == pytest.approx([0.0, 0.0, 0.04, 0.08, 0.1])
    assert result.limited == counters['steps_limited'] == 2


def test_a_jump_at_the_seam_is_bounded_by_what_is_commanded_now():
    subject, _ = guard()
    result = subject.check(still(), commanded=np.array([0.1, 0.2]))
    assert result.actions[:, 0].tolist() == pytest.approx([0.06, 0.02, 0.0, 0.0, 0.0])


@pytest.mark.parametrize('commanded', [None, np.array([0.5, 0.2])])
def test_a_jump_is_refused_when_rejecting(commanded):
    subject, counters = guard('reject')
    actions = still()
    if commanded is None:
        actions[2:, 0] = 0.1
    with pytest.raises(ActionJump, match=r'in one step, max_step is 0\.0400'):
        subject.check(actions, commanded=commanded)
    assert counters['chunks_jump'] == 1


_actions = arrays(np.float64, (6, 2), elements=st.floats(-5, 5))
_pose = arrays(np.float64, (2,), elements=st.floats(0, 0.5))


@given(_actions, _pose, st.integers(0, 5))
def test_whatever_comes_in_what_is_played_keeps_limits_and_steps(actions, commanded, first):
    subject, _ = guard()
    played = subject.check(actions, first_step=first, commanded=commanded).actions[first:]
    assert (played >= ROBOT.minimum).all() and (played <= ROBOT.maximum).all()
    path = np.concatenate([commanded[None], played])
    assert (np.abs(np.diff(path, axis=0)) <= ROBOT.max_step * (1 + 1e-6)).all()


def test_a_motion_far_from_the_measured_pose_is_refused_by_joint():
    subject, counters = guard()
    subject.check_pose_gap(np.array([0.3, 0.2]), np.array([0.0, 0.2]))
    with pytest.raises(ActionJump, match=r'a would begin 0\.3100 rad from its measured'):
        subject.check_pose_gap(np.array([0.31, 0.2]), np.array([0.0, 0.2]))
    with pytest.raises(ActionJump):
        subject.check_pose_gap(np.array([0.0, 0.2]), np.array([NAN, 0.2]))
    assert counters['pose_gap_refused'] == 2


def test_another_word_for_limits_is_refused():
    with pytest.raises(ConfigError, match="limits is 'ignore'"):
        guard('ignore')


def limiter(measured=(0.0, 0.2), **options):
    subject = StepLimiter(ROBOT, Counters())
    subject.rebase(np.array(measured), **options)
    return subject


def follow(subject, target, steps):
    out, path = np.zeros(2), []
    for _ in range(steps):
        subject.limit(np.array(target, dtype=float), out)
        path.append(out[0])
    return path


def test_the_first_command_starts_from_the_measured_pose():
    assert follow(limiter((0.2, 0.2)), (0.0, 0.2), 6) == pytest.approx(
        [0.16, 0.12, 0.08, 0.04, 0.0, 0.0])


def test_blending_in_is_slower_and_ends_when_the_target_is_reached():
    subject = limiter((0.06, 0.2), speed=0.5)
    assert follow(subject, (0.0, 0.2), 2) == pytest.approx([0.04, 0.02]) and subject.blending
    assert follow(subject, (0.0, 0.2), 1) == pytest.approx([0.0]) and not subject.blending
    assert follow(subject, (0.5, 0.2), 1) == pytest.approx([0.04])  # full speed again


def test_a_robot_found_outside_its_limits_is_led_back_without_a_jump():
    path = follow(limiter((1.2, 0.2)), (1.5, 0.2), 7)
    assert path == pytest.approx([1.16, 1.12, 1.08, 1.04, 1.0, 1.0, 1.0])


def test_no_command_is_given_before_the_pose_is_known():
    with pytest.raises(ActionJump, match='call rebase first'):
        StepLimiter(ROBOT, Counters()).limit(np.zeros(2), np.zeros(2))


@pytest.mark.parametrize('bad', [NAN])
def test_a_target_that_is_not_finite_leaves_the_last_command(bad):
    subject = limiter()
    with pytest.raises(ActionNonFinite):
        subject.limit(np.array([bad, 0.2]), np.zeros(2))
    assert subject.command.tolist() == [0.0, 0.2]


def test_target_and_command_may_be_one_array():
    subject, both = limiter(), np.array([1.0, 0.2])
    assert subject.limit(both, both)
    assert both.tolist() == pytest.approx([0.04, 0.2])


@given(_pose, st.lists(arrays(np.float64, (2,), elements=st.floats(-1e9, 1e9)), max_size=8),
       st.floats(0.05, 1.0))
def test_no_target_moves_a_command_by_more_than_a_step(measured, targets, speed):
    subject = limiter(measured, speed=speed)
    last, out = np.array(measured), np.zeros(2)
    for target in targets:
        subject.limit(target, out)
        assert (np.abs(out - last) <= ROBOT.max_step * (1 + 1e-9)).all()
        assert (out >= ROBOT.minimum - 1e-12).all() and (out <= ROBOT.maximum + 1e-12).all()
        last = out.copy()


@pytest.mark.parametrize('speed', [0.0, 1.5, NAN])
def test_a_blend_speed_out_of_range_is_refused(speed):
    with pytest.raises(ConfigError, match='resync speed'):
        limiter(speed=speed)


def test_limited_steps_are_counted():
    counters = Counters()
    subject = StepLimiter(ROBOT, counters)
    subject.rebase(np.array([0.0, 0.2]))
    follow(subject, (0.1, 0.2), 4)
    assert counters['steps_limited'] == 2
