"""Snapshot, restore, fork, identity and threads of the capsule store."""
from __future__ import annotations

from collections.abc import Callable
import threading

from _capsules import failing
from _capsules import KV
from _capsules import MIB
from _capsules import PAGE
from _capsules import Session
from _capsules import small_store
from _capsules import SPECS
from _capsules import state_pages
import pytest
import torch

from flashrt_core.capsule import CapsuleStore
from flashrt_core.capsule import Identity
from flashrt_core.errors import BoundaryIncomplete
from flashrt_core.errors import CapsuleCorrupt
from flashrt_core.errors import ConfigError
from flashrt_core.errors import FlashrtError
from flashrt_core.errors import IdentityMismatch
from flashrt_core.errors import LaneError
from flashrt_core.errors import NotAtBoundary
from flashrt_core.errors import SessionPoisoned
from flashrt_core.runtime import Backend
from flashrt_core.runtime import Graph
from flashrt_core.runtime import Lane
from flashrt_core.runtime import Plan

TIERS = ('gpu', 'host')


@pytest.mark.parametrize('tier', TIERS)
def test_restore_is_byte_exact(backend: Backend, tier: str) -> None:
    session, store = Session(backend), small_store(backend)
    session.fill(1)
    before = session.image()
    info = store.snapshot(session.boundary, 'C0', tier=tier, label='start')
    session.fill(2)
    assert session.image() != before
    report = store.restore(session.boundary, 'C0')
    assert session.image() == before
    assert info.size_bytes == report.bytes > 0
    assert (info.tier, info.label, report.bit_exact) == (tier, 'start', True)


@pytest.mark.parametrize('tier', TIERS)
@pytest.mark.parametrize('tokens', [0, 1, 37, 96])
def test_only_the_valid_extent_of_kv_is_kept(backend: Backend, tier: str, tokens: int) -> None:
    session, store = Session(backend), small_store(backend)
    session.length = tokens
    session.fill(1)
    before = session.image()
    info = store.snapshot(session.boundary, tier=tier)
    session.fill(2)
    beyond = session.buffers['kv.0'].tensor[0, tokens:].clone()
    store.restore(session.boundary, info.id)
    assert session.image() == before
    assert torch.equal(session.buffers['kv.0'].tensor[0, tokens:].view(torch.int16),
                       beyond.view(torch.int16))
    assert info.extents == dict.fromkeys(KV, tokens)


def test_a_thousand_restores_leave_every_address_unchanged(
        backend: Backend, stress: Callable[[int], int]) -> None:
    session, store = Session(backend), small_store(backend)
    session.fill(1)
    before, addresses = session.image(), session.buffers.addresses()
    for tier in TIERS:
        store.snapshot(session.boundary, tier, tier=tier)
    for turn in range(stress(1000)):
        session.buffers['tick'].tensor.fill_(turn)
        store.restore(session.boundary, TIERS[turn % 2])
    assert session.buffers.addresses() == addresses
    session.buffers.check_addresses()
    session.boundary.check_closed()
    assert session.image() == before


def test_a_capsule_is_unchanged_after_a_hundred_ticks(backend: Backend) -> None:
    session, store = Session(backend), small_store(backend)
    session.fill(1)
    for tier in TIERS:
        store.snapshot(session.boundary, tier, tier=tier)
    digests = {tier: store.digest(tier) for tier in TIERS}
    assert digests['gpu'] == digests['host']
    for turn in range(100):
        session.step(turn + 2)
        if turn % 10 == 0:
            store.snapshot(session.boundary, f't{turn}')
    assert {tier: store.digest(tier) for tier in TIERS} == digests


def test_one_bit_of_state_changes_the_digest(backend: Backend) -> None:
    session, store = Session(backend), small_store(backend)
    session.fill(1)
    store.snapshot(session.boundary, 'a')
    session.buffers['tick'].tensor.bitwise_xor_(1)
    store.snapshot(session.boundary, 'b')
    assert store.digest('a') != store.digest('b')


def test_taking_any_buffer_out_of_the_boundary_is_noticed(backend: Backend) -> None:
    session, store = Session(backend), small_store(backend)
    for buffer in session.buffers.state():
        boundary = session.boundary._without_for_tests(buffer.name)
        session.fill(1)
        before = session.image()
        store.snapshot(boundary, 'holed')
        session.fill(2)
        store.restore(boundary, 'holed')
        after = session.image()
        assert [name for name in before if before[name] != after[name]] == [buffer.name]
        store.drop('holed')


def test_a_failure_before_submission_leaves_the_session_untouched(
        backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    session, store = Session(backend), small_store(backend)
    session.fill(1)
    store.snapshot(session.boundary, 'C0')
    session.fill(2)
    before, parent = session.image(), session.boundary.parent

    def broken(*args: object, **kwargs: object) -> None:
        raise CapsuleCorrupt('staging failed')

    monkeypatch.setattr(store._live, '_copies', broken)
    with pytest.raises(CapsuleCorrupt):
        store.restore(session.boundary, 'C0')
    assert session.image() == before
    assert session.boundary.poisoned is None and session.boundary.parent == parent
    session.boundary.check_usable()


def test_a_failure_during_submission_poisons_until_a_restore_succeeds(
        backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend.name == 'cuda':
        pytest.skip('the fault is made with memmove')
    session, store = Session(backend), small_store(backend)
    session.fill(1)
    before = session.image()
    store.snapshot(session.boundary, 'C0')
    session.fill(2)
    with monkeypatch.context() as patch:
        patch.setattr(store._tiers.mover, 'device', failing(2, RuntimeError('bus fault')))
        with pytest.raises(SessionPoisoned, match='bus fault'):
            store.restore(session.boundary, 'C0')
    assert session.image() != before
    for refused in (session.boundary.check_usable,
                    lambda: store.snapshot(session.boundary, 'half'),
                    lambda: store.mark(session.boundary)):
        with pytest.raises(SessionPoisoned, match='restore any of its capsules'):
            refused()
    assert [info.id for info in store.list()] == ['C0']
    store.restore(session.boundary, 'C0')
    session.boundary.check_usable()
    assert session.image() == before


def test_a_hook_of_the_session_that_fails_poisons(backend: Backend) -> None:
    session, store = Session(backend), small_store(backend)
    store.snapshot(session.boundary, 'C0')

    def hook(*args: object) -> None:
        raise ValueError('mirror lost')

    session.boundary.on_restore.append(hook)
    with pytest.raises(SessionPoisoned, match='mirror lost'):
        store.restore(session.boundary, 'C0')
    assert session.boundary.poisoned


def test_a_failed_snapshot_gives_its_pages_and_name_back(
        backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    session, store = Session(backend), small_store(backend)
    used = store.usage()['gpu'].used_bytes
    with monkeypatch.context() as patch:
        patch.setattr(store._tiers.mover, 'device', failing(0, RuntimeError('no')))
        with pytest.raises(RuntimeError):
            store.snapshot(session.boundary, 'C0')
    assert store.usage()['gpu'].used_bytes == used
    store.snapshot(session.boundary, 'C0')


def test_fork_writes_several_rows_and_overrides_named_buffers(backend: Backend) -> None:
    session, store = Session(backend, rows=4), small_store(backend)
    session.fill(1)
    first = session.image(0)
    store.snapshot(session.boundary, 'C0')
    session.fill(2)
    last = session.image(3)
    store.restore(session.boundary, 'C0', rows=range(3),
                  overrides={'branch': range(3), 'seed': [7, 8, 9]})
    for row in range(3):
        image = session.image(row)
        assert {k: v for k, v in image.items() if k not in ('branch', 'seed')} == {
            k: v for k, v in first.items() if k not in ('branch', 'seed')}
        assert int(session.buffers['branch'].row(row)) == row
        assert int(session.buffers['seed'].row(row)) == 7 + row
    assert session.image(3) == last


def test_a_fork_that_leaves_row_zero_alone_keeps_its_lineage(backend: Backend) -> None:
    session, store = Session(backend, rows=2), small_store(backend)
    session.fill(1)
    store.snapshot(session.boundary, 'C0')
    session.fill(2)
    first = session.image(0)
    store.restore(session.boundary, 'C0', rows=(1,))
    assert session.image(0) == first and session.boundary.parent == ''


def test_a_branch_keeps_the_lineage_and_exactness_of_what_its_own_row_was_restored_from(
        backend: Backend) -> None:
    session, store = Session(backend, rows=3), small_store(backend)
    other = Session(backend, identity=Identity(
        dict(config='small', weights='0' * 64), {'torch': '9.9', 'arch': 'test'}))
    store.snapshot(other.boundary, 'foreign')
    store.snapshot(session.boundary, 'C0')
    store.restore(session.boundary, 'C0', rows=(0, 2))
    assert not store.restore(session.boundary, 'foreign', rows=(1,), numerics='any').bit_exact
    found = [store.snapshot(session.boundary, row=row) for row in range(3)]
    assert [info.parent for info in found] == ['C0', 'foreign', 'C0']
    assert [info.bit_exact for info in found] == [True, False, True]
    store.restore(session.boundary, 'C0', rows=(1,))
    assert store.snapshot(session.boundary, row=1).bit_exact


def test_a_branch_can_be_snapshotted_from_its_row(backend: Backend) -> None:
    session, store = Session(backend, rows=3), small_store(backend)
    session.fill(1)
    second = session.image(2)
    store.snapshot(session.boundary, 'branch-2', row=2)
    session.fill(2)
    store.restore(session.boundary, 'branch-2', rows=(0,))
    assert session.image(0) == second


@pytest.mark.parametrize('rows', [(), (0, 0), (-1,), (0, 4)])
def test_rows_that_do_not_exist_are_refused(backend: Backend, rows: tuple[int, ...]) -> None:
    session, store = Session(backend, rows=4), small_store(backend)
    store.snapshot(session.boundary, 'C0')
    with pytest.raises(BoundaryIncomplete, match='rows'):
        store.restore(session.boundary, 'C0', rows=rows)


@pytest.mark.parametrize('overrides', [
    {'unknown': [0]}, {'branch': [0, 1]}, {'scratch': [0]}, {'queue': [torch.zeros(3)]}])
def test_bad_overrides_are_refused_and_change_nothing(
        backend: Backend, overrides: dict[str, list[object]]) -> None:
    session, store = Session(backend), small_store(backend)
    store.snapshot(session.boundary, 'C0')
    session.fill(2)
    before = session.image()
    with pytest.raises(ConfigError, match='override'):
        store.restore(session.boundary, 'C0', overrides=overrides)
    assert session.image() == before


def test_lineage_is_the_last_restored_capsule(backend: Backend) -> None:
    session, store = Session(backend), small_store(backend)
    assert store.snapshot(session.boundary, 'root').parent == ''
    store.restore(session.boundary, 'root')
    assert store.snapshot(session.boundary, 'child').parent == 'root'
    assert store.snapshot(session.boundary, 'twin').parent == 'root'
    store.restore(session.boundary, 'child')
    assert store.snapshot(session.boundary, 'grandchild').parent == 'child'


def test_another_layout_is_refused_with_the_fields_that_differ(backend: Backend) -> None:
    mine, store = Session(backend), small_store(backend)
    other = Session(backend, identity=Identity({'config': 'large', 'weights': '0' * 64}, {}))
    store.snapshot(other.boundary, 'foreign')
    before = mine.image()
    for numerics in ('same', 'any'):
        with pytest.raises(IdentityMismatch, match=r"config: here 'small', capsule 'large"):
            store.restore(mine.boundary, 'foreign', numerics=numerics)
    assert mine.image() == before


def test_another_buffer_layout_is_refused_by_buffer_name(backend: Backend) -> None:
    mine, store = Session(backend), small_store(backend)
    other = Session(backend, specs=tuple(s for s in SPECS if s.name != 'queue'))
    store.snapshot(other.boundary, 'foreign')
    with pytest.raises(IdentityMismatch, match='queue'):
        store.restore(mine.boundary, 'foreign')


def test_other_numerics_need_any_and_are_never_bit_exact_again(backend: Backend) -> None:
    mine, store = Session(backend), small_store(backend)
    identity = Identity(dict(config='small', weights='0' * 64), {'torch': '9.9', 'arch': 'test'})
    other = Session(backend, identity=identity)
    other.fill(1)
    store.snapshot(other.boundary, 'foreign')
    with pytest.raises(IdentityMismatch, match=r"numerics\.torch: here '2\.x', capsule '9\.9'"):
        store.restore(mine.boundary, 'foreign')
    report = store.restore(mine.boundary, 'foreign', numerics='any')
    assert not report.bit_exact and mine.image() == other.image()
    child = store.snapshot(mine.boundary, 'child')
    assert not child.bit_exact
    assert not store.restore(mine.boundary, 'child').bit_exact
    assert not store.snapshot(mine.boundary, 'grandchild').bit_exact
    with pytest.raises(ConfigError, match='numerics'):
        store.restore(mine.boundary, 'child', numerics='close')


def test_verbs_run_on_the_lane_and_never_inside_a_plan(backend: Backend, lane: Lane) -> None:
    session, store = Session(backend, lane=lane), small_store(backend)
    graph = Graph('tick', lambda ports, key: ports['tick'].add_(1), ['tick'])
    graph.bind('tick', session.buffers['tick'])
    graph.capture((), lane)
    plan = Plan('tick')
    plan.add(graph, ())
    with pytest.raises(LaneError, match='lane thread'):
        store.snapshot(session.boundary, 'C0')
    lane.at_boundary(lambda: store.snapshot(session.boundary, 'C0')).result(10)
    at_rest = session.image()
    lane.run(plan).result(10)
    assert session.image() != at_rest
    lane.at_segment_end(lambda: store.restore(session.boundary, 'C0')).result(10)
    assert session.image() == at_rest
    lane._committed = False
    with pytest.raises(NotAtBoundary, match='not committed'):
        lane.call(lambda: store.snapshot(session.boundary, 'C1')).result(10)
    lane.call(lambda: store.restore(session.boundary, 'C0')).result(10)
    assert lane.committed
    lane.call(lambda: store.snapshot(session.boundary, 'C1')).result(10)


def test_many_threads_share_one_store(backend: Backend, stress: Callable[[int], int]) -> None:
    store = small_store(backend, gpu=2 * MIB, host=MIB)
    turns = stress(200)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with Lane(backend, f'w{number}') as lane:
                session = Session(backend, name=f's{number}', lane=lane)
                for turn in range(turns):
                    session.fill(number * 1000 + turn)
                    before = session.image()
                    lane.call(lambda: store.snapshot(session.boundary, 'x')).result(30)
                    session.fill(turn)
                    lane.call(lambda: store.restore(session.boundary, 'x')).result(30)
                    assert session.image() == before
                    store.drop('x', session=f's{number}')
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures
    assert store.usage()['gpu'].used_bytes == store.usage()['host'].used_bytes == 0


def test_mixed_cycles_at_a_full_budget_leak_no_page(
        backend: Backend, stress: Callable[[int], int]) -> None:
    session = Session(backend)
    pages = state_pages(session)
    store = small_store(backend, gpu=8 * pages * PAGE, host=4 * pages * PAGE)
    images: dict[str, dict[str, bytes]] = {}
    generator = torch.Generator().manual_seed(3)
    for turn in range(stress(3000)):
        choice = int(torch.randint(0, 10, (), generator=generator))
        held = {info.id for info in store.list()}
        images = {name: image for name, image in images.items() if name in held}
        if choice < 5 or not images:
            session.buffers['tick'].tensor.fill_(turn)
            session.length = 1 + turn % 96
            info = store.snapshot(session.boundary, tier=TIERS[choice % 2])
            images[info.id] = session.image()
        else:
            name = sorted(images)[choice % len(images)]
            if choice < 9:
                store.restore(session.boundary, name)
                assert session.image() == images[name]
            else:
                store.drop(name)
                del images[name]
    for info in store.list():
        store.drop(info.id)
    assert store.usage()['gpu'].used_bytes == store.usage()['host'].used_bytes == 0


@pytest.mark.gpu
def test_no_allocator_is_called_over_mixed_cycles_at_95_percent_of_the_budget(
        stress: Callable[[int], int]) -> None:
    from flashrt_core.runtime import cuda_backend
    backend = cuda_backend()
    with Lane(backend, 'alloc') as lane:
        session = Session(backend, lane=lane)
        pages = state_pages(session)
        store = CapsuleStore(backend, 21 * pages * PAGE, 4 * pages * PAGE, page_bytes=PAGE)

        def cycles(count: int) -> None:
            names = [f'k{number}' for number in range(20)]
            held: list[str] = []
            for turn in range(count):
                name = names[turn % 20]
                if name in held:
                    store.drop(name)
                    held.remove(name)
                store.snapshot(session.boundary, name)
                held.append(name)
                store.restore(session.boundary, held[turn % len(held)])
                store.mark(session.boundary)
            for name in held:
                store.drop(name)

        lane.call(lambda: cycles(60)).result(60)
        before = torch.cuda.memory_stats()
        lane.call(lambda: cycles(stress(10_000))).result(600)
        after = torch.cuda.memory_stats()
    for key in ('allocation.all.allocated', 'allocation.all.freed', 'num_device_alloc',
                'num_device_free', 'reserved_bytes.all.current'):
        assert after.get(key) == before.get(key), key


def test_every_refusal_is_of_the_error_tree(backend: Backend) -> None:
    session, store = Session(backend), small_store(backend)
    for bad in (lambda: store.get('nope'), lambda: store.move('nope', 'host'),
                lambda: store.pin('nope'), lambda: store.saved('nope'),
                lambda: store.restore(session.boundary, 'nope')):
        with pytest.raises(FlashrtError):
            bad()
    assert store.counters['refused:capsule_not_found'] == 5
