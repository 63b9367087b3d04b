"""An executor whose policy says when its subgoal is done: one outcome for each subgoal."""

from pathlib import Path

from _executor_rig import rig
from _fake_policy import FakeConfig
from _fake_policy import FakePolicy
from _ros_fixtures import wait_until
import numpy as np
import pytest
from test_executor_lockstep import run

from flashrt_core.policies.protocol import Chunk
from flashrt_ros import qos
from flashrt_ros.executor_done import DoneReporter
from flashrt_ros.msg import Subgoal
from flashrt_ros.msg import SubgoalOutcome


def chunk(sequence: int, done: float) -> Chunk:
    actions = np.zeros((1, 4, 3), np.float32)
    actions[0, 0, 2] = done
    return Chunk(actions, tick=0, subgoal_sequence=sequence)


def test_each_subgoal_is_told_once_and_a_new_epoch_asks_anew() -> None:
    told: list[int] = []
    reporter = DoneReporter(2, told.append)
    for epoch, sequence, done in ((1, 1, 1), (1, 1, 1), (1, 1, 1), (1, 2, 1), (1, 2, 0), (1, 2, 1),
                                  (1, 2, 1), (2, 2, 1), (2, 2, 1), (2, 0, 1), (2, 0, 1)):
        reporter.played(chunk(sequence, done), epoch)
    assert told == [1, 2, 2]


def test_a_policy_that_cannot_say_it_is_never_asked() -> None:
    told: list[int] = []
    reporter = DoneReporter(None, told.append)
    for _ in range(3):
        reporter.played(chunk(1, 1.0), 1)
    assert not told


@pytest.mark.ros
def test_the_outcome_of_a_subgoal_is_published_when_the_policy_says_done(tmp_path: Path) -> None:
    units = 'rad rad rad 1 probability'
    policy = FakePolicy(FakeConfig(joints=5, action_units=units))
    with rig(tmp_path, policy, arm=False, lock_step=True, tick_period_steps=4) as r:
        heard: list[SubgoalOutcome] = []
        listen = r.probe.create_subscription
        listen(SubgoalOutcome, 'subgoal_outcome', heard.append, qos.record())
        wait_until(lambda: r.probe.count_publishers('subgoal_outcome') == 1, 'the publisher')
        policy.switches.done = 1.0
        assert all(reply.success for reply in run(r, 9, seed=5))
        reply = r.call('set_subgoal', subgoal=Subgoal(text='go home', sequence=7))
        assert reply.success, reply.message
        assert not heard  # nothing to be done with until then
        for _ in range(13):
            assert r.call('step').success
        told = r.until_event('subgoal_done', '7')
        wait_until(lambda: bool(heard), 'the outcome')
        assert [(m.sequence, m.outcome, m.episode) for m in heard] == [
            (7, SubgoalOutcome.DONE, told.episode)]
