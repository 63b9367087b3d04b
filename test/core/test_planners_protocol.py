"""What every family's session promises: the same names, the same behaviour, no family by name."""
from __future__ import annotations

from collections.abc import Iterator

from _planner import DRAWN
from _planner import GREEDY
from _planner import MIB
from _planner import PROMPT
from _planner import restore
from _planner import run
from _planner import SETTINGS
from _planner import shared
from _planner import snapshot
from _planner import state_of
from _planner import SUFFIX
from _planner import unequal
import pytest

from flashrt_core.capsule import CapsuleStore
from flashrt_core.errors import ConfigError
from flashrt_core.errors import IdentityMismatch
from flashrt_core.planners import make_planner
from flashrt_core.planners import PLANNERS
from flashrt_core.planners import Settings
from flashrt_core.planners.llama import LlamaConfig
from flashrt_core.planners.options import Options
from flashrt_core.planners.session import PlannerSession
from flashrt_core.policies.protocol import Modality
from flashrt_core.runtime import Backend
from flashrt_core.runtime import Kind
from flashrt_core.runtime import Role

LLAMA = LlamaConfig(width=32, layers=2, heads=2, kv_heads=1, mlp=48, vocab=48, context=96,
                    tied=False)


@pytest.fixture(params=PLANNERS)
def session(request: pytest.FixtureRequest, backend: Backend) -> Iterator[PlannerSession]:
    if request.param == 'qwen3_5':
        yield shared(backend)
        return
    made = make_planner(request.param).bind(backend, (LLAMA, SETTINGS))
    yield made
    made.close()


def test_a_session_names_its_ports_and_what_it_is(session):
    assert [(p.name, p.modality, p.dtype) for p in session.ports] == [
        ('prompt', Modality.TEXT, 'int64'), ('tokens', Modality.TEXT, 'int64')]
    assert session.position == 0 and session.pending is None and session.busy == ''
    assert session.lane.state == 'running' and session.lane.sealed
    assert session.boundary.session in PLANNERS


def test_a_family_without_a_recurrent_state_has_a_capsule_without_that_part(session):
    kinds = {buffer.kind for buffer in session.buffers.state()}
    hybrid = session.boundary.session == 'qwen3_5'
    assert (Kind.RECURRENT in kinds, Kind.CONV in kinds) == (hybrid, hybrid)
    assert Kind.KV in kinds and session.mtp == hybrid


def test_every_family_prefills_decodes_restores_forks_and_accepts_drafts(backend, session):
    store = CapsuleStore(backend, 4 * MIB, 4 * MIB, page_bytes=MIB // 16)
    session.prefill(PROMPT).result(20)
    snapshot(session, store)
    greedy, state = run(session, 10), state_of(session)
    restore(session, store)
    drawn = run(session, 8, DRAWN)
    assert greedy[:8] != drawn
    restore(session, store)
    found = run(session, 1)
    while len(found) < 10:
        drafts = greedy[len(found):][:4]
        found += session.decode(GREEDY, drafts=drafts, limit=10 - len(found)).result(20).tokens
    assert found == greedy and unequal(state_of(session), state) == []
    restore(session, store)
    branches = session.fork([7, 8])
    tokens = [branches.step(DRAWN).result(20).tokens for _ in range(8)]
    assert [t[0] for t in tokens] == drawn
    branches.commit(0).result(20)
    session.append(SUFFIX).result(20)
    assert session.position == len(PROMPT) + 8 + len(SUFFIX)
    store.close()


def test_a_capsule_of_one_family_is_refused_by_the_other(backend):
    store = CapsuleStore(backend, 4 * MIB, 4 * MIB)
    qwen = shared(backend)
    qwen.prefill(PROMPT).result(20)
    snapshot(qwen, store)
    llama = make_planner('llama').bind(backend, (LLAMA, SETTINGS))
    with pytest.raises(IdentityMismatch, match='another layout'):
        llama.lane.at_boundary(
            lambda: store.restore(llama.boundary, 'c0', session='qwen3_5')).result(20)
    llama.prefill(PROMPT).result(20)
    llama.close()
    store.close()


def test_an_unknown_family_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match=r"'gpt'.*llama.*qwen3_5"):
        make_planner('gpt')


def test_constants_do_not_take_part_in_the_state(session):
    names = {b.name for b in session.buffers.by_role(Role.CONSTANT)}
    assert not names & {b.name for b in session.buffers.state()}


def test_binding_tells_its_progress(backend):
    told: list[tuple[str, float]] = []
    made = make_planner('llama').bind(backend, (LLAMA, Settings(
        prefill_keys=(4,), smallest_span=96)), lambda *stage: told.append(stage))
    made.close()
    stages = list(dict.fromkeys(stage for stage, _ in told))
    assert stages == ['load', 'bind', 'capture', 'warm up']
    assert told[-1] == ('warm up', 1.0) and all(0 <= f <= 1 for _, f in told)


def test_branch_keys_are_powers_of_two_and_the_most():
    for most, keys in ((0, ()), (1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (8, (1, 2, 4, 8))):
        assert Settings(branches=most).branch_keys == keys


def test_drafts_need_no_mtp_head_to_be_given(session):
    session.prefill(PROMPT).result(20)
    if session.mtp:
        session.decode(Options(draft_tokens=1)).result(20)
    else:
        with pytest.raises(ConfigError, match='no MTP head'):
            session.decode(Options(draft_tokens=1))
