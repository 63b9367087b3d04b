"""Qwen3.5 in float32 against transformers with the same random weights."""
from __future__ import annotations

from collections.abc import Iterator

from _qwen35 import config
from _qwen35 import fresh
from _qwen35 import mtp_reference
from _qwen35 import reference
from _qwen35 import SHAPES
from _qwen35 import take
from _qwen35 import weights
import pytest
import torch
from torch import Tensor

from flashrt_core.planners.memory import Live
from flashrt_core.planners.qwen3_5 import model

PROMPT = 90
CLOSE = 1e-4


@pytest.fixture(autouse=True)
def plain_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


def prompt(vocab: int, count: int = PROMPT) -> list[int]:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(8)).tolist()


@pytest.mark.parametrize('name', SHAPES)
def test_logits_and_64_greedy_tokens_are_those_of_transformers(name: str) -> None:
    c = config(name)
    w = weights(c)
    theirs, tokens = reference(c, w), prompt(c.vocab)
    b = {**w, **fresh(c, float('nan'))}
    hidden = take(c, b, tokens, [64, PROMPT - 64])
    expected = theirs(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(model.head(c, b, hidden), expected, rtol=0, atol=CLOSE)

    generated = theirs.generate(torch.tensor([tokens]), max_new_tokens=64, do_sample=False,
                                eos_token_id=None, pad_token_id=0)[0, PROMPT:].tolist()
    found, last = [], hidden[-1:]
    for position in range(PROMPT, PROMPT + 64):
        found.append(int(model.head(c, b, last)[0].argmax()))
        at = torch.tensor(position)
        token = torch.tensor(found[-1:], dtype=torch.int32)
        last = model.rows(c, b, token, at[None], Live(c, b, at))
    assert found == generated and len(set(found)) > 8


def test_equal_cuts_are_bit_equal_and_any_other_cut_is_close() -> None:
    c = config()
    w, tokens = weights(c), prompt(config().vocab)

    def run(cuts: list[int], key: int = 64) -> tuple[Tensor, dict[str, Tensor]]:
        state = fresh(c)
        return take(c, {**w, **state}, tokens, cuts, key), state

    whole, state = run([64, 26])
    again, same = run([64, 26])
    assert torch.equal(whole, again) and all(torch.equal(state[n], same[n]) for n in state)
    for cuts in ([26, 64], [1, 2, 3, 60, 24], [16] * 5 + [10], [1] * 90):
        found, other = run(cuts)
        torch.testing.assert_close(found, whole, rtol=0, atol=CLOSE)
        for name in state:
            torch.testing.assert_close(other[name], state[name], rtol=0, atol=CLOSE)


@pytest.mark.parametrize('length', [1, 3, 17, 63])
def test_padding_and_dead_keys_change_no_bit(length: int) -> None:
    c = config()
    w, tokens = weights(c), prompt(config().vocab, length)
    found = []
    for garbage, dead in ((7, 0.0), (511, float('nan')), (-5, 1e30), (2**31 - 1, -1e30)):
        state = fresh(c, dead)
        padded = torch.full((64,), garbage, dtype=torch.int32)
        padded[:length] = torch.tensor(tokens, dtype=torch.int32)
        b = {**w, **state}
        hidden = model.chunk(c, b, padded, torch.tensor(0), torch.tensor(length), 128)
        assert bool(hidden.isfinite().all())
        kv = [state[n][length:] for n in state if n.startswith('kv')]
        assert all(bool((k.isnan() if dead != dead else k == dead).all()) for k in kv)
        found.append([hidden[:length], *(state[n] for n in state if 'kv' not in n),
                      *(state[n][:length] for n in state if n.startswith('kv'))])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize('name', [name for name in SHAPES if config(name).mtp])
def test_the_mtp_head_is_that_of_transformers_for_every_pair_and_chain_of_drafts(
        name: str) -> None:
    c, T, K = config(name), 21, 4
    w = weights(c)
    theirs, mtp = mtp_reference(c, w)
    ids = torch.tensor([prompt(c.vocab, T + 1)])
    hidden = theirs.model(ids[:, :T]).last_hidden_state
    given, after = hidden, ids[:, 1:]  # pairs of the hidden state at p and the token at p + 1
    drafted = []
    for k in range(K):
        at = torch.arange(1, T + 1 + k)  # theirs counts from the token, ours from the hidden state
        states = mtp.forward_layer(0, given, at[None], None, input_ids=after)
        drafted.append(theirs.lm_head(states[0, -1]))
        given = torch.cat([given, states[:, -1:]], 1)
        after = torch.cat([after, drafted[-1].argmax()[None, None]], 1)
    first = mtp.forward_layer(0, hidden, torch.arange(1, T + 1)[None], None, input_ids=ids[:, 1:])

    tokens, b = ids[0, 1:].int(), {**w, **fresh(c, float('nan'))}
    for t in range(T):
        logits, found = model.mtp_draft(c, b, tokens[t], hidden[0, t], torch.tensor(t))
        torch.testing.assert_close(found, first[0, t], rtol=0, atol=CLOSE)
    for k in range(K):
        torch.testing.assert_close(logits, drafted[k], rtol=0, atol=CLOSE)
        logits, found = model.mtp_draft(c, b, logits.argmax().int(), found, torch.tensor(T + k))
    assert len({int(logits.argmax()) for logits in drafted}) > 1
    # Notes are what the drafts stored, without any attention.
    noted = {**w, **fresh(c, float('nan'))}
    model.mtp_note(c, noted, tokens, hidden[0], torch.arange(T), torch.tensor(T - 2))
    assert torch.equal(noted['mtp.kv'][:T - 2], b['mtp.kv'][:T - 2])
    assert bool(noted['mtp.kv'][T - 2:].isnan().all())
