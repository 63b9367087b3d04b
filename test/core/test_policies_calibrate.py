"""The command that makes scales: from pictures in folders, or from the built-in robot."""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest

from flashrt_core.errors import ConfigError
from flashrt_core.policies.calibrate import from_folder
from flashrt_core.policies.calibrate import from_tabletop
from flashrt_core.policies.calibrate import main
from flashrt_core.policies.calibration import load_scales
from flashrt_core.policies.pi0 import Pi0Policy
from flashrt_core.policies.pi0.config import load_config
from flashrt_core.policies.pi0.config import TINY
from flashrt_core.policies.pi0.weights import products
from flashrt_core.runtime import cpu_backend


def pictures(folder: Path, count: int = 8, shade: int = 255) -> Path:
    """Write noise under the views of the tiny policy."""
    rng = np.random.default_rng(0)
    for view in TINY.views:
        (folder / view).mkdir(parents=True)
        for i in range(count):
            image = rng.integers(0, shade, (60, 84, 3), dtype=np.uint8)
            cv2.imwrite(str(folder / view / f'{i:02d}.png'), image)
    return folder


def test_tables_of_the_built_in_robot_give_scales_that_bind(tmp_path: Path) -> None:
    out = tmp_path / 'scales.json'
    config = tmp_path / 'policy.yaml'
    config.write_text('policy: pi0\nbase: tiny\ndtype: bfloat16\nrow_keys: [1]\nrows: 1\n')
    assert main(['--config', str(config), '--tabletop', '8', '--device', 'cpu', '--out',
                 str(out)]) == 0
    assert load_scales(out, 'pi0', products(TINY)).frames == 8
    config.write_text(f'{config.read_text()}precision: fp8\nscales: scales.json\n')
    Pi0Policy().bind(cpu_backend(), load_config(config)).close()


def test_pictures_come_with_their_states_and_the_task(tmp_path: Path) -> None:
    folder = pictures(tmp_path / 'frames')
    joints = np.arange(32, dtype=np.float32).reshape(8, 4)
    np.save(tmp_path / 'joints.npy', joints)
    made = from_folder(TINY, folder, tmp_path / 'joints.npy', 'pick the red block')
    assert len(made) == 8 and set(made[0].images) == set(TINY.views)
    assert made[3].images['top'].shape == (84, 84, 3)
    np.testing.assert_array_equal(made[3].state, joints[3])
    assert len(made[0].prompt) == 4
    mean = from_folder(TINY, folder, prompt='pick the red block')[0].state
    assert mean.tolist() == pytest.approx(TINY.statistics.state_mean)
    assert len(from_folder(replace(TINY, tokenizer=''), folder)[0].prompt) == 12


def test_views_with_different_numbers_of_pictures_are_refused(tmp_path: Path) -> None:
    folder = pictures(tmp_path / 'frames')
    (folder / 'top' / '00.png').unlink()
    with pytest.raises(ConfigError, match=r"'top': 7, 'wrist': 8.*give every view as many"):
        from_folder(TINY, folder, prompt='go home')


def test_what_does_not_fit_the_pictures_is_refused(tmp_path: Path) -> None:
    folder = pictures(tmp_path / 'frames')
    np.save(tmp_path / 'joints.npy', np.zeros((7, 4)))
    with pytest.raises(ConfigError, match=r'are \[7, 4\]; give a row of 4 for each of 8 frames'):
        from_folder(TINY, folder, tmp_path / 'joints.npy', 'go home')
    with pytest.raises(ConfigError, match=r'cannot be read as \.npy'):
        from_folder(TINY, folder, tmp_path / 'none.npy', 'go home')
    with pytest.raises(ConfigError, match='give both, the task'):
        from_folder(TINY, folder)
    with pytest.raises(ConfigError, match='calibrate on pictures of your robot with --frames'):
        from_tabletop(replace(TINY, views=('front',)), 8)


@pytest.mark.parametrize('shade, count, message', [(8, 8, 'is dark'), (255, 5, '5 frames a view')])
def test_useless_pictures_end_the_command_with_a_word_and_no_file(
        tmp_path: Path, capsys: pytest.CaptureFixture[str], shade: int, count: int,
        message: str) -> None:
    folder, out = pictures(tmp_path / 'frames', count, shade), tmp_path / 'scales.json'
    assert main(['--config', 'tiny', '--frames', str(folder), '--prompt', 'go home', '--device',
                 'cpu', '--out', str(out)]) == 2
    told = capsys.readouterr().err
    assert message in told and told.startswith('calibrate: ')
    assert told.endswith('[config_invalid]\n')
    assert not out.exists()


def test_a_place_that_takes_no_file_and_joints_that_are_no_numbers_are_told_before_the_work(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ['--config', 'tiny', '--device', 'cpu', '--tabletop', '8', '--out']
    assert main([*command, str(tmp_path / 'none' / 'scales.json')]) == 2
    told = capsys.readouterr()
    assert 'scales cannot be written to' in told.err and not told.out
    folder = pictures(tmp_path / 'frames')
    for states in (np.full((8, 4), 'a'), np.full((8, 4), 1j)):
        np.save(tmp_path / 'joints.npy', states)
        with pytest.raises(ConfigError, match='give real numbers'):
            from_folder(TINY, folder, tmp_path / 'joints.npy', 'go home')
    np.savez(tmp_path / 'joints.npz', a=np.zeros((8, 4)))
    with pytest.raises(ConfigError, match='it holds several arrays'):
        from_folder(TINY, folder, tmp_path / 'joints.npz', 'go home')


@pytest.mark.parametrize('data', [b'', b'PK\x03\x04 cut off', b'no array', b'\x93NUMPY\x01'])
def test_joints_in_a_damaged_file_are_refused(tmp_path: Path, data: bytes) -> None:
    folder, states = pictures(tmp_path / 'frames'), tmp_path / 'joints.npy'
    states.write_bytes(data)
    with pytest.raises(ConfigError, match=r'joints\.npy cannot be read as \.npy'):
        from_folder(TINY, folder, states, 'go home')
