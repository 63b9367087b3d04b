"""Pi0's three functions through Triton kernels and cuBLAS; ``model`` is the reference.

Few rows make the expert bound by its weights' bytes and by the number of dependent kernels: its
layers take eight small kernels, each launched while the one before still runs.
Vision and prefix are bound by arithmetic: cuBLAS, and one row-wise kernel between two products.
Where the config says so the prefix is in FP8.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from flashrt_core.kernels import _fp8
from flashrt_core.kernels import attention
from flashrt_core.kernels import expert
from flashrt_core.kernels import rows
from flashrt_core.kernels import skinny
from flashrt_core.kernels._launch import overlaps
from flashrt_core.nn import gemma_layer
from flashrt_core.nn import GemmaLayer
from flashrt_core.nn import ModulatedLayer
from flashrt_core.nn import rope_tables
from flashrt_core.nn import siglip_layer
from flashrt_core.nn.fp8 import E4M3
from flashrt_core.nn.fp8 import product
from flashrt_core.nn.fp8 import scale_of
from flashrt_core.policies.pi0.config import Pi0Config
from flashrt_core.policies.pi0.model import embed_text
from flashrt_core.policies.pi0.model import Given
from flashrt_core.policies.pi0.model import Guide
from flashrt_core.policies.pi0.model import Prefix
from flashrt_core.policies.pi0.model import prefixes_of

AnyLayer = GemmaLayer | ModulatedLayer
SPLITS = 8       # of the sums over K in an expert layer: 128 programs at width 1024
TIME_SPLITS = 4  # of the sum over K after the time MLP


def selected(c: Pi0Config, device: torch.device) -> bool:
    """Return whether these sizes fit the kernels and every kernel agrees with its reference."""
    kernels = [skinny, attention, expert, rows] + [_fp8] * c.quantised
    return fits(c) and all([kernel.selected(device) for kernel in kernels])


def fits(c: Pi0Config) -> bool:
    """Return whether the fixed tiles divide the sizes of ``c``, and layers follow one another."""
    d, D = c.expert, c.expert.head_dim
    return (
        c.dtype == 'bfloat16'
        and d.width in (512, 1024)
        and D in (64, 128, 256)
        and d.q_dim % (16 * SPLITS) == 0
        and d.mlp % (128 * SPLITS) == 0
        and c.action_width & (c.action_width - 1) == 0
        and c.horizon < attention.SPAN
        and c.prefix.mlp % 512 == 0
        and c.prefix.layers > 1
        and (c.vision.width // c.vision.heads) % 8 == 0
    )


def encode_views(images: Tensor, w: Mapping[str, Tensor], c: Pi0Config) -> Tensor:
    """As ``model.encode_views``."""
    d = c.vision
    V, T = images.shape[0], d.tokens
    cut = images.new_empty((V, T, d.patch_dim), dtype=c.torch_dtype)
    rows.patches(images, d.patch_size, cut)
    x = F.linear(cut, w['vision.patch.weight'], w['vision.patch.bias']) + w['vision.position']
    y, attended = torch.empty_like(x), torch.empty_like(x)
    heads = attended.view(V, T, d.heads, -1)
    z: Tensor | None = None
    for i in range(d.layers):
        layer = siglip_layer(w, f'vision.layers.{i}')
        rows.norm_rows(x, z, layer.norm1_weight, layer.norm1_bias, y, d.eps)
        qkv = F.linear(y, layer.qkv_weight, layer.qkv_bias).view(V, T, 3, d.heads, -1)
        q, k, v = qkv.unbind(2)
        attention.attention(q, k, v, None, heads)
        z = F.linear(attended, layer.out_weight, layer.out_bias)
        rows.norm_rows(x, z, layer.norm2_weight, layer.norm2_bias, y, d.eps)
        hidden = torch._addmm_activation(
            layer.fc1_bias, y.view(V * T, -1), layer.fc1_weight.t(), use_gelu=True)
        z = F.linear(hidden, layer.fc2_weight, layer.fc2_bias).view_as(x)
    normed = torch.empty_like(x)
    rows.norm_rows(x, z, w['vision.norm.weight'], w['vision.norm.bias'], normed, d.eps)
    return F.linear(normed, w['projector.weight'], w['projector.bias']).flatten(0, 1)


def encode_prefix(
    image_tokens: Tensor,
    text: Tensor,
    mask: Tensor,
    kv: Tensor,
    w: Mapping[str, Tensor],
    c: Pi0Config,
    given: Given | None = None,
) -> None:
    """As ``model.encode_prefix``."""
    d = c.prefix
    x = torch.cat([image_tokens, embed_text(text, w, c, given)])
    P = x.shape[0]
    cos, sin = rope_tables(mask.cumsum(0) - 1, w['table.rope'])
    of_products = E4M3 if c.quantised else x.dtype
    ones = torch.ones((P, 1), device=x.device) if c.quantised else None
    y = torch.empty_like(x, dtype=of_products)
    q = x.new_empty((P, d.heads, d.head_dim))
    attended = torch.empty_like(q, dtype=of_products)
    hidden = x.new_empty((P, d.mlp), dtype=of_products)
    last = d.layers - 1
    layers = [gemma_layer(w, f'prefix.layers.{i}') for i in range(last)]
    inputs = [*(layer.qkv for layer in layers), w[f'prefix.layers.{last}.kv']]
    rows.norm_rows(x, None, layers[0].norm1, None, y, d.eps, scale_of(inputs[0]))
    for i, layer in enumerate(layers):
        rows.rotate_rows(product(y, layer.qkv, ones), cos, sin, q, kv[i])
        attention.attention(q[None], kv[i, :, 0][None], kv[i, :, 1][None], mask, attended[None],
                            scale_of(layer.out))
        z = product(attended.view(P, -1), layer.out, ones)
        rows.norm_rows(x, z, layer.norm2, None, y, d.eps, scale_of(layer.gate_up))
        rows.gate_rows(product(y, layer.gate_up, ones), hidden, scale_of(layer.down))
        z = product(hidden, layer.down, ones)
        rows.norm_rows(x, z, w[f'prefix.layers.{i + 1}.norm1'], None, y, d.eps,
                       scale_of(inputs[i + 1]))
    rows.rotate_rows(product(y, inputs[last], ones), cos, sin, q[:, :0], kv[last])


class SuffixAttention:
    """Projects and attends the expert's tokens layer by layer: all rows share one prefix, or each
    half has its own.

    q [R, S, heads, D] and suffix [R, S, 2, kv_heads, D] hold what a layer projects. ``alone``:
    token 0 sees no other token of its suffix.
    """

    def __init__(self, prefixes: Sequence[Prefix], q: Tensor, suffix: Tensor, pdl: bool,
                 alone: bool) -> None:
        R, self._tokens, heads, D = q.shape
        self._pdl = pdl
        count = R // len(prefixes)
        self._parts = [
            (prefix, q[at:at + count], suffix[at:at + count], slice(at, at + count),
             attention.FewQueries(count, self._tokens, len(prefix.mask), heads, suffix.shape[3], D,
                                  q.device, pdl, alone))
            for prefix, at in zip(prefixes, range(0, R, count))
        ]

    def __call__(self, layer: int, y: Tensor, w: AnyLayer, out: Tensor) -> None:
        """Attend the normed rows y [R * S, N] with weights w into out, of q's shape."""
        per_row = y.unflatten(0, (-1, self._tokens))
        for prefix, q, suffix, part, _ in self._parts:
            expert.project(per_row[part].flatten(0, 1), w.qkv, prefix.cos, prefix.sin,
                           q.flatten(0, 1), suffix.flatten(0, 1), self._tokens, self._pdl)
        for prefix, q, suffix, part, attend in self._parts:
            attend(q, prefix.kv[layer], prefix.mask, suffix, out[part])


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
    """As ``model.denoise``.

    The action embedding and the first half of the time MLP are one linear map of the actions, and
    what they add depends on the step alone; both are made once, before the first step.
    A guide takes the fused kernel between two flow steps apart: update, guide, next embedding.
    """
    R, H, A = noise.shape
    S, d, dtype = H + 1, c.expert, c.torch_dtype
    N, M = d.width, R * S
    pdl = overlaps(noise.device)
    layers = [gemma_layer(w, f'expert.layers.{i}') for i in range(d.layers)]

    token = F.linear(state, w['state_in.weight'], w['state_in.bias'])  # [N]
    of_action, of_time = w['time_mlp_in.weight'].split(N, dim=1)  # each [N, N]
    in_w = of_action @ w['action_in.weight']  # [N, A]
    in_b = F.linear(w['table.time'], of_time, w['time_mlp_in.bias'])  # [steps, N]
    in_b = in_b + of_action @ w['action_in.bias']

    actions = noise.reshape(R * H, A).clone()
    u = noise.new_empty((R * H, N))
    times = noise.new_empty((TIME_SPLITS, R * H, N))
    x = noise.new_empty((M, N), dtype=dtype)
    y = torch.empty_like(x)
    q = noise.new_empty((R, S, d.heads, d.head_dim), dtype=dtype)
    suffix = noise.new_empty((R, S, 2, d.kv_heads, d.head_dim), dtype=dtype)
    attended = torch.empty_like(q)
    hidden = noise.new_empty((M, d.mlp), dtype=dtype)
    partial = noise.new_empty((SPLITS, M, N))
    attend = SuffixAttention(prefixes_of(kv, mask, free, S, w), q, suffix, pdl, alone=True)

    def step(at: int, read: bool, write: bool) -> None:
        expert.step(x, partial, w['expert.norm'], w['action_out.weight'], w['action_out.bias'],
                    actions, in_w, in_b[at], u, S, c.flow_steps, d.eps, read, write, pdl)

    def guided_update(at: int) -> None:
        before = actions.clone()
        step(at, read=True, write=False)
        v = ((before - actions) * c.flow_steps).view(R, H, A)
        assert guide is not None
        v = guide(at, before.view(R, H, A), v)
        torch.sub(before, v.view(R * H, A), alpha=1 / c.flow_steps, out=actions)

    for at in range(c.flow_steps):
        if guide is not None and at > 0:
            guided_update(at - 1)
        step(at, read=guide is None and at > 0, write=True)
        skinny.split_product(u, w['time_mlp_out.weight'], times, skinny.FLOAT_TILE, pdl)
        expert.tokens(times, w['time_mlp_out.bias'], token, layers[0].norm1, x, y, S, d.eps, pdl)
        for i, layer in enumerate(layers):
            attend(i, y, layer, attended)
            skinny.split_product(
                attended.view(M, -1), layer.out, partial, skinny.WHOLE_TILE, pdl)
            expert.fold(x, partial, layer.norm2, y, d.eps, pdl)
            skinny.gated(y, layer.gate_up, hidden, pdl)
            skinny.split_product(hidden, layer.down, partial, skinny.SPLIT_TILE, pdl)
            if i + 1 < d.layers:
                after = layers[i + 1]
                expert.fold(x, partial, after.norm1, y, d.eps, pdl)
    if guide is not None:
        guided_update(c.flow_steps - 1)
    else:
        step(0, read=True, write=False)
    return actions.view(R, H, A)
