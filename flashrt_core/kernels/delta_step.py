"""A gated delta-rule layer (arXiv 2412.06464) token by token: decode, verify, accept, branches.

One compiled program does all four: how many tokens it takes and whether it writes the state are
data on the device, so what a token's output is does not depend on how it was reached. The state
is read once, kept in registers over the tokens, and written at most once.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flashrt_core.kernels._launch import close
from flashrt_core.kernels._launch import draw
from flashrt_core.kernels._launch import overlaps
from flashrt_core.kernels._triton import lazy_jit
from flashrt_core.kernels._triton import triton_selected
from flashrt_core.kernels._triton import Variant
from flashrt_core.nn import delta
from flashrt_core.nn.delta import L2_EPS
from flashrt_core.nn.delta import TAPS

if TYPE_CHECKING:
    import triton.language as tl

BV = 32           # value columns of a program: 4 programs a head
STEP_WARPS = 4
NORM_HEADS, SHIFT = 4, 1024  # heads and channels of a program


@lazy_jit
def delta_step(channels, a, b, conv, a_log, dt_bias, columns, state, out, count, write,  # type: ignore[no-untyped-def]
               token_row, columns_row, state_row,
               HV: tl.constexpr, HK: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
               BV: tl.constexpr, EPS: tl.constexpr, PDL: tl.constexpr):
    """
    Take ``count`` tokens of one row through one head's state; grid (HV * DV / BV, rows).

    Rows take one token each, or one row takes several. channels [tokens, q | k | v], a and b
    [tokens, HV], token_row elements apart; conv [C, 4]; columns [rows, 3, C] the channels before
    the first token, oldest first; state float32 [rows, HV, DK, DV], written if ``write``; out
    float32 [tokens, HV, DV]. count and write: int64 scalars on the device.
    """
    C: tl.constexpr = 2 * HK * DK + HV * DV
    BLOCKS: tl.constexpr = DV // BV
    head = tl.program_id(0) // BLOCKS
    row = tl.program_id(1)
    d = tl.arange(0, DK)
    v = (tl.program_id(0) % BLOCKS) * BV + tl.arange(0, BV)
    of_q = head // (HV // HK) * DK + d
    of_k = HK * DK + of_q
    of_v = 2 * HK * DK + head * DV + v
    rate = -tl.exp(tl.load(a_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head).to(tl.float32)
    place = state + row.to(tl.int64) * state_row + head * DK * DV + d[:, None] * DV
    if PDL:
        tl.inline_asm_elementwise('griddepcontrol.launch_dependents; // $0', '=r', [],
                                  dtype=tl.int32, is_pure=False, pack=1)
        line = place + tl.program_id(0) % BLOCKS * BV  # BV values: one line of L2
        tl.inline_asm_elementwise('prefetch.global.L2 [$1]; // $0', '=r,l', [line],
                                  dtype=tl.int32, is_pure=False, pack=1)
        tl.inline_asm_elementwise('griddepcontrol.wait; // $0', '=r', [],
                                  dtype=tl.int32, is_pure=False, pack=1)
    place += v[None, :]
    memory = tl.load(place)
    tokens = tl.load(count).to(tl.int32)
    for t in range(0, tokens):
        q = tl.zeros([DK], tl.float32)
        k = tl.zeros([DK], tl.float32)
        x = tl.zeros([BV], tl.float32)
        for tap in tl.static_range(4):
            at = t - 3 + tap
            carried = columns + row.to(tl.int64) * columns_row + (at + 3) * C
            given = channels + (row + at) * token_row
            address = tl.where(at < 0, carried.to(tl.int64), given.to(tl.int64))
            source = tl.multiple_of(address.to(channels.dtype), 16)
            q += tl.load(source + of_q).to(tl.float32) * tl.load(conv + of_q * 4 + tap)
            k += tl.load(source + of_k).to(tl.float32) * tl.load(conv + of_k * 4 + tap)
            x += tl.load(source + of_v).to(tl.float32) * tl.load(conv + of_v * 4 + tap)
        q = (q / (1.0 + tl.exp(-q))).to(channels.dtype.element_ty).to(tl.float32)
        k = (k / (1.0 + tl.exp(-k))).to(channels.dtype.element_ty).to(tl.float32)
        x = (x / (1.0 + tl.exp(-x))).to(channels.dtype.element_ty).to(tl.float32)
        q = q * tl.rsqrt(tl.sum(q * q, 0) + EPS) * DK ** -0.5
        k = k * tl.rsqrt(tl.sum(k * k, 0) + EPS)
        gate = tl.load(a + (row + t) * token_row + head).to(tl.float32) + bias
        soft = tl.where(gate > 20.0, gate, tl.log(1.0 + tl.exp(tl.minimum(gate, 20.0))))
        strength = tl.load(b + (row + t) * token_row + head).to(tl.float32)
        strength = 1.0 / (1.0 + tl.exp(-strength))
        memory = memory * tl.exp(rate * soft)
        change = (x - tl.sum(memory * k[:, None], 0)) * strength
        memory = memory + k[:, None] * change[None, :]
        read = tl.sum(memory * q[:, None], 0)
        tl.store(out + ((row + t) * HV + head) * DV + v, read)
    tl.store(place, memory, mask=tl.load(write) + v[None, :] * 0 != 0)


@lazy_jit
def delta_norm(o, z, weight, out, channels, columns, count, tokens, z_row, token_row,  # type: ignore[no-untyped-def]
               columns_row, eps,
               HV: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, HEADS: tl.constexpr,
               BC: tl.constexpr, NORMS: tl.constexpr, PDL: tl.constexpr):
    """
    Write out = rms_norm(o, weight) * silu(z), and carry the channels on.

    o and out [rows, HV, DV], z the same, z_row elements apart; rows from ``tokens`` (int64
    scalar) on become 0. columns [rows, 3, C] become the last three of themselves and the first
    ``count`` channels. Grid (rows, NORMS programs of HEADS heads each + those of BC channels).
    """
    row = tl.program_id(0)
    part = tl.program_id(1)
    if PDL:
        tl.inline_asm_elementwise('griddepcontrol.launch_dependents; // $0', '=r', [],
                                  dtype=tl.int32, is_pure=False, pack=1)
        tl.inline_asm_elementwise('griddepcontrol.wait; // $0', '=r', [],
                                  dtype=tl.int32, is_pure=False, pack=1)
    if part < NORMS:
        h = part * HEADS + tl.arange(0, HEADS)
        d = tl.arange(0, DV)
        within = h[:, None] * DV + d[None, :]
        taken = (h[:, None] < HV) & (row < tl.load(tokens))
        at = row.to(tl.int64) * HV * DV + within
        value = tl.load(o + at, mask=taken, other=0.0).to(tl.float32)
        gate = tl.load(z + row.to(tl.int64) * z_row + within, mask=taken, other=0.0)
        gate = gate.to(tl.float32)
        value = value * tl.rsqrt(tl.sum(value * value, 1) / DV + eps)[:, None]
        value = value * tl.load(weight + d).to(tl.float32)[None, :]
        value = value * (gate / (1.0 + tl.exp(-gate)))
        tl.store(out + at, value.to(out.dtype.element_ty), mask=h[:, None] < HV)
    else:
        c = (part - NORMS) * BC + tl.arange(0, BC)
        n = tl.load(count).to(tl.int32)
        kept = columns + row.to(tl.int64) * columns_row + c
        given = channels + (row + n) * token_row + c
        inside = c < C
        first = tl.load(kept + n * C, mask=inside & (n < 3), other=0.0)
        second = tl.load(kept + (n + 1) * C, mask=inside & (n < 2), other=0.0)
        third = tl.load(kept + (n + 2) * C, mask=inside & (n < 1), other=0.0)
        first += tl.load(given - 3 * token_row, mask=inside & (n >= 3), other=0.0)
        second += tl.load(given - 2 * token_row, mask=inside & (n >= 2), other=0.0)
        third += tl.load(given - token_row, mask=inside & (n >= 1), other=0.0)
        tl.debug_barrier()  # a thread may store a column that another still reads
        tl.store(kept, first, mask=inside)
        tl.store(kept + C, second, mask=inside)
        tl.store(kept + 2 * C, third, mask=inside)


def step(channels: Tensor, a: Tensor, b: Tensor, conv: Tensor, a_log: Tensor, dt_bias: Tensor,
         columns: Tensor, state: Tensor, out: Tensor, count: Tensor, write: Tensor,
         pdl: bool = False) -> None:
    """
    Launch ``delta_step``: R rows of one token each, or one row of several.

    channels [tokens, C], a and b [tokens, Hv] with one row stride, conv [C, 4], a_log and dt_bias
    [Hv], columns [R, 3, C], state float32 [R, Hv, Dk, Dv], out float32 [tokens, Hv, Dv], count and
    write int64 scalars on the device: tokens of each row taken, and whether the state is written.
    """
    R, HV, DK, DV = state.shape
    HK = (channels.shape[1] - HV * DV) // (2 * DK)
    delta_step[(HV * (DV // min(BV, DV)), R)](
        channels, a, b, conv, a_log, dt_bias, columns, state, out, count, write,
        channels.stride(0), columns.stride(0), state.stride(0), HV=HV, HK=HK, DK=DK, DV=DV,
        BV=min(BV, DV), EPS=L2_EPS, PDL=pdl, num_warps=STEP_WARPS, launch_pdl=pdl)


def norm(o: Tensor, z: Tensor, weight: Tensor, out: Tensor, tokens: Tensor, eps: float,
         channels: Tensor | None = None, columns: Tensor | None = None,
         count: Tensor | None = None, pdl: bool = False, heads: int = NORM_HEADS) -> None:
    """
    Launch ``delta_norm``: o and z [M, Hv, Dv] -> out; with columns [R, 3, C] carry them on too.

    tokens int64 scalar: rows from there on become 0. channels [tokens, C], count as in ``step``.
    ``heads`` are those of one program.
    """
    M, HV, DV = o.shape
    norms = -(-HV // heads)
    shifts, C = 0, SHIFT
    if columns is not None:
        C = columns.shape[2]
        shifts = -(-C // SHIFT)
    moved = o if channels is None else channels
    kept = o if columns is None else columns
    delta_norm[(M, norms + shifts)](
        o, z, weight, out, moved, kept, tokens if count is None else count, tokens, z.stride(0),
        moved.stride(0), kept.stride(0), eps, HV=HV, DV=DV, C=C, HEADS=heads, BC=SHIFT,
        NORMS=norms, PDL=pdl, num_warps=4, launch_pdl=pdl)


def shift(channels: Tensor, columns: Tensor, count: Tensor, pdl: bool = False) -> None:
    """Launch ``delta_norm`` for the columns [R, 3, C] alone, as after ``step``."""
    R, _, C = columns.shape
    delta_norm[(R, -(-C // SHIFT))](
        columns, columns, columns, columns, channels, columns, count, count, 0,
        channels.stride(0), columns.stride(0), 0.0, HV=1, DV=16, C=C, HEADS=1, BC=SHIFT, NORMS=0,
        PDL=pdl, num_warps=4, launch_pdl=pdl)


def fits(value_heads: int, key_heads: int, key_dim: int, value_dim: int, taps: int) -> bool:
    """Return whether the fixed tiles take these sizes."""
    return (taps == TAPS and value_heads % key_heads == 0
            and key_dim in (16, 32, 64, 128) and value_dim in (16, 32, 64, 128))


def step_reference(channels: Tensor, a: Tensor, b: Tensor, conv: Tensor, a_log: Tensor,
                   dt_bias: Tensor, columns: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """
    Take the tokens of one row; return (out [tokens, Hv, Dv], the state after them).

    columns [3, C], state [Hv, Dk, Dv]; everything else as for ``step``.
    """
    HV, DK, _ = state.shape
    HK = (channels.shape[1] - HV * state.shape[2]) // (2 * DK)
    mixed = delta.causal_conv(columns, channels, conv)
    q, k, v = delta.split_heads(mixed, HK, HV, DK)
    g, beta = delta.gates(a, b, a_log, dt_bias)
    out = []
    for t in range(len(channels)):
        read, state = delta.delta_token(q[t], k[t], v[t], g[t], beta[t], state)
        out.append(read)
    return torch.stack(out), state


def selected(device: torch.device) -> bool:
    """Return whether these kernels agree with the reference; not inside a capture."""
    return triton_selected('delta step', device,
                           lambda: check(device, torch.bfloat16, 6, 2, 128, 128, 1e-2))


def check(device: torch.device, dtype: torch.dtype, HV: int, HK: int, DK: int, DV: int,
          tolerance: float) -> bool:
    """
    Return whether all uses agree within ``tolerance`` with float32, and bitwise with each other.

    Five tokens: one by one, at once unwritten, accepted up to each, and as one of two branches.
    """
    pdl, C, T = overlaps(device), 2 * HK * DK + HV * DV, 5
    row = C + HV * DV + 2 * HV
    given = draw(device, dtype, T, row + -row % 16)
    channels, z, a, b = given[:, :row].split([C, HV * DV, HV, HV], dim=1)
    z = z.unflatten(1, (HV, DV))
    conv = draw(device, dtype, C, TAPS, seed=1)
    a_log, bias = draw(device, torch.float32, 2, HV, seed=2).unbind(0)
    columns, state = draw(device, dtype, 1, 3, C, seed=3), draw(device, torch.float32, 1, HV, DK,
                                                                DV, seed=4)
    weight = draw(device, dtype, DV, seed=5)

    def number(value: int) -> Tensor:
        return torch.full((), value, dtype=torch.int64, device=device)

    def run(at: slice, columns: Tensor, state: Tensor, count: int, write: int) -> Tensor:
        out = torch.full((at.stop - at.start, HV, DV), torch.nan, device=device)
        step(channels[at], a[at], b[at], conv, a_log, bias, columns, state, out, number(count),
             number(write), pdl)
        return out

    expected, after = step_reference(channels, a, b, conv, a_log, bias, columns[0], state[0])
    kept = state.clone()
    verified = run(slice(0, T), columns, kept, T, 0)
    agree = [torch.equal(kept, state), close(verified, expected, tolerance)]

    live, live_columns = state.clone(), columns.clone()
    for t in range(T):
        at = slice(t, t + 1)
        out = run(at, live_columns, live, 1, 1)
        y = torch.full((1, HV, DV), torch.nan, device=device, dtype=dtype)
        branch = live.expand(2, -1, -1, -1).clone()  # both rows after this token, one row each
        agree.append(torch.equal(out, verified[at]))
        norm(out, z[at], weight, y, number(1), 1e-6, channels[at], live_columns, number(1), pdl)
        agree.append(close(y, delta.gated_norm(out, z[at].float(), weight, 1e-6), tolerance))
        if t + 1 < T:
            out = torch.full((2, HV, DV), torch.nan, device=device)
            wide = given[t + 1:t + 2].repeat(2, 1)
            gate_a, gate_b = wide[:, C + HV * DV:row].split(HV, dim=1)
            step(wide[:, :C], gate_a, gate_b, conv, a_log, bias, live_columns.repeat(2, 1, 1),
                 branch, out, number(1), number(1), pdl)
            agree += [torch.equal(out[r], verified[t + 1]) for r in (0, 1)]
        accepted, moved = state.clone(), columns.clone()
        run(slice(0, T), moved, accepted, t + 1, 1)
        shift(channels, moved, number(t + 1), pdl)
        agree += [torch.equal(accepted, live), torch.equal(moved, live_columns)]
    return all(agree) and close(live[0], after, tolerance)


def _variants() -> tuple[Variant, ...]:
    found: list[Variant] = []
    types = dict.fromkeys('channels a b conv columns'.split(), '*bf16')
    types |= dict.fromkeys('a_log dt_bias state out'.split(), '*fp32')
    types |= dict.fromkeys('count write'.split(), '*i64')
    types |= dict.fromkeys('token_row columns_row state_row'.split(), 'i32')
    norms = dict.fromkeys('z weight out channels columns'.split(), '*bf16') | {
        'o': '*fp32', 'count': '*i64', 'tokens': '*i64', 'z_row': 'i32', 'token_row': 'i32',
        'columns_row': 'i32', 'eps': 'fp32'}
    boards: tuple[tuple[bool, tuple[int, ...]], ...] = ((False, (87,)), (True, (90, 110, 121)))
    for pdl, archs in boards:
        values = {'HV': 48, 'HK': 16, 'DK': 128, 'DV': 128, 'BV': BV, 'EPS': L2_EPS, 'PDL': pdl}
        found.append(Variant(delta_step, types | dict.fromkeys(values, 'constexpr'), values,
                             num_warps=STEP_WARPS, archs=archs))
        values = {'HV': 48, 'DV': 128, 'C': 10240, 'HEADS': NORM_HEADS, 'BC': SHIFT,
                  'NORMS': 12, 'PDL': pdl}
        found.append(Variant(delta_norm, norms | dict.fromkeys(values, 'constexpr'), values,
                             num_warps=4, archs=archs))
    return tuple(found)


VARIANTS = _variants()
