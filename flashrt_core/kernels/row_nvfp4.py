"""Products of few rows with weights in NVFP4 (nn/nvfp4.py): a row's bits are its own.

As row_int4, but a scale is of 16 values: it meets the value before the product. E2M1 times E4M3
is exact in bfloat16, so a sum is that of the weights themselves; a row's scale multiplies it. No
instruction knows FP4 or FP8, bits are moved to where bfloat16 has them. For many rows the weight
is widened once and multiplied by cuBLAS.
"""
from __future__ import annotations

from itertools import product as combinations
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flashrt_core.kernels._four_bits import agree
from flashrt_core.kernels._launch import draw
from flashrt_core.kernels._launch import overlaps
from flashrt_core.kernels._triton import lazy_jit
from flashrt_core.kernels._triton import triton_selected
from flashrt_core.kernels._triton import Variant
from flashrt_core.kernels.row_products import ROWS
from flashrt_core.kernels.row_products import SPLITS
from flashrt_core.kernels.row_products import STEP
from flashrt_core.kernels.row_products import step
from flashrt_core.nn import nvfp4
from flashrt_core.nn.nvfp4 import GROUP

if TYPE_CHECKING:
    import triton.language as tl

# Four bytes, and a factor for each, to two pairs of low and two of high halves times the factors.
# Sign, exponent and mantissa of E2M1 (seem) go to bits 15, 8, 7 and 6 of bfloat16: 2**-126 of the
# value, 0.5 a subnormal as in E2M1. The bytes are taken in the order 0, 2, 1, 3, so that pairs
# are 16 bits apart.
WIDEN = """{
.reg .b32 q, s, t, one, two, left, right, none;
prmt.b32 q, $4, 0, 0x3120;
mov.b32 left, $5;
mov.b32 right, $6;
mov.b32 none, 0x80008000;
shl.b32 s, q, 12;
shl.b32 t, q, 6;
and.b32 s, s, 0x80008000;
and.b32 t, t, 0x01C001C0;
or.b32 one, s, t;
shl.b32 s, q, 8;
shl.b32 t, q, 2;
and.b32 s, s, 0x80008000;
and.b32 t, t, 0x01C001C0;
or.b32 two, s, t;
fma.rn.bf16x2 $0, one, left, none;
fma.rn.bf16x2 $2, two, left, none;
shl.b32 s, q, 4;
shr.b32 t, q, 2;
and.b32 s, s, 0x80008000;
and.b32 t, t, 0x01C001C0;
or.b32 one, s, t;
shr.b32 t, q, 6;
and.b32 s, q, 0x80008000;
and.b32 t, t, 0x01C001C0;
or.b32 two, s, t;
fma.rn.bf16x2 $1, one, right, none;
fma.rn.bf16x2 $3, two, right, none;
}"""


@lazy_jit
def nvfp4_product(a, w, scale, whole, out, M, a_row,  # type: ignore[no-untyped-def]
                  N: tl.constexpr, K: tl.constexpr, SCALE_ROW: tl.constexpr,
                  SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                  GATED: tl.constexpr, WIDEN: tl.constexpr, PDL: tl.constexpr):
    """
    Write a [M, K] @ w^T as out [M, N], or, split over K, as partial [SPLITS, M, N].

    w [N, K / 2] bytes, scale [K / 16, N] E4M3 as bytes, its rows SCALE_ROW apart, whole [N]. If
    GATED, w holds N rows of gate, then N of up, a tile takes BN / 2 of each and writes
    silu(gate) * up. WIDEN: the assembly for bfloat16, '' elsewhere. Grid (row tiles, columns,
    splits).
    """
    SPAN: tl.constexpr = K // SPLITS
    COLUMNS: tl.constexpr = BN // 2 if GATED else BN
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.arange(0, BN)
    n = tl.program_id(1) * COLUMNS + n % COLUMNS + n // COLUMNS * N
    first = tl.program_id(2) * SPAN
    if PDL:
        tl.inline_asm_elementwise('griddepcontrol.launch_dependents; // $0', '=r', [],
                                  dtype=tl.int32, is_pure=False, pack=1)
        line = w + tl.minimum(n, 2 * N - 1 if GATED else N - 1) * (K // 2) + first // 2
        tl.inline_asm_elementwise('prefetch.global.L2 [$1]; // $0', '=r,l', [line],
                                  dtype=tl.int32, is_pure=False, pack=1)
        tl.inline_asm_elementwise('griddepcontrol.wait; // $0', '=r', [],
                                  dtype=tl.int32, is_pure=False, pack=1)
    inside = n < (2 * N if GATED else N)
    j = tl.arange(0, BK // 2)
    column = j // 8 * 16 + j % 8  # of a byte's low half; that of its high half is 8 further
    block = tl.arange(0, BK // 16)
    total = tl.zeros([BM, BN], tl.float32)
    for start in range(0, SPAN, BK):
        k = first + start + column
        x = tl.load(a + m[:, None] * a_row + k[None, :], mask=m[:, None] < M, other=0.0)
        y = tl.load(a + m[:, None] * a_row + k[None, :] + 8, mask=m[:, None] < M, other=0.0)
        data = tl.load(w + n[None, :] * (K // 2) + ((first + start) // 2 + j)[:, None],
                       mask=inside[None, :], other=0)
        at = (first + start) // 16 + block
        bits = tl.load(scale + at[:, None] * SCALE_ROW + n[None, :], mask=inside[None, :],
                       other=0).to(tl.int32)
        # Its bits in float32 are 2**-120 of E4M3; this is 2**118 of it, in steps that float32 has.
        factor = (bits << 20).to(tl.float32, bitcast=True) * 2.0**119 * 2.0**119
        factor = tl.broadcast_to(factor.to(x.dtype)[:, None, :], [BK // 16, 8, BN])
        factor = tl.reshape(factor, [BK // 2, BN])
        if WIDEN == '':
            low, high = (data & 7).to(tl.float32), (data >> 4 & 7).to(tl.float32)
            low = tl.where(low < 4, low / 2, tl.where(low < 6, low - 2, 2 * low - 8))
            high = tl.where(high < 4, high / 2, tl.where(high < 6, high - 2, 2 * high - 8))
            factor = factor.to(tl.float32) * 2.0**-126
            low = (tl.where((data & 8) != 0, -low, low) * factor).to(x.dtype)
            high = (tl.where((data & 128) != 0, -high, high) * factor).to(x.dtype)
        else:
            low, high = tl.inline_asm_elementwise(
                WIDEN, '=r,=r,=r,=r,r,r,r', [data, factor], dtype=(tl.bfloat16, tl.bfloat16),
                is_pure=True, pack=4)
        total = tl.dot(y, high, tl.dot(x, low, total))
    total *= (tl.load(whole + n, mask=inside, other=0.0) * 256.0)[None, :]
    if GATED:
        pairs = tl.permute(tl.reshape(total, [BM, 2, COLUMNS]), [0, 2, 1])
        gate, up = tl.split(pairs)
        total = gate / (1.0 + tl.exp(-gate)) * up
        n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    to = out + (tl.program_id(2) * M + m[:, None]) * N + n[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


@lazy_jit
def nvfp4_widen(w, scale, whole, out,  # type: ignore[no-untyped-def]
                N: tl.constexpr, K: tl.constexpr, SCALE_ROW: tl.constexpr, BN: tl.constexpr,
                BK: tl.constexpr):
    """Write w [N, K / 2] as its values, out [N, K]; grid (rows, tiles of K)."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)[:, None]
    first = tl.program_id(1) * BK
    j = tl.arange(0, BK // 2)[None, :]
    inside = n < N
    data = tl.load(w + n.to(tl.int64) * (K // 2) + first // 2 + j, mask=inside, other=0)
    at = first // 16 + tl.arange(0, BK // 16)[None, :]
    bits = tl.load(scale + at * SCALE_ROW + n, mask=inside, other=0).to(tl.int32)
    factor = (bits << 20).to(tl.float32, bitcast=True) * 2.0**120  # E4M3
    factor = tl.reshape(tl.broadcast_to(factor[:, :, None], [BN, BK // 16, 8]), [BN, BK // 2])
    low, high = (data & 7).to(tl.float32), (data >> 4 & 7).to(tl.float32)
    low = tl.where(low < 4, low / 2, tl.where(low < 6, low - 2, 2 * low - 8)) * factor
    high = tl.where(high < 4, high / 2, tl.where(high < 6, high - 2, 2 * high - 8)) * factor
    row = tl.load(whole + n, mask=inside, other=0.0)
    low = tl.where((data & 8) != 0, -low, low) * row
    high = tl.where((data & 128) != 0, -high, high) * row
    to = out + n.to(tl.int64) * K + first + j // 8 * 16 + j % 8
    tl.store(to, low.to(out.dtype.element_ty), mask=inside)
    tl.store(to + 8, high.to(out.dtype.element_ty), mask=inside)


# Tiles: columns, K, warps, stages. Of less K or fewer columns a thread's share of the scales is
# under four bytes, and no loop asks for them ahead.
Tile = tuple[int, int, int, int]
WIDE_TILE: Tile = (32, 256, 4, 4)
GATED_TILE: Tile = (32, 128, 4, 5)
WIDEN_ROWS = 32


def product(a: Tensor, w: nvfp4.Nvfp4Weight, out: Tensor, pdl: bool = False) -> None:
    """
    Launch ``nvfp4_product``: a [M, K] (rows may be strided), w [N, K] -> out.

    out [M, N] of any dtype, or float32 partial sums [splits, M, N] for ``row_products.fold``.

    :raises ValueError: a split that the steps do not divide.
    """
    _launch(a, w, out, out.shape[0] if out.dim() == 3 else 1, WIDE_TILE, False, pdl)


def gated(a: Tensor, w: nvfp4.Nvfp4Weight, out: Tensor, pdl: bool = False) -> None:
    """
    Launch ``nvfp4_product``, gated: a [M, K], w [2 * N, K] -> out [M, N].

    :raises ValueError: sizes that the fixed tiles do not divide.
    """
    columns = GATED_TILE[0]
    if out.shape[1] % columns:
        raise ValueError(f'a gated product of {out.shape[1]} columns does not fit tiles of '
                         f'{columns}')
    _launch(a, w, out, 1, (2 * columns, *GATED_TILE[1:]), True, pdl)


def _launch(a: Tensor, w: nvfp4.Nvfp4Weight, out: Tensor, splits: int, tile: Tile, is_gated: bool,
            pdl: bool) -> None:
    (M, K), N, (BN, BK, warps, stages) = a.shape, out.shape[-1], tile
    columns = BN // 2 if is_gated else BN
    nvfp4_product[(-(-M // ROWS), -(-N // columns), splits)](
        a, w.data, w.scale.view(torch.uint8), w.whole, out, M, a.stride(0), N=N, K=K,
        SCALE_ROW=w.scale.stride(0), SPLITS=splits, BM=ROWS, BN=BN, BK=step(BK, K, splits),
        GATED=is_gated, WIDEN=WIDEN if a.dtype is torch.bfloat16 else '', PDL=pdl,
        num_warps=warps, num_stages=stages, launch_pdl=pdl)


def widen(w: nvfp4.Nvfp4Weight, out: Tensor) -> Tensor:
    """
    Launch ``nvfp4_widen``: the values of w as out [N, K], which is returned.

    :raises ValueError: a K that the fixed tiles do not divide.
    """
    (N, K), BK = out.shape, step(STEP, out.shape[1])
    nvfp4_widen[(-(-N // WIDEN_ROWS), K // BK)](
        w.data, w.scale.view(torch.uint8), w.whole, out, N=N, K=K, SCALE_ROW=w.scale.stride(0),
        BN=WIDEN_ROWS, BK=BK, num_warps=4)
    return out


def selected(device: torch.device) -> bool:
    """Return whether these kernels agree with torch on ``device``; not inside a capture."""
    return triton_selected('row products, nvfp4', device,
                           lambda: check(device, torch.bfloat16, 2080, 1024, 1e-2))


def check(device: torch.device, dtype: torch.dtype, N: int, K: int, tolerance: float) -> bool:
    """
    Return whether 16 rows agree with float32 within ``tolerance``, and bitwise with each.

    A row that is 1 at one column gives that column's values, bit by bit: of a block whose scale
    is a subnormal, and of another.
    """
    spread = torch.logspace(-2, 2, N, device=device)[:, None]  # each channel has its scale
    drawn = draw(device, torch.float32, N, K, seed=1) / 32 * spread
    drawn[:, :GROUP] *= 1e-5
    drawn[:, GROUP:2 * GROUP] = 0.0
    w = nvfp4.quantise(drawn)
    values, ones = w.values().to(dtype), torch.eye(K, device=device, dtype=dtype)
    exact = []
    for block in (slice(0, GROUP), slice(K - GROUP, K)):
        out = torch.full((GROUP, N), torch.nan, device=device, dtype=dtype)
        product(ones[block], w, out, overlaps(device))
        exact.append(torch.equal(out, values[:, block].t()))
    return all(exact) and agree(product, gated, widen, w, dtype, GATED_TILE[0], tolerance)


def _variants() -> tuple[Variant, ...]:
    found: list[Variant] = []
    types = {'a': '*bf16', 'w': '*u8', 'scale': '*u8', 'whole': '*fp32', 'M': 'i32',
             'a_row': 'i32'}
    boards: tuple[tuple[bool, tuple[int, ...]], ...] = ((False, (87,)), (True, (90, 110, 121)))
    sizes = ((16480, 5120, 1, False), (5120, 17408, SPLITS, False), (17408, 5120, 1, True))
    for (pdl, archs), (N, K, splits, is_gated) in combinations(boards, sizes):
        BN, BK, warps, stages = GATED_TILE if is_gated else WIDE_TILE
        values = {'N': N, 'K': K, 'SCALE_ROW': 2 * N if is_gated else N, 'SPLITS': splits,
                  'BM': ROWS, 'BN': 2 * BN if is_gated else BN, 'BK': BK, 'GATED': is_gated,
                  'WIDEN': WIDEN, 'PDL': pdl}
        found.append(Variant(
            nvfp4_product, types | {'out': '*fp32' if splits > 1 else '*bf16'}
            | dict.fromkeys(values, 'constexpr'), values, num_warps=warps, num_stages=stages,
            archs=archs))
    values = {'N': 5120, 'K': 17408, 'SCALE_ROW': 5120, 'BN': WIDEN_ROWS, 'BK': STEP}
    found.append(Variant(
        nvfp4_widen, {'w': '*u8', 'scale': '*u8', 'whole': '*fp32', 'out': '*bf16'}
        | dict.fromkeys(values, 'constexpr'), values))
    return tuple(found)


VARIANTS = _variants()
