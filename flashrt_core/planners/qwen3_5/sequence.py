"""Qwen3.5 over a whole sequence from the empty state: differentiable, for training.

The same layers as ``model``, without buffers: nothing is written in place. One sequence at a time;
``torch.func.vmap`` gives the batch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from flashrt_core.nn import delta
from flashrt_core.nn import rms_norm
from flashrt_core.nn import rope_tables
from flashrt_core.planners.qwen3_5 import model
from flashrt_core.planners.qwen3_5.config import Qwen35Config
from flashrt_core.planners.qwen3_5.weights import ROPE

Tensors = Mapping[str, Tensor]


def forward(c: Qwen35Config, w: Tensors, tokens: Tensor) -> Tensor:
    """Return hidden [T, D] (after the final norm) of tokens int64 [T]."""
    T = len(tokens)
    cos, sin = rope_tables(torch.arange(T, device=tokens.device), w[ROPE])
    x = F.embedding(tokens, w['embed'])
    for i in range(c.layers):
        at = f'layers.{i}'
        if c.is_full(i):
            x = _attending(c, w, at, x, cos, sin)
            continue
        y = F.linear(rms_norm(x, w[f'{at}.norm1'], c.eps), w[f'{at}.mix'])
        channels, z, a, b = model.split(c, y)
        mixed = delta.causal_conv(
            channels.new_zeros((delta.TAPS - 1, c.channels)), channels, w[f'{at}.conv'])
        q, k, v = delta.split_heads(mixed, c.key_heads, c.value_heads, c.key_dim)
        g, beta = delta.gates(a, b, w[f'{at}.a_log'], w[f'{at}.dt_bias'])
        state = q.new_zeros((c.value_heads, c.key_dim, c.value_dim))
        o, _ = delta.delta_chunks(q, k, v, g, beta, state)
        x = x + F.linear(model.normed(c, w[f'{at}.gate_norm'], o, z), w[f'{at}.out'])
        x = x + model.mlp(c, w, at, x)
    return rms_norm(x, w['norm'], c.eps)


def mtp_forward(c: Qwen35Config, w: Tensors, tokens: Tensor, hidden: Tensor) -> Tensor:
    """Return the MTP head's hidden [T, D] of pairs: hidden [T, D] and the tokens [T] after it."""
    T = len(tokens)
    cos, sin = rope_tables(torch.arange(T, device=tokens.device), w[ROPE])
    embedded = rms_norm(F.embedding(tokens, w['embed']), w['mtp.norm_embed'], c.eps)
    hidden = rms_norm(hidden, w['mtp.norm_hidden'], c.eps)
    x = F.linear(torch.cat([embedded, hidden], -1), w['mtp.fc'])
    return rms_norm(_attending(c, w, 'mtp.layer', x, cos, sin), w['mtp.norm'], c.eps)


def logits(c: Qwen35Config, w: Tensors, hidden: Tensor) -> Tensor:
    """Return float32 [T, vocab]."""
    return F.linear(hidden, w['embed' if c.tied else 'head']).float()


def _attending(c: Qwen35Config, w: Tensors, at: str, x: Tensor, cos: Tensor,
               sin: Tensor) -> Tensor:
    """One layer of gated full attention over x [T, D]."""
    T = len(x)
    y = F.linear(rms_norm(x, w[f'{at}.norm1'], c.eps), w[f'{at}.qkv'])
    q, gate, k, v = model.heads(c, w, at, y, cos, sin)
    k, v = (part.repeat_interleave(c.heads // c.kv_heads, 1) for part in (k, v))
    scores = torch.einsum('thd,shd->hts', q, k).float() * c.head_dim**-0.5
    later = torch.ones((T, T), dtype=torch.bool, device=x.device).triu(1)
    weights = scores.masked_fill(later, float('-inf')).softmax(-1).to(v.dtype)
    y = model.gated(torch.einsum('hts,shd->thd', weights, v), gate)
    x = x + F.linear(y, w[f'{at}.out'])
    return x + model.mlp(c, w, at, x)
