"""Matrix products of few rows, bound by the weights' bytes.

For decode, verify and branches a row's bits are its own: the row tile is fixed at 16, so the same
matrix instructions run for 1 and for 16 rows; K is walked in a fixed order in a fixed number of
splits, and splits are folded in a fixed order. A chunk's rows share a tile of 64. Before the
inputs are ready each program asks for its first weights into L2. FP8 weights are half of the
bytes: a tile is widened once it is loaded, the sum scaled channel by channel.
"""
from __future__ import annotations

from itertools import product as combinations
from typing import Any
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
def row_product(a, w, scale, squares, out, x, gain, sums, M, a_row, eps,  # type: ignore[no-untyped-def]
                N: tl.constexpr, K: tl.constexpr, SPLITS: tl.constexpr, BM: tl.constexpr,
                BN: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr, SWAPPED: tl.constexpr,
                COUNT: tl.constexpr, BLOCK: tl.constexpr, FP8: tl.constexpr, PDL: tl.constexpr):
    """
    Write a [M, K] @ w [N, K]^T as out [M, N], or, split over K, as partial [SPLITS, M, N].

    If FP8, the columns of the sum are multiplied by scale [N]. With squares float32 [COUNT, M],
    the sums of a row's squares before its gain, they are divided by the root of their mean. With x
    [M, N] the product is added to x, out is x * (1 + gain [N]), and sums [column tiles, M] what
    the next product takes as squares. EARLY columns of K are asked for before the inputs are
    ready. SWAPPED: of the matrix instructions the weights are the first operand. Grid (row tiles,
    column tiles, splits).
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
    if squares is not None:
        j = tl.arange(0, BLOCK)[:, None]
        part = tl.load(squares + j * M + m[None, :], mask=(j < COUNT) & (m[None, :] < M),
                       other=0.0)
        factor = tl.rsqrt(tl.sum(part, 0) / K + eps)[:, None]
    total = tl.zeros([BN, BM] if SWAPPED else [BM, BN], tl.float32)
    for start in range(0, SPAN, BK):
        k = first + start + tl.arange(0, BK)
        row = tl.load(a + m[:, None] * a_row + k[None, :], mask=m[:, None] < M, other=0.0)
        if N % BN == 0:
            y = tl.load(w + n[:, None] * K + k[None, :])
        else:
            y = tl.load(w + n[:, None] * K + k[None, :], mask=n[:, None] < N, other=0.0)
        if FP8:  # by way of float32: the direct conversion is slow on Hopper
            y = y.to(tl.float32).to(row.dtype)
        if SWAPPED:
            total = tl.dot(y, tl.trans(row), total)
        else:
            total = tl.dot(row, tl.trans(y), total)
    if SWAPPED:
        total = tl.trans(total)
    if FP8:
        total *= tl.load(scale + n, mask=n < N, other=0.0)[None, :]
    if squares is not None:
        total *= factor
    inside = (m[:, None] < M) & (n[None, :] < N)
    to = (tl.program_id(2) * M + m[:, None]) * N + n[None, :]
    if x is not None:
        total += tl.load(x + to, mask=inside, other=0.0).to(tl.float32)
        rounded = total.to(x.dtype.element_ty)
        tl.store(x + to, rounded, mask=inside)
        total = rounded.to(tl.float32)
        tl.store(sums + tl.program_id(1) * M + m, tl.sum(total * total, 1), mask=m < M)
        total *= 1.0 + tl.load(gain + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    tl.store(out + to, total.to(out.dtype.element_ty), mask=inside)


@lazy_jit
def row_gate_up(a, w, scale, squares, out, M, eps,  # type: ignore[no-untyped-def]
                N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                BK: tl.constexpr, EARLY: tl.constexpr, SWAPPED: tl.constexpr, COUNT: tl.constexpr,
                BLOCK: tl.constexpr, FP8: tl.constexpr, PDL: tl.constexpr):
    """
    Write silu(a @ gate^T) * (a @ up^T) as out [M, N]; w [2 * N, K] holds gate, then up.

    If FP8, both sums are multiplied by scale [2 * N]. squares, EARLY and SWAPPED as in
    ``row_product``. Grid (row tiles, columns).
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
    if squares is not None:
        j = tl.arange(0, BLOCK)[:, None]
        part = tl.load(squares + j * M + m[None, :], mask=(j < COUNT) & (m[None, :] < M),
                       other=0.0)
        factor = tl.rsqrt(tl.sum(part, 0) / K + eps)[:, None]
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
    if squares is not None:
        gate *= factor
        up *= factor
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
# product's time.
TILES = {
    'wide': Tile(64, 128, 4, 4, swapped=True), 'split': Tile(64, 128, 4, 3),
    'add': Tile(16, 512, 2, 3), 'gated': Tile(32, 128, 4, 2, overlaps=False),
    'fp8 wide': Tile(32, 256, 4, 4), 'fp8 split': Tile(32, 256, 4, 4, 512),
    'fp8 add': Tile(32, 512, 4, 3), 'fp8 gated': Tile(32, 256, 4, 4),
    'chunk wide': Tile(128, 64, 8, 4), 'chunk split': Tile(64, 128, 4, 4),
    'chunk gated': Tile(32, 64, 4, 4),
}
SPLITS = 4    # of the products whose columns alone do not fill a GPU
STEP = 128    # the K of every tile divides a multiple of this


class Norm(NamedTuple):
    """The RMS norm that a product still has to apply to its rows, see ``add``."""

    squares: Tensor  # float32 [parts, M]: their sums are those of a row's squares
    eps: float


def product(a: Tensor, w: Tensor | fp8.ChannelWeight, out: Tensor, pdl: bool = False,
            alone: bool = True, norm: Norm | None = None) -> None:
    """
    Launch ``row_product``: a [M, K] (rows may be strided), w [N, K] -> out.

    out [M, N] of any dtype, or float32 partial sums [splits, M, N] for ``fold``. Rows that are not
    ``alone`` share a tile, if they are many, and have no bits of their own.

    :raises ValueError: sizes that the fixed tiles do not divide.
    """
    splits = out.shape[0] if out.dim() == 3 else 1
    rows, tile = _tile('wide' if splits == 1 else 'split', len(a), w, alone)
    _launch(a, w, out, rows, tile, pdl, splits, norm)


def add(a: Tensor, w: Tensor | fp8.ChannelWeight, x: Tensor, gain: Tensor, y: Tensor,
        squares: Tensor, pdl: bool = False) -> None:
    """
    Launch ``row_product``: x [M, N] += a [M, K] @ w^T; y = x * (1 + gain), not normed yet.

    squares float32 [``parts``, M]: what the product that takes y still norms it by.
    """
    rows, tile = _tile('add', len(a), w, True)
    _launch(a, w, y, rows, tile, pdl, added=(x, gain, squares))


def _launch(a: Tensor, w: Tensor | fp8.ChannelWeight, out: Tensor, rows: int, tile: Tile,
            pdl: bool, splits: int = 1, norm: Norm | None = None,
            added: tuple[Tensor, Tensor, Tensor] | tuple[None, None, None] = (None,) * 3) -> None:
    data, scale, narrow = _parts(w)
    (M, K), N = a.shape, data.shape[0]
    BK = _step(tile.step, K, splits)
    pdl = pdl and tile.overlaps
    squares, eps, sizes = _normed(norm)
    row_product[(-(-M // rows), -(-N // tile.columns), splits)](
        a, data, scale, squares, out, *added, M, a.stride(0), eps, N=N, K=K, SPLITS=splits,
        BM=rows, BN=tile.columns, BK=BK, EARLY=_early(tile, K // splits) if pdl else 0,
        SWAPPED=tile.swapped, **sizes, FP8=narrow, PDL=pdl, num_warps=tile.warps,
        num_stages=tile.stages, launch_pdl=pdl)


def gated(a: Tensor, w: Tensor | fp8.ChannelWeight, out: Tensor, pdl: bool = False,
          alone: bool = True, norm: Norm | None = None) -> None:
    """
    Launch ``row_gate_up``: a [M, K], w [2 * N, K] -> out [M, N]; the rest as in ``product``.

    :raises ValueError: sizes that the fixed tiles do not divide.
    """
    data, scale, narrow = _parts(w)
    (M, K), N = a.shape, out.shape[1]
    rows, tile = _tile('gated', M, w, alone)
    BK = _step(tile.step, K)
    pdl = pdl and tile.overlaps
    squares, eps, sizes = _normed(norm)
    if N % tile.columns:
        raise ValueError(f'a gated product of {N} columns does not fit tiles of {tile.columns}')
    row_gate_up[(-(-M // rows), N // tile.columns)](
        a, data, scale, squares, out, M, eps, N=N, K=K, BM=rows, BN=tile.columns, BK=BK,
        EARLY=_early(tile, K) if pdl else 0, SWAPPED=tile.swapped, **sizes, FP8=narrow, PDL=pdl,
        num_warps=tile.warps, num_stages=tile.stages, launch_pdl=pdl)


def parts(N: int, narrow: bool = False) -> int:
    """Return in how many parts ``add`` leaves the sums of the squares of a row of N columns."""
    return -(-N // TILES['fp8 add' if narrow else 'add'].columns)


def _normed(norm: Norm | None) -> tuple[Tensor | None, float, dict[str, int]]:
    count = 0 if norm is None else len(norm.squares)
    sizes = {'COUNT': count, 'BLOCK': 1 << (count - 1).bit_length() if count else 0}
    return (None, 0.0, sizes) if norm is None else (*norm, sizes)


def _tile(kind: str, M: int, w: Tensor | fp8.ChannelWeight, alone: bool) -> tuple[int, Tile]:
    """Return rows and tile of a product; few rows are served best as if they were alone."""
    narrow = not isinstance(w, Tensor)
    if alone or narrow or M <= ROWS:
        return ROWS, TILES[f'fp8 {kind}' if narrow else kind]
    return CHUNK, TILES[f'chunk {kind}']


def _parts(w: Tensor | fp8.ChannelWeight) -> tuple[Tensor, Tensor, bool]:
    """Return data, scale (the data stand in for one) and whether it is FP8."""
    return (w, w, False) if isinstance(w, Tensor) else (w.data, w.scale, True)


def _step(BK: int, K: int, splits: int = 1) -> int:
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
        if not alone:
            return [out, stream, y, hidden]
        # A row that is not normed yet: as it leaves ``add``, and as the next product takes it.
        added, scaled = out.clone(), torch.full_like(out, torch.nan)
        squares = torch.full((parts(N, narrow), M), torch.nan, device=device)
        add(rows, w, added, weight, scaled, squares, pdl)
        norm = Norm(rows.float().square().unflatten(1, (-1, 4)).sum(2).t().contiguous(), 1e-6)
        normed, gate = torch.full_like(out, torch.nan), torch.full_like(hidden, torch.nan)
        product(rows, w, normed, pdl, norm=norm)
        gated(rows, gates, gate, pdl, norm=norm)
        return [out, stream, y, hidden, added, scaled, normed, gate, squares.t()]

    def agrees(rows: Tensor, mine: list[Tensor]) -> list[bool]:
        full = F.linear(rows.float(), values.float())
        gain, normed = 1.0 + weight, rms_norm(rows.float(), torch.zeros_like(rows[0]), 1e-6)
        expected = [full, 2 * full, rms_norm(2 * full, weight, 1e-6),
                    gated_reference(rows, values[:2 * half]), 2 * full, 2 * full * gain,
                    F.linear(normed, values.float()), gated_reference(normed, values[:2 * half])]
        agree = [close(one, other, tolerance) for one, other in zip(mine, expected)]
        return agree + [close(part.sum(1), (2 * full).square().sum(1), tolerance)
                        for part in mine[len(expected):]]

    mine, chunk = run(a), draw(device, dtype, CHUNK + 3, K, seed=3)
    agree = agrees(a, mine) + agrees(chunk, run(chunk, alone=False))
    for few in (slice(0, 1), slice(7, 8), slice(15, 16), slice(0, 3), slice(4, 12)):
        agree += [torch.equal(one, all_[few]) for one, all_ in zip(run(a[few]), mine)]
    return all(agree)


def _variants() -> tuple[Variant, ...]:
    found: list[Variant] = []
    sizes = {'squares': '*fp32', 'M': 'i32', 'eps': 'fp32'}
    types = sizes | {'a': '*bf16', 'a_row': 'i32', 'out': '*bf16'}
    gate = sizes | {'a': '*bf16', 'out': '*bf16'}
    folds = {'x': '*bf16', 'partial': '*fp32', 'weight': '*bf16', 'y': '*bf16', 'M': 'i32',
             'eps': 'fp32'}
    plain = {'w': '*bf16', 'scale': '*bf16'}
    narrow = {'w': '*fp8e4nv', 'scale': '*fp32'}
    added = {'x': '*bf16', 'gain': '*bf16', 'sums': '*fp32'}
    # Which of the optional tensors a product takes: the norm of its rows, and x that it adds to.
    shapes: dict[str, tuple[int, int, int, dict[str, str]]] = {
        'wide': (16480, 5120, 1, {}), 'add': (5120, 17408, 1, added),
        'split': (5120, 17408, SPLITS, {'out': '*fp32'}), 'gated': (17408, 5120, 0, {})}
    boards: tuple[tuple[bool, bool, tuple[int, ...]], ...] = (
        (False, False, (87,)), (True, False, (90, 110, 121)),
        (True, True, FP8_ARCHS))
    for pdl, fp8_, archs in boards:
        for kind, (shape, (N, K, splits, more)) in combinations(
                ('fp8 ',) if fp8_ else ('', 'chunk '), shapes.items()):
            if kind + shape not in TILES:
                continue
            tile = TILES[kind + shape]
            values: dict[str, Any] = {
                'N': N, 'K': K, 'BM': CHUNK if kind == 'chunk ' else ROWS, 'BN': tile.columns,
                'BK': tile.step, 'EARLY': tile.early if pdl else 0, 'SWAPPED': tile.swapped,
                'COUNT': 320, 'BLOCK': 512, 'FP8': fp8_, 'PDL': pdl and tile.overlaps}
            if splits:
                values |= {'SPLITS': splits} | ({} if more is added else dict.fromkeys(added))
            if kind == 'chunk ' or shape in ('add', 'split'):
                values |= {'squares': None, 'COUNT': 0, 'BLOCK': 0}
            found.append(Variant(
                row_product if splits else row_gate_up,
                (types if splits else gate) | (narrow if fp8_ else plain) | more
                | dict.fromkeys(values, 'constexpr'), values,
                num_warps=tile.warps, num_stages=tile.stages, archs=archs))
        if fp8_:
            continue  # the sums are folded by one kernel, whatever they were made of
        values = {'N': 5120, 'BLOCK': 8192, 'SPLITS': SPLITS, 'PDL': pdl}
        found.append(Variant(row_fold, folds | dict.fromkeys(values, 'constexpr'), values,
                             num_warps=8, archs=archs))
    return tuple(found)


VARIANTS = _variants()
