"""Copies that touch live memory: freeze, thaw, promote. On the session's lane thread only."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from collections.abc import Sized
from dataclasses import dataclass
import math
import time
from typing import Any
import weakref

import numpy as np
import torch

from ..errors import BoundaryIncomplete
from ..errors import CapsuleCorrupt
from ..errors import ConfigError
from ..errors import FlashrtError
from ..errors import IdentityMismatch
from ..errors import SessionPoisoned
from ..runtime import Backend
from .arena import Place
from .boundary import Boundary
from .boundary import Packing
from .identity import describe_diff
from .ledger import Capsule
from .ledger import Thawed
from .records import Tier
from .tiers import Tiers
from .transfers import Copies
from .transfers import match
from .transfers import nothing
from .transfers import Way

Written = tuple[torch.Tensor, Any]


@dataclass(frozen=True)
class Continuation:
    """What ran after a snapshot: `run` does it again on the restored state, in place.

    :param run: replays graphs directly (the lane thread is busy) and gives the resulting bytes.
    """

    run: Callable[[], bytes]
    expected: bytes


class Live:
    """One store's hands on live buffers."""

    def __init__(self, backend: Backend, tiers: Tiers) -> None:
        self._backend = backend
        self._tiers = tiers

    def freeze(self, boundary: Boundary, packing: Packing, row: int, tier: Tier, name: str,
               describe: Callable[[Place], Capsule]) -> Capsule:
        """Copy one row into new pages and prepare the way back; nothing is kept if it fails.

        :param describe: makes the capsule of these pages, while the device copies.
        """
        arena = self._tiers.arena(tier)
        place = self._tiers.room(arena, packing.nbytes, f'snapshot {name!r}')
        assert place is not None
        made: list[Capsule] = []

        def meanwhile() -> None:
            capsule = describe(place)
            capsule.fits = (weakref.ref(boundary), True)
            capsule.thawed = Thawed(weakref.ref(boundary), place, (row,), way.down(segments))
            made.append(capsule)

        try:
            way, segments = _way(packing, row), arena.segments(place)
            self._move(boundary, way.up(segments), arena.tier, meanwhile)
        except BaseException as error:
            self._tiers.give(place, error)
            raise
        return made[0]

    def thaw(
        self,
        boundary: Boundary,
        capsule: Capsule,
        rows: tuple[int, ...],
        written: Sequence[Written],
        proof: str,
        finish: Callable[[], None],
    ) -> float:
        """Copy a leased, resident capsule into rows; microseconds of the submission.

        :param written: (live tensor, value) put over the copy, for forks.
        :param finish: the session's own part; its failure counts as the submission's.
        :raises SessionPoisoned: from the submission on, for any reason.
        """
        copies = self._copies(boundary, capsule, rows)
        assert capsule.place is not None
        tier = capsule.place.tier
        started = time.perf_counter()

        def marks_die() -> None:
            if 0 in rows:
                boundary.note_kv_rewrite(0)

        try:
            self._move(boundary, copies, tier, marks_die)
            if proof == 'digest':
                self._prove(boundary, capsule, copies)
            copy_us = (time.perf_counter() - started) * 1e6
            self._promote(boundary, capsule, rows[0])
            write(written)
            finish()
        except BaseException as error:
            marks_die()
            raise self.poison(boundary, f'restore of {capsule.key[1]!r}', error) from error
        return copy_us

    def replay(self, boundary: Boundary, capsule: Capsule, continuation: Continuation) -> bytes:
        """Run a continuation on restored state; raises SessionPoisoned where it does not end."""
        try:
            return continuation.run()
        except BaseException as error:
            what = f'continuation of {capsule.key[1]!r}'
            raise self.poison(boundary, what, error) from error

    def poison(self, boundary: Boundary, what: str, error: BaseException) -> SessionPoisoned:
        """Mark a session unusable and word the error to raise."""
        boundary.poisoned = f'{what} failed during its submission: {error}'
        self._tiers.ledger.event('poisoned', boundary.session, boundary.poisoned)
        return SessionPoisoned(
            f'session {boundary.session or "(unnamed)"!r} is poisoned: {boundary.poisoned}; '
            'restore any of its capsules to go on'
        )

    def _promote(self, boundary: Boundary, capsule: Capsule, row: int) -> None:
        """Keep a just restored capsule in free gpu pages too, so that the next visit is faster.

        The bytes come from live memory, which equals the capsule until overrides are written.
        """
        if capsule.place is None or capsule.place.tier == 'gpu' or capsule.leases > 1:
            return
        gpu = self._tiers.arenas['gpu']
        nbytes = capsule.header.data_bytes
        place = self._tiers.room(gpu, nbytes, 'promotion', evict=False)
        if place is None:
            return
        try:
            way = _way(self._packing(boundary, capsule), row)
            self._move(boundary, way.up(gpu.segments(place)), 'gpu')
        except BaseException as error:
            self._tiers.give(place, error)
            if not isinstance(error, FlashrtError):
                raise
            self._tiers.ledger.event('promotion_failed', capsule.key[1], str(error))
            return
        self._tiers.adopt(capsule, place)
        self._tiers.ledger.event('promoted', capsule.key[1], 'restored while gpu pages were free')

    def wait(self, boundary: Boundary) -> None:
        """Wait for copies submitted by torch on the boundary's stream."""
        if boundary.lane is None:
            self._backend.synchronize()
        else:
            self._tiers.mover.wait(boundary.lane.stream)

    def _prove(self, boundary: Boundary, capsule: Capsule, copies: Copies) -> None:
        mover, stream = self._tiers.mover, _stream(boundary)
        if mover.digest(copies, 0, stream) != mover.digest(copies, 1, stream):
            raise CapsuleCorrupt(f'live memory does not hash to capsule {capsule.key[1]!r}')

    def _copies(self, boundary: Boundary, capsule: Capsule, rows: tuple[int, ...]) -> Copies:
        """The copies of a restore, prepared or remembered from the last one."""
        place, known = capsule.place, capsule.thawed
        assert place is not None
        if (
            known is not None
            and known.place is place
            and known.rows == rows
            and known.boundary() is boundary
        ):
            return known.copies
        segments = self._tiers.arenas[place.tier].segments(place)
        packing = self._packing(boundary, capsule)
        if len(rows) == 1:
            copies = _way(packing, rows[0]).down(segments)
        else:
            copies = Copies(np.concatenate([match(packing.pieces, segments, r) for r in rows]))
        capsule.thawed = Thawed(weakref.ref(boundary), place, rows, copies)
        return copies

    def _packing(self, boundary: Boundary, capsule: Capsule) -> Packing:
        return boundary.packing(boundary.check_extents(capsule.header.info.extents))

    def _move(self, boundary: Boundary, copies: Copies, tier: str,
              meanwhile: Callable[[], None] = nothing) -> None:
        """One submission on the lane's stream, waited for."""
        if boundary.lane is None:
            self._backend.synchronize()
        mover = self._tiers.mover
        move = mover.device if tier == 'gpu' else mover.host
        move(copies, _stream(boundary), meanwhile)


def check_overrides(
    boundary: Boundary, overrides: Mapping[str, Sequence[Any]], rows: Sequence[int]
) -> list[Written]:
    """Pairs of live row and value, which `write` will take without fail.

    :raises ConfigError: no such state buffer, another number of values than rows, a tensor of
        another shape or dtype, a number that the dtype does not hold.
    """
    if not overrides:
        return []
    found: list[Written] = []
    names = [entry.name for entry in boundary.entries]
    for name, values in overrides.items():
        count = len(values) if isinstance(values, Sized) else None
        if name not in names or count != len(rows):
            raise ConfigError(
                f'override of {name!r} with {count} values for {len(rows)} rows is refused: '
                f'name one of the state buffers {names} and give one value per row'
            )
        for row, value in zip(rows, values):
            target = boundary.buffers[name].row(row)
            given = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
            if torch.is_tensor(given):
                fits = (given.shape, given.dtype) == (target.shape, target.dtype)
                is_a = f'{given.dtype} {list(given.shape)}'
            else:
                fits = _holds(target.dtype, given)
                is_a = f'{given!r:.80}'
            if not fits:
                raise ConfigError(
                    f'override of {name!r} is {is_a}, the buffer is {target.dtype} '
                    f'{list(target.shape)} per row: give such a tensor or one number'
                )
            found.append((target, given))
    return found


def _holds(dtype: torch.dtype, value: object) -> bool:
    """Whether a dtype holds a number as it is: no fraction into integers, nothing too large."""
    if dtype.is_floating_point:
        if isinstance(value, float | np.floating) and not math.isfinite(value):
            return math.isnan(value) or dtype != torch.float8_e4m3fn  # which has no infinity
        largest = torch.finfo(dtype).max
        return isinstance(value, int | float | np.integer | np.floating) and bool(
            -largest <= value <= largest)
    if dtype == torch.bool:
        return isinstance(value, bool | np.bool_)
    limits = torch.iinfo(dtype)
    return isinstance(value, int | np.integer) and limits.min <= int(value) <= limits.max


def write(written: Sequence[Written]) -> None:
    """Put override values into live rows on the current stream."""
    if not written:
        return
    with torch.no_grad():
        for target, value in written:
            if torch.is_tensor(value):
                target.copy_(value)
            else:
                target.fill_(value)


def check_fits(boundary: Boundary, capsule: Capsule, numerics: str) -> bool:
    """Whether numerics agree; raises IdentityMismatch where the capsule must not be used.

    :raises CapsuleCorrupt: it says that its layout is the session's, and it is not.
    """
    if numerics not in ('same', 'any'):
        raise ConfigError(f"numerics is {numerics!r}: use 'same' or 'any'")
    known = capsule.fits  # read once: another session's thread may put its own there
    if known is not None and known[0]() is boundary and (known[1] or numerics == 'any'):
        return known[1]
    info = capsule.header.info
    mine, theirs = boundary.identity, info.identity
    if mine is not theirs and mine != theirs:
        found = mine.diff(theirs)
        if mine.layout_digest != theirs.layout_digest:
            raise IdentityMismatch(
                f'capsule {info.id!r} has another layout and is never restored here: '
                f'{describe_diff(f for f in found if f[0] == "layout")}'
            )
        if numerics == 'same':
            raise IdentityMismatch(
                f'capsule {info.id!r} was computed with other numerics: '
                f"{describe_diff(found)}; numerics='any' restores it, not bit-exact"
            )
    try:
        packing = boundary.packing(boundary.check_extents(info.extents))
    except BoundaryIncomplete as error:
        raise CapsuleCorrupt(f'capsule {info.id!r} is refused: {error}') from None
    header = capsule.header
    if (header.tensors, header.data_bytes) != (packing.tensors, packing.nbytes):
        raise CapsuleCorrupt(
            f'capsule {info.id!r} says it has this layout, but its tensors differ from the '
            "session's buffers: it was made by hand or damaged; drop it"
        )
    same = mine.numerics_digest == theirs.numerics_digest
    capsule.fits = (weakref.ref(boundary), same)
    return same


def _way(packing: Packing, row: int) -> Way:
    way = packing.ways.get(row)
    if way is None:
        way = packing.ways[row] = Way(packing.pieces, row)
    return way


def _stream(boundary: Boundary) -> Any:
    return None if boundary.lane is None else boundary.lane.stream
