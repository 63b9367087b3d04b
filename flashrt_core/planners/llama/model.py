"""The forward pass of a Llama over static buffers, in plain torch (arXiv 2302.13971).

Formulas: RMSNorm, rotary embedding over half-split heads, grouped-query attention, SwiGLU.
``b`` holds tensors by buffer name without a row axis; all that varies is device data.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from flashrt_core.nn import rope_tables
from flashrt_core.nn import rotate
from flashrt_core.nn.attention import attend_causal
from flashrt_core.nn.attention import store_rows
from flashrt_core.nn.rows import row_by_row
from flashrt_core.nn.rows import rows_linear
from flashrt_core.planners.llama.config import LlamaConfig
from flashrt_core.planners.llama.weights import ROPE
from flashrt_core.planners.llama.weights import weights_of
from flashrt_core.planners.memory import Memory
from flashrt_core.runtime import BufferSpec
from flashrt_core.runtime import Kind
from flashrt_core.runtime import Role

Tensors = Mapping[str, Tensor]


def weight_specs(c: LlamaConfig) -> list[BufferSpec]:
    """Return every constant: the weights, and rope's frequencies."""
    specs = [
        BufferSpec(name, Role.CONSTANT, spec.dtype, spec.shape, rows=False)
        for name, spec in weights_of(c).items()
    ]
    rope = BufferSpec(ROPE, Role.CONSTANT, torch.float32, (c.head_dim // 2,), rows=False)
    return [*specs, rope]


def state_specs(c: LlamaConfig) -> list[BufferSpec]:
    """Return the family's state: keys and values, nothing recurrent."""
    shape = (c.context, 2, c.kv_heads, c.head_dim)
    return [
        BufferSpec(f'kv.{i}', Role.STATE, c.torch_dtype, shape, kind=Kind.KV)
        for i in range(c.layers)
    ]


def scratch_specs(c: LlamaConfig) -> list[BufferSpec]:
    """Return no buffer: nothing here crosses a segment but the state."""
    return []


def chunk(
    c: LlamaConfig, b: Tensors, tokens: Tensor, position: Tensor, length: Tensor, span: int,
    arrived: Callable[[int], None] = lambda layer: None,
) -> Tensor:
    """Take the first ``length`` of T tokens into the state at ``position``; hidden [T, width].

    tokens int32 [T], position and length int64 []. Attends and writes KV below ``span``, which is
    at least position + length. Rows from ``length`` on are finite and mean nothing. ``arrived`` is
    told each layer before its state is touched: with a restore under way it waits for that.
    """
    positions = position + torch.arange(len(tokens), device=tokens.device)
    cos, sin = rope_tables(positions, b[ROPE])
    x = _embed(c, b, tokens)
    for i in range(c.layers):
        arrived(i)
        at, kv = f'layers.{i}', b[f'kv.{i}'][:span]
        q, k, v = _heads(c, F.linear(rms(x, b[f'{at}.norm1'], c.eps), b[f'{at}.qkv']), cos, sin)
        store_rows(kv, torch.stack([k, v], 1), position, length)
        y = attend_causal(q, kv, position, length).flatten(1)
        x = x + F.linear(y, b[f'{at}.out'])
        y = F.linear(rms(x, b[f'{at}.norm2'], c.eps), b[f'{at}.gate_up'])
        x = x + F.linear(_swiglu(y), b[f'{at}.down'])
    return rms(x, b['norm'], c.eps)


def rows(c: LlamaConfig, b: Tensors, tokens: Tensor, positions: Tensor, memory: Memory) -> Tensor:
    """Feed tokens int32 [M] at positions int64 [M]; returns hidden states [M, width].

    The bits of a row depend on that row and its memory alone.
    """
    tables = row_by_row(lambda at: torch.stack(rope_tables(at, b[ROPE]), 1), positions)
    cos, sin = tables.unbind(1)
    x = _embed(c, b, tokens)
    for i in range(c.layers):
        at = f'layers.{i}'
        y = rows_linear(_rows_rms(x, b[f'{at}.norm1'], c.eps), b[f'{at}.qkv'])
        y = memory.attend(i, *_heads(c, y, cos, sin)).flatten(1)
        x = x + rows_linear(y, b[f'{at}.out'])
        y = rows_linear(_rows_rms(x, b[f'{at}.norm2'], c.eps), b[f'{at}.gate_up'])
        x = x + rows_linear(row_by_row(_swiglu, y), b[f'{at}.down'])
    return _rows_rms(x, b['norm'], c.eps)


def head(c: LlamaConfig, b: Tensors, hidden: Tensor) -> Tensor:
    """Return the logits float32 [M, vocab] of hidden states [M, width], row by row."""
    return rows_linear(hidden, b['embed' if c.tied else 'head']).float()


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide x [..., width] by its root mean square, times weight; in float32, as x's dtype."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (y * weight).to(x.dtype)


def _embed(c: LlamaConfig, b: Tensors, tokens: Tensor) -> Tensor:
    return F.embedding(tokens.clamp(0, c.vocab - 1), b['embed'])  # padding may hold anything


def _heads(
    c: LlamaConfig, y: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Cut y [T, .] into q [T, heads, d], k and v [T, kv_heads, d]; q and k rotated."""
    heads = y.unflatten(1, (-1, c.head_dim))
    qk, v = heads.split([c.heads + c.kv_heads, c.kv_heads], dim=1)
    q, k = rotate(qk, cos, sin).split([c.heads, c.kv_heads], dim=1)
    return q, k, v


def _swiglu(y: Tensor) -> Tensor:
    gate, up = y.chunk(2, dim=1)
    return F.silu(gate) * up


def _rows_rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return row_by_row(lambda part: rms(part, weight, eps), x)
