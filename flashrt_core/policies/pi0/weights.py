"""Constants of Pi0 and Pi0.5: names, shapes, random initial values and tables.

Projections that read the same input are stored one below the other (``qkv``, ``gate_up``), so one
matmul serves them. The prefix' last layer needs keys and values only; its rest and the final norm
of the language model are never computed and not stored. Of Pi0.5's norms in the expert and of its
time MLP nothing is stored but what they come to, see modulation.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
import hashlib
import math

import numpy as np
import torch
from torch import Tensor

from flashrt_core.nn import GemmaDims
from flashrt_core.nn import rope_frequencies
from flashrt_core.nn import SiglipDims
from flashrt_core.nn import time_table
from flashrt_core.nn.fp8 import E4M3
from flashrt_core.nn.fp8 import SCALES
from flashrt_core.policies.normalise import affine
from flashrt_core.policies.pi0.config import Pi0Config


@dataclass(frozen=True)
class WeightSpec:
    """One stored tensor; ``scale`` is the standard deviation of its random initial value."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    scale: float = 0.0
    offset: float = 0.0


def weight_specs(c: Pi0Config) -> dict[str, WeightSpec]:
    """Return every weight by name. Matrices have ``c.dtype``; norms and action heads float32."""
    specs = dict(_vision(c.vision, c.torch_dtype))
    specs.update(linear_specs('projector', c.prefix.width, c.vision.width, c.torch_dtype))
    specs['prefix.embed'] = WeightSpec(
        (c.vocab, c.prefix.width), c.torch_dtype, c.prefix.width**-0.5
    )
    last = c.prefix.layers - 1
    for i in range(last):
        specs.update(_gemma(f'prefix.layers.{i}', c.prefix, c.torch_dtype))
    specs[f'prefix.layers.{last}.norm1'] = WeightSpec((c.prefix.width,), torch.float32)
    specs[f'prefix.layers.{last}.kv'] = _matrix(2 * c.prefix.kv_dim, c.prefix.width, c.torch_dtype)
    for i in range(c.expert.layers):
        specs.update(_gemma(f'expert.layers.{i}', c.expert, c.torch_dtype, not c.modulated))
    W = c.expert.width
    if not c.modulated:
        specs['expert.norm'] = WeightSpec((W,), torch.float32)
        specs.update(linear_specs('state_in', W, c.state_width, torch.float32))
        specs.update(linear_specs('time_mlp_in', W, 2 * W, torch.float32))
        specs.update(linear_specs('time_mlp_out', W, W, torch.float32))
    specs.update(linear_specs('action_in', W, c.action_width, torch.float32))
    specs.update(linear_specs('action_out', c.action_width, W, torch.float32))
    return specs


def products(c: Pi0Config) -> tuple[str, ...]:
    """Return the names of the weights that FP8 quantises: those of the prefix' layers.

    They are bound by arithmetic, of which a GPU does twice as much in E4M3. All else stays in
    ``dtype``, for in FP8 it gained no time: the expert's few rows wait for one small kernel after
    the other rather than for its weights, vision's products are small, too, and the library fuses
    GELU into one of them in bfloat16 only. Yet of a small Pi0 the expert and the projector made
    more than half of the actions' squared error, and of what was left vision made three quarters.
    """
    return tuple(
        name
        for name, spec in weight_specs(c).items()
        if len(spec.shape) == 2 and name.startswith('prefix.layers.')
    )


def stored_specs(c: Pi0Config) -> dict[str, WeightSpec]:
    """Return every weight as a session keeps it: ``weight_specs``, in FP8 with E4M3 and scales."""
    specs = weight_specs(c)
    for name in products(c) if c.quantised else ():
        shape = specs[name].shape
        specs[name] = WeightSpec(shape, E4M3)
        for kind, of in zip(SCALES, (shape[:1], (), shape[:1])):
            specs[f'{name}.{kind}'] = WeightSpec(of, torch.float32)
    return specs


def tables(c: Pi0Config) -> dict[str, Tensor]:
    """Return the other constants, float32 on the CPU: rope, time embeddings and statistics.

    ``mean`` and ``std`` are shift and scale of the normalisation, whichever it is.
    """
    state = affine(c.statistics, 'state', c.normalised_by, c.state_dim)
    action = affine(c.statistics, 'action', c.normalised_by, c.action_dim)
    relative = torch.zeros(c.action_dim)
    relative[list(c.relative)] = 1.0
    return {
        'table.rope': rope_frequencies(c.prefix.head_dim, c.prefix.rope_theta),
        'table.time': time_table(
            c.flow_steps, c.expert.width, c.min_period, c.max_period, getattr(torch, c.time_dtype)
        ),
        'table.state_mean': torch.from_numpy(state.shift).float(),
        'table.state_std': torch.from_numpy(state.scale).float(),
        'table.action_mean': torch.from_numpy(action.shift).float(),
        'table.action_std': torch.from_numpy(action.scale).float(),
        'table.relative': relative,
    }


def random_weight(name: str, spec: WeightSpec, seed: int) -> Tensor:
    """Return a uniform random tensor of the spec's offset and standard deviation, on the CPU.

    Philox words keyed by (seed, name) turned into float32 by exact integer steps, so every machine
    gets the same bits, whatever the order of the weights.
    """
    if spec.scale == 0.0:
        return torch.full(spec.shape, spec.offset, dtype=spec.dtype)
    digest = hashlib.sha256(f'{seed}/{name}'.encode()).digest()
    key = int.from_bytes(digest[:16], 'little')
    count = math.prod(spec.shape)
    words = np.random.Philox(key=key).random_raw(-(-count // 2)).view(np.uint32)[:count]
    unit = (words >> 8).astype(np.float32) * np.float32(2.0**-24) - np.float32(0.5)
    unit *= np.float32(spec.scale * math.sqrt(12.0))
    unit += np.float32(spec.offset)
    return torch.from_numpy(unit).view(spec.shape).to(spec.dtype)


def _matrix(out: int, inp: int, dtype: torch.dtype) -> WeightSpec:
    return WeightSpec((out, inp), dtype, inp**-0.5)


def linear_specs(
    name: str, out: int, inp: int, dtype: torch.dtype
) -> Iterator[tuple[str, WeightSpec]]:
    """Give the specs of a linear map's weight [out, inp] and bias [out]."""
    yield f'{name}.weight', _matrix(out, inp, dtype)
    yield f'{name}.bias', WeightSpec((out,), dtype)


def _norm(name: str, width: int) -> Iterator[tuple[str, WeightSpec]]:
    yield f'{name}.weight', WeightSpec((width,), torch.float32, offset=1.0)
    yield f'{name}.bias', WeightSpec((width,), torch.float32)


def _vision(d: SiglipDims, dtype: torch.dtype) -> Iterator[tuple[str, WeightSpec]]:
    yield from linear_specs('vision.patch', d.width, d.patch_dim, dtype)
    yield 'vision.position', WeightSpec((d.tokens, d.width), dtype, 0.5)
    for i in range(d.layers):
        layer = f'vision.layers.{i}'
        yield from _norm(f'{layer}.norm1', d.width)
        yield from linear_specs(f'{layer}.qkv', 3 * d.width, d.width, dtype)
        yield from linear_specs(f'{layer}.out', d.width, d.width, dtype)
        yield from _norm(f'{layer}.norm2', d.width)
        yield from linear_specs(f'{layer}.fc1', d.mlp, d.width, dtype)
        yield from linear_specs(f'{layer}.fc2', d.width, d.mlp, dtype)
    yield from _norm('vision.norm', d.width)


def _gemma(
    layer: str, d: GemmaDims, dtype: torch.dtype, norms: bool = True
) -> Iterator[tuple[str, WeightSpec]]:
    if norms:
        yield f'{layer}.norm1', WeightSpec((d.width,), torch.float32)
        yield f'{layer}.norm2', WeightSpec((d.width,), torch.float32)
    yield f'{layer}.qkv', _matrix(d.qkv_dim, d.width, dtype)
    yield f'{layer}.out', _matrix(d.width, d.q_dim, dtype)
    yield f'{layer}.gate_up', _matrix(2 * d.mlp, d.width, dtype)
    yield f'{layer}.down', _matrix(d.width, d.mlp, dtype)
