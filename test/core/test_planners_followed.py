"""A state keeps what a grammar has followed: restored, it goes on; with drafts it is the same."""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
import subprocess
import sys

from _planner import bound
from _planner import DRAWN
from _planner import GREEDY
from _planner import LETTERS
from _planner import letters
from _planner import MIB
from _planner import PROMPT
from _planner import restore
from _planner import run
from _planner import run_under
from _planner import shared
from _planner import SMALL
from _planner import snapshot
from _planner import state_of
from _planner import SUFFIX
from _planner import TURNS
from _planner import unequal
import pytest

from flashrt_core.capsule import CapsuleStore
from flashrt_core.errors import CapsuleCorrupt
from flashrt_core.errors import PlannerError
from flashrt_core.errors import TickDropped
from flashrt_core.planners import GrammarSource
from flashrt_core.planners import Options
from flashrt_core.planners.followed import Followed
from flashrt_core.planners.followed import words_of
from flashrt_core.planners.grammar import compiled_grammar
from flashrt_core.planners.session import PlannerSession
from flashrt_core.runtime import Backend
from flashrt_core.runtime import cpu_backend

OTHER = GrammarSource('regex', '[A-Z]{4,30}', 'any letters')
COUNT = 16
K_MOST = 4


@pytest.fixture
def session(backend: Backend) -> PlannerSession:
    made = shared(backend)
    made.prefill(PROMPT).result(20)
    return made


@pytest.fixture
def store(backend: Backend) -> Iterator[CapsuleStore]:
    made = CapsuleStore(backend, 8 * MIB, 8 * MIB, page_bytes=MIB // 16)
    yield made
    made.close()


def under(base: Options, K: int = 0, **more: object) -> Options:
    return Options(**{**vars(base), 'grammar': TURNS, 'draft_tokens': K, **more})


def matcher_of(session: PlannerSession, source: GrammarSource = TURNS) -> object:
    return session.follow(compiled_grammar(source, letters(), SMALL.vocab))[0]


def streamed(session: PlannerSession, options: Options) -> list[int]:
    return [token.id for token in session.stream(options, tokenizer=letters())]


# -- capsules ------------------------------------------------------------------------------------


@pytest.mark.parametrize('base', [GREEDY, DRAWN], ids=['greedy', 'drawn'])
@pytest.mark.parametrize('K', [0, 3])
def test_a_capsule_inside_a_text_goes_on_with_the_right_masks(session, store, base, K):
    stream = session.stream(under(base, K, max_tokens=COUNT), tokenizer=letters())
    tokens: list[int] = []
    ids = {}
    for token in stream:
        tokens.append(token.id)
        given = session.position + 1 - len(PROMPT)
        ids[given] = f'at{given}'
        if given == len(tokens):
            snapshot(session, store, ids[given])
        else:
            del ids[given]
    state = state_of(session)
    assert len(tokens) == COUNT and len(ids) > COUNT // 4
    assert all((t < 8) == (i % 2 == 0) for i, t in enumerate(tokens))
    for given, id in ids.items():
        session.prefill(SUFFIX).result(20)
        restore(session, store, id)
        assert list(matcher_of(session).tokens) == tokens[:given]
        if given < COUNT:
            assert streamed(session, under(base, K, max_tokens=COUNT - given)) == tokens[given:]
            assert unequal(state_of(session), state) == []


LATER = """
import sys
from _planner import *
from flashrt_core.runtime import cpu_backend
with bound(cpu_backend()) as session:
    store = CapsuleStore(cpu_backend(), 8 * MIB, 8 * MIB, 8 * MIB, sys.argv[1], allow_disk=True)
    restore(session, store)
    options = Options(**{**vars(DRAWN), 'grammar': TURNS, 'max_tokens': 9})
    print([token.id for token in session.stream(options, tokenizer=letters())])
    store.close()
"""


def test_another_process_goes_on_inside_the_text_from_disk(tmp_path: Path):
    with bound(cpu_backend()) as session:
        session.prefill(PROMPT).result(20)
        run_under(session, 5, DRAWN)
        store = CapsuleStore(cpu_backend(), 8 * MIB, 8 * MIB, 8 * MIB, tmp_path, allow_disk=True)
        snapshot(session, store, tier='disk')
        store.saved('c0', 'qwen3_5').result(20)
        store.close()
        tokens = streamed(session, under(DRAWN, max_tokens=9))
    done = subprocess.run([sys.executable, '-c', LATER, str(tmp_path)], timeout=120, text=True,
                          cwd=Path(__file__).parent, capture_output=True, check=False,
                          env={'PYTHONPATH': str(Path(__file__).parents[2])})
    assert done.stdout.strip() == str(tokens), done.stderr


def test_a_rollback_to_a_mark_inside_the_text_goes_on_there(session, store):
    session.lane.call(lambda: store.prepare(session.boundary, 2)).result(20)
    tokens = run_under(session, 3)
    mark = session.lane.at_boundary(lambda: store.mark(session.boundary)).result(20)
    tokens += run_under(session, 6)
    session.append(SUFFIX).result(20)
    session.lane.at_boundary(lambda: store.rollback(session.boundary, mark)).result(20)
    assert run_under(session, 6) == tokens[3:]


def test_a_restore_after_a_matcher_was_made_drops_its_step(session, store):
    run_under(session, 3)
    snapshot(session, store)
    matcher, epoch = session.follow(compiled_grammar(TURNS, letters(), SMALL.vocab))
    restore(session, store)
    with pytest.raises(TickDropped, match='restored or reset'):
        session.decode(GREEDY, matcher=matcher, epoch=epoch).result(20)


def test_nonsense_about_what_was_followed_is_refused():
    words = words_of(TURNS)
    assert Followed.read([3, *words], 96) == Followed(3, words)
    for count in (-1, 97):
        with pytest.raises(CapsuleCorrupt, match=f'followed {count} tokens of a context of 96'):
            Followed.read([count, *words], 96)


# -- which grammar -------------------------------------------------------------------------------


@pytest.mark.parametrize('other', [OTHER, GrammarSource('lark', TURNS.text, 'lark')],
                         ids=['text', 'kind'])
def test_another_grammar_is_refused_by_name_and_the_state_is_as_it_was(session, store, other):
    run_under(session, 3)
    snapshot(session, store)
    restore(session, store)
    before = state_of(session)
    refusal = f"grammar '{other.name}' is refused: the state is 3 tokens into .* 'turns'"
    compiled = compiled_grammar(OTHER, letters(), SMALL.vocab)
    with pytest.raises(PlannerError, match=refusal):
        session.mirror.followed.check(other)
    if other is OTHER:
        with pytest.raises(PlannerError, match=refusal):
            next(session.stream(Options(grammar=other), tokenizer=letters()))
        with pytest.raises(PlannerError, match=refusal):
            session.decode(GREEDY, matcher=compiled.matcher([0, 8, 1]))
    assert unequal(state_of(session), before) == []
    renamed = GrammarSource(TURNS.kind, TURNS.text, 'of the same text')
    run_under(session, 2, source=renamed)
    assert session.mirror.followed.count == 5


def test_a_matcher_that_is_not_where_the_state_is_is_refused(session):
    run_under(session, 3)
    late = matcher_of(session)
    run_under(session, 1)
    with pytest.raises(PlannerError, match="'turns' has followed 3 tokens, the state 4"):
        session.decode(GREEDY, matcher=late)


@pytest.mark.parametrize('how', ['append', 'step', 'branch', 'prefill', 'reset'])
def test_what_is_no_token_of_the_text_ends_it(session, store, how):
    run_under(session, 3)
    if how == 'append':
        session.append(SUFFIX).result(20)
    elif how == 'step':
        session.decode(GREEDY).result(20)
    elif how == 'branch':
        branches = session.fork([1, 2])
        branches.step(GREEDY).result(20)
        branches.commit(1).result(20)
    else:
        session.reset().result(20)
        if how == 'prefill':
            session.prefill(PROMPT).result(20)
    assert session.mirror.followed == Followed()
    assert matcher_of(session, OTHER).tokens == []
    snapshot(session, store)
    restore(session, store)
    assert session.mirror.followed == Followed()


def test_branches_that_took_no_step_leave_the_text_open(session):
    tokens = run_under(session, 3)
    session.fork([1, 2]).commit(0).result(20)
    assert matcher_of(session).tokens == tokens


def test_a_failed_step_leaves_the_text_where_it_was(session, monkeypatch):
    if session.lane.backend.name != 'cpu':
        pytest.skip('a captured replay cannot fail half-way')
    tokens = run_under(session, 3)
    before = state_of(session)
    plan = session._plans['step', True]
    real = plan.segments[0].graph.replay

    def failing(*arguments: object) -> None:
        real(*arguments)
        raise RuntimeError('planted')

    with monkeypatch.context() as patched:
        patched.setattr(plan.segments[0].graph, 'replay', failing)
        with pytest.raises(RuntimeError, match='planted'):
            session.decode(GREEDY, matcher=matcher_of(session)).result(20)
    assert unequal(state_of(session), before) == []
    assert matcher_of(session).tokens == tokens


# -- speculation ---------------------------------------------------------------------------------


@pytest.mark.parametrize('K', range(1, K_MOST + 1))
@pytest.mark.parametrize('base', [GREEDY, DRAWN], ids=['greedy', 'drawn'])
def test_with_drafts_the_tokens_and_every_state_bit_are_those_without(session, base, K):
    tokens = streamed(session, under(base))
    state = state_of(session)
    session.prefill(PROMPT).result(20)
    stream = session.stream(under(base, K), tokenizer=letters())
    assert [token.id for token in stream] == tokens and stream.reason == 'grammar'
    assert stream.drafted >= K
    assert unequal(state_of(session), state) == []


@pytest.mark.parametrize('base', [GREEDY, DRAWN], ids=['greedy', 'drawn'])
@pytest.mark.parametrize(('agree', 'then'), [
    (agree, then) for agree in range(K_MOST) for then in ('other', 'refused')])
def test_drafts_are_accepted_up_to_the_first_that_the_sampler_or_the_grammar_refuses(
    session, base, agree, then
):
    first = run_under(session, 1, base)
    tokens = run_under(session, agree + 1, base)
    state, more = state_of(session), run_under(session, 4, base)
    session.prefill(PROMPT).result(20)
    assert run_under(session, 1, base) == first
    drafts = (tokens + more)[:K_MOST]
    kind = 8 * (drafts[agree] >= 8)         # the letters that may stand here are 8 from there
    drafts[agree] = (drafts[agree] + 1) % 8 + (kind if then == 'other' else 8 - kind)
    matcher = matcher_of(session)
    assert len(matcher.masks(drafts)) == (agree + 1 if then == 'refused' else K_MOST + 1)
    step = session.decode(base, drafts=drafts, matcher=matcher).result(20)
    assert (step.tokens, step.accepted) == (tuple(tokens), agree)
    assert unequal(state_of(session), state) == []
    assert run_under(session, 4, base) == more


def test_what_the_sampler_would_pick_without_a_mask_is_refused_where_the_grammar_forbids_it(
    session,
):
    """The drafts are those of the free sampler: a verification with open rows takes them all."""
    first = run_under(session, 1)
    free = run(session, K_MOST)
    session.prefill(PROMPT).result(20)
    assert session.decode(GREEDY, matcher=matcher_of(session)).result(20).tokens == tuple(first)
    matcher = matcher_of(session)
    step = session.decode(GREEDY, drafts=free, matcher=matcher).result(20)
    assert step.accepted < K_MOST
    for token in step.tokens:
        matcher.accept(token)


@pytest.mark.parametrize('K', [1, 2, 4])
def test_no_draft_carries_the_state_beyond_the_end_of_the_text(session, K):
    source = GrammarSource('regex', 'AIB', 'three letters')
    run_under(session, 1, source=source)
    drafts = [LETTERS.index(letter) for letter in 'IBC'] + [47]
    matcher = matcher_of(session, source)
    step = session.decode(GREEDY, drafts=drafts[:K], matcher=matcher).result(20)
    assert step.tokens == tuple(drafts[: min(K + 1, 2)])
    assert session.position + 1 == len(PROMPT) + 1 + len(step.tokens)


def test_some_drafts_of_mtp_are_accepted_under_a_grammar(session):
    stream = session.stream(under(DRAWN, 4, grammar=GrammarSource('regex', '[AB]{60}')),
                            tokenizer=letters())
    assert len(list(stream)) == 60
    assert 0 < stream.accepted < stream.drafted


def test_a_verb_between_the_drafts_and_their_verification_meets_a_boundary(session, store,
                                                                          monkeypatch):
    tokens = streamed(session, under(DRAWN, 3, max_tokens=COUNT))
    session.prefill(PROMPT).result(20)
    real, taken = session._land_drafts, []

    def also_asking(*arguments: object) -> None:
        real(*arguments)
        taken.append(session.lane.at_boundary(
            lambda: store.snapshot(session.boundary, f's{len(taken)}')))

    with monkeypatch.context() as patched:
        patched.setattr(session, '_land_drafts', also_asking)
        assert streamed(session, under(DRAWN, 3, max_tokens=COUNT)) == tokens
    infos = [future.result(20) for future in taken]
    assert infos
    for info in infos:
        restore(session, store, info.id)
        given = session.position + 1 - len(PROMPT)
        assert streamed(session, under(DRAWN, max_tokens=COUNT - given)) == tokens[given:]
