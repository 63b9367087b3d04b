"""The promises at the sizes of the 27B, four layers of it, in each precision, captured."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from _planner import bound
from _planner import DRAWN
from _planner import GREEDY
from _planner import MIB
from _planner import restore
from _planner import run
from _planner import snapshot
from _planner import state_of
from _planner import unequal
import pytest
import torch

from flashrt_core.capsule import CapsuleStore
from flashrt_core.planners import Options
from flashrt_core.planners import Settings
from flashrt_core.planners.qwen3_5 import NAMED
from flashrt_core.planners.session import PlannerSession
from flashrt_core.runtime import cuda_backend

pytestmark = pytest.mark.gpu

CONFIG = replace(NAMED['27b'][0], layers=4, vocab=4096, context=4096, tokenizer='')
SETTINGS = Settings(draft_tokens=4, branches=8, tail_tokens=64)
LONG = [(at * 7919 + 13) % 4096 for at in range(2100)]      # one full chunk and a padded one
SUFFIX = [(at * 104729 + 5) % 4096 for at in range(64)]


@pytest.fixture(scope='module', ids='-'.join, params=[
    ('bf16', 'bf16'), ('fp8', 'fp8'), ('int4', 'bf16'), ('nvfp4', 'bf16')])
def session(request: pytest.FixtureRequest) -> Iterator[PlannerSession]:
    precision, kv = request.param
    config = replace(CONFIG, precision=precision, kv_precision=kv)
    with bound(cuda_backend(), config, SETTINGS) as made:
        yield made


@pytest.fixture
def store(session: PlannerSession) -> Iterator[CapsuleStore]:
    made = CapsuleStore(session.lane.backend, 512 * MIB, 512 * MIB)
    yield made
    made.close()


def drafting(K: int, options: Options) -> Options:
    return Options(**{**vars(options), 'draft_tokens': K})


def test_the_kernels_are_what_computes(session):
    assert session.boundary.identity.numerics['forward'] == 'qwen3_5.fast'


@pytest.mark.parametrize('options', [GREEDY, DRAWN], ids=['greedy', 'drawn'])
def test_drafts_change_no_token_and_no_bit(session, store, options, stress):
    count = stress(512)
    session.prefill(LONG).result(60)
    snapshot(session, store)
    tokens, state = run(session, count, options), state_of(session)
    for K in range(1, 5):
        restore(session, store)
        assert run(session, count, drafting(K, options)) == tokens, K
        assert unequal(state_of(session), state) == [], K


@pytest.mark.parametrize('K', range(1, 5))
def test_every_number_of_accepted_drafts_leads_to_the_same_state(session, store, K):
    session.prefill(LONG).result(60)
    run(session, 1)
    snapshot(session, store)
    for agree in range(K + 1):
        restore(session, store)
        tokens = run(session, agree + 1)
        state = state_of(session)
        more = run(session, K)
        drafts = [t if i < agree else (t + 1) % 4096 for i, t in enumerate((tokens + more)[:K])]
        restore(session, store)
        step = session.decode(GREEDY, drafts=drafts).result(60)
        assert step.tokens == tuple(tokens) and unequal(state_of(session), state) == []


def test_each_of_eight_branches_is_a_single_session(session, store):
    session.prefill(LONG).result(60)
    snapshot(session, store)
    seeds = list(range(8))
    alone, states = [], []
    for seed in seeds:
        restore(session, store)
        alone.append(run(session, 16, Options(**{**vars(DRAWN), 'seed': seed})))
        states.append(state_of(session))
    for row in (0, 3, 7):
        restore(session, store)
        branches = session.fork(seeds)
        steps = [branches.step(DRAWN).result(60).tokens for _ in range(16)]
        assert [list(tokens) for tokens in zip(*steps)] == alone
        branches.commit(row).result(60)
        assert unequal(state_of(session), states[row]) == [], row


@pytest.mark.parametrize('tier', ['gpu', 'host', 'disk'])
def test_a_restore_is_byte_exact_and_an_append_after_it_too(session, tmp_path: Path, tier):
    store = CapsuleStore(session.lane.backend, 512 * MIB, 512 * MIB, 512 * MIB, tmp_path,
                         allow_disk=True)
    session.prefill(LONG).result(60)
    snapshot(session, store, tier=tier)
    before = state_of(session)
    session.append(SUFFIX).result(60)
    tokens, after = run(session, 16, drafting(3, DRAWN)), state_of(session)
    session.prefill(SUFFIX).result(60)
    assert restore(session, store, proof='digest').bit_exact
    assert unequal(state_of(session), before) == []
    session.append(SUFFIX).result(60)
    assert run(session, 16, drafting(3, DRAWN)) == tokens
    assert unequal(state_of(session), after) == []
    store.close()


def test_a_mark_goes_back_whatever_the_length(session, store):
    session.prefill(LONG).result(60)
    session.lane.call(lambda: store.prepare(session.boundary, 2)).result(60)
    mark = session.lane.at_boundary(lambda: store.mark(session.boundary)).result(60)
    tokens = run(session, 8)
    report = session.lane.at_boundary(lambda: store.rollback(session.boundary, mark)).result(60)
    assert report.bytes == session.memory()['capsule_fixed']
    assert run(session, 8) == tokens


def test_steps_call_no_allocator(session):
    if session.lane.backend.name != 'cuda':
        pytest.skip('the CPU has no captured graphs')
    session.prefill(LONG).result(60)
    run(session, 8, drafting(2, DRAWN))

    def allocations() -> int:
        return int(torch.cuda.memory_stats()['allocation.all.allocated'])

    before = session.lane.call(allocations).result(60)
    run(session, 16, DRAWN)
    run(session, 16, drafting(4, DRAWN))
    session.append(SUFFIX).result(60)
    assert session.lane.call(allocations).result(60) == before


def test_a_needle_at_the_beginning_is_remembered_across_a_restore(session, store):
    hidden = {}
    for first in (1, 2):
        session.prefill([first, *LONG]).result(60)
        snapshot(session, store, f'n{first}')
        session.append(SUFFIX).result(60)
        hidden[first] = state_of(session)['hidden']
    assert not torch.equal(hidden[1], hidden[2])
    for first in (1, 2, 1):
        restore(session, store, f'n{first}')
        session.append(SUFFIX).result(60)
        assert torch.equal(state_of(session)['hidden'], hidden[first])
