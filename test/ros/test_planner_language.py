"""Tests of flashrt_ros.planner_language: grammars, the reader, the forms of a request."""

import itertools
from pathlib import Path
import re
from types import SimpleNamespace

from _fake_planner import tokenizer
from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from flashrt_core.errors import ConfigError
from flashrt_core.errors import ParameterInvalid
from flashrt_core.tabletop.instructions import draw_example
from flashrt_core.tabletop.instructions import prompt
from flashrt_ros.planner_language import find_grammar
from flashrt_ros.planner_language import Language
from flashrt_ros.planner_language import Reader
from flashrt_ros.planner_language import TABLETOP


def session(tokens=None, vocab=257) -> SimpleNamespace:
    return SimpleNamespace(tokenizer=tokens or tokenizer(), config=SimpleNamespace(vocab=vocab))


@pytest.mark.parametrize('held_out', [False, True])
def test_every_answer_that_the_small_planner_is_trained_on_is_of_the_grammar(
        held_out: bool) -> None:
    rng = np.random.Generator(np.random.PCG64(3))
    for _ in range(300):
        example = draw_example(rng, held_out)
        assert re.fullmatch(TABLETOP.source.text, example.answer), example.answer
        reader = Reader(TABLETOP)
        found = reader.push(example.answer) + reader.finish()
        assert found == [str(goal) for goal in example.plan]
        assert reader.cannot == (not example.plan)


@given(cuts=st.lists(st.integers(0, 60), max_size=12))
def test_subgoals_come_out_the_same_however_the_text_is_cut(cuts: list[int]) -> None:
    text = 'put the red block in the blue zone; pick up the green block, then go home.'
    places = sorted({0, len(text), *(c for c in cuts if c < len(text))})
    reader, found = Reader(TABLETOP), []
    for begin, end in itertools.pairwise(places):
        found += reader.push(text[begin:end])
    assert found + reader.finish() == text[:-1].replace(', then ', '; ').split('; ')


def test_a_subgoal_comes_out_with_its_separator_and_not_before() -> None:
    reader = Reader(TABLETOP)
    assert reader.push('go home;') == [] and reader.push(' pick up') == ['go home']
    reader = Reader(TABLETOP)
    assert reader.push('go home, the') == [] and reader.push('n pick up') == ['go home']


@pytest.mark.parametrize(('text', 'words'), [
    ('go home; pick up', 'cut short'), ('', 'cut short'), ('jump.', 'no subgoal'),
    ('go home; cannot.', 'no subgoal')])
def test_a_plan_that_is_cut_short_or_of_another_language_is_refused(
        text: str, words: str) -> None:
    with pytest.raises(ParameterInvalid, match=words):
        reader = Reader(TABLETOP)
        reader.push(text)
        reader.finish()


def test_one_subgoal_a_line_needs_no_last_line_end(tmp_path: Path) -> None:
    reader = Reader(find_grammar('none'))
    assert reader.push('look left\nlook') == ['look left'] and reader.finish() == ['look']
    reader = Reader(find_grammar('none'))
    assert reader.push('cannot\nlook left\n') == [] and reader.cannot and not reader.finish()
    path = tmp_path / 'walk.regex'
    path.write_text('((go|stop)\\n)+')
    assert find_grammar(str(path)).source.kind == 'regex'
    for bad in ('moon', str(tmp_path / 'walk.txt'), '', f'~nobody-{"x" * 300}/a.lark'):
        with pytest.raises(ConfigError, match='tabletop, none, or the path'):
            find_grammar(bad)
    path.write_bytes(b'\xff\xfe')
    with pytest.raises(ConfigError, match='cannot be read'):
        find_grammar(str(path))


def test_the_tabletop_form_is_the_one_that_the_small_planner_is_trained_on() -> None:
    language = Language(session(), TABLETOP)
    assert language.form == 'tabletop' and language.context() == []
    example = draw_example(np.random.Generator(np.random.PCG64(1)))
    asked = language.request(example.instruction, str(example.scene), (), '')
    assert bytes(asked).decode() == prompt(example.scene, example.instruction)
    assert language.request('Go home.', '', (), '') == language.request('go home', '', (), '')
    with pytest.raises(ParameterInvalid, match='trained to read'):
        language.check('hold', str(example.scene))
    Language(session(), TABLETOP, form='plain').check('hold', str(example.scene))


def test_the_plain_form_tells_what_is_done_and_what_has_failed() -> None:
    language = Language(session(), TABLETOP, form='plain', system_prompt='Be brief.')
    context = bytes(language.context()).decode()
    assert context.startswith('Be brief.\nYou plan') and 'cannot.' in context
    text = bytes(language.request('tidy up', 'a cup', ['go home'], 'jump')).decode()
    assert text == ('instruction: tidy up\nscene: a cup\ndone: go home\nfailed: jump\nplan:\n')


def test_a_session_without_a_tokenizer_or_with_another_models_is_refused() -> None:
    with pytest.raises(ConfigError, match='no tokenizer'):
        Language(SimpleNamespace(config=SimpleNamespace(vocab=5)), TABLETOP)
    with pytest.raises(ConfigError, match='257'):
        Language(session(vocab=100), TABLETOP)
    with pytest.raises(ConfigError, match='ChatML'):
        Language(session(), TABLETOP, form='chatml')
