"""Gemma layers (arXiv 2403.08295) in the two forms a VLA needs: prefix and action expert."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

from flashrt_core.nn.attention import attend
from flashrt_core.nn.attention import attend_shared_prefix
from flashrt_core.nn.fp8 import linear
from flashrt_core.nn.fp8 import Weight
from flashrt_core.nn.norms import rms_norm
from flashrt_core.nn.rope import rotate


@dataclass(frozen=True)
class GemmaDims:
    """Sizes of a stack; prefix and expert share layers, heads, kv_heads and head_dim."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    eps: float = 1e-6
    rope_theta: float = 10000.0

    @property
    def q_dim(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def qkv_dim(self) -> int:
        return self.q_dim + 2 * self.kv_dim


class GemmaLayer(NamedTuple):
    """Weights of one layer; qkv and gate_up hold their parts one below the other."""

    norm1: Tensor  # [width]
    qkv: Weight  # [q_dim + 2 * kv_dim, width]
    out: Weight  # [width, q_dim]
    norm2: Tensor  # [width]
    gate_up: Weight  # [2 * mlp, width]
    down: Weight  # [width, mlp]


def gemma_layer(weights: Mapping[str, Tensor], prefix: str) -> GemmaLayer:
    """Pick one layer's tensors by name (``prefix.norm1`` and so on)."""
    return GemmaLayer(*(weights[f'{prefix}.{name}'] for name in GemmaLayer._fields))


def project_qkv(
    x: Tensor, norm: Tensor, qkv: Weight, cos: Tensor, sin: Tensor, dims: GemmaDims
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm, project, rotate x [B, S, width] -> q [B, S, heads, D], k and v [B, S, kv_heads, D]."""
    return rotate_qkv(linear(rms_norm(x, norm, dims.eps), qkv), cos, sin, dims)


def rotate_qkv(
    projected: Tensor, cos: Tensor, sin: Tensor, dims: GemmaDims
) -> tuple[Tensor, Tensor, Tensor]:
    """Cut [B, S, qkv_dim] into q [B, S, heads, D], k and v [B, S, kv_heads, D]; rotate q and k."""
    y = projected.unflatten(-1, (-1, dims.head_dim))
    qk, v = y.split([dims.heads + dims.kv_heads, dims.kv_heads], dim=2)
    q, k = rotate(qk, cos, sin).split([dims.heads, dims.kv_heads], dim=2)
    return q, k, v


def finish_layer(x: Tensor, attended: Tensor, w: GemmaLayer, dims: GemmaDims) -> Tensor:
    """Add attention output and gated MLP (gelu-tanh) to the stream x [B, S, width]."""
    x = x + linear(attended, w.out)
    return x + gated_mlp(rms_norm(x, w.norm2, dims.eps), w.gate_up, w.down)


def gated_mlp(y: Tensor, gate_up: Weight, down: Weight) -> Tensor:
    """Gated MLP (gelu-tanh) of y [B, S, width]."""
    gate, up = linear(y, gate_up).chunk(2, dim=-1)
    return linear(F.gelu(gate, approximate='tanh') * up, down)


def project_kv(
    x: Tensor, norm: Tensor, kv: Weight, cos: Tensor, sin: Tensor, dims: GemmaDims
) -> tuple[Tensor, Tensor]:
    """As ``project_qkv`` for k and v [B, S, kv_heads, D] alone: all that a last layer needs."""
    k, v = linear(rms_norm(x, norm, dims.eps), kv).chunk(2, dim=-1)
    k = rotate(k.unflatten(-1, (dims.kv_heads, dims.head_dim)), cos, sin)
    return k, v.unflatten(-1, (dims.kv_heads, dims.head_dim))


def prefix_layer(
    x: Tensor, w: GemmaLayer, kv: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, dims: GemmaDims
) -> Tensor:
    """One bidirectional layer over x [1, P, width]; writes its KV into kv [P, 2, kv_heads, D]."""
    q, k, v = project_qkv(x, w.norm1, w.qkv, cos, sin, dims)
    kv[:, 0].copy_(k[0])
    kv[:, 1].copy_(v[0])
    return finish_layer(x, attend(q, k, v, mask), w, dims)


def expert_layer(
    x: Tensor,
    w: GemmaLayer,
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    prefix_mask: Tensor,
    suffix_mask: Tensor,
    dims: GemmaDims,
) -> Tensor:
    """One expert layer over x [R, S, width], attending the prefix kv [P, 2, kv_heads, D] too."""
    q, k, v = project_qkv(x, w.norm1, w.qkv, cos, sin, dims)
    y = attend_shared_prefix(q, k, v, kv[:, 0], kv[:, 1], prefix_mask, suffix_mask)
    return finish_layer(x, y, w, dims)
