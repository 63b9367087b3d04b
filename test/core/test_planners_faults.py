"""Faults that others reported in public, each as a test of ours; doc/planner_faults.md lists them.

Where a test takes ``bug``, it is run as it is and again with that bug planted, and must notice.
Planted bugs patch eager bodies, so they run on the cpu backend.
"""
from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
import hashlib
from pathlib import Path
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
import pytest
import torch

from flashrt_core.capsule import Boundary
from flashrt_core.capsule import CapsuleStore
from flashrt_core.capsule.marks import MarkRing
from flashrt_core.errors import BoundaryIncomplete
from flashrt_core.errors import CapsuleCorrupt
from flashrt_core.errors import CapsuleNotFound
from flashrt_core.errors import FlashrtError
from flashrt_core.errors import MarkDead
from flashrt_core.errors import NotAtBoundary
from flashrt_core.errors import PromptEmpty
from flashrt_core.planners import Options
from flashrt_core.planners.branches import Branches
from flashrt_core.planners.memory import Verify
from flashrt_core.planners.operations import Mirror
from flashrt_core.planners.qwen3_5 import model
from flashrt_core.planners.session import PlannerSession
from flashrt_core.runtime import Backend
from flashrt_core.runtime import Role

FORGOTTEN = ('recurrent.0', 'conv.0')


@pytest.fixture
def session(backend: Backend) -> PlannerSession:
    return shared(backend)


@pytest.fixture
def store(backend: Backend) -> Iterator[CapsuleStore]:
    made = CapsuleStore(backend, 8 * MIB, 8 * MIB, page_bytes=MIB // 16)
    yield made
    made.close()


@contextmanager
def noticed(bug: str) -> Iterator[None]:
    """Expect the checks within to fail exactly where a bug is planted."""
    if not bug:
        yield
        return
    with pytest.raises((AssertionError, FlashrtError, pytest.fail.Exception)):
        yield


def needs_eager(session: PlannerSession, bug: str) -> None:
    if bug and session.lane.backend.name != 'cpu':
        pytest.skip('a captured graph does not see what is patched later')


def drafting(K: int, options: Options = DRAWN) -> Options:
    return Options(**{**vars(options), 'draft_tokens': K})


def boundary_without(session: PlannerSession, bug: str) -> Boundary:
    """The session's boundary, or one that forgets the buffer ``bug``."""
    return session.boundary._without_for_tests(bug) if bug else session.boundary


def spoil(session: PlannerSession) -> None:
    """Leave another state behind, in every buffer."""
    def write() -> None:
        for buffer in session.buffers.state():
            buffer.tensor.fill_(1)
        session.boundary.note_kv_rewrite(0)
    session.lane.call(write).result(20)


def mark(session: PlannerSession, store: CapsuleStore) -> Any:
    return session.lane.at_boundary(lambda: store.mark(session.boundary)).result(20)


def chunks_replayed(session: PlannerSession, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the key of every prefill chunk that runs from now on."""
    seen: list[Any] = []
    graph = next(p for k, p in session._plans.items() if k[0] == 'chunk').segments[0].graph
    real = graph.replay
    monkeypatch.setattr(graph, 'replay', lambda key, lane: (seen.append(key), real(key, lane)))
    return seen


def accept_everything(patched: pytest.MonkeyPatch) -> None:
    real = Verify.accept
    patched.setattr(Verify, 'accept', lambda self, c, b, count: real(
        self, c, b, torch.full_like(count, len(next(iter(self.held.values()))[0]))))


def accept_nothing(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(Verify, 'accept', lambda self, c, b, count: None)


@pytest.mark.parametrize('bug', ['', 'accepted tokens not applied'])
def test_f01_a_restore_with_mtp_gives_what_one_without_and_a_cold_start_give(
    session, store, monkeypatch, bug
):
    needs_eager(session, bug)
    session.prefill(PROMPT).result(20)
    snapshot(session, store)
    cold = run(session, 14, DRAWN)
    spoil(session)
    restore(session, store)
    assert run(session, 14, DRAWN) == cold
    restore(session, store)
    with monkeypatch.context() as patched, noticed(bug):
        if bug:
            accept_nothing(patched)
        assert run(session, 14, drafting(3)) == cold


@pytest.mark.parametrize('bug', ['', 'the tag is one token behind'])
def test_f02_a_capsule_is_tagged_with_the_position_its_state_was_written_at(session, store, bug):
    session.prefill(PROMPT).result(20)
    session.mirror.position -= bool(bug)
    snapshot(session, store)
    with noticed(bug):
        restore(session, store)
        assert store.get('c0', 'qwen3_5').position == len(PROMPT)


@pytest.mark.parametrize('bug', ['', 'nobody asks whether the state is committed'])
def test_f03_a_snapshot_inside_a_chunk_is_refused(session, store, monkeypatch, bug):
    plan = session._plans['chunk', 4, 32]
    real, asked = plan.segments[0].graph.replay, []

    def asking(*arguments: Any) -> None:
        if bug:
            monkeypatch.setattr(Boundary, 'check_committed', lambda self: None)
        real(*arguments)
        try:
            store.snapshot(session.boundary, 'inside')
        except NotAtBoundary:
            asked.append('refused')

    monkeypatch.setattr(plan.segments[0].graph, 'replay', asking)
    session.prefill(PROMPT[:4]).result(20)
    with noticed(bug):
        assert asked == ['refused'] and store.list() == []


@pytest.mark.parametrize('bug', ['', *FORGOTTEN, 'kv.1'])
def test_f05_what_an_early_token_left_is_found_after_a_restore(session, store, bug):
    """Two prompts that differ in their first token go on differently, and so do their capsules."""
    needles, found = {}, {}
    boundary = boundary_without(session, bug)
    for first in (1, 2):
        session.prefill((first, *PROMPT)).result(20)
        snapshot(session, store, f'n{first}', boundary)
        session.append(SUFFIX).result(20)
        needles[first] = state_of(session)['hidden']
    assert not torch.equal(needles[1], needles[2])
    for first in (1, 2):
        spoil(session)
        restore(session, store, f'n{first}', boundary)
        session.append(SUFFIX).result(20)
        found[first] = state_of(session)['hidden']
    with noticed(bug):
        assert all(torch.equal(needles[n], found[n]) for n in needles)


@pytest.mark.parametrize('bug', ['', 'refused drafts stay in the recurrent state'])
def test_f06_greedy_output_with_drafts_is_that_without(session, monkeypatch, bug):
    needs_eager(session, bug)
    session.prefill(PROMPT).result(20)
    plain = run(session, 16)
    session.prefill(PROMPT).result(20)
    with monkeypatch.context() as patched, noticed(bug):
        if bug:
            accept_everything(patched)
        assert run(session, 16, Options(draft_tokens=3)) == plain


@pytest.mark.parametrize('bug', ['', 'any tensors are taken for the layout'])
def test_f08_kv_without_the_recurrent_state_is_refused(session, store, monkeypatch, bug):
    short = session.boundary
    for name in FORGOTTEN:
        short = short._without_for_tests(name)
    session.prefill(PROMPT).result(20)
    snapshot(session, store, boundary=short)
    if bug:
        monkeypatch.setattr(CapsuleStore, '_check_fits', lambda *arguments: True)
        session = session_with(session, short)
    with noticed(bug):
        with pytest.raises(CapsuleCorrupt, match='tensors differ'):
            restore(session, store)


def session_with(session: PlannerSession, boundary: Boundary) -> Any:
    class Short:
        lane = session.lane
    Short.boundary = boundary
    return Short


@pytest.mark.parametrize('bug', ['', 'padding counts as tokens'])
def test_f09_padded_rows_are_inert(session, monkeypatch, bug):
    needs_eager(session, bug)
    padding = session.buffers['host.tokens'].tensor
    states = []
    with monkeypatch.context() as patched:
        if bug:
            real = model.chunk
            patched.setattr(model, 'chunk', lambda c, b, tokens, position, length, span: real(
                c, b, tokens, position, torch.full_like(length, len(tokens)), span))
        for filling in (3, 40):
            session.lane.call(lambda filling=filling: padding.fill_(filling)).result(20)
            session.prefill(PROMPT[:2]).result(20)
            states.append(state_of(session))
    with noticed(bug):
        assert unequal(*states) == []


def test_f10_a_miss_says_why_and_is_counted(backend, session):
    small = CapsuleStore(backend, MIB // 8, 0, page_bytes=MIB // 16)
    session.prefill(PROMPT).result(20)
    for id in ('a', 'b', 'c'):
        snapshot(session, small, id)
    with pytest.raises(CapsuleNotFound, match=r'it went: least recently used.*needed room; held'):
        restore(session, small, 'a')
    with pytest.raises(CapsuleNotFound, match='held are'):
        restore(session, small, 'never')
    assert small.counters['refused:capsule_not_found'] == 2
    assert 'went: ' in small.events[-2].reason
    small.close()


def test_f11_a_second_visit_runs_only_what_is_new(session, store, monkeypatch):
    seen = chunks_replayed(session, monkeypatch)
    session.prefill(PROMPT).result(20)
    snapshot(session, store)
    cold = len(seen)
    for _ in range(3):
        del seen[:]
        spoil(session)
        restore(session, store)
        session.append(SUFFIX[:3]).result(20)
        assert len(seen) == 1 < cold


@pytest.mark.parametrize('tier', ['gpu', 'host'])
@pytest.mark.parametrize('tokens', [0, 1, 3, 5])
def test_f12_empty_and_odd_ranges_are_copied(session, store, tier, tokens):
    if tokens:
        session.prefill(PROMPT[:tokens]).result(20)
    before = state_of(session)
    snapshot(session, store, tier=tier)
    spoil(session)
    restore(session, store)
    assert session.position == tokens and unequal(state_of(session), before) == []


def test_f13_a_capsule_that_went_down_and_came_up_is_still_its_own(backend, session):
    small = CapsuleStore(backend, MIB // 4, 4 * MIB, page_bytes=MIB // 16)
    states = {}
    for n in range(6):
        session.prefill((n, *PROMPT)).result(20)
        states[f'p{n}'] = state_of(session)
        snapshot(session, small, f'p{n}')
    assert {info.tier for info in small.list()} == {'gpu', 'host'}
    for id in (*states, *reversed(states), *states):
        restore(session, small, id)
        assert unequal(state_of(session), states[id]) == [], id
    small.close()


@pytest.mark.parametrize('bug', ['', 'every row is taken for the first'])
def test_f14_each_row_of_a_batch_keeps_the_state_of_its_own_token(session, monkeypatch, bug):
    real, found, expected = Branches._adopt, [], []
    if bug:
        monkeypatch.setattr(Branches, '_adopt', lambda self, row: real(self, 0))
    for row, seed in enumerate((21, 22, 23)):
        lived_in(session)
        alone = session.fork([seed])
        for _ in range(4):
            alone.step(DRAWN).result(20)
        alone.commit(0).result(20)
        expected.append(state_of(session))
        lived_in(session)
        together = session.fork([21, 22, 23])
        for _ in range(4):
            together.step(DRAWN).result(20)
        together.commit(row).result(20)
        found.append(state_of(session))
    with noticed(bug):
        assert [unequal(a, b) for a, b in zip(found, expected)] == [[], [], []]


@pytest.mark.parametrize('bug', ['', 'inputs of a step are not refreshed'])
def test_f15_every_input_that_a_graph_reads_is_written_before_it(session, monkeypatch, bug):
    lived_in(session)
    expected = run(session, 4, DRAWN) + list(session.append(SUFFIX).result(20).chunks)
    lived_in(session)

    def rubbish() -> None:
        for buffer in session.buffers:
            if buffer.role in (Role.INPUT, Role.SCRATCH, Role.OUTPUT):
                if buffer.name != 'host.mask':
                    buffer.tensor.fill_(3)

    if bug:
        monkeypatch.setattr(PlannerSession, 'fill_sampler', lambda *arguments: None)
    with noticed(bug):
        found: list[Any] = []
        for _ in range(4):
            session.lane.call(rubbish).result(20)
            found += run(session, 1, DRAWN)
        session.lane.call(rubbish).result(20)
        assert found + list(session.append(SUFFIX).result(20).chunks) == expected


@pytest.mark.parametrize('bug', ['', 'the last key is not counted'])
def test_f17_state_keys_and_position_have_one_length(session, store, monkeypatch, bug):
    session.prefill(PROMPT).result(20)
    run(session, 3)
    if bug:
        real = Mirror.extents
        monkeypatch.setattr(Mirror, 'extents', lambda self, kv: {
            n: max(0, v - 1) for n, v in real(self, kv).items()})
    snapshot(session, store)
    session.append(SUFFIX).result(20)
    expected = state_of(session)['hidden']
    spoil(session)
    restore(session, store)
    with noticed(bug):
        assert store.get('c0', 'qwen3_5').extents == {'kv.1': 13, 'mtp.kv': 12}
        session.append(SUFFIX).result(20)
        assert torch.equal(state_of(session)['hidden'], expected)


def test_f19_the_first_request_of_a_process_may_be_a_restore_from_host_memory(backend, store):
    with bound(backend) as first:
        lived_in(first)
        snapshot(first, store, tier='host')
        expected = run(first, 5, DRAWN)
    with bound(backend) as second:
        restore(second, store)
        assert run(second, 5, DRAWN) == expected


@pytest.mark.parametrize('bug', ['', 'padding is stored at slot 0'])
def test_f21_padding_overwrites_no_slot(session, monkeypatch, bug):
    needs_eager(session, bug)
    session.prefill(PROMPT).result(20)
    before = state_of(session)
    if bug:
        real = model.store_rows

        def storing(kv: Any, rows: Any, position: Any, count: Any) -> None:
            real(kv, rows, position, count)
            if int(count) < len(rows):
                kv[0].copy_(rows[-1])

        monkeypatch.setattr(model, 'store_rows', storing)
    session.append(SUFFIX[:1]).result(20)
    after = state_of(session)
    with noticed(bug):
        assert torch.equal(after['kv.1'][:11], before['kv.1'])
        assert torch.equal(after['mtp.kv'][:10], before['mtp.kv'])


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


def test_the_table_names_every_test_here_and_no_other() -> None:
    table = (Path(__file__).parents[2] / 'doc/planner_faults.md').read_text()
    tests = [name for name, value in globals().items()
             if name.startswith('test_') and isinstance(value, Callable)
             and name != 'test_the_table_names_every_test_here_and_no_other']
    for name in tests:
        assert f'`{name}`' in table, name
    named = {part for part in table.split('`') if part.startswith('test_') and '.' not in part}
    assert named == set(tests)
