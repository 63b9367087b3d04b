"""The parameter table: declared, checked, refused with thing, value and remedy, documented."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _ros_fixtures import Graph
from _ros_fixtures import ros_graph
import pytest
from rcl_interfaces.srv import SetParameters
from rclpy.node import Node
from rclpy.parameter import Parameter
import yaml

from flashrt_core.errors import ConfigError
from flashrt_core.errors import ParameterInvalid
from flashrt_ros import executor_parameters
from flashrt_ros.parameters import ParameterSpec
from flashrt_ros.parameters import ParameterTable

pytestmark = pytest.mark.ros
SPECS = (
    ParameterSpec('gain_ratio', 0.5, 'how much', 0.0, 1.0),
    ParameterSpec('count_steps', 3, 'how many', 1, 9),
    ParameterSpec('mode', 'soft', 'how', choices=('soft', 'hard')),
    ParameterSpec('device', 'cpu', 'where', read_only=True),
    ParameterSpec('open', False, 'whether'),
)


@pytest.fixture
def graph() -> Iterator[Graph]:
    with ros_graph() as made:
        yield made


def declared(graph: Graph, **given: Any) -> tuple[Node, ParameterTable]:
    node = Node('n', context=graph.context,
                parameter_overrides=[Parameter(k, value=v) for k, v in given.items()])
    table = ParameterTable(SPECS)
    table.declare(node)
    return node, table


def test_values_come_from_the_start_and_follow_changes(graph: Graph) -> None:
    node, table = declared(graph, gain_ratio=0.25)
    changes: list[tuple[str, Any, Any]] = []
    table.on_change(lambda *change: changes.append(change))
    assert (table['gain_ratio'], table['mode']) == (0.25, 'soft')
    assert node.set_parameters_atomically([Parameter('mode', value='hard')]).successful
    assert table['mode'] == 'hard' and changes == [('mode', 'soft', 'hard')]


@pytest.mark.parametrize('name, words', [
    ('count_step', 'write count_steps'), ('zebra', 'ros2 param list')])
def test_an_unknown_parameter_is_refused_at_start_and_at_run_time_with_what_was_meant(
        graph: Graph, name: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        declared(graph, **{name: 4})
    assert all(part in str(error.value) for part in (f'parameter {name} ', '4', words))
    node, table = declared(graph)
    refused: list[ParameterInvalid] = []
    table.on_refusal(refused.append)
    result = node.set_parameters([Parameter(name, value=4), Parameter('count_steps', value=4)])
    assert [r.successful for r in result] == [False, True]
    assert f'parameter {name} ' in result[0].reason and words in result[0].reason
    assert len(refused) == 1 and table['count_steps'] == 4


def test_what_ros_itself_refuses_is_counted_and_named_too(graph: Graph) -> None:
    node, table = declared(graph)
    refused: list[ParameterInvalid] = []
    table.on_refusal(refused.append)
    result = node.set_parameters([Parameter('use_sim_time', value=3)])
    assert not result[0].successful and 'use_sim_time' in result[0].reason and refused


def test_a_wrong_quality_of_service_override_is_refused_at_start(graph: Graph) -> None:
    with pytest.raises(ConfigError, match='depth is -1; give 1 to'):
        declared(graph, **{'qos_overrides./a.subscription.depth': -1})


@pytest.mark.parametrize('name, value, words', [
    ('gain_ratio', 1.5, 'gain_ratio is 1.5; give a value in 0 .. 1'),
    ('gain_ratio', 1, 'of type INTEGER; give a DOUBLE (write 1.0)'),
    ('gain_ratio', float('nan'), 'give a finite number'),
    ('count_steps', 0, 'count_steps is 0; give a value in 1 .. 9'),
    ('count_steps', 'two', "is 'two' of type STRING; give an INTEGER"),
    ('mode', 'loud', "mode is 'loud'; give one of soft, hard"),
    ('device', 'cuda', 'device is read-only'),
    ('open', 1, 'of type INTEGER; give a BOOL'),
])
def test_a_refused_change_names_thing_value_and_remedy(
        graph: Graph, name: str, value: Any, words: str) -> None:
    node, table = declared(graph)
    refused: list[ParameterInvalid] = []
    table.on_refusal(refused.append)
    before = table[name]
    result = node.set_parameters_atomically([Parameter(name, value=value)])
    assert not result.successful and words in result.reason
    assert result.reason.startswith('[parameter_invalid]') and len(refused) == 1
    assert table[name] == before == node.get_parameter(name).value


def test_a_refused_value_keeps_the_whole_set_back(graph: Graph) -> None:
    node, table = declared(graph)
    result = node.set_parameters_atomically(
        [Parameter('mode', value='hard'), Parameter('count_steps', value=99)])
    assert not result.successful and table['mode'] == 'soft'


def test_the_service_goes_through_the_same_check(graph: Graph) -> None:
    node, _ = declared(graph)
    graph.spin(node)
    call = graph.client(graph.node('asker'), SetParameters, 'n/set_parameters')
    reply = call(parameters=[Parameter('mode', value='loud').to_parameter_msg()])
    assert 'give one of soft, hard' in reply.results[0].reason


@pytest.mark.parametrize('given, words', [
    ({'gain_ratio': 2.0}, 'gain_ratio is 2'), ({'count_steps': 1.0}, 'give an INTEGER'),
    ({'mode': 'loud'}, 'soft, hard')])
def test_a_bad_value_at_the_start_is_a_config_error(
        graph: Graph, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        declared(graph, **given)


def test_checks_across_parameters_see_the_values_as_they_would_be(graph: Graph) -> None:
    node, table = declared(graph)

    def check(values: Any) -> None:
        if values['mode'] == 'hard' and values['gain_ratio'] > 0.1:
            raise ParameterInvalid('gain_ratio is too much for mode hard; lower it first')

    table.add_check(check)
    assert not node.set_parameters_atomically([Parameter('mode', value='hard')]).successful
    assert node.set_parameters_atomically(
        [Parameter('mode', value='hard'), Parameter('gain_ratio', value=0.1)]).successful


def test_descriptors_tell_range_choices_and_read_only(graph: Graph) -> None:
    node, _ = declared(graph)
    gain = node.describe_parameter('gain_ratio')
    assert gain.description == 'how much' and gain.floating_point_range[0].to_value == 1.0
    assert node.describe_parameter('count_steps').integer_range[0].from_value == 1
    assert 'soft' in node.describe_parameter('mode').additional_constraints
    assert node.describe_parameter('device').read_only


def test_the_document_of_the_executor_is_made_from_its_table() -> None:
    assert executor_parameters.DOCUMENT.read_text() == executor_parameters.document(), (
        'run python -m flashrt_ros.executor_parameters')


def test_the_yaml_of_the_executor_names_only_its_parameters() -> None:
    path = Path(executor_parameters.DOCUMENT).parent.parent / 'config' / 'executor.yaml'
    given = yaml.safe_load(path.read_text())['/**/executor']['ros__parameters']
    table = executor_parameters.executor_parameters()
    for name, value in given.items():
        table.specs[name].check(Parameter(name, value=value))


def test_every_time_and_size_of_the_executor_has_its_unit_in_the_name() -> None:
    for spec in executor_parameters.SPECS:
        if isinstance(spec.default, float) and spec.name != 'guidance':  # a plain factor
            assert spec.name.endswith(('_s', '_ratio')), spec.name
        if isinstance(spec.default, int | float) and not isinstance(spec.default, bool):
            assert spec.minimum is not None and spec.maximum is not None, spec.name
