"""Tests of flashrt_ros.session_report."""

from types import SimpleNamespace
from unittest import mock

from _ros_fixtures import ros_graph
import pytest

from flashrt_ros.diagnostics import ERROR
from flashrt_ros.diagnostics import OK
from flashrt_ros.session_report import SessionReport

pytestmark = pytest.mark.ros


def test_sections_come_in_order_and_a_poisoned_session_is_an_error_with_its_remedy() -> None:
    with ros_graph() as graph:
        node = graph.node('toy')
        node.state_label, node.phase, node.ready_after_s = 'active', 'ready', 1.5
        node.engine, node.store, node.last_transition_error = None, None, ''
        report = SessionReport(node, 'toy', '~/undo', work=lambda section: section.add('n', 3))
        sections = report.sections()
        assert list(sections) == ['state', 'work', 'capsules', 'refusals']
        assert sections['state'].level == OK and sections['state'].values == {
            'lifecycle': 'active', 'phase': 'ready', 'ready_after_s': '1.5'}
        report.refused('busy')
        report.refused('busy')
        assert report.sections()['refusals'].values == {'busy': '2'}
        node.engine = mock.Mock()
        node.engine.session.boundary = SimpleNamespace(poisoned='copy 3 failed')
        state = report.sections()['state']
        assert state.level == ERROR and 'copy 3 failed; ~/undo' in state.message


def test_a_qos_mismatch_is_counted_each_time_and_logged_once() -> None:
    with ros_graph() as graph:
        node = graph.node('toy')
        report = SessionReport(node, 'toy', '~/undo')
        with mock.patch.object(node, 'get_logger') as logger:
            for _ in range(2):
                report.qos_mismatch('images', 'reliability does not fit')
        assert logger.return_value.error.call_count == 1
        assert report.refusals['qos_incompatible'] == 2
