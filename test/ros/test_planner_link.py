"""The planner's ways to an executor: rows in a subgoal's place, whose answer it is, late news."""

from pathlib import Path
from unittest import mock

from _fake_policy import FakeConfig
from _fake_policy import FakePolicy
from _planner_rig import planner_rig
from _planner_rig import SECOND
from _planner_rig import TWO
from _ros_fixtures import wait_until
import numpy as np
import pytest
import torch

from flashrt_core.errors import SubgoalRefused
from flashrt_ros import executor_node
from flashrt_ros import qos
from flashrt_ros.msg import Event
from flashrt_ros.msg import ExecutorStatus
from flashrt_ros.msg import Subgoal

pytestmark = pytest.mark.ros
ROWS = np.float32([[0.1, -2, 3, 1e-30], [5, 6, 7, 8]])


@pytest.mark.parametrize('link', ['bound', 'service', 'topic'])
def test_rows_get_into_the_executors_slot_and_unfit_ones_are_refused(
        tmp_path: Path, link: str) -> None:
    policy = FakePolicy(FakeConfig(embedding=(3, 4)))
    with planner_rig(tmp_path, link=link, policy=policy) as (planner, robot):
        robot.run()
        way, base = planner.node.link, planner.node.link.base()
        rows = torch.from_numpy(ROWS.copy())
        way.write('the cup', 1, base, 0, 0.0, rows)
        rows.fill_(-1.0)
        wait_until(lambda: robot.executor.engine.slot.latched == 1, 'the tick to latch it')
        (given,) = {id(t.subgoal.embedding): t.subgoal for t in policy.switches.inputs
                    if t.subgoal is not None}.values()
        assert np.array_equal(given.embedding.values, ROWS)
        assert (given.sequence, given.tokens) == (1, ())
        with pytest.raises(SubgoalRefused, match=r'at most \[3, 4\]'):
            way.write('the cup', 2, base, 0, 0.0, torch.zeros(4, 4))
        assert robot.executor.engine.slot.requested == 1
        assert robot.executor.report.counters['subgoals_invalid'] == 1


def until_latched(robot, sequence: int) -> None:
    wait_until(lambda: robot.executor.engine.slot.latched == sequence,
               f'subgoal {sequence} to be latched')


@pytest.mark.parametrize('link', ['topic', 'service'])
def test_a_plan_begins_from_what_events_have_told_before_the_status_is_there(
        tmp_path: Path, link: str) -> None:
    with planner_rig(tmp_path, link=link) as (planner, robot):
        robot.run()
        known = planner.node.link.base
        wait_until(lambda: known().epoch == robot.executor.epoch, 'the status')
        robot.executor.outputs.publish_status = lambda: None  # as if it came too late
        goal = planner.goal(TWO, wait=True).until('execute')
        until_latched(robot, 1)
        again = planner.goal(SECOND, preempt=True).result()
        assert list(again.sequences) == [2], again.message
        assert goal.result().code == 'superseded'
        robot.reset()
        wait_until(lambda: known().epoch == robot.executor.epoch, 'the event of the reset')
        after = planner.goal(SECOND, preempt=True, wait=True).until('execute')
        until_latched(robot, 3)
        planner.outcome(3)
        assert after.result().success, 'neither refused for its episode nor ended by the reset'


def test_news_of_an_executor_that_is_no_more_do_not_outlive_the_next_ones_status(
        tmp_path: Path) -> None:
    with planner_rig(tmp_path, link='topic') as (planner, robot):
        robot.run()
        link = planner.node.link
        until_latched(robot, 0)
        robot.call('set_subgoal', subgoal=Subgoal(text='stop'))
        wait_until(lambda: link.base().sequence == 1, 'the mark')
        fresh = ExecutorStatus(state='active')
        fresh.header.stamp = robot.probe.get_clock().now().to_msg()
        link._on_status(fresh)
        assert link.base().sequence == link.base().epoch == 0
        link._on_status(ExecutorStatus(state='active', epoch=3))
        assert link.base().epoch == 3, 'a stamp of a clock that went back counts too'


def test_a_number_that_somebody_else_took_first_is_not_taken_for_the_plans_own(
        tmp_path: Path) -> None:
    with planner_rig(tmp_path, link='topic') as (planner, robot):
        robot.run()
        publisher = planner.node.link._publisher
        publish = publisher.publish

        def beaten(message: Subgoal) -> None:
            publisher.publish = publish
            assert robot.call('set_subgoal', subgoal=Subgoal(text='stop')).sequence == 1
            publish(message)

        publisher.publish = beaten
        result = planner.goal(TWO, wait=True).result()
        assert result.code == 'subgoal_refused' and 'already' in result.message
        until_latched(robot, 1)
        planner.outcome(1)
        assert robot.executor.engine.slot.requested == 1, 'and nothing of it comes later'


@pytest.mark.parametrize('link', ['bound', 'topic', 'service'])
def test_an_executor_that_is_configured_anew_ends_the_plan_whose_subgoal_it_has_forgotten(
        tmp_path: Path, link: str) -> None:
    with planner_rig(tmp_path, link=link) as (planner, robot):
        robot.run()
        goal = planner.goal(TWO, wait=True).until('execute')
        until_latched(robot, 1)
        with mock.patch.object(executor_node, 'make_policy', lambda name: robot.policy):
            for verb in (4, 2, 1, 3):  # deactivate, cleanup, configure, activate
                assert robot.executor.transition(verb)
        result = goal.result()
        assert result.code == 'wrong_state' and 'subgoal 1' in result.message
        robot.run()
        again = planner.goal(SECOND, wait=True).until('execute')
        until_latched(robot, 1)
        planner.outcome(1)
        assert again.result().success


def test_an_event_that_cannot_be_read_is_counted_and_ends_nothing(tmp_path: Path) -> None:
    with planner_rig(tmp_path, link='topic') as (planner, robot):
        robot.run()
        goal = planner.goal(TWO, wait=True).until('execute')
        publisher = robot.probe.create_publisher(Event, '/executor/events', qos.record())
        wait_until(lambda: publisher.get_subscription_count() > 1, 'the planner to listen')
        for kind, name, detail in (
                ('subgoal', '7', '{"sequence": "seven"}'), ('subgoal', '7', '{"sequence": null}'),
                ('hold', 'x', '[1]'), ('subgoal_done', 'one', '{}'), ('reset', '', 'no JSON')):
            publisher.publish(Event(kind=kind, name=name, detail=detail))
        wait_until(lambda: planner.node.report.refusals.snapshot().get('event_unreadable') == 5,
                   'all to be counted')
        planner.outcome(1)
        until_latched(robot, 2)
        planner.outcome(2)
        assert goal.result().success


def test_an_executor_that_is_gone_ends_the_plan_that_waits_for_it(tmp_path: Path) -> None:
    with planner_rig(tmp_path, link='topic') as (planner, robot):
        robot.run()
        goal = planner.goal(TWO, wait=True).until('execute')
        planner.node.count_publishers = lambda topic: 0
        result = goal.result()
        assert result.code == 'wrong_state' and 'is gone' in result.message
