"""The gated delta rule: by token, by chunk, with padding; its convolution and norm."""
from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from flashrt_core.nn import delta

HV, HK, DK, DV = 4, 2, 16, 24


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(T: int) -> tuple[Tensor, ...]:
    """q, k, v, g, beta and a state, as a layer makes them."""
    q, k, v = delta.split_heads(normal(T, 2 * HK * DK + HV * DV), HK, HV, DK)
    g, beta = delta.gates(normal(T, HV, seed=1), normal(T, HV, seed=2),
                          normal(HV, seed=3), normal(HV, seed=4))
    return q, k, v, g, beta, normal(HV, DK, DV, seed=5)


def one_by_one(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
               state: Tensor) -> tuple[Tensor, Tensor]:
    outs = []
    for t in range(len(q)):
        out, state = delta.delta_token(q[t], k[t], v[t], g[t], beta[t], state)
        outs.append(out)
    return torch.stack(outs), state


@pytest.mark.parametrize('T', [1, 2, 63, 64, 65, 150])
def test_chunks_give_what_tokens_one_by_one_give(T: int) -> None:
    given = inputs(T)
    expected, after = one_by_one(*given)
    found, state = delta.delta_chunks(*given)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, after, rtol=1e-4, atol=1e-5)


def test_a_token_follows_the_formula() -> None:
    q, k, v, g, beta, state = inputs(1)
    h = 3
    S = state[h].double() * g[0, h].double().exp()
    change = (v[0, h].double() - S.t() @ k[0, h].double()) * beta[0, h].double()
    S = S + torch.outer(k[0, h].double(), change)
    out, after = delta.delta_token(q[0], k[0], v[0], g[0], beta[0], state)
    torch.testing.assert_close(after[h].double(), S, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out[h].double(), S.t() @ q[0, h].double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('length', [1, 2, 64, 70, 99])
@pytest.mark.parametrize('garbage', [3.0, float('nan'), float('inf'), 1e30])
def test_padding_changes_no_bit_whatever_it_holds(length: int, garbage: float) -> None:
    given = inputs(100)
    clean = [x.clone() for x in given]
    for x in clean[:5]:
        x[length:] = 0.0
    for x in given[:5]:
        x[length:] = garbage
    number = torch.tensor(length)
    expected, after = delta.delta_chunks(*clean, number)
    found, state = delta.delta_chunks(*given, number)
    assert torch.equal(state, after) and torch.equal(found[:length], expected[:length])
    assert bool(found.isfinite().all())
    short = delta.delta_chunks(*(x[:length] for x in given[:5]), given[5])
    torch.testing.assert_close(state, short[1], rtol=1e-4, atol=1e-5)


def test_equal_cuts_are_bit_equal_and_other_cuts_are_close() -> None:
    given = inputs(128)

    def cut(at: int) -> tuple[Tensor, Tensor]:
        first, state = delta.delta_chunks(*(x[:at] for x in given[:5]), given[5])
        second, state = delta.delta_chunks(*(x[at:] for x in given[:5]), state)
        return torch.cat([first, second]), state

    assert all(torch.equal(a, b) for a, b in zip(cut(64), cut(64)))
    assert torch.equal(cut(64)[0], delta.delta_chunks(*given)[0])  # where its own chunks end
    torch.testing.assert_close(cut(50)[0], cut(64)[0], rtol=1e-4, atol=1e-5)


def test_the_convolution_is_causal_and_a_token_depends_on_four_columns_alone() -> None:
    C, T = 12, 9
    columns, channels, weight = normal(3, C), normal(T, C, seed=1), normal(C, 4, seed=2)
    padded = torch.cat([columns, channels]).t()[None]
    expected = F.silu(F.conv1d(padded, weight[:, None], groups=C))[0].t()
    found = delta.causal_conv(columns, channels, weight)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for t in range(3, T):
        other = channels.clone()
        other[:t - 3], other[t + 1:] = torch.nan, torch.nan
        assert torch.equal(delta.causal_conv(columns, other, weight)[t], found[t])


@pytest.mark.parametrize('count', range(6))
def test_the_columns_carried_are_the_last_three(count: int) -> None:
    columns, channels = normal(3, 5), normal(5, 5, seed=1)
    found = delta.carried_columns(columns, channels, torch.tensor(count))
    assert torch.equal(found, torch.cat([columns, channels[:count]])[-3:])


def test_queries_and_keys_have_unit_length_and_heads_share_keys() -> None:
    q, k, v = delta.split_heads(normal(3, 2 * HK * DK + HV * DV), HK, HV, DK)
    assert q.shape == k.shape == (3, HV, DK) and v.shape == (3, HV, DV)
    torch.testing.assert_close(k.norm(dim=-1), torch.ones(3, HV))
    torch.testing.assert_close(q.norm(dim=-1), torch.full((3, HV), DK**-0.5))
    assert torch.equal(k[:, 0], k[:, 1]) and not torch.equal(k[:, 1], k[:, 2])


def test_the_gated_norm_norms_first_and_gates_after() -> None:
    o, z, weight = normal(2, 5, 8) * 7, normal(2, 5, 8, seed=1), normal(8, seed=2)
    rms = o.double().pow(2).mean(-1, keepdim=True).sqrt()
    expected = o.double() / rms * weight.double() * F.silu(z.double())
    torch.testing.assert_close(delta.gated_norm(o, z, weight, 0.0).double(), expected,
                               rtol=1e-5, atol=1e-6)
