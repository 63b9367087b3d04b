"""Grammars: whatever is sampled under the masks satisfies them, and a matcher is its tokens."""

from __future__ import annotations

import json
import random
import re
import sys

import pytest
import torch

from flashrt_core.errors import ConfigError
from flashrt_core.errors import PlannerError
from flashrt_core.planners import grammar as module
from flashrt_core.planners.grammar import Grammar
from flashrt_core.planners.options import GrammarSource
from flashrt_core.planners.sampling import allowed
from flashrt_core.planners.sampling import sample
from flashrt_core.planners.text import ByteTokenizer

END = 256
VOCAB = 300  # the model's rows; the tokenizer knows 263 of them
WORDS = ('pick', 'place', ' the', ' red', 'block', '": "')

SCHEMA = json.dumps({
    'type': 'object', 'additionalProperties': False, 'required': ['verb', 'count'],
    'properties': {'verb': {'enum': ['pick', 'place']}, 'count': {'type': 'integer', 'minimum': 0,
                                                                 'maximum': 99}},
})
LARK = 'start: "go " direction (", " direction)*\ndirection: "left" | "right"'


@pytest.fixture(scope='module')
def tokenizer():
    pieces = [bytes([i]) for i in range(256)] + [b'<|end|>'] + [w.encode() for w in WORDS]
    parts = re.compile('|'.join(map(re.escape, WORDS)) + '|.', re.DOTALL)

    def encode(text):
        found = parts.findall(text)
        return [t for part in found for t in (
            [END + 1 + WORDS.index(part)] if part in WORDS else part.encode())]

    return ByteTokenizer('bytes', encode, pieces, {'<|end|>': END}, [END], [END])


def write(matcher, tokenizer, seed, limit=60):
    """Follow random allowed tokens to an end; return the text, None if the limit came first."""
    rng, tokens = random.Random(seed), []
    while len(tokens) < limit:
        ids = allowed(matcher.mask(), VOCAB).nonzero()[:, 0].tolist()
        tokens.append(rng.choice(ids))
        matcher.accept(tokens[-1])
        if tokens[-1] == END:
            return tokenizer.decode(tokens)
    return None


def holds_json(text):
    record = json.loads(text)
    return record.keys() == {'verb', 'count'} and record['verb'] in ('pick', 'place') and (
        0 <= record['count'] <= 99)


@pytest.mark.parametrize('kind, text, holds', [
    ('regex', '(pick|place) the [a-z]{1,5}', re.compile('(pick|place) the [a-z]{1,5}').fullmatch),
    ('lark', LARK, re.compile('go (left|right)(, (left|right))*').fullmatch),
    ('json', SCHEMA, holds_json),
])
def test_every_text_written_under_the_masks_satisfies_the_grammar(tokenizer, kind, text, holds):
    grammar = Grammar(GrammarSource(kind, text), tokenizer, VOCAB)
    written = [write(grammar.matcher(), tokenizer, seed) for seed in range(25)]
    finished = [text for text in written if text is not None]
    assert len(finished) > 15 and len(set(finished)) > 5
    assert all(holds(text) for text in finished)


def test_ids_beyond_the_tokenizer_are_never_allowed(tokenizer):
    grammar = Grammar(GrammarSource('regex', r'(.|\n)*'), tokenizer, VOCAB)
    bits = allowed(grammar.matcher().mask(), VOCAB)
    assert bits[ord('x')] and bits[END] and not bits[tokenizer.vocab :].any()


def test_an_end_is_allowed_only_where_the_text_may_end_and_alone_where_it_must(tokenizer):
    matcher = Grammar(GrammarSource('regex', 'ab?'), tokenizer, VOCAB).matcher()
    assert not matcher.may_end and not allowed(matcher.mask(), VOCAB)[END]
    matcher.accept(ord('a'))
    assert matcher.may_end and not matcher.must_end
    assert set(allowed(matcher.mask(), VOCAB).nonzero()[:, 0].tolist()) == {ord('b'), END}
    matcher.accept(ord('b'))
    assert matcher.must_end
    assert allowed(matcher.mask(), VOCAB).nonzero()[:, 0].tolist() == [END]
    matcher.accept(END)
    with pytest.raises(PlannerError, match='allows no token at position 3: its text has ended'):
        matcher.mask()
    with pytest.raises(PlannerError, match='does not allow token 256'):
        matcher.accept(END)
    matcher.rewind(1)
    assert set(allowed(matcher.mask(), VOCAB).nonzero()[:, 0].tolist()) == {ord('b'), END}


def test_a_matcher_is_its_tokens(tokenizer):
    grammar = Grammar(GrammarSource('json', SCHEMA), tokenizer, VOCAB)
    text = '{"verb":"place","count":7'
    matcher, masks = grammar.matcher(start=40), []
    for token in text.encode():
        masks.append(matcher.mask())
        matcher.accept(token)
    assert matcher.position == 40 + len(text)
    for count in (len(text), 13, 1, 0):
        anew = grammar.matcher(list(text.encode())[:count], start=40)
        matcher.rewind(count)
        assert matcher.tokens == anew.tokens and matcher.position == anew.position == 40 + count
        assert torch.equal(matcher.mask(), anew.mask())
        if count < len(text):
            assert torch.equal(matcher.mask(), masks[count])
    with pytest.raises(PlannerError, match='followed 0 tokens and cannot return to 3'):
        matcher.rewind(3)


def test_one_token_of_several_letters_is_allowed_where_its_letters_are(tokenizer):
    matcher = Grammar(GrammarSource('regex', 'pick the red'), tokenizer, VOCAB).matcher()
    first = allowed(matcher.mask(), VOCAB)
    pick, the = 257, 259
    assert first[pick] and not first[the]
    matcher.accept(pick)
    assert allowed(matcher.mask(), VOCAB)[the]


def test_a_token_against_the_grammar_is_refused_and_leaves_the_matcher_as_it_was(tokenizer):
    matcher = Grammar(GrammarSource('regex', 'ab', name='ab'), tokenizer, VOCAB).matcher(start=9)
    matcher.accept(ord('a'))
    before = matcher.mask()
    for token in (ord('x'), END, -1, VOCAB - 1):
        with pytest.raises(PlannerError, match=f"'ab' does not allow token {token} .*position 10"):
            matcher.accept(token)
    assert torch.equal(matcher.mask(), before) and matcher.tokens == [ord('a')]
    matcher.accept(ord('b'))


def test_a_restored_history_that_the_grammar_does_not_allow_is_refused(tokenizer):
    grammar = Grammar(GrammarSource('regex', 'ab'), tokenizer, VOCAB)
    with pytest.raises(PlannerError, match='does not allow token 120'):
        grammar.matcher([ord('a'), ord('x')])


@pytest.mark.parametrize('kind, text, what', [
    ('json', '{', 'is no JSON schema'),
    ('json', '{"type": "foo"}', 'Invalid type: foo'),
    ('json', '{"not": {}}', 'not'),
    ('regex', '(((', "'test' is no regular expression .*column 8"),
    ('lark', 'start: "go', "'test' is no Lark grammar .*line 1, column 11"),
    ('lark', 'other: "go"', 'no Lark grammar'),
])
def test_a_faulty_grammar_is_refused_with_what_is_wrong_and_where(tokenizer, kind, text, what):
    with pytest.raises(ConfigError, match=what):
        Grammar(GrammarSource(kind, text, name='test'), tokenizer, VOCAB)


def test_a_grammar_that_the_vocabulary_cannot_spell_is_refused_at_its_position():
    pieces = [b'a', b'<|end|>']
    tokenizer = ByteTokenizer('a', lambda t: [0] * t.count('a'), pieces, {'<|end|>': 1}, [1], [1])
    matcher = Grammar(GrammarSource('regex', 'ab', name='ab'), tokenizer, 2).matcher(start=5)
    matcher.accept(0)
    with pytest.raises(PlannerError, match=r"'ab' allows no token at position 6: no token"):
        matcher.mask()


def test_a_mask_of_another_shape_is_named(tokenizer):
    matcher = Grammar(GrammarSource('regex', 'a'), tokenizer, VOCAB).matcher()
    for mask in (torch.zeros(3, dtype=torch.int32), torch.zeros(10)):
        with pytest.raises(PlannerError, match=r'give int32 \[10\] for the 300 tokens'):
            matcher.fill(mask)


def test_a_tokenizer_without_an_end_is_refused():
    tokenizer = ByteTokenizer('endless', lambda t: [0], [b'a'], {}, [], [])
    with pytest.raises(ConfigError, match='endless has no token that ends a text'):
        Grammar(GrammarSource('regex', 'a'), tokenizer, 1)


def test_a_missing_package_is_named_with_the_line_that_installs_it(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, 'llguidance', None)
    with pytest.raises(ConfigError, match=r'a grammar needs .*pip install llguidance'):
        Grammar(GrammarSource('regex', 'a'), tokenizer, VOCAB)
    assert module._tokens.cache_info().maxsize == 4


def test_a_sampler_under_a_grammar_spells_it_whatever_the_logits_say(tokenizer):
    grammar = Grammar(GrammarSource('regex', '[0-9]{3}(, [0-9]{3}){2}'), tokenizer, VOCAB)
    generator = torch.Generator().manual_seed(1)
    for temperature in (0.0, 1.0):
        matcher, tokens = grammar.matcher(), []
        while END not in tokens:
            token = sample(
                torch.randn(1, VOCAB, generator=generator) * 20,
                counts=torch.zeros(VOCAB, dtype=torch.int32), mask=matcher.mask(),
                parameters=torch.tensor([temperature, 0.0, 1.0, 0.0, 0.0, 1.0]),
                seed=torch.tensor(0), branch=torch.tensor(0),
                position=torch.tensor([len(tokens)]))
            tokens.append(int(token))
            matcher.accept(tokens[-1])
        assert re.fullmatch('[0-9]{3}(, [0-9]{3}){2}', tokenizer.decode(tokens))
