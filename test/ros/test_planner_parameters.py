"""The planner's table of parameters, its YAML and its document."""

from pathlib import Path

from rclpy.parameter import Parameter
import yaml

from flashrt_ros import planner_parameters


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
