"""The tabletop's tokenizer: stable ids, exact round trips, named refusals."""
from __future__ import annotations

from hypothesis import given
from hypothesis import strategies
import pytest

from flashrt_core.errors import ConfigError
from flashrt_core.policies import make_tokenizer
from flashrt_core.policies.pi0.config import TINY
from flashrt_core.policies.text import WORDS

COMMAND = 'put the red block in the blue zone'


def test_a_command_has_one_id_a_word_and_the_ids_never_change():
    tokens = make_tokenizer('words').encode(COMMAND, 24)
    assert tokens == [259, 260, 290, 261, 262, 260, 294, 263]


def test_the_vocabulary_fits_the_tiny_model_and_names_no_word_twice():
    assert make_tokenizer(TINY.tokenizer).vocab <= TINY.vocab
    assert len(set(WORDS)) == len(WORDS)


@pytest.mark.parametrize('text', [
    COMMAND, '', 'pick up the Red block!', 'go home, then stop', 'put  two  spaces', ' led ',
    'Würfel 3', 'putthe block', 'the\nblock'])
def test_decoding_gives_the_text_back(text):
    tokenizer = make_tokenizer('words')
    assert tokenizer.decode(tokenizer.encode(text, 100)) == text


@given(strategies.lists(strategies.sampled_from([*WORDS, ' ', 'x', 'é', ', ', 'A']), max_size=8))
def test_any_mix_of_words_and_bytes_comes_back(parts):
    text = ''.join(parts)
    tokenizer = make_tokenizer('words')
    tokens = tokenizer.encode(text, 1000)
    assert tokenizer.decode(tokens) == text
    assert all(0 < token < tokenizer.vocab for token in tokens)


def test_padding_and_end_decode_to_nothing():
    tokenizer = make_tokenizer('words')
    assert tokenizer.decode([259, 0, 0]) == 'put'
    assert tokenizer.decode([259, 1]) == 'put'


def test_a_text_too_long_is_refused_with_its_length():
    with pytest.raises(ConfigError, match=r'8 tokens.*at most 7'):
        make_tokenizer('words').encode(COMMAND, 7)


def test_an_unknown_tokenizer_or_id_is_named():
    with pytest.raises(ConfigError, match="'spm'"):
        make_tokenizer('spm')
    with pytest.raises(ConfigError, match='9999'):
        make_tokenizer('words').decode([9999])
