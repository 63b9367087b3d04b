"""The E4M3 forms of the prefix' kernels: used together, so checked together.

A kernel that writes the input of a quantised product writes it in E4M3, over that product's
static scale; the products multiply E4M3 and scale their sums. So FP8 costs no kernel of its own.
"""
from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from flashrt_core.kernels import attention
from flashrt_core.kernels import rows
from flashrt_core.kernels._launch import close
from flashrt_core.kernels._launch import draw
from flashrt_core.kernels._triton import triton_selected
from flashrt_core.nn import attend
from flashrt_core.nn import rms_norm
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
    return all([_check_products(device), _check_rows(device), _check_attention(device)])


def _written(device: torch.device, *shape: int) -> Tensor:
    return torch.full(shape, torch.nan, device=device).to(E4M3)


def _agrees(found: Tensor, expected: Tensor, scale: Tensor) -> bool:
    """Compare E4M3 over a scale, of which some values saturate, with float32."""
    top = LARGEST * scale
    saturated = bool((expected.abs() > top).any())
    return saturated and close(found.float() * scale, expected.clamp(-top, top), ROUNDING)


def _check_products(device: torch.device) -> bool:
    """The library's product."""
    dtype, scale = torch.bfloat16, torch.tensor(0.01, device=device)
    data, scales = quantise(draw(device, dtype, 4304, 1152) / 32)
    w = Fp8Weight(data, scales, scale, scales * scale)
    a = quantise_input(draw(device, dtype, 51, 1152, seed=1), scale)
    found = product(a, w, torch.ones((51, 1), device=device))
    return close(found, F.linear(a.float() * scale, w.values()))


def _check_rows(device: torch.device) -> bool:
    """Norm and gate of the large rows."""
    dtype, scale = torch.bfloat16, torch.tensor(0.005, device=device)
    x, delta = draw(device, dtype, 9, 2048, seed=1), draw(device, dtype, 9, 2048, seed=2)
    weight, y = draw(device, torch.float32, 2048, seed=3), _written(device, 9, 2048)
    total = (x + delta).float()
    rows.norm_rows(x, delta, weight, None, y, EPS, scale)
    normed = _agrees(y, rms_norm(total, weight, EPS), scale)
    pair, out = draw(device, dtype, 9, 8192, seed=4), _written(device, 9, 4096)
    rows.gate_rows(pair, out, scale)
    gate, up = pair.float().chunk(2, dim=-1)
    return normed and _agrees(out, F.gelu(gate, approximate='tanh') * up, scale)


def _check_attention(device: torch.device) -> bool:
    """Many queries in one pass, some keys masked."""
    scale, dtype = torch.tensor(0.0005, device=device), torch.bfloat16
    q = draw(device, dtype, 1, 100, 8, 256)
    k, v = draw(device, dtype, 2, 1, 100, 1, 256, seed=1).unbind()
    mask = torch.arange(100, device=device) % 7 != 2
    out = _written(device, 1, 100, 8, 256)
    attention.attention(q, k, v, mask, out, scale)
    return _agrees(out.flatten(2), attend(q.float(), k.float(), v.float(), mask), scale)
