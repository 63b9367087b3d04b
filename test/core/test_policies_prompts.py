"""Prompts in a family's form, the state as text, SentencePiece files: ids, named refusals."""
from __future__ import annotations

import builtins
import io
from pathlib import Path

import numpy as np
import pytest

from flashrt_core.errors import ConfigError
from flashrt_core.policies import make_tokenizer
from flashrt_core.policies.normalise import affine
from flashrt_core.policies.normalise import Statistics
from flashrt_core.policies.prompts import make_prompts
from flashrt_core.policies.prompts import Prompts
from flashrt_core.policies.prompts import StateText
from flashrt_core.policies.text import Tokenizer

VOCAB = 400
SCALE = affine(Statistics(state_q01=(-1.0,) * 3, state_q99=(1.0,) * 3), 'state', 'quantiles', 3)


def trained(**changes: object) -> bytes:
    """Train a small SentencePiece model with the settings of Gemma's."""
    sentencepiece = pytest.importorskip('sentencepiece')
    written = io.BytesIO()
    texts = ['pick up the red block', 'put the block in the zone', 'Task: go home, State: 1 2;',
             'Action: 12 255', 'State: 7 99 100;', 'stack the blue block on the green one.'] * 20
    sentencepiece.SentencePieceTrainer.train(**{
        'sentence_iterator': iter(texts), 'model_writer': written, 'vocab_size': VOCAB,
        'model_type': 'bpe', 'byte_fallback': True, 'split_digits': True,
        'add_dummy_prefix': False, 'remove_extra_whitespaces': False,
        'normalization_rule_name': 'identity', 'user_defined_symbols': ['\n'], 'pad_id': 0,
        'eos_id': 1, 'bos_id': 2, 'unk_id': 3, 'hard_vocab_limit': False,
        'minloglevel': 2, **changes})
    return written.getvalue()


@pytest.fixture(scope='module')
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp('spm') / 'tokenizer.model'
    path.write_bytes(trained())
    return path


@pytest.fixture(params=['words', 'sentencepiece'])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == 'words':
        return make_tokenizer('words')
    return make_tokenizer(str(request.getfixturevalue('model')))


# -- prompts ------------------------------------------------------------------------------------


def test_pi0_ends_a_prompt_with_a_line_end_and_begins_it_with_bos(model):
    prompts = make_prompts(str(model), 'pi0', make_tokenizer(str(model)).vocab, True)
    plain = make_tokenizer(str(model))
    tokens = prompts.encode('pick up the red block', 48)
    assert tokens == [2, *plain.encode('pick up the red block', 48), *plain.encode('\n', 1)]


def test_pi05_puts_the_task_between_its_words(tokenizer):
    prompts = Prompts(tokenizer, 'pi05')
    expected = [*tokenizer.begin, *tokenizer.encode('Task: pick up, State:', 60)]
    assert prompts.encode('pick up', 60) == expected


@pytest.mark.parametrize('family', ['pi0', 'pi05'])
def test_underscores_and_line_ends_become_spaces_as_in_training(tokenizer, family):
    prompts = Prompts(tokenizer, family)
    assert prompts.encode(' pick_up\nthe block ', 60) == prompts.encode('pick up the block', 60)


@pytest.mark.parametrize('family', ['pi0', 'pi05'])
def test_decoding_gives_the_prompt_without_its_form(tokenizer, family):
    prompts = Prompts(tokenizer, family)
    assert prompts.decode(prompts.encode('stack the red block.', 60)) == 'stack the red block.'


def test_a_prompt_too_long_with_its_form_is_refused(tokenizer):
    prompts = Prompts(tokenizer, 'pi05')
    tokens = prompts.encode('pick up the red block', 60)
    assert prompts.encode('pick up the red block', len(tokens)) == tokens
    with pytest.raises(ConfigError, match=r'tokens; give at most'):
        prompts.encode('pick up the red block', len(tokens) - 1)


def test_the_tabletops_words_are_pi0s_whole_prompts():
    prompts = make_prompts('words', 'pi0', 512, True)
    assert prompts.encode('put the red block', 24) == [259, 260, 290, 261]
    assert make_prompts('', 'pi0', 512, True) is None


def test_a_tokenizer_of_another_vocabulary_is_refused(model):
    own = make_tokenizer(str(model)).vocab
    for name, vocab, trained_weights in (
        (str(model), own + 1, True), (str(model), own - 1, False), ('words', 100, False),
        ('words', 257152, True)):
        with pytest.raises(ConfigError, match=f'tokens, the model {vocab}; give the tokenizer'):
            make_prompts(name, 'pi05', vocab, trained_weights)
    assert make_prompts('words', 'pi05', 257152, False) is not None  # random weights


# -- the state ----------------------------------------------------------------------------------


def test_the_state_reads_as_if_the_whole_text_had_been_tokenised(tokenizer):
    text = StateText(tokenizer, SCALE, 3, 40)
    head = 'Task: Pick up the red block., State:'
    for state, said in (((-1.0, 0.0, 1.0), ' 0 128 255'), ((-7.0, 7.0, -0.5), ' -1 255 64')):
        whole = f'{head}{said};\nAction: '
        tokens = text.tokens(np.float32(state))
        assert tokenizer.encode(head, 99) + tokens == tokenizer.encode(whole, 99)


def test_a_state_that_may_not_fit_is_refused_with_what_it_needs(tokenizer):
    with pytest.raises(ConfigError, match=r'a state of 3 joints takes up to (\d+)') as refusal:
        StateText(tokenizer, SCALE, 3, 10)
    needed = int(str(refusal.value).rsplit(' ', 1)[1])
    text = StateText(tokenizer, SCALE, 3, needed)
    longest = max(len(text.tokens(np.float32([v] * 3))) for v in np.linspace(-2, 2, 600))
    assert longest == needed


def test_a_tokenizer_that_joins_text_across_the_states_beginning_is_refused(tmp_path):
    path = tmp_path / 'other.model'
    path.write_bytes(trained(add_dummy_prefix=True))
    with pytest.raises(ConfigError, match='across spaces'):
        StateText(make_tokenizer(str(path)), SCALE, 3, 60)


# -- SentencePiece files ------------------------------------------------------------------------


def test_a_sentencepiece_file_comes_back_as_text_and_tells_its_content(model, tmp_path):
    tokenizer = make_tokenizer(str(model))
    for text in ('pick up the red block', 'Würfel 3', '', '  two  spaces', 'a\nb'):
        assert tokenizer.decode(tokenizer.encode(text, 99)) == text
    copy = tmp_path / 'copy.model'
    copy.write_bytes(model.read_bytes())
    assert make_tokenizer(str(copy)).identity == tokenizer.identity
    copy.write_bytes(trained(vocab_size=VOCAB - 10))
    assert make_tokenizer(str(copy)).identity != tokenizer.identity


def test_a_text_that_utf8_has_no_bytes_for_is_refused(tokenizer):
    with pytest.raises(ConfigError, match=r'ud800. cannot be encoded'):
        tokenizer.encode('go \ud800', 99)


def test_a_text_or_token_that_does_not_fit_is_refused(model):
    tokenizer = make_tokenizer(str(model))
    with pytest.raises(ConfigError, match='at most 2'):
        tokenizer.encode('pick up the red block', 2)
    for token in (-1, tokenizer.vocab):
        with pytest.raises(ConfigError, match='outside the vocabulary'):
            tokenizer.decode([token])


def test_files_that_are_no_tokenizer_are_refused(tmp_path):
    pytest.importorskip('sentencepiece')
    bad = tmp_path / 'bad.model'
    bad.write_bytes(b'not a model')
    for path, message in ((bad, 'not a SentencePiece model'), (tmp_path / 'none.model', 'read'),
                          (tmp_path, 'unknown'), ('a\0.model', 'cannot be read')):
        with pytest.raises(ConfigError, match=message):
            make_tokenizer(str(path))
    bad.write_bytes(b'version https://git-lfs.github.com/spec/v1\n')
    with pytest.raises(ConfigError, match=r'not a SentencePiece model.*git lfs pull'):
        make_tokenizer(str(bad))
    bad.write_bytes(b'')
    with pytest.raises(ConfigError, match='not a SentencePiece model'):
        make_tokenizer(str(bad))


def test_a_missing_sentencepiece_is_named_with_how_to_install_it(monkeypatch):
    real = builtins.__import__

    def without(name: str, *args: object, **kwargs: object) -> object:
        if name == 'sentencepiece':
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, '__import__', without)
    with pytest.raises(ConfigError, match='pip install sentencepiece'):
        make_tokenizer('tokenizer.model')
