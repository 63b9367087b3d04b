"""The glue of an action expert's layer, a kernel each: QKV with rope, fold and norm, flow step."""
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from flashrt_core.kernels._launch import close
from flashrt_core.kernels._launch import draw
from flashrt_core.kernels._launch import overlaps
from flashrt_core.kernels._triton import lazy_jit
from flashrt_core.kernels._triton import LazyKernel
from flashrt_core.kernels._triton import triton_selected
from flashrt_core.kernels._triton import Variant
from flashrt_core.kernels.skinny import operand
from flashrt_core.nn import rms_norm
from flashrt_core.nn import rotate
from flashrt_core.nn.fp8 import Weight

if TYPE_CHECKING:
    import triton.language as tl


@lazy_jit
def qkv_rope(a, w, cos, sin, q, kv, M, S,  # type: ignore[no-untyped-def]
             HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, K: tl.constexpr,
             BM: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr):
    """
    Project a [M, K] by w [(heads + 2 * kv_heads) * D, K], rotate q and k, write q and kv.

    A program has the columns c and c + D / 2 of one head, so it can rotate them. Token m has the
    tables cos and sin [S, D / 2] of m % S. q [M, heads, D], kv [M, 2, kv_heads, D]. The program's
    weights are loaded before the inputs are ready where they are one tile, else asked into L2.
    Grid (rows, heads + 2 * kv_heads, D / 2 / BH).
    """
    HALF: tl.constexpr = D // 2
    LINE: tl.constexpr = 1024 // w.dtype.element_ty.primitive_bitwidth
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    head = tl.program_id(1)
    begin = tl.program_id(2) * BH
    j = tl.arange(0, 2 * BH)
    n = head * D + begin + j % BH + (j // BH) * HALF
    valid = m[:, None] < M
    if PDL:
        tl.inline_asm_elementwise('griddepcontrol.launch_dependents; // $0', '=r', [],
                                  dtype=tl.int32, is_pure=False, pack=1)
    if BK == K:
        k = tl.arange(0, K)
        y = tl.load(w + n[None, :] * K + k[:, None])
        if PDL:
            tl.inline_asm_elementwise('griddepcontrol.wait; // $0', '=r', [],
                                      dtype=tl.int32, is_pure=False, pack=1)
        x = tl.load(a + m[:, None] * K + k[None, :], mask=valid, other=0.0)
        both = tl.dot(x, y)
    else:
        if PDL:
            line = n[:, None] * K + tl.arange(0, K // LINE)[None, :] * LINE
            tl.inline_asm_elementwise('prefetch.global.L2 [$1]; // $0', '=r,l',
                                      [(w + line).to(tl.int64)], dtype=tl.int32, is_pure=False,
                                      pack=1)
            tl.inline_asm_elementwise('griddepcontrol.wait; // $0', '=r', [],
                                      dtype=tl.int32, is_pure=False, pack=1)
        both = tl.zeros([BM, 2 * BH], tl.float32)
        for start in range(0, K, BK):
            k = start + tl.arange(0, BK)
            x = tl.load(a + m[:, None] * K + k[None, :], mask=valid, other=0.0)
            both = tl.dot(x, tl.load(w + n[None, :] * K + k[:, None]), both)
    low, high = tl.split(tl.permute(tl.reshape(both, [BM, 2, BH]), (0, 2, 1)))
    column = begin + tl.arange(0, BH)
    table = (m % S)[:, None] * HALF + column[None, :]
    turned = valid & (head < HEADS + KV_HEADS)
    c = tl.load(cos + table, mask=turned, other=1.0)
    s = tl.load(sin + table, mask=turned, other=0.0)
    first = low * c - high * s
    second = high * c + low * s
    if head < HEADS:
        to = q + (m[:, None] * HEADS + head) * D + column[None, :]
        tl.store(to, first.to(q.dtype.element_ty), mask=valid)
        tl.store(to + HALF, second.to(q.dtype.element_ty), mask=valid)
    else:
        to = kv + (m[:, None] * 2 * KV_HEADS + head - HEADS) * D + column[None, :]
        tl.store(to, first.to(kv.dtype.element_ty), mask=valid)
        tl.store(to + HALF, second.to(kv.dtype.element_ty), mask=valid)


@lazy_jit
def fold_norm(x, partial, weight, y, M, eps,  # type: ignore[no-untyped-def]
              N: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr):
    """Add partial [SPLITS, M, N] to x [M, N] and write y = rms_norm(x, weight); grid (M,)."""
    row = tl.program_id(0)
    n = tl.arange(0, N)
    j = tl.arange(0, SPLITS)
    if PDL:
        tl.inline_asm_elementwise('griddepcontrol.launch_dependents; // $0', '=r', [],
                                  dtype=tl.int32, is_pure=False, pack=1)
        tl.inline_asm_elementwise('griddepcontrol.wait; // $0', '=r', [],
                                  dtype=tl.int32, is_pure=False, pack=1)
    part = tl.load(partial + (j[:, None] * M + row) * N + n[None, :])
    total = tl.load(x + row * N + n).to(tl.float32) + tl.sum(part, 0)
    total = total.to(x.dtype.element_ty)
    tl.store(x + row * N + n, total)
    total = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(total * total, 0) / N + eps)
    value = total * scale * (1.0 + tl.load(weight + n).to(tl.float32))
    tl.store(y + row * N + n, value.to(y.dtype.element_ty))


@lazy_jit
def fold_tokens(partial, bias, state, weight, x, y, rows, S, eps,  # type: ignore[no-untyped-def]
                N: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr):
    """
    Write the tokens x [R * S, N] of a step and y = rms_norm(x, weight); grid (R * S,).

    Token 0 of a row is state [N]; the others are the fold of partial [SPLITS, rows, N] plus bias,
    with rows = R * (S - 1).
    """
    row = tl.program_id(0)
    n = tl.arange(0, N)
    j = tl.arange(0, SPLITS)
    if PDL:
        tl.inline_asm_elementwise('griddepcontrol.launch_dependents; // $0', '=r', [],
                                  dtype=tl.int32, is_pure=False, pack=1)
        tl.inline_asm_elementwise('griddepcontrol.wait; // $0', '=r', [],
                                  dtype=tl.int32, is_pure=False, pack=1)
    s = row % S
    action = (row // S) * (S - 1) + tl.maximum(s - 1, 0)
    part = tl.load(partial + (j[:, None] * rows + action) * N + n[None, :])
    total = tl.sum(part, 0) + tl.load(bias + n)
    total = tl.where(s == 0, tl.load(state + n), total).to(x.dtype.element_ty)
    tl.store(x + row * N + n, total)
    total = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(total * total, 0) / N + eps)
    value = total * scale * (1.0 + tl.load(weight + n).to(tl.float32))
    tl.store(y + row * N + n, value.to(y.dtype.element_ty))


@lazy_jit
def flow_step(x, partial, weight, out_w, out_b, actions, in_w, in_b, u, M, S, steps, eps,  # type: ignore[no-untyped-def]
              N: tl.constexpr, A: tl.constexpr, SPLITS: tl.constexpr,
              READ: tl.constexpr, WRITE: tl.constexpr, PDL: tl.constexpr):
    """
    End one Euler step and begin the next; grid (R * (S - 1),), one action each.

    READ: velocity = rms_norm(x + fold(partial)) @ out_w [A, N]^T + out_b, actions -= velocity /
    steps. WRITE: u = silu(actions @ in_w [N, A]^T + in_b [N]). x [M = R * S, N], actions
    float32 [R * (S - 1), A], u float32 [R * (S - 1), N].
    """
    i = tl.program_id(0)
    n = tl.arange(0, N)
    a = tl.arange(0, A)
    if PDL:
        tl.inline_asm_elementwise('griddepcontrol.launch_dependents; // $0', '=r', [],
                                  dtype=tl.int32, is_pure=False, pack=1)
        tl.inline_asm_elementwise('griddepcontrol.wait; // $0', '=r', [],
                                  dtype=tl.int32, is_pure=False, pack=1)
    action = tl.load(actions + i * A + a)
    if READ:
        row = (i // (S - 1)) * S + i % (S - 1) + 1
        j = tl.arange(0, SPLITS)
        part = tl.load(partial + (j[:, None] * M + row) * N + n[None, :])
        total = tl.load(x + row * N + n).to(tl.float32) + tl.sum(part, 0)
        total = total.to(x.dtype.element_ty).to(tl.float32)
        scale = tl.rsqrt(tl.sum(total * total, 0) / N + eps)
        total = total * scale * (1.0 + tl.load(weight + n).to(tl.float32))
        total = total.to(x.dtype.element_ty).to(tl.float32)
        product = tl.load(out_w + a[:, None] * N + n[None, :]) * total[None, :]
        action -= (tl.sum(product, 1) + tl.load(out_b + a)) / steps
        tl.store(actions + i * A + a, action)
    if WRITE:
        product = tl.load(in_w + n[:, None] * A + a[None, :]) * action[None, :]
        hidden = tl.sum(product, 1) + tl.load(in_b + n)
        tl.store(u + i * N + n, hidden / (1.0 + tl.exp(-hidden)))


QKV_TILE = (16, 128, 4, 4)  # columns of each half of a head, K, warps, stages


def project(a: Tensor, w: Weight, cos: Tensor, sin: Tensor, q: Tensor, kv: Tensor,
            suffix: int, pdl: bool = False) -> None:
    """Launch ``qkv_rope``: a [M, K] -> q [M, heads, D], kv [M, 2, kv_heads, D]."""
    rows, heads, D = q.shape
    kv_heads = kv.shape[2]
    BH, BK, warps, stages = QKV_TILE
    grid = (-(-rows // 64), heads + 2 * kv_heads, D // 2 // BH)
    qkv_rope[grid](a, operand(w), cos, sin, q, kv, rows, suffix, HEADS=heads, KV_HEADS=kv_heads,
                   D=D, K=a.shape[1], BM=64, BH=BH, BK=min(BK, a.shape[1]), PDL=pdl,
                   num_warps=warps, num_stages=stages, launch_pdl=pdl)


def fold(x: Tensor, partial: Tensor, weight: Tensor, y: Tensor, eps: float,
         pdl: bool = False) -> None:
    """Launch ``fold_norm`` over x [M, N]."""
    fold_norm[(x.shape[0],)](x, partial, weight, y, x.shape[0], eps, N=x.shape[1],
                             SPLITS=partial.shape[0], PDL=pdl, num_warps=8, launch_pdl=pdl)


def tokens(partial: Tensor, bias: Tensor, state: Tensor, weight: Tensor, x: Tensor, y: Tensor,
           suffix: int, eps: float, pdl: bool = False) -> None:
    """Launch ``fold_tokens`` over x [R * suffix, N]."""
    fold_tokens[(x.shape[0],)](partial, bias, state, weight, x, y, partial.shape[1], suffix, eps,
                               N=x.shape[1], SPLITS=partial.shape[0], PDL=pdl, num_warps=4,
                               launch_pdl=pdl)


def step(x: Tensor, partial: Tensor, weight: Tensor, out_w: Tensor, out_b: Tensor,
         actions: Tensor, in_w: Tensor, in_b: Tensor, u: Tensor, suffix: int, steps: int,
         eps: float, read: bool, write: bool, pdl: bool = False) -> None:
    """Launch ``flow_step`` over actions float32 [R * (suffix - 1), A]."""
    rows, width = actions.shape
    flow_step[(rows,)](x, partial, weight, out_w, out_b, actions, in_w, in_b, u, x.shape[0],
                       suffix, float(steps), eps, N=x.shape[1], A=width,
                       SPLITS=partial.shape[0], READ=read, WRITE=write, PDL=pdl, num_warps=8,
                       launch_pdl=pdl)


def selected(device: torch.device) -> bool:
    """Return whether these kernels agree with torch on ``device``; not inside a capture."""
    return triton_selected('expert layer', device, lambda: _check(device))


def _check(device: torch.device) -> bool:
    """Compare each kernel with torch in float32 for two rows of eight tokens."""
    pdl, dtype, single = overlaps(device), torch.bfloat16, torch.float32
    R, S, N, A = 2, 8, 1024, 32
    y, w = draw(device, dtype, R * S, N), draw(device, dtype, 10 * 64, N, seed=1) / 32
    angle = draw(device, single, S, 32, seed=2)
    q = torch.full((R * S, 8, 64), torch.nan, device=device, dtype=dtype)
    kv = torch.full((R * S, 2, 1, 64), torch.nan, device=device, dtype=dtype)
    project(y, w, angle.cos(), angle.sin(), q, kv, S, pdl)
    full = F.linear(y.float(), w.float()).view(R, S, 10, 64)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    agree = [close(q.view(R, S, 8, 64), rotate(full[:, :, :8], cos, sin)),
             close(kv.view(R, S, 2, 64)[:, :, :1], rotate(full[:, :, 8:9], cos, sin)),
             close(kv.view(R, S, 2, 64)[:, :, 1:], full[:, :, 9:])]

    x, partial = draw(device, dtype, R * S, N, seed=3), draw(device, single, 8, R * S, N, seed=4)
    norm = draw(device, single, N, seed=5) / 8
    stream, normed = x.clone(), torch.full_like(x, torch.nan)
    fold(stream, partial, norm, normed, 1e-6, pdl)
    expected = x.float() + partial.sum(0)
    agree += [close(stream, expected), close(normed, rms_norm(expected, norm, 1e-6))]

    rest, bias = draw(device, single, 4, R * (S - 1), N, seed=6), draw(device, single, N, seed=7)
    stream, normed = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    tokens(rest, bias, norm, norm, stream, normed, S, 1e-6, pdl)
    expected = torch.cat([norm.expand(R, 1, N), (rest.sum(0) + bias).view(R, S - 1, N)], 1)
    agree += [close(stream.view(R, S, N), expected),
              close(normed.view(R, S, N), rms_norm(expected, norm, 1e-6))]

    actions, u = draw(device, single, R * (S - 1), A, seed=8), rest[0].clone()
    out_w, in_w = draw(device, single, A, N, seed=9) / 32, draw(device, single, N, A, seed=10) / 6
    hidden = rms_norm(x.float() + partial.sum(0), norm, 1e-6).view(R, S, N)[:, 1:].flatten(0, 1)
    expected = actions - (F.linear(hidden, out_w) + bias[:A]) / 10
    step(x, partial, norm, out_w, bias[:A], actions, in_w, bias, u, S, 10, 1e-6, True, True, pdl)
    return all(agree) and close(actions, expected) and close(
        u, F.silu(F.linear(actions, in_w, bias)))


def _variants() -> tuple[Variant, ...]:
    found: list[Variant] = []
    qkv = {'a': '*bf16', 'w': '*bf16', 'cos': '*fp32', 'sin': '*fp32', 'q': '*bf16',
           'kv': '*bf16', 'M': 'i32', 'S': 'i32'}
    fold_types = {'x': '*bf16', 'partial': '*fp32', 'weight': '*fp32', 'y': '*bf16', 'M': 'i32',
                  'eps': 'fp32'}
    token_types = {'partial': '*fp32', 'bias': '*fp32', 'state': '*fp32', 'weight': '*fp32',
                   'x': '*bf16', 'y': '*bf16', 'rows': 'i32', 'S': 'i32', 'eps': 'fp32'}
    step_types = {'x': '*bf16', 'partial': '*fp32', 'weight': '*fp32', 'out_w': '*fp32',
                  'out_b': '*fp32', 'actions': '*fp32', 'in_w': '*fp32', 'in_b': '*fp32',
                  'u': '*fp32', 'M': 'i32', 'S': 'i32', 'steps': 'fp32', 'eps': 'fp32'}

    def add(kernel: LazyKernel, types: dict[str, str], archs: tuple[int, ...], warps: int,
            stages: int = 3, **values: object) -> None:
        found.append(Variant(kernel, types | dict.fromkeys(values, 'constexpr'), values,
                             num_warps=warps, num_stages=stages, archs=archs))

    BH, BK, warps, stages = QKV_TILE
    tile = {'HEADS': 8, 'KV_HEADS': 1, 'D': 256, 'K': 1024, 'BM': 64, 'BH': BH, 'BK': BK}
    boards: tuple[tuple[bool, tuple[int, ...]], ...] = ((False, (87,)), (True, (90, 110)))
    for pdl, archs in boards:
        add(qkv_rope, qkv, archs, warps, stages, **tile, PDL=pdl)
    boards = ((False, (87,)), (True, (90, 110, 121)))
    for pdl, archs in boards:
        add(fold_norm, fold_types, archs, 8, N=1024, SPLITS=8, PDL=pdl)
        add(fold_tokens, token_types, archs, 4, N=1024, SPLITS=4, PDL=pdl)
        add(flow_step, step_types, archs, 8, N=1024, A=32, SPLITS=8, READ=True, WRITE=True,
            PDL=pdl)
    return tuple(found)


VARIANTS = _variants()
