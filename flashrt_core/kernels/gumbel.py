"""Gumbel noise in one kernel; the reference is ``flashrt_core.runtime.gumbel``."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flashrt_core.kernels._triton import lazy_jit
from flashrt_core.kernels._triton import triton_selected
from flashrt_core.kernels._triton import Variant
from flashrt_core.runtime import gumbel
from flashrt_core.runtime import philox

if TYPE_CHECKING:
    import triton.language as tl

BLOCK = 256  # Philox blocks of four elements per program


@lazy_jit
def gumbel_noise(out, seed, branch, position, table, count, out_stride,  # type: ignore[no-untyped-def]
                 STREAM: tl.constexpr, FIRST: tl.constexpr, LOW_BITS: tl.constexpr,
                 SCALE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Write noise [rows, count]; grid (blocks of BLOCK * 4 elements, rows)."""
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(seed + row)
    k0 = (key & 0xFFFFFFFF).to(tl.uint32)
    k1 = ((key >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zero = tl.zeros([BLOCK], tl.uint32)
    c0 = block.to(tl.uint32)
    c1 = zero + (tl.load(position + row) & 0xFFFFFFFF).to(tl.uint32)
    c2 = zero + (tl.load(branch + row) & 0xFFFFFFFF).to(tl.uint32)
    c3 = zero + STREAM
    for _ in tl.static_range(10):
        p0 = c0.to(tl.uint64) * 0xD2511F53
        p1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = p1.to(tl.uint32)
        c3 = p0.to(tl.uint32)
        k0 = (k0.to(tl.uint64) + 0x9E3779B9).to(tl.uint32)
        k1 = (k1.to(tl.uint64) + 0xBB67AE85).to(tl.uint32)
    for word in tl.static_range(4):
        c = c0 if word == 0 else (c1 if word == 1 else (c2 if word == 2 else c3))
        bits = c.to(tl.float32).to(tl.int32, bitcast=True)
        index = tl.maximum((bits >> LOW_BITS) - FIRST, 0)
        here = tl.load(table + index)
        step = (tl.load(table + index + 1) - here).to(tl.int64)
        here += ((step * (bits & ((1 << LOW_BITS) - 1))) >> LOW_BITS).to(tl.int32)
        element = block * 4 + word
        tl.store(out + row * out_stride + element, here.to(tl.float32) * SCALE,
                 mask=element < count)  # fmt: skip


VARIANTS = (
    Variant(
        gumbel_noise,
        {'out': '*fp32', 'seed': '*i64', 'branch': '*i64', 'position': '*i64', 'table': '*i32',
         'count': 'i32', 'out_stride': 'i64', 'STREAM': 'constexpr', 'FIRST': 'constexpr',
         'LOW_BITS': 'constexpr', 'SCALE': 'constexpr', 'BLOCK': 'constexpr'},
        {'STREAM': philox.SAMPLER, 'FIRST': gumbel.FIRST, 'LOW_BITS': gumbel.LOW_BITS,
         'SCALE': gumbel.SCALE, 'BLOCK': BLOCK}),
)  # fmt: skip


def noise(seed: Tensor, branch: Tensor, position: Tensor, n: int) -> Tensor:
    """Do ``gumbel.gumbel_torch``: the kernel where it was selected, else the reference."""
    check = functools.partial(_check, seed.device)
    if triton_selected('gumbel_noise', seed.device, check):
        return _launch(seed, branch, position, n)
    return gumbel.gumbel_reference(seed, branch, position, n)


def _launch(seed: Tensor, branch: Tensor, position: Tensor, n: int) -> Tensor:
    out = torch.empty((len(seed), n), device=seed.device)
    grid = (-(-n // (4 * BLOCK)), len(seed))
    gumbel_noise[grid](
        out, seed.contiguous(), branch.contiguous(), position.contiguous(),
        gumbel.table_torch(seed.device), n, out.stride(0), STREAM=philox.SAMPLER,
        FIRST=gumbel.FIRST, LOW_BITS=gumbel.LOW_BITS, SCALE=gumbel.SCALE, BLOCK=BLOCK,
        num_warps=4)  # fmt: skip
    return out


def _check(device: torch.device) -> bool:
    """Compare kernel and reference on extreme seeds and an odd length, bit for bit."""
    seed = torch.tensor([0, -1, 2**62 + 12345, -(2**63)], device=device)
    branch = torch.tensor([0, 1, 2**31, 2**32 - 1], device=device)
    position = torch.tensor([0, 7, 2**32 + 3, 2**31 - 1], device=device)
    mine = _launch(seed, branch, position, 3203)
    reference = gumbel.gumbel_reference(seed, branch, position, 3203)
    return torch.equal(mine.view(torch.int32), reference.view(torch.int32))
