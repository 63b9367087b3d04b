"""The conductor: what it refuses before a request leaves."""

from types import SimpleNamespace
from typing import Any

import pytest

from flashrt_core.errors import ParameterInvalid
from flashrt_ros.conductor import Conductor
from flashrt_ros.srv import Reset

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


def test_a_service_that_is_none_is_refused_with_those_there_are(conductor: Any) -> None:
    with pytest.raises(ParameterInvalid, match="'executor/rest'; there are executor/reset"):
        conductor.executor('rest')
