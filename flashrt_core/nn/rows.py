"""Products and attention of few rows whose bits depend on each row alone.

Decode, verification and branches feed different numbers of rows; a token must come out the same
in all of them. On the CPU every row is a product of its own, on CUDA a row tile of fixed size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from flashrt_core.nn.attention import MASKED
from flashrt_core.nn.fp8 import E4M3
from flashrt_core.nn.fp8 import stored_as
from flashrt_core.nn.norms import rms_norm

TILE = 16      # rows of a product or a function on CUDA: fewer are padded
KEY_STEP = 256  # keys; on the CPU a row attends a whole number of such steps


def rows_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x [M, K] @ weight [N, K]^T as [M, N], each row as if it were alone."""
    if x.device.type == 'cpu':
        return torch.cat([F.linear(row, weight) for row in x.split(1)])
    return _tiled(lambda part: F.linear(part, weight), x)


def rows_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return rms_norm(x) of x [M, ..., width], each row as if it were alone."""
    if x.device.type == 'cpu':
        return rms_norm(x, weight, eps)  # a sum along the last axis has one order whatever M is
    return _tiled(lambda part: rms_norm(part, weight, eps), x)


def row_by_row(fn: Callable[..., Tensor], *xs: Tensor) -> Tensor:
    """Return fn(*xs) of tensors [M, ...], each row as if it were alone.

    For functions such as exp, sine or sigmoid: on the CPU the last few elements of a tensor take
    another path than the vectors before them, with other bits. On CUDA the order of a sum within
    ``fn`` follows from the shape.
    """
    if xs[0].device.type != 'cpu':
        return _tiled(fn, *xs)
    if len(xs[0]) == 1:
        return fn(*xs)
    return torch.cat([fn(*rows) for rows in zip(*(x.split(1) for x in xs), strict=True)])


def _tiled(fn: Callable[..., Tensor], *xs: Tensor) -> Tensor:
    """Return fn(*xs) of tensors [M, ...], TILE rows at a time, the last ones beside zeros."""
    parts = [
        fn(*(torch.cat([x, x.new_zeros((TILE - len(x), *x.shape[1:]))]) for x in part))
        for part in zip(*(x.split(TILE) for x in xs), strict=True)
    ]
    return torch.cat(parts)[: len(xs[0])]


def attend_row(q: Tensor, kv: Tensor, position: Tensor) -> Tensor:
    """Attention of one query at ``position`` (int64 []) to the keys 0 ... position.

    q [Hq, D], kv [tokens, 2, Hk, D] in q's dtype or E4M3; returns [Hq, D]. What lies in kv beyond
    has no influence.
    """
    Hq, D = q.shape
    Hk = kv.shape[2]
    seen = torch.arange(len(kv), device=q.device) <= position  # [T]
    k, v = torch.where(seen[:, None, None, None], kv.to(q.dtype), 0).unbind(1)  # each [T, Hk, D]
    scores = torch.matmul(q.view(Hk, Hq // Hk, D), k.permute(1, 2, 0)).float() * D**-0.5
    weights = scores.masked_fill(~seen, MASKED).softmax(-1).to(v.dtype)  # [Hk, G, T]
    return torch.matmul(weights, v.transpose(0, 1)).reshape(Hq, D)


def put_rows(kv: Tensor, at: Tensor, new: Tensor) -> None:
    """Write new [M, 2, Hk, D] into kv [tokens, 2, Hk, D] at the rows ``at``, int64 [M]."""
    new = stored_as(new, kv.dtype)
    if kv.dtype == E4M3:  # torch moves its bytes only
        kv, new = kv.view(torch.uint8), new.view(torch.uint8)
    kv.index_copy_(0, at, new)


def key_span(position: Tensor, tokens: int) -> int:
    """Return how many of ``tokens`` keys a row at ``position`` has to look at.

    All of them on CUDA, where no size may depend on data.
    """
    if position.device.type != 'cpu':
        return tokens
    return min(tokens, (int(position) // KEY_STEP + 1) * KEY_STEP)
