"""Causal attention of many tokens at an offset known on the device, to the KV below them."""
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


@lazy_jit
def attend_causal(q, kv, gate, out, position, length, T, scale, gate_row, gate_head,  # type: ignore[no-untyped-def]
                  HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
                  BM: tl.constexpr, BN: tl.constexpr):
    """
    Attend the query rows of one key head; grid (row tiles, KV_HEADS), the last tokens first.

    Row i is token i // G, query head h * G + i % G. q and out [T, HEADS, D]; token t of the first
    ``length`` sees the keys 0 ... position + t (both int64 scalars) of kv [tokens, 2, KV_HEADS,
    D], of q's dtype or widened to it; the others become 0. out is multiplied by the sigmoid of
    gate, whose token t and head h begin at t * gate_row + h * gate_head.
    """
    G: tl.constexpr = HEADS // KV_HEADS
    TOKEN: tl.constexpr = 2 * KV_HEADS * D
    head = tl.program_id(1)
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
    for start in range(0, end, BN):
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
    total = total * (1.0 / tl.where(norm > 0.0, norm, 1.0))[:, None]
    place = gate + token.to(tl.int64)[:, None] * gate_row + (head * G + i % G)[:, None] * gate_head
    g = tl.load(place + d[None, :], mask=valid[:, None], other=0.0).to(tl.float32)
    total = tl.where(valid[:, None], total / (1.0 + tl.exp(-g)), 0.0)
    tl.store(out + at[:, None] + d[None, :], total.to(out.dtype.element_ty),
             mask=token[:, None] < T)


def tile(device: torch.device) -> tuple[int, int, int, int]:
    """Return query rows, keys, warps and stages that fit the device's shared memory."""
    if device.type != 'cuda':
        return 64, 64, 4, 2
    major = torch.cuda.get_device_capability(device)[0]
    return (128, 64, 8, 2) if major in (9, 10, 11) else (64, 32, 4, 2)


def attention(q: Tensor, kv: Tensor, gate: Tensor, out: Tensor, position: Tensor,
              length: Tensor) -> None:
    """
    Attend q [T, heads, D] into out of the same shape, times sigmoid(gate).

    kv [tokens, 2, kv_heads, D], of q's dtype or E4M3, holds the keys of these tokens too; gate
    [T, heads, D], strided; position (of the first token) and length (of valid tokens) int64
    scalars on the device. Rows of out from ``length`` on become 0.
    """
    T, heads, D = q.shape
    kv_heads = kv.shape[2]
    BM, BN, warps, stages = tile(q.device)
    attend_causal[(-(-T * (heads // kv_heads) // BM), kv_heads)](
        q, kv, gate, out, position, length, T, D**-0.5 * LOG2E, gate.stride(0), gate.stride(1),
        HEADS=heads, KV_HEADS=kv_heads, D=D, BM=BM, BN=BN, num_warps=warps, num_stages=stages)


def fits(heads: int, kv_heads: int, head_dim: int) -> bool:
    """Return whether the fixed tiles take these sizes."""
    return heads % kv_heads == 0 and head_dim in (32, 64, 128, 256)


def selected(device: torch.device) -> bool:
    """Return whether the kernel agrees with the reference; not inside a capture."""
    return triton_selected('prefill attention', device, lambda: all(
        check(device, torch.bfloat16, 24, 4, 256, T, length, position, 1e-2)
        for T, length, position in ((16, 16, 0), (64, 1, 1000), (256, 200, 300))))


def fp8_selected(device: torch.device) -> bool:
    """As ``selected``, of keys and values in E4M3."""
    return triton_selected('prefill attention, fp8', device, lambda: multiplies(device) and all(
        check(device, torch.bfloat16, 24, 4, 256, T, length, position, 1e-2, E4M3)
        for T, length, position in ((16, 16, 0), (64, 1, 1000), (256, 200, 300))))


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
    attention(q, kv, gate, out, at, count)
    rows = position + torch.arange(length, device=device)
    expected = reference(q[:length], kv, rows, gate[:length])
    return close(out[:length], expected, tolerance) and not out[length:].any()


def _variants() -> tuple[Variant, ...]:
    found = []
    types = dict.fromkeys('q gate out'.split(), '*bf16') | {
        'position': '*i64', 'length': '*i64', 'T': 'i32', 'scale': 'fp32', 'gate_row': 'i32',
        'gate_head': 'i32'}
    boards: tuple[tuple[int, int, int, str, tuple[int, ...]], ...] = (
        (128, 64, 8, '*bf16', (90, 110)), (64, 32, 4, '*bf16', (87, 121)),
        (128, 64, 8, '*fp8e4nv', (90, 110)), (64, 32, 4, '*fp8e4nv', (121,)))
    for BM, BN, warps, kind, archs in boards:
        values = {'HEADS': 24, 'KV_HEADS': 4, 'D': 256, 'BM': BM, 'BN': BN}
        found.append(Variant(
            attend_causal, types | {'kv': kind} | dict.fromkeys(values, 'constexpr'), values,
            num_warps=warps, num_stages=2, archs=archs))
    return tuple(found)


VARIANTS = _variants()
