"""Products of few rows with weights of 4 bits (nn/int4.py): a row's bits are its own.

As row_products, a quarter of the bytes: a group of 128 columns is two tiles of 64, from the low
and the high halves of the same bytes; its sum is multiplied by the group's scale. For many rows
the weight is widened once and multiplied by cuBLAS.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flashrt_core.kernels._four_bits import agree
from flashrt_core.kernels._launch import draw
from flashrt_core.kernels._triton import lazy_jit
from flashrt_core.kernels._triton import triton_selected
from flashrt_core.kernels._triton import Variant
from flashrt_core.kernels.row_products import ROWS
from flashrt_core.kernels.row_products import SPLITS
from flashrt_core.nn import int4
from flashrt_core.nn.int4 import GROUP
from flashrt_core.nn.int4 import HALF

if TYPE_CHECKING:
    import triton.language as tl

# Four bytes to two pairs of low and two of high halves: 0x43 in front makes 128 + q in bfloat16,
# exact; less 136 it is q - 8.
WIDEN = """{
.reg .b32 p, t, one, less;
mov.b32 p, $4;
mov.b32 one, 0x3F803F80;
mov.b32 less, 0xC308C308;
and.b32 t, p, 0x0F0F0F0F;
prmt.b32 $0, t, 0x43434343, 0x4140;
prmt.b32 $1, t, 0x43434343, 0x4342;
shr.b32 p, p, 4;
and.b32 t, p, 0x0F0F0F0F;
prmt.b32 $2, t, 0x43434343, 0x4140;
prmt.b32 $3, t, 0x43434343, 0x4342;
fma.rn.bf16x2 $0, $0, one, less;
fma.rn.bf16x2 $1, $1, one, less;
fma.rn.bf16x2 $2, $2, one, less;
fma.rn.bf16x2 $3, $3, one, less;
}"""


@lazy_jit
def int4_product(a, w, scale, out, M, a_row, scale_row,  # type: ignore[no-untyped-def]
                 N: tl.constexpr, K: tl.constexpr, SPLITS: tl.constexpr, BM: tl.constexpr,
                 BN: tl.constexpr, HALF: tl.constexpr, WIDEN: tl.constexpr, PDL: tl.constexpr):
    """
    Write a [M, K] @ w^T as out [M, N], or, split over K, as partial [SPLITS, M, N].

    w [N, K / 2] bytes, scale [K / (2 * HALF), N], its rows scale_row apart. WIDEN: the assembly
    for bfloat16, '' elsewhere. Grid (row tiles, columns, splits).
    """
    SPAN: tl.constexpr = K // SPLITS
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    first = tl.program_id(2) * SPAN
    if PDL:
        tl.inline_asm_elementwise('griddepcontrol.launch_dependents; // $0', '=r', [],
                                  dtype=tl.int32, is_pure=False, pack=1)
        line = w + tl.minimum(n, N - 1) * (K // 2) + first // 2
        tl.inline_asm_elementwise('prefetch.global.L2 [$1]; // $0', '=r,l', [line],
                                  dtype=tl.int32, is_pure=False, pack=1)
        tl.inline_asm_elementwise('griddepcontrol.wait; // $0', '=r', [],
                                  dtype=tl.int32, is_pure=False, pack=1)
    j = tl.arange(0, HALF)
    total = tl.zeros([BM, BN], tl.float32)
    for start in range(0, SPAN, 2 * HALF):
        k = first + start + j
        x = tl.load(a + m[:, None] * a_row + k[None, :], mask=m[:, None] < M, other=0.0)
        y = tl.load(a + m[:, None] * a_row + k[None, :] + HALF, mask=m[:, None] < M, other=0.0)
        at = (first + start) // 2 + j
        data = tl.load(w + n[None, :] * (K // 2) + at[:, None], mask=n[None, :] < N, other=0)
        factor = tl.load(scale + (first + start) // (2 * HALF) * scale_row + n, mask=n < N,
                         other=0.0)
        if WIDEN == '':
            low = ((data & 15).to(tl.float32) - 8.0).to(x.dtype)
            high = ((data >> 4).to(tl.float32) - 8.0).to(x.dtype)
        else:
            low, high = tl.inline_asm_elementwise(
                WIDEN, '=r,=r,=r,=r,r', [data], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True,
                pack=4)
        total += tl.dot(y, high, tl.dot(x, low)) * factor[None, :]
    to = out + (tl.program_id(2) * M + m[:, None]) * N + n[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


@lazy_jit
def int4_gate_up(a, w, scale, out, M,  # type: ignore[no-untyped-def]
                 N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                 HALF: tl.constexpr, WIDEN: tl.constexpr, PDL: tl.constexpr):
    """
    Write silu(a @ gate^T) * (a @ up^T) as out [M, N]; w [2 * N, K / 2] holds gate, then up.

    scale [K / (2 * HALF), 2 * N]. Grid (row tiles, columns).
    """
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    if PDL:
        tl.inline_asm_elementwise('griddepcontrol.launch_dependents; // $0', '=r', [],
                                  dtype=tl.int32, is_pure=False, pack=1)
        line = w + n * (K // 2)
        tl.inline_asm_elementwise('prefetch.global.L2 [$1]; // $0', '=r,l', [line],
                                  dtype=tl.int32, is_pure=False, pack=1)
        tl.inline_asm_elementwise('prefetch.global.L2 [$1]; // $0', '=r,l', [line + N * K // 2],
                                  dtype=tl.int32, is_pure=False, pack=1)
        tl.inline_asm_elementwise('griddepcontrol.wait; // $0', '=r', [],
                                  dtype=tl.int32, is_pure=False, pack=1)
    j = tl.arange(0, HALF)
    gate = tl.zeros([BM, BN], tl.float32)
    up = tl.zeros([BM, BN], tl.float32)
    for start in range(0, K, 2 * HALF):
        k = start + j
        x = tl.load(a + m[:, None] * K + k[None, :], mask=m[:, None] < M, other=0.0)
        y = tl.load(a + m[:, None] * K + k[None, :] + HALF, mask=m[:, None] < M, other=0.0)
        data = w + n[None, :] * (K // 2) + start // 2 + j[:, None]
        one, two = tl.load(data), tl.load(data + N * K // 2)
        factor = scale + start // (2 * HALF) * 2 * N + n
        if WIDEN == '':
            one_low = ((one & 15).to(tl.float32) - 8.0).to(x.dtype)
            one_high = ((one >> 4).to(tl.float32) - 8.0).to(x.dtype)
            two_low = ((two & 15).to(tl.float32) - 8.0).to(x.dtype)
            two_high = ((two >> 4).to(tl.float32) - 8.0).to(x.dtype)
        else:
            one_low, one_high = tl.inline_asm_elementwise(
                WIDEN, '=r,=r,=r,=r,r', [one], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True,
                pack=4)
            two_low, two_high = tl.inline_asm_elementwise(
                WIDEN, '=r,=r,=r,=r,r', [two], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True,
                pack=4)
        gate += tl.dot(y, one_high, tl.dot(x, one_low)) * tl.load(factor)[None, :]
        up += tl.dot(y, two_high, tl.dot(x, two_low)) * tl.load(factor + N)[None, :]
    value = gate / (1.0 + tl.exp(-gate)) * up
    to = out + m[:, None] * N + n[None, :]
    tl.store(to, value.to(out.dtype.element_ty), mask=m[:, None] < M)


@lazy_jit
def int4_widen(w, scale, out, scale_row,  # type: ignore[no-untyped-def]
               N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, HALF: tl.constexpr,
               WIDEN: tl.constexpr):
    """Write w [N, K / 2] as its values, out [N, K]; grid (rows, groups)."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)[:, None]
    group = tl.program_id(1)
    j = tl.arange(0, HALF)[None, :]
    data = tl.load(w + n.to(tl.int64) * (K // 2) + group * HALF + j, mask=n < N, other=0)
    factor = tl.load(scale + group * scale_row + n, mask=n < N, other=0.0)
    if WIDEN == '':
        low, high = (data & 15).to(tl.float32) - 8.0, (data >> 4).to(tl.float32) - 8.0
    else:
        low, high = tl.inline_asm_elementwise(
            WIDEN, '=r,=r,=r,=r,r', [data], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True,
            pack=4)
    low, high = low.to(tl.float32) * factor, high.to(tl.float32) * factor
    to = out + n.to(tl.int64) * K + group * 2 * HALF + j
    tl.store(to, low.to(out.dtype.element_ty), mask=n < N)
    tl.store(to + HALF, high.to(out.dtype.element_ty), mask=n < N)


# Tiles: columns, warps, stages.
Tile = tuple[int, int, int]
WIDE_TILE: Tile = (32, 4, 6)
GATED_TILE: Tile = (32, 4, 5)
WIDEN_ROWS = 32


def product(a: Tensor, w: int4.Int4Weight, out: Tensor, pdl: bool = False) -> None:
    """
    Launch ``int4_product``: a [M, K] (rows may be strided), w [N, K] -> out.

    out [M, N] of any dtype, or float32 partial sums [splits, M, N] for ``row_products.fold``.

    :raises ValueError: a split that is no whole number of groups.
    """
    splits = out.shape[0] if out.dim() == 3 else 1
    (M, K), N = a.shape, w.data.shape[0]
    if K % (splits * GROUP):
        raise ValueError(f'a product over {K} in {splits} splits has no whole groups of {GROUP}')
    BN, warps, stages = WIDE_TILE
    int4_product[(-(-M // ROWS), -(-N // BN), splits)](
        a, w.data, w.scale, out, M, a.stride(0), w.scale.stride(0), N=N, K=K, SPLITS=splits,
        BM=ROWS, BN=BN, HALF=HALF, WIDEN=_assembly(a), PDL=pdl, num_warps=warps,
        num_stages=stages, launch_pdl=pdl)


def gated(a: Tensor, w: int4.Int4Weight, out: Tensor, pdl: bool = False) -> None:
    """
    Launch ``int4_gate_up``: a [M, K], w [2 * N, K] -> out [M, N].

    :raises ValueError: sizes that the fixed tiles do not divide.
    """
    (M, K), N = a.shape, out.shape[1]
    BN, warps, stages = GATED_TILE
    if N % BN or K % GROUP:
        raise ValueError(f'a gated product of {N} x {K} does not fit tiles of {BN} x {GROUP}')
    int4_gate_up[(-(-M // ROWS), N // BN)](
        a, w.data, w.scale, out, M, N=N, K=K, BM=ROWS, BN=BN, HALF=HALF, WIDEN=_assembly(a),
        PDL=pdl, num_warps=warps, num_stages=stages, launch_pdl=pdl)


def widen(w: int4.Int4Weight, out: Tensor) -> Tensor:
    """Launch ``int4_widen``: the values of w as out [N, K], which is returned."""
    N, K = out.shape
    int4_widen[(-(-N // WIDEN_ROWS), K // GROUP)](
        w.data, w.scale, out, w.scale.stride(0), N=N, K=K, BN=WIDEN_ROWS, HALF=HALF,
        WIDEN=_assembly(out), num_warps=4)
    return out


def _assembly(a: Tensor) -> str:
    return WIDEN if a.dtype is torch.bfloat16 else ''


def selected(device: torch.device) -> bool:
    """Return whether these kernels agree with torch on ``device``; not inside a capture."""
    return triton_selected('row products, int4', device,
                           lambda: check(device, torch.bfloat16, 2080, 1024, 1e-2))


def check(device: torch.device, dtype: torch.dtype, N: int, K: int, tolerance: float) -> bool:
    """Return whether 16 rows agree with float32 within ``tolerance``, and bitwise with each."""
    spread = torch.logspace(-2, 2, N, device=device)[:, None]  # each channel has its scale
    w = int4.quantise(draw(device, torch.float32, N, K, seed=1) / 32 * spread)
    return agree(product, gated, widen, w, dtype, GATED_TILE[0], tolerance)


def _variants() -> tuple[Variant, ...]:
    found: list[Variant] = []
    types = {'a': '*bf16', 'w': '*u8', 'scale': '*fp32', 'M': 'i32'}
    boards: tuple[tuple[bool, tuple[int, ...]], ...] = ((False, (87,)), (True, (90, 110, 121)))
    for pdl, archs in boards:
        for N, K, splits, kind in ((16480, 5120, 1, '*bf16'), (5120, 17408, SPLITS, '*fp32')):
            values = {'N': N, 'K': K, 'SPLITS': splits, 'BM': ROWS, 'BN': WIDE_TILE[0],
                      'HALF': HALF, 'WIDEN': WIDEN, 'PDL': pdl}
            found.append(Variant(
                int4_product, types | {'out': kind, 'a_row': 'i32', 'scale_row': 'i32'}
                | dict.fromkeys(values, 'constexpr'), values, num_warps=WIDE_TILE[1],
                num_stages=WIDE_TILE[2], archs=archs))
        values = {'N': 17408, 'K': 5120, 'BM': ROWS, 'BN': GATED_TILE[0], 'HALF': HALF,
                  'WIDEN': WIDEN, 'PDL': pdl}
        found.append(Variant(
            int4_gate_up, types | {'out': '*bf16'} | dict.fromkeys(values, 'constexpr'), values,
            num_warps=GATED_TILE[1], num_stages=GATED_TILE[2], archs=archs))
    values = {'N': 5120, 'K': 17408, 'BN': WIDEN_ROWS, 'HALF': HALF, 'WIDEN': WIDEN}
    found.append(Variant(
        int4_widen, {'w': '*u8', 'scale': '*fp32', 'out': '*bf16', 'scale_row': 'i32'}
        | dict.fromkeys(values, 'constexpr'), values))
    return tuple(found)


VARIANTS = _variants()
