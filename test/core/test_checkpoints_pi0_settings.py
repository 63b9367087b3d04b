"""What LeRobot wrote beside a checkpoint is held against the config: family, chunk, relative."""
from __future__ import annotations

from dataclasses import replace
import json
from pathlib import Path
from typing import Any

from _pi0 import SMALL
from _pi05 import bound05
from _pi05 import CONFIG
from _pi05 import lerobot_tensors
from _pi05 import save
import pytest

from flashrt_core.checkpoints import pi0_check_settings
from flashrt_core.errors import ConfigError
from flashrt_core.runtime import cpu_backend


def check(folder: Path, base: Any = CONFIG, **changes: Any) -> None:
    pi0_check_settings(replace(base, weights=str(folder), **changes))


def write(folder: Path, name: str, record: Any) -> None:
    (folder / name).write_text(json.dumps(record))


def relative(folder: Path, **settings: Any) -> None:
    step = {'registry_name': 'relative_actions_processor', 'config': settings}
    write(folder, 'policy_preprocessor.json', {'steps': [{'registry_name': 'other'}, step]})


def test_a_checkpoint_without_these_files_passes(tmp_path):
    check(tmp_path)
    check(tmp_path / 'model.safetensors')
    pi0_check_settings(CONFIG)


def test_settings_that_agree_pass(tmp_path):
    write(tmp_path, 'config.json', {'type': 'pi05', 'chunk_size': 8, 'min_period': 0.004,
                                    'adapt_to_pi_aloha': False})
    relative(tmp_path, enabled=True, exclude_joints=['gripper'],
             action_names=['shoulder', 'Gripper.pos', 'wrist'])
    check(tmp_path, relative=(0, 2))
    relative(tmp_path, enabled=False)
    check(tmp_path)


@pytest.mark.parametrize('record, base, message', [
    ({'type': 'pi0'}, CONFIG, "is of 'pi0', the config is of 'pi05'; give base: pi0"),
    ({'type': 'pi05'}, SMALL, "is of 'pi05', the config is of 'pi0'; give base: pi05"),
    ({'type': 'pi05', 'chunk_size': 50}, CONFIG, 'chunk_size 50, horizon is 8'),
    ({'action_dim': 32, 'action_horizon': 15}, CONFIG, 'action_horizon 15, horizon is 8'),
    ({'type': 'pi05', 'max_period': 8.0}, CONFIG, r'max_period 8\.0, max_period is 4\.0'),
    ({'type': 'pi0', 'adapt_to_pi_aloha': True}, SMALL, 'adapt_to_pi_aloha.*another space'),
    ({'use_delta_joint_actions_aloha': True}, SMALL, 'use_delta_joint_actions_aloha.*another sp'),
])
def test_another_family_or_chunk_is_refused(tmp_path, record, base, message):
    write(tmp_path, 'config.json', record)
    with pytest.raises(ConfigError, match=message):
        check(tmp_path, base)


@pytest.mark.parametrize('settings, given, message', [
    ({'enabled': True}, (), r'\[0, 1, 2\] relative.*set relative to \[0, 1, 2\]'),
    ({'enabled': True, 'exclude_joints': ['gripper'], 'action_names': ['a', 'b', 'left_gripper']},
     (0, 1, 2), r'set relative to \[0, 1\]'),
])
def test_relative_actions_that_the_config_does_not_name_are_refused(
    tmp_path, settings, given, message
):
    relative(tmp_path, **settings)
    with pytest.raises(ConfigError, match=message):
        check(tmp_path, relative=given)


@pytest.mark.parametrize('record', [
    {'steps': 3}, {'steps': [3]}, {}, {'steps': [{'registry_name': 'relative_actions_processor'}]},
    {'steps': [{'registry_name': 'relative_actions_processor', 'config': 3}]},
    {'steps': [{'registry_name': 'relative_actions_processor', 'config': {
        'enabled': False, 'exclude_joints': 5}}]}])
def test_damaged_steps_say_nothing_and_raise_nothing(tmp_path, record):
    write(tmp_path, 'policy_preprocessor.json', record)
    check(tmp_path)


def test_a_session_of_another_chunk_is_not_bound(tmp_path):
    save(lerobot_tensors(), tmp_path)
    write(tmp_path, 'config.json', {'type': 'pi05', 'chunk_size': 50})
    with pytest.raises(ConfigError, match='set horizon to 50'):
        with bound05(cpu_backend(), tmp_path):
            pass


@pytest.mark.parametrize('settings', [{'exclude_joints': 5}, {'action_names': 'gripper'}])
def test_names_of_relative_actions_that_are_no_list_are_refused(tmp_path, settings):
    relative(tmp_path, enabled=True, **settings)
    with pytest.raises(ConfigError, match='give a list of names'):
        check(tmp_path, relative=(0, 1, 2))
