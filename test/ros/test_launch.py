"""Launch files: built where launch is installed, their tables checked everywhere."""

import ast
import importlib.util
from pathlib import Path
import re
import sys
from types import SimpleNamespace

import pytest

from flashrt_core.errors import ConfigError
from flashrt_ros import launch_arguments

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / 'launch').glob('*.launch.py'))
ACTIONS = (ROOT / 'flashrt_ros/launch_actions.py').read_text()
CONFIGURATION = re.compile(r"LaunchConfiguration\('(\w+)'\)")


def _value(path: Path, name: str):
    """Value of a constant of a launch file, evaluated without importing ``launch``."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], 'id', '') == name:
            return eval(compile(ast.Expression(node.value), str(path), 'eval'),
                        dict(vars(launch_arguments)))
    return ()


def _parameters(path: Path) -> dict:
    """Parameters that a launch file gives, by node."""
    given = _value(path, 'PARAMETERS')
    return given if isinstance(given, dict) else {path.name.split('.')[0]: given}


def _load(path: Path):
    pytest.importorskip('launch')
    pytest.importorskip('launch_ros')
    spec = importlib.util.spec_from_file_location(path.name.replace('.', '_'), path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.generate_launch_description()


@pytest.mark.parametrize('path', FILES, ids=lambda p: p.name)
def test_every_argument_has_a_description_and_a_default_among_its_choices(path):
    arguments = _value(path, 'ARGUMENTS')
    assert arguments
    assert len({argument[0] for argument in arguments}) == len(arguments)
    for name, default, text, choices in arguments:
        assert len(text) > 5, name
        assert choices is None or default in choices, name


@pytest.mark.parametrize('path', FILES, ids=lambda p: p.name)
def test_every_argument_is_used_and_every_used_one_is_declared(path):
    text = path.read_text()
    names = {argument[0] for argument in _value(path, 'ARGUMENTS')}
    used = set(CONFIGURATION.findall(text))
    used |= set(CONFIGURATION.findall(ACTIONS)) if 'process(' in text else set()
    assert names == used | {name for listed in _parameters(path).values() for name in listed}


def test_the_executables_exist_in_setup_cfg():
    scripts = (ROOT / 'setup.cfg').read_text()
    for path in FILES:
        text = path.read_text()
        named = re.findall(r"(?:executable=|process\()'(\w+)'", text)
        named += list(_parameters(path)) if 'process(name' in text else []
        assert named, path.name
        for executable in named:
            assert re.search(rf'^\s*{executable} = flashrt_ros\.', scripts, re.M), executable


def test_the_parameters_given_by_launch_are_those_of_the_nodes():
    pytest.importorskip('rclpy')
    from flashrt_ros.executor_parameters import SPECS as executor_specs
    from flashrt_ros.planner_parameters import SPECS as planner_specs
    from flashrt_ros.tabletop_parameters import SPECS as tabletop_specs

    known = {node: {spec.name: spec for spec in specs} for node, specs in (
        ('executor', executor_specs), ('planner', planner_specs), ('tabletop', tabletop_specs))}
    known['policy'] = known['executor']
    truths = 0
    for path in FILES:
        types = {name: choices for name, _, _, choices in _value(path, 'ARGUMENTS')}
        for node, names in _parameters(path).items():
            assert set(names) <= {*known.get(node, {}), 'use_sim_time'}, (path.name, node)
            for name in set(names) & set(known.get(node, {})):
                truth = isinstance(known[node][name].default, bool)
                assert truth == (types[name] == launch_arguments.TRUTH), (path.name, name)
                truths += truth
    assert truths


def test_the_shared_arguments_default_to_what_the_parameters_default_to():
    pytest.importorskip('rclpy')
    from flashrt_ros.executor_parameters import SPECS as executor_specs
    from flashrt_ros.planner_parameters import SPECS as planner_specs

    for arguments, specs in ((launch_arguments.POLICY, executor_specs),
                             (launch_arguments.PLANNER, planner_specs)):
        defaults = {spec.name: spec.default for spec in specs}
        assert {a[0]: a[1] for a in arguments} == {a[0]: defaults[a[0]] for a in arguments}


def test_parameter_files_are_keyed_so_that_a_namespace_does_not_hide_them():
    for path in (ROOT / 'config').glob('*.yaml'):
        text = path.read_text()
        if 'ros__parameters' not in text:
            continue
        keys = re.findall(r'^(\S+):', text, re.M)
        assert keys, path.name
        assert all(re.fullmatch(r'/\*\*/\w+', key) for key in keys), path.name


@pytest.mark.parametrize(('given', 'remedy'), [
    ('nmespace:=arm1', 'did you mean namespace?'), ('colour:=red', '--show-args'),
    ('Namespace:=arm1', 'did you mean namespace?'), (':=arm1', 'it takes namespace, seed')])
def test_an_argument_that_a_launch_file_does_not_declare_is_refused_with_the_nearest_one(
        given, remedy):
    line = ['/opt/bin/ros2', 'launch', 'flashrt_ros', 'tabletop.launch.py', 'seed:=1', given]
    refusal = launch_arguments.refusal_of_unknown
    text = refusal('tabletop.launch.py', ['namespace', 'seed'], line[4:], line)
    assert remedy in text and given.partition(':=')[0] in text and 'seed' in text
    assert not refusal('tabletop.launch.py', ['namespace', 'seed'], ['seed:=a:=b'], line)
    line[3] = 'two_robots.launch.py'
    assert not refusal('tabletop.launch.py', ['seed'], line[4:], line), (
        'included, and the arguments are those of the file that does so')


@pytest.mark.parametrize('path', FILES, ids=lambda p: p.name)
def test_a_mistyped_argument_ends_the_launch_before_anything_is_started(path, monkeypatch):
    description = _load(path)
    from launch import LaunchContext
    argument = _value(path, 'ARGUMENTS')[0][0]
    monkeypatch.setattr(sys, 'argv', ['ros2', 'launch', str(path), f'{argument}s:=1'])
    with pytest.raises(ConfigError, match=f'did you mean {argument}'):
        description.entities[0].visit(LaunchContext(argv=[f'{argument}s:=1']))
    assert not description.entities[0].visit(LaunchContext(argv=[f'{argument}:=1']))


def test_a_process_that_has_refused_its_parameters_is_not_started_again():
    pytest.importorskip('launch')
    pytest.importorskip('launch_ros')
    from flashrt_ros.launch_actions import process
    from flashrt_ros.launch_actions import unless_refused
    one, other = process('executor'), process('planner')
    (stop,) = unless_refused(SimpleNamespace(returncode=2, action=one), None)
    assert type(stop.event).__name__ == 'ShutdownProcess'
    assert stop.event.process_matcher(one) and not stop.event.process_matcher(other)
    for code in (0, 1, 75, -9):  # ended, a bug, a lost device, killed
        assert unless_refused(SimpleNamespace(returncode=code, action=one), None) is None


@pytest.mark.parametrize('path', FILES, ids=lambda p: p.name)
def test_the_launch_description_builds_with_its_arguments(path):
    description = _load(path)
    declared = {argument.name: argument for argument in description.get_launch_arguments()}
    for name, default, text, choices in _value(path, 'ARGUMENTS'):
        argument = declared[name]
        assert argument.description.startswith(text), name
        assert argument.choices is None or tuple(argument.choices) == choices, name
        assert (argument.default_value is None) == (default is None), name
