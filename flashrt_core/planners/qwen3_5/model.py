"""Qwen3.5's forward pass in plain torch over static buffers: the reference of its kernels.

``b`` holds constants and state by name; T and M tokens, D width. Sources: the gated delta rule
(arXiv 2412.06464), gated attention (arXiv 2505.06708), Qwen3-Next's and Qwen3.5's published
configs; the MTP head as in DeepSeek-V3 (arXiv 2412.19437), embedding first.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from flashrt_core.nn import delta
from flashrt_core.nn import rms_norm
from flashrt_core.nn import rope_tables
from flashrt_core.nn import rotate
from flashrt_core.nn.attention import attend_causal
from flashrt_core.nn.attention import store_rows
from flashrt_core.nn.rows import attend_row
from flashrt_core.nn.rows import key_span
from flashrt_core.nn.rows import row_by_row
from flashrt_core.nn.rows import rows_norm
from flashrt_core.planners.memory import Memory
from flashrt_core.planners.qwen3_5.config import Qwen35Config
from flashrt_core.planners.qwen3_5.precision import embed
from flashrt_core.planners.qwen3_5.precision import linear
from flashrt_core.planners.qwen3_5.precision import rows_linear
from flashrt_core.planners.qwen3_5.precision import rows_of
from flashrt_core.planners.qwen3_5.precision import weight
from flashrt_core.planners.qwen3_5.weights import ROPE
from flashrt_core.planners.qwen3_5.weights import weight_specs
from flashrt_core.runtime import BufferSpec
from flashrt_core.runtime import Kind
from flashrt_core.runtime import Role

__all__ = ['chunk', 'head', 'mtp_draft', 'mtp_note', 'rows', 'scratch_specs', 'state_specs',
           'weight_specs']  # fmt: skip

Tensors = Mapping[str, Tensor]


def state_specs(c: Qwen35Config) -> list[BufferSpec]:
    """Return the memory of the layers: KV of those that attend, states of those that recur."""
    specs = []
    kv = (c.context, 2, c.kv_heads, c.head_dim)
    for i in range(c.layers):
        if c.is_full(i):
            specs.append(BufferSpec(f'kv.{i}', Role.STATE, c.kv_dtype, kv, kind=Kind.KV))
            continue
        state = (c.value_heads, c.key_dim, c.value_dim)
        columns = (delta.TAPS - 1, c.channels)
        specs += [
            BufferSpec(f'recurrent.{i}', Role.STATE, torch.float32, state, kind=Kind.RECURRENT),
            BufferSpec(f'conv.{i}', Role.STATE, c.torch_dtype, columns, kind=Kind.CONV),
        ]
    if c.mtp:
        specs.append(BufferSpec('mtp.kv', Role.STATE, c.kv_dtype, kv, kind=Kind.KV))
    return specs


def scratch_specs(c: Qwen35Config) -> list[BufferSpec]:
    """Return none: the reference keeps what it needs within one body."""
    return []


def chunk(c: Qwen35Config, b: Tensors, tokens: Tensor, position: Tensor, length: Tensor,
          span: int, arrived: Callable[[int], None] = lambda layer: None) -> Tensor:
    """Take the first ``length`` of T tokens into the state at ``position``; hidden [T, D].

    tokens int32 [T], position and length int64 []. Attends and writes KV below ``span``, which is
    at least position + length. Rows from ``length`` on are finite and mean nothing. ``arrived`` is
    told each layer before its state is touched: with a restore under way it waits for that.
    """
    T = len(tokens)
    positions = position + torch.arange(T, device=tokens.device)
    cos, sin = rope_tables(positions, b[ROPE])
    x = embed(c, b, tokens)
    for i in range(c.layers):
        arrived(i)
        at = f'layers.{i}'
        y = rms_norm(x, b[f'{at}.norm1'], c.eps)
        if c.is_full(i):
            q, gate, k, v = heads(c, b, at, linear(y, weight(b, f'{at}.qkv')), cos, sin)
            kv = b[f'kv.{i}'][:span]
            store_rows(kv, torch.stack([k, v], 1), position, length)
            y = gated(attend_causal(q, kv, position, length), gate)
        else:
            y = _recur(c, b, i, linear(y, weight(b, f'{at}.mix')), length)
        x = x + linear(y, weight(b, f'{at}.out'))
        x = x + mlp(c, b, at, x)
    return rms_norm(x, b['norm'], c.eps)


def rows(c: Qwen35Config, b: Tensors, tokens: Tensor, positions: Tensor,
         memory: Memory) -> Tensor:
    """Take M tokens, each at its own position, through ``memory``; hidden [M, D].

    tokens int32 [M], positions int64 [M]. A row's bits depend on that row alone.
    """
    cos, sin = _rope(b, positions)
    x = embed(c, b, tokens)
    for i in range(c.layers):
        at = f'layers.{i}'
        y = rows_norm(x, b[f'{at}.norm1'], c.eps)
        if c.is_full(i):
            q, gate, k, v = heads(c, b, at, rows_linear(y, weight(b, f'{at}.qkv')), cos, sin, True)
            y = row_by_row(gated, memory.attend(i, q, k, v), gate)
        else:
            channels, z, a, beta = split(c, rows_linear(y, weight(b, f'{at}.mix')))
            o = memory.mix(i, channels, a, beta)
            y = row_by_row(partial(normed, c, b[f'{at}.gate_norm']), o, z)
        x = x + rows_linear(y, weight(b, f'{at}.out'))
        x = x + mlp(c, b, at, x, alone=True)
    return rows_norm(x, b['norm'], c.eps)


def head(c: Qwen35Config, b: Tensors, hidden: Tensor) -> Tensor:
    """Return the logits float32 [M, vocab] of hidden [M, D], each row as if alone."""
    return rows_linear(hidden, weight(b, 'embed' if c.tied else 'head')).float()


def mtp_note(c: Qwen35Config, b: Tensors, tokens: Tensor, hidden: Tensor, positions: Tensor,
             count: Tensor) -> None:
    """Store MTP's key and value of the first ``count`` pairs at their positions.

    A pair is the hidden [M, D] at a position p (after the final norm) and the token at p + 1,
    int32 [M]; positions int64 [M] are consecutive. Keys and values depend on the pair alone.
    """
    cos, sin = _rope(b, positions)
    y = rows_norm(_mtp_input(c, b, tokens, hidden), b['mtp.layer.norm1'], c.eps)
    kv_rows = rows_of(weight(b, 'mtp.layer.qkv'), slice(2 * c.q_dim, None))
    k, v = rows_linear(y, kv_rows).unflatten(1, (2, c.kv_heads, c.head_dim)).unbind(1)
    k = _rotate(c, rows_norm(k, b['mtp.layer.k_norm'], c.eps), cos, sin)
    store_rows(b['mtp.kv'], torch.stack([k, v], 1), positions[0], count)


def mtp_draft(c: Qwen35Config, b: Tensors, token: Tensor, hidden: Tensor,
              position: Tensor) -> tuple[Tensor, Tensor]:
    """Return (logits [vocab], hidden [D]) of one draft.

    The pair is ``hidden`` at ``position`` and ``token`` after it (int32 []); it is stored at
    ``position``, and the draft attends up to it.
    """
    tokens, positions = token[None], position[None]
    one = torch.ones_like(position)
    mtp_note(c, b, tokens, hidden[None], positions, one)
    cos, sin = _rope(b, positions)
    at = 'mtp.layer'
    x = _mtp_input(c, b, tokens, hidden[None])
    y = rows_norm(x, b[f'{at}.norm1'], c.eps)
    q, gate, _, _ = heads(c, b, at, rows_linear(y, weight(b, f'{at}.qkv')), cos, sin, True)
    kv = b['mtp.kv']
    attended = attend_row(q[0], kv[: key_span(position, len(kv))], position)[None]
    x = x + rows_linear(gated(attended, gate), weight(b, f'{at}.out'))
    x = x + mlp(c, b, at, x, alone=True)
    x = rows_norm(x, b['mtp.norm'], c.eps)
    return head(c, b, x)[0], x[0]


def _rope(b: Tensors, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin of few rows, each as if alone."""
    both = row_by_row(lambda at: torch.stack(rope_tables(at, b[ROPE]), 1), positions)
    cos, sin = both.unbind(1)
    return cos, sin


def _mtp_input(c: Qwen35Config, b: Tensors, tokens: Tensor, hidden: Tensor) -> Tensor:
    embedded = rows_norm(embed(c, b, tokens), b['mtp.norm_embed'], c.eps)
    hidden = rows_norm(hidden, b['mtp.norm_hidden'], c.eps)
    return rows_linear(torch.cat([embedded, hidden], 1), weight(b, 'mtp.fc'))


def heads(c: Qwen35Config, b: Tensors, at: str, y: Tensor, cos: Tensor, sin: Tensor,
          alone: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cut y [T, .] into q and gate [T, heads, d], k and v [T, kv_heads, d]; normed, rotated.

    With ``alone`` each row as if it were alone.
    """
    norm = rows_norm if alone else rms_norm
    queries, k, v = y.split([2 * c.q_dim, c.kv_dim, c.kv_dim], dim=1)
    q, gate = queries.unflatten(1, (c.heads, 2, c.head_dim)).unbind(2)
    k, v = (part.unflatten(1, (c.kv_heads, c.head_dim)) for part in (k, v))
    q = _rotate(c, norm(q, b[f'{at}.q_norm'], c.eps), cos, sin)
    k = _rotate(c, norm(k, b[f'{at}.k_norm'], c.eps), cos, sin)
    return q, gate, k, v


def _rotate(c: Qwen35Config, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first ``rotary`` dims of every head."""
    turned, rest = x.split([c.rotary, c.head_dim - c.rotary], dim=-1)
    return torch.cat([rotate(turned, cos, sin), rest], -1)


def gated(attended: Tensor, gate: Tensor) -> Tensor:
    """Return attended * sigmoid(gate), heads one beside the other [T, heads * d]."""
    return (attended * gate.sigmoid()).flatten(1)


def normed(c: Qwen35Config, weight: Tensor, o: Tensor, z: Tensor) -> Tensor:
    """The gated norm of read-outs o [T, Hv, Dv] by z [T, Hv * Dv]; [T, Hv * Dv]."""
    return delta.gated_norm(o, z.unflatten(1, (c.value_heads, -1)), weight, c.eps).flatten(1)


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def split(c: Qwen35Config, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cut y [T, .] into channels, z, a and b."""
    sizes = [c.channels, c.value_heads * c.value_dim, c.value_heads, c.value_heads]
    channels, z, a, beta = y.split(sizes, dim=1)
    return channels, z, a, beta


def _recur(c: Qwen35Config, b: Tensors, i: int, y: Tensor, length: Tensor) -> Tensor:
    """The delta rule over one chunk; brings recurrent and conv state forward in place."""
    at, columns, state = f'layers.{i}', b[f'conv.{i}'], b[f'recurrent.{i}']
    channels, z, a, strength = split(c, y)
    mixed = delta.causal_conv(columns, channels, b[f'{at}.conv'])
    q, k, v = delta.split_heads(mixed, c.key_heads, c.value_heads, c.key_dim)
    g, beta = delta.gates(a, strength, b[f'{at}.a_log'], b[f'{at}.dt_bias'])
    o, after = delta.delta_chunks(q, k, v, g, beta, state, length)
    columns.copy_(delta.carried_columns(columns, channels, length))
    state.copy_(after)
    return normed(c, b[f'{at}.gate_norm'], o, z)


def mlp(c: Qwen35Config, b: Tensors, at: str, x: Tensor, alone: bool = False) -> Tensor:
    """Return the gated MLP (SwiGLU) of x [T, D]; with ``alone`` each row as if it were alone."""
    y = (rows_norm if alone else rms_norm)(x, b[f'{at}.norm2'], c.eps)
    if alone:
        gate, up = rows_linear(y, weight(b, f'{at}.gate_up')).chunk(2, dim=1)
        return rows_linear(row_by_row(_swiglu, gate, up), weight(b, f'{at}.down'))
    gate, up = linear(y, weight(b, f'{at}.gate_up')).chunk(2, dim=1)
    return linear(_swiglu(gate, up), weight(b, f'{at}.down'))
