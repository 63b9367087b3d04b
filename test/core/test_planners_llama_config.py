"""Configs of a Llama: names, YAML, folders; what does not fit is named."""

from __future__ import annotations

import json
from pathlib import Path

from _llama import save
from _llama import save_gguf
from _llama import their_model
import pytest
import yaml

from flashrt_core.errors import ConfigError
from flashrt_core.planners import PLANNERS
from flashrt_core.planners import Settings
from flashrt_core.planners.llama import LlamaConfig
from flashrt_core.planners.llama import load_config
from flashrt_core.planners.llama.config import CONTEXT

ROOT = Path(__file__).resolve().parents[2]


def test_a_config_or_a_pair_is_taken_as_it_is():
    config, settings = LlamaConfig(layers=5), Settings(branches=3)
    assert load_config(config) == (config, Settings())
    assert load_config((config, settings)) == (config, settings)


def test_a_mapping_overrides_sizes_and_settings_of_its_base():
    c, s = load_config({'base': 'tiny', 'layers': 3, 'branches': 2, 'cpu_threads': 4})
    assert (c.layers, c.width, s.branches, s.cpu_threads) == (3, 64, 2, 4)


def test_a_folder_gives_sizes_and_weights(tmp_path):
    folder = save(their_model('wide_heads'), tmp_path)
    c, s = load_config(folder)
    assert (c.head_dim, c.q_dim, c.kv_dim, c.rope_theta) == (40, 160, 160, 1e5)
    assert (c.weights, c.tokenizer, s.stop_ids) == (folder, '', ())


def test_prefill_keys_follow_a_shorter_context_unless_they_are_given(tmp_path):
    base = save_gguf(tmp_path / 'a.gguf', their_model('grouped'))
    for context, keys in ((256, (16, 64, 256)), (100, (16, 64)), (8, (8,))):
        assert load_config({'base': base, 'context': context})[1].prefill_keys == keys
    given = load_config({'base': base, 'context': 100, 'prefill_keys': [32]})
    assert given[1].prefill_keys == (32,)


def test_the_shipped_file_is_a_config_of_this_family():
    record = yaml.safe_load((ROOT / 'config/smollm2.yaml').read_text())
    assert record['planner'] in PLANNERS and record['base'] == 'smollm2'
    record['base'] = 'tiny'
    c, s = load_config(record)
    assert (c.context, s.branches) == (CONTEXT, record['branches'])


@pytest.mark.parametrize('change, what', [
    ({'layers': 0}, 'layers is 0; give at least 1'),
    ({'heads': 3}, 'heads 3 must be a multiple of kv_heads 2'),
    ({'head_dim': 7}, 'head_dim 7 even'),
    ({'eps': -1.0}, r'eps is -1\.0; give a finite number'),
    ({'dtype': 'int8'}, "dtype 'int8' is unknown; choose from"),
    ({'weight_seed': -1}, 'weight_seed is -1; give at least 0'),
    ({'width': 'wide'}, "width is 'wide'; give a value of type int"),
    ({'colour': 1}, 'colour is no setting; known: '),
    ({'branches': -1}, 'branches is -1'),
    ({'planner': 'qwen3_5'}, "planner is 'qwen3_5', this config is read by 'llama'"),
    ({'base': 'huge'}, "planner 'huge' is none of tiny, smollm2"),
    ({'base': None}, "planner 'None' is none of tiny, smollm2"),
])
def test_what_does_not_fit_is_named(change, what):
    with pytest.raises(ConfigError, match=what):
        load_config(change)


@pytest.mark.parametrize('source', [3, None, ['tiny']])
def test_what_is_no_config_is_named(source):
    with pytest.raises(ConfigError, match='give a name, a file or a mapping'):
        load_config(source)


@pytest.mark.parametrize('change, what', [
    ({'model_type': 'gemma'}, "model type 'gemma'; this family reads 'llama'"),
    ({'attention_bias': True}, 'attention_bias'),
    ({'hidden_act': 'gelu'}, 'gelu'),
    ({'rope_parameters': {'rope_type': 'llama3', 'rope_theta': 1e4}}, 'llama3'),
    ({'hidden_size': None}, 'says hidden_size is None; it must state a whole number above 0'),
    ({'num_hidden_layers': 2.5}, r'num_hidden_layers is 2\.5'),
])
def test_a_checkpoint_of_another_kind_is_refused(tmp_path, change, what):
    save(their_model('grouped'), tmp_path)
    file = tmp_path / 'config.json'
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ConfigError, match=what):
        load_config(str(tmp_path))


@pytest.mark.parametrize('text', ['{', '[]', '{}'])
def test_a_damaged_config_file_is_told(tmp_path, text):
    (tmp_path / 'config.json').write_text(text)
    with pytest.raises(ConfigError, match=r'config\.json'):
        load_config(str(tmp_path))
