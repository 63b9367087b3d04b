"""Grouped-query attention by matmul and softmax, scores in float32.

Masked scores are a finite large negative number, not infinity: a query whose keys are all masked
gets the mean of the values and never NaN, so padding cannot spread.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashrt_core.nn.fp8 import stored_as

MASKED = -1.0e30


def attend(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
    """Bidirectional attention of every query to every valid key.

    Shapes: q [B, S, Hq, D], k and v [B, T, Hk, D] with Hq a multiple of Hk, key_mask bool [T].
    Returns [B, S, Hq * D].
    """
    B, S, Hq, D = q.shape
    Hk = k.shape[2]
    G = Hq // Hk
    # The G query heads of one key head are folded into the query axis.
    q = q.unflatten(2, (Hk, G)).permute(0, 2, 3, 1, 4).reshape(B, Hk, G * S, D)
    k = k.permute(0, 2, 3, 1)  # [B, Hk, D, T]
    v = v.transpose(1, 2)  # [B, Hk, T, D]
    scores = torch.matmul(q, k).float() * D**-0.5  # [B, Hk, G * S, T]
    if key_mask is not None:
        scores = scores.masked_fill(~key_mask, MASKED)
    y = torch.matmul(scores.softmax(-1).to(v.dtype), v)  # [B, Hk, G * S, D]
    return y.view(B, Hk, G, S, D).permute(0, 3, 1, 2, 4).reshape(B, S, Hq * D)


def attend_shared_prefix(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prefix_k: Tensor,
    prefix_v: Tensor,
    prefix_mask: Tensor,
    suffix_mask: Tensor,
) -> Tensor:
    """Attention of R rows' suffix to one prefix shared by all rows, and to their own suffix.

    Shapes: q [R, S, Hq, D], k and v [R, S, Hk, D], prefix_k and prefix_v [P, Hk, D],
    prefix_mask bool [P], suffix_mask bool [S, S] (query, key). Returns [R, S, Hq * D].
    The rows are folded into the query axis of the prefix product, so the prefix is never repeated.
    """
    R, S, Hq, D = q.shape
    P, Hk = prefix_k.shape[0], prefix_k.shape[1]
    G = Hq // Hk
    scale = D**-0.5
    q = q.unflatten(2, (Hk, G)).permute(2, 0, 3, 1, 4)  # [Hk, R, G, S, D]
    k = k.permute(2, 0, 3, 1)  # [Hk, R, D, S]
    v = v.permute(2, 0, 1, 3)  # [Hk, R, S, D]
    folded = q.reshape(Hk, R * G * S, D)

    to_prefix = torch.matmul(folded, prefix_k.permute(1, 2, 0)).float() * scale  # [Hk, RGS, P]
    to_prefix = to_prefix.masked_fill(~prefix_mask, MASKED).view(Hk, R, G, S, P)
    to_suffix = torch.matmul(q.reshape(Hk, R, G * S, D), k).float() * scale  # [Hk, R, GS, S]
    to_suffix = to_suffix.view(Hk, R, G, S, S).masked_fill(~suffix_mask, MASKED)

    weights = torch.cat([to_prefix, to_suffix], dim=-1).softmax(-1).to(v.dtype)
    from_prefix = weights[..., :P].reshape(Hk, R * G * S, P)
    y = torch.matmul(from_prefix, prefix_v.transpose(0, 1)).view(Hk, R, G, S, D)
    from_suffix = weights[..., P:].reshape(Hk, R, G * S, S)
    y = y + torch.matmul(from_suffix, v).view(Hk, R, G, S, D)
    return y.permute(1, 3, 0, 2, 4).reshape(R, S, Hq * D)


def attend_causal(q: Tensor, kv: Tensor, position: Tensor, length: Tensor) -> Tensor:
    """Attention of T tokens from ``position`` on to all keys up to their own.

    q [T, Hq, D], kv [span, 2, Hk, D] (q's dtype or E4M3) with the tokens' own keys stored,
    position and length int64 []. Returns [T, Hq, D]; rows from ``length`` on mean nothing. Keys
    beyond the last valid token are not looked at, whatever they hold.
    """
    T, Hq, D = q.shape
    Hk, at = kv.shape[2], torch.arange(len(kv), device=q.device)
    live = at < position + length
    k, v = torch.where(live[:, None, None, None], kv.to(q.dtype), 0).unbind(1)  # [span, Hk, D]
    seen = (at <= position + torch.arange(T, device=q.device)[:, None]) & live  # [T, span]
    grouped = q.unflatten(1, (Hk, Hq // Hk)).permute(1, 2, 0, 3)  # [Hk, G, T, D]
    scores = torch.matmul(grouped, k.permute(1, 2, 0)[:, None]).float() * D**-0.5
    weights = scores.masked_fill(~seen, MASKED).softmax(-1).to(v.dtype)
    y = torch.matmul(weights, v.transpose(0, 1)[:, None])  # [Hk, G, T, D]
    return y.permute(2, 0, 1, 3).reshape(T, Hq, D)


def store_rows(kv: Tensor, new: Tensor, position: Tensor, count: Tensor) -> None:
    """Write the first ``count`` of new [T, 2, Hk, D] into kv [span, 2, Hk, D] at ``position``.

    position and count int64 []; nothing else of kv changes.
    """
    at = torch.arange(len(kv), device=kv.device) - position
    taken = (at >= 0) & (at < count)
    moved = new.index_select(0, at.clamp(0, len(new) - 1))
    kv.copy_(torch.where(taken[:, None, None, None], stored_as(moved, kv.dtype), kv))
