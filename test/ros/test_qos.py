"""QoS profiles, overrides by parameter, mismatches as diagnostics, the shared-memory profile."""

from collections.abc import Iterator
import os
from pathlib import Path
import xml.etree.ElementTree as ET

from _executor_rig import rig
from _ros_fixtures import Graph
from _ros_fixtures import ros_graph
from _ros_fixtures import wait_until
import pytest
from rclpy.node import Node
from rclpy.parameter import Parameter
from rclpy.qos import DurabilityPolicy
from rclpy.qos import QoSProfile
from rclpy.qos import ReliabilityPolicy
from std_msgs.msg import String

from flashrt_core.errors import ConfigError
from flashrt_ros import qos
from flashrt_ros.msg import Heartbeat

pytestmark = pytest.mark.ros


@pytest.fixture
def graph() -> Iterator[Graph]:
    with ros_graph() as made:
        yield made


def test_profiles_follow_rep_2003() -> None:
    assert qos.sensor().reliability == ReliabilityPolicy.BEST_EFFORT
    assert (qos.command().reliability, qos.command().depth) == (ReliabilityPolicy.RELIABLE, 1)
    assert qos.status().durability == DurabilityPolicy.TRANSIENT_LOCAL
    assert qos.heartbeat(0.5).deadline.nanoseconds == 500_000_000


def test_a_best_effort_publisher_reaches_a_sensor_subscription(graph: Graph) -> None:
    received: list[String] = []
    graph.node('listener').create_subscription(String, 'x', received.append, qos.sensor())
    publisher = graph.node('talker').create_publisher(String, 'x', QoSProfile(
        depth=1, reliability=ReliabilityPolicy.BEST_EFFORT))
    wait_until(lambda: publisher.publish(String(data='hi')) or received, 'the message')


def test_a_mismatch_is_reported_on_both_sides_with_topic_policy_and_remedy(graph: Graph) -> None:
    reports: list[tuple[str, str]] = []

    def report(topic: str, sentence: str) -> None:
        reports.append((topic, sentence))

    graph.node('listener').create_subscription(
        String, 'x', lambda m: None, QoSProfile(depth=1, reliability=ReliabilityPolicy.RELIABLE),
        event_callbacks=qos.subscription_events('/x', report))
    graph.node('talker').create_publisher(
        String, 'x', QoSProfile(depth=1, reliability=ReliabilityPolicy.BEST_EFFORT),
        event_callbacks=qos.publisher_events('/x', report))
    wait_until(lambda: len(reports) >= 2, 'both reports')
    texts = ' '.join(sentence for _, sentence in reports)
    assert 'qos_overrides./x.subscription.reliability' in texts
    assert 'qos_overrides./x.publisher.reliability' in texts


def test_a_parameter_overrides_the_profile(graph: Graph) -> None:
    node = Node('n', context=graph.context, parameter_overrides=[
        Parameter('qos_overrides./x.publisher.depth', value=7)])
    publisher = node.create_publisher(
        String, 'x', qos.command(), qos_overriding_options=qos.overridable())
    assert publisher.qos_profile.depth == 7


def test_the_executor_turns_a_mismatch_into_a_diagnostic(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        r.probe.create_subscription(Heartbeat, f'{r.prefix}/heartbeat', lambda m: None, QoSProfile(
            depth=1, reliability=ReliabilityPolicy.RELIABLE))
        wait_until(lambda: r.refusals('qos_incompatible') > 0, 'the counter')
        section = r.executor.report.sections()['observations']
        assert 'disagree on reliability' in section.values['qos /executor/heartbeat']


def test_the_shared_memory_profile_is_used_unless_the_user_has_one(
        monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in qos._PROFILES_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.delenv('RMW_IMPLEMENTATION', raising=False)
    path = qos.use_large_message_profile()
    assert path is not None and os.environ['FASTRTPS_DEFAULT_PROFILES_FILE'] == str(path)
    texts = [element.text for element in ET.parse(path).iter() if element.text]
    assert '16777216' in texts and '4194304' in texts
    monkeypatch.setenv('FASTRTPS_DEFAULT_PROFILES_FILE', '/mine.xml')
    assert qos.use_large_message_profile() == Path('/mine.xml')
    monkeypatch.setenv('RMW_IMPLEMENTATION', 'rmw_cyclonedds_cpp')
    assert qos.use_large_message_profile() is None


@pytest.mark.parametrize(('name', 'value', 'words'), [
    ('qos_overrides./a.subscription.depth', -1, '1 to 10000'),
    ('qos_overrides./a.subscription.depth', True, '1 to 10000'),
    ('qos_overrides./a.subscription.reliability', 'relible', 'best_effort'),
    ('qos_overrides./a.subscription.history', 3, 'keep_last'),
    ('qos_overrides./a.subscriber.depth', 1, 'publisher|subscription'),
    ('qos_overrides.a.subscription.depth', 1, 'full topic'),
    ('qos_overrides./a.subscription.deadline', 1, 'reliability'),
])
def test_a_wrong_override_is_refused_with_its_name_value_and_what_can_be_given(
        name: str, value: object, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        qos.check_override(name, value)
    assert all(part in str(error.value) for part in (name, repr(value), words))


def test_a_right_override_passes() -> None:
    qos.check_override('qos_overrides./arm1/joint_states.subscription.depth', 5)
    qos.check_override('qos_overrides./images/top.publisher.reliability', 'best_effort')


def test_the_remedy_of_a_mismatch_names_only_what_can_be_overridden() -> None:
    from rclpy.qos import QoSPolicyKind
    durable = qos.incompatible_text('/a', QoSPolicyKind.DURABILITY, 'publisher')
    reliable = qos.incompatible_text('/a', QoSPolicyKind.RELIABILITY, 'publisher')
    assert 'change the peer' in durable and 'qos_overrides' not in durable
    assert 'qos_overrides./a.publisher.reliability' in reliable
