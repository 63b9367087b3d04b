"""Diagnostics: levels, names after REP-107, percentiles, faults that stand until cleared."""

from collections.abc import Iterator
from pathlib import Path

from _executor_rig import rig
from _ros_fixtures import Graph
from _ros_fixtures import ros_graph
from _ros_fixtures import wait_until
from diagnostic_msgs.msg import DiagnosticArray
import pytest
from rclpy.node import Node

from flashrt_ros.diagnostics import Diagnostics
from flashrt_ros.diagnostics import ERROR
from flashrt_ros.diagnostics import FaultLog
from flashrt_ros.diagnostics import OK
from flashrt_ros.diagnostics import Section
from flashrt_ros.diagnostics import WARN
from flashrt_ros.statistics import Ring

pytestmark = pytest.mark.ros


@pytest.fixture
def graph() -> Iterator[Graph]:
    with ros_graph() as made:
        yield made


def test_the_worst_level_and_its_first_sentence_stand() -> None:
    section = Section()
    section.worsen(WARN, 'a little')
    section.worsen(ERROR, 'a lot')
    section.worsen(ERROR, 'more')
    section.worsen(WARN, 'later')
    assert (section.level, section.message) == (ERROR, 'a lot')


def test_stages_show_p50_and_p99_once_measured() -> None:
    ring, section = Ring(), Section()
    for value in range(1, 101):
        ring.record(float(value))
    section.add_stages({'tick': ring.summary(), 'never': Ring().summary()})
    assert section.values == {'tick_p50_us': '50', 'tick_p99_us': '99'}


def test_a_fault_is_new_once_and_stands_until_cleared() -> None:
    log, section = FaultLog(), Section()
    assert log.set('camera', WARN, 'dark') and not log.set('camera', WARN, 'dark')
    assert log.set('camera', ERROR, 'gone')
    log.fill(section)
    assert (section.level, section.values) == (ERROR, {'camera': 'gone'})
    assert log.clear('camera') and not log.clear('camera')


def test_status_names_carry_namespace_node_and_component(graph: Graph) -> None:
    node = Node('arm', namespace='left', context=graph.context)
    diagnostics = Diagnostics(node, 'rig', period_s=0.02)

    def broken(section: Section) -> None:
        raise RuntimeError('cannot look')

    diagnostics.add('good', lambda section: section.add('count', 3))
    diagnostics.add('bad', broken)
    received: list[DiagnosticArray] = []
    graph.node('listener').create_subscription(
        DiagnosticArray, '/diagnostics', received.append, 10)
    graph.spin(node)
    wait_until(lambda: received, 'a report')
    good, bad = received[-1].status
    assert (good.name, good.level, good.values[0].value) == ('left.arm: good', OK, '3')
    assert bad.level == ERROR and 'cannot look' in bad.message and bad.hardware_id == 'rig'


def test_the_executor_reports_every_component_at_least_once_a_second(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        received: list[DiagnosticArray] = []
        r.probe.create_subscription(DiagnosticArray, '/diagnostics', received.append, 10)
        r.run()
        wait_until(lambda: len(r.chunks) > 5, 'ticks')
        wait_until(lambda: any(
            value.key == 'inference_p99_us' for message in received for status in message.status
            for value in status.values), 'the percentiles')
        by_name = {status.name: status for status in received[-1].status}
        assert set(by_name) == {f'executor: {part}' for part in (
            'state', 'ticks', 'steps', 'observations', 'capsules', 'refusals')}
        ticks = {v.key: v.value for v in by_name['executor: ticks'].values}
        assert {'collect_p50_us', 'tick_p99_us', 'segment think_p50_us'} <= set(ticks)
        assert int(ticks['ticks']) > 0
        steps = {v.key: v.value for v in by_name['executor: steps'].values}
        assert int(steps['steps']) > 0 and 'realtime_reason' in steps
        capsules = {v.key: v.value for v in by_name['executor: capsules'].values}
        assert int(capsules['gpu capsules']) == 1
