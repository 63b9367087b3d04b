"""Tests of flashrt_ros.embodiment."""

import copy
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest
import yaml

from flashrt_core.errors import ActionError
from flashrt_core.errors import BadJoints
from flashrt_core.errors import ConfigError
from flashrt_ros.embodiment import load_embodiment
from flashrt_ros.embodiment import parse_embodiment

EXAMPLES = sorted((Path(__file__).parents[2] / 'config' / 'embodiments').glob('*.yaml'))

GOOD = {
    'format': 1,
    'name': 'arm',
    'control_rate_hz': 50.0,
    'actions': 'absolute',
    'pose_gap': 0.3,
    'joints': [
        {'name': 'a', 'unit': 'rad', 'sign': -1, 'offset': 0.5, 'scale': 2.0,
         'position': {'min': -1.0, 'max': 1.0}, 'max_velocity': 2.0},
        {'name': 'b', 'unit': 'm', 'position': {'min': 0.0, 'max': 0.5}, 'max_velocity': 1.0,
         'max_step': 0.01, 'pose_gap': 0.1},
        {'name': 'gripper', 'unit': 'm', 'gripper': {'closed': 0.0, 'open': 0.08},
         'position': {'min': 0.0, 'max': 0.08}, 'max_velocity': 0.4, 'action': 'absolute'},
    ],
    'views': {'top': 'overhead', 'wrist': 'wrist'},
}


def parse(document):
    return parse_embodiment(yaml.safe_dump(document), source='arm.yaml')


def changed(path, value):
    """Return GOOD with one key set, or removed when the value is None."""
    document = copy.deepcopy(GOOD)
    at = document
    for key in path[:-1]:
        at = at[key]
    if value is None:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return document


def test_a_good_file_is_read_in_the_order_of_its_joints():
    robot = parse(GOOD)
    assert robot.names == ('a', 'b', 'gripper')
    assert robot.views == {'top': 'overhead', 'wrist': 'wrist'}
    assert robot.step_period_s == 0.02
    assert robot.max_step.tolist() == pytest.approx([0.04, 0.01, 0.008])
    assert robot.pose_gap.tolist() == [0.3, 0.1, 0.3]
    assert not robot.ignore_unknown_joints and not robot.needs_observed


def test_max_step_never_exceeds_what_the_velocity_allows():
    robot = parse(changed(('joints', 0, 'max_step'), 5.0))
    assert robot.max_step[0] == pytest.approx(0.04)


def test_units_signs_and_offsets_turn_into_the_policys_frame():
    robot = parse(GOOD)
    assert robot.to_policy(np.array([1.0, 0.2, 0.08])).tolist() == pytest.approx([-1.0, 0.2, 1.0])
    assert robot.to_policy(np.array([0.5, 0.0, 0.0])).tolist() == [0.0, 0.0, 0.0]


def test_a_gripper_that_opens_downwards_still_is_one_when_open():
    robot = parse(changed(('joints', 2, 'gripper'), {'closed': 0.08, 'open': 0.0}))
    assert robot.to_policy(np.array([0.0, 0.0, 0.0]))[2] == pytest.approx(1.0)
    assert robot.to_policy(np.array([0.0, 0.0, 0.08]))[2] == pytest.approx(0.0)


_number = st.floats(-100, 100)


@given(
    st.lists(st.tuples(_number, _number, _number), min_size=1, max_size=5),
    st.sampled_from([-1, 1]), _number, st.floats(1e-3, 1e3), st.booleans())
def test_to_robot_undoes_to_policy(rows, sign, offset, scale, relative):
    document = changed(('joints', 0), dict(
        GOOD['joints'][0], sign=sign, offset=offset, scale=scale,
        action='relative' if relative else 'absolute'))
    robot = parse(document)
    joints = np.array(rows)
    observed = joints[0]
    actions = robot.to_policy(joints)
    if relative:
        actions[:, 0] -= robot.to_policy(observed)[0]
    back = robot.to_robot(actions, observed)
    size = 1.0 + np.abs(joints).max() + abs(offset)
    np.testing.assert_allclose(back, joints, rtol=0, atol=4e-15 * size * 4)


def test_relative_actions_are_added_to_the_observed_state():
    robot = parse(changed(('actions',), 'relative'))
    observed = np.array([0.0, 0.1, 0.04])
    moved = robot.to_robot(np.array([[0.0, 0.0, 1.0], [0.2, 0.05, 0.25]]), observed)
    assert moved[0].tolist() == pytest.approx([0.0, 0.1, 0.08])  # the gripper stays absolute
    assert moved[1].tolist() == pytest.approx([-0.1, 0.15, 0.02])
    with pytest.raises(ActionError, match='give observed'):
        robot.to_robot(np.zeros((1, 3)))


def test_the_models_padding_is_left_out_of_actions_and_zero_in_the_state():
    robot = parse(GOOD)
    padded = np.zeros((4, 32), dtype=np.float32)
    assert robot.to_robot(padded).shape == (4, 3)
    state = np.full(8, 9.0, dtype=np.float32)
    robot.fill_state(np.array([0.5, 0.2, 0.08]), state)
    assert state.tolist() == pytest.approx([0.0, 0.2, 1.0, 0, 0, 0, 0, 0])


def test_sizes_that_do_not_fit_are_refused():
    robot = parse(GOOD)
    with pytest.raises(ActionError, match='2 columns'):
        robot.to_robot(np.zeros((4, 2)))
    with pytest.raises(BadJoints):
        robot.fill_state(np.zeros(2), np.zeros(8, dtype=np.float32))
    with pytest.raises(BadJoints):
        robot.fill_state(np.zeros(3), np.zeros(2, dtype=np.float32))
    with pytest.raises(ConfigError, match='the action of the policy has 2'):
        robot.check_dims(8, 2)
    robot.check_dims(3, 3)


def test_a_view_that_the_policy_does_not_have_is_refused_at_configure():
    robot = parse(GOOD)
    robot.check_views(('top', 'wrist', 'left'))
    with pytest.raises(ConfigError, match=r'views\.wrist is not a view'):
        robot.check_views(('top',))


MISTAKES = [
    (('format',), 2, 'format is 2; this version reads format 1'),
    (('format',), None, 'format is missing'),
    (('name',), 7, 'name is 7; give a text'),
    (('control_rate_hz',), 0, 'control_rate_hz is 0; give at least 0.1'),
    (('control_rate_hz',), '50', "control_rate_hz is '50'; give a finite number"),
    (('control_rate_hz',), float('nan'), 'control_rate_hz is nan'),
    (('control_rate_hz',), True, 'control_rate_hz is True'),
    (('actions',), 'delta', "actions is 'delta'; give one of absolute, relative, displacement"),
    (('unknown_joints',), 'drop', 'unknown_joints'),
    (('speed',), 1, 'speed is 1; no such key'),
    (('joints',), [], 'joints is []'),
    (('joints',), {'a': 1}, 'give a list'),
    (('joints', 1), 'b', "joints[1] is 'b'; give a mapping"),
    (('joints', 1, 'name'), 'a', "joints[1].name is 'a' for the second time"),
    (('joints', 1, 'name'), 'b b', 'joints[1].name'),
    (('joints', 1, 'unit'), 'deg', "joints[1].unit is 'deg'; give one of rad, m, ratio"),
    (('joints', 0, 'sign'), 2, 'joints[0].sign is 2; give 1 or -1'),
    (('joints', 0, 'sign'), 1.0, 'joints[0].sign is 1.0; give a whole number'),
    (('joints', 0, 'scale'), 0.0, 'joints[0].scale is 0.0; give more than 0'),
    (('joints', 0, 'offset'), float('inf'), 'joints[0].offset is inf'),
    (('joints', 0, 'position'), None, 'joints[0].position is missing'),
    (('joints', 0, 'position', 'min'), 1.0, 'joints[0].position.min is 1.0; it must lie below'),
    (('joints', 0, 'position', 'mid'), 1.0, 'joints[0].position.mid is 1.0; no such key'),
    (('joints', 0, 'max_velocity'), -1.0, 'joints[0].max_velocity is -1.0; give more than 0'),
    (('joints', 0, 'max_velocity'), None, 'joints[0].max_velocity is missing'),
    (('joints', 0, 'action'), 'both', 'joints[0].action'),
    (('pose_gap',), None, 'joints[0].pose_gap is missing; give one per joint'),
    (('joints', 2, 'scale'), 2.0, 'joints[2].scale is 2.0; gripper sets it already'),
    (('joints', 2, 'gripper'), {'open': 1.0}, 'joints[2].gripper.closed is missing'),
    (('joints', 2, 'gripper'), {'open': 1.0, 'closed': 1.0}, 'it must differ from closed'),
    (('views',), ['top'], "views is ['top']; give a mapping"),
    (('views', 'top'), '/camera', "views.top is '/camera'; give the last part"),
    (('views', 'top'), 'wrist', 'another view uses that topic'),
]


@pytest.mark.parametrize(('path', 'value', 'message'), MISTAKES)
def test_each_mistake_is_named_with_file_key_value_and_remedy(path, value, message):
    with pytest.raises(ConfigError) as refusal:
        parse(changed(path, value))
    assert str(refusal.value).startswith('arm.yaml: ')
    assert message in str(refusal.value)


@pytest.mark.parametrize('text', [
    'joints: [', '', '- 1', 'name: a\nname: b\n', '!!python/object/apply:os.getcwd []',
    '{[1, 2]: 3}', 'a: *nowhere', '? {a: 1}\n: 2', '\x00'])
def test_text_that_is_no_embodiment_is_refused(text):
    with pytest.raises(ConfigError, match=r'arm\.yaml'):
        parse_embodiment(text, source='arm.yaml')


@given(st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(sorted(GOOD) + ['x']), inner, max_size=4), max_leaves=12))
def test_any_document_gives_an_embodiment_or_a_config_error(document):
    try:
        parse(document)
    except ConfigError:
        pass


@pytest.mark.parametrize('path', [
    ('format',), ('name',), ('control_rate_hz',), ('actions',), ('joints',), ('views',),
    ('pose_gap',), ('joints', 0, 'sign'), ('joints', 2, 'gripper'), ('joints', 0, 'position')])
@given(value=st.none() | st.booleans() | st.integers() | st.floats() | st.text()
       | st.lists(st.integers(), max_size=2)
       | st.dictionaries(st.text(), st.integers(), max_size=2))
def test_any_value_of_a_key_gives_an_embodiment_or_a_config_error(path, value):
    document = copy.deepcopy(GOOD)
    at = document
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    try:
        parse(document)
    except ConfigError:
        pass


def test_displacements_add_up_from_the_observed_state():
    joint = dict(GOOD['joints'][0], action='displacement', action_scale=0.2)  # sign -1, scale 2
    robot = parse(changed(('joints', 0), joint))
    observed = np.array([0.3, 0.1, 0.04])
    chunk = np.array([[1.0, 0.1, 0.5], [1.0, 0.2, 0.5], [-0.5, 0.3, 0.5]])
    moved = robot.to_robot(chunk, observed)
    assert moved[:, 0].tolist() == pytest.approx([0.2, 0.1, 0.15])
    assert moved[:, 1].tolist() == pytest.approx([0.1, 0.2, 0.3])  # others stay absolute
    assert chunk[0].tolist() == [1.0, 0.1, 0.5]  # the chunk of the policy is left as it is
    branches = robot.to_robot(np.stack([chunk, chunk]), observed)
    assert branches.shape == (2, 3, 3) and branches[1].tolist() == moved.tolist()
    with pytest.raises(ActionError, match='displacements, which need the observed'):
        robot.to_robot(chunk)


def test_an_action_scale_without_displacements_is_refused():
    joint = dict(GOOD['joints'][0], action_scale=0.2)
    with pytest.raises(ConfigError, match='of displacements, this joint has absolute actions'):
        parse(changed(('joints', 0), joint))


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r'nothing\.yaml cannot be read'):
        load_embodiment(tmp_path / 'nothing.yaml')
    (tmp_path / 'binary.yaml').write_bytes(b'\xff\xfe\x00')
    with pytest.raises(ConfigError, match=r'binary\.yaml cannot be read'):
        load_embodiment(tmp_path / 'binary.yaml')


@pytest.mark.parametrize('path', EXAMPLES, ids=lambda path: path.stem)
def test_each_example_file_is_valid(path):
    robot = load_embodiment(path)
    assert robot.name == path.stem
    middle = (robot.minimum + robot.maximum) / 2
    observed = middle if robot.needs_observed else None
    actions = robot.to_policy(middle[None]) - (
        robot._relative * robot.to_policy(middle) if robot.needs_observed else 0.0)
    np.testing.assert_allclose(robot.to_robot(actions, observed)[0], middle, atol=1e-9)
