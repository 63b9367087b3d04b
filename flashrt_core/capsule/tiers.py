"""Where capsules lie and how they move: room, eviction downwards, promotion upwards, files."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
import contextlib
from dataclasses import replace
from typing import Any

from ..errors import BudgetFull
from ..errors import CapsuleError
from ..errors import CapsuleNotFound
from ..errors import FlashrtError
from ..errors import TierUnavailable
from ..runtime import Backend
from .arena import Arena
from .arena import Place
from .disk import DiskTier
from .format import GAP
from .format import header_for
from .ledger import Capsule
from .ledger import Ledger
from .records import CapsuleInfo
from .records import Tier
from .records import TierUsage
from .transfers import Copies
from .transfers import Mover
from .transfers import stretches
from .transfers import Unended


class Lease:
    """One use of a capsule's pages; a plain class, being on the path of every reset."""

    __slots__ = ('_capsule', '_tiers')

    def __init__(self, tiers: Tiers, capsule: Capsule) -> None:
        self._tiers = tiers
        self._capsule = capsule

    def __enter__(self) -> None:
        """Begin the use; raises CapsuleNotFound if it was dropped meanwhile."""
        self._tiers.lease(self._capsule)

    def __exit__(self, *exc: object) -> None:
        """End the use."""
        self._tiers.release(self._capsule)


class Tiers:
    """The arenas and the directory of one store, and every way between them.

    A capsule lies in one arena at most; a file of it may exist beside. On unified memory gpu and
    host are one arena of host memory called gpu, and 'host' means it.

    :param fold: True joins gpu and host; None asks the device.
    """

    def __init__(
        self,
        backend: Backend,
        ledger: Ledger,
        gpu_bytes: int,
        host_bytes: int,
        page_bytes: int,
        fold: bool | None,
    ) -> None:
        if fold is None:
            fold = backend.name == 'cuda' and backend.memory().integrated
        self.folded = fold
        self.ledger = ledger
        self.disk: DiskTier | None = None
        if fold:
            gpu_bytes, host_bytes = gpu_bytes + host_bytes, 0
        self.arenas = {
            'gpu': Arena(backend, 'gpu', gpu_bytes, page_bytes, host=fold),
            'host': Arena(backend, 'host', host_bytes, page_bytes, host=True),
        }
        self.staging = self.arenas['gpu' if fold else 'host']
        self.mover = Mover(backend)

    def arena(self, tier: Tier) -> Arena:
        """The arena of a memory tier.

        :raises TierUnavailable: no budget was given for it.
        """
        found = self.staging if tier != 'gpu' else self.arenas['gpu']
        if not found.pool.count:
            raise TierUnavailable(
                f'capsule tier {found.tier!r} has no memory'
                f'{", and disk files pass through it" if tier == "disk" else ""}: '
                f'set {found.tier}_bytes'
            )
        return found

    def check_tier(self, tier: str) -> Tier:
        """The tier a request means.

        :raises TierUnavailable: unknown, without budget, or disk saving not allowed.
        """
        if tier not in ('gpu', 'host', 'disk'):
            raise TierUnavailable(f'capsule tier {tier!r} does not exist: use gpu, host or disk')
        if tier == 'disk':
            self.writable_disk()
            self.arena('host')
            return 'disk'
        return 'gpu' if self.arena(tier).tier == 'gpu' else 'host'  # type: ignore[arg-type]

    def writable_disk(self) -> DiskTier:
        """The disk tier, where saving is allowed; else TierUnavailable."""
        if self.disk is None:
            raise TierUnavailable(
                'there is no disk tier: set a capsule directory, a disk budget and allow_disk'
            )
        self.disk.check_writable()
        return self.disk

    def leased(self, capsule: Capsule) -> Lease:
        """Keep a capsule's pages for the time of a copy."""
        return Lease(self, capsule)

    def lease(self, capsule: Capsule) -> None:
        """Count one more user of a capsule's pages."""
        with self.ledger.lock:
            if capsule.dropped:
                raise CapsuleNotFound(f'capsule {capsule.key[1]!r} was dropped meanwhile')
            capsule.leases += 1

    def release(self, capsule: Capsule) -> None:
        """End a lease; pages of a dropped or spilled capsule go back with the last one."""
        with self.ledger.lock:
            capsule.leases -= 1
            if not capsule.leases and (capsule.dropped or (capsule.spill and capsule.on_disk)):
                self._vacate(capsule)

    def forget(self, capsule: Capsule, reason: str) -> None:
        """Take a capsule off the list; its pages go back when nobody copies them."""
        with self.ledger.lock:
            self.ledger.remove(capsule, reason)
            if not capsule.leases:
                self._vacate(capsule)

    def give(self, place: Place, error: BaseException | None = None) -> None:
        """Return a place that was never published.

        :param error: of the copy to it; where that may still write, nobody gets the place.
        """
        if isinstance(error, Unended):
            return
        with self.ledger.lock:
            self.arenas[place.tier].give(place)

    def _vacate(self, capsule: Capsule) -> None:
        if capsule.place is not None:
            self.arenas[capsule.place.tier].give(capsule.place)
            capsule.place = None
        capsule.spill = False

    def pin(self, session: str, capsule_id: str, pinned: bool) -> CapsuleInfo:
        """Set a capsule's pin; nothing leaves a tier, and nobody drops it, while this is done."""
        with self._files_stay(), self.ledger.lock:
            capsule = self.ledger.find(session, capsule_id)
            capsule.pinned = pinned
            return capsule.info

    def drop(self, capsule: Capsule) -> None:
        """Delete a capsule and its file; if the file cannot be deleted, it stays as it is.

        Two calls may drop the same capsule while a third makes another one of its name: a file is
        deleted by the one that took it, and while its capsule is listed or the name is free.

        :raises CapsuleError: it is pinned. A pin that comes meanwhile finds it gone.
        """
        with self._files_stay():
            if capsule.pinned:
                raise CapsuleError(
                    f'capsule {capsule.key[1]!r} is pinned: unpin it before dropping it')
            self._delete_file(capsule)
            self.forget(capsule, 'it was dropped on request')
            self._delete_file(capsule)  # a save ended in between

    def begin_on_disk(self, capsule: Capsule) -> None:
        """Publish a new capsule in host memory whose file is being written, or none at all.

        Nobody can pin or move what may still be refused, and its file is not listed before it.

        :raises BudgetFull, CapsuleError: as `save`; its pages are given back.
        """
        capsule.spill = True
        with self._files_stay():
            try:
                self.save(capsule)
            except BaseException as error:
                self.forget(capsule, f'its file was refused: {error}')
                raise
            self.ledger.add(capsule)

    def _files_stay(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.disk is None else self.disk.lock

    def _delete_file(self, capsule: Capsule) -> None:
        if not self.ledger.take_file(capsule):
            return
        try:
            self.writable_disk().drop(capsule.key)
        except BaseException:
            capsule.on_disk = True
            raise

    def room(self, arena: Arena, nbytes: int, why: str, evict: bool = True) -> Place | None:
        """Pages for `nbytes`, others leaving by least recent use where needed.

        :param evict: False takes free pages only and answers None where they do not do.
        :raises BudgetFull: with the numbers; then nothing was evicted.
        """
        pages = arena.pool.pages_for(nbytes)
        while True:
            with self.ledger.lock:
                place = arena.take(nbytes)
                if place is not None or not evict:
                    return place
                held = [
                    c
                    for c in self.ledger.all()
                    if c.place is not None and c.place.tier == arena.tier
                ]
                loose = [c for c in held if not c.pinned and not c.leases]
                can = arena.pool.free + sum(c.place.pages for c in loose if c.place)
                if can < pages:
                    pinned = sum(c.place.pages for c in held if c.pinned and c.place)
                    used = arena.pool.count - can - pinned
                    unit = arena.page_bytes
                    raise BudgetFull(
                        f'{arena.tier} tier: {nbytes} bytes asked ({pages * unit} in pages), '
                        f'budget {arena.nbytes}, pinned {pinned * unit}, free or evictable '
                        f'{can * unit}, being copied {used * unit}: unpin or drop capsules, '
                        f'{"try again, " if used else ""}or raise {arena.tier}_bytes'
                    )
                victim = loose[0]
                victim.leases += 1
            try:
                self._push_down(victim, arena, why)
            finally:
                self.release(victim)

    def _push_down(self, victim: Capsule, arena: Arena, why: str) -> None:
        """Free a leased capsule's pages: to the next tier where it can be, else dropped."""
        name, below = victim.key[1], None
        reason = f'least recently used in the {arena.tier} tier when {why} needed room'
        if arena is not self.staging and self.staging.pool.count:
            place = self._try_room(self.staging, victim.header.data_bytes, why)
            if place is not None:
                below = self._copy(victim, place)
        if below is None and not victim.on_disk and arena is self.staging:
            self._try_spill(victim)
        with self.ledger.lock:
            old = victim.place
            if victim.leases > 1 or victim.dropped or old is None or victim.pinned:
                if below is not None:
                    self.arenas[below.tier].give(below)
                return
            self.arenas[old.tier].give(old)
            victim.place = below
            gone = below is None and not victim.on_disk
            if gone:
                self.ledger.remove(victim, reason)
        to = 'dropped' if gone else f'moved to {victim.tier}'
        self.ledger.event('dropped' if gone else 'evicted', name, f'{reason}: {to}')

    def _try_room(self, arena: Arena, nbytes: int, why: str) -> Place | None:
        try:
            return self.room(arena, nbytes, why)
        except BudgetFull:
            return None

    def _try_spill(self, victim: Capsule) -> None:
        if self.disk is None or not self.disk.writable:
            return
        try:
            self.save(victim).result()
        except FlashrtError as error:
            self.ledger.event('spill_failed', victim.key[1], str(error))

    def _copy(self, capsule: Capsule, to: Place) -> Place:
        """Copy a leased capsule's bytes to another place; gives it back if the copy fails."""
        assert capsule.place is not None
        try:
            copies = Copies(stretches(
                self.arenas[capsule.place.tier].segments(capsule.place),
                self.arenas[to.tier].segments(to),
                capsule.header.data_bytes,
            ))
            self.mover.host(copies)
        except BaseException as error:
            self.give(to, error)
            raise
        return to

    def change(self, capsule: Capsule, tier: Tier, why: str, evict: bool = True) -> bool:
        """Bring a capsule from one memory tier (or a file) to another.

        Only by DMA or from a file: live memory is not touched. False, and it stays where it was,
        where another call copies the capsule now or, with `evict` False, no page is free.
        """
        arena = self.arena(tier)
        with self.leased(capsule):
            capsule.spill = False
            if capsule.place is None:
                self.load(capsule)
            assert capsule.place is not None
            if capsule.place.tier == arena.tier:
                return True
            place = self.room(arena, capsule.header.data_bytes, why, evict)
            if place is None:
                return False
            self.adopt(capsule, self._copy(capsule, place))
            return capsule.place.tier == arena.tier

    def adopt(self, capsule: Capsule, place: Place) -> None:
        """Publish a new place of a leased capsule; of two at once, the second is given back."""
        with self.ledger.lock:
            old = capsule.place
            alone = capsule.leases == 1 and not capsule.dropped
            if old is not None and not alone:
                self.arenas[place.tier].give(place)
                return
            if old is not None:
                self.arenas[old.tier].give(old)
            capsule.place = place

    def to_disk(self, capsule: Capsule) -> None:
        """Write a capsule's file, wait until it is durable, then free its memory.

        Where it is being restored just then, its memory goes with the end of that restore.
        """
        self.writable_disk()
        if not capsule.on_disk:
            self.change(capsule, 'host', f'save of {capsule.key[1]!r}')
            self.save(capsule).result()
        with self.leased(capsule):
            capsule.spill = True

    def read(self, capsule: Capsule, begin: int, end: int) -> Iterator[memoryview]:
        """Bytes [begin, end) of a leased, resident capsule's packed form, copied to the host."""
        assert capsule.place is not None
        arena = self.arenas[capsule.place.tier]
        yield from arena.read(capsule.place, begin, end)

    def usage(self, tier: str) -> TierUsage:
        """Budget and use of one tier."""
        if tier == 'disk':
            if self.disk is None:
                return TierUsage(0, 0, 0, 0)
            used, pinned, count = self.disk.usage()
            return TierUsage(self.disk.quota_bytes, used, pinned, count)
        arena = self.arenas[tier]
        with self.ledger.lock:
            held = [c for c in self.ledger.all() if c.place is not None and c.place.tier == tier]
            pinned = sum(c.place.pages for c in held if c.pinned and c.place)
            used = arena.pool.count - arena.pool.free
        return TierUsage(
            arena.nbytes, used * arena.page_bytes, pinned * arena.page_bytes, len(held)
        )

    def load(self, capsule: Capsule) -> None:
        """Read a leased capsule's file into host memory, digests checked.

        :raises CapsuleCorrupt: the file is not what was written; the capsule is then skipped.
        """
        arena = self.arena('disk')
        lost = f'capsule {capsule.key[1]!r} lost its file; snapshot again'
        if self.disk is None:
            raise CapsuleNotFound(lost)
        # Kept first: what makes room for it in memory may go to disk, and need room there.
        with self.disk.kept(capsule.key):
            if not capsule.on_disk:
                raise CapsuleNotFound(lost)
            place = self.room(arena, capsule.header.data_bytes, f'load of {capsule.key[1]!r}')
            assert place is not None
            try:
                self.disk.load(capsule.key, capsule.header, arena.views(place))
            except BaseException:
                self.give(place)
                raise
        with self.ledger.lock:
            if capsule.place is not None:
                arena.give(place)
            else:
                capsule.place = place

    def save(self, capsule: Capsule) -> Future[CapsuleInfo]:
        """Write a capsule in host memory to its file in the background; leases it meanwhile.

        Where a save runs already, or the file is there, nothing is written a second time.

        :raises BudgetFull: the disk budget; nothing was written.
        :raises CapsuleError: it left host memory before its pages were leased.
        """
        disk = self.writable_disk()
        header = header_for(capsule.header.info, capsule.header.tensors, capsule.header.data_bytes)
        saved: Future[CapsuleInfo] = Future()
        with self.ledger.lock:
            running = capsule.saving
            if running is not None and not running.done():
                return running
            if capsule.on_disk:
                saved.set_result(capsule.info)
                return saved
            place = capsule.place
            if place is None or place.tier != self.staging.tier:
                raise CapsuleError(
                    f'capsule {capsule.key[1]!r} was moved by another call before its file could '
                    'be written: try again'
                )
            self.lease(capsule)
            capsule.saving = saved
        try:
            disk.reserve(header)
            views = self.staging.views(place)
            for row in header.tensors:
                if row.name.startswith(GAP):
                    _zero(views, row.begin, row.end)
            writing = disk.save(capsule.key, header, views)
        except BaseException as error:
            self.release(capsule)
            capsule.saving = None
            saved.set_exception(error)
            raise
        writing.add_done_callback(lambda written: self._saved(capsule, written, saved))
        return saved

    def _saved(self, capsule: Capsule, written: Future[Any], saved: Future[CapsuleInfo]) -> None:
        error = written.exception()
        with self.ledger.lock:
            if error is None:
                capsule.on_disk = True
                capsule.header = replace(capsule.header, digests=written.result().header.digests)
            self.release(capsule)
        if capsule.dropped and error is None:
            try:
                self._delete_file(capsule)
            except CapsuleError as refused:
                error = refused
        if error is not None:
            self.ledger.event('save_failed', capsule.key[1], str(error))
            saved.set_exception(error)
        else:
            saved.set_result(capsule.info)


def _zero(views: list[memoryview], begin: int, end: int) -> None:
    at = 0
    for view in views:
        low, high = max(begin - at, 0), min(end - at, len(view))
        if low < high:
            view[low:high] = bytes(high - low)
        at += len(view)
