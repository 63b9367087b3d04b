"""Arrival: a restore from host memory whose copies run beside the session's next plan."""

from __future__ import annotations

from collections.abc import Callable
import time
import weakref

from ..errors import SessionPoisoned
from .arena import Place
from .boundary import Boundary
from .ledger import Arriving
from .ledger import Capsule
from .live import Live
from .records import RestoreReport
from .tiers import Tiers
from .transfers import coalesce
from .transfers import match
from .transfers import wait_for

Finish = Callable[[int | None], None]
Range = tuple[int, int, int]


class Arrival:
    """A restore that was begun: until `finish` the session is poisoned, whatever comes between.

    What the next plan writes may lie behind its fences only (`Stages`). Lane thread only.
    """

    def __init__(self, tiers: Tiers, live: Live, boundary: Boundary, capsule: Capsule,
                 exact: bool, began: float) -> None:
        self._tiers, self._live = tiers, live
        self._boundary, self._capsule, self._exact = boundary, capsule, exact
        self._began, self._lead_us = began, 0.0
        self._source = 'host'
        self._place: Place | None = None
        self._report: RestoreReport | None = None

    @classmethod
    def of(cls, report: RestoreReport) -> Arrival:
        """A restore that ended before the plan begins."""
        done = cls.__new__(cls)
        done._report = report
        return done

    def start(self, finish: Finish) -> Arrival:
        """Submit the copies; returns when the hooks have read the first stage, which has arrived.

        The capsule was leased; this ends the lease, or `finish` does.

        :param finish: the session's own part, given the slot that holds the mark to come.
        :raises SessionPoisoned: from the submission on, for any reason; nothing is copied then.
        :raises CapsuleCorrupt, BudgetFull: of a file that must be read first; session untouched.
        """
        boundary, stages, tiers = self._boundary, self._boundary.stages, self._tiers
        ring = boundary.ring
        assert stages is not None and boundary.lane is not None
        try:
            self._source = self._capsule.tier
            if self._capsule.place is None:
                tiers.load(self._capsule)
            self._make_room()
            known = self._prepared()
        except BaseException:
            self._release()
            raise
        slot: int | None = None
        try:
            boundary.poisoned = self._waiting
            boundary.note_kv_rewrite(0)
            slot = None if ring is None else ring.claim()
            ranges = self._ranges(known, slot)
            self._lead_us = (time.perf_counter() - self._began) * 1e6
            stages.submit(lambda stage, stream: tiers.mover.start(ranges[stage], stream),
                          boundary.lane.stream)
            wait_for(stages.first, sum(size for _, _, size in ranges[0]))
            finish(slot)
            boundary.poisoned = self._waiting  # `finish` has lifted it
        except BaseException as error:
            if ring is not None and slot is not None:
                ring.give(slot)
            if self._settle():
                self._release()
            raise self._live.poison(boundary, self._what, error) from error
        return self

    def finish(self) -> RestoreReport:
        """Wait until all has arrived and have the session usable again; twice gives the same.

        :raises SessionPoisoned: the copies did not end, or the device is gone.
        """
        if self._report is not None:
            return self._report
        boundary, capsule, stages = self._boundary, self._capsule, self._boundary.stages
        assert stages is not None and boundary.lane is not None
        if boundary.lane.fault is not None:
            # The device may write and read on: the pages are never given to anybody else.
            raise SessionPoisoned(f'{self._what} did not end: {boundary.lane.fault}')
        try:
            wait_for(stages.ended, capsule.info.size_bytes)
        except BaseException as error:
            raise self._live.poison(boundary, self._what, error) from error
        if boundary.poisoned == self._waiting:
            boundary.poisoned = None
        if self._place is not None:
            self._tiers.adopt(capsule, self._place)
            self._place = None
            self._tiers.ledger.event(
                'promoted', capsule.key[1], 'restored while gpu pages were free')
        self._release()
        self._tiers.ledger.touch(capsule)
        copy_us = stages.begun.elapsed_us(stages.ended)
        info = capsule.info
        self._report = RestoreReport(
            id=capsule.key[1], bytes=info.size_bytes, us=self._lead_us + copy_us,
            bit_exact=self._exact, copy_us=copy_us, source=self._source, position=info.position,
            overlapped=True)
        return self._report

    @property
    def _what(self) -> str:
        return f'restore of {self._capsule.key[1]!r}'

    @property
    def _waiting(self) -> str:
        return f'{self._what} has not arrived'

    def _settle(self) -> bool:
        """Wait for what was submitted before a failure; False: it may write and read on."""
        stages = self._boundary.stages
        assert stages is not None
        try:
            stages.ended.record(stages.stream)
            wait_for(stages.ended, self._capsule.info.size_bytes)
        except Exception as error:
            self._tiers.ledger.event('settle_failed', self._capsule.key[1], str(error))
            return False
        return True

    def _release(self) -> None:
        if self._place is not None:
            self._tiers.give(self._place)
            self._place = None
        self._tiers.release(self._capsule)

    def _make_room(self) -> None:
        """Take free gpu pages to keep the capsule in, so that the next visit is faster."""
        capsule, gpu = self._capsule, self._tiers.arenas['gpu']
        if capsule.place is not None and capsule.place.tier != 'gpu' and capsule.leases == 1:
            self._place = self._tiers.room(
                gpu, capsule.header.data_bytes, 'promotion', evict=False)

    def _prepared(self) -> Arriving:
        """The copies to live memory by stage, made or remembered from the last time."""
        boundary, capsule, place = self._boundary, self._capsule, self._capsule.place
        known = capsule.arriving
        assert place is not None
        if known is None or known.place is not place or known.boundary() is not boundary:
            segments = self._tiers.arenas[place.tier].segments(place)
            pieces = boundary.staged(boundary.check_extents(capsule.header.info.extents))
            known = capsule.arriving = Arriving(
                weakref.ref(boundary), place, pieces,
                [coalesce(match(stage, segments, 0)) for stage in pieces])
        return known

    def _ranges(self, known: Arriving, slot: int | None) -> list[list[Range]]:
        """Copies (source, target, bytes) in order, by stage.

        To live memory; then from there, before a plan changes it, to the mark of the restored
        state and to the pages that the capsule moves up to.
        """
        ring, found = self._boundary.ring, []
        for pieces, down in zip(known.pieces, known.copies):
            ranges = list(down)
            if ring is not None and slot is not None:
                ranges += [(p.address, ring.place(slot, p.address), p.nbytes)
                           for p in pieces if p.small]
            if self._place is not None:
                pages = self._tiers.arenas['gpu'].segments(self._place)
                ranges += [(live, page, size) for page, live, size in
                           coalesce(match(pieces, pages, 0))]
            found.append(ranges)
        return found
