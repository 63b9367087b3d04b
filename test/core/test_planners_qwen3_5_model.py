"""Qwen3.5's chunks and notes: what they read, what they write, what never reaches a token."""
from __future__ import annotations

from collections.abc import Iterator

from _qwen35 import config
from _qwen35 import fresh
from _qwen35 import SHAPES
from _qwen35 import take
from _qwen35 import weights
import pytest
import torch
from torch import Tensor

from flashrt_core.planners.memory import Live
from flashrt_core.planners.qwen3_5 import model
from flashrt_core.planners.qwen3_5 import Qwen35Config
from flashrt_core.runtime import Kind
from flashrt_core.runtime import Role

BEFORE, KEY = 37, 16
CLOSE = 1e-4
NAN = float('nan')


@pytest.fixture(autouse=True)
def plain_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


def tokens_of(c: Qwen35Config, count: int, seed: int = 1) -> Tensor:
    return torch.randint(0, c.vocab, (count,), dtype=torch.int32,
                         generator=torch.Generator().manual_seed(seed))


def started(c: Qwen35Config, dead: float = NAN) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Give all tensors, and those of the state, after BEFORE tokens; dead KV holds ``dead``."""
    state = fresh(c, dead)
    b = {**weights(c), **state}
    take(c, b, tokens_of(c, BEFORE, 9).tolist(), [BEFORE])
    return b, state


def held(x: Tensor, value: float) -> bool:
    """Whether every element is ``value``, NaN included."""
    return bool((x.isnan() if value != value else x == value).all())


@pytest.mark.parametrize('length', [1, 2, 3, 11, KEY])
@pytest.mark.parametrize('name', SHAPES)
def test_a_chunk_writes_its_own_keys_and_values_and_no_others(name: str, length: int) -> None:
    c = config(name)
    b, state = started(c)
    old = {n: t.clone() for n, t in state.items()}
    model.chunk(c, b, tokens_of(c, KEY), torch.tensor(BEFORE), torch.tensor(length), 64)
    for n, now in state.items():
        if n == 'mtp.kv':
            assert held(now, NAN)
        elif n.startswith('kv.'):
            assert torch.equal(now[:BEFORE], old[n][:BEFORE])
            assert bool(now[BEFORE:BEFORE + length].isfinite().all())
            assert held(now[BEFORE + length:], NAN)
        else:
            assert not torch.equal(now, old[n])


@pytest.mark.parametrize('length', [1, 2, 3, 11])
def test_neither_padding_nor_dead_keys_reach_a_chunk_in_the_middle(length: int) -> None:
    c = config()
    found = []
    for dead, garbage in ((0.0, 0), (NAN, -7), (float('inf'), 2**31 - 1), (-1e30, 511)):
        b, state = started(c, dead)
        given = tokens_of(c, KEY)
        given[length:] = garbage
        hidden = model.chunk(c, b, given, torch.tensor(BEFORE), torch.tensor(length), 64)
        assert bool(hidden.isfinite().all())  # a row of padding is passed on, masked later
        end = BEFORE + length
        found.append([hidden[:length], *(t[:end] if n.startswith('kv.') else t
                                         for n, t in state.items() if n != 'mtp.kv')])
    for other in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], other, strict=True))


@pytest.mark.parametrize('name', SHAPES)
def test_a_shorter_span_gives_the_same_and_leaves_the_rest_alone(name: str) -> None:
    c = config(name)
    results = []
    for span in (BEFORE + KEY, 64, c.context):
        b, state = started(c)
        at, length = torch.tensor(BEFORE), torch.tensor(KEY)
        hidden = model.chunk(c, b, tokens_of(c, KEY), at, length, span)
        assert all(held(t[BEFORE + KEY:], NAN) for n, t in state.items() if n.startswith('kv.'))
        results.append(hidden)
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=CLOSE)


@pytest.mark.parametrize('changed', [0, 1, 5, 14, 15])
def test_a_token_depends_on_those_before_it_and_on_none_after(changed: int) -> None:
    c = config()
    given = tokens_of(c, KEY)
    other = given.clone()
    other[changed] = (other[changed] + 1) % c.vocab
    one, two = (model.chunk(c, started(c)[0], t, torch.tensor(BEFORE), torch.tensor(KEY), 64)
                for t in (given, other))
    assert torch.equal(one[:changed], two[:changed])
    assert all(not torch.equal(one[t], two[t]) for t in range(changed, KEY))


def test_short_chunks_carry_the_columns_of_the_tokens_before() -> None:
    """One or two tokens are fewer than the convolution remembers."""
    c = config()
    given = tokens_of(c, 6)
    b, whole = started(c)
    model.chunk(c, b, given, torch.tensor(BEFORE), torch.tensor(6), 64)
    b, parts = started(c)
    at = 0
    for length in (1, 2, 1, 2):
        padded = torch.full((KEY,), 3, dtype=torch.int32)
        padded[:length] = given[at:at + length]
        model.chunk(c, b, padded, torch.tensor(BEFORE + at), torch.tensor(length), 64)
        at += length
    for n in whole:
        if n.startswith(('conv', 'recurrent')):
            torch.testing.assert_close(parts[n], whole[n], rtol=0, atol=CLOSE)


def test_every_part_of_the_state_matters_to_the_next_token() -> None:
    c = config()
    at, token = torch.tensor(BEFORE), tokens_of(c, 1)
    b, _ = started(c)
    expected = model.rows(c, b, token, at[None], Live(c, b, at))
    for spec in model.state_specs(c):
        if spec.name == 'mtp.kv':  # of the drafts alone
            continue
        b, state = started(c)
        part = state[spec.name][:BEFORE] if spec.kind is Kind.KV else state[spec.name]
        part.zero_()
        found = model.rows(c, b, token, at[None], Live(c, b, at))
        assert not found.allclose(expected, rtol=0, atol=CLOSE), spec.name


@pytest.mark.parametrize('count', [0, 1, 3, 5])
def test_notes_write_the_counted_pairs_alone(count: int) -> None:
    c = config()
    b = {**weights(c), **fresh(c, NAN)}
    hidden = torch.randn(5, c.width, generator=torch.Generator().manual_seed(1))
    hidden[count:] = NAN
    positions = torch.arange(5) + 20
    model.mtp_note(c, b, tokens_of(c, 5), hidden, positions, torch.tensor(count))
    kv = b['mtp.kv']
    assert bool(kv[20:20 + count].isfinite().all())
    assert held(kv[:20], NAN) and held(kv[20 + count:], NAN)
    alone = {**weights(c), **fresh(c, NAN)}
    for t in range(count):
        model.mtp_note(c, alone, tokens_of(c, 5)[t:t + 1], hidden[t:t + 1], positions[t:t + 1],
                       torch.tensor(1))
    assert torch.equal(alone['mtp.kv'][20:20 + count], kv[20:20 + count])


def test_a_draft_looks_at_the_pairs_up_to_its_own_and_at_no_others() -> None:
    c = config()
    hidden = torch.randn(30, c.width, generator=torch.Generator().manual_seed(1))
    found = []
    for dead in (0.0, NAN, 1e30):
        b = {**weights(c), **fresh(c, dead)}
        model.mtp_note(c, b, tokens_of(c, 20), hidden[:20], torch.arange(20), torch.tensor(20))
        found.append(model.mtp_draft(c, b, tokens_of(c, 1)[0], hidden[20], torch.tensor(20)))
        assert held(b['mtp.kv'][21:], dead)
    for logits, state in found[1:]:
        assert torch.equal(logits, found[0][0]) and torch.equal(state, found[0][1])


@pytest.mark.parametrize('name', SHAPES)
def test_the_state_is_declared_with_kinds_and_the_recurrence_in_float32(name: str) -> None:
    c = config(name, dtype='bfloat16')
    specs = {spec.name: spec for spec in model.state_specs(c)}
    kinds = {'kv': Kind.KV, 'mtp': Kind.KV, 'recurrent': Kind.RECURRENT, 'conv': Kind.CONV}
    for n, spec in specs.items():
        assert spec.role is Role.STATE and spec.rows and spec.kind is kinds[n.split('.')[0]]
        recurrent = spec.kind is Kind.RECURRENT
        assert spec.dtype == (torch.float32 if recurrent else torch.bfloat16)
    for i in range(c.layers):
        assert (f'kv.{i}' in specs) == c.is_full(i)
        assert (f'recurrent.{i}' in specs) == (f'conv.{i}' in specs) == (not c.is_full(i))
    assert ('mtp.kv' in specs) == c.mtp
