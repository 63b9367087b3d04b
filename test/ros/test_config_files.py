"""Files below config/ and parameter files: found, or refused with what there is."""

import importlib
from pathlib import Path

import pytest

from flashrt_core.errors import ConfigError
from flashrt_ros.config_files import config_path
from flashrt_ros.config_files import find_embodiment
from flashrt_ros.config_files import parameter_files_for_others
from flashrt_ros.config_files import parameters_in_any_namespace


def test_a_missing_config_file_is_named_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r'no-such.*executor\.yaml'):
        config_path('no-such.yaml')


def test_an_embodiment_is_found_by_path_and_below_config(tmp_path: Path) -> None:
    own = tmp_path / 'own.yaml'
    own.write_text('')
    assert find_embodiment(str(own)) == own
    assert find_embodiment('embodiments/tabletop.yaml').is_file()


@pytest.mark.parametrize('name', ['', 'tabeltop.yaml', '/tmp', '/no/such.yaml', 'embodiments',
                                  '~nobody-here/robot.yaml', 'x' * 5000])
def test_a_missing_embodiment_is_refused_with_the_parameter_and_those_shipped(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        find_embodiment(name)
    text = str(error.value)
    assert text.startswith(f'embodiment is {name!r:.200}') and 'so101.yaml' in text
    assert name != 'tabeltop.yaml' or 'give a path, or embodiments/tabletop.yaml' in text


@pytest.mark.parametrize(('key', 'fits'), [
    ('/**/executor', True), ('/**', True), ('executor', False), ('/arm/executor', True),
    ('/*/executor', True), ('/**/executer', False), ('/executor', False), ('/**/arm', False)])
def test_a_parameter_file_without_a_section_for_the_node_is_told(
        tmp_path: Path, key: str, fits: bool) -> None:
    path = tmp_path / 'p.yaml'
    path.write_text(f'{key}:\n  ros__parameters:\n    a: 1\n')
    told = parameter_files_for_others(
        ['node', '--ros-args', '--params-file', str(path)], '/arm/executor')
    assert bool(told) is not fits
    assert fits or (key in told[0] and '/**/executor:' in told[0] and str(path) in told[0])


def test_a_nested_section_is_read_as_a_namespace(tmp_path: Path) -> None:
    path = tmp_path / 'p.yaml'
    path.write_text('arm:\n  executor:\n    ros__parameters: {a: 1}\n')
    assert not parameter_files_for_others(['--params-file', str(path)], '/arm/executor')


@pytest.mark.parametrize('namespace', ['', '__ns:=/arm1'])
def test_a_parameter_for_one_node_of_a_process_reaches_it_in_a_namespace_too(
        namespace: str) -> None:
    rclpy = pytest.importorskip('rclpy')
    argv = ['bringup', '--ros-args', '-p', 'executor:a:=5', '-p', 'planner:text.b:="five"', '-p',
            'other:a:=1', *(['-r', namespace] if namespace else [])]
    given = parameters_in_any_namespace(argv, 'executor', 'planner')
    assert given[:4] == ['bringup', '--ros-args', '-p', 'other:a:=1']
    assert given[-2] == '--params-file' and parameters_in_any_namespace(given, 'executor') == given
    context = importlib.import_module('rclpy.context').Context()
    rclpy.init(args=given, context=context)
    try:
        for name, wanted in (('executor', {'a': 5}), ('planner', {'text.b': 'five'}), ('x', {})):
            node = importlib.import_module('rclpy.node').Node(name, context=context)
            values = {key: p.value for key, p in node._parameter_overrides.items()}
            node.destroy_node()
            assert values == wanted, name
    finally:
        context.try_shutdown()
