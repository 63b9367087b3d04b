"""Normal noise in one kernel; the reference is ``flashrt_core.runtime.philox``."""
from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from flashrt_core.kernels._triton import lazy_jit
from flashrt_core.kernels._triton import triton_selected
from flashrt_core.kernels._triton import Variant
from flashrt_core.runtime import philox

if TYPE_CHECKING:
    import triton.language as tl

BLOCK = 128  # Philox blocks of four normals per program


@lazy_jit
def philox_normal(out, seed, branch, tick, table, count, out_stride,  # type: ignore[no-untyped-def]
                  seed_stride, branch_stride, tick_stride,
                  STREAM: tl.constexpr, BLOCK: tl.constexpr):
    """Write normals [rows, count]; grid (blocks of BLOCK * 4 elements, rows)."""
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(seed + row * seed_stride)
    k0 = (key & 0xFFFFFFFF).to(tl.uint32)
    k1 = ((key >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zero = tl.zeros([BLOCK], tl.uint32)
    c0 = block.to(tl.uint32)
    c1 = zero + (tl.load(tick + row * tick_stride) & 0xFFFFFFFF).to(tl.uint32)
    c2 = zero + (tl.load(branch + row * branch_stride) & 0xFFFFFFFF).to(tl.uint32)
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
    element = block * 4
    to = out + row * out_stride + element
    tl.store(to, tl.load(table + (c0 >> 16).to(tl.int32)), mask=element < count)
    tl.store(to + 1, tl.load(table + (c1 >> 16).to(tl.int32)), mask=element + 1 < count)
    tl.store(to + 2, tl.load(table + (c2 >> 16).to(tl.int32)), mask=element + 2 < count)
    tl.store(to + 3, tl.load(table + (c3 >> 16).to(tl.int32)), mask=element + 3 < count)


VARIANTS = (
    Variant(
        philox_normal,
        {'out': '*fp32', 'seed': '*i64', 'branch': '*i64', 'tick': '*i64', 'table': '*fp32',
         'count': 'i32', 'out_stride': 'i64', 'seed_stride': 'i64', 'branch_stride': 'i64',
         'tick_stride': 'i64', 'STREAM': 'constexpr', 'BLOCK': 'constexpr'},
        {'STREAM': philox.ACTION_NOISE, 'BLOCK': BLOCK}),
)


def normal_(seed: torch.Tensor, branch: torch.Tensor, tick: torch.Tensor, out: torch.Tensor,
            stream: int = philox.ACTION_NOISE) -> None:
    """Do ``philox.normal_torch``: the kernel where it was selected, else the reference."""
    check = functools.partial(_check, out.device)
    if triton_selected('philox_normal', out.device, check) and out[0].is_contiguous():
        _launch(seed, branch, tick, out, stream)
    else:
        philox.normal_reference(seed, branch, tick, out, stream)


def _launch(seed: torch.Tensor, branch: torch.Tensor, tick: torch.Tensor, out: torch.Tensor,
            stream: int) -> None:
    count = out[0].numel()
    grid = (-(-count // (4 * BLOCK)), out.shape[0])
    philox_normal[grid](
        out, seed, branch, tick, philox.table_torch(out.device), count, out.stride(0),
        seed.stride(0), branch.stride(0), tick.stride(0), STREAM=stream, BLOCK=BLOCK, num_warps=4)


def _check(device: torch.device) -> bool:
    """Compare kernel and reference on extreme seeds and an odd length, bit for bit."""
    seed = torch.tensor([0, -1, 2**62 + 12345, -2**63], device=device)
    branch = torch.tensor([0, 1, 2**31, 2**32 - 1], device=device)
    tick = torch.tensor([0, 7, 2**32 + 3, 2**31 - 1], device=device)
    mine = torch.zeros((4, 1603), device=device)
    reference = torch.ones_like(mine)
    _launch(seed, branch, tick, mine, 3)
    philox.normal_reference(seed, branch, tick, reference, 3)
    return torch.equal(mine.view(torch.int32), reference.view(torch.int32))
