"""Key map of Qwen3.5: every key by name; Qwen3-Next's packed projections are the same model."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from _qwen35 import config
from _qwen35 import fresh
from _qwen35 import SHAPES
from _qwen35 import stored
from _qwen35 import take
from _qwen35 import weights
import pytest
from safetensors.torch import save_file
import torch
from torch import Tensor

from flashrt_core.checkpoints import check_keys
from flashrt_core.checkpoints import reader
from flashrt_core.checkpoints.keymap import split_sources
from flashrt_core.checkpoints.qwen3_5 import qwen3_5_canonical
from flashrt_core.checkpoints.qwen3_5 import qwen3_5_ignored
from flashrt_core.checkpoints.qwen3_5 import qwen3_5_packed
from flashrt_core.checkpoints.qwen3_5 import qwen3_5_targets
from flashrt_core.errors import ConfigError
from flashrt_core.planners.qwen3_5 import model
from flashrt_core.planners.qwen3_5 import Qwen35Config
from flashrt_core.planners.qwen3_5.load import load_constants
from flashrt_core.planners.qwen3_5.weights import tensor_specs
from flashrt_core.runtime import BufferSet
from flashrt_core.runtime import cpu_backend

FIT = 'do not fit the config'


def packed(c: Qwen35Config, w: dict[str, Tensor]) -> dict[str, Tensor]:
    """Give the weights as Qwen3-Next stores them."""
    found: dict[str, Tensor] = {}
    for target in qwen3_5_targets(c, packed=True):
        found |= split_sources(target, w[target.name])
    return found


def loaded(c: Qwen35Config) -> dict[str, Tensor]:
    buffers = BufferSet(cpu_backend(), model.weight_specs(c), name='test')
    load_constants(c, buffers, lambda fraction: None)
    return {buffer.name: buffer.tensor for buffer in buffers}


def check(c: Qwen35Config, shapes: dict[str, tuple[int, ...]]) -> dict[str, str]:
    targets = qwen3_5_targets(c, qwen3_5_packed(shapes))
    return check_keys(targets, shapes, qwen3_5_canonical, partial(qwen3_5_ignored, c), 'here')


def shapes_of(tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(tensor.shape) for key, tensor in tensors.items()}


@pytest.mark.parametrize('as_stored', [stored, packed])
@pytest.mark.parametrize('name', SHAPES)
def test_the_key_map_fills_every_row_of_every_weight_once(
        name: str, as_stored: Callable[..., dict[str, Tensor]]) -> None:
    c = config(name)
    targets = qwen3_5_targets(c, packed=as_stored is packed)
    specs = tensor_specs(c)
    assert [t.name for t in targets] == list(specs)
    keys = [source.key for target in targets for source in target.sources]
    assert len(keys) == len(set(keys))
    numbered = {n: torch.arange(spec.shape[0], dtype=torch.float64).view(-1, *[1] * (
        len(spec.shape) - 1)).expand(spec.shape) for n, spec in specs.items()}
    for target in targets:
        rows = torch.cat([part.flatten(1)[:, 0] if part.dim() > 1 else part
                          for part in split_sources(target, numbered[target.name]).values()])
        assert torch.equal(rows.sort().values, torch.arange(len(rows)).double())


@pytest.mark.parametrize('name', SHAPES)
def test_qwen3_next_without_experts_is_the_same_model(name: str, tmp_path: Path,
                                                      monkeypatch: Any) -> None:
    from transformers import Qwen3NextConfig
    from transformers import Qwen3NextForCausalLM

    c = config(name, mtp=False)
    w = weights(c)
    given = packed(c, w)
    theirs = Qwen3NextForCausalLM(Qwen3NextConfig(
        vocab_size=c.vocab, hidden_size=c.width, intermediate_size=c.mlp,
        num_hidden_layers=c.layers, num_attention_heads=c.heads, num_key_value_heads=c.kv_heads,
        head_dim=c.head_dim, linear_key_head_dim=c.key_dim, linear_value_head_dim=c.value_dim,
        linear_num_key_heads=c.key_heads, linear_num_value_heads=c.value_heads,
        rms_norm_eps=c.eps, tie_word_embeddings=c.tied, num_experts=0,
        layer_types=['full_attention' if c.is_full(i) else 'linear_attention'
                     for i in range(c.layers)],
        rope_parameters={'rope_type': 'default', 'rope_theta': c.rope_theta,
                         'partial_rotary_factor': c.rotary / c.head_dim})).eval()
    missing, unexpected = theirs.load_state_dict(given, strict=False)
    assert not unexpected and set(missing) <= {'lm_head.weight'}
    theirs.tie_weights()

    # In pieces that end within a head's group of rows.
    monkeypatch.setattr(reader, 'PIECE_BYTES', 7 * c.width * 4)
    save_file(given, tmp_path / 'model.safetensors')
    found = loaded(replace(c, weights=str(tmp_path)))
    assert all(torch.equal(found[key], w[key]) for key in w)

    tokens = torch.randint(0, c.vocab, (70,), generator=torch.Generator().manual_seed(4)).tolist()
    with torch.no_grad():
        b = {**found, **fresh(c)}
        logits = model.head(c, b, take(c, b, tokens, [64, 6]))
        expected = theirs(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize('as_stored', [stored, packed])
def test_any_single_missing_key_is_named(as_stored: Callable[..., dict[str, Tensor]]) -> None:
    c = config()
    shapes = shapes_of(as_stored(c, weights(c)))
    assert len(check(c, shapes)) == len(shapes)
    for key in shapes:
        lacking = {k: shape for k, shape in shapes.items() if k != key}
        with pytest.raises(ConfigError, match=FIT) as refused:
            check(c, lacking)
        assert f'{key!r} is missing' in str(refused.value)


def test_any_single_key_of_another_shape_is_named_with_both_shapes() -> None:
    c = config()
    shapes = shapes_of(stored(c, weights(c)))
    for key, shape in shapes.items():
        with pytest.raises(ConfigError, match=FIT) as refused:
            check(c, {**shapes, key: (*shape[:-1], shape[-1] + 1)})
        assert f'{key!r} has shape {[*shape[:-1], shape[-1] + 1]}, need {list(shape)}' in str(
            refused.value)


@pytest.mark.parametrize('key', [
    'model.layers.0.mlp.experts.0.gate_proj.weight',  # Qwen3-Next with experts
    'model.layers.0.mlp.gate_proj.weight_scale_inv',  # quantised
    'model.layers.3.self_attn.q_proj.bias',
    'mtp.layers.1.mlp.up_proj.weight',
    'visual_head.weight',
])
def test_a_key_left_over_is_named(key: str) -> None:
    c = config()
    with pytest.raises(ConfigError, match='is not part of this model') as refused:
        check(c, {**shapes_of(stored(c, weights(c))), key: (1,)})
    assert repr(key) in str(refused.value)


def test_one_weight_under_two_names_is_refused() -> None:
    c = config()
    shapes = shapes_of(stored(c, weights(c)))
    again = 'model.language_model.norm.weight'
    with pytest.raises(ConfigError, match='are the same weight'):
        check(c, {**shapes, again: shapes['model.norm.weight']})


@pytest.mark.parametrize('key', ['model.visual.blocks.0.attn.qkv.weight',
                                 'visual.merger.norm.bias',
                                 'model.layers.3.self_attn.rotary_emb.inv_freq'])
def test_what_a_text_model_never_reads_may_be_there(key: str) -> None:
    c = config()
    shapes = shapes_of(stored(c, weights(c)))
    assert key not in check(c, {**shapes, key: (9,)}).values()
