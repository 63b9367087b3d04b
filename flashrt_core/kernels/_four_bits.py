"""How products of few rows with weights of 4 bits are checked: int4 and NVFP4 alike."""
from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from flashrt_core.kernels._launch import close
from flashrt_core.kernels._launch import draw
from flashrt_core.kernels._launch import overlaps
from flashrt_core.kernels.row_products import fold
from flashrt_core.kernels.row_products import gated_reference
from flashrt_core.kernels.row_products import SPLITS
from flashrt_core.nn import rms_norm
from flashrt_core.nn.int4 import Int4Weight
from flashrt_core.nn.nvfp4 import Nvfp4Weight

W = TypeVar('W', Int4Weight, Nvfp4Weight)
Product = Callable[[Tensor, W, Tensor, bool], None]  # a, weight, out, pdl


def agree(product: Product[W], gated: Product[W], widen: Callable[[W, Tensor], Tensor], w: W,
          dtype: torch.dtype, columns: int, tolerance: float) -> bool:
    """
    Return whether 16 rows agree with float32 within ``tolerance``, and bitwise with each.

    The widened weight has the bits of its values. ``columns``: of a tile of ``gated``.
    """
    (N, half), device = w.data.shape, w.data.device
    pdl, K = overlaps(device), 2 * half
    gate_columns, norm = N // 2 - N // 2 % columns, draw(device, torch.float32, N, seed=2)
    a, values = draw(device, dtype, 16, K), w.values()
    gates = type(w)(*(t.contiguous() for t in w.rows(slice(0, 2 * gate_columns))))

    def run(rows: Tensor) -> list[Tensor]:
        M = rows.shape[0]
        out = torch.full((M, N), torch.nan, device=device, dtype=dtype)
        partial = torch.full((SPLITS, M, N), torch.nan, device=device)
        hidden = torch.full((M, gate_columns), torch.nan, device=device, dtype=dtype)
        few = torch.full((M, N - 8), torch.nan, device=device, dtype=dtype)
        product(rows, w, out, pdl)
        product(rows, w, partial, pdl)
        gated(rows, gates, hidden, pdl)
        product(rows, w.rows(slice(8, None)), few, pdl)
        stream, y = out.clone(), torch.full_like(out, torch.nan)
        fold(stream, partial, norm, y, 1e-6, pdl)
        return [out, stream, y, hidden, few]

    mine, full = run(a), F.linear(a.float(), values)
    expected = [full, 2 * full, rms_norm(2 * full, norm, 1e-6),
                gated_reference(a, gates.values()), full[:, 8:]]
    found = [close(one, other, tolerance) for one, other in zip(mine, expected)]
    for few in (slice(0, 1), slice(7, 8), slice(15, 16), slice(0, 3), slice(4, 12)):
        found += [torch.equal(one, all_[few]) for one, all_ in zip(run(a[few]), mine)]
    wide = widen(w, torch.full((N, K), torch.nan, device=device, dtype=dtype))
    return all(found) and torch.equal(wide, values.to(dtype))
