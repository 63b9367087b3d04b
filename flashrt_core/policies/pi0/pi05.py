"""Pi0.5's forward pass: Pi0's vision and prefix, and an expert that time modulates (adaRMS).

The state is text of the prefix, so the suffix is the actions alone and all of them see each other.
Source: Pi0.5 (arXiv 2504.16054) and openpi. ``w`` holds constants by name.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from flashrt_core.nn import modulated_expert_layer
from flashrt_core.nn import modulated_layer
from flashrt_core.nn import modulated_norm
from flashrt_core.policies.pi0.config import Pi0Config
from flashrt_core.policies.pi0.model import encode_prefix
from flashrt_core.policies.pi0.model import encode_views
from flashrt_core.policies.pi0.model import Guide
from flashrt_core.policies.pi0.model import prefixes_of
from flashrt_core.policies.pi0.modulation import MODULATION

__all__ = ['denoise', 'encode_prefix', 'encode_views', 'velocity']


def denoise(
    noise: Tensor,
    state: Tensor,
    kv: Tensor,
    mask: Tensor,
    w: Mapping[str, Tensor],
    c: Pi0Config,
    guide: Guide | None = None,
    free: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """As ``model.denoise``; ``state`` is not read."""
    H = noise.shape[1]
    prefixes = prefixes_of(kv, mask, free, H, w)
    sees = torch.ones((H, H), dtype=torch.bool, device=noise.device)
    x = noise
    for step in range(c.flow_steps):
        modulation = w[MODULATION][step]
        v = torch.cat([
            velocity(part, modulation, p.kv, p.mask, sees, p.cos, p.sin, w, c)
            for part, p in zip(x.chunk(len(prefixes)), prefixes)
        ])
        if guide is not None:
            v = guide(step, x, v)
        x = x - v / c.flow_steps
    return x


def velocity(
    x: Tensor,
    modulation: Tensor,
    kv: Tensor,
    mask: Tensor,
    sees: Tensor,
    cos: Tensor,
    sin: Tensor,
    w: Mapping[str, Tensor],
    c: Pi0Config,
) -> Tensor:
    """Predict the flow's velocity at x [R, H, action width]; modulation [norms, 3, width]."""
    d = c.expert
    h = F.linear(x, w['action_in.weight'], w['action_in.bias']).to(c.torch_dtype)  # [R, H, width]
    for i in range(d.layers):
        layer = modulated_layer(w, f'expert.layers.{i}')
        first, second = modulation[2 * i], modulation[2 * i + 1]
        h = modulated_expert_layer(h, layer, first, second, kv[i], cos, sin, mask, sees, d)
    h = modulated_norm(h, modulation[-1], d.eps).float()
    return F.linear(h, w['action_out.weight'], w['action_out.bias'])
