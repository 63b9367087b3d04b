"""Public faults from F22 on, and the table of all; see test_planners_faults.py."""
from __future__ import annotations

from collections.abc import Iterator
import hashlib
from pathlib import Path
import re
from typing import Any

from _planner import bound
from _planner import DRAWN
from _planner import GREEDY
from _planner import lived_in
from _planner import MIB
from _planner import PROMPT
from _planner import restore
from _planner import run
from _planner import shared
from _planner import snapshot
from _planner import state_of
from _planner import SUFFIX
from _planner import unequal
from _planner_faults import accept_everything
from _planner_faults import boundary_without
from _planner_faults import chunks_replayed
from _planner_faults import drafting
from _planner_faults import mark
from _planner_faults import needs_eager
from _planner_faults import noticed
from _planner_faults import spoil
import pytest

from flashrt_core.capsule import Boundary
from flashrt_core.capsule import CapsuleStore
from flashrt_core.capsule.marks import MarkRing
from flashrt_core.errors import BoundaryIncomplete
from flashrt_core.errors import CapsuleCorrupt
from flashrt_core.errors import MarkDead
from flashrt_core.errors import PromptEmpty
from flashrt_core.planners.session import PlannerSession
from flashrt_core.runtime import Backend


@pytest.fixture
def session(backend: Backend) -> PlannerSession:
    return shared(backend)


@pytest.fixture
def store(backend: Backend) -> Iterator[CapsuleStore]:
    made = CapsuleStore(backend, 8 * MIB, 8 * MIB, page_bytes=MIB // 16)
    yield made
    made.close()


def test_f22_a_parked_session_is_unchanged_while_another_runs(backend, session):
    def digest(of: PlannerSession) -> str:
        parts = [b.row(0).cpu().numpy().tobytes() for b in of.buffers.state()]
        return hashlib.sha256(b''.join(parts)).hexdigest()

    with bound(backend) as parked:
        lived_in(parked)
        before = digest(parked)
        lived_in(session)
        run(session, 8, drafting(3))
        branches = session.fork([1, 2, 3])
        branches.step(DRAWN).result(20)
        branches.drop()
        assert digest(parked) == before


def test_f24_a_restore_that_reports_success_prefills_nothing_again(session, store, monkeypatch):
    session.prefill(PROMPT).result(20)
    snapshot(session, store)
    expected = run(session, 3)
    seen = chunks_replayed(session, monkeypatch)
    spoil(session)
    assert restore(session, store).position == len(PROMPT)
    assert run(session, 3) == expected and seen == []


def test_f25_a_capsule_is_accepted_as_often_as_it_is_asked_for(session, store):
    session.prefill(PROMPT).result(20)
    snapshot(session, store)
    for turn in range(4):
        session.prefill(SUFFIX[: turn + 1]).result(20)
        restore(session, store)
        assert session.position == len(PROMPT)
    assert not [kind for kind in store.counters if kind.startswith('refused')]


def test_f26_a_restore_works_after_a_rollback_that_was_refused(session, store):
    session.prefill(PROMPT).result(20)
    snapshot(session, store)
    old = mark(session, store)
    expected = run(session, 4)
    session.prefill(SUFFIX).result(20)
    with pytest.raises(MarkDead):
        session.lane.at_boundary(lambda: store.rollback(session.boundary, old)).result(20)
    restore(session, store)
    assert run(session, 4) == expected


@pytest.mark.parametrize('bug', ['', 'refused drafts stay in the recurrent state'])
def test_f27_refusals_and_rollbacks_within_captured_plans_leave_no_trace(
    session, store, monkeypatch, bug
):
    needs_eager(session, bug)
    session.prefill(PROMPT).result(20)
    run(session, 1)
    expected = run(session, 8)
    session.prefill(PROMPT).result(20)
    run(session, 1)
    point = mark(session, store)
    with monkeypatch.context() as patched, noticed(bug):
        if bug:
            accept_everything(patched)
        for wrong in range(3):
            drafts = [(t + 1) % 48 for t in expected[wrong:wrong + 3]]
            session.decode(GREEDY, drafts=drafts).result(20)
        assert run(session, 5) == expected[3:]
    session.lane.at_boundary(lambda: store.rollback(session.boundary, point)).result(20)
    assert run(session, 8) == expected


@pytest.mark.parametrize('bug', ['', 'mtp.kv', 'hidden'])
def test_f28_drafts_after_a_restore_are_those_of_the_cold_run(session, store, bug):
    def drafts() -> list[Any]:
        found = []
        for _ in range(5):
            step = session.decode(drafting(4)).result(20)
            proposed = session.lane.call(
                lambda: session.buffers['drafts'].tensor.tolist()).result(20)
            found.append((step.tokens, step.accepted, proposed))
        return found

    lived_in(session)
    boundary = boundary_without(session, bug)
    snapshot(session, store, boundary=boundary)
    cold = drafts()
    spoil(session)
    restore(session, store, boundary=boundary)
    with noticed(bug):
        assert drafts() == cold


@pytest.mark.parametrize('bug', ['', 'the recurrent state is emptied instead'])
def test_f29_going_back_brings_the_recurrent_state_back(session, store, monkeypatch, bug):
    session.prefill(PROMPT).result(20)
    point, before = mark(session, store), state_of(session)
    run(session, 4)
    if bug:
        real = MarkRing.write_back

        def emptying(ring: MarkRing, mark: Any) -> None:
            real(ring, mark)
            session.buffers['recurrent.0'].tensor.zero_()

        monkeypatch.setattr(MarkRing, 'write_back', emptying)
    session.lane.at_boundary(lambda: store.rollback(session.boundary, point)).result(20)
    with noticed(bug):
        assert unequal(state_of(session), before) == []


def test_f30_a_full_hit_without_a_new_token_decodes_on(session, store):
    session.prefill(PROMPT).result(20)
    snapshot(session, store)
    expected = run(session, 3)
    for _ in range(3):
        restore(session, store)
        with pytest.raises(PromptEmpty, match='decode'):
            session.append([])
        assert run(session, 3) == expected


def test_f32_a_capsule_never_aliases_what_generation_writes(session, store):
    lived_in(session)
    snapshot(session, store)
    digest, info = store.digest('c0', 'qwen3_5'), store.get('c0', 'qwen3_5')
    for _ in range(2):
        restore(session, store)
        run(session, 5, drafting(2))
        branches = session.fork([1, 2])
        branches.step(DRAWN).result(20)
        branches.commit(1).result(20)
        session.append(SUFFIX).result(20)
    assert store.digest('c0', 'qwen3_5') == digest
    assert store.get('c0', 'qwen3_5').position == info.position


def test_f33_the_same_request_gives_the_same_answer_each_time(session, store):
    session.prefill(PROMPT).result(20)
    snapshot(session, store)
    answers = []
    for _ in range(4):
        restore(session, store)
        session.append(SUFFIX).result(20)
        answers.append(run(session, 8, DRAWN))
    assert answers == answers[:1] * 4


def test_f34_a_step_submitted_behind_a_restore_reads_what_it_wrote(session, store, stress):
    session.prefill(PROMPT).result(20)
    snapshot(session, store)
    expected = run(session, 1, DRAWN)[0]
    for at in range(stress(100)):
        session.prefill((at % 48, *SUFFIX)).result(20)
        restored = session.lane.at_segment_end(lambda: store.restore(session.boundary, 'c0'))
        restored.result(20)
        assert session.decode(DRAWN).result(20).tokens == (expected,)


@pytest.mark.parametrize('bug', ['', 'position', 'pending'])
def test_f35_positions_are_part_of_the_capsule(session, store, bug):
    lived_in(session)
    boundary = boundary_without(session, bug)
    snapshot(session, store, boundary=boundary)
    expected, position = run(session, 4, DRAWN), session.position
    spoil(session)
    with noticed(bug):
        restore(session, store, boundary=boundary)
        assert run(session, 4, DRAWN) == expected and session.position == position


def test_f37_a_live_buffer_that_no_list_names_is_an_error(session):
    names = [buffer.name for buffer in session.buffers.state()]
    for left_out in names:
        with pytest.raises(BoundaryIncomplete, match=left_out.replace('.', r'\.')):
            Boundary(session.buffers, session.boundary.identity,
                     order=[name for name in names if name != left_out])


@pytest.mark.parametrize('bug', ['', 'hidden'])
def test_f38_the_hidden_state_that_seeds_mtp_is_in_the_capsule(session, store, bug):
    session.prefill(PROMPT).result(20)
    boundary = boundary_without(session, bug)
    snapshot(session, store, boundary=boundary)
    expected = [session.decode(drafting(2)).result(20).tokens for _ in range(4)]
    after = state_of(session)
    spoil(session)
    restore(session, store, boundary=boundary)
    with noticed(bug):
        assert [session.decode(drafting(2)).result(20).tokens for _ in range(4)] == expected
        assert unequal(state_of(session), after) == []


@pytest.mark.parametrize('tier', ['gpu', 'host', 'disk'])
@pytest.mark.parametrize('K', [0, 1, 4])
def test_f40_every_tier_with_and_without_mtp_continues_to_the_last_token(
    backend, session, tmp_path: Path, tier, K
):
    store = CapsuleStore(backend, 4 * MIB, 4 * MIB, 4 * MIB, tmp_path, allow_disk=True)
    session.prefill(PROMPT).result(20)
    snapshot(session, store, tier=tier)
    expected = run(session, 12, drafting(K))
    after = state_of(session)
    spoil(session)
    restore(session, store)
    assert run(session, 12, drafting(K)) == expected
    assert unequal(state_of(session), after) == []
    store.close()


def test_a_restore_that_fails_leaves_the_live_session_as_it_was(backend, session, tmp_path: Path):
    writing = CapsuleStore(backend, 4 * MIB, 4 * MIB, 4 * MIB, tmp_path, allow_disk=True)
    session.prefill(SUFFIX).result(20)
    snapshot(session, writing, tier='disk')
    writing.saved('c0', 'qwen3_5').result(20)
    writing.close()
    file = next(p for p in tmp_path.rglob('*') if p.is_file() and p.stat().st_size > 4096)
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    store = CapsuleStore(backend, 4 * MIB, 4 * MIB, 4 * MIB, tmp_path, allow_disk=True)
    lived_in(session)
    before = state_of(session)
    with pytest.raises(CapsuleCorrupt):
        restore(session, store)
    assert unequal(state_of(session), before) == [] and session.boundary.poisoned is None
    session.append(SUFFIX).result(20)
    store.close()


@pytest.mark.parametrize('cut', range(1, 11))
def test_a_boundary_need_not_lie_at_the_edge_of_a_chunk(session, store, cut):
    session.prefill(PROMPT[:cut]).result(20)
    snapshot(session, store)
    session.append(PROMPT[cut:]).result(20)
    whole, tokens = state_of(session), run(session, 4)
    spoil(session)
    restore(session, store)
    session.append(PROMPT[cut:]).result(20)
    assert unequal(state_of(session), whole) == []
    assert run(session, 4) == tokens


def test_the_table_names_every_test_of_a_fault_and_no_other() -> None:
    here = Path(__file__).parent
    tests = {name for file in ('test_planners_faults.py', 'test_planners_faults_2.py')
             for name in re.findall(r'^def (test_\w+)', (here / file).read_text(), re.M)}
    tests.remove('test_the_table_names_every_test_of_a_fault_and_no_other')
    table = (here.parents[1] / 'doc/planner_faults.md').read_text()
    named = {part for part in table.split('`') if re.fullmatch(r'test_\w+', part)}
    assert named == tests
