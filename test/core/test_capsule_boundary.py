"""The boundary's closed list, its ranges, and what it refuses."""
from __future__ import annotations

from _capsules import IDENTITY
from _capsules import KV
from _capsules import Session
from _capsules import SPECS
from _capsules import TOKENS
import pytest
import torch

from flashrt_core.capsule import Boundary
from flashrt_core.capsule.boundary import PACK_ALIGN
from flashrt_core.errors import AddressChanged
from flashrt_core.errors import BoundaryIncomplete
from flashrt_core.errors import CapsuleIdInvalid
from flashrt_core.errors import ConfigError
from flashrt_core.runtime import Backend
from flashrt_core.runtime import BufferSet
from flashrt_core.runtime import BufferSpec
from flashrt_core.runtime import Kind
from flashrt_core.runtime import Role

STATE = [spec.name for spec in SPECS if spec.role is Role.STATE]


def test_every_state_buffer_is_listed_with_kind_and_place(backend: Backend) -> None:
    session = Session(backend, rows=3)
    entries = session.boundary.entries
    assert [entry.name for entry in entries] == STATE
    assert {entry.name for entry in entries if entry.offset < 0} == set(KV)
    assert all(entry.kind == spec.kind.value for entry, spec in zip(entries, SPECS) if spec.kind)


def test_a_live_state_buffer_that_is_not_listed_is_an_error(backend: Backend) -> None:
    buffers = BufferSet(backend, SPECS)
    for name in STATE:
        order = [other for other in STATE if other != name]
        with pytest.raises(BoundaryIncomplete, match=rf"not listed \['{name}'\]"):
            Boundary(buffers, IDENTITY, order=order)
    for odd in ([*STATE, 'scratch'], [*STATE, 'nothing'], [*STATE, STATE[0]]):
        with pytest.raises(BoundaryIncomplete):
            Boundary(buffers, IDENTITY, order=odd)
    assert len(Boundary(buffers, IDENTITY, order=STATE[::-1]).entries) == len(STATE)


def test_a_buffer_that_appears_later_is_noticed(
        backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(backend)
    session.boundary.check_closed()
    more = BufferSet(backend, (BufferSpec('late', Role.STATE, torch.int64, (), kind=Kind.META),))
    both = (*session.buffers.state(), *more.state())
    monkeypatch.setattr(session.buffers, 'state', lambda: both)
    with pytest.raises(BoundaryIncomplete, match='late'):
        session.boundary.check_closed()


def test_a_buffer_that_moved_is_noticed(backend: Backend) -> None:
    session = Session(backend)
    buffer = session.buffers['kv.1']
    buffer.tensor.set_(buffer.tensor.clone())
    with pytest.raises(AddressChanged, match=r'kv\.1'):
        session.boundary.check_closed()


def test_ranges_are_the_arena_row_then_each_kv_from_token_zero(backend: Backend) -> None:
    session = Session(backend, rows=3)
    session.length = 5
    arena = session.buffers.arena
    for row in range(3):
        first, *kv = session.boundary.ranges(row)
        assert first == (arena[row].data_ptr(), arena.shape[1])
        assert kv == [
            (session.buffers[name].row(row).data_ptr(), 5 * 2 * 4 * 64 * 2) for name in KV]
    session.length = 0
    assert len(session.boundary.ranges()) == 1


def test_packed_pieces_are_aligned_and_tensors_cover_every_byte(backend: Backend) -> None:
    session = Session(backend)
    for length in (0, 1, 7, 96):
        session.length = length
        packing = session.boundary.packing(session.boundary.extents())
        assert all(piece.packed % PACK_ALIGN == 0 for piece in packing.pieces)
        at = 0
        for row in packing.tensors:
            assert row.begin == at
            at = row.end
        assert at == packing.nbytes
        assert {row.name for row in packing.tensors if not row.name.startswith('_gap')} == set(
            STATE)


def test_gaps_are_numbered_through_and_a_hidden_buffer_is_in_no_packing(backend: Backend) -> None:
    odd = (BufferSpec(f'kv.odd{n}', Role.STATE, torch.uint8, (TOKENS, 2, 1, 3), kind=Kind.KV)
           for n in range(3))
    session = Session(backend, specs=(*SPECS, *odd))
    for length in (96, 1):
        session.length = length
        packing = session.boundary.packing(session.boundary.extents())
        gaps = [row.name for row in packing.tensors if row.name.startswith('_gap')]
        assert gaps == [f'_gap.{number}' for number in range(len(gaps))] and len(gaps) > 5
    boundary = session.boundary._without_for_tests('recurrent')
    packing = boundary.packing(boundary.extents())
    assert 'recurrent' not in {row.name for row in packing.tensors}
    where = boundary.entries[3].address
    assert not [p for p in packing.pieces if p.address <= where < p.address + p.nbytes]


def test_packings_are_kept_for_the_lengths_in_use_and_not_for_all_there_ever_were(
        backend: Backend) -> None:
    boundary = Session(backend).boundary
    for length in range(600):
        extents = boundary.check_extents({'kv.0': length % 90, 'kv.1': length // 90})
        packing = boundary.packing(extents)
        assert packing is boundary.packing(extents) and len(boundary._packings) <= 256
        assert packing.payload == sum(size for _, size in Boundary(
            boundary.buffers, IDENTITY, lambda held=extents: held).ranges())


@pytest.mark.parametrize('extent', [{}, {'kv.0': 1}, {'kv.0': 1, 'kv.1': 97},
                                    {'kv.0': -1, 'kv.1': 0}, {'kv.0': 1, 'kv.1': 1, 'seed': 0}])
def test_extents_that_do_not_name_each_kv_buffer_in_range_are_refused(
        backend: Backend, extent: dict[str, int]) -> None:
    buffers = BufferSet(backend, SPECS)
    with pytest.raises(BoundaryIncomplete, match='extent'):
        Boundary(buffers, IDENTITY, lambda: extent).ranges()


def test_extents_are_checked_anew_whenever_they_change(backend: Backend) -> None:
    boundary = Session(backend).boundary
    first = boundary.check_extents({'kv.1': 5, 'kv.0': 4})
    again = boundary.check_extents({'kv.1': 5, 'kv.0': 4})
    assert list(again.items()) == [('kv.0', 4), ('kv.1', 5)] == list(first.items())
    again['kv.1'] = 97  # what was handed out is the caller's own
    with pytest.raises(BoundaryIncomplete, match=r"'kv\.1' is 97"):
        boundary.check_extents({'kv.0': 4, 'kv.1': 97})
    assert boundary.check_extents({'kv.0': 4, 'kv.1': 5}) == {'kv.0': 4, 'kv.1': 5}
    first['kv.1'] = 98
    with pytest.raises(BoundaryIncomplete, match=r"'kv\.1' is 98"):
        boundary.check_extents({'kv.0': 4, 'kv.1': 98})
    with pytest.raises(BoundaryIncomplete, match='name'):
        boundary.check_extents({'kv.0': 4})
    assert boundary.check_extents({'kv.0': 4.5, 'kv.1': 5}) == {'kv.0': 4, 'kv.1': 5}


def test_the_buffer_layout_is_part_of_the_identity(backend: Backend) -> None:
    one = Session(backend).boundary.identity
    reordered = Boundary(BufferSet(backend, SPECS[::-1]), IDENTITY).identity
    retyped = Session(backend, specs=(
        BufferSpec('seed', Role.STATE, torch.int32, (2,), kind=Kind.RNG), *SPECS[1:])).boundary
    assert one == Session(backend, rows=4).boundary.identity
    assert one.layout_digest != reordered.layout_digest
    assert one.layout_digest != retyped.identity.layout_digest
    assert [field for _, field, _, _ in one.diff(retyped.identity)] == ['buffer.000.seed']


def test_a_layout_field_reserved_for_buffers_cannot_be_set(backend: Backend) -> None:
    identity = type(IDENTITY)({'buffer.000.seed': 'mine'}, {})
    with pytest.raises(ConfigError, match='reserved'):
        Boundary(BufferSet(backend, SPECS), identity)


def test_session_names_are_safe_for_files(backend: Backend) -> None:
    with pytest.raises(CapsuleIdInvalid, match='session name'):
        Session(backend, name='../x')


def test_state_without_a_row_axis_is_refused(backend: Backend) -> None:
    spec = BufferSpec('flat', Role.STATE, torch.int64, (4,), kind=Kind.META, rows=False)
    with pytest.raises(BoundaryIncomplete, match='row axis'):
        Boundary(BufferSet(backend, (spec,)), IDENTITY)


def test_state_in_host_memory_is_listed_too(backend: Backend) -> None:
    spec = BufferSpec('host', Role.STATE, torch.int64, (4,), kind=Kind.META, host=True)
    boundary = Boundary(BufferSet(backend, (*SPECS, spec)), IDENTITY,
                        lambda: dict.fromkeys(KV, 1))
    assert boundary.ranges()[-1][1] == 32
