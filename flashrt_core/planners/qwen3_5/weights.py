"""The constants of a Qwen3.5 model: names, shapes, random initial values.

Projections that read the same input lie one below the other: ``mix`` holds query, key and value
channels, then z, a, b of the delta rule; ``qkv`` query and gate of each head in turn, then keys,
then values; ``gate_up`` gate, then up. Norms, A_log and dt_bias are float32, all else has the
model's dtype; the products' weights are then stored as the precision says, see precision.py.
"""

from __future__ import annotations

from dataclasses import replace
import math

import torch
from torch import Tensor

from flashrt_core.nn import rope_frequencies
from flashrt_core.nn.delta import TAPS
from flashrt_core.planners.qwen3_5.config import Qwen35Config
from flashrt_core.planners.qwen3_5.precision import Stored
from flashrt_core.planners.qwen3_5.precision import stored
from flashrt_core.policies.pi0.weights import random_weight
from flashrt_core.policies.pi0.weights import WeightSpec
from flashrt_core.runtime import BufferSpec
from flashrt_core.runtime import Role

F32 = torch.float32
ROPE = 'table.rope'


def tensor_specs(c: Qwen35Config) -> dict[str, WeightSpec]:
    """Return every stored tensor by name, with the spread of its random initial value."""
    W, dtype = c.width, c.torch_dtype

    def matrix(out: int, inp: int) -> WeightSpec:
        return WeightSpec((out, inp), dtype, inp**-0.5)

    def norm(size: int) -> WeightSpec:
        return WeightSpec((size,), F32, 0.02)

    specs = {'embed': matrix(c.vocab, W)}
    for i in range(c.layers):
        specs |= _layer(c, f'layers.{i}', c.is_full(i))
    specs['norm'] = norm(W)
    if not c.tied:
        specs['head'] = matrix(c.vocab, W)
    if c.mtp:
        specs |= {
            'mtp.norm_embed': norm(W),
            'mtp.norm_hidden': norm(W),
            'mtp.fc': matrix(W, 2 * W),
            **_layer(c, 'mtp.layer', True),
            'mtp.norm': norm(W),
        }
    return specs


def _layer(c: Qwen35Config, at: str, full: bool) -> dict[str, WeightSpec]:
    W, V, dtype = c.width, c.value_heads * c.value_dim, c.torch_dtype

    def matrix(out: int, inp: int) -> WeightSpec:
        return WeightSpec((out, inp), dtype, inp**-0.5)

    specs = {f'{at}.norm1': WeightSpec((W,), F32, 0.02)}
    if full:
        specs |= {
            f'{at}.qkv': matrix(2 * c.q_dim + 2 * c.kv_dim, W),
            f'{at}.q_norm': WeightSpec((c.head_dim,), F32, 0.02),
            f'{at}.k_norm': WeightSpec((c.head_dim,), F32, 0.02),
            f'{at}.out': matrix(W, c.q_dim),
        }
    else:
        specs |= {
            f'{at}.mix': matrix(c.channels + V + 2 * c.value_heads, W),
            f'{at}.conv': WeightSpec((c.channels, TAPS), dtype, 0.5),
            # Decays exp(-exp(a_log) softplus(.)) from 0.999 to 0.3 a token: states neither
            # explode nor vanish.
            f'{at}.a_log': WeightSpec((c.value_heads,), F32, 1.2, -1.5),
            f'{at}.dt_bias': WeightSpec((c.value_heads,), F32, 0.5, -2.0),
            f'{at}.gate_norm': WeightSpec((c.value_dim,), F32, 0.02, 1.0),
            f'{at}.out': matrix(W, V),
        }
    return specs | {
        f'{at}.norm2': WeightSpec((W,), F32, 0.02),
        f'{at}.gate_up': matrix(2 * c.mlp, W),
        f'{at}.down': matrix(W, c.mlp),
    }


def weight_specs(c: Qwen35Config) -> list[BufferSpec]:
    """Return the CONSTANT buffers: every stored tensor, scales if any, and the rope table."""
    shapes: Stored = {ROPE: (F32, (c.rotary // 2,))}
    for name, spec in tensor_specs(c).items():
        shapes |= stored(c, name, spec.dtype, spec.shape)
    return [
        BufferSpec(name, Role.CONSTANT, dtype, shape, rows=False)
        for name, (dtype, shape) in shapes.items()
    ]


def rope_table(c: Qwen35Config) -> Tensor:
    """Return float32 [rotary / 2] frequencies."""
    return rope_frequencies(c.rotary, c.rope_theta)


def random_tensor(c: Qwen35Config, name: str, spec: WeightSpec) -> Tensor:
    """Return the random initial value of one tensor; the same bits on every machine."""
    return random_weight(name, spec, c.weight_seed)


def damped(c: Qwen35Config, name: str, spec: WeightSpec) -> WeightSpec:
    """Return a spec of random weights with which two precisions can be compared.

    Each layer adds little to the residual stream, as in GPT-2's initialisation: an embedding of
    unit size, outputs by (2 layers)**-0.5. With equal shares the errors of products grow from
    layer to layer: of 64 layers bfloat16 alone then changes logits as FP8 does of these.
    """
    if name == 'embed':
        return replace(spec, scale=1.0)
    if name.endswith(('.out', '.down')):
        return replace(spec, scale=spec.scale * (2 * c.layers) ** -0.5)
    return spec


def count_parameters(c: Qwen35Config) -> int:
    """Return the number of stored parameters, the tied head counted once."""
    return sum(math.prod(spec.shape) for spec in tensor_specs(c).values())
