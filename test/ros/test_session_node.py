"""Tests of flashrt_ros.session_node: how a configure goes on, ends midway, or is refused."""

from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from _ros_fixtures import ros_graph
import pytest

from flashrt_core.errors import ConfigError
from flashrt_core.errors import DeviceLost
from flashrt_ros.main import EXIT_DEVICE_LOST
from flashrt_ros.main import StopRequest
from flashrt_ros.planner_parameters import planner_parameters
from flashrt_ros.session_node import SessionNode

pytestmark = pytest.mark.ros
CONFIGURE, CLEANUP = 1, 2


class Toy(SessionNode):
    """Loads what a test says; notes each status that it publishes."""

    def __init__(self, load: Callable[['Toy'], str], stop: StopRequest, **kwargs: Any) -> None:
        self.told: list[tuple[str, float]] = []
        self.report, self.outputs = mock.Mock(), mock.Mock()
        self.outputs.publish_status = lambda: self.told.append((self.configuring, self.progress))
        self._load = load
        super().__init__('toy', stop, planner_parameters(), **kwargs)

    def load(self) -> str:
        return self._load(self)

    def teardown(self) -> None:
        self.free()


@contextmanager
def toy(load: Callable[[Toy], str]) -> Iterator[Toy]:
    with ros_graph() as graph:
        node = graph.spin(Toy(load, StopRequest(), context=graph.context))
        yield node
        node.finish(5.0)


def all_stages(node: Toy) -> str:
    for stage in ('load', 'bind', 'capture', 'warm up', 'reading context'):
        for fraction in (0.0, 0.001, 0.5, 1.0, 7.0):
            node._told(stage, fraction)
    node.engine, node._session = mock.Mock(), mock.Mock()
    return 'toy'


def test_the_progress_of_a_configure_only_grows_and_small_steps_are_not_told() -> None:
    with toy(all_stages) as node:
        assert node.transition(CONFIGURE) and node.configured and node.configuring == ''
        words = [told for told, _ in node.told if told]
        assert list(dict.fromkeys(words)) == [
            'loading', 'binding', 'capturing', 'warming up', 'reading context']
        shares = [share for _, share in node.told]
        assert shares == sorted(shares) and shares[-1] == 1.0 and len(words) < 20
        session = node._session
        assert node.transition(CLEANUP) and not node.configured
        assert session.close.called and node.progress == 0.0


def test_a_configure_that_is_refused_says_so_until_one_succeeds() -> None:
    wrong = [True]

    def load(node: Toy) -> str:
        if wrong:
            raise ConfigError('weights are not there; give a folder')
        return all_stages(node)

    with toy(load) as node:
        assert not node.transition(CONFIGURE)
        assert node.configuring == 'failed' and 'weights' in node.last_transition_error
        wrong.clear()
        assert node.transition(CONFIGURE) and node.configuring == ''


def test_a_configure_ends_at_its_next_word_when_the_node_ends(
        capfd: pytest.CaptureFixture[str]) -> None:
    def load(node: Toy) -> str:
        node.ending = True
        return all_stages(node)

    with toy(load) as node:
        node.autostart().join(20)
        assert 'given up' in node.last_transition_error
    told = ''.join(capfd.readouterr())
    assert 'the node is ending' in told and 'ERROR' not in told and 'ros2 ' not in told


def test_refusals_are_counted_by_code_and_a_lost_device_asks_for_the_end() -> None:
    with toy(all_stages) as node:
        node.count_refusal(ConfigError('x'))
        node.count_refusal(ValueError('x'))
        assert [call.args[0] for call in node.report.refused.call_args_list] == [
            'config_invalid', 'internal']
        node._device_lost(DeviceLost('gone'))
        assert node._stop_request.exit_code == EXIT_DEVICE_LOST
