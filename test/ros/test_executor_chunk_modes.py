"""When the executor ticks in each chunk mode, and what diagnostics say of the chunks played."""

from pathlib import Path

from _executor_rig import Rig
from _executor_rig import rig
from _fake_policy import FakeConfig
from _fake_policy import FakePolicy
from _ros_fixtures import wait_until
import pytest
from rclpy.parameter import Parameter
from test_executor_lockstep import run

HORIZON = FakeConfig().horizon


def steps_section(r: Rig) -> dict[str, float]:
    values = r.executor.report.sections()['steps'].values
    return {key: float(values[key]) for key in (
        'chunk_age_max_steps', 'planned_age_steps', 'share_older_than_planned',
        'plan_steps_repeated', 'plan_steps_skipped', 'periods_without_action')}


@pytest.mark.ros
def test_in_sync_a_tick_waits_until_the_last_chunk_is_used_up(tmp_path: Path) -> None:
    policy = FakePolicy(FakeConfig(chunk_mode='sync'))
    with rig(tmp_path, policy, arm=False, lock_step=True, tick_period_steps=4) as r:
        replies = run(r, 2 * HORIZON + 3, seed=5)
        assert all(reply.success for reply in replies), replies[0].message
        ticked = [i for i, reply in enumerate(replies) if reply.ticked]
        assert ticked == [0, HORIZON, 2 * HORIZON]
        assert {t.delay_steps for t in policy.switches.inputs} == {0}
        told = steps_section(r)
        assert told['chunk_age_max_steps'] == HORIZON - 1
        assert told['share_older_than_planned'] == 0 == told['plan_steps_repeated']


@pytest.mark.ros
@pytest.mark.parametrize('mode', ['blend', 'ensemble', 'rtc'])
def test_in_the_other_modes_a_tick_comes_every_period(tmp_path: Path, mode: str) -> None:
    policy = FakePolicy(FakeConfig(chunk_mode=mode))
    with rig(tmp_path, policy, arm=False, lock_step=True, tick_period_steps=4) as r:
        replies = run(r, 12, seed=5)
        assert [i for i, reply in enumerate(replies) if reply.ticked] == [0, 4, 8]
        assert steps_section(r) == {
            'chunk_age_max_steps': 3, 'planned_age_steps': 4, 'share_older_than_planned': 0,
            'plan_steps_repeated': 0, 'plan_steps_skipped': 0, 'periods_without_action': 0}


@pytest.mark.ros
def test_a_slow_policy_is_told_its_measured_delay_in_steps(tmp_path: Path) -> None:
    policy = FakePolicy()
    policy.switches.segment_s = 0.02  # three of them: three steps of 20 ms
    with rig(tmp_path, policy, tick_period_steps=4) as r:
        r.run()
        timing = r.executor.control.player.timing
        wait_until(lambda: timing.steps > 60 and len(r.chunks) > 8, 'steps to be played')
        told = [t.delay_steps for t in policy.switches.inputs]
        assert told[0] == 0 and max(told) >= 2
        assert timing.expected_delay >= 2
        assert (timing.repeated, timing.skipped) == (0, 0)


@pytest.mark.ros
def test_best_of_is_taken_over_by_the_next_tick_and_only_what_was_captured(tmp_path: Path) -> None:
    with rig(tmp_path, tick_period_steps=4) as r:
        r.run()
        given = r.policy.switches.inputs
        assert {t.best_of for t in given} == {1}
        (refused,) = r.executor.set_parameters([Parameter('best_of', value=3)])
        assert not refused.successful and 'captured are [2]' in refused.reason
        (taken,) = r.executor.set_parameters([Parameter('best_of', value=2)])
        assert taken.successful, taken.reason
        wait_until(lambda: given[-1].best_of == 2, 'a tick that chooses')
        r.until_event('parameter', 'best_of')
