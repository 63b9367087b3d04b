"""Attention of few rows, each with its own length: fixed splits over the keys, folded in order.

Split s of ``SPLITS`` takes the tiles s, s + SPLITS, ... of ``BN`` keys. So which keys meet in what
order is fixed by their positions alone, and a row's bits depend neither on other rows nor on
where the keys lie. Dead keys are not read.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flashrt_core.kernels._launch import close
from flashrt_core.kernels._launch import draw
from flashrt_core.kernels._launch import overlaps
from flashrt_core.kernels._triton import lazy_jit
from flashrt_core.kernels._triton import triton_selected
from flashrt_core.kernels._triton import Variant
from flashrt_core.nn.fp8 import E4M3
from flashrt_core.nn.fp8 import multiplies

if TYPE_CHECKING:
    import triton.language as tl

LOG2E = 1.4426950408889634
QUERIES = 16  # query rows of a program: those that share a key head, of as many rows as fit
SPLITS = 32   # times 4 key heads: about one program for each processor of an H200
SPLIT_WARPS, FOLD_WARPS = 4, 4


@lazy_jit
def rows_split(q, kv, tail, positions, prefix, partial, top_out, norm_out, M, tail_row, scale,  # type: ignore[no-untyped-def]
               HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BM: tl.constexpr,
               BN: tl.constexpr, SPLITS: tl.constexpr, TAIL: tl.constexpr, PDL: tl.constexpr):
    """
    Attend the tiles of one split; grid (row tiles, SPLITS, KV_HEADS).

    q [M, HEADS, D]; row m sees the keys 0 ... positions[m] (int64 [M]) of kv [tokens, 2, KV_HEADS,
    D], of q's dtype or widened to it; with TAIL those from prefix (int64 scalar) on lie in tail
    [M, tail_row elements a row], the first at its begin. partial [M, HEADS, SPLITS, D], top_out
    and norm_out [M, HEADS, SPLITS].
    """
    G: tl.constexpr = HEADS // KV_HEADS
    ROWS: tl.constexpr = BM // G
    TOKEN: tl.constexpr = 2 * KV_HEADS * D
    split = tl.program_id(1)
    head = tl.program_id(2)
    first = tl.program_id(0) * ROWS
    i = tl.arange(0, BM)
    d = tl.arange(0, D)
    row = first + i // G
    valid = (i < ROWS * G) & (row < M)
    if PDL:
        tl.inline_asm_elementwise('griddepcontrol.launch_dependents; // $0', '=r', [],
                                  dtype=tl.int32, is_pure=False, pack=1)
        tl.inline_asm_elementwise('griddepcontrol.wait; // $0', '=r', [],
                                  dtype=tl.int32, is_pure=False, pack=1)
    length = tl.load(positions + row, mask=valid, other=-1).to(tl.int32) + 1
    end = tl.max(length, 0)
    at = row * HEADS + head * G + i % G
    query = tl.load(q + at[:, None] * D + d[None, :], mask=valid[:, None], other=0.0)
    # A tile with keys in the tails is attended once for each row of this program.
    tiles = tl.maximum((end + BN - 1) // BN - split + SPLITS - 1, 0) // SPLITS
    shared = tiles
    below = end
    if TAIL:
        below = tl.load(prefix).to(tl.int32)
        shared = tl.minimum(tiles, tl.maximum(below // BN - split + SPLITS - 1, 0) // SPLITS)
    total = tl.zeros([BM, D], tl.float32)
    top = tl.full([BM], -1.0e30, tl.float32)
    norm = tl.zeros([BM], tl.float32)
    for turn in range(0, shared + (tiles - shared) * ROWS):
        late = tl.maximum(turn - shared, 0)
        tile = tl.minimum(turn, shared) + late // ROWS
        t = (tile * SPLITS + split) * BN + tl.arange(0, BN)
        seen = valid[:, None] & (t[None, :] < length[:, None])
        place = kv + t * TOKEN
        inside = t < end
        if TAIL:
            turned = turn >= shared
            mine = first + late % ROWS
            own = tail + mine.to(tl.int64) * tail_row + (t - below) * TOKEN
            place = tl.where(t < below, place, own)
            reach = tl.load(positions + mine, mask=mine < M, other=-1).to(tl.int32)
            inside = inside & ((t < below) | (t <= reach))
            seen = seen & ((row[:, None] == mine) | (turned == 0))
        place = tl.multiple_of(place, 16) + head * D
        key = tl.load(place[None, :] + d[:, None], mask=inside[None, :], other=0.0)
        if kv.dtype.element_ty != q.dtype.element_ty:
            key = key.to(tl.float32).to(query.dtype)
        score = tl.dot(query, key) * scale
        score = tl.where(seen, score, float('-inf'))
        higher = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp2(score - higher[:, None])
        fade = tl.exp2(top - higher)
        norm = norm * fade + tl.sum(weight, 1)
        value = tl.load(place[:, None] + KV_HEADS * D + d[None, :], mask=inside[:, None],
                        other=0.0)
        if kv.dtype.element_ty != q.dtype.element_ty:
            value = value.to(tl.float32).to(query.dtype)
        total = tl.dot(weight.to(value.dtype), value, total * fade[:, None])
        top = higher
    if tiles > 0:
        to = at * SPLITS + split
        tl.store(partial + to[:, None] * D + d[None, :], total, mask=valid[:, None])
        tl.store(top_out + to, top, mask=valid)
        tl.store(norm_out + to, norm, mask=valid)


@lazy_jit
def rows_fold(partial, top_in, norm_in, positions, gate, out, gate_row, gate_head,  # type: ignore[no-untyped-def]
              HEADS: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr,
              GATED: tl.constexpr, PDL: tl.constexpr):
    """
    Fold the splits into out [M, HEADS, D], times sigmoid(gate) if GATED; grid (HEADS, M).

    gate of row m and head h begins at m * gate_row + h * gate_head.
    """
    head = tl.program_id(0)
    row = tl.program_id(1)
    d = tl.arange(0, D)
    j = tl.arange(0, SPLITS)
    if PDL:
        tl.inline_asm_elementwise('griddepcontrol.launch_dependents; // $0', '=r', [],
                                  dtype=tl.int32, is_pure=False, pack=1)
        tl.inline_asm_elementwise('griddepcontrol.wait; // $0', '=r', [],
                                  dtype=tl.int32, is_pure=False, pack=1)
    used = j * BN <= tl.load(positions + row)
    at = (row * HEADS + head) * SPLITS + j
    part = tl.load(partial + at[:, None] * D + d[None, :], mask=used[:, None], other=0.0)
    top = tl.load(top_in + at, mask=used, other=-1.0e30)
    norm = tl.load(norm_in + at, mask=used, other=0.0)
    weight = tl.where(used, tl.exp2(top - tl.max(top, 0)), 0.0)
    total = tl.sum(part * weight[:, None], 0) * (1.0 / tl.sum(norm * weight, 0))
    if GATED:
        g = tl.load(gate + row * gate_row + head * gate_head + d).to(tl.float32)
        total = total.to(out.dtype.element_ty).to(tl.float32) / (1.0 + tl.exp(-g))
    tl.store(out + (row * HEADS + head) * D + d, total.to(out.dtype.element_ty))


def tile(device: torch.device) -> tuple[int, int]:
    """Return keys of a tile and pipeline stages that fit the device's shared memory."""
    if device.type != 'cuda':
        return 64, 2
    capability = torch.cuda.get_device_capability(device)
    small = capability[0] == 12 or capability in ((8, 6), (8, 9))  # 99 KiB a block
    return (32, 2) if small else (64, 2)


class DecodeAttention:
    """
    Attention of up to ``rows`` rows to one KV, and to a tail of each row's own.

    Holds the scratch of the splits; made once per pass, its memory is the caller's pool.
    """

    def __init__(self, rows: int, heads: int, kv_heads: int, head_dim: int,
                 device: torch.device, pdl: bool = False) -> None:
        self._partial = torch.empty((rows, heads, SPLITS, head_dim), device=device)
        self._top = torch.empty((rows, heads, SPLITS), device=device)
        self._norm = torch.empty((rows, heads, SPLITS), device=device)
        self._heads, self._kv_heads, self._D = heads, kv_heads, head_dim
        self._pdl, self._tile = pdl, tile(device)

    def __call__(self, q: Tensor, kv: Tensor, positions: Tensor, out: Tensor,
                 gate: Tensor | None = None, tail: Tensor | None = None,
                 prefix: Tensor | None = None) -> None:
        """
        Attend q [M, heads, D] into out of the same shape; row m sees keys 0 ... positions[m].

        kv [tokens, 2, kv_heads, D] of q's dtype or E4M3, positions int64 [M]. gate [M, heads, D],
        strided: out is multiplied by its sigmoid. tail [M, tokens, 2, kv_heads, D] holds each
        row's keys from prefix (int64 scalar on the device) on; kv those below it.
        """
        M, D, pdl = q.shape[0], self._D, self._pdl
        BN, stages = self._tile
        lanes = QUERIES // (self._heads // self._kv_heads)
        own = kv if tail is None else tail
        rows_split[(-(-M // lanes), SPLITS, self._kv_heads)](
            q, kv, own, positions, positions if prefix is None else prefix, self._partial,
            self._top, self._norm, M, own.stride(0), D**-0.5 * LOG2E, HEADS=self._heads,
            KV_HEADS=self._kv_heads, D=D, BM=QUERIES, BN=BN, SPLITS=SPLITS,
            TAIL=tail is not None, PDL=pdl, num_warps=SPLIT_WARPS, num_stages=stages,
            launch_pdl=pdl)
        gated = gate is not None
        by = gate if gate is not None else q
        rows_fold[(self._heads, M)](
            self._partial, self._top, self._norm, positions, by, out, by.stride(0), by.stride(1),
            HEADS=self._heads, D=D, BN=BN, SPLITS=SPLITS, GATED=gated, PDL=pdl,
            num_warps=FOLD_WARPS, launch_pdl=pdl)


def fits(heads: int, kv_heads: int, head_dim: int) -> bool:
    """Return whether the fixed tiles take these sizes."""
    return (heads % kv_heads == 0 and heads // kv_heads <= QUERIES
            and head_dim in (32, 64, 128, 256))


def reference(q: Tensor, kv: Tensor, positions: Tensor, gate: Tensor | None = None,
              tail: Tensor | None = None, prefix: int = 0) -> Tensor:
    """What ``DecodeAttention`` computes, row by row in float32."""
    rows = []
    for m, position in enumerate(positions.tolist()):
        whole = kv if tail is None else torch.cat([kv[:prefix], tail[m]])
        k, v = whole[:position + 1].float().repeat_interleave(
            q.shape[1] // kv.shape[2], 2).unbind(1)  # each [t, heads, D]
        scores = torch.einsum('hd,thd->ht', q[m].float(), k) * q.shape[2]**-0.5
        rows.append(torch.einsum('ht,thd->hd', scores.softmax(-1), v))
    y = torch.stack(rows)
    return y if gate is None else y * gate.float().sigmoid()


def selected(device: torch.device) -> bool:
    """Return whether these kernels agree with the reference; not inside a capture."""
    return triton_selected('decode attention', device, lambda: check(
        device, torch.bfloat16, 24, 4, 256, (0, 63, 64, 1500, 2500), 1e-2))


def fp8_selected(device: torch.device) -> bool:
    """As ``selected``, of keys and values in E4M3."""
    return triton_selected('decode attention, fp8', device, lambda: multiplies(device) and check(
        device, torch.bfloat16, 24, 4, 256, (0, 63, 64, 1500, 2500), 1e-2, E4M3))


def check(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int,
          lengths: Sequence[int], tolerance: float, stored: torch.dtype | None = None) -> bool:
    """
    Return whether rows that see keys 0 ... lengths[m], ascending, agree within ``tolerance``.

    Bitwise: each row alone, and with its keys from the second, a middle or a late one on in a
    tail. All keys beyond are NaN. ``stored``: of keys and values, if not ``dtype``.
    """
    M, last = len(lengths), lengths[-1]
    q = draw(device, dtype, M, heads, head_dim)
    kv = draw(device, stored or dtype, last + 70, 2, kv_heads, head_dim, seed=1)
    gate = draw(device, dtype, M, heads, 2 * head_dim, seed=2)[:, :, head_dim:]
    positions = torch.tensor(lengths, device=device)
    kv[last + 1:] = torch.nan
    attend = DecodeAttention(M, heads, kv_heads, head_dim, device, overlaps(device))

    def run(rows: slice, *own: Tensor) -> Tensor:
        out = torch.full_like(q[rows], torch.nan)
        attend(q[rows], kv, positions[rows], out, gate[rows], *own)
        return out

    together = run(slice(0, M))
    agree = [close(together, reference(q, kv, positions, gate), tolerance)]
    agree += [torch.equal(run(slice(m, m + 1))[0], together[m]) for m in range(M)]
    for at in (1, last // 2 + 3, last - 2):
        tail = torch.full((M, last + 1 - at, 2, kv_heads, head_dim), torch.nan, device=device,
                          dtype=kv.dtype)
        for m, position in enumerate(lengths):
            tail[m, :max(0, position + 1 - at)] = kv[at:max(at, position + 1)]
        mine = run(slice(0, M), tail, torch.tensor(at, device=device))
        agree.append(torch.equal(mine, together))
    return all(agree)


def _variants() -> tuple[Variant, ...]:
    found: list[Variant] = []
    split = dict.fromkeys('partial top_out norm_out'.split(), '*fp32') | {
        'q': '*bf16', 'positions': '*i64', 'prefix': '*i64',
        'M': 'i32', 'tail_row': 'i32', 'scale': 'fp32'}
    fold = {'partial': '*fp32', 'top_in': '*fp32', 'norm_in': '*fp32', 'positions': '*i64',
            'gate': '*bf16', 'out': '*bf16', 'gate_row': 'i32', 'gate_head': 'i32'}
    heads = {'HEADS': 24, 'KV_HEADS': 4, 'D': 256, 'SPLITS': SPLITS}
    boards: tuple[tuple[bool, int, str, tuple[int, ...]], ...] = (
        (False, 64, '*bf16', (87,)), (True, 64, '*bf16', (90, 110)), (True, 32, '*bf16', (121,)),
        (True, 64, '*fp8e4nv', (90, 110)), (True, 32, '*fp8e4nv', (121,)))
    for pdl, BN, kind, archs in boards:
        for tail in (False, True):
            values = {**heads, 'BM': QUERIES, 'BN': BN, 'TAIL': tail, 'PDL': pdl}
            found.append(Variant(
                rows_split, split | {'kv': kind, 'tail': kind}
                | dict.fromkeys(values, 'constexpr'), values,
                num_warps=SPLIT_WARPS, num_stages=2, archs=archs))
        if kind != '*bf16':
            continue  # the splits are folded by one kernel, whatever they were made of
        values = {'HEADS': 24, 'D': 256, 'BN': BN, 'SPLITS': SPLITS, 'GATED': True, 'PDL': pdl}
        found.append(Variant(rows_fold, fold | dict.fromkeys(values, 'constexpr'), values,
                             num_warps=FOLD_WARPS, archs=archs))
    return tuple(found)


VARIANTS = _variants()
