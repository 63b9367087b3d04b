"""Faults that others reported in public, each as a test of ours; doc/planner_faults.md lists them.

Where a test takes ``bug``, it is run as it is and again with that bug planted, and must notice.
Planted bugs patch eager bodies, so they run on the cpu backend. F22 on: test_planners_faults_2.py.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from _planner import bound
from _planner import DRAWN
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
from _planner_faults import accept_nothing
from _planner_faults import boundary_without
from _planner_faults import chunks_replayed
from _planner_faults import drafting
from _planner_faults import FORGOTTEN
from _planner_faults import needs_eager
from _planner_faults import noticed
from _planner_faults import spoil
import pytest
import torch

from flashrt_core.capsule import Boundary
from flashrt_core.capsule import CapsuleStore
from flashrt_core.capsule import store as store_module
from flashrt_core.errors import CapsuleCorrupt
from flashrt_core.errors import CapsuleNotFound
from flashrt_core.errors import NotAtBoundary
from flashrt_core.planners import Options
from flashrt_core.planners.branches import Branches
from flashrt_core.planners.operations import Mirror
from flashrt_core.planners.qwen3_5 import model
from flashrt_core.planners.session import PlannerSession
from flashrt_core.runtime import Backend
from flashrt_core.runtime import Role


@pytest.fixture
def session(backend: Backend) -> PlannerSession:
    return shared(backend)


@pytest.fixture
def store(backend: Backend) -> Iterator[CapsuleStore]:
    made = CapsuleStore(backend, 8 * MIB, 8 * MIB, page_bytes=MIB // 16)
    yield made
    made.close()


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
        monkeypatch.setattr(store_module, 'check_fits', lambda *arguments: True)
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
            patched.setattr(model, 'chunk', lambda c, b, tokens, position, length, *more: real(
                c, b, tokens, position, torch.full_like(length, len(tokens)), *more))
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
