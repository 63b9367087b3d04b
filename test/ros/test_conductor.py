"""The conductor: what it refuses before a request leaves, and what it asks again."""

from types import SimpleNamespace
from typing import Any

import pytest

from flashrt_core.errors import ParameterInvalid
from flashrt_ros.conductor import Conductor
from flashrt_ros.conductor import Refused
from flashrt_ros.msg import Subgoal
from flashrt_ros.processes import ProcessGroup
from flashrt_ros.srv import Reset
from flashrt_ros.srv import ResetWorld
from flashrt_ros.srv import SetSubgoal

pytestmark = pytest.mark.ros


@pytest.fixture
def conductor() -> Any:
    """A conductor of one service that answers nothing."""
    made = Conductor.__new__(Conductor)
    made._clients = {'executor/reset': SimpleNamespace(srv_type=Reset)}
    made._executor_name = 'executor'
    return made


def test_a_field_that_the_request_does_not_have_is_refused_with_those_it_has(
        conductor: Any) -> None:
    with pytest.raises(ParameterInvalid, match=r'capsule is no field .*it has capsule_id, '):
        conductor.executor('reset', capsule='before_grasp')


@pytest.mark.parametrize(('fields', 'told'), [
    ({'seed': -3}, r"reset_world: The 'seed' field .* in \[0, 18446744073709551615\]; it is -3"),
    ({'seed': 3, 'blocks': 2**32}, "'blocks' field must be an unsigned .*; it is 4294967296"),
    ({'seed': '3'}, "'seed' field must be of type 'int'; it is '3'"),
    ({'task': None}, "'task' field must be of type 'str'; it is None"),
])
def test_a_value_that_a_field_cannot_hold_is_refused_by_name(
        conductor: Any, fields: dict[str, Any], told: str) -> None:
    conductor._clients['tabletop/reset_world'] = SimpleNamespace(srv_type=ResetWorld)
    with pytest.raises(ParameterInvalid, match=told):
        conductor.call('tabletop/reset_world', **fields)


def test_a_message_with_a_field_that_cannot_be_sent_is_refused(conductor: Any) -> None:
    def sent(_: Any) -> None:
        raise TypeError('bad argument type for built-in operation')

    conductor._clients['executor/set_subgoal'] = SimpleNamespace(
        srv_type=SetSubgoal, call_async=sent)
    with pytest.raises(ParameterInvalid, match=r"bad argument type.*; the request is {'subgoal'"):
        conductor.call('executor/set_subgoal', subgoal=Subgoal())


def test_a_service_that_is_none_is_refused_with_those_there_are(conductor: Any) -> None:
    with pytest.raises(ParameterInvalid, match="'executor/rest'; there are executor/reset"):
        conductor.executor('rest')


def test_an_observation_that_was_missed_is_shown_again_until_the_executor_has_it(
        conductor: Any) -> None:
    missed, shown = 6, []

    def step(verb: str, **fields: Any) -> str:
        if len(shown) < missed:
            raise Refused(verb, 'observation_missing', 'joint_states sent nothing')
        return 'answer'

    conductor.executor = step
    conductor.robot = lambda verb, **fields: shown.append((verb, fields))
    assert conductor.executor_on('step', 5) == 'answer'
    assert shown == [('step', {'steps': 0})] * missed


def test_an_observation_that_never_comes_ends_in_the_refusal(conductor: Any) -> None:
    def step(verb: str, **fields: Any) -> None:
        raise Refused(verb, 'observation_missing', 'joint_states sent nothing')

    conductor.executor, conductor.robot = step, lambda verb, **fields: None
    with pytest.raises(Refused, match='joint_states sent nothing'):
        conductor.executor_on('step', 5, patience_s=0.05)


def test_a_conductor_that_was_closed_has_left_the_domain(tmp_path: Any) -> None:
    with ProcessGroup(tmp_path) as group:
        with Conductor(group, namespace='demo', planner_name='planner') as first:
            assert first.strangers() == []
        with Conductor(group, namespace='demo', planner_name='planner') as second:
            second.wait_a_moment(1.0)  # as long as a discovery takes
            assert second.strangers() == []
            assert first.node is not second.node, 'the first one is still held, as by a story'
