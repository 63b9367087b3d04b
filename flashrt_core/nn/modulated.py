"""Gemma layers whose norms are modulated by a condition (adaRMS), as in Pi0.5's action expert.

A norm's modulation [3, width] is scale, shift and gate: the norm gives ``normed * (1 + scale) +
shift`` and what follows it is added to the stream times the gate. Source: openpi, LeRobot.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from flashrt_core.nn.attention import attend_shared_prefix
from flashrt_core.nn.fp8 import linear
from flashrt_core.nn.fp8 import Weight
from flashrt_core.nn.gemma import gated_mlp
from flashrt_core.nn.gemma import GemmaDims
from flashrt_core.nn.gemma import rotate_qkv


class ModulatedLayer(NamedTuple):
    """Weights of one layer; qkv and gate_up hold their parts one below the other."""

    qkv: Weight  # [q_dim + 2 * kv_dim, width]
    out: Weight  # [width, q_dim]
    gate_up: Weight  # [2 * mlp, width]
    down: Weight  # [width, mlp]


def modulated_layer(weights: Mapping[str, Tensor], prefix: str) -> ModulatedLayer:
    """Pick one layer's tensors by name (``prefix.qkv`` and so on)."""
    return ModulatedLayer(*(weights[f'{prefix}.{name}'] for name in ModulatedLayer._fields))


def modulated_norm(x: Tensor, by: Tensor, eps: float) -> Tensor:
    """RMS norm of x [..., width] with the scale and shift of ``by`` float32 [3, width]."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (y * (1.0 + by[0]) + by[1]).to(x.dtype)


def add_gated(x: Tensor, y: Tensor, by: Tensor) -> Tensor:
    """Add y [..., width] times the gate of ``by`` float32 [3, width] to the stream x."""
    return (x.float() + y.float() * by[2]).to(x.dtype)


def modulated_expert_layer(
    x: Tensor,
    w: ModulatedLayer,
    first: Tensor,
    second: Tensor,
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    prefix_mask: Tensor,
    suffix_mask: Tensor,
    dims: GemmaDims,
) -> Tensor:
    """One expert layer over x [R, S, width], attending the prefix kv [P, 2, kv_heads, D] too.

    ``first`` modulates the norm before attention, ``second`` that before the MLP.
    """
    y = modulated_norm(x, first, dims.eps)
    q, k, v = rotate_qkv(linear(y, w.qkv), cos, sin, dims)
    y = attend_shared_prefix(q, k, v, kv[:, 0], kv[:, 1], prefix_mask, suffix_mask)
    x = add_gated(x, linear(y, w.out), first)
    y = gated_mlp(modulated_norm(x, second, dims.eps), w.gate_up, w.down)
    return add_gated(x, y, second)
