"""Sampling: against a plain numpy reference, statistics, ties, cuts, rows that stand alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from flashrt_core.errors import ConfigError
from flashrt_core.errors import ContractError
from flashrt_core.planners import sampling
from flashrt_core.planners.options import GrammarSource
from flashrt_core.planners.options import Options
from flashrt_core.runtime import philox

VOCAB = 70  # no multiple of 32: the last mask word is partly used
GREEDY = Options()


def draw(logits, options=GREEDY, *, position=0, branch=0, counts=None, mask=None, **more):
    """Sample every row of ``logits`` with one request's options."""
    logits = torch.as_tensor(logits, dtype=torch.float32)
    M, vocab = logits.shape
    return sampling.sample(
        logits,
        counts=torch.zeros(vocab, dtype=torch.int32) if counts is None else counts,
        mask=sampling.open_mask(vocab) if mask is None else mask,
        parameters=torch.tensor(options.parameters()),
        seed=torch.tensor(options.signed_seed),
        branch=torch.tensor(branch),
        position=torch.arange(position, position + M),
        **more,
    ).tolist()


def reference(logits, counts, mask, o, branch, position):
    """One row, written from the definitions, in float64 where nothing rounds to a decision."""
    l = np.asarray(logits, np.float32).copy()  # noqa: E741
    vocab = len(l)
    for i in range(vocab):
        if counts[i] > 0:
            l[i] = l[i] / np.float32(o.repetition) if l[i] > 0 else l[i] * np.float32(o.repetition)
            l[i] = l[i] - np.float32(o.frequency) * np.float32(counts[i])
            l[i] = l[i] - np.float32(o.presence)
        if not (int(mask[i // 32]) >> (i % 32)) & 1:
            l[i] = -np.inf
    if o.temperature == 0:
        return int(np.argmax(l))
    order = sorted(range(vocab), key=lambda i: (-l[i], i))
    if o.top_k:
        order = order[: o.top_k]
    weight = {i: math.exp((float(l[i]) - float(l.max())) / o.temperature) for i in order}
    whole, before, kept = sum(weight.values()), 0.0, []
    for i in order:
        if not kept or o.top_p >= 1 or before < o.top_p * whole:
            kept.append(i)
        before += weight[i]
    words = philox.uint32(o.seed, branch, position, vocab, philox.SAMPLER)
    noise = -np.log(-np.log1p(-(words.astype(np.float64)) / 2.0**32))
    return max(kept, key=lambda i: (float(l[i]) / o.temperature + noise[i], -i))


@pytest.mark.parametrize('case', range(12))
def test_every_row_is_what_a_plain_reference_gives(case):
    rng = np.random.default_rng(case)
    M = 6
    logits = (rng.normal(size=(M, VOCAB)) * 3).astype(np.float32)
    counts = torch.from_numpy(rng.integers(0, 3, VOCAB).astype(np.int32))
    mask = torch.from_numpy(rng.integers(-(2**31), 2**31, 3).astype(np.int32))
    o = Options(
        temperature=float(rng.choice([0.0, 0.3, 1.0, 1.7])),
        top_k=int(rng.choice([0, 1, 5, 40])),
        top_p=float(rng.choice([1.0, 0.9, 0.5, 0.05])),
        seed=int(rng.integers(0, 2**63)),
        presence=float(rng.choice([0.0, 0.7])),
        frequency=float(rng.choice([0.0, 0.4])),
        repetition=float(rng.choice([1.0, 1.3])),
    )
    mine = draw(logits, o, position=11, branch=3, counts=counts, mask=mask)
    theirs = [
        reference(logits[m], counts.tolist(), mask.tolist(), o, 3, 11 + m) for m in range(M)
    ]
    assert mine == theirs


def chi_square(options, logits, draws=6000, **more):
    """Return the statistic of draws at consecutive positions, and the expected shares."""
    tokens = np.bincount(
        draw(np.tile(logits, (draws, 1)), options, **more), minlength=len(logits))
    shares = np.exp(np.asarray(logits, np.float64) / options.temperature)
    return tokens, shares / shares.sum()


def test_draws_follow_the_softmax():
    logits = np.linspace(-2, 2, 20, dtype=np.float32)
    for temperature in (0.7, 1.0, 1.8):
        found, shares = chi_square(Options(temperature=temperature, seed=9), logits)
        expected = shares * found.sum()
        statistic = ((found - expected) ** 2 / expected).sum()
        assert statistic < 43.8  # 19 degrees of freedom, p = 0.001


def test_draws_of_equal_tokens_are_uniform_and_branches_differ():
    found, _ = chi_square(Options(temperature=1.0, seed=4), np.zeros(64, np.float32))
    expected = found.sum() / 64
    assert ((found - expected) ** 2 / expected).sum() < 103.4  # 63 degrees, p = 0.001
    flat = np.zeros((200, 64), np.float32)
    one, two = (draw(flat, Options(temperature=1.0, seed=4), branch=b) for b in (0, 1))
    assert sum(a == b for a, b in zip(one, two)) < 15


def test_greedy_takes_the_lowest_id_of_equals():
    logits = np.zeros((3, VOCAB), np.float32)
    logits[1, [69, 33, 40]] = 2.0
    logits[2, 69] = 1.0
    assert draw(logits) == [0, 33, 69]
    assert draw(logits, only_greedy=True) == [0, 33, 69]


def test_top_k_of_one_is_greedy_at_any_temperature():
    logits = np.random.default_rng(0).normal(size=(50, VOCAB)).astype(np.float32)
    logits[7] = 0.0
    assert draw(logits, Options(temperature=5.0, top_k=1, seed=3)) == draw(logits)
    for top_p in (1e-9, 1e-60):  # the second is zero as a float32
        assert draw(logits, Options(temperature=5.0, top_p=top_p, seed=3)) == draw(logits)


def test_top_k_above_the_vocabulary_and_top_p_of_one_keep_everything():
    flat = np.zeros((400, VOCAB), np.float32)
    plain = draw(flat, Options(temperature=1.0))
    assert draw(flat, Options(temperature=1.0, top_k=10 * VOCAB)) == plain
    far = np.full((4000, 2), 0.0, np.float32)
    far[:, 1] = -6.0
    assert 1 in draw(far, Options(temperature=1.0, top_p=1.0))
    assert 1 not in draw(far, Options(temperature=1.0, top_p=0.99))


def test_top_p_keeps_the_fewest_that_reach_it():
    weights = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
    many = np.tile(weights, (600, 1))
    for top_p, kept in ((0.5, {0}), (0.51, {0, 1}), (0.75, {0, 1}), (0.8, {0, 1, 2}),
                        (0.9, {0, 1, 2, 3})):
        assert set(draw(many, Options(temperature=1.0, top_p=top_p))) == kept, top_p


def test_top_p_is_a_share_of_what_top_k_keeps():
    weights = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    many = np.tile(weights, (600, 1))
    # Of {0.4, 0.3} the first holds 57 %: 0.5 is reached by it alone; of all four it is not.
    assert set(draw(many, Options(temperature=1.0, top_p=0.5, top_k=2))) == {0}
    assert set(draw(many, Options(temperature=1.0, top_p=0.5))) == {0, 1}


def test_a_huge_temperature_and_a_tiny_one_stay_finite():
    logits = np.random.default_rng(1).normal(size=(300, VOCAB)).astype(np.float32) * 1e4
    assert draw(logits, Options(temperature=1e-30)) == draw(logits)
    assert len(set(draw(logits / 1e4, Options(temperature=1e4)))) > 40


def test_each_row_is_sampled_as_if_alone():
    rng = np.random.default_rng(5)
    logits = torch.from_numpy((rng.normal(size=(5, 1000)) * 2).astype(np.float32))
    counts = torch.from_numpy(rng.integers(0, 3, (5, 1000)).astype(np.int32))
    o = Options(temperature=0.9, top_k=300, top_p=0.93, repetition=1.2, presence=0.1)
    parameters = torch.tensor(o.parameters()).repeat(5, 1)
    parameters[3, 0] = 0.0  # one greedy branch among the others
    arguments = {
        'counts': counts, 'mask': sampling.open_mask(1000).repeat(5, 1), 'parameters': parameters,
        'seed': torch.tensor([1, 1, 2, 3, -4]), 'branch': torch.tensor([0, 1, 0, 0, 9]),
        'position': torch.tensor([5, 5, 5, 6, 2**40]),
    }
    together = sampling.sample(logits, **arguments)
    for m in range(5):
        alone = {name: value[m : m + 1] for name, value in arguments.items()}
        assert torch.equal(sampling.sample(logits[m : m + 1], **alone), together[m : m + 1])
    assert together[0] != together[1]


def test_the_weights_of_a_row_have_the_bits_of_that_row_alone():
    # 37 is no multiple of a vector: the last elements of the whole are computed apart.
    x = -torch.rand(5, 37, generator=torch.Generator().manual_seed(0)) * 9
    for row in range(5):
        assert torch.equal(sampling._exp(x)[row], sampling._exp(x[row : row + 1])[0])


def test_neutral_penalties_leave_the_bits_of_the_logits():
    logits = torch.randn(3, VOCAB, generator=torch.manual_seed(0))
    counts = torch.full((VOCAB,), 7, dtype=torch.int32)
    same = sampling.penalised(
        logits, counts, sampling.open_mask(VOCAB), torch.tensor(Options().parameters()))
    assert torch.equal(same.view(torch.int32), logits.view(torch.int32))


def test_a_verify_row_counts_the_drafts_before_it():
    counts = torch.zeros(8, dtype=torch.int32)
    counts[2] = 1
    rows = sampling.counts_before(counts, torch.tensor([2, 5, -1, 5], dtype=torch.int32))
    assert rows.shape == (5, 8)
    assert rows[:, 2].tolist() == [1, 2, 2, 2, 2]
    assert rows[:, 5].tolist() == [0, 0, 1, 1, 2]
    assert int(rows.sum()) == 1 + 2 + 3 + 3 + 4
    for row in range(5):
        one_by_one = counts.clone()
        sampling.count_tokens(one_by_one, torch.tensor([2, 5, -1, 5]), torch.tensor(row))
        assert torch.equal(rows[row], one_by_one)


def test_all_masked_and_not_finite_rows_give_no_token_and_are_refused():
    logits = np.zeros((4, VOCAB), np.float32)
    logits[1, 3], logits[2, 3] = np.nan, np.inf
    mask = sampling.open_mask(VOCAB).repeat(4, 1)
    mask[3] = 0
    for o in (Options(), Options(temperature=1.0)):
        tokens = draw(logits, o, mask=mask)
        assert tokens[1:] == [sampling.NOTHING] * 3 and tokens[0] >= 0
        with pytest.raises(ContractError, match='position 21: its logits are not finite'):
            sampling.check_sampled(tokens, 20)
    with pytest.raises(ConfigError, match='grammar none allows none of the 70 tokens'):
        sampling.check_mask(mask[3], VOCAB, 'grammar none')
    sampling.check_mask(mask[0], VOCAB, 'grammar all')
    sampling.check_sampled([0, 1], 20)


def test_bits_of_the_last_mask_word_beyond_the_vocabulary_allow_nothing():
    mask = torch.zeros(3, dtype=torch.int32)
    mask[2] = -(2**31)  # id 95 of a vocabulary of 70
    with pytest.raises(ConfigError):
        sampling.check_mask(mask, VOCAB, 'grammar')
    for known in (0, 1, 31, 32, 33, 69, 70, 500, None):
        mask = sampling.open_mask(VOCAB, known)
        expected = VOCAB if known is None else min(known, VOCAB)
        assert sampling.allowed(mask, VOCAB).tolist() == [i < expected for i in range(VOCAB)]


@pytest.mark.parametrize('name, value', [
    ('counts', torch.zeros(VOCAB)),
    ('counts', torch.zeros(VOCAB + 1, dtype=torch.int32)),
    ('mask', torch.zeros(2, dtype=torch.int32)),
    ('parameters', torch.zeros(5)),
    ('position', torch.zeros(3, dtype=torch.int64)),
    ('logits', torch.zeros(2, VOCAB, dtype=torch.float64)),
    ('logits', torch.zeros(VOCAB)),
])
def test_arguments_that_do_not_fit_are_named(name, value):
    arguments = {
        'logits': torch.zeros(2, VOCAB), 'counts': torch.zeros(VOCAB, dtype=torch.int32),
        'mask': sampling.open_mask(VOCAB), 'parameters': torch.zeros(6),
        'seed': torch.tensor(0), 'branch': torch.tensor(0), 'position': torch.arange(2),
    }
    with pytest.raises(ContractError, match=name):
        sampling.sample(**{**arguments, name: value})


@pytest.mark.parametrize('change', [
    {'temperature': -0.1}, {'temperature': math.nan}, {'temperature': 'hot'}, {'top_k': -1},
    {'top_k': 1.5}, {'top_k': True}, {'top_p': 0.0}, {'top_p': 1.5}, {'seed': 2**64},
    {'repetition': 0.0}, {'frequency': math.inf}, {'max_tokens': 0}, {'stop': 'word'},
    {'stop': ['']}, {'draft_tokens': 17},
])
def test_an_option_out_of_range_is_named(change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        Options(**change)


def test_a_grammar_of_no_kind_or_no_text_is_named():
    with pytest.raises(ConfigError, match="kind 'xml' is unknown"):
        GrammarSource('xml', '<a/>')
    with pytest.raises(ConfigError, match="'plan' is empty"):
        GrammarSource('json', ' ', name='plan')


def test_a_seed_keeps_its_64_bits():
    assert Options(seed=2**64 - 1).signed_seed == -1
    assert Options(seed=-5).signed_seed == -5
    assert Options(temperature=0.5, top_k=1).greedy and not Options(temperature=0.5).greedy


def test_values_changed_on_the_device_change_the_draw_without_new_tensors():
    logits = torch.randn(1, VOCAB, generator=torch.manual_seed(2))
    buffers = {
        'counts': torch.zeros(VOCAB, dtype=torch.int32), 'mask': sampling.open_mask(VOCAB),
        'parameters': torch.tensor(Options(temperature=1.0).parameters()),
        'seed': torch.tensor(0), 'branch': torch.tensor(0), 'position': torch.tensor([0]),
    }
    seen = set()
    for position in range(30):
        buffers['position'].fill_(position)
        seen.add(int(sampling.sample(logits, **buffers)))
    assert len(seen) > 5
    buffers['parameters'][0] = 0.0
    assert int(sampling.sample(logits, **buffers)) == int(logits.argmax())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
def test_a_captured_sampler_follows_its_buffers_and_draws_the_tokens_of_the_cpu():
    device = torch.device('cuda')
    vocab, M = 4099, 3
    rng = np.random.default_rng(8)
    logits = torch.from_numpy((rng.normal(size=(M, vocab)) * 3).astype(np.float32))
    o = Options(temperature=0.8, top_k=200, top_p=0.9, repetition=1.1, presence=0.2)
    host = {
        'counts': torch.from_numpy(rng.integers(0, 2, vocab).astype(np.int32)),
        'mask': sampling.open_mask(vocab, 4000), 'parameters': torch.tensor(o.parameters()),
        'seed': torch.tensor(3), 'branch': torch.tensor(1), 'position': torch.arange(M),
    }
    there = {name: value.to(device) for name, value in host.items()}
    on_device = logits.to(device)
    sampling.sample(on_device, **there)  # first use makes the table
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sampling.sample(on_device, **there)
    for position in range(0, 60, M):
        for buffers in (host, there):
            buffers['position'].copy_(torch.arange(position, position + M))
        graph.replay()
        assert tokens.tolist() == sampling.sample(logits, **host).tolist()
