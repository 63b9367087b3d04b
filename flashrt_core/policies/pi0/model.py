"""Pi0's forward pass as three functions over static buffers: vision, prefix, denoise.

Shapes in trailing comments: V views, T tokens a view, P prefix tokens, R rows, H horizon, L
layers. Source: Pi0 (arXiv 2410.24164) and openpi. ``w`` holds constants by name.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from flashrt_core.nn import expert_layer
from flashrt_core.nn import gemma_layer
from flashrt_core.nn import prefix_layer
from flashrt_core.nn import project_kv
from flashrt_core.nn import rms_norm
from flashrt_core.nn import rope_tables
from flashrt_core.nn import siglip_tower
from flashrt_core.nn.fp8 import linear
from flashrt_core.policies.pi0.config import Pi0Config

# (flow step, x [R, H, A], velocity [R, H, A]) -> the velocity to integrate in its place.
Guide = Callable[[int, Tensor, Tensor], Tensor]
Tensors = Mapping[str, Tensor]


class Given(NamedTuple):
    """Rows that stand in the place of what the embedding table has for the token ids."""

    rows: Tensor  # float32 [text tokens, width]
    here: Tensor  # bool [text tokens]


def encode_views(images: Tensor, w: Mapping[str, Tensor], c: Pi0Config) -> Tensor:
    """Encode uint8 images [V, H, W, 3] into prefix tokens [V * T, width]."""
    features = siglip_tower(images, w, c.vision)  # [V, T, vision width]
    return linear(features, w['projector.weight'], w['projector.bias']).flatten(0, 1)


def encode_prefix(
    image_tokens: Tensor,
    text: Tensor,
    mask: Tensor,
    kv: Tensor,
    w: Mapping[str, Tensor],
    c: Pi0Config,
    given: Given | None = None,
) -> None:
    """Run the prefix and write its keys and values into kv [L, P, 2, kv_heads, head_dim].

    image_tokens [V * T, width], text token ids [prompt + subgoal], mask bool [P] of valid tokens.
    Text embeddings are scaled by sqrt(width), image tokens are not; padding shifts no position.
    """
    d = c.prefix
    x = torch.cat([image_tokens, embed_text(text, w, c, given)])[None]  # [1, P, width]
    cos, sin = rope_tables(mask.cumsum(0) - 1, w['table.rope'])
    last = d.layers - 1
    for i in range(last):
        x = prefix_layer(x, gemma_layer(w, f'prefix.layers.{i}'), kv[i], cos, sin, mask, d)
    k, v = project_kv(
        x, w[f'prefix.layers.{last}.norm1'], w[f'prefix.layers.{last}.kv'], cos, sin, d
    )
    kv[last, :, 0].copy_(k[0])
    kv[last, :, 1].copy_(v[0])


def embed_text(text: Tensor, w: Tensors, c: Pi0Config, given: Given | None) -> Tensor:
    """Return text [S, width] as the prefix reads it: rows looked up or given, by sqrt(width)."""
    x = F.embedding(text, w['prefix.embed'])
    if given is not None:
        x = torch.where(given.here[:, None], given.rows.to(x.dtype), x)
    return x * c.prefix.width**0.5


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
    """Integrate the flow from noise at t = 1 to normalised actions at t = 0 by Euler steps.

    noise float32 [R, H, action width], state float32 [state width] normalised, kv and mask of the
    prefix, shared by all rows. ``guide`` corrects each step's velocity; step i is at time
    t = 1 - i / flow_steps. ``free``: kv and mask of a second prefix, which the second half of the
    rows attends instead. Returns float32 [R, H, action width].
    """
    H = noise.shape[1]
    S = H + 1
    token = F.linear(state, w['state_in.weight'], w['state_in.bias'])  # [width]
    prefixes = prefixes_of(kv, mask, free, S, w)
    token = token.expand(len(noise) // len(prefixes), 1, -1)
    query = torch.arange(S, device=noise.device)
    sees = (query[None, :] == 0) | (query[:, None] > 0)  # the state token sees no action
    x = noise
    for step in range(c.flow_steps):
        time = w['table.time'][step]
        v = torch.cat([
            velocity(part, time, token, p.kv, p.mask, sees, p.cos, p.sin, w, c)
            for part, p in zip(x.chunk(len(prefixes)), prefixes)
        ])
        if guide is not None:
            v = guide(step, x, v)
        x = x - v / c.flow_steps
    return x


class Prefix(NamedTuple):
    """What a group of rows attends, and where its own tokens come after it."""

    kv: Tensor  # [L, P, 2, kv_heads, head_dim]
    mask: Tensor  # bool [P]
    cos: Tensor  # of the suffix tokens
    sin: Tensor


def prefixes_of(
    kv: Tensor, mask: Tensor, free: tuple[Tensor, Tensor] | None, suffix: int, w: Tensors
) -> list[Prefix]:
    """Return one prefix for all rows, or two, each for half of them; ``suffix`` tokens follow."""
    found = []
    for keys, valid in [(kv, mask), *([] if free is None else [free])]:
        positions = valid.sum() + torch.arange(suffix, device=valid.device)
        found.append(Prefix(keys, valid, *rope_tables(positions, w['table.rope'])))
    return found


def velocity(
    x: Tensor,
    time: Tensor,
    state_token: Tensor,
    kv: Tensor,
    mask: Tensor,
    sees: Tensor,
    cos: Tensor,
    sin: Tensor,
    w: Mapping[str, Tensor],
    c: Pi0Config,
) -> Tensor:
    """Predict the flow's velocity at x [R, H, action width] and the embedded ``time`` [width]."""
    d = c.expert
    a = F.linear(x, w['action_in.weight'], w['action_in.bias'])  # [R, H, width]
    a = torch.cat([a, time.expand_as(a)], dim=-1)  # [R, H, 2 * width]
    a = F.silu(F.linear(a, w['time_mlp_in.weight'], w['time_mlp_in.bias']))
    a = F.linear(a, w['time_mlp_out.weight'], w['time_mlp_out.bias'])
    h = torch.cat([state_token, a], dim=1).to(c.torch_dtype)  # [R, 1 + H, width]
    for i in range(d.layers):
        layer = gemma_layer(w, f'expert.layers.{i}')
        h = expert_layer(h, layer, kv[i], cos, sin, mask, sees, d)
    h = rms_norm(h[:, 1:], w['expert.norm'], d.eps).float()
    return F.linear(h, w['action_out.weight'], w['action_out.bias'])
