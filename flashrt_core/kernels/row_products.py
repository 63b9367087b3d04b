"""Matrix products of few rows for decode, verify and branches: a row's bits are its own.

The row tile is fixed at 16, so the same matrix instructions run for 1 and for 16 rows; K is walked
in a fixed order in a fixed number of splits, and splits are folded in a fixed order. Bound by the
weights' bytes: before the inputs are ready each program asks for its first weights into L2. FP8
weights are half of them: a tile is widened once it is loaded, the sum scaled channel by channel.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from flashrt_core.kernels._launch import close
from flashrt_core.kernels._launch import draw
from flashrt_core.kernels._launch import overlaps
from flashrt_core.kernels._triton import FP8_ARCHS
from flashrt_core.kernels._triton import lazy_jit
from flashrt_core.kernels._triton import triton_selected
from flashrt_core.kernels._triton import Variant
from flashrt_core.nn import fp8
from flashrt_core.nn import rms_norm

if TYPE_CHECKING:
    import triton.language as tl

ROWS = 16  # of every tile: the smallest matrix instruction


@lazy_jit
def row_product(a, w, scale, out, M, a_row,  # type: ignore[no-untyped-def]
                N: tl.constexpr, K: tl.constexpr, SPLITS: tl.constexpr, BM: tl.constexpr,
                BN: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr, FP8: tl.constexpr,
                PDL: tl.constexpr):
    """
    Write a [M, K] @ w [N, K]^T as out [M, N], or, split over K, as partial [SPLITS, M, N].

    If FP8, the columns of the sum are multiplied by scale [N]. EARLY columns of K are asked for
    before the inputs are ready. Grid (row tiles, columns, splits).
    """
    SPAN: tl.constexpr = K // SPLITS
    LINE: tl.constexpr = 1024 // w.dtype.element_ty.primitive_bitwidth  # columns in 128 bytes
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    first = tl.program_id(2) * SPAN
    if PDL:
        tl.inline_asm_elementwise('griddepcontrol.launch_dependents; // $0', '=r', [],
                                  dtype=tl.int32, is_pure=False, pack=1)
        if EARLY >= LINE:
            line = w + tl.minimum(n, N - 1)[:, None] * K + first
            line += tl.arange(0, EARLY // LINE)[None, :] * LINE
            tl.inline_asm_elementwise('prefetch.global.L2 [$1]; // $0', '=r,l', [line],
                                      dtype=tl.int32, is_pure=False, pack=1)
        tl.inline_asm_elementwise('griddepcontrol.wait; // $0', '=r', [],
                                  dtype=tl.int32, is_pure=False, pack=1)
    total = tl.zeros([BM, BN], tl.float32)
    for start in range(0, SPAN, BK):
        k = first + start + tl.arange(0, BK)
        x = tl.load(a + m[:, None] * a_row + k[None, :], mask=m[:, None] < M, other=0.0)
        if N % BN == 0:
            y = tl.load(w + n[None, :] * K + k[:, None])
        else:
            y = tl.load(w + n[None, :] * K + k[:, None], mask=n[None, :] < N, other=0.0)
        if FP8:  # by way of float32: the direct conversion is slow on Hopper
            y = y.to(tl.float32).to(x.dtype)
        total = tl.dot(x, y, total)
    if FP8:
        total *= tl.load(scale + n, mask=n < N, other=0.0)[None, :]
    to = out + (tl.program_id(2) * M + m[:, None]) * N + n[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


@lazy_jit
def row_gate_up(a, w, scale, out, M,  # type: ignore[no-untyped-def]
                N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                BK: tl.constexpr, EARLY: tl.constexpr, FP8: tl.constexpr, PDL: tl.constexpr):
    """
    Write silu(a @ gate^T) * (a @ up^T) as out [M, N]; w [2 * N, K] holds gate, then up.

    If FP8, both sums are multiplied by scale [2 * N]. Grid (row tiles, columns).
    """
    LINE: tl.constexpr = 1024 // w.dtype.element_ty.primitive_bitwidth
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    if PDL:
        tl.inline_asm_elementwise('griddepcontrol.launch_dependents; // $0', '=r', [],
                                  dtype=tl.int32, is_pure=False, pack=1)
        if EARLY >= LINE:
            line = w + n[:, None] * K + tl.arange(0, EARLY // LINE)[None, :] * LINE
            tl.inline_asm_elementwise('prefetch.global.L2 [$1]; // $0', '=r,l', [line],
                                      dtype=tl.int32, is_pure=False, pack=1)
            tl.inline_asm_elementwise('prefetch.global.L2 [$1]; // $0', '=r,l', [line + N * K],
                                      dtype=tl.int32, is_pure=False, pack=1)
        tl.inline_asm_elementwise('griddepcontrol.wait; // $0', '=r', [],
                                  dtype=tl.int32, is_pure=False, pack=1)
    gate = tl.zeros([BM, BN], tl.float32)
    up = tl.zeros([BM, BN], tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        x = tl.load(a + m[:, None] * K + k[None, :], mask=m[:, None] < M, other=0.0)
        weight = w + n[None, :] * K + k[:, None]
        y, z = tl.load(weight), tl.load(weight + N * K)
        if FP8:
            y, z = y.to(tl.float32).to(x.dtype), z.to(tl.float32).to(x.dtype)
        gate = tl.dot(x, y, gate)
        up = tl.dot(x, z, up)
    if FP8:
        gate *= tl.load(scale + n)[None, :]
        up *= tl.load(scale + N + n)[None, :]
    value = gate / (1.0 + tl.exp(-gate)) * up
    to = out + m[:, None] * N + n[None, :]
    tl.store(to, value.to(out.dtype.element_ty), mask=m[:, None] < M)


@lazy_jit
def row_fold(x, partial, weight, y, M, eps,  # type: ignore[no-untyped-def]
             N: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr):
    """Add partial [SPLITS, M, N] to x [M, N] and write y = rms_norm(x, weight); grid (M,)."""
    row = tl.program_id(0)
    n = tl.arange(0, BLOCK)
    inside = n < N
    if PDL:
        tl.inline_asm_elementwise('griddepcontrol.launch_dependents; // $0', '=r', [],
                                  dtype=tl.int32, is_pure=False, pack=1)
    gain = 1.0 + tl.load(weight + n, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.inline_asm_elementwise('griddepcontrol.wait; // $0', '=r', [],
                                  dtype=tl.int32, is_pure=False, pack=1)
    total = tl.load(x + row * N + n, mask=inside, other=0.0).to(tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(partial + (split * M + row) * N + n, mask=inside, other=0.0)
    rounded = total.to(x.dtype.element_ty)
    tl.store(x + row * N + n, rounded, mask=inside)
    total = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(total * total, 0) / N + eps)
    tl.store(y + row * N + n, (total * scale * gain).to(y.dtype.element_ty), mask=inside)


# Tiles: columns, K, warps, stages; EARLY is asked for in advance by each program. Of a layer of
# the 27B all programs fit an H200 at once: a second wave of a few would double a product's time.
Tile = tuple[int, int, int, int]
WIDE_TILE: Tile = (32, 128, 4, 4)
SPLIT_TILE: Tile = (64, 128, 4, 4)
GATED_TILE: Tile = (32, 128, 4, 3)
FP8_WIDE_TILE: Tile = (32, 128, 4, 5)
FP8_SPLIT_TILE: Tile = (64, 256, 4, 3)
FP8_GATED_TILE: Tile = (32, 128, 4, 4)
EARLY = 512
SPLITS = 4    # of the products whose columns alone do not fill a GPU
STEP = 128    # the K of every tile divides a multiple of this


def product(a: Tensor, w: Tensor | fp8.ChannelWeight, out: Tensor, pdl: bool = False) -> None:
    """
    Launch ``row_product``: a [M, K] (rows may be strided), w [N, K] -> out.

    out [M, N] of any dtype, or float32 partial sums [splits, M, N] for ``fold``.

    :raises ValueError: sizes that the fixed tiles do not divide.
    """
    data, scale, narrow = _parts(w)
    splits = out.shape[0] if out.dim() == 3 else 1
    (M, K), N = a.shape, data.shape[0]
    if splits == 1:
        BN, BK, warps, stages = FP8_WIDE_TILE if narrow else WIDE_TILE
    else:
        BN, BK, warps, stages = FP8_SPLIT_TILE if narrow else SPLIT_TILE
    BK = _step(BK, K, splits)
    row_product[(-(-M // ROWS), -(-N // BN), splits)](
        a, data, scale, out, M, a.stride(0), N=N, K=K, SPLITS=splits, BM=ROWS, BN=BN, BK=BK,
        EARLY=_early(K // splits) if pdl else 0, FP8=narrow, PDL=pdl, num_warps=warps,
        num_stages=stages, launch_pdl=pdl)


def gated(a: Tensor, w: Tensor | fp8.ChannelWeight, out: Tensor, pdl: bool = False) -> None:
    """
    Launch ``row_gate_up``: a [M, K], w [2 * N, K] -> out [M, N].

    :raises ValueError: sizes that the fixed tiles do not divide.
    """
    data, scale, narrow = _parts(w)
    (M, K), N = a.shape, out.shape[1]
    BN, BK, warps, stages = FP8_GATED_TILE if narrow else GATED_TILE
    BK = _step(BK, K)
    if N % BN:
        raise ValueError(f'a gated product of {N} columns does not fit tiles of {BN}')
    row_gate_up[(-(-M // ROWS), N // BN)](
        a, data, scale, out, M, N=N, K=K, BM=ROWS, BN=BN, BK=BK,
        EARLY=_early(K) if pdl else 0, FP8=narrow, PDL=pdl, num_warps=warps, num_stages=stages,
        launch_pdl=pdl)


def _parts(w: Tensor | fp8.ChannelWeight) -> tuple[Tensor, Tensor, bool]:
    """Return data, scale (the data stand in for one) and whether it is FP8."""
    return (w, w, False) if isinstance(w, Tensor) else (w.data, w.scale, True)


def _step(BK: int, K: int, splits: int = 1) -> int:
    """Return the K of a tile: BK, or what of it divides a split."""
    if K % splits or K // splits % min(BK, STEP):
        raise ValueError(f'a product over {K} in {splits} splits does not fit tiles of {BK}')
    return min(BK, (K // splits) & -(K // splits))


def _early(span: int) -> int:
    """Return how many columns of a span are asked for in advance, a power of two."""
    return min(EARLY, span & -span)


def fold(x: Tensor, partial: Tensor, weight: Tensor, y: Tensor, eps: float,
         pdl: bool = False) -> None:
    """Launch ``row_fold``: x [M, N] += the sum of partial [splits, M, N]; y = rms_norm(x)."""
    M, N = x.shape
    row_fold[(M,)](x, partial, weight, y, M, eps, N=N, BLOCK=1 << (N - 1).bit_length(),
                   SPLITS=partial.shape[0], PDL=pdl, num_warps=8, launch_pdl=pdl)


def fits(K: int, splits: int = 1) -> bool:
    """Return whether ``product`` and ``gated`` take sums over ``K`` in so many splits."""
    return K % (splits * STEP) == 0


def gated_reference(a: Tensor, w: Tensor) -> Tensor:
    """What ``gated`` computes of plain weights, in float32."""
    gate, up = F.linear(a.float(), w.float()).chunk(2, dim=-1)
    return F.silu(gate) * up


def selected(device: torch.device) -> bool:
    """Return whether these kernels agree with torch on ``device``; not inside a capture."""
    return triton_selected('row products', device,
                           lambda: check(device, torch.bfloat16, 2080, 1024, 1e-2))


def fp8_selected(device: torch.device) -> bool:
    """As ``selected``, of FP8 weights."""
    return triton_selected('row products, fp8', device, lambda: fp8.multiplies(device) and check(
        device, torch.bfloat16, 2080, 1024, 1e-2, narrow=True))


def check(device: torch.device, dtype: torch.dtype, N: int, K: int, tolerance: float,
          narrow: bool = False) -> bool:
    """
    Return whether 16 rows agree with float32 within ``tolerance``, and bitwise with each.

    ``narrow``: of FP8 weights.
    """
    pdl = overlaps(device)
    a, values = draw(device, dtype, 16, K), draw(device, dtype, N, K, seed=1) / 32
    weight = draw(device, torch.float32, N, seed=2)
    half = N // 2 - N // 2 % GATED_TILE[0]
    w: Tensor | fp8.ChannelWeight = values
    gates: Tensor | fp8.ChannelWeight = values[:2 * half]
    if narrow:
        spread = torch.logspace(-2, 2, N, device=device)[:, None]  # each channel has its scale
        w = fp8.ChannelWeight(*fp8.quantise(values * spread))
        gates, values = w.rows(slice(0, 2 * half)), w.values()

    def run(rows: Tensor) -> list[Tensor]:
        M = rows.shape[0]
        out = torch.full((M, N), torch.nan, device=device, dtype=dtype)
        partial = torch.full((SPLITS, M, N), torch.nan, device=device)
        hidden = torch.full((M, half), torch.nan, device=device, dtype=dtype)
        product(rows, w, out, pdl)
        product(rows, w, partial, pdl)
        gated(rows, gates, hidden, pdl)
        stream, y = out.clone(), torch.full_like(out, torch.nan)
        fold(stream, partial, weight, y, 1e-6, pdl)
        return [out, stream, y, hidden]

    mine, full = run(a), F.linear(a.float(), values.float())
    expected = [full, 2 * full, rms_norm(2 * full, weight, 1e-6),
                gated_reference(a, values[:2 * half])]
    agree = [close(one, other, tolerance) for one, other in zip(mine, expected)]
    for few in (slice(0, 1), slice(7, 8), slice(15, 16), slice(0, 3), slice(4, 12)):
        agree += [torch.equal(one, all_[few]) for one, all_ in zip(run(a[few]), mine)]
    return all(agree)


def _variants() -> tuple[Variant, ...]:
    found: list[Variant] = []
    types = {'a': '*bf16', 'M': 'i32', 'a_row': 'i32'}
    gate = {'a': '*bf16', 'out': '*bf16', 'M': 'i32'}
    folds = {'x': '*bf16', 'partial': '*fp32', 'weight': '*bf16', 'y': '*bf16', 'M': 'i32',
             'eps': 'fp32'}
    plain = {'w': '*bf16', 'scale': '*bf16'}
    narrow = {'w': '*fp8e4nv', 'scale': '*fp32'}
    boards: tuple[tuple[bool, bool, tuple[int, ...]], ...] = (
        (False, False, (87,)), (True, False, (90, 110, 121)),
        (True, True, FP8_ARCHS))
    for pdl, fp8_, archs in boards:
        early = EARLY if pdl else 0
        wide, split, gates = ((FP8_WIDE_TILE, FP8_SPLIT_TILE, FP8_GATED_TILE) if fp8_ else
                              (WIDE_TILE, SPLIT_TILE, GATED_TILE))
        for N, K, splits, kind, tile in ((16480, 5120, 1, '*bf16', wide),
                                         (5120, 17408, SPLITS, '*fp32', split)):
            values = {'N': N, 'K': K, 'SPLITS': splits, 'BM': ROWS, 'BN': tile[0],
                      'BK': tile[1], 'EARLY': early, 'FP8': fp8_, 'PDL': pdl}
            found.append(Variant(
                row_product, types | (narrow if fp8_ else plain) | {'out': kind}
                | dict.fromkeys(values, 'constexpr'), values,
                num_warps=tile[2], num_stages=tile[3], archs=archs))
        values = {'N': 17408, 'K': 5120, 'BM': ROWS, 'BN': gates[0], 'BK': gates[1],
                  'EARLY': early, 'FP8': fp8_, 'PDL': pdl}
        found.append(Variant(
            row_gate_up,
            gate | (narrow if fp8_ else plain) | dict.fromkeys(values, 'constexpr'), values,
            num_warps=gates[2], num_stages=gates[3], archs=archs))
        if fp8_:
            continue  # the sums are folded by one kernel, whatever they were made of
        values = {'N': 5120, 'BLOCK': 8192, 'SPLITS': SPLITS, 'PDL': pdl}
        found.append(Variant(row_fold, folds | dict.fromkeys(values, 'constexpr'), values,
                             num_warps=8, archs=archs))
    return tuple(found)


VARIANTS = _variants()
