"""Pi0's velocity over a batch of observations: differentiable, for training.

The same layers as ``model``, which serves one observation and writes buffers in place. B samples,
V views, T tokens a view, S text slots, P prefix tokens, H horizon. The prompt is empty, as it is
where subgoals alone tell the policy what to do.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from flashrt_core.nn import attend
from flashrt_core.nn import gemma_layer
from flashrt_core.nn import project_kv
from flashrt_core.nn import rms_norm
from flashrt_core.nn import rope_tables
from flashrt_core.nn import siglip_tower
from flashrt_core.nn.gemma import finish_layer
from flashrt_core.nn.gemma import project_qkv
from flashrt_core.policies.pi0.config import Pi0Config

Tensors = Mapping[str, Tensor]


def velocities(
    c: Pi0Config,
    w: Tensors,
    images: Tensor,
    text: Tensor,
    length: Tensor,
    state: Tensor,
    x: Tensor,
    step: Tensor,
) -> Tensor:
    """Predict the flow's velocity of every sample; float32 [B, H, action width].

    images uint8 [B, V, size, size, 3]; text int64 [B, S] with ``length`` int64 [B] valid tokens;
    state float32 [B, state width] and x float32 [B, H, action width], both normalised; step int64
    [B]: which of the ``flow_steps`` times x is at.
    """
    keys, mask = encode_prefix(c, w, images, text, length)
    d, B, S = c.expert, len(x), x.shape[1] + 1
    token = F.linear(state, w['state_in.weight'], w['state_in.bias'])[:, None]
    a = F.linear(x, w['action_in.weight'], w['action_in.bias'])
    time = w['table.time'][step][:, None]
    a = torch.cat([a, time.expand_as(a)], dim=-1)
    a = F.silu(F.linear(a, w['time_mlp_in.weight'], w['time_mlp_in.bias']))
    a = F.linear(a, w['time_mlp_out.weight'], w['time_mlp_out.bias'])
    h = torch.cat([token, a], dim=1).to(c.torch_dtype)  # [B, S, width]

    positions = mask.sum(1)[:, None] + torch.arange(S, device=x.device)  # [B, S]
    cos, sin = (t.unflatten(0, (B, S)) for t in rope_tables(positions.flatten(), w['table.rope']))
    query = torch.arange(S, device=x.device)
    suffix = (query[None, :] == 0) | (query[:, None] > 0)  # the state token sees no action
    seen = torch.cat([mask[:, None].expand(B, S, -1), suffix.expand(B, S, S)], -1)  # [B, S, P + S]
    G = d.heads // d.kv_heads
    seen = seen[:, None, None].expand(B, 1, G, S, -1).reshape(B, 1, G * S, -1)
    for i in range(d.layers):
        layer = gemma_layer(w, f'expert.layers.{i}')
        q, k, v = project_qkv(h, layer.norm1, layer.qkv, cos, sin, d)
        k, v = torch.cat([keys[i][0], k], 1), torch.cat([keys[i][1], v], 1)
        h = finish_layer(h, attend(q, k, v, seen), layer, d)
    h = rms_norm(h[:, 1:], w['expert.norm'], d.eps).float()
    return F.linear(h, w['action_out.weight'], w['action_out.bias'])


def encode_prefix(
    c: Pi0Config, w: Tensors, images: Tensor, text: Tensor, length: Tensor
) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Return (k, v) [B, P, kv_heads, D] of every layer, and the mask bool [B, P]."""
    d, B = c.prefix, len(images)
    seen = siglip_tower(images.flatten(0, 1), w, c.vision)
    seen = F.linear(seen, w['projector.weight'], w['projector.bias']).view(B, -1, d.width)
    x = torch.cat([seen, F.embedding(text, w['prefix.embed']) * d.width**0.5], 1)
    slots = torch.arange(text.shape[1], device=text.device)
    mask = torch.cat(
        [torch.ones_like(seen[..., 0], dtype=torch.bool), slots < length[:, None]], 1
    )
    # Padding stands last, so a valid token's position is its place.
    cos, sin = rope_tables(torch.arange(x.shape[1], device=x.device), w['table.rope'])
    found = []
    last = d.layers - 1
    for i in range(last):
        layer = gemma_layer(w, f'prefix.layers.{i}')
        q, k, v = project_qkv(x, layer.norm1, layer.qkv, cos, sin, d)
        found.append((k, v))
        x = finish_layer(x, attend(q, k, v, mask[:, None, None]), layer, d)
    found.append(
        project_kv(
            x, w[f'prefix.layers.{last}.norm1'], w[f'prefix.layers.{last}.kv'], cos, sin, d
        )
    )
    return found, mask
