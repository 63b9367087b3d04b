"""Speculation changes how many steps it takes, never a token or a bit of the state."""
from __future__ import annotations

from itertools import product

from _planner import bound
from _planner import DRAWN
from _planner import GREEDY
from _planner import lived_in
from _planner import PROMPT
from _planner import run
from _planner import shared
from _planner import state_of
from _planner import unequal
import pytest

from flashrt_core.planners import Options
from flashrt_core.planners.session import PlannerSession
from flashrt_core.runtime import Backend

K_MOST = 4


@pytest.fixture
def session(backend: Backend) -> PlannerSession:
    return shared(backend)


def drawn(K: int) -> Options:
    return Options(temperature=1.3, top_k=30, top_p=0.95, seed=7, presence=0.4, frequency=0.2,
                   repetition=1.1, draft_tokens=K)


def planted(tokens: list[int], agree: int, K: int) -> list[int]:
    """Return K drafts of which the first ``agree`` are what the sampler will pick."""
    return [t if i < agree else (t + 1) % 48 for i, t in enumerate(tokens[:K])]


@pytest.mark.parametrize('K', range(1, K_MOST + 1))
@pytest.mark.parametrize('kind', ['greedy', 'drawn'])
def test_with_drafts_the_tokens_and_every_state_bit_are_those_without(session, kind, K):
    plain = GREEDY if kind == 'greedy' else DRAWN
    session.prefill(PROMPT).result(20)
    tokens, state = run(session, 24, plain), state_of(session)
    session.prefill(PROMPT).result(20)
    assert run(session, 24, Options(draft_tokens=K) if plain is GREEDY else drawn(K)) == tokens
    assert unequal(state_of(session), state) == []


@pytest.mark.parametrize('options', [GREEDY, DRAWN], ids=['greedy', 'drawn'])
@pytest.mark.parametrize(('K', 'agree'), [
    (K, agree) for K in range(1, K_MOST + 1) for agree in range(K + 1)])
def test_every_number_of_accepted_drafts_leads_to_the_same_state(session, options, K, agree):
    lived_in(session)
    first = session.lane.call(lambda: session.buffers.arena.clone()).result(20)
    position, pending = session.position, session.pending
    tokens = run(session, agree + 1, options)
    state = state_of(session)
    more = run(session, K, options)

    def back() -> None:
        session.buffers.arena.copy_(first)
        session.mirror.position, session.mirror.pending = position, pending

    session.lane.call(back).result(20)
    step = session.decode(options, drafts=planted(tokens + more, agree, K)).result(20)
    assert (step.tokens, step.drafted, step.accepted) == (tuple(tokens), K, agree)
    assert unequal(state_of(session), state) == []
    assert run(session, K, options) == more


@pytest.mark.parametrize('mask', list(product((True, False), repeat=K_MOST)))
def test_nothing_is_accepted_behind_the_first_draft_that_is_refused(session, mask):
    session.prefill(PROMPT).result(20)
    run(session, 1)
    tokens = run(session, K_MOST + 1)
    session.prefill(PROMPT).result(20)
    run(session, 1)
    drafts = [t if good else (t + 1) % 48 for t, good in zip(tokens, mask)]
    step = session.decode(GREEDY, drafts=drafts).result(20)
    assert step.accepted == [*mask, False].index(False)
    assert step.tokens == tuple(tokens[: step.accepted + 1])


def test_penalties_of_a_verified_row_count_the_drafts_before_it(session):
    strong = Options(presence=50.0)        # no token comes twice
    session.prefill(PROMPT).result(20)
    tokens = run(session, 12, strong)
    assert len(set(tokens)) == 12
    session.prefill(PROMPT).result(20)
    again = run(session, 1, strong)
    while len(again) < 12:
        drafts = tokens[len(again):][:K_MOST]
        again += session.decode(strong, drafts=drafts, limit=12 - len(again)).result(20).tokens
    assert again == tokens


def test_a_repeated_draft_is_refused_where_a_penalty_forbids_it(session):
    strong = Options(presence=50.0)
    session.prefill(PROMPT).result(20)
    tokens = run(session, 3, strong)
    session.prefill(PROMPT).result(20)
    run(session, 1, strong)
    step = session.decode(strong, drafts=[tokens[1], tokens[1]]).result(20)
    assert step.tokens == tuple(tokens[1:3])


def test_the_limit_of_a_step_cuts_what_is_accepted(session):
    session.prefill(PROMPT).result(20)
    run(session, 1)
    tokens = run(session, 5)
    for limit in (1, 2, 3, 4):
        session.prefill(PROMPT).result(20)
        run(session, 1)
        step = session.decode(GREEDY, drafts=tokens[:4], limit=limit).result(20)
        assert step.tokens == tuple(tokens[:limit])
        assert session.position == 11 + limit
        assert run(session, 5 - limit) == tokens[limit:]


def test_a_stop_token_ends_what_is_accepted(backend, session):
    session.prefill(PROMPT).result(20)
    run(session, 1)
    tokens = run(session, 5)
    with bound(backend, stop_ids=(tokens[1],)) as stopping:
        stopping.prefill(PROMPT).result(20)
        run(stopping, 1)
        step = stopping.decode(GREEDY, drafts=tokens[:4]).result(20)
        assert step.tokens == tuple(tokens[:2])
        assert stopping.pending == tokens[1]


def test_keep_takes_tokens_back_as_if_they_had_never_been_given(session):
    for options in (GREEDY, DRAWN):
        session.prefill(PROMPT).result(20)
        run(session, 1, options)
        tokens = run(session, 5, options)
        for count in (1, 2, 3, 4):
            session.prefill(PROMPT).result(20)
            run(session, 1, options)
            run(session, count, options)
            state = state_of(session)
            session.prefill(PROMPT).result(20)
            run(session, 1, options)
            whole = session.decode(options, drafts=tokens[:4], revocable=True).result(20)
            assert whole.tokens == tuple(tokens)
            assert session.keep(count).result(20).tokens == tuple(tokens[:count])
            assert unequal(state_of(session), state) == []


def test_drafts_of_mtp_are_sometimes_accepted_and_always_counted(session):
    session.prefill(PROMPT).result(20)
    run(session, 1, drawn(3))
    steps = [session.decode(drawn(3)).result(20) for _ in range(12)]
    assert all(s.drafted == 3 and len(s.tokens) == s.accepted + 1 for s in steps)
    assert sum(s.accepted for s in steps) > 0


def test_in_bfloat16_too(backend):
    with bound(backend, dtype='bfloat16') as half:
        for options in (GREEDY, DRAWN):
            half.prefill(PROMPT).result(20)
            tokens, state = run(half, 20, options), state_of(half)
            for K in (1, 4):
                half.prefill(PROMPT).result(20)
                drafting = Options(**{**vars(options), 'draft_tokens': K})
                assert run(half, 20, drafting) == tokens
                assert unequal(state_of(half), state) == []
