"""Qwen3.5's products on a GPU in each precision: of few rows by kernels, of chunks by cuBLAS."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flashrt_core.kernels import fp8_rows
from flashrt_core.kernels import row_int4
from flashrt_core.kernels import row_nvfp4
from flashrt_core.kernels import row_products
from flashrt_core.kernels import rows as row_kernels
from flashrt_core.kernels import token_rows
from flashrt_core.kernels._launch import overlaps
from flashrt_core.nn import fp8
from flashrt_core.nn.fp8 import ChannelWeight
from flashrt_core.nn.int4 import Int4Weight
from flashrt_core.nn.nvfp4 import Nvfp4Weight
from flashrt_core.planners.qwen3_5.config import Qwen35Config
from flashrt_core.planners.qwen3_5.precision import Weight
from flashrt_core.planners.qwen3_5.precision import weight

Scaled = tuple[Tensor, Tensor]  # E4M3 [T, K] and float32 [T]

FEW = 64  # tokens of a chunk up to which its products are bound by the weights' bytes
LAST_NORM = 'norm'  # what it norms goes into the head, not into a product of the same pass


def selected(c: Qwen35Config, device: torch.device) -> bool:
    """Return whether what ``c``'s precision needs agrees with torch; not inside a capture."""
    if c.precision == 'fp8':
        return all([row_products.fp8_selected(device), fp8_rows.selected(device),
                    fp8.rows_selected(device)])
    if c.precision == 'int4':
        return row_int4.selected(device)
    return c.precision != 'nvfp4' or row_nvfp4.selected(device)


def row_product(a: Tensor, w: Weight, out: Tensor, pdl: bool, alone: bool = True) -> None:
    """Launch the product of few rows, see ``row_products.product``."""
    if isinstance(w, Int4Weight):
        row_int4.product(a, w, out, pdl)
    elif isinstance(w, Nvfp4Weight):
        row_nvfp4.product(a, w, out, pdl)
    else:
        row_products.product(a, w, out, pdl, alone)


def row_gated(a: Tensor, w: Weight, out: Tensor, pdl: bool, alone: bool = True) -> None:
    """Launch the gated product of few rows, see ``row_products.gated``."""
    if isinstance(w, Int4Weight):
        row_int4.gated(a, w, out, pdl)
    elif isinstance(w, Nvfp4Weight):
        row_nvfp4.gated(a, w, out, pdl)
    else:
        row_products.gated(a, w, out, pdl, alone)


def few_rows(a: Tensor, w: Weight, pdl: bool, alone: bool) -> Tensor:
    """Return the product of few rows, see ``row_product``, in memory of its own."""
    out = a.new_empty((len(a), len(w if isinstance(w, Tensor) else w.data)))
    row_product(a, w, out, pdl, alone)
    return out


def scaled(x: Tensor) -> Scaled:
    """Return rows x [T, K] as an FP8 product takes them."""
    y = x.new_empty(x.shape, dtype=fp8_rows.STORED)
    scale = x.new_empty(len(x), dtype=torch.float32)
    fp8_rows.quantise(x, y, scale)
    return y, scale


def chunk_product(x: Tensor | Scaled, w: Weight) -> Tensor:
    """Return x [T, K] @ w^T as [T, N]; weights of 4 bits are widened first."""
    if isinstance(w, ChannelWeight):
        return fp8.multiply(*(scaled(x) if isinstance(x, Tensor) else x), w)
    assert isinstance(x, Tensor)  # only FP8 weights take scaled rows
    if isinstance(w, Tensor):
        return F.linear(x, w)
    N, half = w.data.shape
    values = x.new_empty((N, 2 * half))
    return F.linear(x, row_int4.widen(w, values) if isinstance(w, Int4Weight)
                    else row_nvfp4.widen(w, values))


class RowProducts:
    """The products of few rows, and what lies between them, in scratch that layers share.

    ``alone``: a row's bits are its own; else the rows are those of one chunk, whose weights are
    read once for all of them.
    """

    def __init__(self, c: Qwen35Config, b: Mapping[str, Tensor], x: Tensor,
                 alone: bool = True) -> None:
        self._c, self._b, self._pdl, self._alone = c, b, overlaps(x.device), alone
        self._partial = x.new_empty((row_products.SPLITS, len(x), c.width), dtype=torch.float32)
        self._normed, self._hidden = torch.empty_like(x), x.new_empty((len(x), c.mlp))

    def __call__(self, x: Tensor, name: str) -> Tensor:
        """Return x [M, K] times the weight called ``name``, in memory of its own."""
        return few_rows(x, weight(self._b, name), self._pdl, self._alone)

    def begin(self, x: Tensor, norm: str) -> Tensor:
        """Return x [M, width] normed by the weight called ``norm``."""
        row_kernels.norm_rows(x, None, self._b[norm], None, self._normed, self._c.eps)
        return self._normed

    def finish(self, x: Tensor, mixed: Tensor, at: str, norm: str) -> Tensor:
        """Add out product and gated MLP to x [M, width]; return it normed for what follows."""
        b, eps, pdl, alone = self._b, self._c.eps, self._pdl, self._alone
        y, partial = self._normed, self._partial
        row_product(mixed, weight(b, f'{at}.out'), partial, pdl, alone)
        row_products.fold(x, partial, b[f'{at}.norm2'], y, eps, pdl)
        row_gated(y, weight(b, f'{at}.gate_up'), self._hidden, pdl, alone)
        row_product(self._hidden, weight(b, f'{at}.down'), partial, pdl, alone)
        row_products.fold(x, partial, b[norm], y, eps, pdl)
        return y


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

    def begin(self, x: Tensor, norm: str) -> Any:
        """Return x [T, width] normed by the weight called ``norm``, as a product reads it."""
        return self.norm(x, None, norm)

    def finish(self, x: Tensor, mixed: Tensor, at: str, norm: str) -> Any:
        """As ``RowProducts.finish``, as a product reads it if one of this chunk follows."""
        y = self.norm(x, self(mixed, f'{at}.out'), f'{at}.norm2')
        z = self(self.gate(self(y, f'{at}.gate_up')), f'{at}.down')
        return self.last_norm(x, z) if norm == LAST_NORM else self.norm(x, z, norm)

    def norm(self, x: Tensor, delta: Tensor | None, name: str) -> Tensor | Scaled:
        """Do x [T, width] += delta; return its norm by the weight called ``name``."""
        if self._fp8:
            fp8_rows.norm(x, delta, self._b[name], self._normed, self._scale, self._c.eps)
            return self._normed, self._scale
        row_kernels.norm_rows(x, delta, self._b[name], None, self._normed, self._c.eps)
        return self._normed

    def last_norm(self, x: Tensor, delta: Tensor) -> Tensor:
        """As ``norm``, of what no product of this chunk reads: never scaled."""
        row_kernels.norm_rows(x, delta, self._b[LAST_NORM], None, self._last, self._c.eps)
        return self._last

    def gate(self, gate_up: Tensor) -> Tensor | Scaled:
        """Return silu(gate) * up of gate_up [T, 2 * mlp] as [T, mlp]."""
        if self._fp8:
            fp8_rows.gate(gate_up, self._hidden, self._scale)
            return self._hidden, self._scale
        token_rows.gate(gate_up, self._hidden)
        return self._hidden


def products_of(c: Qwen35Config, b: Mapping[str, Tensor],
                x: Tensor) -> RowProducts | ChunkProducts:
    """Return the products of a chunk x [T, width]."""
    return RowProducts(c, b, x, alone=False) if is_few(c, len(x)) else ChunkProducts(c, b, x)


def is_few(c: Qwen35Config, T: int) -> bool:
    """Return whether the kernels of few rows take a chunk of T tokens.

    In FP8 the library is faster from few tokens on: it multiplies what they would widen.
    """
    return T <= FEW and c.precision != 'fp8'
