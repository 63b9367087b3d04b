"""Normalisations, computed in float32 whatever the dtype of the stream."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Gemma's RMSNorm: x / rms(x) * (1 + weight); ``weight`` is zero-centred.

    Shapes: x [..., width], weight [width]; returns x's dtype. Source: Gemma (arXiv 2403.08295).
    """
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (y * (1.0 + weight.float())).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm with affine over the last axis: x [..., width]; returns x's dtype."""
    y = F.layer_norm(x.float(), (x.shape[-1],), weight.float(), bias.float(), eps)
    return y.to(x.dtype)
