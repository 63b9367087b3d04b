"""Pins, budgets, tiers, names and proofs of the capsule store."""
from __future__ import annotations

from _capsules import MIB
from _capsules import PAGE
from _capsules import Session
from _capsules import small_store
from _capsules import SPECS
from _capsules import state_pages
import pytest
import torch

from flashrt_core.capsule import Continuation
from flashrt_core.capsule.pages import PagePool
from flashrt_core.errors import BudgetFull
from flashrt_core.errors import CapsuleCorrupt
from flashrt_core.errors import CapsuleError
from flashrt_core.errors import CapsuleExists
from flashrt_core.errors import CapsuleIdInvalid
from flashrt_core.errors import CapsuleNotFound
from flashrt_core.errors import ConfigError
from flashrt_core.errors import SessionPoisoned
from flashrt_core.errors import TierUnavailable
from flashrt_core.runtime import Backend

TIERS = ('gpu', 'host')


def test_a_pin_is_never_evicted_and_a_full_budget_says_the_numbers(backend: Backend) -> None:
    session = Session(backend)
    room = 3 * state_pages(session) * PAGE
    store = small_store(backend, gpu=room, host=0)
    for name in 'abc':
        store.snapshot(session.boundary, name, pin=True)
    with pytest.raises(BudgetFull, match=rf'budget {room}, pinned {room}.*unpin or drop') as full:
        store.snapshot(session.boundary, 'd')
    assert full.value.code == 'budget_full'
    assert [info.id for info in store.list()] == ['c', 'b', 'a']
    store.pin('b', False)
    store.snapshot(session.boundary, 'd')
    assert {info.id for info in store.list()} == {'a', 'c', 'd'}
    assert store.counters['refused:budget_full'] == 1


def test_a_capsule_larger_than_the_budget_evicts_nobody(backend: Backend) -> None:
    session = Session(backend)
    store = small_store(backend, gpu=state_pages(session) * PAGE, host=0)
    session.length = 1
    store.snapshot(session.boundary, 'small')
    big = Session(backend, rows=1, specs=(*SPECS, *(
        type(SPECS[3])(f'more.{i}', SPECS[3].role, torch.float32, (MIB // 4,), kind=SPECS[3].kind)
        for i in range(2))))
    with pytest.raises(BudgetFull):
        store.snapshot(big.boundary, 'big')
    assert [info.id for info in store.list()] == ['small']


def test_the_least_recently_used_goes_down_then_out_and_says_why(backend: Backend) -> None:
    session = Session(backend)
    pages = state_pages(session) * PAGE
    store = small_store(backend, gpu=2 * pages, host=pages)
    images = {}
    for number, name in enumerate('abcd'):
        session.fill(number)
        images[name] = session.image()
        store.snapshot(session.boundary, name)
    assert {info.id: info.tier for info in store.list()} == {'b': 'host', 'c': 'gpu', 'd': 'gpu'}
    with pytest.raises(CapsuleNotFound, match='it went: least recently used in the host tier'):
        store.restore(session.boundary, 'a')
    reasons = [(event.kind, event.id) for event in store.events]
    assert reasons[:3] == [('evicted', 'a'), ('dropped', 'a'), ('evicted', 'b')]
    for name in 'bcd':
        store.restore(session.boundary, name)
        assert session.image() == images[name]


def test_use_by_restore_protects_from_eviction(backend: Backend) -> None:
    session = Session(backend)
    store = small_store(backend, gpu=2 * state_pages(session) * PAGE, host=0)
    store.snapshot(session.boundary, 'a')
    store.snapshot(session.boundary, 'b')
    store.restore(session.boundary, 'a')
    store.snapshot(session.boundary, 'c')
    assert {info.id for info in store.list()} == {'a', 'c'}


def test_a_second_visit_finds_the_capsule_in_a_faster_tier(backend: Backend) -> None:
    session, store = Session(backend), small_store(backend)
    session.fill(1)
    before = session.image()
    store.snapshot(session.boundary, 'C0', tier='host')
    session.fill(2)
    assert store.restore(session.boundary, 'C0').source == 'host'
    assert store.get('C0').tier == 'gpu' and store.usage()['host'].used_bytes == 0
    session.fill(3)
    assert store.restore(session.boundary, 'C0').source == 'gpu'
    assert session.image() == before
    assert store.counters['promoted'] == 1


def test_a_capsule_survives_every_tier_move_byte_for_byte(backend: Backend) -> None:
    session, store = Session(backend), small_store(backend)
    session.length = 41
    session.fill(1)
    before = session.image()
    store.snapshot(session.boundary, 'C0')
    digest = store.digest('C0')
    for tier in ('host', 'gpu', 'host', 'host', 'gpu'):
        assert store.move('C0', tier).tier == tier
        assert store.digest('C0') == digest
    session.fill(2)
    store.restore(session.boundary, 'C0')
    assert session.image() == before


def test_capsules_in_scattered_pages_are_exact(backend: Backend) -> None:
    session = Session(backend)
    pages = state_pages(session)
    store = small_store(backend, gpu=(pages + 2) * PAGE, host=0)
    session.length = 3
    assert state_pages(session) < pages
    for name in ('hole-1', 'keep-1', 'hole-2', 'keep-2', 'hole-3'):
        store.snapshot(session.boundary, name, pin=name.startswith('keep'))
    for name in ('hole-1', 'hole-2', 'hole-3'):
        store.drop(name)
    session.length = 96
    session.fill(5)
    before = session.image()
    store.snapshot(session.boundary, 'scattered')
    place = store._ledger.find('', 'scattered').place
    assert place is not None and len(place.runs) > 1
    session.fill(6)
    store.restore(session.boundary, 'scattered')
    assert session.image() == before


def test_folded_tiers_are_one_arena(backend: Backend) -> None:
    session, store = Session(backend), small_store(backend, gpu=MIB, host=MIB, fold=True)
    session.fill(1)
    before = session.image()
    assert store.snapshot(session.boundary, 'C0', tier='host').tier == 'gpu'
    assert store.usage()['gpu'].budget_bytes == 2 * MIB
    assert store.usage()['host'].budget_bytes == 0
    session.fill(2)
    store.restore(session.boundary, 'C0', proof='digest')
    assert session.image() == before


def test_unknown_tiers_and_tiers_without_budget_are_refused(backend: Backend) -> None:
    session, store = Session(backend), small_store(backend, host=0)
    for tier, text in (('tape', 'does not exist'), ('host', 'host_bytes'), ('disk', 'allow_disk')):
        with pytest.raises(TierUnavailable, match=text):
            store.snapshot(session.boundary, 'C0', tier=tier)
    assert store.list() == []


@pytest.mark.parametrize('name', [
    '', '.', '..', '.hidden', 'a/b', '../up', '/etc/passwd', 'a b', 'a\n', 'ü', 'a' * 65, 'a\x00',
    'a\\b', '~', 'a:b', 'a@b', '%2e', '-'.ljust(65, 'x'), None, 7, b'C0', ['C0']])
def test_ids_that_could_be_paths_are_refused(backend: Backend, name: object) -> None:
    session, store = Session(backend), small_store(backend)
    if name is not None:
        with pytest.raises(CapsuleIdInvalid, match='1 to 64'):
            store.snapshot(session.boundary, name)  # type: ignore[arg-type]
    for verb in (store.get, store.drop, store.prefetch):
        with pytest.raises(CapsuleIdInvalid):
            verb(name)  # type: ignore[arg-type]
    assert store.list() == []


def test_an_id_is_used_once_and_a_missing_one_lists_those_held(backend: Backend) -> None:
    session, store = Session(backend), small_store(backend)
    store.snapshot(session.boundary, 'C0')
    with pytest.raises(CapsuleExists, match='C0'):
        store.snapshot(session.boundary, 'C0')
    with pytest.raises(CapsuleNotFound, match=r"no capsule 'C1'.*held are C0"):
        store.restore(session.boundary, 'C1')
    assert store.snapshot(session.boundary).id == 'c000001'
    assert store.counters['refused:capsule_not_found'] == 1


def test_sessions_of_one_store_have_their_own_ids(backend: Backend) -> None:
    store = small_store(backend)
    one, two = Session(backend, name='executor'), Session(backend, name='planner')
    one.fill(1)
    two.fill(2)
    for session in (one, two):
        store.snapshot(session.boundary, 'C0')
    first, second = one.image(), two.image()
    one.fill(3)
    two.fill(4)
    store.restore(two.boundary, 'C0')
    store.restore(one.boundary, 'C0')
    assert (one.image(), two.image()) == (first, second)
    assert [info.session for info in store.list(session='planner')] == ['planner']
    store.restore(one.boundary, 'C0', session='planner')
    assert one.image() == second


def test_a_dropped_capsule_is_gone_and_a_pinned_one_is_not_dropped(backend: Backend) -> None:
    session, store = Session(backend), small_store(backend)
    store.snapshot(session.boundary, 'C0', pin=True)
    with pytest.raises(CapsuleError, match='unpin it'):
        store.drop('C0')
    store.pin('C0', False)
    store.drop('C0')
    assert store.usage()['gpu'].used_bytes == 0
    with pytest.raises(CapsuleNotFound, match='dropped on request'):
        store.restore(session.boundary, 'C0')


def test_pages_in_use_by_a_copy_are_not_reused(backend: Backend) -> None:
    session, store = Session(backend), small_store(backend)
    store.snapshot(session.boundary, 'C0')
    capsule = store._ledger.find('', 'C0')
    with store._tiers.leased(capsule):
        store.drop('C0')
        assert store.usage()['gpu'].used_bytes > 0
    assert store.usage()['gpu'].used_bytes == 0


@pytest.mark.parametrize('label', ['a\nb', 'x' * 257, 7, '\x1b[31m'])
def test_labels_are_one_printable_line(backend: Backend, label: object) -> None:
    session, store = Session(backend), small_store(backend)
    with pytest.raises(ConfigError, match='label'):
        store.snapshot(session.boundary, 'C0', label=label)  # type: ignore[arg-type]


def test_digest_proof_passes_and_notices_a_lost_copy(
        backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    session, store = Session(backend), small_store(backend)
    session.fill(1)
    for tier in TIERS:
        store.snapshot(session.boundary, tier, tier=tier)
    store.restore(session.boundary, 'gpu', proof='digest')
    store.restore(session.boundary, 'host', proof='digest')
    session.fill(2)
    monkeypatch.setattr(store._tiers.mover, 'device', lambda *copies: None)
    with pytest.raises(SessionPoisoned, match='does not hash'):
        store.restore(session.boundary, 'gpu', proof='digest')
    with pytest.raises(ConfigError, match='proof'):
        store.restore(session.boundary, 'gpu', proof='maybe')  # type: ignore[arg-type]


def test_replay_proof_runs_a_recorded_continuation_and_comes_back(backend: Backend) -> None:
    session, store = Session(backend), small_store(backend)
    session.fill(1)
    before = session.image()
    store.snapshot(session.boundary, 'C0')

    def run() -> bytes:
        session.buffers['queue'].tensor.mul_(0).add_(session.buffers['tick'].tensor[0])
        return session.image()['queue']

    expected = run()
    session.fill(2)
    store.restore(session.boundary, 'C0', proof='replay', continuation=Continuation(run, expected))
    assert session.image() == before
    with pytest.raises(CapsuleCorrupt, match='other bytes'):
        store.restore(session.boundary, 'C0', proof='replay',
                      continuation=Continuation(run, b'else'))
    with pytest.raises(ConfigError):
        store.restore(session.boundary, 'C0', proof='replay')


def test_a_capsule_takes_the_smallest_run_of_free_pages_that_holds_it() -> None:
    pool = PagePool(16, PAGE)
    first, _, third, _ = (pool.take(pages) for pages in (4, 1, 2, 1))
    assert first and third
    pool.give(first)
    pool.give(third)
    assert pool.take(2) == third and pool.take(3) == [(0, 3)]
    assert pool.take(8) == [(8, 8)] and pool.take(1) == [(3, 1)] and pool.take(1) is None
