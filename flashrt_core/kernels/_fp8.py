"""The E4M3 forms of the policy kernels: checked together, for they are used together.

A kernel that writes the input of a quantised product writes it in E4M3, over that product's
static scale; the products multiply E4M3 and scale their sums. So FP8 costs no kernel of its own
but GELU's between two products of the vision tower.
"""
from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from flashrt_core.kernels import attention
from flashrt_core.kernels import expert
from flashrt_core.kernels import modulated
from flashrt_core.kernels import rows
from flashrt_core.kernels import skinny
from flashrt_core.kernels._launch import close
from flashrt_core.kernels._launch import draw
from flashrt_core.kernels._launch import overlaps
from flashrt_core.kernels._triton import triton_selected
from flashrt_core.nn import attend
from flashrt_core.nn import attend_shared_prefix
from flashrt_core.nn import layer_norm
from flashrt_core.nn import modulated_norm
from flashrt_core.nn import rms_norm
from flashrt_core.nn import rotate
from flashrt_core.nn.fp8 import E4M3
from flashrt_core.nn.fp8 import Fp8Weight
from flashrt_core.nn.fp8 import LARGEST
from flashrt_core.nn.fp8 import product
from flashrt_core.nn.fp8 import quantise
from flashrt_core.nn.fp8 import quantise_input

ROUNDING = 1 / 16  # of E4M3, relative: half a step of three bits
EPS = 1e-6


def selected(device: torch.device) -> bool:
    """Return whether the E4M3 forms agree with torch on ``device``; not inside a capture."""
    return triton_selected('FP8 operands', device, lambda: _check(device))


def _check(device: torch.device) -> bool:
    return all([_check_products(device), _check_rows(device), _check_attention(device),
                _check_folds(device)])


def _written(device: torch.device, *shape: int) -> Tensor:
    return torch.full(shape, torch.nan, device=device).to(E4M3)


def _agrees(found: Tensor, expected: Tensor, scale: Tensor) -> bool:
    """Compare E4M3 over a scale, of which some values saturate, with float32."""
    top = LARGEST * scale
    saturated = bool((expected.abs() > top).any())
    return saturated and close(found.float() * scale, expected.clamp(-top, top), ROUNDING)


def _operands(device: torch.device, M: int, N: int, K: int, seed: int) -> tuple[Tensor, Fp8Weight]:
    """Draw an input [M, K], E4M3, and a quantised weight [N, K]."""
    scale = torch.tensor(0.01, device=device)
    data, scales = quantise(draw(device, torch.bfloat16, N, K, seed=seed) / 32)
    a = quantise_input(draw(device, torch.bfloat16, M, K, seed=seed + 1), scale)
    return a, Fp8Weight(data, scales, scale, scales * scale)


def _exact(a: Tensor, w: Fp8Weight) -> Tensor:
    return F.linear(a.float() * w.input_scale, w.values())


def _check_products(device: torch.device) -> bool:
    """The library with and without bias, the split products, QKV with rope, the gated product."""
    pdl, agree = overlaps(device), []
    bias, ones = draw(device, torch.bfloat16, 4304), torch.ones((51, 1), device=device)
    a, w = _operands(device, 51, 4304, 1152, 0)
    agree += [close(product(a, w, None, ones), _exact(a, w)),
              close(product(a, w, bias, ones), _exact(a, w) + bias.float())]
    for K, tile in ((2048, skinny.WHOLE_TILE), (4096, skinny.SPLIT_TILE)):
        a, w = _operands(device, 70, 1024, K, 2)
        partial = torch.full((8, 70, 1024), torch.nan, device=device)
        skinny.split_product(a, w, partial, tile, pdl)
        agree.append(close(partial.sum(0), _exact(a, w)))
    a, w = _operands(device, 70, 2048, 1024, 4)
    scale, out = torch.tensor(0.002, device=device), _written(device, 70, 1024)
    skinny.gated(a, w, out, pdl, scale)
    gate, up = _exact(a, w).chunk(2, dim=-1)
    agree.append(_agrees(out, F.gelu(gate, approximate='tanh') * up, scale))

    a, w = _operands(device, 16, 10 * 64, 1024, 6)
    angle = draw(device, torch.float32, 8, 32, seed=8)
    q = torch.full((16, 8, 64), torch.nan, device=device, dtype=torch.bfloat16)
    kv = torch.full((16, 2, 1, 64), torch.nan, device=device, dtype=torch.bfloat16)
    expert.project(a, w, angle.cos(), angle.sin(), q, kv, 8, pdl)
    full = _exact(a, w).view(2, 8, 10, 64)
    turned = rotate(full[:, :, :9], angle.cos()[:, None], angle.sin()[:, None])
    return all(agree) and close(q.view(2, 8, 8, 64), turned[:, :, :8]) and close(
        kv.view(2, 8, 2, 64), torch.cat([turned[:, :, 8:], full[:, :, 9:]], 2))


def _check_rows(device: torch.device) -> bool:
    """Norms, gate and GELU of the large rows."""
    dtype, scale, agree = torch.bfloat16, torch.tensor(0.005, device=device), []
    for N, bias in ((1152, draw(device, torch.float32, 1152)), (2048, None)):
        x, delta = draw(device, dtype, 9, N, seed=1), draw(device, dtype, 9, N, seed=2)
        weight, y = draw(device, torch.float32, N, seed=3), _written(device, 9, N)
        total = (x + delta).float()
        rows.norm_rows(x, delta, weight, bias, y, EPS, scale)
        agree.append(_agrees(y, rms_norm(total, weight, EPS) if bias is None
                             else layer_norm(total, weight, bias, EPS), scale))
    pair, out = draw(device, dtype, 9, 8192, seed=4), _written(device, 9, 4096)
    rows.gate_rows(pair, out, scale)
    gate, up = pair.float().chunk(2, dim=-1)
    agree.append(_agrees(out, F.gelu(gate, approximate='tanh') * up, scale))
    rows.gelu_rows(pair[:, :4096].contiguous(), out, scale)
    return all(agree) and _agrees(out, F.gelu(gate, approximate='tanh'), scale)


def _check_attention(device: torch.device) -> bool:
    """Both ways of attending."""
    dtype, scale = torch.bfloat16, torch.tensor(0.0005, device=device)
    q, k, v = draw(device, dtype, 2, 100, 3, 4, 72).unbind(2)
    out = _written(device, 2, 100, 4, 72)
    attention.attention(q, k, v, None, out, scale)
    agree = [_agrees(out.flatten(2), attend(q.float(), k.float(), v.float()), scale)]

    q, kv = draw(device, dtype, 2, 51, 8, 256, seed=2), draw(device, dtype, 150, 2, 1, 256, seed=1)
    own = draw(device, dtype, 2, 51, 2, 1, 256, seed=3)
    mask = torch.arange(150, device=device) < 99
    out = _written(device, 2, 51, 8, 256)
    attention.FewQueries(2, 51, 150, 8, 1, 256, device, overlaps(device), alone=False)(
        q, kv, mask, own, out, scale)
    expected = attend_shared_prefix(
        q.float(), own[:, :, 0].float(), own[:, :, 1].float(), kv[:, 0].float(), kv[:, 1].float(),
        mask, torch.ones((51, 51), dtype=torch.bool, device=device))
    return all(agree) and _agrees(out.flatten(2), expected, scale)


def _check_folds(device: torch.device) -> bool:
    """What writes the input of the expert's next product, for two rows of eight tokens."""
    pdl, single = overlaps(device), torch.float32
    R, S, N, A, scale = 2, 8, 1024, 32, torch.tensor(0.005, device=device)
    x = draw(device, torch.bfloat16, R * S, N)
    partial, norm = draw(device, single, 8, R * S, N, seed=1), draw(device, single, N, seed=2)
    y = _written(device, R * S, N)
    total = x.float() + partial.sum(0)
    expert.fold(x.clone(), partial, norm, y, EPS, pdl, scale)
    agree = [_agrees(y, rms_norm(total, norm, EPS), scale)]
    rest = draw(device, single, 4, R * (S - 1), N, seed=3)
    expert.tokens(rest, norm, norm, norm, x.clone(), y, S, EPS, pdl, scale)
    token = torch.cat([norm.expand(R, 1, N), (rest.sum(0) + norm).view(R, S - 1, N)], 1)
    agree.append(_agrees(y.view(R, S, N), rms_norm(token, norm, EPS), scale))

    before, by, first = (draw(device, single, 3, N, seed=i) for i in (4, 5, 6))
    modulated.fold(x.clone(), partial, before, by, y, EPS, pdl, scale)
    total = x.float() + partial.sum(0) * before[2]
    agree.append(_agrees(y, modulated_norm(total, by, EPS), scale))
    in_w, out_w = draw(device, single, N, A, seed=7), draw(device, single, A, N, seed=8)
    actions = draw(device, single, R * S, A, seed=9)
    modulated.step(x.clone(), partial, (before, by), first, out_w, norm[:A], actions, in_w, norm,
                   y, 10, EPS, False, True, pdl, scale)
    token = F.linear(actions, in_w, norm)
    return all(agree) and _agrees(y, modulated_norm(token, first, EPS), scale)
