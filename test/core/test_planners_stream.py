"""A stream gives out tokens as they are asked for; the state never runs ahead of them."""
from __future__ import annotations

import re
import threading

from _planner import bound
from _planner import DRAWN
from _planner import END
from _planner import GREEDY
from _planner import letters
from _planner import MIB
from _planner import PROMPT
from _planner import restore
from _planner import run
from _planner import run_under
from _planner import shared
from _planner import snapshot
from _planner import state_of
from _planner import SUFFIX
from _planner import TURNS
from _planner import unequal
import pytest

from flashrt_core.capsule import CapsuleStore
from flashrt_core.errors import ConfigError
from flashrt_core.errors import LaneBusy
from flashrt_core.errors import PromptEmpty
from flashrt_core.errors import TickDropped
from flashrt_core.planners import GrammarSource
from flashrt_core.planners import Options
from flashrt_core.planners.session import PlannerSession
from flashrt_core.planners.text import ByteTokenizer
from flashrt_core.runtime import Backend

LETTERS = ''.join(chr(ord('A') + i) for i in range(48))       # one character a token


def tokenizer() -> ByteTokenizer:
    return ByteTokenizer('letters', lambda text: [LETTERS.index(c) for c in text],
                         [c.encode() for c in LETTERS], {}, (), ())


@pytest.fixture
def session(backend: Backend) -> PlannerSession:
    made = shared(backend)
    made.prefill(PROMPT).result(20)
    return made


def text_of(tokens: list[int]) -> str:
    return ''.join(LETTERS[t] for t in tokens)


def test_a_stream_gives_the_tokens_of_steps_with_their_text_and_places(session):
    expected = run(session, 10, DRAWN)
    session.prefill(PROMPT).result(20)
    options = Options(**{**vars(DRAWN), 'max_tokens': 10})
    stream = session.stream(options, tokenizer=tokenizer())
    tokens = list(stream)
    assert [t.id for t in tokens] == expected
    assert ''.join(t.text for t in tokens) == text_of(expected)
    assert [t.position for t in tokens] == list(range(11, 21))
    assert stream.reason == 'length' and list(stream) == []


@pytest.mark.parametrize('K', [0, 2, 4])
def test_nothing_runs_ahead_of_what_was_asked_for(session, K):
    stream = session.stream(Options(draft_tokens=K))
    assert session.pending is None
    for _ in range(8):
        token = next(stream)
        # The tokens of one step are known together; the next step has not run.
        assert session.position + 1 - token.position <= K + 1
        assert session.busy == '' and session.lane.idle


@pytest.mark.parametrize('K', [0, 3])
def test_after_a_cancel_another_stream_goes_on_at_the_same_token(session, K):
    options = Options(**{**vars(DRAWN), 'draft_tokens': K, 'max_tokens': 24})
    whole = [t.id for t in session.stream(options)]
    final = state_of(session)
    session.prefill(PROMPT).result(20)
    stream = session.stream(options, tokenizer=tokenizer())
    first = [next(stream).id for _ in range(5)]
    stream.cancel()
    first += [t.id for t in stream]
    assert stream.reason == 'cancelled' and 5 <= len(first) <= 5 + K
    assert session.position + 1 == len(PROMPT) + len(first)
    rest = Options(**{**vars(options), 'max_tokens': 24 - len(first)})
    assert first + [t.id for t in session.stream(rest, tokenizer=tokenizer(),
                                                 before=first)] == whole
    assert unequal(state_of(session), final) == []


def test_an_append_after_a_cancel_follows_exactly_what_was_given_out(session):
    stream = session.stream(Options(draft_tokens=3))
    given = [next(stream).id for _ in range(4)]
    stream.cancel()
    given += [t.id for t in stream]
    session.append(SUFFIX).result(20)
    assert session.position == len(PROMPT) + len(given) + len(SUFFIX)


@pytest.mark.parametrize('K', [0, 1, 4])
@pytest.mark.parametrize('at', [0, 2, 5])
def test_a_stop_text_ends_the_text_before_it_and_the_state_with_it(session, K, at):
    tokens = run(session, 12)
    session.prefill(PROMPT).result(20)
    first = tokens[: tokens.index(tokens[at]) + 1]
    run(session, len(first))
    state = state_of(session)
    session.prefill(PROMPT).result(20)
    stop = text_of(first[-2:]) if at else text_of(first[-1:])
    options = Options(stop=(stop,), draft_tokens=K)
    stream = session.stream(options, tokenizer=tokenizer())
    # Drafts that are all accepted would carry the state beyond the stop.
    real = session.decode
    session.decode = lambda o, **more: real(
        o, **more, drafts=tokens[1 + session.position - 11:][:K] if session.pending is not None
        else ())
    try:
        given = list(stream)
    finally:
        del session.decode
    assert [t.id for t in given] == first and stream.reason == 'stop text'
    assert ''.join(t.text for t in given) + stop == text_of(first)
    assert unequal(state_of(session), state) == []


def test_a_stop_token_ends_the_stream_with_it(backend, session):
    tokens = run(session, 12)
    end = tokens[4]
    with bound(backend, stop_ids=(end,)) as stopping:
        stopping.prefill(PROMPT).result(20)
        stream = stopping.stream(Options(draft_tokens=2))
        assert [t.id for t in stream] == tokens[: tokens.index(end) + 1]
        assert stream.reason == 'stop token'


def test_a_full_context_ends_the_stream(session):
    session.prefill([1] * 93).result(20)
    stream = session.stream(Options(draft_tokens=2))
    assert len(list(stream)) == 3 and stream.reason == 'context'


@pytest.mark.parametrize('K', [0, 3])
def test_a_grammar_masks_each_token_and_ends_the_stream(session, K):
    options = Options(temperature=1.0, grammar=GrammarSource('regex', '[ACEG]{6}'), draft_tokens=K)
    stream = session.stream(options, tokenizer=letters())
    assert re.fullmatch('[ACEG]{6}', ''.join(token.text for token in stream))
    assert stream.reason == 'grammar'
    assert list(session.stream(options, tokenizer=letters())) == []       # its text is complete
    session.append(SUFFIX).result(20)
    assert len(list(session.stream(options, tokenizer=letters()))) == 6


@pytest.mark.parametrize('K', [0, 2])
def test_an_end_token_that_is_no_stop_id_ends_a_grammars_stream_too(session, K):
    options = Options(temperature=5.0, grammar=GrammarSource('regex', 'A?'), draft_tokens=K)
    seen = set()
    for seed in range(8):
        session.prefill(PROMPT).result(20)
        stream = session.stream(Options(**{**vars(options), 'seed': seed}), tokenizer=letters())
        seen.add(tuple(t.id for t in stream))
        assert stream.reason == 'grammar'
    assert seen == {(0,), (END,)}


@pytest.mark.parametrize('K', [1, 4])
def test_a_stop_text_inside_a_grammar_ends_the_state_with_it(session, K):
    tokens = run_under(session, 8, DRAWN)
    session.prefill(PROMPT).result(20)
    run_under(session, 4, DRAWN)
    state = state_of(session)
    session.prefill(PROMPT).result(20)
    options = Options(**{**vars(DRAWN), 'stop': (text_of(tokens[2:4]),), 'draft_tokens': K,
                         'grammar': TURNS})
    stream = session.stream(options, tokenizer=letters())
    real = session.decode

    def with_drafts(o: Options, **more: object) -> object:
        given = session.position + 1 - len(PROMPT)
        return real(o, drafts=() if session.pending is None else tokens[given:][:K], **more)

    session.decode = with_drafts
    try:
        assert [t.id for t in stream] == tokens[:4] and stream.reason == 'stop text'
    finally:
        del session.decode
    assert unequal(state_of(session), state) == []


def test_a_restore_ends_a_stream_at_its_next_token_and_the_state_is_the_restored(
    backend: Backend, session
):
    store = CapsuleStore(backend, 4 * MIB, 4 * MIB)
    snapshot(session, store)
    before = state_of(session)
    stream = session.stream(GREEDY)
    next(stream)            # the position is the capsule's again after the restore
    restore(session, store)
    with pytest.raises(TickDropped, match='restored or reset'):
        next(stream)
    assert unequal(state_of(session), before) == [] and list(stream) == []
    assert run(session, 3) == run_again(session, 3)
    store.close()


def run_again(session: PlannerSession, count: int) -> list[int]:
    session.prefill(PROMPT).result(20)
    return run(session, count)


def test_a_stream_under_which_others_moved_the_state_ends(session):
    stream = session.stream(GREEDY)
    next(stream)
    session.append(SUFFIX).result(20)
    with pytest.raises(TickDropped, match='moved from 11 to 17'):
        next(stream)


def test_a_step_that_fails_ends_the_stream_with_its_error(session):
    session.reset().result(20)
    stream = session.stream(GREEDY)
    with pytest.raises(PromptEmpty):
        next(stream)
    assert stream.reason == 'error' and list(stream) == []


def test_two_streams_do_not_mix(session):
    gate = threading.Event()
    held = session.lane.call(lambda: gate.wait(20))
    first = session.decode(GREEDY)
    with pytest.raises(LaneBusy, match='decode'):
        next(session.stream(GREEDY))
    gate.set()
    held.result(20)
    first.result(20)


def test_what_a_stream_lacks_is_said_before_it_begins(session) -> None:
    with pytest.raises(ConfigError, match='tokenizer'):
        session.stream(Options(stop=('x',)))
    with pytest.raises(ConfigError, match='a grammar needs a tokenizer'):
        session.stream(Options(grammar=GrammarSource('regex', '.*')))


def test_a_tokenizer_of_the_config_gives_its_end_tokens_and_size(backend: Backend,
                                                                monkeypatch) -> None:
    from flashrt_core.planners import vocabularies
    ends = ByteTokenizer('letters', lambda text: [], [c.encode() for c in LETTERS[:40]], {}, (),
                         (39,))
    monkeypatch.setattr(vocabularies, 'make_tokenizer', lambda name: ends)
    with bound(backend, tokenizer='letters') as made:
        assert made.tokenizer is ends
        assert made.settings.stop_ids == (39,) and made.settings.known_tokens == 40
        made.prefill(PROMPT).result(20)
        tokens = run(made, 30, Options(temperature=50.0, seed=1))
        assert max(tokens) < 40


def test_max_tokens_bounds_the_last_step_too(session):
    for K in (0, 3):
        session.prefill(PROMPT).result(20)
        assert len(list(session.stream(Options(max_tokens=7, draft_tokens=K)))) == 7
        assert session.position + 1 == len(PROMPT) + 7
