"""One plan: what it says of its end while it goes on."""

from flashrt_ros.planner_plan import Plan
from flashrt_ros.planner_plan import PlanRequest


def test_a_plan_that_is_asked_to_end_says_so_to_whoever_gets_its_result_first() -> None:
    plan = Plan(1, PlanRequest('go home'), lambda *_: None, lambda _: None, lambda _: None)
    plan.add('go home')
    plan.complete()
    assert plan.decoded.done() and plan.end_now().code == 'ok'
    assert plan.stop('cancelled', 'the client has cancelled the goal')
    assert plan.end_now().code == 'cancelled'
