"""Marks: small state in a ring, rollback by mark, by boundaries and by capsule."""
from __future__ import annotations

from _capsules import failing
from _capsules import Session
from _capsules import small_store
from _capsules import SPECS
import pytest
import torch

from flashrt_core.capsule import CapsuleStore
from flashrt_core.capsule import Mark
from flashrt_core.errors import ConfigError
from flashrt_core.errors import MarkDead
from flashrt_core.errors import SessionPoisoned
from flashrt_core.runtime import Backend

POLICY = tuple(spec for spec in SPECS if not spec.name.startswith('kv'))


def ticks(session: Session, store: CapsuleStore, count: int) -> list[tuple[Mark, dict]]:
    """Run ticks and mark after each, as a session does; give each mark with its image."""
    found = []
    for _ in range(count):
        session.step(100 + session.tick)
        found.append((store.mark(session.boundary), session.image()))
    return found


def test_rollback_to_a_mark_is_byte_exact(backend: Backend) -> None:
    session, store = Session(backend, specs=POLICY), small_store(backend)
    line = ticks(session, store, 4)
    mark, image = line[1]
    report = store.rollback(session.boundary, mark)
    assert session.image() == image
    assert (report.source, report.position, session.tick) == ('mark', 2, 2)
    assert report.bytes == session.buffers.arena.shape[1]


def test_rollback_by_boundaries_counts_committed_boundaries(backend: Backend) -> None:
    session, store = Session(backend, specs=POLICY), small_store(backend)
    line = ticks(session, store, 6)
    store.rollback(session.boundary, boundaries=2)
    assert session.image() == line[3][1] and session.tick == 4
    store.rollback(session.boundary, boundaries=1)
    assert session.image() == line[2][1] and session.tick == 3
    ticks(session, store, 1)
    store.rollback(session.boundary, boundaries=1)
    assert session.image() == line[2][1]


def test_two_marks_of_one_boundary_count_as_one(backend: Backend) -> None:
    session, store = Session(backend, specs=POLICY), small_store(backend)
    line = ticks(session, store, 2)
    store.mark(session.boundary)
    ticks(session, store, 1)
    store.rollback(session.boundary, boundaries=2)
    assert session.image() == line[0][1] and session.tick == 1


def test_rollback_reaches_the_restored_capsule_and_not_beyond(backend: Backend) -> None:
    session, store = Session(backend, specs=POLICY), small_store(backend)
    store.prepare(session.boundary)
    session.fill(1)
    start = session.image()
    store.snapshot(session.boundary, 'C0')
    ticks(session, store, 5)
    store.restore(session.boundary, 'C0')
    ticks(session, store, 2)
    with pytest.raises(MarkDead, match='2 marks are held since the last restore'):
        store.rollback(session.boundary, boundaries=3)
    store.rollback(session.boundary, boundaries=2)
    assert session.image() == start


def test_marks_undone_by_a_rollback_are_dead(backend: Backend) -> None:
    session, store = Session(backend, specs=POLICY), small_store(backend)
    line = ticks(session, store, 3)
    store.rollback(session.boundary, line[0][0])
    with pytest.raises(MarkDead, match='a rollback to position 1 undid it'):
        store.rollback(session.boundary, line[2][0])
    assert session.image() == line[0][1]


def test_the_ring_is_bounded_and_the_oldest_mark_dies(backend: Backend) -> None:
    session, store = Session(backend, specs=POLICY), small_store(backend)
    store.prepare(session.boundary, marks=3)
    line = ticks(session, store, 5)
    with pytest.raises(MarkDead, match='holds 3 marks'):
        store.rollback(session.boundary, line[1][0])
    store.rollback(session.boundary, line[2][0])
    assert session.image() == line[2][1]


def test_a_mark_above_rewritten_kv_is_dead_and_one_below_lives(backend: Backend) -> None:
    session, store = Session(backend), small_store(backend)
    marks = []
    for length in (10, 20, 30):
        session.length, session.tick = length, length
        marks.append(store.mark(session.boundary))
    session.boundary.note_kv_rewrite(20)
    with pytest.raises(MarkDead, match='KV from token 20 on was rewritten'):
        store.rollback(session.boundary, marks[2])
    assert [mark.dead for mark in marks[:2]] == ['', '']
    store.rollback(session.boundary, marks[1])
    assert session.length == 20


def test_a_mark_leaves_kv_alone_and_brings_the_small_state_back(backend: Backend) -> None:
    session, store = Session(backend), small_store(backend)
    session.length = 40
    session.fill(1)
    mark, image = store.mark(session.boundary), session.image()
    for name in ('seed', 'tick', 'recurrent', 'queue', 'branch'):
        session.buffers[name].tensor.zero_()
    session.buffers['kv.0'].tensor[:, 40:].zero_()
    session.length = 50
    store.rollback(session.boundary, mark)
    assert session.image() == image


def test_a_restore_kills_marks_with_kv_but_not_those_without(backend: Backend) -> None:
    with_kv, policy = Session(backend, name='a'), Session(backend, specs=POLICY, name='b')
    store = small_store(backend)
    for session in (with_kv, policy):
        store.snapshot(session.boundary, 'C0')
        session.step(5)
    dead, alive = store.mark(with_kv.boundary), store.mark(policy.boundary)
    image = policy.image()
    for session in (with_kv, policy):
        store.restore(session.boundary, 'C0')
    with pytest.raises(MarkDead, match='KV from token 0'):
        store.rollback(with_kv.boundary, dead)
    store.rollback(policy.boundary, alive)
    assert policy.image() == image


def test_a_restore_that_fails_half_way_kills_the_marks_whose_kv_it_may_have_rewritten(
        backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    session, store = Session(backend), small_store(backend)
    store.snapshot(session.boundary, 'C0')
    mark = store.mark(session.boundary)
    with monkeypatch.context() as patch:
        patch.setattr(store._tiers.mover, 'device', failing(0, RuntimeError('bus fault')))
        with pytest.raises(SessionPoisoned, match='bus fault'):
            store.restore(session.boundary, 'C0')
    assert mark.dead == 'KV from token 0 on was rewritten'
    session.boundary.poisoned = None
    with pytest.raises(MarkDead, match='KV from token 0'):
        store.rollback(session.boundary, mark)


def test_rollback_to_an_id_restores_the_capsule(backend: Backend) -> None:
    session, store = Session(backend), small_store(backend)
    session.fill(1)
    image = session.image()
    store.snapshot(session.boundary, 'C0')
    session.step(2)
    assert store.rollback(session.boundary, 'C0').source == 'gpu'
    assert session.image() == image


def test_marks_keep_lineage_and_exactness(backend: Backend) -> None:
    session, store = Session(backend, specs=POLICY), small_store(backend)
    store.snapshot(session.boundary, 'C0')
    store.restore(session.boundary, 'C0')
    session.step(1)
    mark = store.mark(session.boundary)
    session.boundary.adopt('other', False)
    store.rollback(session.boundary, mark)
    info = store.snapshot(session.boundary, 'C1')
    assert (info.parent, info.bit_exact) == ('C0', True)


def test_taking_marks_moves_nothing_and_reuses_the_same_slots(backend: Backend) -> None:
    session, store = Session(backend, specs=POLICY), small_store(backend)
    store.prepare(session.boundary, marks=4)
    ring = session.boundary.ring
    assert ring is not None
    before = [[view.data_ptr() for view in slot] for slot in ring._saved]
    ticks(session, store, 50)
    assert session.boundary.ring is ring
    assert [[view.data_ptr() for view in slot] for slot in ring._saved] == before
    assert len(ring.marks) == 4 and len({mark.slot for mark in ring.marks}) == 4


def test_wrong_rollback_requests_are_refused(backend: Backend) -> None:
    session, store = Session(backend, specs=POLICY), small_store(backend)
    with pytest.raises(MarkDead, match='no marks'):
        store.rollback(session.boundary, boundaries=1)
    line = ticks(session, store, 2)
    with pytest.raises(ConfigError, match='exactly one'):
        store.rollback(session.boundary)
    with pytest.raises(ConfigError, match='exactly one'):
        store.rollback(session.boundary, line[0][0], boundaries=1)
    for count in (0, -1, 9):
        with pytest.raises(MarkDead, match='cannot go back'):
            store.rollback(session.boundary, boundaries=count)
    with pytest.raises(ConfigError, match='ring'):
        store.prepare(session.boundary, marks=0)
    other = Session(backend, specs=POLICY)
    foreign = ticks(other, store, 1)[0][0]
    with pytest.raises(MarkDead, match='another session'):
        store.rollback(session.boundary, foreign)
    assert session.image() == line[1][1]


def test_a_rollback_that_fails_half_way_poisons(
        backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    session, store = Session(backend, specs=POLICY), small_store(backend)
    store.snapshot(session.boundary, 'C0')
    line = ticks(session, store, 2)
    assert session.boundary.ring is not None
    with monkeypatch.context() as patch:
        patch.setattr(session.boundary.ring, '_live', [torch.zeros(3)])
        with pytest.raises(SessionPoisoned, match='rollback to mark-1'):
            store.rollback(session.boundary, line[0][0])
    with pytest.raises(SessionPoisoned):
        store.rollback(session.boundary, line[0][0])
    store.restore(session.boundary, 'C0')
    session.boundary.check_usable()
