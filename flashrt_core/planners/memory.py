"""What few rows read and write of a planner's state: one live row, a verification, branches.

A model's ``rows`` asks its memory for attention and, in hybrid models, for the delta rule; what is
written where is the memory's business. ``b`` holds the trunk's tensors by name without a row axis.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from typing import Any
from typing import Protocol

import torch
from torch import Tensor

from flashrt_core.nn import delta
from flashrt_core.nn.rows import attend_row
from flashrt_core.nn.rows import key_span
from flashrt_core.nn.rows import put_rows

Tensors = Mapping[str, Tensor]


class Memory(Protocol):
    """How M rows reach the state; one object serves one pass over all layers."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v [M, Hk, D], attend q [M, Hq, D] up to each row's own; [M, Hq, D]."""

    def mix(self, layer: int, channels: Tensor, a: Tensor, beta: Tensor) -> Tensor:
        """The delta rule of channels [M, C], projections a and beta [M, Hv]; [M, Hv, Dv]."""


class Live:
    """One token of the trunk: KV, recurrent and conv state are written in place.

    :param position: int64 [], of the token.
    """

    def __init__(self, c: Any, b: Tensors, position: Tensor) -> None:
        self.c, self.b, self.position = c, b, position

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As ``Memory``, for one row."""
        kv = self.b[f'kv.{layer}']
        put_rows(kv, self.position[None], torch.stack([k, v], 1))
        return attend_row(q[0], kv[: key_span(self.position, len(kv))], self.position)[None]

    def mix(self, layer: int, channels: Tensor, a: Tensor, beta: Tensor) -> Tensor:
        """As ``Memory``, for one row."""
        columns, state = self.b[f'conv.{layer}'], self.b[f'recurrent.{layer}']
        out, after = _tokens(self.c, self.b, layer, columns, state, channels, a, beta)
        columns.copy_(delta.carried_columns(columns, channels, torch.ones_like(self.position)))
        state.copy_(after[-1])
        return out


class Verify:
    """M consecutive tokens of the trunk, of which a later ``accept`` keeps the first few.

    KV of all is written (what is not accepted lies beyond the extent); recurrent and conv state
    are not: their inputs are held.

    :param position: int64 [], of the first token.
    """

    def __init__(self, c: Any, b: Tensors, position: Tensor) -> None:
        self.c, self.b, self.position = c, b, position
        self.held: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self.bring: Callable[[Tensors, Tensor], None] | None = None  # ``accept`` by kernels

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As ``Memory``."""
        kv = self.b[f'kv.{layer}']
        at = self.position + torch.arange(len(q), device=q.device)
        put_rows(kv, at, torch.stack([k, v], 1))
        return torch.stack(
            [attend_row(q[m], kv[: key_span(at[m], len(kv))], at[m]) for m in range(len(q))]
        )

    def mix(self, layer: int, channels: Tensor, a: Tensor, beta: Tensor) -> Tensor:
        """As ``Memory``; the state is read, never written."""
        self.held[layer] = channels, a, beta
        columns, state = self.b[f'conv.{layer}'], self.b[f'recurrent.{layer}']
        return _tokens(self.c, self.b, layer, columns, state, channels, a, beta)[0]

    def accept(self, c: Any, b: Tensors, count: Tensor) -> None:
        """Bring recurrent and conv state forward by the first ``count`` tokens; int64 []."""
        if self.bring is not None:
            self.bring(b, count)
            return
        for layer, (channels, a, beta) in self.held.items():
            columns, state = b[f'conv.{layer}'], b[f'recurrent.{layer}']
            _, after = _tokens(c, b, layer, columns, state, channels, a, beta)
            states = torch.stack([state, *after])
            columns.copy_(delta.carried_columns(columns, channels, count))
            state.copy_(states.index_select(0, count[None])[0])


class Branched:
    """One token of each of R branches: own state and KV tail, the trunk's KV before it.

    :param own: the branches' tensors by name, rows first; KV tails as ``tail.kv.<layer>``.
    :param prefix: int64 [], tokens of the trunk that all branches share.
    """

    def __init__(self, c: Any, b: Tensors, own: Tensors, prefix: Tensor) -> None:
        self.c, self.b, self.own, self.prefix = c, b, own, prefix

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As ``Memory``: row r attends the trunk's keys, then its own tail."""
        kv, tails = self.b[f'kv.{layer}'], self.own[f'tail.kv.{layer}']
        positions = self.own['position']
        found = []
        for r in range(len(q)):
            tail, position = tails[r], positions[r]
            put_rows(tail, (position - self.prefix)[None], torch.stack([k[r], v[r]])[None])
            at = torch.arange(key_span(position, len(kv)), device=q.device)
            moved = tail.index_select(0, (at - self.prefix).clamp(0, len(tail) - 1))
            whole = torch.where((at < self.prefix)[:, None, None, None], kv[: len(at)], moved)
            found.append(attend_row(q[r], whole, position))
        return torch.stack(found)

    def mix(self, layer: int, channels: Tensor, a: Tensor, beta: Tensor) -> Tensor:
        """As ``Memory``: every row has its own state."""
        columns, states = self.own[f'conv.{layer}'], self.own[f'recurrent.{layer}']
        one = torch.ones_like(self.prefix)
        outs = []
        for r in range(len(channels)):
            row = slice(r, r + 1)
            out, after = _tokens(self.c, self.b, layer, columns[r], states[r], channels[row],
                                 a[row], beta[row])  # fmt: skip
            columns[r].copy_(delta.carried_columns(columns[r], channels[row], one))
            states[r].copy_(after[-1])
            outs.append(out)
        return torch.cat(outs)


def _tokens(c: Any, b: Tensors, layer: int, columns: Tensor, state: Tensor, channels: Tensor,
            a: Tensor, beta: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the read-outs [M, Hv, Dv] of consecutive tokens and the state after each."""
    at = f'layers.{layer}'
    outs, states = [], []
    for t in range(len(channels)):
        row = slice(t, t + 1)  # one at a time: its bits depend on it alone
        mixed = delta.causal_conv(columns, channels[row], b[f'{at}.conv'])
        columns = torch.cat([columns[1:], channels[row]])
        q, k, v = delta.split_heads(mixed, c.key_heads, c.value_heads, c.key_dim)
        g, strength = delta.gates(a[row], beta[row], b[f'{at}.a_log'], b[f'{at}.dt_bias'])
        out, state = delta.delta_token(q[0], k[0], v[0], g[0], strength[0], state)
        outs.append(out)
        states.append(state)
    return torch.stack(outs), states
