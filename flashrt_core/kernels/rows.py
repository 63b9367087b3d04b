"""Row-wise kernels between large matrix products: residual and norm, rope, gate, patches."""
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from flashrt_core.kernels._launch import close
from flashrt_core.kernels._launch import draw
from flashrt_core.kernels._triton import FP8_ARCHS
from flashrt_core.kernels._triton import lazy_jit
from flashrt_core.kernels._triton import triton_selected
from flashrt_core.kernels._triton import Variant
from flashrt_core.nn import layer_norm
from flashrt_core.nn import rms_norm
from flashrt_core.nn import rotate

if TYPE_CHECKING:
    import triton.language as tl


@lazy_jit
def add_norm(x, delta, weight, bias, y, scale, eps,  # type: ignore[no-untyped-def]
             N: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, LAYER: tl.constexpr):
    """
    Do x += delta if ADD, then y = norm(x): layer norm with affine, or Gemma's RMS norm.

    x, delta and y [rows, N]; with a scale [] y is E4M3, over the scale. Grid (rows,).
    """
    at = tl.program_id(0).to(tl.int64) * N
    n = tl.arange(0, BLOCK)
    inside = n < N
    value = tl.load(x + at + n, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(delta + at + n, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(x.dtype.element_ty)
        tl.store(x + at + n, rounded, mask=inside)
        value = rounded.to(tl.float32)
    gain = tl.load(weight + n, mask=inside, other=0.0).to(tl.float32)
    if LAYER:
        value = tl.where(inside, value - tl.sum(value, 0) / N, 0.0)
        value = value * tl.rsqrt(tl.sum(value * value, 0) / N + eps) * gain
        value += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    else:
        value = value * tl.rsqrt(tl.sum(value * value, 0) / N + eps) * (1.0 + gain)
    if scale is not None:
        value = tl.clamp(value / tl.load(scale), -448.0, 448.0)
    tl.store(y + at + n, value.to(y.dtype.element_ty), mask=inside)


@lazy_jit
def rope_kv(qkv, cos, sin, q, kv,  # type: ignore[no-untyped-def]
            HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """
    Rotate q and k of qkv [tokens, heads + 2 * kv_heads, D] into q and kv; v is copied.

    cos and sin [tokens, D / 2], q [tokens, heads, D], kv [tokens, 2, kv_heads, D]; grid (tokens,).
    """
    HALF: tl.constexpr = D // 2
    ALL: tl.constexpr = HEADS + 2 * KV_HEADS
    token = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK)[:, None]
    d = tl.arange(0, HALF)[None, :]
    at = qkv + token * ALL * D + h * D + d
    low = tl.load(at, mask=h < ALL, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=h < ALL, other=0.0).to(tl.float32)
    turned = h < HEADS + KV_HEADS
    c = tl.where(turned, tl.load(cos + token * HALF + d), 1.0)
    s = tl.where(turned, tl.load(sin + token * HALF + d), 0.0)
    first = (low * c - high * s).to(q.dtype.element_ty)
    second = (high * c + low * s).to(q.dtype.element_ty)
    to = q + token * HEADS * D + h * D + d
    tl.store(to, first, mask=h < HEADS)
    tl.store(to + HALF, second, mask=h < HEADS)
    to = kv + token * 2 * KV_HEADS * D + (h - HEADS) * D + d
    tl.store(to, first, mask=(h >= HEADS) & (h < ALL))
    tl.store(to + HALF, second, mask=(h >= HEADS) & (h < ALL))


@lazy_jit
def gelu_gate(gate_up, out, scale,  # type: ignore[no-untyped-def]
              N: tl.constexpr, BLOCK: tl.constexpr):
    """
    Write out [rows, N] = gelu_tanh(gate) * up of gate_up [rows, 2 * N].

    With a scale [] out is E4M3, over the scale.
    """
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * 2 * N + n).to(tl.float32)
    up = tl.load(gate_up + row * 2 * N + N + n).to(tl.float32)
    u = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    value = gate / (1.0 + tl.exp(-2.0 * u)) * up
    if scale is not None:
        value = tl.clamp(value / tl.load(scale), -448.0, 448.0)
    tl.store(out + row * N + n, value.to(out.dtype.element_ty))


@lazy_jit
def cut_patches(images, out, GRID: tl.constexpr, PATCH: tl.constexpr,  # type: ignore[no-untyped-def]
                BLOCK: tl.constexpr):
    """Cut uint8 images [V, H, H, 3] -> out [V, GRID * GRID, PATCH * PATCH * 3] in [-1, 1]."""
    LINE: tl.constexpr = PATCH * 3
    token = tl.program_id(0)
    view = tl.program_id(1).to(tl.int64)
    n = tl.arange(0, BLOCK)
    inside = n < PATCH * LINE
    y = (token // GRID) * PATCH + n // LINE
    at = (view * GRID * PATCH + y) * (GRID * LINE) + (token % GRID) * LINE + n % LINE
    value = tl.load(images + at, mask=inside, other=0).to(tl.float32) / 255.0 * 2.0 - 1.0
    to = (view * GRID * GRID + token) * (PATCH * LINE) + n
    tl.store(out + to, value.to(out.dtype.element_ty), mask=inside)


def norm_rows(x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, y: Tensor,
              eps: float, scale: Tensor | None = None) -> None:
    """Launch ``add_norm`` over x [..., N]; with a bias it is a layer norm, with a scale E4M3."""
    N = x.shape[-1]
    add_norm[(x.numel() // N,)](
        x, x if delta is None else delta, weight, weight if bias is None else bias, y, scale, eps,
        N=N,
        BLOCK=1 << (N - 1).bit_length(), ADD=delta is not None, LAYER=bias is not None,
        num_warps=4)


def rotate_rows(qkv: Tensor, cos: Tensor, sin: Tensor, q: Tensor, kv: Tensor) -> None:
    """Launch ``rope_kv``: qkv [tokens, (heads + 2 * kv_heads) * D] -> q, kv."""
    tokens, heads, D = q.shape
    kv_heads = kv.shape[2]
    rope_kv[(tokens,)](qkv, cos, sin, q, kv, HEADS=heads, KV_HEADS=kv_heads, D=D,
                       BLOCK=1 << (heads + 2 * kv_heads - 1).bit_length(), num_warps=4)


def gate_rows(gate_up: Tensor, out: Tensor, scale: Tensor | None = None) -> None:
    """Launch ``gelu_gate`` over gate_up [rows, 2 * N]; with a scale float32 [] out is E4M3."""
    rows, N = out.shape
    block = 2048 if N % 2048 == 0 else N & -N
    gelu_gate[(N // block, rows)](gate_up, out, scale, N=N, BLOCK=block, num_warps=4)


def patches(images: Tensor, patch: int, out: Tensor) -> None:
    """Launch ``cut_patches``: uint8 [V, H, H, 3] -> out [V, tokens, patch * patch * 3]."""
    V, side = images.shape[:2]
    grid = side // patch
    cut_patches[(grid * grid, V)](images, out, GRID=grid, PATCH=patch,
                                  BLOCK=1 << (patch * patch * 3 - 1).bit_length(), num_warps=4)


def selected(device: torch.device) -> bool:
    """Return whether these kernels agree with torch on ``device``; not inside a capture."""
    return triton_selected('row kernels', device, lambda: _check(device))


def _check(device: torch.device) -> bool:
    """Compare each kernel with torch in float32; also the product with GELU that goes with it."""
    dtype = torch.bfloat16
    agree = []
    for N, bias in ((1152, draw(device, torch.float32, 1152)), (2048, None)):
        x, delta = draw(device, dtype, 9, N, seed=1), draw(device, dtype, 9, N, seed=2)
        weight, y = draw(device, torch.float32, N, seed=3), torch.full_like(x, torch.nan)
        total = x.float() + delta.float()
        norm_rows(x, delta, weight, bias, y, 1e-6)
        expected = (rms_norm(total, weight, 1e-6) if bias is None
                    else layer_norm(total, weight, bias, 1e-6))
        agree += [close(x, total), close(y, expected)]
    qkv, angle = draw(device, dtype, 9, 10 * 64), draw(device, torch.float32, 9, 1, 32, seed=1)
    q = torch.full((9, 8, 64), torch.nan, device=device, dtype=dtype)
    kv = torch.full((9, 2, 1, 64), torch.nan, device=device, dtype=dtype)
    rotate_rows(qkv, angle.cos(), angle.sin(), q, kv)
    whole = qkv.float().view(9, 10, 64)
    turned = rotate(whole, angle.cos(), angle.sin())
    agree += [close(q, turned[:, :8]), close(kv[:, 0], turned[:, 8:9]),
              close(kv[:, 1], whole[:, 9:])]
    gate_up, out = draw(device, dtype, 9, 8192), torch.full((9, 4096), torch.nan, device=device,
                                                            dtype=dtype)
    gate_rows(gate_up, out)
    gate, up = gate_up.float().chunk(2, dim=-1)
    agree.append(close(out, F.gelu(gate, approximate='tanh') * up))
    images = torch.arange(2 * 28 * 28 * 3, device=device).view(2, 28, 28, 3).to(torch.uint8)
    cut = torch.full((2, 4, 588), torch.nan, device=device, dtype=dtype)
    patches(images, 14, cut)
    expected = images.view(2, 2, 14, 2, 14, 3).transpose(2, 3).reshape(2, 4, 588) / 127.5 - 1.0
    agree.append(close(cut, expected))
    x, w = draw(device, dtype, 9, 1152), draw(device, dtype, 4304, 1152, seed=1) / 32
    bias = draw(device, dtype, 4304, seed=2)
    product = torch._addmm_activation(bias, x, w.t(), use_gelu=True)
    expected = F.gelu(F.linear(x.float(), w.float(), bias.float()), approximate='tanh')
    return all(agree) and close(product, expected)


def _variants() -> tuple[Variant, ...]:
    norm = {'x': '*bf16', 'delta': '*bf16', 'weight': '*fp32', 'bias': '*fp32', 'y': '*bf16',
            'eps': 'fp32'} | dict.fromkeys('scale N BLOCK ADD LAYER'.split(), 'constexpr')
    quantised = norm | {'y': '*fp8e4nv', 'scale': '*fp32'}
    gate = {'gate_up': '*bf16', 'out': '*bf16', 'scale': 'constexpr', 'N': 'constexpr',
            'BLOCK': 'constexpr'}
    return (
        Variant(add_norm, norm,
                {'scale': None, 'N': 1152, 'BLOCK': 2048, 'ADD': True, 'LAYER': True}),
        Variant(add_norm, norm,
                {'scale': None, 'N': 2048, 'BLOCK': 2048, 'ADD': True, 'LAYER': False}),
        Variant(add_norm, quantised, {'N': 2048, 'BLOCK': 2048, 'ADD': True, 'LAYER': False},
                archs=FP8_ARCHS),
        Variant(gelu_gate, gate | {'out': '*fp8e4nv', 'scale': '*fp32'},
                {'N': 16384, 'BLOCK': 2048}, archs=FP8_ARCHS),
        Variant(rope_kv,
                {'qkv': '*bf16', 'cos': '*fp32', 'sin': '*fp32', 'q': '*bf16', 'kv': '*bf16'}
                | dict.fromkeys('HEADS KV_HEADS D BLOCK'.split(), 'constexpr'),
                {'HEADS': 8, 'KV_HEADS': 1, 'D': 256, 'BLOCK': 16}),
        Variant(gelu_gate, gate, {'scale': None, 'N': 16384, 'BLOCK': 2048}),
        Variant(cut_patches, {'images': '*u8', 'out': '*bf16', 'GRID': 'constexpr',
                              'PATCH': 'constexpr', 'BLOCK': 'constexpr'},
                {'GRID': 16, 'PATCH': 14, 'BLOCK': 1024}),
    )


VARIANTS = _variants()
