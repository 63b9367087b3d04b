"""Transfers: copies prepared once a packing; what the host does while the device copies."""
from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

from _capsules import IDENTITY
from _capsules import KV
from _capsules import Session
from _capsules import small_store
import numpy as np
import pytest
import torch

from flashrt_core.capsule import Boundary
from flashrt_core.capsule import Stages
from flashrt_core.capsule import store as store_module
from flashrt_core.capsule import transfers
from flashrt_core.capsule.boundary import Piece
from flashrt_core.capsule.transfers import CAPACITY
from flashrt_core.capsule.transfers import Copies
from flashrt_core.capsule.transfers import match
from flashrt_core.capsule.transfers import Way
from flashrt_core.errors import CapsuleError
from flashrt_core.errors import SessionPoisoned
from flashrt_core.kernels import copy
from flashrt_core.kernels.copy import PIECE
from flashrt_core.runtime import Backend
from flashrt_core.runtime import cpu_backend
from flashrt_core.runtime import Lane

PIECES = (
    Piece(0, 1 << 32, 4096, 700, True),
    Piece(768, 2 << 32, 2 * PIECE, 2 * PIECE + 70, False),
    Piece(2 * PIECE + 1024, (2 << 32) + 4 * PIECE, 512, 256, False),
    Piece(2 * PIECE + 1280, (2 << 32) + 4 * PIECE + 256, 512, 256, False),
)
ONE_RUN = [(0, 3 << 32, 4 * PIECE)]
TWO_RUNS = [(0, 3 << 32, PIECE), (PIECE, 7 << 32, 3 * PIECE)]


class Late:
    """A device on the cpu whose copies are done when they are waited for, not before."""

    def __init__(self, store: Any, patch: pytest.MonkeyPatch) -> None:
        self.pending: list[tuple[int, int, int]] = []
        self.waits = 0
        self.at_wait: Any = lambda: None
        self.takes = 1 << 20  # ranges, until it refuses
        mover, table = store._tiers.mover, store._tiers.mover._table
        patch.setattr(table, 'submit', lambda stream: self._take(table._table.rows.tolist()))
        patch.setattr(mover, '_cuda', True)
        patch.setattr(mover, '_stream', SimpleNamespace(cuda_stream=0))
        patch.setattr(mover, '_submit_host', lambda ranges, stream: self._take(ranges))
        patch.setattr(transfers, 'wait_for', self._wait)

    def _take(self, ranges: list[tuple[int, int, int]]) -> None:
        for each in ranges:
            if not self.takes:
                raise CapsuleError('the driver refused a copy (planted)')
            self.takes -= 1
            self.pending.append(each)

    def _wait(self, event: Any, nbytes: int) -> None:
        self.at_wait()
        for source, target, size in self.pending:
            ctypes.memmove(target, source, size)
        self.pending.clear()
        self.waits += 1


class Endless:
    """An event of work that the device never ends."""

    def record(self, stream: Any) -> None:
        pass

    def query(self) -> bool:
        return False

    def wait(self, timeout_s: float, expected_s: float = 0.0) -> bool:
        return False


def hang(store: Any, patch: pytest.MonkeyPatch) -> None:
    """Have no copy of a store end from now on."""
    mover = store._tiers.mover
    patch.setattr(mover, '_cuda', True)
    patch.setattr(mover, '_stream', SimpleNamespace(cuda_stream=0))
    patch.setattr(mover, '_submit_host', lambda ranges, stream: None)
    for holder, name in ((mover, '_host_event'), (mover, '_device_event'),
                         (mover._table._table, '_event')):
        patch.setattr(holder, name, Endless())


@pytest.mark.parametrize('row', [0, 3])
@pytest.mark.parametrize('segments', [ONE_RUN, TWO_RUNS], ids=['one run', 'two runs'])
def test_a_way_gives_the_copies_that_matching_each_piece_gives(
    segments: list[tuple[int, int, int]], row: int
) -> None:
    way, plain = Way(PIECES, row), Copies(match(PIECES, segments, row))
    for mine, other in ((way.down(segments), plain), (way.up(segments), plain.reversed())):
        assert mine.nbytes == other.nbytes == sum(piece.nbytes for piece in PIECES)
        assert mine.joined == other.joined
        assert len(mine.parts) == len(other.parts)
        for part, same in zip(mine.parts, other.parts):
            assert np.array_equal(part.rows, same.rows)


def test_neighbours_are_joined_for_dma_however_they_were_cut() -> None:
    copies = Copies(np.array([(100, 900, PIECE + 5), (105 + PIECE, 905 + PIECE, 7), (8, 9, 0)]))
    assert len(copies.parts[0].rows) == 3
    assert copies.joined == [(100, 900, PIECE + 12)]
    assert copies.moved(10, 20).joined == [(110, 920, PIECE + 12)]
    assert copies.reversed().joined == [(900, 100, PIECE + 12)]


def test_many_copies_go_in_parts_that_the_table_holds_and_none_is_lost() -> None:
    sizes = np.random.default_rng(1).integers(1, 40 * PIECE, 900)
    begins = np.cumsum(sizes + 64) - sizes
    ranges = np.stack([begins, begins + (1 << 45), sizes], axis=1)
    copies = Copies(ranges)
    assert len(copies.parts) > 2 and max(len(part.rows) for part in copies.parts) <= CAPACITY
    assert copies.joined == [tuple(row) for row in ranges.tolist()]
    assert copies.moved(8, 16).joined == [tuple(row) for row in (ranges + (8, 16, 0)).tolist()]


def test_a_snapshot_is_described_while_its_bytes_move_and_listed_once_they_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = cpu_backend()
    session, store = Session(backend), small_store(backend)
    session.fill(1)
    image, late, told = session.image(), Late(store, monkeypatch), []
    monkeypatch.setattr(store_module, 'utc_now', lambda: told.append(len(late.pending)) or 'now')
    late.at_wait = lambda: told.append(store.list())
    assert store.snapshot(session.boundary, 'a').created == 'now'
    copies = told[0]
    assert copies > 0 and told[1:] == [[]]
    assert [info.id for info in store.list()] == ['a'] and late.waits == 1
    session.fill(2)
    session.boundary.on_restore.append(lambda *_: told.append(session.image() == image))
    late.at_wait = lambda: None
    store.restore(session.boundary, 'a')
    assert told[2:] == [True] and session.image() == image


def test_pages_of_a_snapshot_that_cannot_be_described_go_back_after_its_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = cpu_backend()
    session, store = Session(backend), small_store(backend)
    late, free = Late(store, monkeypatch), []
    late.at_wait = lambda: free.append(store.usage()['gpu'].used_bytes)

    def fails() -> str:
        raise OSError('no clock')

    with monkeypatch.context() as patch:
        patch.setattr(store_module, 'utc_now', fails)
        with pytest.raises(OSError, match='no clock'):
            store.snapshot(session.boundary, 'a')
    assert late.waits == 1 and free[0] > 0
    assert store.usage()['gpu'].used_bytes == 0 and store.list() == []
    store.snapshot(session.boundary, 'a')


def test_a_snapshot_in_several_runs_of_pages_comes_back_byte_for_byte(backend: Backend) -> None:
    session, store = Session(backend), small_store(backend, gpu=4 << 20)
    session.length, free = 8, []
    session.fill(0)
    count = 0
    while store.usage()['gpu'].used_bytes < store.usage()['gpu'].budget_bytes:
        store.snapshot(session.boundary, f'{count}', pin=True)
        count += 1
    for number in range(0, count, 2):
        store.pin(f'{number}', False)
        store.drop(f'{number}')
        free.append(number)
    session.length = 96
    session.fill(3)
    image = session.image()
    store.snapshot(session.boundary, 'wide')
    assert len(free) > 2 and len(store._ledger.find('', 'wide').place.runs) > 1
    for _ in range(2):
        session.fill(4)
        store.restore(session.boundary, 'wide')
        assert session.image() == image


def test_kv_buffers_of_different_lengths_come_back_each_at_its_own(backend: Backend) -> None:
    session, store = Session(backend), small_store(backend)
    lengths: dict[str, int] = {}
    boundary = Boundary(session.buffers, IDENTITY, lambda: lengths)
    images = {}
    for first, second in ((50, 3), (50, 60), (3, 50), (50, 3)):
        lengths.update(zip(KV, (first, second)))
        session.fill(len(images))
        name = store.snapshot(boundary, pin=True).id
        images[name] = (first, second), {
            kv: session.buffers[kv].row(0)[:lengths[kv]].clone() for kv in KV}
    for name, ((first, second), image) in images.items():
        session.fill(9)
        after = {kv: session.buffers[kv].row(0).clone() for kv in KV}
        store.restore(boundary, name)
        for kv, length in zip(KV, (first, second)):
            live = session.buffers[kv].row(0)
            assert live[:length].view(torch.uint8).equal(image[kv].view(torch.uint8))
            assert live[length:].view(torch.uint8).equal(after[kv][length:].view(torch.uint8))


@pytest.mark.parametrize('tier', ['gpu', 'host'])
def test_what_was_submitted_before_a_refusal_has_ended_when_its_pages_go_back(
    tier: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfers, 'CAPACITY', 24)
    for module in (transfers, copy):
        monkeypatch.setattr(module, 'PIECE', 4096)
    backend = cpu_backend()
    session, store = Session(backend), small_store(backend)
    late, used = Late(store, monkeypatch), []
    late.takes, late.at_wait = 2, lambda: used.append(store.usage()[tier].used_bytes)
    with pytest.raises(CapsuleError, match='planted'):
        store.snapshot(session.boundary, 'a', tier=tier)
    assert used and used[0] > 0 and late.pending == []
    assert store.usage()[tier].used_bytes == 0 and store.list() == []


@pytest.mark.parametrize('tier', ['gpu', 'host'])
def test_pages_that_a_hung_device_may_still_write_to_are_given_to_nobody(
    tier: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = cpu_backend()
    session, store = Session(backend), small_store(backend)
    store.snapshot(session.boundary, 'a', tier=tier)
    other = {'gpu': 'host', 'host': 'gpu'}[tier]
    used = store.usage()[tier].used_bytes
    with monkeypatch.context() as patch:
        hang(store, patch)
        with pytest.raises(CapsuleError, match='did not finish'):
            store.snapshot(session.boundary, 'b', tier=tier)
        with pytest.raises(CapsuleError, match='did not finish'):
            store.move('a', other)
    assert store.usage()[tier].used_bytes == 2 * used
    assert store.usage()[other].used_bytes == used
    assert [(info.id, info.tier) for info in store.list()] == [('a', tier)]


def test_pages_that_a_hung_promotion_may_still_write_to_are_given_to_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = cpu_backend()
    session, store = Session(backend), small_store(backend)
    store.snapshot(session.boundary, 'a', tier='host')
    hang(store, monkeypatch)
    monkeypatch.setattr(store._tiers.mover, '_cuda', False)
    store.restore(session.boundary, 'a')
    assert store.counters['promotion_failed'] == 1
    assert store.usage()['gpu'].used_bytes == store.usage()['host'].used_bytes > 0


def test_pages_that_a_hung_arrival_may_still_write_to_are_given_to_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = cpu_backend()
    with Lane(backend, 'test') as lane:
        session, store = Session(backend, lane=lane), small_store(backend)
        boundary = session.boundary
        small = [entry.name for entry in boundary.entries if entry.name not in KV]
        boundary.stages = Stages(backend, [small, KV])
        lane.call(lambda: store.snapshot(boundary, 'a', tier='host')).result(10)
        for name in ('first', 'ended'):
            monkeypatch.setattr(boundary.stages, name, Endless())
        with pytest.raises(SessionPoisoned, match='did not finish'):
            lane.call(lambda: store.start_restore(boundary, 'a')).result(10)
        assert store.counters['settle_failed'] == 1
        assert store.usage()['gpu'].used_bytes == store.usage()['host'].used_bytes > 0
        store.drop('a')
        assert store.usage()['host'].used_bytes > 0, 'the device may still read them'


def test_a_refusal_of_a_lost_device_is_told_as_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost(Endless):
        def record(self, stream: Any) -> None:
            raise RuntimeError('an illegal memory access was encountered')

    backend = cpu_backend()
    session, store = Session(backend), small_store(backend)
    Late(store, monkeypatch).takes = 0
    monkeypatch.setattr(store._tiers.mover, '_host_event', Lost())
    with pytest.raises(CapsuleError, match='planted'):
        store.snapshot(session.boundary, 'a', tier='host')
    assert store.usage()['host'].used_bytes == 0
