"""Qwen3.5's functions through Triton kernels and cuBLAS; ``model`` is the reference.

Few rows are bound by the weights' bytes: a layer of them takes eight or nine small kernels, each
launched while the one before still runs, and every product has one tile of 16 rows, so a row's
bits are its own. Chunks are bound by arithmetic: cuBLAS, and a row-wise kernel between products.
The products of each precision: products.py.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from flashrt_core.errors import ContractError
from flashrt_core.kernels import decode_attention
from flashrt_core.kernels import delta_chunk
from flashrt_core.kernels import delta_step
from flashrt_core.kernels import prefill_attention
from flashrt_core.kernels import row_products
from flashrt_core.kernels import rows as row_kernels
from flashrt_core.kernels import token_rows
from flashrt_core.kernels._launch import overlaps
from flashrt_core.nn import rope_tables
from flashrt_core.nn.delta import TAPS
from flashrt_core.planners.memory import Branched
from flashrt_core.planners.memory import Live
from flashrt_core.planners.memory import Memory
from flashrt_core.planners.memory import Verify
from flashrt_core.planners.qwen3_5.config import Qwen35Config
from flashrt_core.planners.qwen3_5.model import scratch_specs
from flashrt_core.planners.qwen3_5.model import state_specs
from flashrt_core.planners.qwen3_5.precision import embed
from flashrt_core.planners.qwen3_5.precision import rows_of
from flashrt_core.planners.qwen3_5.precision import Weight
from flashrt_core.planners.qwen3_5.precision import weight
from flashrt_core.planners.qwen3_5.products import chunk_product
from flashrt_core.planners.qwen3_5.products import FEW
from flashrt_core.planners.qwen3_5.products import few_rows
from flashrt_core.planners.qwen3_5.products import LAST_NORM
from flashrt_core.planners.qwen3_5.products import products_of
from flashrt_core.planners.qwen3_5.products import row_product
from flashrt_core.planners.qwen3_5.products import RowProducts
from flashrt_core.planners.qwen3_5.products import selected as products_selected
from flashrt_core.planners.qwen3_5.weights import ROPE
from flashrt_core.planners.qwen3_5.weights import weight_specs

__all__ = ['chunk', 'head', 'mtp_draft', 'mtp_note', 'rows', 'scratch_specs', 'selected',
           'state_specs', 'weight_specs']  # fmt: skip

Tensors = Mapping[str, Tensor]

READS_SPAN = False  # of the keys, ``chunk`` reads those that are valid
NORM_HEADS_MANY = 16  # value heads of a program of the gated norm over many tokens


def selected(c: Qwen35Config, device: torch.device) -> bool:
    """Return whether these sizes fit the kernels and every kernel agrees with its reference."""
    kernels = (row_kernels, row_products, token_rows, decode_attention, prefill_attention,
               delta_step, delta_chunk)
    agree = [kernel.selected(device) for kernel in kernels] + [products_selected(c, device)]
    if c.kv_precision == 'fp8':
        agree += [kernel.fp8_selected(device)
                  for kernel in (token_rows, decode_attention, prefill_attention)]
    return fits(c) and all(agree)


def fits(c: Qwen35Config) -> bool:
    """Return whether the fixed tiles divide the sizes of ``c``."""
    splits = row_products.SPLITS
    return (
        c.dtype == 'bfloat16'
        and row_products.fits(c.width)
        and all(row_products.fits(K, splits)
                for K in (c.q_dim, c.v_dim, c.mlp))
        and row_products.gated_fits(c.mlp)
        and (c.precision != 'fp8' or (c.channels + c.v_dim + 2 * c.value_heads) % 16 == 0)
        and decode_attention.fits(c.heads, c.kv_heads, c.head_dim)
        and prefill_attention.fits(c.heads, c.kv_heads, c.head_dim)
        and delta_step.fits(c.value_heads, c.key_heads, c.key_dim, c.value_dim, TAPS)
        and delta_chunk.fits(c.value_heads, c.key_heads, c.key_dim, c.value_dim)
    )


def chunk(c: Qwen35Config, b: Tensors, tokens: Tensor, position: Tensor, length: Tensor,
          span: int, arrived: Callable[[int], None] = lambda layer: None) -> Tensor:
    """As ``model.chunk``; keys are read up to the last valid token, whatever the ``span``."""
    T, V = len(tokens), c.v_dim
    at = torch.arange(T, device=tokens.device)
    positions = position + at
    slots = torch.where(at < length, positions, -1)
    cos, sin = rope_tables(positions, b[ROPE])
    x = embed(c, b, tokens)
    multiply = products_of(c, b, x)
    q = x.new_empty((T, c.heads, c.head_dim))
    attended, mixed = torch.empty_like(q), x.new_empty((T, c.value_heads, c.value_dim))
    rule = delta_chunk.DeltaChunk(T, c.value_heads, c.key_heads, c.key_dim, c.value_dim, x.dtype,
                                  x.device)
    attend = prefill_attention.PrefillAttention(T, c.heads, c.kv_heads, c.head_dim, x.device)
    y = multiply.begin(x, 'layers.0.norm1')
    for i in range(c.layers):
        arrived(i)
        w = f'layers.{i}'
        if c.is_full(i):
            proj = multiply(y, f'{w}.qkv')
            token_rows.heads(proj, b[f'{w}.q_norm'], b[f'{w}.k_norm'], cos, sin, slots, q,
                             b[f'kv.{i}'], c.eps)
            attend(q, b[f'kv.{i}'], _gate(c, proj), attended, position, length)
            y = multiply.finish(x, attended.view(T, c.q_dim), w, _norm_after(c, i))
        else:
            channels, gate, a, beta = _split(c, multiply(y, f'{w}.mix'))
            o = rule(channels, a, beta, b[f'{w}.conv'], b[f'{w}.a_log'], b[f'{w}.dt_bias'],
                     b[f'conv.{i}'], b[f'recurrent.{i}'], length)
            delta_step.norm(o, gate, b[f'{w}.gate_norm'], mixed, length, c.eps,
                            heads=NORM_HEADS_MANY)
            y = multiply.finish(x, mixed.view(T, V), w, _norm_after(c, i))
    return y


def rows(c: Qwen35Config, b: Tensors, tokens: Tensor, positions: Tensor,
         memory: Memory) -> Tensor:
    """As ``model.rows``, for the memories of planners/memory.py.

    :raises ContractError: another memory.
    """
    M, V, pdl = len(tokens), c.v_dim, overlaps(tokens.device)
    reach = _Reach(c, memory, positions)
    cos, sin = rope_tables(positions, b[ROPE])
    x = embed(c, b, tokens)
    q = x.new_empty((M, c.heads, c.head_dim))
    attended, mixed = torch.empty_like(q), x.new_empty((M, c.value_heads, c.value_dim))
    o = x.new_empty((M, c.value_heads, c.value_dim), dtype=torch.float32)
    multiply = RowProducts(c, b, x)
    attend = decode_attention.DecodeAttention(M, c.heads, c.kv_heads, c.head_dim, x.device, pdl)
    y = multiply.begin(x, 'layers.0.norm1')
    for i in range(c.layers):
        w = f'layers.{i}'
        if c.is_full(i):
            proj = multiply(y, f'{w}.qkv')
            kv, tail = reach.keys(i)
            token_rows.heads(proj, b[f'{w}.q_norm'], b[f'{w}.k_norm'], cos, sin, reach.slots, q,
                             kv if tail is None else tail.view(-1, *kv.shape[1:]), c.eps, pdl)
            attend(q, kv, positions, attended, _gate(c, proj), tail, reach.prefix)
            y = multiply.finish(x, attended.view(M, c.q_dim), w, _norm_after(c, i))
        else:
            channels, gate, a, beta = _split(c, multiply(y, f'{w}.mix'))
            reach.hold(i, channels, a, beta)
            columns, state = reach.state(i)
            delta_step.step(channels, a, beta, b[f'{w}.conv'], b[f'{w}.a_log'],
                            b[f'{w}.dt_bias'], columns, state, o, reach.count, reach.write, pdl)
            delta_step.norm(o, gate, b[f'{w}.gate_norm'], mixed, reach.rows, c.eps,
                            channels if reach.moves else None,
                            columns if reach.moves else None, reach.count, pdl)
            y = multiply.finish(x, mixed.view(M, V), w, _norm_after(c, i))
    return y


def head(c: Qwen35Config, b: Tensors, hidden: Tensor) -> Tensor:
    """As ``model.head``."""
    logits = hidden.new_empty((len(hidden), c.vocab), dtype=torch.float32)
    row_product(hidden, weight(b, 'embed' if c.tied else 'head'), logits,
                overlaps(hidden.device))
    return logits


def mtp_note(c: Qwen35Config, b: Tensors, tokens: Tensor, hidden: Tensor, positions: Tensor,
             count: Tensor) -> None:
    """As ``model.mtp_note``; up to ``row_products.ROWS`` pairs have bits of their own."""
    M, pdl = len(tokens), overlaps(tokens.device)
    cos, sin = rope_tables(positions, b[ROPE])
    x = _mtp_input(c, b, tokens, hidden)
    y = torch.empty_like(x)
    row_kernels.norm_rows(x, None, b['mtp.layer.norm1'], None, y, c.eps)
    proj = _product(y, rows_of(weight(b, 'mtp.layer.qkv'), slice(2 * c.q_dim, None)))
    slots = torch.where(torch.arange(M, device=x.device) < count, positions, -1)
    norm = b['mtp.layer.k_norm']
    token_rows.heads(proj, norm, norm, cos, sin, slots, x.new_empty((M, 0, c.head_dim)),
                     b['mtp.kv'], c.eps, pdl)


def mtp_draft(c: Qwen35Config, b: Tensors, token: Tensor, hidden: Tensor,
              position: Tensor) -> tuple[Tensor, Tensor]:
    """As ``model.mtp_draft``."""
    positions, w, pdl = position[None], 'mtp.layer', overlaps(token.device)
    cos, sin = rope_tables(positions, b[ROPE])
    x = _mtp_input(c, b, token[None], hidden[None])
    q = x.new_empty((1, c.heads, c.head_dim))
    attended = torch.empty_like(q)
    multiply = RowProducts(c, b, x)
    attend = decode_attention.DecodeAttention(1, c.heads, c.kv_heads, c.head_dim, x.device, pdl)
    proj = multiply(multiply.begin(x, f'{w}.norm1'), f'{w}.qkv')
    token_rows.heads(proj, b[f'{w}.q_norm'], b[f'{w}.k_norm'], cos, sin, positions, q,
                     b['mtp.kv'], c.eps, pdl)
    attend(q, b['mtp.kv'], positions, attended, _gate(c, proj))
    y = multiply.finish(x, attended.view(1, c.q_dim), w, 'mtp.norm')
    return head(c, b, y)[0], y[0]


class _Reach:
    """Where M rows find and leave their state, as the kernels take it: see planners/memory.py.

    ``slots``: where row m's key goes. ``count``, ``write``: tokens that each state takes, and
    whether it is written. ``moves``: the columns of the convolution are carried on.
    """

    def __init__(self, c: Qwen35Config, memory: Memory, positions: Tensor) -> None:
        M, device = len(positions), positions.device
        self._memory, self.slots, self.prefix = memory, positions, None
        self.count = torch.ones((), dtype=torch.int64, device=device)
        self.rows = torch.full_like(self.count, M)
        self.write, self.moves = self.count, True
        if isinstance(memory, Live) and M == 1:
            return
        if isinstance(memory, Verify):
            self.count, self.write, self.moves = self.rows, torch.zeros_like(self.count), False
            memory.bring = partial(_accept, c, memory)
        elif isinstance(memory, Branched):
            tail = next(t for name, t in memory.own.items() if name.startswith('tail.kv.'))
            self.prefix = memory.prefix
            self.slots = (torch.arange(M, device=device) * tail.shape[1] + positions
                          - memory.prefix)
        else:
            raise ContractError(
                f'{M} rows reach the state through {type(memory).__name__}; the kernels know '
                'Live (one row), Verify and Branched of planners/memory.py')

    def keys(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """Return the trunk's KV and, of branches, the tails [M, tokens, 2, kv_heads, D]."""
        memory = self._memory
        tail = memory.own[f'tail.kv.{layer}'] if isinstance(memory, Branched) else None
        return memory.b[f'kv.{layer}'], tail  # type: ignore[attr-defined]

    def state(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return columns [R, 3, C] and state [R, Hv, Dk, Dv]."""
        memory, names = self._memory, (f'conv.{layer}', f'recurrent.{layer}')
        if isinstance(memory, Branched):
            return memory.own[names[0]], memory.own[names[1]]
        return memory.b[names[0]][None], memory.b[names[1]][None]  # type: ignore[attr-defined]

    def hold(self, layer: int, channels: Tensor, a: Tensor, beta: Tensor) -> None:
        """Keep what a verification's ``accept`` takes again."""
        if isinstance(self._memory, Verify):
            self._memory.held[layer] = channels, a, beta


def _accept(c: Qwen35Config, memory: Verify, b: Tensors, count: Tensor) -> None:
    """Take the first ``count`` held tokens through every state, by the kernel that read them."""
    pdl, write = overlaps(count.device), torch.ones_like(count)
    for layer, (channels, a, beta) in memory.held.items():
        w, columns = f'layers.{layer}', b[f'conv.{layer}'][None]
        o = torch.empty((len(channels), c.value_heads, c.value_dim), device=channels.device)
        delta_step.step(channels, a, beta, b[f'{w}.conv'], b[f'{w}.a_log'], b[f'{w}.dt_bias'],
                        columns, b[f'recurrent.{layer}'][None], o, count, write, pdl)
        delta_step.shift(channels, columns, count, pdl)


def _product(y: Tensor, w: Weight) -> Tensor:
    if len(y) > FEW:
        return chunk_product(y, w)
    return few_rows(y, w, overlaps(y.device), alone=False)


def _mtp_input(c: Qwen35Config, b: Tensors, tokens: Tensor, hidden: Tensor) -> Tensor:
    parts = torch.stack([embed(c, b, tokens), hidden])  # [2, M, width]
    normed = torch.empty_like(parts)
    for part, name in enumerate(('mtp.norm_embed', 'mtp.norm_hidden')):
        row_kernels.norm_rows(parts[part], None, b[name], None, normed[part], c.eps)
    return _product(torch.cat([normed[0], normed[1]], 1), weight(b, 'mtp.fc'))


def _gate(c: Qwen35Config, proj: Tensor) -> Tensor:
    """Return the gates [T, heads, head_dim], a view of proj [T, .]."""
    return proj[:, : 2 * c.q_dim].unflatten(1, (c.heads, 2, c.head_dim))[:, :, 1]


def _split(c: Qwen35Config, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cut y [T, .] into channels [T, C], z [T, Hv, Dv], a and b [T, Hv], all views."""
    sizes = [c.channels, c.v_dim, c.value_heads, c.value_heads]
    channels, z, a, beta = y.split(sizes, dim=1)
    return channels, z.unflatten(1, (c.value_heads, -1)), a, beta


def _norm_after(c: Qwen35Config, layer: int) -> str:
    """Return the name of the norm that follows a layer."""
    return LAST_NORM if layer + 1 == c.layers else f'layers.{layer + 1}.norm1'
