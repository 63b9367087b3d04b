"""What is told about a config that is not there."""
from __future__ import annotations

import pytest

from flashrt_core.config_files import shipped_files
from flashrt_core.errors import ConfigError
from flashrt_core.planners.llama import load_config as load_llama
from flashrt_core.planners.qwen3_5 import load_config as load_qwen
from flashrt_core.policies.pi0.config import load_config as load_pi0

POLICIES = 'pi0.yaml, pi05.yaml, pi05_tiny.yaml, pi0_tiny.yaml'
PLANNERS = 'planner_bytes/planner.yaml, qwen3_5_0_8b.yaml'


@pytest.mark.parametrize('load, source, size, shipped', [
    (load_pi0, 'nothing.yaml', "'pi05_tiny'", POLICIES),
    (load_pi0, 'nothing', "'pi05_tiny'", POLICIES),
    (load_pi0, {'base': 'nothing', 'weights': ''}, "'pi05_tiny'", POLICIES),
    (load_qwen, 'nothing.yaml', "'0.8b'", PLANNERS),
    (load_qwen, 'nothing', "'0.8b'", PLANNERS),
    (load_llama, 'nothing.yaml', "'smollm2'", PLANNERS),
    (load_llama, 'nothing', 'smollm2', PLANNERS),
])
def test_a_config_that_is_unknown_is_refused_with_the_sizes_and_the_shipped_files(
        load, source, size, shipped):
    with pytest.raises(ConfigError) as error:
        load(source)
    assert 'nothing' in str(error.value) and size in str(error.value)
    assert f'shipped below config/ are {shipped}' in str(error.value)


@pytest.mark.parametrize('load', [load_pi0, load_qwen])
def test_of_a_folder_in_the_place_of_a_config_its_own_configs_are_named(load, tmp_path):
    for name in ('mine.yaml', 'other.yml', 'notes.txt'):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=r'; that folder holds mine\.yaml, other\.yml; shipped '):
        load(str(tmp_path))


def test_only_files_of_the_kind_are_listed():
    told = shipped_files('planner config')
    assert 'smollm2.yaml' in told and 'pi0' not in told
    assert shipped_files('aeroplane') == ''
