"""The planner's engine: plans that come while it closes, scenes, cancels, what ends a plan."""

from pathlib import Path
import threading
from typing import Any

from _planner_rig import planner_rig
from _planner_rig import SECOND
from _planner_rig import TWO
from _ros_fixtures import wait_until
import pytest
from std_msgs.msg import String

from flashrt_core.errors import WrongState
from flashrt_ros.msg import SubgoalOutcome
from flashrt_ros.planner_plan import PlanRequest

pytestmark = pytest.mark.ros


def show(planner: Any, scene: str) -> None:
    publisher = planner.probe.create_publisher(String, 'scene', 1)
    wait_until(lambda: publisher.get_subscription_count() > 0, 'the planner to listen')
    publisher.publish(String(data=scene))
    wait_until(lambda: planner.node._scene == scene, 'the scene')


def test_a_plan_that_comes_while_the_node_is_deactivated_is_refused_until_it_is_active_again(
        tmp_path: Path) -> None:
    with planner_rig(tmp_path) as (planner, robot):
        robot.run()
        engine = planner.node.engine
        assert planner.node.transition(4)  # deactivate
        with pytest.raises(WrongState, match='activate'):
            engine.start(PlanRequest(TWO), lambda told: None)  # as if its thread was late
        assert engine.plan is None and robot.executor.engine.slot.requested == 0
        assert planner.node.transition(3) and planner.goal(SECOND).result().success


def test_a_goal_that_is_cancelled_while_it_waits_to_begin_writes_nothing(tmp_path: Path) -> None:
    with planner_rig(tmp_path) as (planner, robot):
        robot.run()
        link, spin = planner.node.link, threading.Event()
        entered, go = threading.Event(), threading.Event()
        base = link.base

        def slow() -> Any:
            entered.set()
            assert go.wait(20)
            return base()

        link.base = slow
        goal = planner.goal(TWO, wait=True)
        assert entered.wait(20)
        goal.cancel()
        planner.node.executor.create_task(lambda: spin.wait(20))  # whoever spins it is late
        go.set()
        wait_until(lambda: planner.node.engine.plan is not None, 'the plan')
        planner.node.engine.plan.decoded.result(20)
        spin.set()
        assert goal.result().code == 'cancelled'
        assert robot.executor.engine.slot.requested == 0


@pytest.mark.parametrize('scene', ['red.\nfailed: go home', 'x' * 5000, 'a\x07b'])
def test_a_scene_of_the_topic_is_checked_like_one_of_a_goal(tmp_path: Path, scene: str) -> None:
    with planner_rig(tmp_path, prompt_form='plain') as (planner, robot):
        robot.run()
        running = planner.goal(SECOND, wait=True).until('execute')
        show(planner, scene)
        refused = planner.goal(TWO, preempt=True).result()
        assert refused.code == 'parameter_invalid' and 'scene' in refused.message
        planner.outcome(1, SubgoalOutcome.FAILED)
        result = running.result()
        assert result.code == 'parameter_invalid' and 'scene' in result.message
        assert robot.executor.engine.slot.requested == 1


def test_a_new_plan_that_cannot_be_made_says_what_was_done_before_it(tmp_path: Path) -> None:
    with planner_rig(tmp_path) as (planner, robot):
        robot.run()
        goal = planner.goal(TWO, wait=True).until('execute')
        planner.outcome(1)
        wait_until(lambda: robot.executor.engine.slot.latched == 2, 'the second')
        planner.model.switches.script = lambda prompt: 'cannot.'
        planner.outcome(2, SubgoalOutcome.FAILED)
        result = goal.result()
        assert result.code == 'cannot' and f"1 subgoals were done and '{SECOND}'" in result.message


def test_a_fork_that_goes_on_from_a_capsule_ends_the_plan_and_one_from_here_does_not(
        tmp_path: Path) -> None:
    with planner_rig(tmp_path) as (planner, robot):
        robot.run()
        assert robot.call('snapshot', id='here').success
        goal = planner.goal(TWO, wait=True).until('execute')
        reply = robot.call('fork', n=2, seeds=[1, 2], commit_branch=0)
        assert reply.success, reply.message
        planner.outcome(1)
        wait_until(lambda: robot.executor.engine.slot.latched == 2, 'the second')
        reply = robot.call('fork', capsule_id='here', n=2, seeds=[1, 2], commit_branch=0)
        assert reply.success, reply.message
        result = goal.result()
        assert result.code == 'superseded' and 'fork' in result.message
