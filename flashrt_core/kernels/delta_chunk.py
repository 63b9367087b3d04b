"""A gated delta-rule layer (arXiv 2412.06464) over many tokens, in chunks of 64.

Within a chunk the updates are one triangular system (the WY form): with A[i, j] = beta_i
exp(G_i - G_j) k_i . k_j below the diagonal and G the running sum of log decays,
T = (I + A)^-1, U = T (beta v), W = T (beta exp(G) k). Then, chunk by chunk,
v' = U - W S, o = exp(G) (q S) + P v' with P = tril(q k^T exp(G_i - G_j)), and
S = exp(G_last) S + k^T (exp(G_last - G) v'). The number of valid tokens is data on the device.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flashrt_core.kernels._launch import close
from flashrt_core.kernels._launch import draw
from flashrt_core.kernels._triton import lazy_jit
from flashrt_core.kernels._triton import triton_selected
from flashrt_core.kernels._triton import Variant
from flashrt_core.kernels.delta_step import step_reference
from flashrt_core.nn.delta import CHUNK
from flashrt_core.nn.delta import L2_EPS

if TYPE_CHECKING:
    import triton.language as tl

TOKENS = 32                     # of a program of the convolution
SOLVE_WARPS, SOLVE_STAGES = 4, 2
SCAN_COLUMNS = 64               # value columns of a program of the scan: 96 programs at 48 heads
SCAN_WARPS, SCAN_STAGES = 4, 2


@lazy_jit
def conv_heads(channels, conv, columns, out, length, token_row,  # type: ignore[no-untyped-def]
               KEYS: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, C: tl.constexpr,
               EPS: tl.constexpr):
    """
    Convolve, silu, and normalise q and k; carry the columns on; grid (heads, tokens / BT).

    channels [T, C] = q | k | v in heads of D, the first KEYS those of q, as many of k. columns
    [3, C] precede the first token and become the last three of ``length`` (int64 scalar) tokens.
    out [T, C]; tokens from ``length`` on are not written.
    """
    head = tl.program_id(0)
    t = tl.program_id(1) * BT + tl.arange(0, BT)
    c = head * D + tl.arange(0, D)
    n = tl.load(length).to(tl.int32)
    value = tl.zeros([BT, D], tl.float32)
    for tap in tl.static_range(4):
        at = t - 3 + tap
        x = tl.load(channels + at[:, None].to(tl.int64) * token_row + c[None, :],
                    mask=(at[:, None] >= 0) & (at[:, None] < n), other=0.0).to(tl.float32)
        x += tl.load(columns + (at[:, None] + 3) * C + c[None, :], mask=at[:, None] < 0,
                     other=0.0).to(tl.float32)
        value += x * tl.load(conv + c * 4 + tap).to(tl.float32)[None, :]
    value = value / (1.0 + tl.exp(-value))
    if head < 2 * KEYS:
        value = value.to(out.dtype.element_ty).to(tl.float32)
        value = value * tl.rsqrt(tl.sum(value * value, 1) + EPS)[:, None]
        if head < KEYS:
            value = value * D ** -0.5
    tl.store(out + t[:, None].to(tl.int64) * C + c[None, :], value.to(out.dtype.element_ty),
             mask=t[:, None] < n)
    if tl.program_id(1) == 0:  # no other program reads these columns
        j = tl.arange(0, 4)[:, None]
        past = n - 3 + j
        last = tl.load(channels + past.to(tl.int64) * token_row + c[None, :],
                       mask=(past >= 0) & (j < 3), other=0.0)
        last += tl.load(columns + (n + j) * C + c[None, :], mask=(past < 0) & (j < 3), other=0.0)
        tl.debug_barrier()
        tl.store(columns + j * C + c[None, :], last, mask=j < 3)


@lazy_jit
def chunk_solve(mixed, a, b, a_log, dt_bias, w_out, u_out, p_out, sum_out, length, token_row,  # type: ignore[no-untyped-def]
                HV: tl.constexpr, HK: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
                L: tl.constexpr):
    """
    Solve one chunk of one head; grid (chunks, HV).

    mixed [T, q | k | v], from ``conv_heads``; a and b [T, HV], token_row elements apart. Writes
    W [T, HV, DK], U [T, HV, DV], P [T, HV, L] and float32 G [T, HV]. Padding is neutral.
    """
    C: tl.constexpr = 2 * HK * DK + HV * DV
    head = tl.program_id(1)
    first = tl.program_id(0) * L
    n = tl.load(length).to(tl.int32)
    if first >= n:
        return
    i = tl.arange(0, L)
    t = first + i
    dk = tl.arange(0, DK)
    dv = tl.arange(0, DV)
    inside = t < n
    row = mixed + t[:, None].to(tl.int64) * C
    k_at = HK * DK + head // (HV // HK) * DK
    key = tl.load(row + k_at + dk[None, :], mask=inside[:, None], other=0.0)
    query = tl.load(row + k_at - HK * DK + dk[None, :], mask=inside[:, None], other=0.0)
    gates = t.to(tl.int64) * token_row + head
    gate = tl.load(a + gates, mask=inside, other=0.0).to(tl.float32)
    gate += tl.load(dt_bias + head).to(tl.float32)
    gate = tl.where(gate > 20.0, gate, tl.log(1.0 + tl.exp(tl.minimum(gate, 20.0))))
    gate = -tl.exp(tl.load(a_log + head).to(tl.float32)) * gate
    total = tl.cumsum(tl.where(inside, gate, 0.0), 0)
    beta = tl.load(b + gates, mask=inside, other=0.0).to(tl.float32)
    beta = tl.where(inside, 1.0 / (1.0 + tl.exp(-beta)), 0.0)

    below = i[:, None] > i[None, :]
    fade = total[:, None] - total[None, :]
    fade = tl.exp(tl.where(i[:, None] >= i[None, :], fade, float('-inf')))
    keys = tl.trans(key)
    at = t[:, None].to(tl.int64) * HV + head
    p = tl.dot(query, keys) * fade
    tl.store(p_out + at * L + i[None, :], p.to(p_out.dtype.element_ty))
    system = tl.where(below, tl.dot(key, keys) * fade * beta[:, None], 0.0)
    # Blocks of 4, 16, 64: with D the inverse of the diagonal blocks of a size and N = D times the
    # blocks below them in the next size, N^4 = 0, so (I + N)^-1 D = (I - N) (I + N^2) D exactly.
    inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    for bits in range(0, 6, 2):
        lower = (i[:, None] >> bits) != (i[None, :] >> bits)
        lower = lower & ((i[:, None] >> (bits + 2)) == (i[None, :] >> (bits + 2)))
        step = tl.dot(inverse, tl.where(lower, system, 0.0))
        square = tl.dot(step, step)
        inverse += tl.dot(square, inverse)
        inverse -= tl.dot(step, inverse)
    solved = inverse.to(key.dtype)
    value = tl.load(row + 2 * HK * DK + head * DV + dv[None, :], mask=inside[:, None], other=0.0)
    u = tl.dot(solved, (value.to(tl.float32) * beta[:, None]).to(key.dtype))
    tl.store(u_out + at * DV + dv[None, :], u.to(u_out.dtype.element_ty))
    strength = beta * tl.exp(total)
    w = tl.dot(solved, (key.to(tl.float32) * strength[:, None]).to(key.dtype))
    tl.store(w_out + at * DK + dk[None, :], w.to(w_out.dtype.element_ty))
    tl.store(sum_out + t * HV + head, total)


@lazy_jit
def chunk_scan(mixed, w, u, p, sums, state, out, length,  # type: ignore[no-untyped-def]
               HV: tl.constexpr, HK: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
               L: tl.constexpr, BV: tl.constexpr):
    """
    Carry BV columns of one head's state over all chunks; grid (DV / BV, HV).

    state float32 [HV, DK, DV] is read and written; out [T, HV, DV], rows from ``length`` on
    unwritten except within the last chunk.
    """
    C: tl.constexpr = 2 * HK * DK + HV * DV
    head = tl.program_id(1)
    i = tl.arange(0, L)
    dk = tl.arange(0, DK)
    dv = tl.program_id(0) * BV + tl.arange(0, BV)
    n = tl.load(length).to(tl.int32)
    place = state + head * DK * DV + dk[:, None] * DV + dv[None, :]
    memory = tl.load(place)
    q_at = head // (HV // HK) * DK
    k_at = HK * DK + q_at
    for first in range(0, n, L):
        t = first + i
        inside = t < n
        at = t.to(tl.int64) * HV + head
        total = tl.load(sums + t * HV + head)
        last = tl.load(sums + (first + L - 1) * HV + head)
        held = memory.to(w.dtype.element_ty)
        change = tl.load(u + at[:, None] * DV + dv[None, :]).to(tl.float32)
        change -= tl.dot(tl.load(w + at[:, None] * DK + dk[None, :]), held)
        query = tl.load(mixed + t[:, None].to(tl.int64) * C + q_at + dk[None, :],
                        mask=inside[:, None], other=0.0)
        y = tl.dot(query, held) * tl.exp(total)[:, None]
        weight = tl.load(p + at[:, None] * L + i[None, :])
        y = tl.dot(weight, change.to(weight.dtype), y)
        tl.store(out + at[:, None] * DV + dv[None, :], y.to(out.dtype.element_ty))
        key = tl.load(mixed + t[None, :].to(tl.int64) * C + k_at + dk[:, None],
                      mask=inside[None, :], other=0.0)
        change = change * tl.exp(last - total)[:, None]
        memory = tl.dot(key, change.to(key.dtype), memory * tl.exp(last))
    tl.store(place, memory)


class DeltaChunk:
    """
    The delta rule over up to ``tokens`` tokens; holds the scratch that layers share.

    Made once per pass, its memory is the caller's pool.
    """

    def __init__(self, tokens: int, value_heads: int, key_heads: int, key_dim: int,
                 value_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        T = -(-tokens // CHUNK) * CHUNK
        self._sizes = (tokens, value_heads, key_heads, key_dim, value_dim)
        C = 2 * key_heads * key_dim + value_heads * value_dim

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self._mixed = empty(tokens, C)
        self._w, self._u = empty(T, value_heads, key_dim), empty(T, value_heads, value_dim)
        self._p = empty(T, value_heads, CHUNK)
        self._sums = torch.empty((T, value_heads), device=device)
        self._out = empty(T, value_heads, value_dim)

    def __call__(self, channels: Tensor, a: Tensor, b: Tensor, conv: Tensor, a_log: Tensor,
                 dt_bias: Tensor, columns: Tensor, state: Tensor, length: Tensor) -> Tensor:
        """
        Take ``length`` (int64 scalar on the device) of T tokens; return out [T, Hv, Dv].

        channels [T, C], a and b [T, Hv] with one row stride, conv [C, 4], columns [3, C] and state
        float32 [Hv, Dk, Dv], both brought forward. Rows of out from ``length`` on hold garbage;
        out is scratch, valid until the next call.
        """
        T, HV, HK, DK, DV = self._sizes
        C = channels.shape[1]
        conv_heads[(C // DK, -(-T // TOKENS))](
            channels, conv, columns, self._mixed, length, channels.stride(0), KEYS=HK, D=DK,
            BT=TOKENS, C=C, EPS=L2_EPS, num_warps=4)
        chunk_solve[(-(-T // CHUNK), HV)](
            self._mixed, a, b, a_log, dt_bias, self._w, self._u, self._p, self._sums, length,
            a.stride(0), HV=HV, HK=HK, DK=DK, DV=DV, L=CHUNK, num_warps=SOLVE_WARPS,
            num_stages=SOLVE_STAGES)
        BV = min(SCAN_COLUMNS, DV)
        chunk_scan[(DV // BV, HV)](
            self._mixed, self._w, self._u, self._p, self._sums, state, self._out, length,
            HV=HV, HK=HK, DK=DK, DV=DV, L=CHUNK, BV=BV, num_warps=SCAN_WARPS,
            num_stages=SCAN_STAGES)
        return self._out[:T]


def fits(value_heads: int, key_heads: int, key_dim: int, value_dim: int) -> bool:
    """Return whether the fixed tiles take these sizes."""
    return (value_heads % key_heads == 0 and key_dim == value_dim
            and key_dim in (16, 32, 64, 128))


def selected(device: torch.device) -> bool:
    """Return whether these kernels agree with the reference; not inside a capture."""
    return triton_selected('delta chunks', device, lambda: all(
        check(device, torch.bfloat16, (T, length), 6, 2, 128, 1e-2)
        for T, length in ((16, 16), (64, 2), (256, 130), (1024, 1000))))


def check(device: torch.device, dtype: torch.dtype, tokens: tuple[int, int], HV: int, HK: int,
          D: int, tolerance: float, alike: bool = False) -> bool:
    """
    Return whether (T, valid) tokens agree with token by token within ``tolerance``.

    ``alike``: all tokens are the same, as in a repeated word; then no key is new to the state and
    the inverse has its largest intermediate terms.
    """
    T, valid = tokens
    C = 2 * HK * D + HV * D
    row = C + 2 * HV
    given = draw(device, dtype, T, row + -row % 16)
    if alike:
        given = given[:1].repeat(T, 1)
    given[valid:] = torch.nan
    channels, a, b = given[:, :row].split([C, HV, HV], dim=1)
    conv = draw(device, dtype, C, 4, seed=1)
    a_log, bias = draw(device, torch.float32, 2, HV, seed=2).unbind(0)
    columns, state = draw(device, dtype, 3, C, seed=3), draw(device, torch.float32, HV, D, D,
                                                             seed=4)
    expected, after = step_reference(
        channels[:valid], a[:valid], b[:valid], conv, a_log, bias, columns, state)
    carried = torch.cat([columns, channels[:valid]])[-3:]
    rule = DeltaChunk(T, HV, HK, D, D, dtype, device)
    length = torch.full((), valid, dtype=torch.int64, device=device)
    out = rule(channels, a, b, conv, a_log, bias, columns, state, length)
    return (close(out[:valid], expected, tolerance) and close(state, after, tolerance)
            and torch.equal(columns, carried))


def _variants() -> tuple[Variant, ...]:
    heads = {'HV': 48, 'HK': 16, 'DK': 128, 'DV': 128, 'L': CHUNK}
    conv = dict.fromkeys('channels conv columns out'.split(), '*bf16') | {
        'length': '*i64', 'token_row': 'i32'}
    solve = dict.fromkeys('mixed a b w_out u_out p_out'.split(), '*bf16') | {
        'a_log': '*fp32', 'dt_bias': '*fp32', 'sum_out': '*fp32', 'length': '*i64',
        'token_row': 'i32'}
    scan = dict.fromkeys('mixed w u p out'.split(), '*bf16') | {
        'sums': '*fp32', 'state': '*fp32', 'length': '*i64'}
    of_conv = {'KEYS': 16, 'D': 128, 'BT': TOKENS, 'C': 10240, 'EPS': L2_EPS}
    of_scan = {**heads, 'BV': SCAN_COLUMNS}
    return (
        Variant(conv_heads, conv | dict.fromkeys(of_conv, 'constexpr'), of_conv),
        Variant(chunk_solve, solve | dict.fromkeys(heads, 'constexpr'), heads,
                num_warps=SOLVE_WARPS, num_stages=SOLVE_STAGES),
        Variant(chunk_scan, scan | dict.fromkeys(of_scan, 'constexpr'), of_scan,
                num_warps=SCAN_WARPS, num_stages=SCAN_STAGES, archs=(87, 90, 110)),
    )


VARIANTS = _variants()
