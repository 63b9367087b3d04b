"""Pi0.5's three functions through Triton kernels and cuBLAS; ``pi05`` is the reference.

Vision and prefix are Pi0's. In the expert the modulation of a norm is a row of a table, so it
costs the kernels that are there anyway two loads; without a state token and a time MLP a flow step
begins and ends in one kernel.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flashrt_core.kernels import modulated
from flashrt_core.kernels import skinny
from flashrt_core.kernels._launch import overlaps
from flashrt_core.nn import modulated_layer
from flashrt_core.policies.pi0 import fast
from flashrt_core.policies.pi0.config import Pi0Config
from flashrt_core.policies.pi0.fast import encode_prefix
from flashrt_core.policies.pi0.fast import encode_views
from flashrt_core.policies.pi0.model import Guide
from flashrt_core.policies.pi0.model import prefixes_of
from flashrt_core.policies.pi0.modulation import MODULATION

__all__ = ['denoise', 'encode_prefix', 'encode_views', 'selected']


def selected(c: Pi0Config, device: torch.device) -> bool:
    """Return whether these sizes fit the kernels and every kernel agrees with its reference."""
    return fast.selected(c, device) and modulated.selected(device)


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
    """As ``pi05.denoise``; a guide takes the fused kernel between two flow steps apart."""
    R, H, A = noise.shape
    d, dtype = c.expert, c.torch_dtype
    N, M, L = d.width, R * H, d.layers
    pdl = overlaps(noise.device)
    layers = [modulated_layer(w, f'expert.layers.{i}') for i in range(L)]
    table = w[MODULATION]  # [steps, 2 * L + 1, 3, N]

    actions = noise.reshape(M, A).clone()
    x = noise.new_empty((M, N), dtype=dtype)
    y = torch.empty_like(x)
    q = noise.new_empty((R, H, d.heads, d.head_dim), dtype=dtype)
    suffix = noise.new_empty((R, H, 2, d.kv_heads, d.head_dim), dtype=dtype)
    attended = torch.empty_like(q)
    hidden = noise.new_empty((M, d.mlp), dtype=dtype)
    partial = noise.new_empty((fast.SPLITS, M, N))
    attend = fast.SuffixAttention(prefixes_of(kv, mask, free, H, w), q, suffix, pdl, alone=False)

    def step(ended: int, begun: int, read: bool, write: bool) -> None:
        modulated.step(x, partial, (table[ended, 2 * L - 1], table[ended, 2 * L]), table[begun, 0],
                       w['action_out.weight'], w['action_out.bias'], actions,
                       w['action_in.weight'], w['action_in.bias'], y, c.flow_steps, d.eps, read,
                       write, pdl)

    def guided_update(at: int) -> None:
        before = actions.clone()
        step(at, at, read=True, write=False)
        v = ((before - actions) * c.flow_steps).view(R, H, A)
        assert guide is not None
        v = guide(at, before.view(R, H, A), v)
        torch.sub(before, v.view(M, A), alpha=1 / c.flow_steps, out=actions)

    for at in range(c.flow_steps):
        if guide is not None and at > 0:
            guided_update(at - 1)
        step(max(at - 1, 0), at, read=guide is None and at > 0, write=True)
        for i, layer in enumerate(layers):
            first, second = table[at, 2 * i], table[at, 2 * i + 1]
            attend(i, y, layer, attended)
            skinny.split_product(
                attended.view(M, -1), layer.out, partial, skinny.WHOLE_TILE, pdl)
            modulated.fold(x, partial, first, second, y, d.eps, pdl)
            skinny.gated(y, layer.gate_up, hidden, pdl)
            skinny.split_product(hidden, layer.down, partial, skinny.SPLIT_TILE, pdl)
            if i + 1 < L:
                modulated.fold(x, partial, second, table[at, 2 * i + 2], y, d.eps, pdl)
    last = c.flow_steps - 1
    if guide is not None:
        guided_update(last)
    else:
        step(last, last, read=True, write=False)
    return actions.view(R, H, A)
