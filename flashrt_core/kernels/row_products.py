"""Matrix products of few rows, bound by the weights' bytes.

For decode, verify and branches a row's bits are its own: the row tile is fixed at 16, so the same
matrix instructions run for 1 and for 16 rows; K is walked in a fixed order in a fixed number of
splits, and splits are folded in a fixed order. A chunk's rows share a tile of 64. Before the
inputs are ready each program asks for its first weights into L2. FP8 weights are half of the
bytes: a tile is widened once it is loaded, the sum scaled channel by channel.
"""
from __future__ import annotations

from itertools import product as combinations
from typing import NamedTuple
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

ROWS = 16   # of a tile of rows that have bits of their own: the smallest matrix instruction
CHUNK = 64  # of a tile of a chunk's rows


@lazy_jit
def row_product(a, w, scale, out, M, a_row,  # type: ignore[no-untyped-def]
                N: tl.constexpr, K: tl.constexpr, SPLITS: tl.constexpr, BM: tl.constexpr,
                BN: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr, SWAPPED: tl.constexpr,
                FP8: tl.constexpr, PDL: tl.constexpr):
    """
    Write a [M, K] @ w [N, K]^T as out [M, N], or, split over K, as partial [SPLITS, M, N].

    If FP8, the columns of the sum are multiplied by scale [N]. EARLY columns of K are asked for
    before the inputs are ready. SWAPPED: of the matrix instructions the weights are the first
    operand. Grid (row tiles, columns, splits).
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
    total = tl.zeros([BN, BM] if SWAPPED else [BM, BN], tl.float32)
    for start in range(0, SPAN, BK):
        k = first + start + tl.arange(0, BK)
        x = tl.load(a + m[:, None] * a_row + k[None, :], mask=m[:, None] < M, other=0.0)
        if N % BN == 0:
            y = tl.load(w + n[:, None] * K + k[None, :])
        else:
            y = tl.load(w + n[:, None] * K + k[None, :], mask=n[:, None] < N, other=0.0)
        if FP8:  # by way of float32: the direct conversion is slow on Hopper
            y = y.to(tl.float32).to(x.dtype)
        if SWAPPED:
            total = tl.dot(y, tl.trans(x), total)
        else:
            total = tl.dot(x, tl.trans(y), total)
    if SWAPPED:
        total = tl.trans(total)
    if FP8:
        total *= tl.load(scale + n, mask=n < N, other=0.0)[None, :]
    to = out + (tl.program_id(2) * M + m[:, None]) * N + n[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


@lazy_jit
def row_gate_up(a, w, scale, out, M,  # type: ignore[no-untyped-def]
                N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                BK: tl.constexpr, EARLY: tl.constexpr, SWAPPED: tl.constexpr, FP8: tl.constexpr,
                PDL: tl.constexpr):
    """
    Write silu(a @ gate^T) * (a @ up^T) as out [M, N]; w [2 * N, K] holds gate, then up.

    If FP8, both sums are multiplied by scale [2 * N]. EARLY and SWAPPED as in ``row_product``.
    Grid (row tiles, columns).
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
    gate = tl.zeros([BN, BM] if SWAPPED else [BM, BN], tl.float32)
    up = tl.zeros([BN, BM] if SWAPPED else [BM, BN], tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        x = tl.load(a + m[:, None] * K + k[None, :], mask=m[:, None] < M, other=0.0)
        weight = w + n[:, None] * K + k[None, :]
        y, z = tl.load(weight), tl.load(weight + N * K)
        if FP8:
            y, z = y.to(tl.float32).to(x.dtype), z.to(tl.float32).to(x.dtype)
        if SWAPPED:
            gate = tl.dot(y, tl.trans(x), gate)
            up = tl.dot(z, tl.trans(x), up)
        else:
            gate = tl.dot(x, tl.trans(y), gate)
            up = tl.dot(x, tl.trans(z), up)
    if SWAPPED:
        gate, up = tl.trans(gate), tl.trans(up)
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


class Tile(NamedTuple):
    """Columns and K of a program's tile, its warps and stages, what it asks for in advance."""

    columns: int
    step: int
    warps: int
    stages: int
    early: int = 0  # columns of K
    swapped: bool = False
    overlaps: bool = True  # is launched while the kernel before it runs, where the GPU can


# Of a layer of the 27B all programs fit an H200 at once: a second wave of a few would double a
# product's time. Measured there: programs that wait for the kernel before hold up some products
# more than an early launch gains, and asking ahead gains nothing but for FP8's.
TILES = {
    'wide': Tile(64, 128, 4, 4, swapped=True), 'split': Tile(64, 128, 4, 3),
    'gated': Tile(32, 128, 4, 2, overlaps=False),
    'fp8 wide': Tile(32, 256, 4, 4, 512), 'fp8 split': Tile(32, 256, 4, 3, overlaps=False),
    'fp8 gated': Tile(32, 128, 4, 4, overlaps=False),
    'chunk wide': Tile(64, 128, 4, 3, overlaps=False),
    'chunk split': Tile(64, 64, 4, 4, overlaps=False),
    'chunk gated': Tile(64, 64, 4, 3, overlaps=False),
}
SPLITS = 4    # of the products whose columns alone do not fill a GPU
STEP = 128    # the K of every tile divides a multiple of this


def product(a: Tensor, w: Tensor | fp8.ChannelWeight, out: Tensor, pdl: bool = False,
            alone: bool = True) -> None:
    """
    Launch ``row_product``: a [M, K] (rows may be strided), w [N, K] -> out.

    out [M, N] of any dtype, or float32 partial sums [splits, M, N] for ``fold``. Rows that are not
    ``alone`` share a tile, if they are many, and have no bits of their own.

    :raises ValueError: sizes that the fixed tiles do not divide.
    """
    data, scale, narrow = _parts(w)
    splits = out.shape[0] if out.dim() == 3 else 1
    (M, K), N = a.shape, data.shape[0]
    rows, tile = _tile('wide' if splits == 1 else 'split', M, narrow, alone)
    BK, pdl = step(tile.step, K, splits), pdl and tile.overlaps
    row_product[(-(-M // rows), -(-N // tile.columns), splits)](
        a, data, scale, out, M, a.stride(0), N=N, K=K, SPLITS=splits, BM=rows, BN=tile.columns,
        BK=BK, EARLY=_early(tile, K // splits) if pdl else 0, SWAPPED=tile.swapped, FP8=narrow,
        PDL=pdl, num_warps=tile.warps, num_stages=tile.stages, launch_pdl=pdl)


def gated(a: Tensor, w: Tensor | fp8.ChannelWeight, out: Tensor, pdl: bool = False,
          alone: bool = True) -> None:
    """
    Launch ``row_gate_up``: a [M, K], w [2 * N, K] -> out [M, N]; ``alone`` as in ``product``.

    :raises ValueError: sizes that the fixed tiles do not divide.
    """
    data, scale, narrow = _parts(w)
    (M, K), N = a.shape, out.shape[1]
    rows, tile = _tile('gated', M, narrow, alone)
    BK, pdl = step(tile.step, K), pdl and tile.overlaps
    if N % tile.columns:
        raise ValueError(f'a gated product of {N} columns does not fit tiles of {tile.columns}')
    row_gate_up[(-(-M // rows), N // tile.columns)](
        a, data, scale, out, M, N=N, K=K, BM=rows, BN=tile.columns, BK=BK,
        EARLY=_early(tile, K) if pdl else 0, SWAPPED=tile.swapped, FP8=narrow, PDL=pdl,
        num_warps=tile.warps, num_stages=tile.stages, launch_pdl=pdl)


def _tile(kind: str, M: int, narrow: bool, alone: bool) -> tuple[int, Tile]:
    """Return rows and tile of a product; few rows are served best as if they were alone."""
    if alone or narrow or M <= ROWS:
        return ROWS, TILES[f'fp8 {kind}' if narrow else kind]
    return CHUNK, TILES[f'chunk {kind}']


def _parts(w: Tensor | fp8.ChannelWeight) -> tuple[Tensor, Tensor, bool]:
    """Return data, scale (the data stand in for one) and whether it is FP8."""
    return (w, w, False) if isinstance(w, Tensor) else (w.data, w.scale, True)


def step(BK: int, K: int, splits: int = 1) -> int:
    """Return the K of a tile: BK, or what of it divides a split."""
    if K % splits or K // splits % min(BK, STEP):
        raise ValueError(f'a product over {K} in {splits} splits does not fit tiles of {BK}')
    return min(BK, (K // splits) & -(K // splits))


def _early(tile: Tile, span: int) -> int:
    """Return how many columns of a span are asked for in advance, a power of two."""
    return min(tile.early, span & -span)


def fold(x: Tensor, partial: Tensor, weight: Tensor, y: Tensor, eps: float,
         pdl: bool = False) -> None:
    """Launch ``row_fold``: x [M, N] += the sum of partial [splits, M, N]; y = rms_norm(x)."""
    M, N = x.shape
    row_fold[(M,)](x, partial, weight, y, M, eps, N=N, BLOCK=1 << (N - 1).bit_length(),
                   SPLITS=partial.shape[0], PDL=pdl, num_warps=8, launch_pdl=pdl)


def fits(K: int, splits: int = 1) -> bool:
    """Return whether ``product`` and ``gated`` take sums over ``K`` in so many splits."""
    return K % (splits * STEP) == 0


def gated_fits(N: int) -> bool:
    """Return whether ``gated`` takes ``N`` columns in every tile."""
    return all(N % tile.columns == 0 for kind, tile in TILES.items() if kind.endswith('gated'))


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

    So must those of a chunk, but for the bits. ``narrow``: of FP8 weights.
    """
    pdl = overlaps(device)
    a, values = draw(device, dtype, 16, K), draw(device, dtype, N, K, seed=1) / 32
    weight = draw(device, torch.float32, N, seed=2)
    half = N // 2
    half -= half % max(tile.columns for tile in TILES.values())
    w: Tensor | fp8.ChannelWeight = values
    gates: Tensor | fp8.ChannelWeight = values[:2 * half]
    if narrow:
        spread = torch.logspace(-2, 2, N, device=device)[:, None]  # each channel has its scale
        w = fp8.ChannelWeight(*fp8.quantise(values * spread))
        gates, values = w.rows(slice(0, 2 * half)), w.values()

    def run(rows: Tensor, alone: bool = True) -> list[Tensor]:
        M = rows.shape[0]
        out = torch.full((M, N), torch.nan, device=device, dtype=dtype)
        partial = torch.full((SPLITS, M, N), torch.nan, device=device)
        hidden = torch.full((M, half), torch.nan, device=device, dtype=dtype)
        product(rows, w, out, pdl, alone)
        product(rows, w, partial, pdl, alone)
        gated(rows, gates, hidden, pdl, alone)
        stream, y = out.clone(), torch.full_like(out, torch.nan)
        fold(stream, partial, weight, y, 1e-6, pdl)
        return [out, stream, y, hidden]

    def agrees(rows: Tensor, mine: list[Tensor]) -> list[bool]:
        full = F.linear(rows.float(), values.float())
        expected = [full, 2 * full, rms_norm(2 * full, weight, 1e-6),
                    gated_reference(rows, values[:2 * half])]
        return [close(one, other, tolerance) for one, other in zip(mine, expected)]

    mine, chunk = run(a), draw(device, dtype, CHUNK + 3, K, seed=3)
    agree = agrees(a, mine) + agrees(chunk, run(chunk, alone=False))
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
        kinds = ('fp8 ',) if fp8_ else ('', 'chunk ')
        rows = dict(zip(kinds, (ROWS, CHUNK)))
        for kind, (shape, (N, K, splits, stored)) in combinations(kinds, {
                'wide': (16480, 5120, 1, '*bf16'), 'split': (5120, 17408, SPLITS, '*fp32'),
                'gated': (17408, 5120, 0, '*bf16')}.items()):
            tile = TILES[kind + shape]
            early = pdl and tile.overlaps
            values = {'N': N, 'K': K, 'BM': rows[kind], 'BN': tile.columns, 'BK': tile.step,
                      'EARLY': tile.early if early else 0, 'SWAPPED': tile.swapped, 'FP8': fp8_,
                      'PDL': early} | ({'SPLITS': splits} if splits else {})
            found.append(Variant(
                row_product if splits else row_gate_up,
                (types if splits else gate) | (narrow if fp8_ else plain) | {'out': stored}
                | dict.fromkeys(values, 'constexpr'), values,
                num_warps=tile.warps, num_stages=tile.stages, archs=archs))
        if fp8_:
            continue  # the sums are folded by one kernel, whatever they were made of
        values = {'N': 5120, 'BLOCK': 8192, 'SPLITS': SPLITS, 'PDL': pdl}
        found.append(Variant(row_fold, folds | dict.fromkeys(values, 'constexpr'), values,
                             num_warps=8, archs=archs))
    return tuple(found)


VARIANTS = _variants()
