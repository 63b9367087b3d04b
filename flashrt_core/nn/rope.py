"""Rotary position embedding, half-split style, over all dims of a head."""

from __future__ import annotations

import torch
from torch import Tensor


def rope_frequencies(head_dim: int, theta: float) -> Tensor:
    """Return float32 [head_dim / 2] on the CPU: theta^(-2i / head_dim) (arXiv 2104.09864)."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / (theta**exponent)


def rope_tables(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Return float32 (cos, sin) [tokens, 1, head_dim / 2] of integer ``positions`` [tokens]."""
    angles = positions.float()[:, None, None] * frequencies  # [tokens, 1, head_dim / 2]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [..., tokens, heads, head_dim] by the tables of its tokens; returns x's dtype."""
    a, b = x.float().chunk(2, dim=-1)  # each [..., tokens, heads, head_dim / 2]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
