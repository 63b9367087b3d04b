"""Matrix products with few rows, bound by the weights' bytes: split over K, or gated.

Each program owns a fixed tile and walks K in a fixed order; splits leave float32 partial sums that
the next kernel folds in a fixed order. A row's bits depend on nothing but the row.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from flashrt_core.kernels._launch import close
from flashrt_core.kernels._launch import draw
from flashrt_core.kernels._launch import overlaps
from flashrt_core.kernels._triton import lazy_jit
from flashrt_core.kernels._triton import LazyKernel
from flashrt_core.kernels._triton import triton_selected
from flashrt_core.kernels._triton import Variant
from flashrt_core.nn.fp8 import Weight

if TYPE_CHECKING:
    import triton.language as tl


@lazy_jit
def matmul_split(a, w, partial, M,  # type: ignore[no-untyped-def]
                 N: tl.constexpr, K: tl.constexpr, SPLITS: tl.constexpr,
                 BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                 PDL: tl.constexpr):
    """Write a [M, K] @ w [N, K]^T as partial [SPLITS, M, N]; grid (rows, columns, splits)."""
    SPAN: tl.constexpr = K // SPLITS
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    first = tl.program_id(2) * SPAN
    if PDL:
        tl.inline_asm_elementwise('griddepcontrol.launch_dependents; // $0', '=r', [],
                                  dtype=tl.int32, is_pure=False, pack=1)
    if SPAN == BK:  # one tile: its weights are loaded before the inputs are ready
        k = first + tl.arange(0, BK)
        y = tl.load(w + n[None, :] * K + k[:, None])
        if PDL:
            tl.inline_asm_elementwise('griddepcontrol.wait; // $0', '=r', [],
                                      dtype=tl.int32, is_pure=False, pack=1)
        x = tl.load(a + m[:, None] * K + k[None, :], mask=m[:, None] < M, other=0.0)
        total = tl.dot(x, y)
    else:
        if PDL:
            tl.inline_asm_elementwise('griddepcontrol.wait; // $0', '=r', [],
                                      dtype=tl.int32, is_pure=False, pack=1)
        total = tl.zeros([BM, BN], tl.float32)
        for start in range(0, SPAN, BK):
            k = first + start + tl.arange(0, BK)
            x = tl.load(a + m[:, None] * K + k[None, :], mask=m[:, None] < M, other=0.0)
            y = tl.load(w + n[None, :] * K + k[:, None])
            total = tl.dot(x, y, total)
    to = partial + (tl.program_id(2) * M + m[:, None]) * N + n[None, :]
    tl.store(to, total, mask=m[:, None] < M)


@lazy_jit
def gate_up_gelu(a, w, out, M,  # type: ignore[no-untyped-def]
                 N: tl.constexpr, K: tl.constexpr,
                 BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                 PDL: tl.constexpr):
    """
    Write gelu(a @ gate^T) * (a @ up^T) as out [M, N]; w [2 * N, K] holds gate, then up.

    A program's columns of both are one tile, asked into L2 before the inputs are ready.
    Grid (rows, columns).
    """
    LINE: tl.constexpr = 1024 // w.dtype.element_ty.primitive_bitwidth
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    begin = tl.program_id(1) * BN
    j = tl.arange(0, 2 * BN)
    n = begin + j % BN + (j // BN) * N
    if PDL:
        tl.inline_asm_elementwise('griddepcontrol.launch_dependents; // $0', '=r', [],
                                  dtype=tl.int32, is_pure=False, pack=1)
        line = n[:, None] * K + tl.arange(0, K // LINE)[None, :] * LINE
        tl.inline_asm_elementwise('prefetch.global.L2 [$1]; // $0', '=r,l',
                                  [(w + line).to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)
    if PDL:
        tl.inline_asm_elementwise('griddepcontrol.wait; // $0', '=r', [],
                                  dtype=tl.int32, is_pure=False, pack=1)
    both = tl.zeros([BM, 2 * BN], tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        x = tl.load(a + m[:, None] * K + k[None, :], mask=m[:, None] < M, other=0.0)
        both = tl.dot(x, tl.load(w + n[None, :] * K + k[:, None]), both)
    gate, up = tl.split(tl.permute(tl.reshape(both, [BM, 2, BN]), (0, 2, 1)))
    # gelu by tanh, written as x * sigmoid(2 u)
    u = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    value = gate / (1.0 + tl.exp(-2.0 * u)) * up
    to = out + m[:, None].to(tl.int64) * N + begin + tl.arange(0, BN)[None, :]
    tl.store(to, value.to(out.dtype.element_ty), mask=m[:, None] < M)


# Tiles: columns, K, warps, stages. With one split's K as tile the weights are loaded early.
Tile = tuple[int, int, int, int]
SPLIT_TILE: Tile = (64, 128, 4, 4)
WHOLE_TILE: Tile = (64, 256, 4, 1)
FLOAT_TILE: Tile = (64, 64, 4, 3)
GATED_TILE: Tile = (32, 128, 4, 4)


def split_product(a: Tensor, w: Weight, partial: Tensor, tile: Tile = SPLIT_TILE,
                  pdl: bool = False) -> None:
    """
    Launch ``matmul_split``: a [M, K], w [N, K] -> float32 partial [splits, M, N].

    :raises ValueError: sizes that the fixed tiles do not divide.
    """
    splits, rows, N = partial.shape
    K = a.shape[1]
    BN, BK, warps, stages = tile
    BK = min(BK, K // splits)
    if N % BN or K % (splits * BK):
        raise ValueError(f'a product of {N} x {K} in {splits} splits does not fit tiles')
    grid = (-(-rows // 64), N // BN, splits)
    matmul_split[grid](a, operand(w), partial, rows, N=N, K=K, SPLITS=splits, BM=64, BN=BN, BK=BK,
                       PDL=pdl, num_warps=warps, num_stages=stages, launch_pdl=pdl)


def gated(a: Tensor, w: Weight, out: Tensor, pdl: bool = False) -> None:
    """Launch ``gate_up_gelu`` for few rows: a [M, K], w [2 * N, K] -> out [M, N]."""
    rows, N = out.shape
    K = a.shape[1]
    BN, BK, warps, stages = GATED_TILE
    BK = min(BK, K)
    if N % BN or K % BK:
        raise ValueError(f'a gated product of {N} x {K} does not fit tiles')
    grid = (-(-rows // 64), N // BN)
    gate_up_gelu[grid](a, operand(w), out, rows, N=N, K=K, BM=64, BN=BN, BK=BK,
                       PDL=pdl, num_warps=warps, num_stages=stages, launch_pdl=pdl)


def operand(w: Weight) -> Tensor:
    """Return the weight [N, K] that a kernel reads; an expert's is never quantised or watched."""
    assert isinstance(w, Tensor), 'of quantised and watched weights these kernels know nothing'
    return w


def gated_reference(a: Tensor, w: Tensor) -> Tensor:
    """What ``gated`` computes, in float32."""
    gate, up = F.linear(a.float(), w.float()).chunk(2, dim=-1)
    return F.gelu(gate, approximate='tanh') * up


def selected(device: torch.device) -> bool:
    """Return whether these kernels agree with torch on ``device``; not inside a capture."""
    return triton_selected('skinny products', device, lambda: _check(device))


def _check(device: torch.device) -> bool:
    """Compare both products, over two row tiles, with torch in float32."""
    pdl, dtype = overlaps(device), torch.bfloat16
    agree = []
    for K, tile in ((2048, WHOLE_TILE), (4096, SPLIT_TILE)):
        a, w = draw(device, dtype, 70, K), draw(device, dtype, 1024, K, seed=1)
        partial = torch.full((8, 70, 1024), torch.nan, device=device)
        split_product(a, w, partial, tile, pdl)
        agree.append(close(partial.sum(0), F.linear(a.float(), w.float())))
    a, w = draw(device, torch.float32, 50, 1024), draw(device, torch.float32, 1024, 1024, seed=2)
    partial = torch.full((4, 50, 1024), torch.nan, device=device)
    split_product(a, w, partial, FLOAT_TILE, pdl)
    agree.append(close(partial.sum(0), F.linear(a, w), 2e-3))
    a, w = draw(device, dtype, 70, 1024), draw(device, dtype, 2048, 1024, seed=3) / 32
    out = torch.full((70, 1024), torch.nan, device=device, dtype=dtype)
    gated(a, w, out, pdl)
    return all(agree) and close(out, gated_reference(a, w))


def _variants() -> tuple[Variant, ...]:
    found: list[Variant] = []
    types = {'a': '*bf16', 'w': '*bf16', 'partial': '*fp32', 'M': 'i32'}
    single = types | {'a': '*fp32', 'w': '*fp32'}
    gate = {'a': '*bf16', 'w': '*bf16', 'out': '*bf16', 'M': 'i32'}

    def add(kernel: LazyKernel, types: dict[str, str], archs: tuple[int, ...], tile: Tile,
            **values: object) -> None:
        values |= {'BM': 64, 'BN': tile[0], 'BK': tile[1]}
        found.append(Variant(kernel, types | dict.fromkeys(values, 'constexpr'), values,
                             num_warps=tile[2], num_stages=tile[3], archs=archs))

    boards: tuple[tuple[bool, tuple[int, ...]], ...] = ((False, (87,)), (True, (90, 110)))
    for pdl, archs in boards:
        for kind, K, splits, tile in ((types, 2048, 8, WHOLE_TILE), (types, 4096, 8, SPLIT_TILE),
                                      (single, 1024, 4, FLOAT_TILE)):
            add(matmul_split, kind, archs, tile, N=1024, K=K, SPLITS=splits, PDL=pdl)
        add(gate_up_gelu, gate, archs, GATED_TILE, N=4096, K=1024, PDL=pdl)
    return tuple(found)


VARIANTS = _variants()
