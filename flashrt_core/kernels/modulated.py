"""The glue of an expert whose norms are modulated (adaRMS): fold, gate and norm; flow step.

A norm's modulation is float32 [3, N]: scale, shift, gate. Modulations are constants, so they are
loaded before the inputs are ready.
"""
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
from flashrt_core.nn import modulated_norm

if TYPE_CHECKING:
    import triton.language as tl


@lazy_jit
def fold_modulated(x, partial, before, by, y, M, eps,  # type: ignore[no-untyped-def]
                   N: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr):
    """
    Add partial [SPLITS, M, N] times the gate of ``before`` to x [M, N]; y = the norm by ``by``.

    Grid (M,).
    """
    row = tl.program_id(0)
    n = tl.arange(0, N)
    j = tl.arange(0, SPLITS)
    if PDL:
        tl.inline_asm_elementwise('griddepcontrol.launch_dependents; // $0', '=r', [],
                                  dtype=tl.int32, is_pure=False, pack=1)
    gate = tl.load(before + 2 * N + n)
    scale = 1.0 + tl.load(by + n)
    shift = tl.load(by + N + n)
    if PDL:
        tl.inline_asm_elementwise('griddepcontrol.wait; // $0', '=r', [],
                                  dtype=tl.int32, is_pure=False, pack=1)
    part = tl.load(partial + (j[:, None] * M + row) * N + n[None, :])
    total = tl.load(x + row * N + n).to(tl.float32) + tl.sum(part, 0) * gate
    total = total.to(x.dtype.element_ty)
    tl.store(x + row * N + n, total)
    total = total.to(tl.float32)
    root = tl.rsqrt(tl.sum(total * total, 0) / N + eps)
    value = total * root * scale + shift
    tl.store(y + row * N + n, value.to(y.dtype.element_ty))


@lazy_jit
def step_modulated(x, partial, before, last, first, out_w, out_b,  # type: ignore[no-untyped-def]
                   actions, in_w, in_b, y, M, steps, eps,
                   N: tl.constexpr, A: tl.constexpr, SPLITS: tl.constexpr,
                   READ: tl.constexpr, WRITE: tl.constexpr, PDL: tl.constexpr):
    """
    End one Euler step and begin the next; grid (M,), one action each.

    READ: velocity = norm(x + fold(partial) * gate of ``before``, by ``last``) @ out_w [A, N]^T +
    out_b, actions -= velocity / steps. WRITE: x = actions @ in_w [N, A]^T + in_b, y = the norm of
    x by ``first``. x and y [M, N], actions float32 [M, A].
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
        j = tl.arange(0, SPLITS)
        part = tl.load(partial + (j[:, None] * M + i) * N + n[None, :])
        total = tl.load(x + i * N + n).to(tl.float32)
        total += tl.sum(part, 0) * tl.load(before + 2 * N + n)
        total = total.to(x.dtype.element_ty).to(tl.float32)
        root = tl.rsqrt(tl.sum(total * total, 0) / N + eps)
        total = total * root * (1.0 + tl.load(last + n)) + tl.load(last + N + n)
        total = total.to(x.dtype.element_ty).to(tl.float32)
        product = tl.load(out_w + a[:, None] * N + n[None, :]) * total[None, :]
        action -= (tl.sum(product, 1) + tl.load(out_b + a)) / steps
        tl.store(actions + i * A + a, action)
    if WRITE:
        product = tl.load(in_w + n[:, None] * A + a[None, :]) * action[None, :]
        token = (tl.sum(product, 1) + tl.load(in_b + n)).to(x.dtype.element_ty)
        tl.store(x + i * N + n, token)
        token = token.to(tl.float32)
        root = tl.rsqrt(tl.sum(token * token, 0) / N + eps)
        token = token * root * (1.0 + tl.load(first + n)) + tl.load(first + N + n)
        tl.store(y + i * N + n, token.to(y.dtype.element_ty))


def fold(x: Tensor, partial: Tensor, before: Tensor, by: Tensor, y: Tensor, eps: float,
         pdl: bool = False) -> None:
    """Launch ``fold_modulated`` over x [M, N]; before and by float32 [3, N]."""
    fold_modulated[(x.shape[0],)](x, partial, before, by, y, x.shape[0], eps, N=x.shape[1],
                                  SPLITS=partial.shape[0], PDL=pdl, num_warps=8, launch_pdl=pdl)


def step(x: Tensor, partial: Tensor, ended: tuple[Tensor, Tensor], first: Tensor, out_w: Tensor,
         out_b: Tensor, actions: Tensor, in_w: Tensor, in_b: Tensor, y: Tensor, steps: int,
         eps: float, read: bool, write: bool, pdl: bool = False) -> None:
    """
    Launch ``step_modulated`` over actions float32 [M, A].

    ``ended``: modulations of the ended step's last MLP and last norm; ``first``: of the begun
    step's first norm, each float32 [3, N].
    """
    rows, width = actions.shape
    step_modulated[(rows,)](x, partial, *ended, first, out_w, out_b, actions, in_w, in_b, y, rows,
                            float(steps), eps, N=x.shape[1], A=width,
                            SPLITS=partial.shape[0], READ=read, WRITE=write, PDL=pdl,
                            num_warps=8, launch_pdl=pdl)


def selected(device: torch.device) -> bool:
    """Return whether these kernels agree with torch on ``device``; not inside a capture."""
    return triton_selected('modulated expert', device, lambda: _check(device))


def _check(device: torch.device) -> bool:
    """Compare both kernels with torch in float32 for eight rows."""
    pdl, dtype, single = overlaps(device), torch.bfloat16, torch.float32
    M, N, A, eps = 8, 1024, 32, 1e-6
    x, partial = draw(device, dtype, M, N), draw(device, single, 8, M, N, seed=1)
    before, by, first = (draw(device, single, 3, N, seed=i) for i in (2, 3, 4))
    expected = x.float() + partial.sum(0) * before[2]
    stream, normed = x.clone(), torch.full_like(x, torch.nan)
    fold(stream, partial, before, by, normed, eps, pdl)
    agree = [close(stream, expected), close(normed, modulated_norm(expected, by, eps))]

    out_w, in_w = draw(device, single, A, N, seed=5) / 32, draw(device, single, N, A, seed=6) / 6
    out_b, in_b = draw(device, single, A, seed=7), draw(device, single, N, seed=8)
    actions = draw(device, single, M, A, seed=9)
    velocity = F.linear(modulated_norm(expected, by, eps), out_w, out_b)
    moved = actions - velocity / 10
    stream, normed = x.clone(), torch.full_like(x, torch.nan)
    step(stream, partial, (before, by), first, out_w, out_b, actions, in_w, in_b, normed, 10, eps,
         True, True, pdl)
    token = F.linear(actions, in_w, in_b)
    return all(agree) and close(actions, moved) and close(stream, token) and close(
        normed, modulated_norm(token, first, eps))


def _variants() -> tuple[Variant, ...]:
    found: list[Variant] = []
    fold_types = {'x': '*bf16', 'partial': '*fp32', 'before': '*fp32', 'by': '*fp32',
                  'y': '*bf16', 'M': 'i32', 'eps': 'fp32'}
    step_types = dict.fromkeys(
        'partial before last first out_w out_b actions in_w in_b steps eps'.split(), '*fp32')
    step_types |= {'x': '*bf16', 'y': '*bf16', 'M': 'i32', 'steps': 'fp32', 'eps': 'fp32'}

    def add(kernel: LazyKernel, types: dict[str, str], archs: tuple[int, ...],
            **values: object) -> None:
        found.append(Variant(kernel, types | dict.fromkeys(values, 'constexpr'), values,
                             num_warps=8, archs=archs))

    boards: tuple[tuple[bool, tuple[int, ...]], ...] = ((False, (87,)), (True, (90, 110, 121)))
    for pdl, archs in boards:
        add(fold_modulated, fold_types, archs, N=1024, SPLITS=8, PDL=pdl)
        add(step_modulated, step_types, archs, N=1024, A=32, SPLITS=8, READ=True, WRITE=True,
            PDL=pdl)
    return tuple(found)


VARIANTS = _variants()
