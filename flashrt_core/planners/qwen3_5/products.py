"""Qwen3.5's products on a GPU in each precision: of few rows by kernels, of chunks by cuBLAS."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from flashrt_core.kernels import fp8_rows
from flashrt_core.kernels import row_int4
from flashrt_core.kernels import row_products
from flashrt_core.kernels import rows as row_kernels
from flashrt_core.kernels import token_rows
from flashrt_core.nn import fp8
from flashrt_core.nn.fp8 import ChannelWeight
from flashrt_core.nn.int4 import Int4Weight
from flashrt_core.planners.qwen3_5.config import Qwen35Config
from flashrt_core.planners.qwen3_5.precision import Weight
from flashrt_core.planners.qwen3_5.precision import weight

Scaled = tuple[Tensor, Tensor]  # E4M3 [T, K] and float32 [T]

FEW = 64  # tokens of a chunk up to which an int4 weight is not worth widening


def selected(c: Qwen35Config, device: torch.device) -> bool:
    """Return whether what ``c``'s precision needs agrees with torch; not inside a capture."""
    if c.precision == 'fp8':
        return all([row_products.fp8_selected(device), fp8_rows.selected(device),
                    fp8.rows_selected(device)])
    return c.precision != 'int4' or row_int4.selected(device)


def row_product(a: Tensor, w: Weight, out: Tensor, pdl: bool) -> None:
    """Launch the product of few rows, see ``row_products.product``."""
    if isinstance(w, Int4Weight):
        row_int4.product(a, w, out, pdl)
    else:
        row_products.product(a, w, out, pdl)


def row_gated(a: Tensor, w: Weight, out: Tensor, pdl: bool) -> None:
    """Launch the gated product of few rows, see ``row_products.gated``."""
    if isinstance(w, Int4Weight):
        row_int4.gated(a, w, out, pdl)
    else:
        row_products.gated(a, w, out, pdl)


def scaled(x: Tensor) -> Scaled:
    """Return rows x [T, K] as an FP8 product takes them."""
    y = x.new_empty(x.shape, dtype=fp8_rows.STORED)
    scale = x.new_empty(len(x), dtype=torch.float32)
    fp8_rows.quantise(x, y, scale)
    return y, scale


def chunk_product(x: Tensor | Scaled, w: Weight) -> Tensor:
    """Return x [T, K] @ w^T as [T, N]; for more than FEW rows an int4 weight is widened first."""
    if isinstance(w, ChannelWeight):
        return fp8.multiply(*(scaled(x) if isinstance(x, Tensor) else x), w)
    assert isinstance(x, Tensor)  # only FP8 weights take scaled rows
    if isinstance(w, Int4Weight):
        N, half = w.data.shape
        if len(x) <= FEW:
            out = x.new_empty((len(x), N))
            row_int4.product(x, w, out, False)
            return out
        w = row_int4.widen(w, x.new_empty((N, 2 * half)))
    return F.linear(x, w)


class ChunkProducts:
    """The products of T tokens, and what lies between them, written as the next one reads it."""

    def __init__(self, c: Qwen35Config, b: Mapping[str, Tensor], x: Tensor) -> None:
        self._c, self._b, self._last = c, b, torch.empty_like(x)
        self._fp8 = c.precision == 'fp8'
        stored = fp8_rows.STORED if self._fp8 else x.dtype
        self._normed, self._hidden = (x.new_empty((len(x), n), dtype=stored)
                                      for n in (c.width, c.mlp))
        self._scale = x.new_empty(len(x), dtype=torch.float32)

    def __call__(self, x: Tensor | Scaled, name: str) -> Tensor:
        """Return x [T, K] times the weight called ``name``, in memory of its own."""
        return chunk_product(x, weight(self._b, name))

    def norm(self, x: Tensor, delta: Tensor | None, name: str) -> Tensor | Scaled:
        """Do x [T, width] += delta; return its norm by the weight called ``name``."""
        if self._fp8:
            fp8_rows.norm(x, delta, self._b[name], self._normed, self._scale, self._c.eps)
            return self._normed, self._scale
        row_kernels.norm_rows(x, delta, self._b[name], None, self._normed, self._c.eps)
        return self._normed

    def last_norm(self, x: Tensor, delta: Tensor, name: str) -> Tensor:
        """As ``norm``, of what no product of this chunk reads: never scaled."""
        row_kernels.norm_rows(x, delta, self._b[name], None, self._last, self._c.eps)
        return self._last

    def gate(self, gate_up: Tensor) -> Tensor | Scaled:
        """Return silu(gate) * up of gate_up [T, 2 * mlp] as [T, mlp]."""
        if self._fp8:
            fp8_rows.gate(gate_up, self._hidden, self._scale)
            return self._hidden, self._scale
        token_rows.gate(gate_up, self._hidden)
        return self._hidden
