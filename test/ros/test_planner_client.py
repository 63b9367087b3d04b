"""The planner's client as a conductor uses it, over real DDS."""

from pathlib import Path
import threading
from typing import Any

from _planner_rig import FIRST
from _planner_rig import planner_rig
from _planner_rig import PlannerRig
from _planner_rig import SECOND
from _planner_rig import TWO
from _ros_fixtures import wait_until
import pytest

from flashrt_ros.msg import SubgoalOutcome
from flashrt_ros.planner_client import PlanCall
from flashrt_ros.planner_client import PlannerClient

pytestmark = pytest.mark.ros


def client_of(planner: PlannerRig) -> PlannerClient:
    changed = threading.Event()
    client = PlannerClient(
        planner.probe, 'planner', lambda condition, _, what: wait_until(condition, what),
        changed.set)
    wait_until(lambda: client.ready, 'the planner')
    return client


def test_a_plan_is_followed_subgoal_by_subgoal_to_its_result(tmp_path: Path) -> None:
    with planner_rig(tmp_path) as (planner, robot):
        robot.reset()
        client = client_of(planner)
        call = client.plan(TWO)
        first = client.settle(call)
        assert call.subgoals == {first: FIRST} and call.result is None
        assert call.text == f'{FIRST}; {SECOND}.'
        client.tell(first, SubgoalOutcome.DONE, 'a test says so')
        assert client.settle(call, first) == first + 1
        client.tell(first + 1, SubgoalOutcome.DONE, 'a test says so')
        assert client.settle(call, first + 1) == first + 1, 'it has ended'
        assert call.result is not None and call.result.code == 'ok'
        assert [c.id for c in client.capsules()] == ['context']


def test_a_plan_that_is_cancelled_or_refused_has_a_result_that_says_so(tmp_path: Path) -> None:
    with planner_rig(tmp_path) as (planner, robot):
        robot.reset()
        client = client_of(planner)
        call = client.plan(TWO)
        client.settle(call)
        second: Any = client.plan(TWO)
        client.wait_for_end(second)
        assert second.result.code == 'busy'
        client.cancel(call)
        assert call.result is not None and call.result.code == 'cancelled'
        client.cancel(call)  # nothing is left to do


def test_an_end_is_waited_for_as_long_as_the_caller_says() -> None:
    client, waits = PlannerClient.__new__(PlannerClient), []
    client._wait = lambda *asked: waits.append(asked[1:])
    client.wait_for_end(PlanCall(TWO))
    client.wait_for_end(PlanCall(TWO), timeout_s=60)
    assert waits == [(s, f"the plan for '{TWO}' to end") for s in (20.0, 60)]
