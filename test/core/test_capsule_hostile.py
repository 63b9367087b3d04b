"""Careless and hostile use of the store: every mistake is refused before anything is changed."""
from __future__ import annotations

from collections.abc import Callable
import random
import threading
from typing import Any
import weakref

from _capsules import failing
from _capsules import IDENTITY
from _capsules import MIB
from _capsules import PAGE
from _capsules import Session
from _capsules import small_store
from _capsules import state_pages
import numpy as np
import pytest
import torch

from flashrt_core.capsule import Boundary
from flashrt_core.capsule import CapsuleStore
from flashrt_core.capsule import Continuation
from flashrt_core.capsule import Identity
from flashrt_core.capsule import StoreEvent
from flashrt_core.errors import BoundaryIncomplete
from flashrt_core.errors import BudgetFull
from flashrt_core.errors import CapsuleError
from flashrt_core.errors import CapsuleIdInvalid
from flashrt_core.errors import ConfigError
from flashrt_core.errors import IdentityMismatch
from flashrt_core.errors import LaneTimeout
from flashrt_core.errors import SessionPoisoned
from flashrt_core.errors import TierUnavailable
from flashrt_core.runtime import cpu_backend
from flashrt_core.runtime import Lane
from flashrt_core.runtime import MemoryInfo
from flashrt_core.runtime.cpu import CpuBackend


@pytest.mark.parametrize('rows', [1, None, ['x'], [1.7], [[0]], 'ab', np.array([0.5])])
def test_rows_that_are_no_whole_numbers_are_refused(rows: Any) -> None:
    session, store = Session(cpu_backend(), rows=3), small_store(cpu_backend())
    store.snapshot(session.boundary, 'a')
    with pytest.raises(BoundaryIncomplete, match='rows'):
        store.restore(session.boundary, 'a', rows=rows)
    with pytest.raises(BoundaryIncomplete, match='rows'):
        store.snapshot(session.boundary, row='x')  # type: ignore[arg-type]


def test_rows_may_come_as_an_array() -> None:
    session, store = Session(cpu_backend(), rows=3), small_store(cpu_backend())
    store.snapshot(session.boundary, 'a')
    assert store.restore(session.boundary, 'a', rows=np.array([0, 2])).rows == (0, 2)


def refuse_override(name: str, value: Any) -> tuple[Session, CapsuleStore]:
    session, store = Session(cpu_backend()), small_store(cpu_backend())
    session.fill(1)
    store.snapshot(session.boundary, 'a')
    session.fill(2)
    before = session.image()
    with pytest.raises(ConfigError, match=name):
        store.restore(session.boundary, 'a', overrides={name: [value]})
    assert session.boundary.poisoned is None and session.image() == before
    return session, store


@pytest.mark.parametrize('value', [
    'x', None, [1, 2], 1.5, float('nan'), 2**63, -2**63 - 1, np.float32(2), np.zeros(3, np.int64),
    torch.zeros((), dtype=torch.int32),
])
def test_an_override_that_the_buffer_cannot_hold_is_refused_before_the_copy(value: Any) -> None:
    refuse_override('seed', value)


@pytest.mark.parametrize('value', [1e300, -1e300, 3.5e38, 10**400, 1j, np.complex64(1)])
def test_an_override_beyond_the_range_of_a_float_buffer_is_refused_before_the_copy(
        value: Any) -> None:
    session, store = refuse_override('queue', value)
    for fine in (float('inf'), float('nan'), np.float64(2.5), 7):
        store.restore(session.boundary, 'a', overrides={'queue': [fine]})


def test_a_promotion_that_breaks_gives_its_pages_back(monkeypatch: pytest.MonkeyPatch) -> None:
    session, store = Session(cpu_backend()), small_store(cpu_backend())
    store.snapshot(session.boundary, 'a', tier='host')
    monkeypatch.setattr(store._tiers.mover, 'device', failing(0, RuntimeError('no launch')))
    with pytest.raises(SessionPoisoned, match='no launch'):
        store.restore(session.boundary, 'a')
    assert store.usage()['gpu'].used_bytes == 0


def test_a_continuation_that_does_not_end_poisons() -> None:
    session, store = Session(cpu_backend()), small_store(cpu_backend())
    store.snapshot(session.boundary, 'a')

    def run() -> bytes:
        session.fill(2)
        raise RuntimeError('half of it ran')

    with pytest.raises(SessionPoisoned, match='half of it ran'):
        store.restore(session.boundary, 'a', proof='replay', continuation=Continuation(run, b''))
    with pytest.raises(SessionPoisoned):
        session.boundary.check_usable()


def test_a_look_at_a_buffer_that_is_not_there_names_those_that_are() -> None:
    session, store = Session(cpu_backend()), small_store(cpu_backend())
    store.snapshot(session.boundary, 'a')
    with pytest.raises(ConfigError, match=r"'none'.*'seed'"):
        store.peek(session.boundary, 'a', 'none')


def test_a_name_that_is_being_made_is_not_given_to_another() -> None:
    store = small_store(cpu_backend())
    with store._ledger.claim('', 'c000001'), store._ledger.claim('', None) as key:
        assert key == ('', 'c000002')


@pytest.mark.parametrize('values', [5, None, iter([1])])
def test_overrides_are_one_value_a_row(values: Any) -> None:
    session, store = Session(cpu_backend()), small_store(cpu_backend())
    store.snapshot(session.boundary, 'a')
    with pytest.raises(ConfigError, match='one value per row'):
        store.restore(session.boundary, 'a', overrides={'seed': values})


def test_an_override_may_be_an_array_or_a_numpy_number() -> None:
    session, store = Session(cpu_backend()), small_store(cpu_backend())
    store.snapshot(session.boundary, 'a')
    queue = np.arange(350, dtype=np.float32).reshape(50, 7)
    store.restore(session.boundary, 'a', overrides={'queue': [queue], 'seed': [np.int64(9)]})
    assert int(session.buffers['seed'].row(0)) == 9
    assert np.array_equal(session.buffers['queue'].row(0).numpy(), queue)


def test_a_listener_that_raises_is_counted_and_stops_no_verb() -> None:
    def listener(event: StoreEvent) -> None:
        raise ZeroDivisionError(event.kind)

    session = Session(cpu_backend())
    store = small_store(cpu_backend(), gpu=4 * PAGE, host=8 * PAGE, listener=listener)
    for name in ('a', 'b', 'c'):
        store.snapshot(session.boundary, name)
    with pytest.raises(CapsuleError, match='exists already'):
        store.snapshot(session.boundary, 'c')
    assert store.counters['evicted'] == store.counters['listener_failed'] - 1 > 0
    session.boundary.on_restore.append(lambda source, rows: {}['nothing'])
    with pytest.raises(SessionPoisoned):
        store.restore(session.boundary, 'c')
    assert session.boundary.poisoned


def test_names_that_are_no_names_are_refused() -> None:
    store = small_store(cpu_backend())
    for session in (['x'], None, '../x', 5):
        with pytest.raises(CapsuleIdInvalid, match='session name'):
            store.get('a', session=session)  # type: ignore[arg-type]
    with pytest.raises(TierUnavailable, match='vram'):
        store.list(tier='vram')


@pytest.mark.parametrize('request_', [
    {'to': 5}, {'boundaries': '2'}, {'boundaries': 1.0}, {'boundaries': 1, 'proof': 'always'},
    {'boundaries': 1, 'proof': 'replay'},
])
def test_a_rollback_of_the_wrong_types_is_refused(request_: dict) -> None:
    session, store = Session(cpu_backend()), small_store(cpu_backend())
    store.mark(session.boundary)
    session.step(1)
    with pytest.raises(ConfigError):
        store.rollback(session.boundary, **request_)
    assert session.boundary.poisoned is None


def test_a_digest_proof_of_a_rollback_notices_a_lost_copy(
        monkeypatch: pytest.MonkeyPatch) -> None:
    session, store = Session(cpu_backend()), small_store(cpu_backend())
    session.fill(1)
    mark = store.mark(session.boundary)
    session.step(2)
    assert store.rollback(session.boundary, mark, proof='digest').source == 'mark'
    session.step(3)
    assert session.boundary.ring is not None
    monkeypatch.setattr(session.boundary.ring, 'write_back', lambda mark: None)
    with pytest.raises(SessionPoisoned, match='does not equal mark'):
        store.rollback(session.boundary, mark, proof='digest')


@pytest.mark.parametrize('wrong', [
    {'gpu': 1e6}, {'gpu': '4'}, {'host': -1}, {'host': None}, {'page_bytes': 65536.0},
])
def test_budgets_are_whole_numbers(wrong: dict) -> None:
    sizes = {'gpu': MIB, 'host': MIB, 'page_bytes': PAGE, **wrong}
    with pytest.raises(ConfigError, match='whole number'):
        CapsuleStore(cpu_backend(), sizes['gpu'], sizes['host'], page_bytes=sizes['page_bytes'])


@pytest.mark.parametrize('integrated', [False, True])
def test_tiers_fold_where_the_device_shares_its_memory_with_the_host(integrated: bool) -> None:
    class Device(CpuBackend):
        name = 'cuda'

        def memory(self) -> MemoryInfo:
            return MemoryInfo(1 << 40, 1 << 40, integrated)

    usage = small_store(Device(), gpu=2 * MIB, host=3 * MIB).usage()
    found = (usage['gpu'].budget_bytes, usage['host'].budget_bytes)
    assert found == ((5 * MIB, 0) if integrated else (2 * MIB, 3 * MIB))


def test_a_wedged_lane_is_not_written_to() -> None:
    with Lane(cpu_backend(), 'test') as lane:
        session = Session(cpu_backend(), lane=lane)
        store = small_store(cpu_backend())
        lane.call(lambda: store.snapshot(session.boundary, 'a')).result(10)
        session.fill(1)
        before = session.image()
        lane._fail('wedged', LaneTimeout('a segment is still running'))
        for verb in (lambda: store.restore(session.boundary, 'a'),
                     lambda: store.snapshot(session.boundary, 'b'),
                     lambda: store.mark(session.boundary)):
            with pytest.raises(LaneTimeout, match='still running'):
                verb()
        assert session.image() == before


def test_a_move_that_another_copy_prevents_says_so() -> None:
    session, store = Session(cpu_backend()), small_store(cpu_backend())
    store.snapshot(session.boundary, 'a')
    with store._tiers.leased(store._ledger.find('', 'a')):
        with pytest.raises(CapsuleError, match='being copied'):
            store.move('a', 'host')
    assert store.get('a').tier == 'gpu'
    assert store.move('a', 'host').tier == 'host'


def test_a_second_restore_knows_other_numerics_as_well_as_the_first() -> None:
    session, store = Session(cpu_backend()), small_store(cpu_backend())
    layout = dict(IDENTITY.layout)
    other = Session(cpu_backend(), identity=Identity(layout, {'torch': '1.x'}))
    store.snapshot(other.boundary, 'a')
    assert store.restore(other.boundary, 'a', numerics='any').bit_exact
    for _ in range(2):
        assert not store.restore(session.boundary, 'a', numerics='any').bit_exact
    with pytest.raises(IdentityMismatch, match='numerics'):
        store.restore(session.boundary, 'a')


def test_a_look_by_another_session_meanwhile_lends_a_restore_no_exactness() -> None:
    session, store = Session(cpu_backend()), small_store(cpu_backend())
    other = Session(cpu_backend(), identity=Identity(dict(IDENTITY.layout), {'torch': '1.x'}))
    store.snapshot(session.boundary, 'a')
    capsule = store._ledger.find('', 'a')

    def read_while_the_other_looks() -> Boundary:
        capsule.fits = (weakref.ref(session.boundary), True)
        return other.boundary

    capsule.fits = (read_while_the_other_looks, False)  # type: ignore[assignment]
    assert not store.restore(other.boundary, 'a', numerics='any').bit_exact


def test_a_promoted_copy_holds_the_capsule_and_not_the_overrides() -> None:
    session, store = Session(cpu_backend(), rows=2), small_store(cpu_backend())
    session.fill(1)
    store.snapshot(session.boundary, 'a', tier='host')
    digest = store.digest('a')
    store.restore(session.boundary, 'a', rows=(0, 1), overrides={'seed': [7, 8]})
    assert store.get('a').tier == 'gpu' and store.digest('a') == digest


def test_a_capsule_in_use_is_no_room_for_another() -> None:
    session = Session(cpu_backend())
    store = small_store(cpu_backend(), gpu=state_pages(session) * PAGE, host=0)
    store.snapshot(session.boundary, 'a')
    found: list[BaseException] = []

    def another() -> None:
        try:
            store.snapshot(session.boundary, 'b')
        except CapsuleError as error:
            found.append(error)

    with store._tiers.leased(store._ledger.find('', 'a')):
        thread = threading.Thread(target=another, daemon=True)
        thread.start()
        thread.join(20)
        assert found and isinstance(found[0], BudgetFull) and 'try again' in str(found[0])
    assert [info.id for info in store.list()] == ['a']
    store.snapshot(session.boundary, 'b')


@pytest.mark.parametrize('tier', ['gpu', 'host', 'disk'])
def test_a_second_drop_that_comes_late_leaves_the_next_capsule_of_that_name_alone(
        tmp_path: Any, tier: str) -> None:
    backend = cpu_backend()
    session = Session(backend)
    store = small_store(backend, disk_bytes=8 * MIB, directory=tmp_path, allow_disk=True)

    def keep() -> None:
        store.snapshot(session.boundary, 'a', tier=tier)
        if tier == 'disk':
            store.saved('a').result(30)

    keep()
    found_by_two = store._ledger.find('', 'a')
    store.drop('a')
    keep()
    store._tiers.drop(found_by_two)
    assert store.get('a').tier == tier
    store.move('a', 'host')
    store.restore(session.boundary, 'a', proof='digest')
    store.drop('a')
    assert not list(tmp_path.glob('*.capsule'))
    assert all(store.usage()[each].used_bytes == 0 for each in ('gpu', 'host', 'disk'))
    store.close()


def test_threads_of_one_store_never_mix_contents_or_leak_a_page(
        tmp_path: Any, stress: Callable[[int], int]) -> None:
    """A lane thread snapshots and restores while others drop, move, pin, list and read."""
    backend = cpu_backend()
    session = Session(backend)
    store = small_store(backend, gpu=12 * PAGE, host=16 * PAGE, disk_bytes=8 * MIB,
                        directory=tmp_path, allow_disk=True)
    failures: list[BaseException] = []
    names = [f'n{at}' for at in range(6)]
    stop = threading.Event()
    verbs: list[Callable[[str], Any]] = [
        store.drop, lambda name: store.move(name, 'gpu'), lambda name: store.move(name, 'host'),
        lambda name: store.move(name, 'disk'), lambda name: store.pin(name, True),
        lambda name: store.pin(name, False), store.digest, store.prefetch,
        lambda name: store.list(), lambda name: store.usage(),
    ]

    def other(seed: int) -> None:
        draw = random.Random(seed)
        while not stop.is_set():
            try:
                draw.choice(verbs)(draw.choice(names))
            except CapsuleError:
                pass
            except BaseException as error:
                failures.append(error)
                return

    threads = [threading.Thread(target=other, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    draw, restored = random.Random(9), 0
    try:
        for turn in range(stress(2000)):
            at = draw.randrange(len(names))
            try:
                if turn % 3 == 0:
                    session.fill(at)
                    store.snapshot(session.boundary, names[at],
                                   tier=draw.choice(['gpu', 'host', 'disk']))
                else:
                    store.restore(session.boundary, names[at], proof='digest')
                    found = session.image()
                    session.fill(at)
                    assert session.image() == found, f'{names[at]} holds other bytes'
                    restored += 1
            except CapsuleError:
                assert session.boundary.poisoned is None
            if failures:
                break
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
    assert not failures, failures[0]
    assert restored > 0
    for name in names:
        try:
            store.pin(name, False)
            store.drop(name)
        except CapsuleError as error:
            assert 'no capsule' in str(error)
    store.close()
    for tier in ('gpu', 'host'):
        assert store.usage()[tier].used_bytes == 0
    assert list(tmp_path.iterdir()) == []
