"""Pi0.5's modulation: what the flow's time does to every norm of the expert, made once.

The times of the Euler steps are fixed, so what the time MLP and the linear map of each norm give
for them is a table of constants, float32 [steps, norms, 3, width] (scale, shift, gate), 4.5 MB at
full size instead of 117 million weights. The sources are read at bind and not kept.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from flashrt_core.policies.pi0.config import Pi0Config
from flashrt_core.policies.pi0.weights import linear_specs
from flashrt_core.policies.pi0.weights import WeightSpec

MODULATION = 'table.modulation'
Read = Callable[[str], Tensor]


def modulated_norms(c: Pi0Config) -> list[str]:
    """Return the norms in the order of the table: two a layer, then the expert's last."""
    layers = range(c.expert.layers)
    return [f'expert.layers.{i}.{n}' for i in layers for n in ('norm1', 'norm2')] + ['expert.norm']


def table_spec(c: Pi0Config) -> WeightSpec:
    """Return shape and dtype of the table."""
    shape = (c.flow_steps, len(modulated_norms(c)), 3, c.expert.width)
    return WeightSpec(shape, torch.float32)


def source_specs(c: Pi0Config) -> dict[str, WeightSpec]:
    """Return the weights that the table is made of, float32, by name."""
    W = c.expert.width
    specs: dict[str, WeightSpec] = {}
    for name in ('time_mlp_in', 'time_mlp_out'):
        specs.update(linear_specs(name, W, W, torch.float32))
    for norm in modulated_norms(c):
        specs.update(linear_specs(norm, 3 * W, W, torch.float32))
    return specs


def condition(time: Tensor, read: Read) -> Tensor:
    """Return the condition of every norm [steps, width] of the embedded times [steps, width]."""
    y = F.silu(F.linear(time, read('time_mlp_in.weight'), read('time_mlp_in.bias')))
    return F.silu(F.linear(y, read('time_mlp_out.weight'), read('time_mlp_out.bias')))


def modulate(norm: str, given: Tensor, read: Read) -> Tensor:
    """Return a norm's rows of the table [steps, 3, width] for the condition [steps, width]."""
    return F.linear(given, read(f'{norm}.weight'), read(f'{norm}.bias')).unflatten(-1, (3, -1))
