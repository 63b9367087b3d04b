"""The gated delta rule (arXiv 2412.06464): a linear-attention layer with a state of fixed size.

Per token and value head the state S [Dk, Dv] fades by exp(g), then takes the outer product of the
key and beta * (value - what S returned for the key); the query reads S last. All is float32.
Hv value heads share Hk key heads: head h uses key head h // (Hv / Hk).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

TAPS = 4     # of the convolution; TAPS - 1 columns are carried
CHUNK = 64   # tokens of one step of ``delta_chunks``
L2_EPS = 1e-6


def causal_conv(columns: Tensor, channels: Tensor, weight: Tensor) -> Tensor:
    """Depthwise causal convolution and SiLU: channels [T, C] after columns [3, C], weight [C, 4].

    Returns [T, C] in the dtype of ``channels``; a token depends on its four columns alone.
    """
    T = len(channels)
    padded = torch.cat([columns, channels]).float()
    y = padded[:T] * weight[:, 0].float()
    for tap in range(1, TAPS):
        y = y + padded[tap : tap + T] * weight[:, tap].float()
    return (y * y.sigmoid()).to(channels.dtype)


def carried_columns(columns: Tensor, channels: Tensor, count: Tensor) -> Tensor:
    """Return the last three of ``columns`` [3, C] followed by the first ``count`` of channels."""
    at = count + torch.arange(TAPS - 1, device=channels.device)
    return torch.cat([columns, channels]).index_select(0, at)


def split_heads(
    mixed: Tensor, key_heads: int, value_heads: int, key_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Cut mixed [T, C] into q, k [T, Hv, Dk] and v [T, Hv, Dv], float32.

    q and k get unit length, q is scaled by Dk^-0.5 besides.
    """
    K = key_heads * key_dim
    q, k, v = mixed.float().split([K, K, mixed.shape[1] - 2 * K], dim=1)
    repeats = value_heads // key_heads
    q, k = (x.view(-1, key_heads, key_dim).repeat_interleave(repeats, 1) for x in (q, k))
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPS) for x in (q, k))
    return q * key_dim**-0.5, k, v.unflatten(1, (value_heads, -1))


def gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return log decay g and strength beta, float32 [T, Hv] of the projections a and b."""
    g = -a_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return g, b.float().sigmoid()


def delta_token(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Take one token: q, k [Hv, Dk], v [Hv, Dv], g and beta [Hv], state [Hv, Dk, Dv].

    Returns (read-out [Hv, Dv], the state after it).
    """
    state = state * g.exp()[:, None, None]
    change = (v - (state * k[..., None]).sum(1)) * beta[:, None]
    state = state + k[..., None] * change[:, None]
    return (state * q[..., None]).sum(1), state


def delta_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    length: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Take T tokens, 64 at a time: q, k [T, Hv, Dk], v [T, Hv, Dv], g and beta [T, Hv].

    :param state: float32 [Hv, Dk, Dv] before the first token.
    :param length: int64 []; tokens from there on change nothing, whatever they hold.
    :return: (read-outs [T, Hv, Dv], the state after ``length`` tokens).

    Within a chunk the updates are one triangular system (section 3 of the source): with G the
    running sum of g and A[i, j] = beta_i k_i.k_j exp(G_i - G_j) for j < i, the changes are
    (I + A)^-1 beta (v - exp(G) k S).
    """
    T = len(beta)
    if length is not None:
        valid = torch.arange(T, device=q.device) < length
        q, k, v = (torch.where(valid[:, None, None], x, 0.0) for x in (q, k, v))
        g, beta = (torch.where(valid[:, None], x, 0.0) for x in (g, beta))
    pad = -T % CHUNK
    if pad:
        q, k, v = (F.pad(x, (0, 0, 0, 0, 0, pad)) for x in (q, k, v))
        g, beta = (F.pad(x, (0, 0, 0, pad)) for x in (g, beta))
    at = torch.arange(CHUNK, device=q.device)
    earlier, seen = at[:, None] > at, at[:, None] >= at  # [i, j]
    outs = []
    for start in range(0, T, CHUNK):
        part = slice(start, start + CHUNK)
        qc, kc, vc = (x[part].transpose(0, 1) for x in (q, k, v))  # [Hv, 64, D]
        G = g[part].t().cumsum(1)  # [Hv, 64]
        strength = beta[part].t()[..., None]  # [Hv, 64, 1]
        fade = (G[..., None] - G[:, None]).masked_fill(~seen, float('-inf')).exp()  # [Hv, i, j]
        A = torch.where(earlier, strength * (kc @ kc.transpose(1, 2)) * fade, 0.0)
        right = strength * (vc - G.exp()[..., None] * (kc @ state))
        change = torch.linalg.solve_triangular(
            A + torch.eye(CHUNK, device=A.device), right, upper=False, unitriangular=True
        )  # [Hv, 64, Dv]
        read = G.exp()[..., None] * (qc @ state) + ((qc @ kc.transpose(1, 2)) * fade) @ change
        outs.append(read.transpose(0, 1))
        left = (G[:, -1:] - G).exp()[..., None]  # what is left of each change at the end
        state = G[:, -1].exp()[:, None, None] * state + (kc * left).transpose(1, 2) @ change
    return torch.cat(outs)[:T], state


def gated_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return rms_norm(o) * weight * silu(z) for o, z [..., Dv], in z's dtype; weight is plain."""
    y = o.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (weight.float() * y * F.silu(z.float())).to(z.dtype)
