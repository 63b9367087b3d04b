"""Launch files: built where launch is installed, their tables checked everywhere."""

import ast
import importlib.util
from pathlib import Path
import re

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / 'launch').glob('*.launch.py'))


def _constant(path: Path, name: str):
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], 'id', '') == name:
            if isinstance(node.value, ast.Dict):
                return tuple(ast.literal_eval(key) for key in node.value.keys)
            return ast.literal_eval(node.value)
    return ()


def _mapping(path: Path, name: str) -> dict:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], 'id', '') == name:
            return ast.literal_eval(node.value)
    return {}


def _load(path: Path):
    pytest.importorskip('launch')
    pytest.importorskip('launch_ros')
    spec = importlib.util.spec_from_file_location(path.name.replace('.', '_'), path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.generate_launch_description()


@pytest.mark.parametrize('path', FILES, ids=lambda p: p.name)
def test_every_argument_has_a_description_and_a_default_among_its_choices(path):
    arguments = _constant(path, 'ARGUMENTS')
    assert arguments
    for name, default, text, choices in arguments:
        assert len(text) > 5, name
        assert choices is None or default in choices, name


@pytest.mark.parametrize('path', FILES, ids=lambda p: p.name)
def test_every_argument_is_used_and_every_used_one_is_declared(path):
    text = path.read_text()
    names = {argument[0] for argument in _constant(path, 'ARGUMENTS')}
    named = set(re.findall(r"LaunchConfiguration\('(\w+)'\)", text))
    named = {name for name in named if not name.endswith('params_file')}
    listed = set(_constant(path, 'PARAMETERS')) | set(_constant(path, 'TYPED'))
    assert named <= names
    assert names == named | (listed & names)


def test_the_executables_exist_in_setup_cfg():
    scripts = (ROOT / 'setup.cfg').read_text()
    for path in FILES:
        for executable in re.findall(r"executable='(\w+)'", path.read_text()):
            assert re.search(rf'^\s*{executable} = flashrt_ros\.', scripts, re.M), executable


def test_the_parameters_given_by_launch_are_those_of_the_nodes():
    pytest.importorskip('rclpy')
    from flashrt_ros.executor_parameters import SPECS as executor_specs
    from flashrt_ros.planner_parameters import SPECS as planner_specs
    from flashrt_ros.tabletop_parameters import SPECS as tabletop_specs

    executor = {spec.name for spec in executor_specs} | {'use_sim_time'}
    assert set(_constant(ROOT / 'launch/executor.launch.py', 'PARAMETERS')) <= executor
    tabletop = {spec.name for spec in tabletop_specs}
    assert set(_constant(ROOT / 'launch/tabletop.launch.py', 'PARAMETERS')) <= tabletop
    planner = {spec.name for spec in planner_specs}
    for name in ('bringup', 'two_process'):
        path = ROOT / f'launch/{name}.launch.py'
        for parameter, node in _mapping(path, 'PARAMETERS').items():
            assert parameter in {'executor': executor, 'planner': planner}[node], parameter


def test_parameter_files_are_keyed_so_that_a_namespace_does_not_hide_them():
    for path in (ROOT / 'config').glob('*.yaml'):
        text = path.read_text()
        if 'ros__parameters' not in text:
            continue
        keys = re.findall(r'^(\S+):', text, re.M)
        assert keys, path.name
        assert all(re.fullmatch(r'/\*\*/\w+', key) for key in keys), path.name


@pytest.mark.parametrize('path', FILES, ids=lambda p: p.name)
def test_the_launch_description_builds_with_its_arguments(path):
    description = _load(path)
    declared = {argument.name for argument in description.get_launch_arguments()}
    assert {argument[0] for argument in _constant(path, 'ARGUMENTS')} <= declared
