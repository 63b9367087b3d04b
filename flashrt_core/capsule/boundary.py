"""The boundary: the closed, ordered list of everything the next tick depends on."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
import math
import operator
from typing import Any
from typing import TYPE_CHECKING

import torch

from ..errors import AddressChanged
from ..errors import BoundaryIncomplete
from ..errors import LaneError
from ..errors import NotAtBoundary
from ..errors import SessionPoisoned
from .format import DTYPE_NAMES
from .format import GAP
from .format import TensorRow
from .identity import Identity
from .records import CapsuleInfo
from .records import check_id

if TYPE_CHECKING:
    from ..runtime import Buffer
    from ..runtime import BufferSet
    from ..runtime import Lane
    from .marks import Mark
    from .marks import MarkRing
    from .stages import Stages
    from .transfers import Way

PACK_ALIGN = 256


@dataclass(frozen=True)
class Entry:
    """One state buffer as the boundary sees it; addresses and strides in bytes.

    :param shape: without the row axis. :param tokens: KV capacity, 0 for other kinds.
    :param offset: place inside an arena row, -1 for a buffer that stands alone.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    tokens: int
    address: int
    row_stride: int
    offset: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one KV token, 0 for other kinds."""
        return self.nbytes // self.tokens if self.tokens else 0


@dataclass(frozen=True)
class Piece:
    """One contiguous run of a capsule: `nbytes` at `packed` <-> `address + row * row_stride`."""

    packed: int
    address: int
    row_stride: int
    nbytes: int
    small: bool


@dataclass(frozen=True)
class Packing:
    """Where each byte of a boundary with given extents lies in its packed form.

    :param ways: the prepared copies of a row to and from that form, made as they are asked for.
    """

    pieces: tuple[Piece, ...]
    nbytes: int
    payload: int
    tensors: tuple[TensorRow, ...] = field(repr=False, default=())
    ways: dict[int, Way] = field(repr=False, compare=False, default_factory=dict)


class Boundary:
    """All state of one session between two replays, as a closed list.

    Read and written on the session's lane thread; `poisoned` may be read from any thread.

    :param buffers: the session's BufferSet; its STATE buffers are the list.
    :param identity: of the session; one layout field per buffer is added here.
    :param extent: valid tokens of each KV buffer now; every KV buffer must be named.
    :param position: ticks (policy) or tokens (planner) at the boundary now.
    :param order: the names the session declares, in order; None takes all STATE buffers.
    :param session: name under which the store files this session's capsules.
    :param lane: the session's lane; asked whether the state is committed. None only where no
        plan runs (tests, tools).
    :param stages: in which state arrives while the next plan runs; None: restores end first.
    :param notes: what else the host knows of the state now; a mark keeps it and a rollback's hooks
        find it there, so that they need not ask the device.
    :raises BoundaryIncomplete: a live STATE buffer is not in `order`, or a name in it is not one.
    """

    def __init__(
        self,
        buffers: BufferSet,
        identity: Identity,
        extent: Callable[[], Mapping[str, int]] = dict,
        position: Callable[[], int] = int,
        *,
        order: Sequence[str] | None = None,
        session: str = '',
        lane: Lane | None = None,
        stages: Stages | None = None,
        notes: Callable[[], Any] = lambda: None,
    ) -> None:
        self.buffers = buffers
        self.lane = lane
        self.stages = stages
        self.notes = notes
        self.session = check_id(session, 'session name') if session else ''
        self.poisoned: str | None = None
        self.parent = ''
        self.bit_exact = True
        self._branches: dict[int, tuple[str, bool]] = {}
        self.lineage = self._lineages = 0
        self.ring: MarkRing | None = None
        self.on_restore: list[Callable[[CapsuleInfo | Mark, tuple[int, ...]], None]] = []
        self._extent = extent
        self._position = position
        self._hidden: frozenset[str] = frozenset()
        live = {buffer.name: buffer for buffer in buffers.state()}
        names = list(live) if order is None else list(order)
        _check_names(names, live)
        if stages is not None:
            _check_names([name for stage in stages.names for name in stage], live)
        arena = buffers.arena
        self._arena = arena.data_ptr() if arena.numel() else 0
        self._arena_row = int(arena.shape[-1]) * arena.element_size() if arena.numel() else 0
        self.rows = buffers.rows
        self.entries = tuple(_entry(live[name], self._arena, self._arena_row) for name in names)
        self.identity = identity.with_layout({
            f'buffer.{at:03d}.{e.name}': f'{e.kind} {e.dtype}{list(e.shape)} @{e.offset}'
            for at, e in enumerate(self.entries)
        })
        self._capacity = {entry.name: entry.tokens for entry in self.entries if entry.tokens}
        self._by_name = {entry.name: entry for entry in self.entries}
        self._packings: dict[tuple[int, ...], Packing] = {}
        self._small: tuple[Packing, int] | None = None  # the arena's part and its gaps
        self._checked: dict[str, int] | None = None  # extents that were in order; never changed

    def check_closed(self) -> None:
        """Raise unless the live STATE buffers are those of construction, at the same places.

        :raises BoundaryIncomplete: a STATE buffer came or went after the boundary was built.
        :raises AddressChanged: a buffer moved.
        """
        live = {buffer.name: buffer for buffer in self.buffers.state()}
        _check_names([entry.name for entry in self.entries], live)
        for entry in self.entries:
            if live[entry.name].tensor.data_ptr() != entry.address:
                raise AddressChanged(
                    f'state buffer {entry.name!r} moved from {entry.address:#x} to '
                    f'{live[entry.name].tensor.data_ptr():#x}: write into it, never replace it'
                )

    def check_committed(self) -> None:
        """Raise NotAtBoundary while a plan runs, or where one failed in its last segment."""
        if self.lane is not None and not self.lane.committed:
            raise NotAtBoundary(
                f'session {self.session or "(unnamed)"!r} is between the segments of a plan: '
                'its state is not committed; ask at the boundary (Lane.at_boundary)'
            )

    def check_thread(self) -> None:
        """Raise LaneError unless called where live memory may be touched: on the lane thread.

        A wedged or lost lane raises its own fault: its device may still be writing.
        """
        lane = self.lane
        if lane is not None and lane.fault is not None:
            raise lane.fault
        if lane is not None and lane.state == 'running' and not lane.on_thread:
            raise LaneError(
                f'capsule verbs of session {self.session or "(unnamed)"!r} run on its lane '
                'thread: use lane.at_boundary or lane.at_segment_end'
            )

    def check_usable(self) -> None:
        """Raise SessionPoisoned after a restore that failed half-way; called before each tick."""
        if self.poisoned is not None:
            raise SessionPoisoned(
                f'session {self.session or "(unnamed)"!r} is poisoned: {self.poisoned}; '
                'restore any of its capsules to go on'
            )

    def position(self) -> int:
        """Ticks or tokens at the boundary now."""
        return int(self._position())

    def extents(self) -> dict[str, int]:
        """Valid tokens of every KV buffer now, checked against capacity."""
        return self.check_extents(self._extent())

    def check_extents(self, extents: Mapping[str, int]) -> dict[str, int]:
        """The extents in list order; raises BoundaryIncomplete unless each KV buffer is named."""
        checked = self._checked
        if checked is not None and extents == checked:
            return checked.copy()
        if extents.keys() != self._capacity.keys():
            raise BoundaryIncomplete(
                f'extents name {sorted(extents)}, the KV buffers are {sorted(self._capacity)}: '
                'give the valid tokens of each'
            )
        found = {}
        for name, capacity in self._capacity.items():
            found[name] = tokens = int(extents[name])
            if not 0 <= tokens <= capacity:
                raise BoundaryIncomplete(
                    f'extent of {name!r} is {tokens}, its capacity is 0 to {capacity} tokens'
                )
        self._checked = found.copy()
        return found

    def ranges(self, row: int = 0) -> list[tuple[int, int]]:
        """Contiguous (address, bytes) of one row's valid state: the arena row, then each KV."""
        packing = self.packing(self.extents())
        return [(p.address + row * p.row_stride, p.nbytes) for p in packing.pieces]

    def check_rows(self, rows: Iterable[int]) -> tuple[int, ...]:
        """Row numbers as a tuple; raises BoundaryIncomplete outside the session's rows."""
        if type(rows) is tuple and rows == (0,):
            return (0,)
        try:
            chosen = tuple(operator.index(row) for row in rows)
        except TypeError:
            raise BoundaryIncomplete(
                f'rows {rows!r:.80} are refused: give a sequence of whole numbers'
            ) from None
        bad = [row for row in chosen if not 0 <= row < self.rows]
        if bad or not chosen or len(set(chosen)) != len(chosen):
            raise BoundaryIncomplete(
                f'rows {list(chosen)} are refused: the session has rows 0 to {self.rows - 1}, '
                'each may be named once; bind the session with more rows to fork wider'
            )
        return chosen

    def packing(self, extents: Mapping[str, int]) -> Packing:
        """How state with these extents is packed; the same for every row."""
        key = tuple(extents.values())
        known = self._packings.get(key)
        if known is None:
            known = self._pack(extents)
            if len(self._packings) >= 256:
                self._packings.clear()
            self._packings[key] = known
        return known

    def staged(self, extents: Mapping[str, int]) -> list[list[Piece]]:
        """The pieces of a packed state by the stage in which they arrive, each in packed order.

        Every byte is in one of them; the gap behind a small buffer comes with it.
        """
        assert self.stages is not None
        stage_of = {n: i for i, names in enumerate(self.stages.names) for n in names}
        found: list[list[Piece]] = [[] for _ in self.stages.names]
        for piece in self.packing(extents).pieces:
            end = piece.address + piece.nbytes
            inside = sorted((e.address, stage_of[e.name]) for e in self.entries
                            if self._shown(e) and piece.address <= e.address < end)
            cuts = [piece.address, *(address for address, _ in inside[1:]), end]
            for (_, stage), low, high in zip(inside, cuts, cuts[1:]):
                packed = piece.packed + low - piece.address
                last = found[stage][-1] if found[stage] else None
                if last is not None and last.packed + last.nbytes == packed and (
                    last.address + last.nbytes == low
                ):
                    last = found[stage].pop()
                    packed, low = last.packed, last.address
                found[stage].append(Piece(packed, low, piece.row_stride, high - low, piece.small))
        return found

    def note_kv_rewrite(self, from_token: int) -> None:
        """Say that KV from this token on is about to be overwritten: marks above it die."""
        if self.ring is not None:
            self.ring.kill_above(from_token)

    def adopt(self, parent: str, bit_exact: bool, lineage: int | None = None) -> None:
        """Record what was restored: whose child the state is; the poison is lifted.

        :param lineage: of the mark rolled back to; None begins a new one.
        """
        self.parent = parent
        self.bit_exact = bit_exact
        self.poisoned = None
        if lineage is None:
            self._lineages += 1
        self.lineage = self._lineages if lineage is None else lineage
        if self.lane is not None and self.lane.on_thread:
            self.lane.commit()

    def adopt_branches(self, rows: Iterable[int], parent: str, bit_exact: bool) -> None:
        """Record what the rows above 0 were restored from; the others stay as they are."""
        for row in rows:
            if row:
                self._branches[row] = (parent, bit_exact)

    def origin(self, row: int) -> tuple[str, bool]:
        """Whose child a row's state is, and whether it is bit-exact; others go with row 0."""
        parent, exact = self._branches.get(row, (self.parent, True))
        return parent, exact and self.bit_exact

    def _without_for_tests(self, name: str) -> Boundary:
        """A boundary that forgets one buffer, to show that a test notices. Tests only."""
        clone = object.__new__(Boundary)
        clone.__dict__.update(self.__dict__)
        clone._hidden = self._hidden | {self._by_name[name].name}
        clone._packings, clone._small = {}, None
        clone.on_restore = list(self.on_restore)
        return clone

    def _pack(self, extents: Mapping[str, int]) -> Packing:
        if self._small is None:
            arena = self._pack_arena()
            self._small = arena, sum(row.name.startswith(GAP) for row in arena.tensors)
        (first, gaps), tensors = self._small, []
        pieces, at = list(first.pieces), first.nbytes
        for entry in self.entries:
            if entry.offset >= 0 or not self._shown(entry):
                continue
            tokens = extents[entry.name] if entry.tokens else 0
            size = tokens * entry.token_bytes if entry.tokens else entry.nbytes
            shape = (tokens, *entry.shape[1:]) if entry.tokens else entry.shape
            tensors.append(_row(entry, shape, at, size))
            if size:
                small = not entry.tokens
                pieces.append(Piece(at, entry.address, entry.row_stride, size, small))
            at = _align(at + size)
        payload = sum(piece.nbytes for piece in pieces)
        filled = _fill_gaps(tensors, first.nbytes, at, gaps)
        return Packing(tuple(pieces), at, payload, (*first.tensors, *filled))

    def _pack_arena(self) -> Packing:
        """The arena's part, which lies first and is the same with all extents."""
        pieces: list[Piece] = []
        tensors: list[TensorRow] = []
        at = 0
        for start, size in self._arena_runs():
            pieces.append(Piece(at, self._arena + start, self._arena_row, size, True))
            tensors += [
                _row(e, e.shape, at + e.offset - start, e.nbytes)
                for e in self.entries
                if e.offset >= 0 and start <= e.offset < start + size and self._shown(e)
            ]
            at = _align(at + size)
        payload = sum(piece.nbytes for piece in pieces)
        return Packing(tuple(pieces), at, payload, tuple(_fill_gaps(tensors, 0, at, 0)))

    def _shown(self, entry: Entry) -> bool:
        return entry.name not in self._hidden

    def _arena_runs(self) -> list[tuple[int, int]]:
        """Parts of an arena row to copy: all of it, unless a test hides a buffer."""
        holes = sorted(
            (e.offset, e.offset + e.nbytes)
            for e in self.entries
            if e.offset >= 0 and not self._shown(e)
        )
        runs, at = [], 0
        for begin, end in [*holes, (self._arena_row, self._arena_row)]:
            if begin > at:
                runs.append((at, begin - at))
            at = end
        return runs


def _align(value: int) -> int:
    return -(-value // PACK_ALIGN) * PACK_ALIGN


def _row(entry: Entry, shape: tuple[int, ...], begin: int, size: int) -> TensorRow:
    return TensorRow(entry.name, entry.dtype, shape, begin, begin + size)


def _fill_gaps(tensors: Iterable[TensorRow], begin: int, end: int, gaps: int
               ) -> Iterable[TensorRow]:
    at = begin
    last = TensorRow('', 'U8', (0,), end, end)
    for row in [*sorted(tensors, key=lambda r: (r.begin, r.end)), last]:
        if row.begin > at:
            yield TensorRow(f'{GAP}{gaps}', 'U8', (row.begin - at,), at, row.begin)
            gaps += 1
        if row is not last:
            yield row
        at = row.end


def _check_names(names: Sequence[str], live: Mapping[str, Any]) -> None:
    missing = [name for name in live if name not in names]
    unknown = [name for name in names if name not in live]
    if missing or unknown or len(set(names)) != len(names):
        raise BoundaryIncomplete(
            f'the boundary lists {len(names)} state buffers, the session has {len(live)}: '
            f'not listed {missing}, not there or not state {unknown}; '
            'list every STATE buffer exactly once'
        )


def _entry(buffer: Buffer, arena: int, arena_row: int) -> Entry:
    kind = getattr(buffer.kind, 'value', buffer.kind)
    tensor: torch.Tensor = buffer.tensor
    if kind is None or tensor.dtype not in DTYPE_NAMES:
        raise BoundaryIncomplete(
            f'state buffer {buffer.name!r} of {tensor.dtype} has kind {kind!r}: '
            'give it a Kind and a dtype that safetensors knows'
        )
    if not buffer.spec.rows or not tensor[0].is_contiguous():
        raise BoundaryIncomplete(
            f'state buffer {buffer.name!r} has no row axis or strided rows: '
            'state lies as [rows, *shape] with contiguous rows'
        )
    shape = tuple(tensor.shape[1:])
    address = tensor.data_ptr()
    inside = arena <= address < arena + arena_row
    return Entry(
        name=buffer.name,
        kind=str(kind),
        dtype=DTYPE_NAMES[tensor.dtype],
        shape=shape,
        nbytes=math.prod(shape) * tensor.element_size(),
        tokens=shape[0] if kind == 'kv' else 0,
        address=address,
        row_stride=tensor.stride(0) * tensor.element_size(),
        offset=address - arena if inside else -1,
    )
