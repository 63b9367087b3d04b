"""Rows on their way into an FP8 product: scaled by their largest value and stored as E4M3.

Alone, behind a residual and norm, or behind the SiLU gate. What a product reads is written once,
in half the bytes.
"""
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
from flashrt_core.nn import fp8
from flashrt_core.nn import rms_norm

if TYPE_CHECKING:
    import triton.language as tl

STORED = fp8.E4M3  # Triton's interpreter (3.7) loses a carry on the way to it: 31.4 becomes 16
BLOCK, GATE_WARPS = 32768, 16  # columns of the gate that a program holds at once


@lazy_jit
def quantise_row(x, y, scale, N: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write x [rows, N] as y in E4M3 and scale [rows]; grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    value = tl.load(x + row * N + n, mask=n < N, other=0.0).to(tl.float32)
    top = tl.max(tl.abs(value), 0)
    top = tl.where(top == 0.0, 1.0, top / 448.0)
    tl.store(y + row * N + n, (value / top).to(y.dtype.element_ty), mask=n < N)
    tl.store(scale + row, top)


@lazy_jit
def quantise_norm(x, delta, weight, y, scale, eps,  # type: ignore[no-untyped-def]
                  N: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr):
    """Do x += delta if ADD, then y and scale = quantised rms_norm(x); grid (rows,)."""
    row = tl.program_id(0)
    at = row.to(tl.int64) * N
    n = tl.arange(0, BLOCK)
    inside = n < N
    value = tl.load(x + at + n, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(delta + at + n, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(x.dtype.element_ty)
        tl.store(x + at + n, rounded, mask=inside)
        value = rounded.to(tl.float32)
    gain = 1.0 + tl.load(weight + n, mask=inside, other=0.0).to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / N + eps) * gain
    value = value.to(x.dtype.element_ty).to(tl.float32)  # as between the reference's layers
    top = tl.max(tl.abs(value), 0)
    top = tl.where(top == 0.0, 1.0, top / 448.0)
    tl.store(y + at + n, (value / top).to(y.dtype.element_ty), mask=inside)
    tl.store(scale + row, top)


@lazy_jit
def quantise_gate(gate_up, y, scale, N: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """
    Write y [rows, N] and scale [rows] = quantised silu(gate) * up of gate_up [rows, 2 * N].

    Made twice, once for the largest value: the second time the row comes from the cache.
    Grid (rows,).
    """
    row = tl.program_id(0).to(tl.int64)
    top = tl.zeros([BLOCK], tl.float32)
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        gate = tl.load(gate_up + row * 2 * N + n, mask=n < N, other=0.0).to(tl.float32)
        up = tl.load(gate_up + row * 2 * N + N + n, mask=n < N, other=0.0)
        value = (gate / (1.0 + tl.exp(-gate)) * up.to(tl.float32)).to(up.dtype)
        top = tl.maximum(top, tl.abs(value.to(tl.float32)))
    largest = tl.max(top, 0)
    largest = tl.where(largest == 0.0, 1.0, largest / 448.0)
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        gate = tl.load(gate_up + row * 2 * N + n, mask=n < N, other=0.0).to(tl.float32)
        up = tl.load(gate_up + row * 2 * N + N + n, mask=n < N, other=0.0)
        value = (gate / (1.0 + tl.exp(-gate)) * up.to(tl.float32)).to(up.dtype)
        value = value.to(tl.float32) / largest
        tl.store(y + row * N + n, value.to(y.dtype.element_ty), mask=n < N)
    tl.store(scale + row, largest)


def quantise(x: Tensor, y: Tensor, scale: Tensor) -> None:
    """Launch ``quantise_row``: contiguous x [T, N] -> y E4M3 [T, N], scale float32 [T]."""
    T, N = x.shape
    quantise_row[(T,)](x, y, scale, N=N, BLOCK=1 << (N - 1).bit_length(), num_warps=8)


def norm(x: Tensor, delta: Tensor | None, weight: Tensor, y: Tensor, scale: Tensor,
         eps: float) -> None:
    """Launch ``quantise_norm``: x [T, N] += delta; its norm -> y E4M3 [T, N], scale [T]."""
    T, N = x.shape
    quantise_norm[(T,)](x, x if delta is None else delta, weight, y, scale, eps, N=N,
                        BLOCK=1 << (N - 1).bit_length(), ADD=delta is not None, num_warps=8)


def gate(gate_up: Tensor, y: Tensor, scale: Tensor) -> None:
    """Launch ``quantise_gate``: gate_up [T, 2 * N] -> y E4M3 [T, N], scale float32 [T]."""
    T, N = y.shape
    quantise_gate[(T,)](gate_up, y, scale, N=N, BLOCK=min(BLOCK, 1 << (N - 1).bit_length()),
                        num_warps=GATE_WARPS)


def selected(device: torch.device) -> bool:
    """Return whether these kernels agree with torch on ``device``; not inside a capture."""
    return triton_selected('fp8 rows', device, lambda: fp8.multiplies(device) and all(
        check(device, torch.bfloat16, T, N, 1e-2) for T, N in ((3, 1024), (40, 5632))))


def check(device: torch.device, dtype: torch.dtype, T: int, N: int, tolerance: float) -> bool:
    """Return whether each row's values agree with float32, within half a step of E4M3."""
    spread = torch.logspace(-2, 2, T, device=device)[:, None]
    x = (draw(device, torch.float32, T, N) * spread).to(dtype)
    x[0] = 0.0
    delta, weight = draw(device, dtype, T, N, seed=1), draw(device, torch.float32, N, seed=2)
    gate_up = draw(device, dtype, T, 2 * N, seed=3)
    gate_up[-1] = 0.0
    y = torch.empty((T, N), device=device, dtype=STORED)
    half = 2.0**-4 if STORED is fp8.E4M3 else 0.0  # a step, relative
    scale = torch.full((T,), torch.nan, device=device)

    def agrees(expected: Tensor) -> bool:
        largest = expected.abs().amax(1)
        wanted = torch.where(largest == 0, 1.0, largest / fp8.LARGEST)
        error = (y.float() * scale[:, None] - expected).abs()
        least = wanted[:, None] * (half * 2.0**-6 + tolerance)  # of the smallest values
        near = error <= expected.abs() * (half + tolerance) + least
        return close(scale, wanted, tolerance) and bool(near.all())

    quantise(x, y, scale)
    agree = [agrees(x.float()), float(scale[0]) == 1.0]
    total = x.float() + delta.float()
    normed = rms_norm(total, weight, 1e-6)
    norm(x, delta, weight, y, scale, 1e-6)
    agree += [agrees(normed), close(x, total, tolerance)]
    norm(x, None, weight, y, scale, 1e-6)
    agree.append(agrees(rms_norm(x.float(), weight, 1e-6)))
    gate(gate_up, y, scale)
    left, right = gate_up.float().chunk(2, dim=1)
    return all(agree) and agrees(F.silu(left) * right) and float(scale[-1]) == 1.0


def _variants() -> tuple[Variant, ...]:
    rows = {'y': '*fp8e4nv', 'scale': '*fp32', 'N': 'constexpr', 'BLOCK': 'constexpr'}
    return (
        Variant(quantise_row, {'x': '*bf16'} | rows, {'N': 6144, 'BLOCK': 8192}, num_warps=8,
                archs=FP8_ARCHS),
        *(Variant(quantise_norm,
                  {'x': '*bf16', 'delta': '*bf16', 'weight': '*fp32', 'eps': 'fp32',
                   'ADD': 'constexpr'} | rows,
                  {'N': 5120, 'BLOCK': 8192, 'ADD': add}, num_warps=8, archs=FP8_ARCHS)
          for add in (False, True)),
        Variant(quantise_gate, {'gate_up': '*bf16'} | rows, {'N': 17408, 'BLOCK': BLOCK},
                num_warps=GATE_WARPS, archs=FP8_ARCHS),
    )


VARIANTS = _variants()
