"""What the executor tells of its subgoals: done, failed or timed out, one outcome for each."""

from pathlib import Path
from typing import Any

from _executor_rig import Rig
from _executor_rig import rig
from _fake_policy import FakeConfig
from _fake_policy import FakePolicy
from _ros_fixtures import wait_until
import numpy as np
import pytest
from test_executor_lockstep import run

from flashrt_core.policies.protocol import Chunk
from flashrt_ros import qos
from flashrt_ros.executor_outcomes import OutcomeReporter
from flashrt_ros.hold import Cause
from flashrt_ros.msg import Subgoal
from flashrt_ros.msg import SubgoalOutcome
from flashrt_ros.subgoals import DONE
from flashrt_ros.subgoals import FAILED
from flashrt_ros.subgoals import TIMED_OUT

Told = list[tuple[int, str]]


def reporter_of(column: int | None) -> tuple[OutcomeReporter, Told]:
    told: Told = []
    return OutcomeReporter(column, lambda s, outcome, _: told.append((s, outcome))), told


def outcomes_of(r: Rig) -> list[SubgoalOutcome]:
    heard: list[SubgoalOutcome] = []
    r.probe.create_subscription(SubgoalOutcome, 'subgoal_outcome', heard.append, qos.record())
    wait_until(lambda: r.probe.count_publishers('subgoal_outcome') == 1, 'the publisher')
    return heard


def chunk(sequence: int, done: float) -> Chunk:
    actions = np.zeros((1, 4, 3), np.float32)
    actions[0, 0, 2] = done
    return Chunk(actions, tick=0, subgoal_sequence=sequence)


def test_each_subgoal_is_told_once_and_a_new_epoch_asks_anew() -> None:
    reporter, told = reporter_of(2)
    for epoch, sequence, done in ((1, 1, 1), (1, 1, 1), (1, 1, 1), (1, 2, 1), (1, 2, 0), (1, 2, 1),
                                  (1, 2, 1), (2, 2, 1), (2, 2, 1), (2, 0, 1), (2, 0, 1)):
        reporter.played(chunk(sequence, done), epoch)
    assert told == [(1, DONE), (2, DONE), (2, DONE)]


def test_a_policy_that_cannot_say_it_is_never_asked() -> None:
    reporter, told = reporter_of(None)
    for _ in range(3):
        reporter.played(chunk(1, 1.0), 1)
    assert not told


def test_the_first_outcome_of_a_subgoal_stands_and_none_of_an_older_one_follows() -> None:
    reporter, told = reporter_of(2)
    reporter.tell(3, 1, TIMED_OUT, '')
    for _ in range(3):
        reporter.played(chunk(3, 1.0), 1)
    reporter.tell(2, 1, FAILED, '')
    reporter.tell(4, 1, FAILED, '')
    assert told == [(3, TIMED_OUT), (4, FAILED)]


@pytest.mark.ros
def test_the_outcome_of_a_subgoal_is_published_when_the_policy_says_done(tmp_path: Path) -> None:
    units = 'rad rad rad 1 probability'
    policy = FakePolicy(FakeConfig(joints=5, action_units=units))
    with rig(tmp_path, policy, arm=False, lock_step=True, tick_period_steps=4) as r:
        heard = outcomes_of(r)
        policy.switches.done = 1.0
        assert all(reply.success for reply in run(r, 9, seed=5))
        reply = r.call('set_subgoal', subgoal=Subgoal(text='go home', sequence=7))
        assert reply.success, reply.message
        assert not heard  # nothing to be done with until then
        replies = [r.call('step') for _ in range(13)]
        assert all(reply.success for reply in replies)
        assert [reply.subgoal_done for reply in replies if reply.subgoal_done] == [7]
        assert all(reply.ticked for reply in replies if reply.subgoal_done)
        told = r.until_event('subgoal_done', '7')
        wait_until(lambda: bool(heard), 'the outcome')
        assert [(m.sequence, m.outcome, m.episode) for m in heard] == [
            (7, SubgoalOutcome.DONE, told.episode)]


@pytest.mark.ros
def test_a_step_after_a_reset_tells_nothing_that_was_done_before_it(tmp_path: Path) -> None:
    with rig(tmp_path, arm=False, lock_step=True) as r:
        r.reset()
        outputs = r.executor.outputs
        outputs.outcome(1, DONE, 'the policy says so')
        assert outputs.take_done() == 1 and outputs.take_done() == 0
        outputs.outcome(2, DONE, 'the policy says so')
        r.reset()
        assert outputs.take_done() == 0


def begin(r: Rig, **subgoal: Any) -> list[SubgoalOutcome]:
    """A robot that works on its subgoal 1, and the outcomes that are heard of it."""
    heard = outcomes_of(r)
    r.run()
    assert r.call('set_subgoal', subgoal=Subgoal(text='go home', **subgoal)).sequence == 1
    wait_until(lambda: any(c.subgoal_sequence == 1 for c in r.chunks), 'its chunk')
    return heard


@pytest.mark.ros
def test_a_subgoal_whose_deadline_has_passed_has_timed_out_and_the_robot_holds(
        tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        heard = begin(r, deadline_s=0.2)
        wait_until(lambda: bool(heard), 'the outcome')
        assert (heard[0].sequence, heard[0].outcome) == (1, SubgoalOutcome.TIMED_OUT)
        assert 'holds' in heard[0].message and heard[0].episode == 1
        r.until_event('subgoal_timed_out', '1')
        assert r.executor.phase == 'holding'
        assert r.call('set_subgoal', subgoal=Subgoal(text='go on')).sequence == 2
        r.until_phase('ticking')
        assert len(heard) == 1


@pytest.mark.ros
def test_a_latched_fault_fails_the_subgoal_in_force_and_a_hold_that_was_asked_for_does_not(
        tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        heard = begin(r)
        assert r.call('hold', cause='visitor', latch=True).success
        r.until_event('hold', 'visitor')
        assert r.call('resume').success
        r.until_phase('ticking')
        r.executor.control.hold(Cause.OBSERVATION, message='passes by itself')
        r.until_phase('ticking')
        assert not heard
        r.policy.switches.error = ValueError('this policy is ill')
        wait_until(lambda: r.executor.control.holds.latched, 'the latch')
        r.policy.switches.error = None
        wait_until(lambda: bool(heard), 'the outcome')
        assert (heard[0].sequence, heard[0].outcome) == (1, SubgoalOutcome.FAILED)
        assert 'fault' in heard[0].message and 'this policy is ill' in heard[0].message
        assert r.call('resume').success
        r.until_phase('ticking')
        assert len(heard) == 1


@pytest.mark.ros
def test_a_fault_before_any_subgoal_or_after_a_reset_fails_none(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        heard = begin(r)
        r.policy.switches.error = ValueError('this policy is ill')
        r.reset()  # no tick has committed since: which subgoal is in force is not known
        wait_until(lambda: r.executor.control.holds.latched, 'the latch')
        assert r.executor.engine.slot.in_force == 0 and not heard
