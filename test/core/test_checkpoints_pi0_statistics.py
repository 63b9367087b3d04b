"""Statistics beside a checkpoint: openpi's and LeRobot's files, and what is refused by name."""
from __future__ import annotations

from dataclasses import replace
import json
from pathlib import Path
import shutil
from typing import Any

from _pi0 import SMALL
from _pi05 import bound05
from _pi05 import CONFIG
from _pi05 import lerobot_tensors
from _pi05 import save
from _pi05 import tick_input
import numpy as np
import pytest
from recipe import CASES
from recipe import PROCESSOR
import torch

from flashrt_core.checkpoints import pi0_statistics
from flashrt_core.errors import ConfigError
from flashrt_core.policies.normalise import Statistics
from flashrt_core.runtime import cpu_backend

BARE05 = replace(CONFIG, statistics=Statistics())
BARE = replace(SMALL, statistics=Statistics())
STATE = {'mean': [0.1, 0.2, 0.3, 0.4], 'std': [1.0, 2.0, 0.5, 0.0], 'q01': [-1.0, -2.0, 0.0, 0.5],
         'q99': [1.0, 2.0, 3.0, 0.5]}
ACTIONS = {name: values[:3] for name, values in STATE.items()}
LEROBOT = 'policy_preprocessor.json'


def checkpoint(folder: Path) -> Path:
    """Write a weights file that only its name matters of."""
    return save({'unread': torch.zeros(1)}, folder)


def openpi(folder: Path, robot: str = 'trossen', **changes: Any) -> Path:
    """Write statistics as openpi does, beside a checkpoint."""
    path = folder / 'assets' / robot / 'norm_stats.json'
    path.parent.mkdir(parents=True)
    record = {'norm_stats': {'state': STATE, 'actions': ACTIONS, **changes}}
    path.write_text(json.dumps(record))
    return path


def lerobot(folder: Path, step: dict[str, Any] | None = None) -> Path:
    """Copy what LeRobot saved, its normalising step changed."""
    for file in PROCESSOR.iterdir():
        shutil.copy(file, folder)
    path = folder / LEROBOT
    record = json.loads(path.read_text())
    record['steps'][1].update(step or {})
    path.write_text(json.dumps(record))
    return path


def found(base: Any, folder: Path, **changes: Any) -> Any:
    return pi0_statistics(replace(base, weights=str(checkpoint(folder)), **changes))


# -- what is found ------------------------------------------------------------------------------


def test_openpis_quantiles_are_found_beside_the_weights(tmp_path):
    openpi(tmp_path)
    c = found(BARE05, tmp_path)
    assert c.normalised_by == 'quantiles'
    assert c.statistics.state_q01 == (-1.0, -2.0, 0.0, 0.5)
    # A joint that never moved keeps a span above zero, as openpi has it.
    np.testing.assert_allclose(c.statistics.state_q99, np.array(STATE['q99']) + 1e-6)
    np.testing.assert_allclose(c.statistics.action_q99, np.array(ACTIONS['q99']) + 1e-6)
    assert c.statistics.state_mean == ()


def test_openpis_mean_and_deviation_serve_pi0(tmp_path):
    openpi(tmp_path)
    c = found(BARE, tmp_path)
    assert c.normalised_by == 'mean_std' and c.statistics.state_mean == (0.1, 0.2, 0.3, 0.4)
    np.testing.assert_allclose(c.statistics.state_std, np.array(STATE['std']) + 1e-6)


def test_statistics_padded_to_the_models_width_are_cut_to_the_robot(tmp_path):
    padded = {name: [*values, 0.0, 0.0] for name, values in STATE.items()}
    openpi(tmp_path, state=padded)
    assert found(BARE, tmp_path).statistics.state_mean == (0.1, 0.2, 0.3, 0.4)


def test_lerobots_file_is_read_as_lerobot_wrote_it(tmp_path):
    lerobot(tmp_path)
    for base in (BARE05, replace(BARE, action_dim=3)):  # the way is the file's
        c = found(base, tmp_path)
        assert c.normalised_by == 'quantiles'
        expected = CONFIG.statistics
        for name in ('state_q01', 'state_q99', 'action_q01', 'action_q99'):
            np.testing.assert_array_equal(
                np.float32(getattr(c.statistics, name)), np.float32(getattr(expected, name)))


def test_a_checkpoint_with_lerobots_files_acts_as_one_with_given_statistics(tmp_path):
    save(lerobot_tensors(), tmp_path)
    lerobot(tmp_path)
    chunks = []
    for statistics in (CONFIG.statistics, Statistics()):
        with bound05(cpu_backend(), tmp_path, statistics=statistics) as session:
            chunks.append(session.tick(tick_input(session, CASES['three'])).actions)
    np.testing.assert_array_equal(*chunks)


@pytest.mark.parametrize('kind, names, way', [
    ('MIN_MAX', ('min', 'max'), 'quantiles'), ('MEAN_STD', ('mean', 'std'), 'mean_std')])
def test_lerobots_other_ways_are_followed(tmp_path, kind, names, way):
    path = lerobot(tmp_path, {'config': {'norm_map': {'STATE': kind, 'ACTION': kind}}})
    step = json.loads(path.read_text())['steps'][1]
    first, second = (torch.arange(4) * 1.0, torch.arange(4) + 5.0)
    save({f'observation.state.{names[0]}': first, f'observation.state.{names[1]}': second,
          f'action.{names[0]}': first[:3].clone(), f'action.{names[1]}': second[:3].clone()},
         tmp_path, step['state_file'])
    c = found(BARE05, tmp_path)
    assert c.normalised_by == way
    values = c.statistics.state_q99 if way == 'quantiles' else c.statistics.state_std
    np.testing.assert_allclose(values, second, atol=1e-6)


def test_statistics_of_early_lerobot_are_found_among_the_weights(tmp_path):
    path = save({
        'normalize_inputs.buffer_observation_state.mean': torch.tensor(STATE['mean']),
        'normalize_inputs.buffer_observation_state.std': torch.tensor(STATE['std']),
        'unnormalize_outputs.buffer_action.mean': torch.tensor(ACTIONS['mean']),
        'unnormalize_outputs.buffer_action.std': torch.tensor(ACTIONS['std'])}, tmp_path)
    c = pi0_statistics(replace(BARE, weights=str(path)))
    np.testing.assert_allclose(c.statistics.state_mean, STATE['mean'], rtol=1e-6)
    assert c.statistics.state_std[3] > 0  # a joint that never moved


def test_statistics_of_early_lerobot_are_found_in_the_weights_of_a_folder(tmp_path):
    names = {'normalize_inputs.buffer_observation_state': STATE,
             'unnormalize_outputs.buffer_action': ACTIONS}
    save({f'{name}.{kind}': torch.tensor(values[kind])
          for name, values in names.items() for kind in ('mean', 'std')}, tmp_path)
    c = pi0_statistics(replace(BARE, weights=str(tmp_path)))
    np.testing.assert_allclose(c.statistics.state_mean, STATE['mean'], rtol=1e-6)


def test_a_file_that_is_given_counts_before_those_beside_the_weights(tmp_path):
    openpi(tmp_path, 'droid')
    path = openpi(tmp_path, 'trossen', state={**STATE, 'mean': [9.0] * 4})
    c = found(BARE, tmp_path, statistics_file=str(path))
    assert c.statistics.state_mean == (9.0,) * 4
    folder = found(BARE, tmp_path, statistics_file=str(path.parent))
    assert folder.statistics == c.statistics


def test_nothing_is_looked_for_where_nothing_is_needed(tmp_path):
    weights = str(checkpoint(tmp_path))
    for c in (replace(SMALL, weights=weights), BARE,
              replace(BARE, weights=weights, normalisation='identity')):
        assert pi0_statistics(c) == c


# -- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize('base, need', [
    (BARE, 'state_mean, state_std, action_mean, action_std'),
    (BARE05, 'state_q01, state_q99, action_q01, action_q99')])
def test_missing_statistics_are_refused_with_what_to_give(tmp_path, base, need):
    with pytest.raises(ConfigError, match=f'no statistics.*statistics_file.*{need}.*identity'):
        found(base, tmp_path)


def test_a_checkpoint_without_statistics_is_not_bound(tmp_path):
    path = save(lerobot_tensors(), tmp_path)
    with pytest.raises(ConfigError, match='no statistics'):
        with bound05(cpu_backend(), path, statistics=Statistics()):
            pass


def test_statistics_of_several_robots_are_refused_by_their_paths(tmp_path):
    openpi(tmp_path, 'droid')
    openpi(tmp_path, 'trossen')
    with pytest.raises(ConfigError, match=r'several robots.*droid.*trossen.*statistics_file'):
        found(BARE, tmp_path)


@pytest.mark.parametrize('changes, message', [
    ({'state': {**STATE, 'mean': [0.0] * 7}}, '7 values of state mean, the robot has 4'),
    ({'state': {**STATE, 'std': [1.0, 1.0, 'x', 1.0]}}, "'x'.*give numbers"),
    ({'state': {**STATE, 'std': [1.0, 1.0, -1.0, 1.0]}}, 'state_std.*above 0'),
    ({'actions': {'mean': [0.0] * 3}}, r'no std of the actions \(it has \[.mean.\]\)'),
    ({'actions': None}, 'no mean of the actions'),
    ({'state': {**STATE, 'mean': [10**400] * 4}}, 'a number that no float holds'),
    ({'state': {**STATE, 'std': [10**400] * 4}}, 'a number that no float holds'),
])
def test_openpi_files_that_do_not_serve_are_refused(tmp_path, changes, message):
    openpi(tmp_path, **changes)
    with pytest.raises(ConfigError, match=message):
        found(BARE, tmp_path)


@pytest.mark.parametrize('text, message', [
    (b'{', 'not valid JSON'), (b'[1]', 'holds a list'), (b'\xff', 'not valid JSON'),
    (b'{"norm_stats": 3}', 'no norm_stats'), (b'{}', 'no mean of the states'),
    (b'[' * 100000, 'not valid JSON')])
def test_files_that_are_no_statistics_are_refused(tmp_path, text, message):
    path = tmp_path / 'norm_stats.json'
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=message):
        found(BARE, tmp_path)


@pytest.mark.parametrize('step, message', [
    ({'registry_name': 'other'}, 'no normalizer_processor'),
    ({'state_file': None}, 'no normalizer_processor'),
    ({'state_file': 'gone.safetensors'}, 'gone.*do not exist'),
    ({'config': {'norm_map': {'STATE': 'QUANTILES', 'ACTION': 'MEAN_STD'}}}, 'one way for both'),
    ({'config': {'norm_map': {'STATE': 'QUANTILE10', 'ACTION': 'QUANTILE10'}}}, 'one way for'),
    ({'config': {'norm_map': {'STATE': 'MEAN_STD', 'ACTION': 'MEAN_STD'}}}, 'no mean of the stat'),
])
def test_lerobot_files_that_do_not_serve_are_refused(tmp_path, step, message):
    lerobot(tmp_path, step)
    with pytest.raises(ConfigError, match=message):
        found(BARE05, tmp_path)


def test_quantiles_of_different_lengths_are_refused(tmp_path):
    path = lerobot(tmp_path)
    step = json.loads(path.read_text())['steps'][1]
    save({'observation.state.q01': torch.zeros(4), 'observation.state.q99': torch.ones(3),
          'action.q01': torch.zeros(3), 'action.q99': torch.ones(3)}, tmp_path, step['state_file'])
    with pytest.raises(ConfigError, match='3 values of state q99, the robot has 4'):
        found(BARE05, tmp_path)


@pytest.mark.parametrize('shape', [(0,), (), (0, 4)])
def test_quantiles_without_values_or_of_one_are_refused(tmp_path, shape):
    path = lerobot(tmp_path)
    step = json.loads(path.read_text())['steps'][1]
    names = ('observation.state.q01', 'observation.state.q99', 'action.q01', 'action.q99')
    save({name: torch.zeros(shape) for name in names}, tmp_path, step['state_file'])
    with pytest.raises(ConfigError, match=r'has (no q01 of the states|1 values of state q01)'):
        found(BARE05, tmp_path)


def test_another_way_than_the_checkpoint_was_trained_with_is_refused(tmp_path):
    lerobot(tmp_path)
    with pytest.raises(ConfigError, match='normalises by quantiles, the config says mean_std'):
        found(BARE05, tmp_path, normalisation='mean_std')


def test_a_statistics_file_that_is_not_there_is_named(tmp_path):
    for name in ('none.json', 'none.safetensors', 'none'):
        with pytest.raises(ConfigError, match=name):
            found(BARE, tmp_path, statistics_file=str(tmp_path / name))
    with pytest.raises(ConfigError, match='null byte'):
        found(BARE, tmp_path, statistics_file='a\0b.json')
