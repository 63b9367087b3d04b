"""Sizes of Qwen3.5: names, files, refusals; checkpoints and their key map."""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from _qwen35 import config
from _qwen35 import stored
from _qwen35 import TINY
from _qwen35 import weights
import pytest
from safetensors.torch import save_file
import torch
from torch import Tensor

from flashrt_core.errors import ConfigError
from flashrt_core.planners.protocol import Settings
from flashrt_core.planners.qwen3_5 import load_config
from flashrt_core.planners.qwen3_5 import NAMED
from flashrt_core.planners.qwen3_5 import Qwen35Config
from flashrt_core.planners.qwen3_5.load import load_constants
from flashrt_core.planners.qwen3_5.model import weight_specs
from flashrt_core.planners.qwen3_5.weights import count_parameters
from flashrt_core.runtime import BufferSet
from flashrt_core.runtime import cpu_backend

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize('name, billions', [('0.8b', 0.75), ('2b', 1.88), ('4b', 4.21),
                                            ('9b', 8.95), ('27b', 26.90)])
def test_the_named_sizes_have_the_parameters_of_the_published_text_models(
        name: str, billions: float) -> None:
    found = count_parameters(replace(NAMED[name][0], mtp=False)) / 1e9
    assert found == pytest.approx(billions, rel=0.01)


def test_a_file_overrides_sizes_and_settings_of_its_base(tmp_path: Path) -> None:
    path = tmp_path / 'planner.yaml'
    path.write_text('planner: qwen3_5\nbase: tiny\nlayers: 8\ncontext: 512\ndraft_tokens: 2\n')
    c, s = load_config(path)
    assert c == replace(TINY, layers=8, context=512)
    assert s == replace(NAMED['tiny'][1], draft_tokens=2)
    assert load_config('27b') == NAMED['27b'] and load_config((c, s)) == (c, s)
    assert load_config(c) == (c, Settings())


@pytest.mark.parametrize('file, name', [('tiny', 'tiny'), ('0_8b', '0.8b'), ('9b', '9b'),
                                        ('27b', '27b')])
def test_a_file_that_is_shipped_is_the_size_of_its_name(file: str, name: str) -> None:
    c, s = load_config(ROOT / f'config/qwen3_5_{file}.yaml')
    assert c == NAMED[name][0]
    assert (s.prefill_keys, s.draft_tokens, s.branches) == (
        NAMED[name][1].prefill_keys, NAMED[name][1].draft_tokens, NAMED[name][1].branches)


@pytest.mark.parametrize('record, message', [
    ({'base': 'huge'}, "base 'huge' is unknown"),
    ({'planner': 'llama'}, "planner is 'llama'"),
    ({'widht': 64}, 'widht is no setting'),
    ({'layers': 'four'}, "layers is 'four'"),
    ({'layers': 3}, '3 layers hold no full attention'),
    ({'heads': 3}, 'heads 3 is no multiple of kv_heads 2'),
    ({'value_heads': 3}, 'value_heads 3 is no multiple'),
    ({'rotary': 7}, 'rotary is 7; give an even number'),
    ({'rotary': 64}, 'up to head_dim 32'),
    ({'dtype': 'float16'}, "dtype 'float16' is unknown"),
    ({'context': 3}, 'context is 3'),
    ({'mlp': 0}, 'mlp is 0; give at least 1'),
    ({'eps': 1.0}, 'eps is 1.0'),
    ({'rope_theta': 0.0}, 'rope_theta is 0.0'),
])
def test_what_does_not_fit_is_refused_by_name(record: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(record)


def test_a_source_that_is_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match='neither a file nor one of'):
        load_config('nothing.yaml')
    with pytest.raises(ConfigError, match='give a name, a file or a mapping'):
        load_config(7)  # type: ignore[arg-type]


def loaded(c: Qwen35Config) -> dict[str, Tensor]:
    buffers = BufferSet(cpu_backend(), weight_specs(c), name='test')
    load_constants(c, buffers, lambda fraction: None)
    return {buffer.name: buffer.tensor for buffer in buffers}


LAYOUTS = {
    'text': lambda key: key,
    'multimodal': lambda key: key.replace('model.', 'model.language_model.', 1)
    if key.startswith('model.') else key,
}


@pytest.mark.parametrize('layout', LAYOUTS)
@pytest.mark.parametrize('name', ['tiny', 'tied, every second'])
def test_a_checkpoint_in_each_layout_gives_the_same_weights(
        layout: str, name: str, tmp_path: Path) -> None:
    c = config(name)
    given = {LAYOUTS[layout](key): t for key, t in stored(c, weights(c)).items()}
    given['model.visual.patch_embed.proj.weight'] = torch.zeros(2, 2)
    if c.tied:
        given['lm_head.weight'] = given[LAYOUTS[layout]('model.embed_tokens.weight')].clone()
        given['mtp.fc.weight'] = torch.zeros(3)  # this config has no such head
    half = len(given) // 2
    save_file(dict(list(given.items())[:half]), tmp_path / 'model-00001-of-00002.safetensors')
    save_file(dict(list(given.items())[half:]), tmp_path / 'model-00002-of-00002.safetensors')
    found = loaded(replace(c, weights=str(tmp_path)))
    expected = weights(c)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_keys_that_lack_or_do_not_belong_are_named(tmp_path: Path) -> None:
    c = config()
    path = tmp_path / 'model.safetensors'

    def refusal(change: Any) -> str:
        given = stored(c, weights(c))
        change(given)
        save_file(given, path)
        with pytest.raises(ConfigError) as refused:
            loaded(replace(c, weights=str(path)))
        return str(refused.value)

    assert "'mtp.fc.weight' is missing" in refusal(lambda g: g.pop('mtp.fc.weight'))
    key = 'model.layers.0.linear_attn.A_log'
    assert f"'{key}' has shape [5], need [4]" in refusal(
        lambda g: g.__setitem__(key, torch.zeros(5)))
    assert "'model.layers.4.mlp.up_proj.weight' is not part of this model" in refusal(
        lambda g: g.__setitem__('model.layers.4.mlp.up_proj.weight', torch.zeros(1)))
    assert f"'{key}' hold NaN" in refusal(
        lambda g: g.__setitem__(key, torch.full((4,), float('nan'))))
