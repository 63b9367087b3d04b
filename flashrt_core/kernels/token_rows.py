"""Row-wise kernels of a planner's layers: q and k normed, rotated and stored; the SiLU gate."""
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
from flashrt_core.nn import rotate

if TYPE_CHECKING:
    import triton.language as tl

HEADS_FEW, HEADS_MANY = 4, 16  # heads of a program: for few tokens, for many


@lazy_jit
def place_heads(proj, q_norm, k_norm, cos, sin, slots, q, kv, proj_row, eps,  # type: ignore[no-untyped-def]
                HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
                ROTARY: tl.constexpr, BH: tl.constexpr, PDL: tl.constexpr):
    """
    Norm q and k (zero-centred RMS), rotate their first ROTARY dims, place q, k, v.

    proj [tokens, HEADS x (query, gate), KV_HEADS keys, KV_HEADS values], proj_row elements apart.
    cos and sin [tokens, ROTARY / 2]. q [tokens, HEADS, D]; keys and values of token t go to
    kv[slots[t]] of [slots, 2, KV_HEADS, D], nowhere if the slot (int64) is negative. A kv of
    another dtype than q is E4M3 and saturates.
    Grid (tokens, (HEADS + 2 * KV_HEADS) / BH).
    """
    HALF: tl.constexpr = ROTARY // 2
    token = tl.program_id(0)
    h = tl.program_id(1) * BH + tl.arange(0, BH)[:, None]
    d = tl.arange(0, D)[None, :]
    other = tl.where(d < HALF, d + HALF, tl.where(d < ROTARY, d - HALF, d))
    is_q = h < HEADS
    is_v = h >= HEADS + KV_HEADS
    inside = h < HEADS + 2 * KV_HEADS
    if PDL:
        tl.inline_asm_elementwise('griddepcontrol.launch_dependents; // $0', '=r', [],
                                  dtype=tl.int32, is_pure=False, pack=1)
    gain = tl.where(is_q, tl.load(q_norm + d), tl.load(k_norm + d))
    gain = tl.where(is_v, 0.0, gain) + 1.0
    twist = tl.where(is_q, tl.load(q_norm + other), tl.load(k_norm + other)) + 1.0
    if PDL:
        tl.inline_asm_elementwise('griddepcontrol.wait; // $0', '=r', [],
                                  dtype=tl.int32, is_pure=False, pack=1)
    row = proj + token.to(tl.int64) * proj_row
    begin = tl.where(is_q, h * 2 * D, HEADS * 2 * D + (h - HEADS) * D)
    value = tl.load(row + begin + d, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 1) / D + eps)[:, None]
    scale = tl.where(is_v, 1.0, scale)
    turned = (d < ROTARY) & (is_v == 0)
    pair = tl.load(row + begin + other, mask=inside & turned, other=0.0).to(tl.float32)
    table = token * HALF + d % HALF
    c = tl.where(turned, tl.load(cos + table, mask=d < ROTARY, other=1.0), 1.0)
    s = tl.where(turned, tl.load(sin + table, mask=d < ROTARY, other=0.0), 0.0)
    s = tl.where(d < HALF, -s, s)
    # Rounded as between the layers of the reference.
    value = (value * scale * gain).to(q.dtype.element_ty).to(tl.float32)
    pair = (pair * scale * twist).to(q.dtype.element_ty).to(tl.float32)
    value = (value * c + pair * s).to(q.dtype.element_ty)
    tl.store(q + (token.to(tl.int64) * HEADS + h) * D + d, value, mask=is_q)
    slot = tl.load(slots + token)
    to = kv + slot * (2 * KV_HEADS * D) + (h - HEADS) * D + d
    if kv.dtype.element_ty != q.dtype.element_ty:
        value = tl.clamp(value.to(tl.float32), -448.0, 448.0)
    tl.store(to, value.to(kv.dtype.element_ty), mask=(is_q == 0) & inside & (slot >= 0))


@lazy_jit
def silu_gate(gate_up, out, N: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write out [rows, N] = silu(gate) * up of gate_up [rows, 2 * N]; grid (columns, rows)."""
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * 2 * N + n).to(tl.float32)
    up = tl.load(gate_up + row * 2 * N + N + n).to(tl.float32)
    tl.store(out + row * N + n, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty))


def heads(proj: Tensor, q_norm: Tensor, k_norm: Tensor, cos: Tensor, sin: Tensor, slots: Tensor,
          q: Tensor, kv: Tensor, eps: float, pdl: bool = False) -> None:
    """
    Launch ``place_heads``: proj [T, (2 * heads + 2 * kv_heads) * D] -> q [T, heads, D] and kv.

    cos and sin float32 [T, 1, rotary / 2], slots int64 [T] into kv [slots, 2, kv_heads, D].
    """
    T, count, D = q.shape
    kv_heads = kv.shape[-2]
    BH = HEADS_FEW if T <= 16 else HEADS_MANY
    place_heads[(T, -(-(count + 2 * kv_heads) // BH))](
        proj, q_norm, k_norm, cos, sin, slots, q, kv, proj.stride(0), eps, HEADS=count,
        KV_HEADS=kv_heads, D=D, ROTARY=2 * cos.shape[-1], BH=BH, PDL=pdl, num_warps=4,
        launch_pdl=pdl)


def gate(gate_up: Tensor, out: Tensor) -> None:
    """Launch ``silu_gate`` over gate_up [rows, 2 * N]."""
    count, N = out.shape
    block = min(2048, N & -N)
    silu_gate[(N // block, count)](gate_up, out, N=N, BLOCK=block, num_warps=4)


def selected(device: torch.device) -> bool:
    """Return whether these kernels agree with torch on ``device``; not inside a capture."""
    return triton_selected('token rows', device, lambda: all(
        check(device, torch.bfloat16, T, 24, 4, 256, 64, 1e-2) for T in (3, 40)))


def fp8_selected(device: torch.device) -> bool:
    """As ``selected``, of keys and values in E4M3."""
    return triton_selected('token rows, fp8', device, lambda: fp8.multiplies(device) and all(
        check(device, torch.bfloat16, T, 24, 4, 256, 64, 1e-2, fp8.E4M3) for T in (3, 40)))


def check(device: torch.device, dtype: torch.dtype, T: int, count: int, kv_heads: int, D: int,
          rotary: int, tolerance: float, kept_as: torch.dtype | None = None) -> bool:
    """
    Return whether both kernels agree with float32; unstored slots keep what they held.

    ``kept_as``: of keys and values, if not ``dtype``; some values exceed what E4M3 can hold.
    """
    proj = draw(device, dtype, T, (2 * count + 2 * kv_heads) * D)
    norms = draw(device, torch.float32, 2, D, seed=1)
    angle = draw(device, torch.float32, T, 1, rotary // 2, seed=2)
    cos, sin = angle.cos(), angle.sin()
    q = torch.full((T, count, D), torch.nan, device=device, dtype=dtype)
    limit, half = (float('inf') if kept_as is None else fp8.LARGEST), tolerance
    if kept_as is not None:
        proj[:, -kv_heads * D:] *= 300.0
    if kept_as == fp8.E4M3:
        half = 2.0**-4  # of a step, relative
    kv = torch.full((T + 5, 2, kv_heads, D), 7.0, device=device).to(kept_as or dtype)
    slots = torch.arange(T, device=device) + 3
    slots[-1] = -1
    heads(proj, norms[0], norms[1], cos, sin, slots, q, kv, 1e-6, overlaps(device))

    def turn(x: Tensor, norm: Tensor) -> Tensor:
        x = rms_norm(x.float(), norm, 1e-6)
        return torch.cat([rotate(x[..., :rotary], cos, sin), x[..., rotary:]], -1)

    queries, keys, values = proj.split([2 * count * D, kv_heads * D, kv_heads * D], 1)
    stored = torch.stack([turn(keys.unflatten(1, (kv_heads, D)), norms[1]),
                          values.unflatten(1, (kv_heads, D)).float()], 1)
    stored = stored.clamp(-limit, limit)
    agree = [close(q, turn(queries.unflatten(1, (count, 2, D))[:, :, 0], norms[0]), tolerance),
             close(kv[3:T + 2], stored[:-1], half), bool(kv[:3].float().eq(7).all()),
             bool(kv[T + 2:].float().eq(7).all())]
    out = torch.full((T, 1024), torch.nan, device=device, dtype=dtype)
    gate_up = draw(device, dtype, T, 2048, seed=3)
    gate(gate_up, out)
    left, right = gate_up.float().chunk(2, dim=1)
    return all(agree) and close(out, F.silu(left) * right, tolerance)


def _variants() -> tuple[Variant, ...]:
    found: list[Variant] = []
    types = dict.fromkeys('q_norm k_norm cos sin'.split(), '*fp32') | {
        'proj': '*bf16', 'slots': '*i64', 'q': '*bf16', 'proj_row': 'i32',
        'eps': 'fp32'}
    boards: tuple[tuple[bool, int, tuple[int, ...]], ...] = (
        (False, HEADS_FEW, (87,)), (True, HEADS_FEW, (90, 110, 121)),
        (False, HEADS_MANY, (87, 90, 110, 121)))
    for pdl, BH, archs in boards:
        values = {'HEADS': 24, 'KV_HEADS': 4, 'D': 256, 'ROTARY': 64, 'BH': BH, 'PDL': pdl}
        narrow = tuple(arch for arch in archs if arch in FP8_ARCHS)
        for kind, among in (('*bf16', archs), ('*fp8e4nv', narrow)):
            found.append(Variant(
                place_heads, types | {'kv': kind} | dict.fromkeys(values, 'constexpr'), values,
                archs=among))
    found.append(Variant(silu_gate, {'gate_up': '*bf16', 'out': '*bf16', 'N': 'constexpr',
                                     'BLOCK': 'constexpr'}, {'N': 17408, 'BLOCK': 1024}))
    return tuple(found)


VARIANTS = _variants()
