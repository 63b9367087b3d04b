"""The planner's table of parameters, its YAML and its document."""

from pathlib import Path

import pytest
from rclpy.parameter import Parameter
import yaml

from flashrt_core.runtime import cpu_backend
from flashrt_core.runtime import MemoryInfo
from flashrt_ros import capsule_parameters
from flashrt_ros import planner_parameters

MIB, GIB = 1 << 20, 1 << 30


def test_the_document_is_made_from_the_table() -> None:
    assert planner_parameters.DOCUMENT.read_text() == planner_parameters.document(), (
        'run python -m flashrt_ros.planner_parameters')


def test_the_yaml_names_only_parameters_of_the_table() -> None:
    path = Path(planner_parameters.DOCUMENT).parent.parent / 'config' / 'planner.yaml'
    given = yaml.safe_load(path.read_text())['/**/planner']['ros__parameters']
    table = planner_parameters.planner_parameters()
    for name, value in given.items():
        table.specs[name].check(Parameter(name, value=value))


def test_numbers_have_a_range_and_times_their_unit_in_the_name() -> None:
    for spec in planner_parameters.SPECS:
        if isinstance(spec.default, float):
            assert spec.name.endswith('_s') or spec.name == 'temperature', spec.name
        if isinstance(spec.default, int | float) and not isinstance(spec.default, bool):
            assert spec.minimum is not None and spec.maximum is not None, spec.name


@pytest.mark.parametrize(('context', 'free', 'asked', 'expected'), [
    (16384, 80 * GIB, -1, 4 * 1236 * MIB),   # four of 27B's
    (16384, 12 * GIB, -1, 3 * GIB),          # a quarter of what is free
    (64, 80 * GIB, -1, GIB),                 # as much as ever where capsules are small
    (16384, 80 * GIB, 0, 0), (16384, 80 * GIB, 7 * MIB, 7 * MIB),
])
def test_the_budgets_follow_from_the_model_unless_they_are_given(
        monkeypatch: pytest.MonkeyPatch, context: int, free: int, asked: int,
        expected: int) -> None:
    backend = cpu_backend()
    monkeypatch.setattr(backend, 'memory', lambda: MemoryInfo(free, free, False))
    monkeypatch.setattr(capsule_parameters, 'host_memory', lambda: (free, free))
    values = {'capsule_gpu_bytes': asked, 'capsule_host_bytes': asked}
    memory = {'capsule_fixed': 154_900_000, 'capsule_per_token': 69_632}
    found = capsule_parameters.budgets_of(values, memory, context, backend)
    assert (found.gpu, found.host) == (expected, expected)
    if context == 16384:
        assert found.full == 1236 * MIB >= 154_900_000 + 16384 * 69_632
        assert f'{expected // found.full} in gpu memory' in found.text
    table = planner_parameters.planner_parameters()
    for name in values:
        assert table.specs[name].default == capsule_parameters.OF_MODEL
