"""Attention kernels: many queries in one pass, and few queries split over the keys.

Masked scores are -1e30 and keys beyond the end -inf, as in ``nn.attention``: a query whose keys
are all masked gets the mean of the values. Scores are in powers of two (scale times log2 e).
"""
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flashrt_core.kernels._launch import close
from flashrt_core.kernels._launch import draw
from flashrt_core.kernels._launch import overlaps
from flashrt_core.kernels._triton import lazy_jit
from flashrt_core.kernels._triton import LazyKernel
from flashrt_core.kernels._triton import triton_selected
from flashrt_core.kernels._triton import Variant
from flashrt_core.nn import attend
from flashrt_core.nn import attend_shared_prefix

if TYPE_CHECKING:
    import triton.language as tl

LOG2E = 1.4426950408889634
SPAN = 128  # keys of one split
FEW_WARPS, FOLD_WARPS = 4, 2


@lazy_jit
def attend_all(q, k, v, mask, out, out_scale, rows, T,  # type: ignore[no-untyped-def]
               q_batch, q_token, kv_batch, kv_token, out_batch, out_token, scale,
               G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
               BN: tl.constexpr, MASKED: tl.constexpr):
    """
    Attend every query row of one key head; grid (rows of a head, key heads, batch).

    Row i of key head h is token i // G, query head h * G + i % G. Strides are in elements.
    With an out_scale [] out is E4M3, over the scale.
    """
    head = tl.program_id(1)
    batch = tl.program_id(2)
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, BD)
    inside = (i[:, None] < rows) & (d[None, :] < D)
    lane = (head * G + i % G) * D
    at = batch * q_batch + (i // G) * q_token + lane
    query = tl.load(q + at[:, None] + d[None, :], mask=inside, other=0.0)
    total = tl.zeros([BM, BD], tl.float32)
    top = tl.full([BM], -1.0e30, tl.float32)
    norm = tl.zeros([BM], tl.float32)
    for start in range(0, T, BN):
        t = start + tl.arange(0, BN)
        place = batch * kv_batch + t * kv_token + head * D
        key = tl.load(k + place[None, :] + d[:, None],
                      mask=(t[None, :] < T) & (d[:, None] < D), other=0.0)
        score = tl.dot(query, key) * scale
        if MASKED:
            seen = tl.load(mask + t, mask=t < T, other=0) != 0
            score = tl.where(seen[None, :], score, -1.0e30)
        score = tl.where(t[None, :] < T, score, float('-inf'))
        higher = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp2(score - higher[:, None])
        fade = tl.exp2(top - higher)
        norm = norm * fade + tl.sum(weight, 1)
        value = tl.load(v + place[:, None] + d[None, :],
                        mask=(t[:, None] < T) & (d[None, :] < D), other=0.0)
        total = tl.dot(weight.to(value.dtype), value, total * fade[:, None])
        top = higher
    to = batch * out_batch + (i // G) * out_token + lane
    total = total * (1.0 / norm)[:, None]
    if out_scale is not None:
        total = tl.clamp(total / tl.load(out_scale), -448.0, 448.0)
    tl.store(out + to[:, None] + d[None, :], total.to(out.dtype.element_ty), mask=inside)


@lazy_jit
def attend_split(q, prefix, mask, suffix, partial, top_out, norm_out, P, S, scale,  # type: ignore[no-untyped-def]
                 HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
                 BM: tl.constexpr, SPAN: tl.constexpr, ALONE: tl.constexpr, PDL: tl.constexpr):
    """
    Attend one span of keys; grid (query rows of a head, spans + 1, batch * key heads).

    q [R, S, heads, D], prefix [P, 2, kv_heads, D] shared by the batch, mask [P], suffix
    [R, S, 2, kv_heads, D]. The last span is the suffix, seen by all; ALONE: token 0 sees itself
    alone of it.
    Each span's own result goes to partial [R * kv_heads, spans + 1, S * G, D], with its maximum
    and norm.
    """
    G: tl.constexpr = HEADS // KV_HEADS
    split = tl.program_id(1)
    spans = tl.num_programs(1) - 1
    batch = tl.program_id(2) // KV_HEADS
    head = tl.program_id(2) % KV_HEADS
    rows = S * G
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, D)
    own = split == spans
    if PDL:
        tl.inline_asm_elementwise('griddepcontrol.launch_dependents; // $0', '=r', [],
                                  dtype=tl.int32, is_pure=False, pack=1)
    if PDL:
        if own:  # the prefix is older than the kernel before, the suffix is its output
            tl.inline_asm_elementwise('griddepcontrol.wait; // $0', '=r', [],
                                      dtype=tl.int32, is_pure=False, pack=1)
    begin = tl.where(own, batch * S * 2 * KV_HEADS * D, split * SPAN * 2 * KV_HEADS * D)
    keys = tl.where(own, S, P - split * SPAN)
    address = tl.where(own, suffix.to(tl.int64), prefix.to(tl.int64))
    base = tl.multiple_of(address.to(prefix.dtype), 16)
    base += tl.multiple_of(begin, 16) + head * D
    t = tl.arange(0, SPAN)
    place = base + t * (2 * KV_HEADS * D)
    key = tl.load(place[None, :] + d[:, None], mask=t[None, :] < keys, other=0.0)
    value = tl.load(place[:, None] + KV_HEADS * D + d[None, :], mask=t[:, None] < keys, other=0.0)
    seen = tl.load(mask + split * SPAN + t, mask=(split * SPAN + t < P) & (split < spans),
                   other=1) != 0
    if PDL:
        tl.inline_asm_elementwise('griddepcontrol.wait; // $0', '=r', [],
                                  dtype=tl.int32, is_pure=False, pack=1)
    at = ((batch * S + i // G) * HEADS + head * G + i % G) * D
    query = tl.load(q + at[:, None] + d[None, :], mask=i[:, None] < rows, other=0.0)
    score = tl.dot(query, key) * scale
    visible = seen[None, :]
    if ALONE:
        visible = visible & ((t[None, :] == 0) | (i[:, None] >= G) | (split < spans))
    score = tl.where(visible, score, -1.0e30)
    score = tl.where(t[None, :] < keys, score, float('-inf'))
    top = tl.maximum(tl.max(score, 1), -1.0e30)
    weight = tl.exp2(score - top[:, None])
    norm = tl.sum(weight, 1)
    total = tl.dot(weight.to(value.dtype), value) * (1.0 / norm)[:, None]
    to = (tl.program_id(2) * (spans + 1) + split) * rows + i
    tl.store(partial + to[:, None] * D + d[None, :], total.to(partial.dtype.element_ty),
             mask=i[:, None] < rows)
    tl.store(top_out + to, top, mask=i < rows)
    tl.store(norm_out + to, norm, mask=i < rows)


@lazy_jit
def attend_fold(partial, top_in, norm_in, out, S, splits,  # type: ignore[no-untyped-def]
                HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
                SPLITS: tl.constexpr, PDL: tl.constexpr):
    """Fold the spans of ``attend_split`` into out [R, S, heads, D]; grid (S * G, R * kv_heads)."""
    G: tl.constexpr = HEADS // KV_HEADS
    i = tl.program_id(0)
    batch = tl.program_id(1) // KV_HEADS
    head = tl.program_id(1) % KV_HEADS
    d = tl.arange(0, D)
    j = tl.arange(0, SPLITS)
    if PDL:
        tl.inline_asm_elementwise('griddepcontrol.launch_dependents; // $0', '=r', [],
                                  dtype=tl.int32, is_pure=False, pack=1)
        tl.inline_asm_elementwise('griddepcontrol.wait; // $0', '=r', [],
                                  dtype=tl.int32, is_pure=False, pack=1)
    at = (tl.program_id(1) * splits + j) * (S * G) + i
    part = tl.load(partial + at[:, None] * D + d[None, :], mask=j[:, None] < splits, other=0.0)
    top = tl.load(top_in + at, mask=j < splits, other=float('-inf'))
    norm = tl.load(norm_in + at, mask=j < splits, other=0.0)
    weight = tl.exp2(top - tl.max(top, 0)) * norm
    total = tl.sum(part.to(tl.float32) * weight[:, None], 0) * (1.0 / tl.sum(weight, 0))
    to = ((batch * S + i // G) * HEADS + head * G + i % G) * D
    tl.store(out + to + d, total.to(out.dtype.element_ty))


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor,
              scale: Tensor | None = None) -> None:
    """
    Bidirectional attention of q [B, T, Hq, D] to k and v [B, T, Hk, D] into out [B, T, Hq, D].

    Heads lie one behind the other; tokens and batch may be strided. mask bool [T] or None. With a
    scale float32 [] out is E4M3, over the scale.
    """
    B, T, Hq, D = q.shape
    Hk = k.shape[2]
    G = Hq // Hk
    BD = max(16, 1 << (D - 1).bit_length())
    grid = (-(-T * G // 64), Hk, B)
    attend_all[grid](
        q, k, v, q if mask is None else mask, out, scale, T * G, T, q.stride(0), q.stride(1),
        k.stride(0), k.stride(1), out.stride(0), out.stride(1), D**-0.5 * LOG2E,
        G=G, D=D, BD=BD, BM=64, BN=64, MASKED=mask is not None, num_warps=4,
        num_stages=3 if BD <= 128 else 2)


class FewQueries:
    """
    Attention of R rows' S suffix tokens to a shared prefix and their own suffix.

    ``alone``: token 0 of a suffix sees no other token of it (Pi0's state).
    Holds the scratch of one shape; made outside the hot loop, its memory is the caller's pool.
    """

    def __init__(self, rows: int, suffix: int, prefix: int, heads: int, kv_heads: int,
                 head_dim: int, device: torch.device, pdl: bool = False,
                 alone: bool = True) -> None:
        self._alone = alone
        self._shape = (rows, suffix, prefix, heads, kv_heads, head_dim)
        self._splits = -(-prefix // SPAN) + 1
        self._pdl = pdl
        lanes = suffix * heads // kv_heads
        parts = (rows * kv_heads, self._splits, lanes)
        self._partial = torch.empty((*parts, head_dim), device=device)
        self._top = torch.empty(parts, device=device)
        self._norm = torch.empty(parts, device=device)
        if suffix > SPAN:
            raise ValueError(f'{suffix} suffix tokens do not fit one span of {SPAN} keys')

    def __call__(self, q: Tensor, prefix: Tensor, mask: Tensor, suffix: Tensor,
                 out: Tensor) -> None:
        """
        Attend q [R, S, Hq, D] into out of the same shape.

        prefix [P, 2, Hk, D] and mask bool [P] are read early: an earlier graph must have written
        them. suffix [R, S, 2, Hk, D] may be the output of the kernel before.
        """
        R, S, P, heads, kv_heads, D = self._shape
        lanes = S * heads // kv_heads
        grid = (-(-lanes // 64), self._splits, R * kv_heads)
        attend_split[grid](
            q, prefix, mask, suffix, self._partial, self._top, self._norm, P, S,
            D**-0.5 * LOG2E, HEADS=heads, KV_HEADS=kv_heads, D=D, BM=64, SPAN=SPAN,
            ALONE=self._alone, PDL=self._pdl, num_warps=FEW_WARPS, num_stages=1,
            launch_pdl=self._pdl)
        attend_fold[(lanes, R * kv_heads)](
            self._partial, self._top, self._norm, out, S, self._splits,
            HEADS=heads, KV_HEADS=kv_heads, D=D, SPLITS=1 << (self._splits - 1).bit_length(),
            PDL=self._pdl, num_warps=FOLD_WARPS, launch_pdl=self._pdl)


def selected(device: torch.device) -> bool:
    """Return whether these kernels agree with ``nn.attention``; not inside a capture."""
    return triton_selected('attention', device, lambda: _check(device))


def _check(device: torch.device) -> bool:
    """Compare with torch in float32: heads of 72, masked keys, a shared prefix with two rows."""
    dtype = torch.bfloat16
    q, k, v = draw(device, dtype, 2, 100, 3, 4, 72).unbind(2)
    out = torch.full((2, 100, 4, 72), torch.nan, device=device, dtype=dtype)
    attention(q, k, v, None, out)
    agree = [close(out.flatten(2), attend(q.float(), k.float(), v.float()))]

    q, kv = draw(device, dtype, 1, 150, 8, 256), draw(device, dtype, 150, 2, 1, 256, seed=1)
    mask = torch.arange(150, device=device) % 7 != 2
    mask[60:] &= torch.arange(90, device=device) < 80
    out = torch.full_like(q, torch.nan)
    attention(q, kv[None, :, 0], kv[None, :, 1], mask, out)
    agree.append(close(out.flatten(2),
                       attend(q.float(), kv[None, :, 0].float(), kv[None, :, 1].float(), mask)))

    q, own = draw(device, dtype, 2, 51, 8, 256, seed=2), draw(device, dtype, 2, 51, 2, 1, 256,
                                                              seed=3)
    out = torch.full_like(q, torch.nan)
    token = torch.arange(51, device=device)
    for alone in (True, False):
        few = FewQueries(2, 51, 150, 8, 1, 256, device, overlaps(device), alone)
        few(q, kv, mask, own, out.fill_(torch.nan))
        sees = (token[None, :] == 0) | (token[:, None] > 0) | (not alone)
        expected = attend_shared_prefix(q.float(), own[:, :, 0].float(), own[:, :, 1].float(),
                                        kv[:, 0].float(), kv[:, 1].float(), mask, sees)
        agree.append(close(out.flatten(2), expected))
    return all(agree)


def _variants() -> tuple[Variant, ...]:
    whole = dict.fromkeys('rows T q_batch q_token kv_batch kv_token out_batch out_token'.split(),
                          'i32') | {'scale': 'fp32'}
    whole |= {'q': '*bf16', 'k': '*bf16', 'v': '*bf16', 'mask': '*i1', 'out': '*bf16'}
    split = dict.fromkeys('partial top_out norm_out'.split(), '*fp32') | {
        'q': '*bf16', 'prefix': '*bf16', 'mask': '*i1', 'suffix': '*bf16', 'P': 'i32', 'S': 'i32',
        'scale': 'fp32'}
    quantised = {'out': '*fp8e4nv', 'out_scale': '*fp32'}
    fold = {'partial': '*fp32', 'top_in': '*fp32', 'norm_in': '*fp32', 'out': '*bf16',
            'S': 'i32', 'splits': 'i32'}
    heads = {'HEADS': 8, 'KV_HEADS': 1, 'D': 256}
    found: list[Variant] = []

    def add(kernel: LazyKernel, types: dict[str, str], warps: int, stages: int,
            archs: tuple[int, ...], **values: object) -> None:
        found.append(Variant(kernel, types | dict.fromkeys(values, 'constexpr'), values,
                             num_warps=warps, num_stages=stages, archs=archs))

    views = {'G': 1, 'D': 72, 'BD': 128, 'BM': 64, 'BN': 64, 'MASKED': False}
    prefix = {'G': 8, 'D': 256, 'BD': 256, 'BM': 64, 'BN': 64, 'MASKED': True}
    add(attend_all, whole, 4, 3, (87, 90, 110), **views, out_scale=None)
    add(attend_all, whole, 4, 2, (87, 90, 110), **prefix, out_scale=None)
    add(attend_all, whole | quantised, 4, 2, (90, 110), **prefix)
    boards: tuple[tuple[bool, tuple[int, ...]], ...] = ((False, (87,)), (True, (90, 110)))
    for pdl, archs in boards:
        for alone in (True, False):
            add(attend_split, split, FEW_WARPS, 1, archs, **heads, BM=64, SPAN=SPAN, ALONE=alone,
                PDL=pdl)
        add(attend_fold, fold, FOLD_WARPS, 3, archs, **heads, SPLITS=16, PDL=pdl)
    return tuple(found)


VARIANTS = _variants()
