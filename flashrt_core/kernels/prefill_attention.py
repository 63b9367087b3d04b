"""Causal attention of many tokens at an offset known on the device, to the KV below them.

Few tokens behind a long context fill a GPU only if its keys are dealt out: split s of S takes the
tiles s, s + S, ... of ``BN`` keys, and the splits are folded in order. S comes from the sizes of
the chunk alone, so equal cuts have equal bits.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flashrt_core.kernels._launch import close
from flashrt_core.kernels._launch import draw
from flashrt_core.kernels._triton import lazy_jit
from flashrt_core.kernels._triton import triton_selected
from flashrt_core.kernels._triton import Variant
from flashrt_core.kernels.decode_attention import reference
from flashrt_core.nn.fp8 import E4M3
from flashrt_core.nn.fp8 import multiplies

if TYPE_CHECKING:
    import triton.language as tl

LOG2E = 1.4426950408889634
PROGRAMS = 132   # up to which keys are split: the processors of an H200, on any GPU
MOST_SPLITS = 32
FOLD_WARPS = 4


@lazy_jit
def attend_causal(q, kv, gate, out, top_out, norm_out, position, length, T, scale, gate_row,  # type: ignore[no-untyped-def]
                  gate_head, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
                  BM: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr):
    """
    Attend the query rows of one key head; grid (row tiles, KV_HEADS, SPLITS), last tokens first.

    Row i is token i // G, query head h * G + i % G. q and out [T, HEADS, D]; token t of the first
    ``length`` sees the keys 0 ... position + t (both int64 scalars) of kv [tokens, 2, KV_HEADS,
    D], of q's dtype or widened to it; the others become 0. out is multiplied by the sigmoid of
    gate, whose token t and head h begin at t * gate_row + h * gate_head. With several splits, for
    ``fold_causal``: float32 out [T, HEADS, SPLITS, D], top_out and norm_out [T, HEADS, SPLITS].
    """
    G: tl.constexpr = HEADS // KV_HEADS
    TOKEN: tl.constexpr = 2 * KV_HEADS * D
    head = tl.program_id(1)
    split = tl.program_id(2)
    n = tl.load(length).to(tl.int32)
    base = tl.load(position).to(tl.int32)
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    i = block * BM + tl.arange(0, BM)
    token = i // G
    valid = token < n
    d = tl.arange(0, D)
    at = token.to(tl.int64) * (HEADS * D) + (head * G + i % G) * D
    query = tl.load(q + at[:, None] + d[None, :], mask=valid[:, None], other=0.0)
    total = tl.zeros([BM, D], tl.float32)
    top = tl.full([BM], -1.0e30, tl.float32)
    norm = tl.zeros([BM], tl.float32)
    first = block * BM // G
    last = tl.minimum((block * BM + BM - 1) // G, n - 1)
    end = tl.where(first < n, base + last + 1, 0)
    for start in range(split * BN, end, SPLITS * BN):
        t = start + tl.arange(0, BN)
        place = kv + t * TOKEN + head * D
        key = tl.load(place[None, :] + d[:, None], mask=t[None, :] < end, other=0.0)
        if kv.dtype.element_ty != q.dtype.element_ty:
            key = key.to(tl.float32).to(query.dtype)
        score = tl.dot(query, key) * scale
        score = tl.where(t[None, :] <= base + token[:, None], score, float('-inf'))
        higher = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp2(score - higher[:, None])
        fade = tl.exp2(top - higher)
        norm = norm * fade + tl.sum(weight, 1)
        value = tl.load(place[:, None] + KV_HEADS * D + d[None, :], mask=t[:, None] < end,
                        other=0.0)
        if kv.dtype.element_ty != q.dtype.element_ty:
            value = value.to(tl.float32).to(query.dtype)
        total = tl.dot(weight.to(value.dtype), value, total * fade[:, None])
        top = higher
    if SPLITS > 1:
        to = (token.to(tl.int64) * HEADS + head * G + i % G) * SPLITS + split
        tl.store(out + to[:, None] * D + d[None, :], total, mask=valid[:, None])
        tl.store(top_out + to, top, mask=valid)
        tl.store(norm_out + to, norm, mask=valid)
        return
    total = total * (1.0 / tl.where(norm > 0.0, norm, 1.0))[:, None]
    place = gate + token.to(tl.int64)[:, None] * gate_row + (head * G + i % G)[:, None] * gate_head
    g = tl.load(place + d[None, :], mask=valid[:, None], other=0.0).to(tl.float32)
    total = tl.where(valid[:, None], total / (1.0 + tl.exp(-g)), 0.0)
    tl.store(out + at[:, None] + d[None, :], total.to(out.dtype.element_ty),
             mask=token[:, None] < T)


@lazy_jit
def fold_causal(partial, top_in, norm_in, gate, out, length, gate_row, gate_head,  # type: ignore[no-untyped-def]
                HEADS: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """
    Fold the splits of ``attend_causal`` into out [T, HEADS, D], times sigmoid(gate).

    Tokens from ``length`` on become 0. Grid (HEADS, T).
    """
    head = tl.program_id(0)
    token = tl.program_id(1)
    d = tl.arange(0, D)
    j = tl.arange(0, BLOCK)
    valid = token < tl.load(length)
    used = valid & (j < SPLITS)
    row = token.to(tl.int64) * HEADS + head
    top = tl.load(top_in + row * SPLITS + j, mask=used, other=-1.0e30)
    norm = tl.load(norm_in + row * SPLITS + j, mask=used, other=0.0)
    part = tl.load(partial + (row * SPLITS + j[:, None]) * D + d[None, :], mask=used[:, None],
                   other=0.0)
    weight = tl.exp2(top - tl.max(top, 0))
    norm = tl.sum(norm * weight, 0)
    total = tl.sum(part * weight[:, None], 0) * (1.0 / tl.where(norm > 0.0, norm, 1.0))
    place = gate + token.to(tl.int64) * gate_row + head * gate_head
    g = tl.load(place + d, mask=(d < D) & valid, other=0.0).to(tl.float32)
    total = tl.where(valid, total / (1.0 + tl.exp(-g)), 0.0)
    tl.store(out + row * D + d, total.to(out.dtype.element_ty))


def tile(device: torch.device) -> tuple[int, int, int, int]:
    """Return query rows, keys, warps and stages that fit the device's shared memory."""
    if device.type != 'cuda':
        return 64, 64, 4, 2
    major = torch.cuda.get_device_capability(device)[0]
    return (128, 64, 8, 2) if major in (9, 10, 11) else (64, 32, 4, 2)


class PrefillAttention:
    """
    Attention of a chunk of ``tokens``; holds the scratch of its splits, which layers share.

    Made once per pass, its memory is the caller's pool.
    """

    def __init__(self, tokens: int, heads: int, kv_heads: int, head_dim: int,
                 device: torch.device) -> None:
        self._tile = tile(device)
        self._blocks = -(-tokens * (heads // kv_heads) // self._tile[0])
        self.splits = max(1, min(MOST_SPLITS, PROGRAMS // (self._blocks * kv_heads)))
        shape = (tokens, heads, self.splits) if self.splits > 1 else (0,)
        self._partial = torch.empty((*shape, head_dim), device=device)
        self._top, self._norm = torch.empty((2, *shape), device=device).unbind(0)

    def __call__(self, q: Tensor, kv: Tensor, gate: Tensor, out: Tensor, position: Tensor,
                 length: Tensor) -> None:
        """
        Attend q [T, heads, D] into out of the same shape, times sigmoid(gate).

        kv [tokens, 2, kv_heads, D], of q's dtype or E4M3, holds the keys of these tokens too; gate
        [T, heads, D], strided; position (of the first token) and length (of valid tokens) int64
        scalars on the device. Rows of out from ``length`` on become 0.
        """
        T, heads, D = q.shape
        kv_heads, splits = kv.shape[2], self.splits
        BM, BN, warps, stages = self._tile
        attend_causal[(self._blocks, kv_heads, splits)](
            q, kv, gate, self._partial if splits > 1 else out, self._top, self._norm, position,
            length, T, D**-0.5 * LOG2E, gate.stride(0), gate.stride(1), HEADS=heads,
            KV_HEADS=kv_heads, D=D, BM=BM, BN=BN, SPLITS=splits, num_warps=warps,
            num_stages=stages)
        if splits > 1:
            fold_causal[(heads, T)](
                self._partial, self._top, self._norm, gate, out, length, gate.stride(0),
                gate.stride(1), HEADS=heads, D=D, SPLITS=splits,
                BLOCK=1 << (splits - 1).bit_length(), num_warps=FOLD_WARPS)


CASES = ((16, 16, 0), (64, 1, 1000), (64, 64, 2100), (256, 200, 300), (1024, 40, 300))


def fits(heads: int, kv_heads: int, head_dim: int) -> bool:
    """Return whether the fixed tiles take these sizes."""
    return heads % kv_heads == 0 and head_dim in (32, 64, 128, 256)


def selected(device: torch.device) -> bool:
    """Return whether the kernel agrees with the reference; not inside a capture."""
    return triton_selected('prefill attention', device, lambda: all(
        check(device, torch.bfloat16, 24, 4, 256, T, length, position, 1e-2)
        for T, length, position in CASES))


def fp8_selected(device: torch.device) -> bool:
    """As ``selected``, of keys and values in E4M3."""
    return triton_selected('prefill attention, fp8', device, lambda: multiplies(device) and all(
        check(device, torch.bfloat16, 24, 4, 256, T, length, position, 1e-2, E4M3)
        for T, length, position in CASES))


def check(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int,
          T: int, length: int, position: int, tolerance: float,
          stored: torch.dtype | None = None) -> bool:
    """
    Return whether ``length`` of T tokens agree within ``tolerance``; dead keys are NaN.

    ``stored``: of keys and values, if not ``dtype``.
    """
    q = draw(device, dtype, T, heads, head_dim)
    kv = draw(device, stored or dtype, position + T + 70, 2, kv_heads, head_dim, seed=1)
    kv[position + length:] = torch.nan
    gate = draw(device, dtype, T, heads, 2 * head_dim, seed=2)[:, :, head_dim:]
    out = torch.full_like(q, torch.nan)
    at, count = torch.tensor([position, length], device=device).unbind(0)
    attend = PrefillAttention(T, heads, kv_heads, head_dim, device)
    attend(q, kv, gate, out, at, count)
    rows = position + torch.arange(length, device=device)
    expected = reference(q[:length], kv, rows, gate[:length])
    return close(out[:length], expected, tolerance) and not out[length:].any()


def _variants() -> tuple[Variant, ...]:
    found = []
    sizes = {'length': '*i64', 'gate_row': 'i32', 'gate_head': 'i32'}
    stats = {'top_out': '*fp32', 'norm_out': '*fp32'}
    types = {'q': '*bf16', 'gate': '*bf16', 'position': '*i64', 'T': 'i32', 'scale': 'fp32'}
    types |= sizes | stats
    folds = sizes | {'partial': '*fp32', 'top_in': '*fp32', 'norm_in': '*fp32', 'gate': '*bf16',
                     'out': '*bf16'}
    boards: tuple[tuple[int, int, int, str, tuple[int, ...]], ...] = (
        (128, 64, 8, '*bf16', (90, 110)), (64, 32, 4, '*bf16', (87, 121)),
        (128, 64, 8, '*fp8e4nv', (90, 110)), (64, 32, 4, '*fp8e4nv', (121,)))
    for BM, BN, warps, kind, archs in boards:
        for splits, out in ((1, '*bf16'), (11, '*fp32')):
            values = {'HEADS': 24, 'KV_HEADS': 4, 'D': 256, 'BM': BM, 'BN': BN, 'SPLITS': splits}
            found.append(Variant(
                attend_causal,
                types | {'kv': kind, 'out': out} | dict.fromkeys(values, 'constexpr'), values,
                num_warps=warps, num_stages=2, archs=archs))
    values = {'HEADS': 24, 'D': 256, 'SPLITS': 11, 'BLOCK': 16}
    found.append(Variant(fold_causal, folds | dict.fromkeys(values, 'constexpr'), values,
                         num_warps=FOLD_WARPS))
    return tuple(found)


VARIANTS = _variants()
