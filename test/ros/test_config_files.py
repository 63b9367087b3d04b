"""Files below config/ and parameter files: found, or refused with what there is."""

from pathlib import Path

import pytest

from flashrt_core.errors import ConfigError
from flashrt_ros.config_files import config_path
from flashrt_ros.config_files import find_embodiment
from flashrt_ros.config_files import parameter_files_for_others


def test_a_missing_config_file_is_named_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r'no-such.*executor\.yaml'):
        config_path('no-such.yaml')


def test_an_embodiment_is_found_by_path_and_below_config(tmp_path: Path) -> None:
    own = tmp_path / 'own.yaml'
    own.write_text('')
    assert find_embodiment(str(own)) == own
    assert find_embodiment('embodiments/tabletop.yaml').is_file()


@pytest.mark.parametrize('name', ['', 'tabeltop.yaml', '/tmp', '/no/such.yaml', 'embodiments'])
def test_a_missing_embodiment_is_refused_with_the_parameter_and_those_shipped(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        find_embodiment(name)
    text = str(error.value)
    assert text.startswith(f'embodiment is {name!r}') and 'so101.yaml' in text
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
