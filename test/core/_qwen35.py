"""A Qwen3.5 of tiny size, its tensors by name, and transformers' with the same weights."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashrt_core.checkpoints.keymap import split_sources
from flashrt_core.checkpoints.qwen3_5 import qwen3_5_targets
from flashrt_core.planners.qwen3_5 import model
from flashrt_core.planners.qwen3_5 import NAMED
from flashrt_core.planners.qwen3_5 import Qwen35Config
from flashrt_core.planners.qwen3_5.precision import quantise
from flashrt_core.planners.qwen3_5.weights import damped
from flashrt_core.planners.qwen3_5.weights import random_tensor
from flashrt_core.planners.qwen3_5.weights import ROPE
from flashrt_core.planners.qwen3_5.weights import rope_table
from flashrt_core.planners.qwen3_5.weights import tensor_specs

TINY = NAMED['tiny'][0]
# Query heads per key head, value heads per key head, dims that differ, an odd layer pattern.
SHAPES = {
    'tiny': {},
    'one key head': {'kv_heads': 1, 'key_heads': 1, 'value_heads': 3, 'key_dim': 24},
    # Rows whose sizes no vector of the CPU divides.
    'odd': {'heads': 3, 'kv_heads': 1, 'head_dim': 20, 'rotary': 6, 'key_heads': 1,
            'value_heads': 3, 'value_dim': 9, 'mlp': 77},
    'no sharing': {'kv_heads': 4, 'key_heads': 4, 'value_dim': 32, 'rotary': 32, 'mlp': 150},
    'tied, every second': {'tied': True, 'full_every': 2, 'layers': 5, 'mtp': False},
}


def config(name: str = 'tiny', **changes: Any) -> Qwen35Config:
    return replace(TINY, **{**SHAPES[name], **changes})


def weights(c: Qwen35Config) -> dict[str, Tensor]:
    found = {name: random_tensor(c, name, spec) for name, spec in tensor_specs(c).items()}
    return {**found, ROPE: rope_table(c)}


def stored_weights(c: Qwen35Config, w: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """``w``, or else the tensors of ``weights``, as the config's precision stores them."""
    found: dict[str, Tensor] = {}
    for name, tensor in (w or weights(c)).items():
        found |= quantise(c, name, tensor)
    return found


def damped_weights(c: Qwen35Config) -> dict[str, Tensor]:
    """As ``weights``, such that an error of a product does not grow on its way to the logits."""
    found = {name: random_tensor(c, name, damped(c, name, spec))
             for name, spec in tensor_specs(c).items()}
    return {**found, ROPE: rope_table(c)}


def fresh(c: Qwen35Config, fill: float = 0.0) -> dict[str, Tensor]:
    """State tensors without a row axis, KV filled with ``fill``."""
    return {
        spec.name: torch.full(spec.shape, fill if 'kv' in spec.name else 0.0, dtype=spec.dtype)
        for spec in model.state_specs(c)
    }


def take(c: Qwen35Config, b: Mapping[str, Tensor], tokens: list[int], cuts: list[int],
         key: int = 64) -> Tensor:
    """Run ``tokens`` from position 0 in chunks of these lengths; hidden of all of them."""
    hidden, at = [], 0
    for length in cuts:
        padded = torch.full((key,), 7, dtype=torch.int32)
        padded[:length] = torch.tensor(tokens[at:at + length], dtype=torch.int32)
        out = model.chunk(c, b, padded, torch.tensor(at), torch.tensor(length), c.context)
        hidden.append(out[:length])
        at += length
    assert at == len(tokens)
    return torch.cat(hidden)


def stored(c: Qwen35Config, w: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same weights under the names and shapes of a checkpoint."""
    found: dict[str, Tensor] = {}
    for target in qwen3_5_targets(c):
        found |= split_sources(target, w[target.name])
    return found


def transformers_config(c: Qwen35Config, **more: Any) -> Any:
    from transformers import Qwen3_5TextConfig
    return Qwen3_5TextConfig(
        vocab_size=c.vocab, hidden_size=c.width, intermediate_size=c.mlp,
        num_hidden_layers=c.layers, num_attention_heads=c.heads, num_key_value_heads=c.kv_heads,
        head_dim=c.head_dim, linear_key_head_dim=c.key_dim, linear_value_head_dim=c.value_dim,
        linear_num_key_heads=c.key_heads, linear_num_value_heads=c.value_heads,
        rms_norm_eps=c.eps, tie_word_embeddings=c.tied,
        layer_types=['full_attention' if c.is_full(i) else 'linear_attention'
                     for i in range(c.layers)],
        rope_parameters={'rope_type': 'default', 'rope_theta': c.rope_theta,
                         'partial_rotary_factor': c.rotary / c.head_dim,
                         'mrope_section': [c.rotary // 2, 0, 0]},
        **more)


def reference(c: Qwen35Config, w: Mapping[str, Tensor]) -> Any:
    from transformers import Qwen3_5ForCausalLM
    theirs = Qwen3_5ForCausalLM(transformers_config(c)).eval()
    given = {k: v for k, v in stored(c, w).items() if not k.startswith('mtp.')}
    missing, unexpected = theirs.load_state_dict(given, strict=False)
    assert not unexpected and set(missing) <= {'lm_head.weight'}
    theirs.tie_weights()
    return theirs


def mtp_reference(c: Qwen35Config, w: Mapping[str, Tensor]) -> tuple[Any, Any]:
    """transformers' model and its generic MTP model with the same weights."""
    from transformers import Qwen3_5ForCausalLM
    from transformers.modeling_layers import MtpModel
    full = transformers_config(c, num_mtp_layers=1, mtp_layer_types=['full_attention'])
    theirs = Qwen3_5ForCausalLM(full).eval()
    given = stored(c, w)
    theirs.load_state_dict({k: v for k, v in given.items() if not k.startswith('mtp.')})
    mtp = MtpModel(theirs, 1).eval()
    names = {'fc': 'eh_proj', 'pre_fc_norm_embedding': 'enorm', 'pre_fc_norm_hidden': 'hnorm',
             'norm': 'post_norm', 'layers.0': 'mtp_block'}
    found = {}
    for key, tensor in given.items():
        for ours, other in names.items():
            if key.startswith(f'mtp.{ours}.'):
                found[key.replace(f'mtp.{ours}.', f'{other}.')] = tensor
    mtp.layers[0].load_state_dict(found)
    return theirs, mtp
