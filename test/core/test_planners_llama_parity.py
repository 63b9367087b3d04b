"""Llama against transformers in float32: logits, greedy tokens, any cut of the prompt."""

from __future__ import annotations

from _llama import save
from _llama import SIZES
from _llama import their_model
import pytest
from safetensors.torch import load_file
from safetensors.torch import save_file
import torch

from flashrt_core.errors import ConfigError
from flashrt_core.planners.bind import bind
from flashrt_core.planners.llama import LLAMA
from flashrt_core.planners.llama import model
from flashrt_core.planners.options import Options

GREEDY = Options()
# Their logits are of the size 10; float32 in another order of additions.
TOLERANCE = 1e-4


@pytest.fixture(params=sorted(SIZES))
def pair(request, backend, tmp_path):
    """A model of transformers and a session of ours with its weights."""
    theirs = their_model(request.param)
    session = bind(LLAMA, backend, {
        'base': save(theirs, tmp_path), 'context': 192, 'prefill_keys': [16, 64], 'ridge': 16,
        'smallest_span': 64, 'draft_tokens': 3, 'branches': 2, 'tail_tokens': 16,
        'cpu_threads': 1})
    yield theirs, session
    session.close()


def prompt(n, seed=0):
    return torch.randint(0, 300, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def their_logits(theirs, tokens):
    with torch.no_grad():
        return theirs(torch.tensor([tokens])).logits[0]


def our_logits(session):
    """Logits of the last token in the state, from its hidden state."""
    b = {buffer.name: buffer.tensor for buffer in session.buffers}
    head = session.lane.call(lambda: model.head(session.config, b, b['hidden']).cpu()).result()
    return head[0]


def test_logits_are_those_of_transformers_after_every_way_to_feed_a_prompt(pair):
    theirs, session = pair
    tokens = prompt(150)
    expected = their_logits(theirs, tokens)
    assert float(expected.abs().max()) > 1.0
    session.prefill(tokens).result()
    torch.testing.assert_close(our_logits(session), expected[-1], atol=TOLERANCE, rtol=0)
    for cuts in ([1, 2, 17, 40], [100], list(range(1, 30))):
        session.reset().result()
        for begin, end in zip([0, *cuts], [*cuts, len(tokens)]):
            session.append(tokens[begin:end]).result()
        torch.testing.assert_close(our_logits(session), expected[-1], atol=TOLERANCE, rtol=0)


def test_greedy_tokens_are_those_of_transformers(pair):
    theirs, session = pair
    tokens = prompt(23, seed=1)
    session.prefill(tokens).result()
    mine = [t for _ in range(40) for t in session.decode(GREEDY).result().tokens]
    theirs_out = theirs.generate(
        torch.tensor([tokens]), max_new_tokens=40, do_sample=False, eos_token_id=None,
        pad_token_id=0)
    assert mine == theirs_out[0, len(tokens):].tolist()


def test_every_decode_step_has_the_logits_of_transformers(pair):
    theirs, session = pair
    tokens = prompt(9, seed=2)
    session.prefill(tokens).result()
    for _ in range(12):
        tokens += session.decode(GREEDY).result().tokens
        # The last token is pending: the state ends one before it.
        expected = their_logits(theirs, tokens[:-1])[-1]
        torch.testing.assert_close(our_logits(session), expected, atol=TOLERANCE, rtol=0)


def test_given_drafts_leave_the_tokens_and_the_bits_of_the_state_as_without(pair):
    _, session = pair
    tokens = prompt(20, seed=3)
    session.prefill(tokens).result()
    plain = [t for _ in range(18) for t in session.decode(GREEDY).result().tokens]
    state = session.buffers['hidden'].tensor.cpu()
    position = session.position
    options = Options(draft_tokens=3)
    for wrong in (None, 0, 1, 2):  # where a draft is made to fail
        session.prefill(tokens).result()
        given = list(session.decode(GREEDY).result().tokens)
        while len(given) < len(plain):
            drafts = plain[len(given) : len(given) + 3]
            if wrong is not None and wrong < len(drafts):
                drafts[wrong] = (drafts[wrong] + 1) % 300
            if not drafts:
                break
            step = session.decode(options, drafts=drafts, limit=len(plain) - len(given))
            given += step.result().tokens
        assert given == plain
        if session.position == position:
            assert torch.equal(session.buffers['hidden'].tensor.cpu(), state)


def test_a_branch_gives_the_tokens_of_a_single_session(pair):
    _, session = pair
    tokens = prompt(31, seed=4)
    drawn = Options(temperature=1.0, seed=5)

    def alone(seed):
        session.prefill(tokens).result()
        options = Options(temperature=1.0, seed=seed)
        return [t for _ in range(8) for t in session.decode(options).result().tokens]

    expected = [alone(5), alone(6)]
    session.prefill(tokens).result()
    branches = session.fork([5, 6])
    steps = [branches.step(drawn).result().tokens for _ in range(8)]
    assert [list(tokens) for tokens in zip(*steps)] == expected
    branches.drop()


@pytest.mark.parametrize('change, what', [
    (lambda s: s.pop('model.norm.weight'), "'norm.weight' is missing"),
    (lambda s: s.update({'model.extra': torch.zeros(2)}), "'model.extra' is not part of"),
    (lambda s: s.update({'model.norm.weight': torch.zeros(3)}), r'has shape \[3\], need \[64\]'),
    (lambda s: s['model.norm.weight'].fill_(float('nan')), 'hold NaN or infinity'),
])
def test_a_checkpoint_that_does_not_fit_is_refused_by_the_name_of_its_key(
    backend, tmp_path, change, what
):
    base = save(their_model('grouped'), tmp_path)
    state = load_file(tmp_path / 'model.safetensors')
    change(state)
    save_file(state, tmp_path / 'model.safetensors')
    with pytest.raises(ConfigError, match=what):
        bind(LLAMA, backend, {'base': base, 'context': 64, 'prefill_keys': [16]})
