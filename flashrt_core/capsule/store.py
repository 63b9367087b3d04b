"""The store: the verbs snapshot, restore, mark, rollback, and what is kept where."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from concurrent.futures import Future
import hashlib
from pathlib import Path
import time
from typing import Any
from typing import Literal

from ..errors import CapsuleCorrupt
from ..errors import CapsuleError
from ..errors import ConfigError
from ..errors import MarkDead
from ..errors import TierUnavailable
from ..runtime import Backend
from .arena import Place
from .arrival import Arrival
from .boundary import Boundary
from .disk import DiskTier
from .format import GAP
from .format import Header
from .ledger import Capsule
from .ledger import Ledger
from .live import check_fits
from .live import check_overrides
from .live import Continuation
from .live import Live
from .marks import Mark
from .marks import MarkRing
from .records import CapsuleInfo
from .records import check_label
from .records import RestoreReport
from .records import StoreEvent
from .records import TIERS
from .records import TierUsage
from .records import utc_now
from .tiers import Tiers

PAGE_BYTES = 2 << 20
MARKS = 16
Proof = Literal['off', 'digest', 'replay']


class CapsuleStore:
    """All capsules of a process, by session and id, over three tiers with budgets.

    Make it in configure: every arena is allocated here and nothing after. `snapshot`, `restore`,
    `mark` and `rollback` touch live memory and run on the session's lane thread; everything else
    may be called from any thread. Every eviction, miss and refusal is in `events` and `counters`.

    :param gpu_bytes: arena on the device. :param host_bytes: pinned arena; files pass through it.
    :param disk_bytes: quota of the files in `directory`, which is only written with `allow_disk`.
    :param max_age_s: files older than this are deleted. :param page_bytes: unit of the arenas.
    :param fold: True joins gpu and host tier; None does so on a GPU with unified memory.
    :param listener: told of each event on the thread that caused it.
    :raises OutOfMemory, ConfigError, CapsuleError: a budget or the directory cannot be used.
    """

    def __init__(
        self,
        backend: Backend,
        gpu_bytes: int,
        host_bytes: int,
        disk_bytes: int = 0,
        directory: str | Path | None = None,
        allow_disk: bool = False,
        page_bytes: int = PAGE_BYTES,
        *,
        max_age_s: float | None = None,
        fold: bool | None = None,
        listener: Callable[[StoreEvent], None] | None = None,
    ) -> None:
        self._backend = backend
        self._ledger = Ledger(listener)
        self._tiers = Tiers(backend, self._ledger, gpu_bytes, host_bytes, page_bytes, fold)
        self._live = Live(backend, self._tiers)
        self.events = self._ledger.events
        self.counters = self._ledger.counters
        if allow_disk and (directory is None or not disk_bytes):
            raise ConfigError('capsules on disk need a directory and a budget above 0: set '
                              'capsule_directory and capsule_disk_bytes')
        if directory is not None:
            self._open_disk(directory, disk_bytes, max_age_s, allow_disk)

    def _open_disk(
        self, directory: str | Path, quota: int, max_age_s: float | None, writable: bool
    ) -> None:
        disk = DiskTier(
            directory,
            quota,
            max_age_s,
            writable,
            self._ledger.event,
            self._ledger.forget_file,
            self._ledger.pinned,
        )
        for key, stored in disk.stored():
            capsule = Capsule(key, stored.header, None, pinned=False)
            capsule.on_disk = True
            self._ledger.add(capsule)
        self._tiers.disk = disk

    # -- verbs on live memory: lane thread --------------------------------------------------

    def snapshot(
        self,
        boundary: Boundary,
        id: str | None = None,
        *,
        row: int = 0,
        label: str = '',
        tier: str = 'gpu',
        pin: bool = False,
    ) -> CapsuleInfo:
        """Freeze one row of the committed boundary into an immutable capsule.

        With tier 'disk' it is in host memory on return and its file is written in the background:
        wait for `saved(id)`, not on the lane.

        :raises NotAtBoundary: a plan runs. :raises SessionPoisoned: the state is half-restored.
        :raises BudgetFull: pins fill the tier. :raises CapsuleExists: the id is taken.
        """
        with self._ledger.counted(id), self._ledger.claim(boundary.session, id) as key:
            boundary.check_thread()
            boundary.check_usable()
            boundary.check_committed()
            (row,) = boundary.check_rows((row,))
            check_label(label)
            wanted = self._tiers.check_tier(tier)
            extents = boundary.extents()
            packing = boundary.packing(extents)
            parent, exact = boundary.origin(row)
            position = boundary.position()

            def describe(place: Place) -> Capsule:
                info = CapsuleInfo(
                    id=key[1],
                    label=label,
                    tier=wanted,
                    session=boundary.session,
                    identity=boundary.identity,
                    parent=parent,
                    position=position,
                    extents=extents,
                    size_bytes=packing.payload,
                    created=utc_now(),
                    pinned=pin,
                    bit_exact=exact,
                )
                return Capsule(key, Header(info, packing.tensors, packing.nbytes), place, pin)

            capsule = self._live.freeze(boundary, packing, row, wanted, key[1], describe)
            if wanted == 'disk':
                self._tiers.begin_on_disk(capsule)
            else:
                self._ledger.add(capsule)
            return capsule.info

    def restore(
        self,
        boundary: Boundary,
        id: str,
        *,
        rows: Iterable[int] = (0,),
        numerics: str = 'same',
        proof: Proof = 'off',
        overrides: Mapping[str, Sequence[Any]] | None = None,
        session: str | None = None,
        continuation: Continuation | None = None,
    ) -> RestoreReport:
        """Write a capsule back into the same addresses; fork by naming several rows.

        All that can fail comes first (lookup, identity, read, hash, stage), then one submission.
        A failure before it leaves the session as it was; one during it poisons the session until a
        restore succeeds. A capsule from a lower tier moves up where pages are free.

        :param numerics: 'any' accepts other kernels or libraries; then nothing is bit-exact.
        :param proof: 'digest' compares hashes of live and stored memory after the copy: it shows a
            lost or misplaced copy, not stored bytes that changed since the snapshot (`digest`
            tells those); 'replay' runs `continuation`.
        :param overrides: per named state buffer one value (or tensor) per row, written after the
            copy: ``{'branch': range(n)}`` for a fork.
        :param session: of the capsule, where it is not this boundary's.
        :raises CapsuleNotFound, IdentityMismatch, CapsuleCorrupt, BudgetFull: session untouched.
        :raises SessionPoisoned: the submission failed.
        """
        started = time.perf_counter()
        with self._ledger.counted(id):
            boundary.check_thread()
            chosen = boundary.check_rows(rows)
            capsule = self._ledger.find(boundary.session if session is None else session, id)
            same = check_fits(boundary, capsule, numerics)
            written = check_overrides(boundary, overrides or {}, chosen)
            _check_proof(proof, continuation)
            exact = same and capsule.header.info.bit_exact

            def finish() -> None:
                self._adopt(boundary, capsule, chosen, exact)

            with self._tiers.leased(capsule):
                source = capsule.tier
                if capsule.place is None:
                    self._tiers.load(capsule)
                copy_us = self._live.thaw(boundary, capsule, chosen, written, proof, finish)
                if continuation is not None:
                    found = self._live.replay(boundary, capsule, continuation)
                    self._live.thaw(boundary, capsule, chosen, written, proof, finish)
                    if found != continuation.expected:
                        raise CapsuleCorrupt(
                            f'capsule {id!r}: its recorded continuation gave other bytes; the '
                            'state is restored, but the boundary does not hold all it depends on'
                        )
            info = capsule.info
            self._ledger.touch(capsule)
            return RestoreReport(
                id=capsule.key[1],
                bytes=info.size_bytes * len(chosen),
                us=(time.perf_counter() - started) * 1e6,
                bit_exact=exact,
                copy_us=copy_us,
                source=source,
                position=info.position,
                rows=chosen,
            )

    def start_restore(
        self, boundary: Boundary, id: str, *, numerics: str = 'same', session: str | None = None
    ) -> Arrival:
        """Begin a restore that the session's next plan, launched now, goes on with meanwhile.

        From host memory, or a file read into it, the copies then run beside that plan, if the
        boundary has stages; `finish` of the result ends them after it, and until then the session
        is poisoned and the capsule leased. From the gpu tier all is restored on return. A
        planner's `restore_and_append` does this as one operation.

        Parameters and errors as of `restore`.
        """
        started = time.perf_counter()
        with self._ledger.counted(id):
            boundary.check_thread()
            capsule = self._ledger.find(boundary.session if session is None else session, id)
            exact = check_fits(boundary, capsule, numerics) and capsule.header.info.bit_exact
            if capsule.tier == 'gpu' or boundary.stages is None or boundary.lane is None:
                report = self.restore(boundary, id, numerics=numerics, session=session)
                return Arrival.of(report)
            self._tiers.lease(capsule)
            arrival = Arrival(self._tiers, self._live, boundary, capsule, exact, started)
            return arrival.start(lambda slot: self._adopt(boundary, capsule, (0,), exact, slot))

    def peek(
        self, boundary: Boundary, id: str, name: str, *, numerics: str = 'same',
        session: str | None = None,
    ) -> tuple[CapsuleInfo, bytes]:
        """A capsule's info and the bytes of one of its small state buffers; any thread.

        Read once; of a capsule that is only a file, that is read into host memory.

        :raises CapsuleNotFound, IdentityMismatch, CapsuleCorrupt, BudgetFull: as of `restore`.
        """
        with self._ledger.counted(id):
            capsule = self._ledger.find(boundary.session if session is None else session, id)
            check_fits(boundary, capsule, numerics)
            if name not in capsule.peeked:
                row = next((row for row in capsule.header.tensors if row.name == name), None)
                if row is None:
                    raise ConfigError(f'capsule {id!r} has no state buffer {name!r}; it has '
                                      f'{[entry.name for entry in boundary.entries]}')
                with self._tiers.leased(capsule):
                    if capsule.place is None:
                        self._tiers.load(capsule)
                    found = b''.join(self._tiers.read(capsule, row.begin, row.end))
                capsule.peeked[name] = found
            return capsule.info, capsule.peeked[name]

    def _adopt(
        self, boundary: Boundary, capsule: Capsule, rows: tuple[int, ...], exact: bool,
        slot: int | None = None,
    ) -> None:
        """Lineage, the session's hooks, and the restored state as the first mark of its line.

        :param slot: of the ring, which is to hold that state by then; None copies it now.
        """
        boundary.adopt_branches(rows, capsule.key[1], exact)
        if 0 in rows:
            boundary.adopt(capsule.key[1], exact)
        for hook in boundary.on_restore:
            hook(capsule.info, rows)
        if 0 in rows and boundary.ring is not None:
            if slot is None:
                boundary.ring.take(boundary)
            else:
                boundary.ring.note(boundary, slot)

    # -- marks: lane thread -----------------------------------------------------------------

    def prepare(self, boundary: Boundary, marks: int = MARKS) -> None:
        """Allocate the ring of marks of a session; in configure. The first `mark` does it too."""
        if marks < 1:
            raise ConfigError(f'marks is {marks}: a ring holds 1 or more')
        boundary.ring = MarkRing(self._backend, boundary, marks)

    def mark(self, boundary: Boundary) -> Mark:
        """Copy the small state of row 0 to the ring; a few device copies, nothing waited for.

        :raises NotAtBoundary, SessionPoisoned: as for a snapshot.
        """
        with self._ledger.counted(None):
            boundary.check_thread()
            boundary.check_usable()
            boundary.check_committed()
            if boundary.ring is None:
                self.prepare(boundary)
            assert boundary.ring is not None
            return boundary.ring.take(boundary)

    def rollback(
        self,
        boundary: Boundary,
        to: str | Mark | None = None,
        *,
        boundaries: int | None = None,
        numerics: str = 'same',
        proof: Proof = 'off',
    ) -> RestoreReport:
        """Go back to a capsule, a mark, or a number of boundaries within the last restore.

        A mark writes the small state only: its KV is still in place, or the mark is dead.

        :raises MarkDead: KV below it was rewritten, or the ring no longer holds it.
        :raises ConfigError: not exactly one of `to` and `boundaries`.
        """
        if (to is None) == (boundaries is None):
            raise ConfigError('rollback takes exactly one of `to` and `boundaries`')
        if isinstance(to, str):
            return self.restore(boundary, to, numerics=numerics, proof=proof)
        _check_proof(proof, None)
        if not isinstance(to, Mark) and not isinstance(boundaries, int):
            raise ConfigError(
                f'rollback to {to!r:.80} by {boundaries!r:.80} boundaries is refused: give a '
                'capsule id, a mark, or a whole number of boundaries'
            )
        started = time.perf_counter()
        with self._ledger.counted(None):
            boundary.check_thread()
            boundary.check_usable()
            ring = boundary.ring
            if ring is None:
                raise MarkDead('this session holds no marks: call mark at its boundaries')
            mark = ring.check(to) if to is not None else ring.back(boundary, boundaries or 0)
            copying = time.perf_counter()
            try:
                ring.write_back(mark)
                self._live.wait(boundary)
                if proof == 'digest' and not ring.equals(mark):
                    raise CapsuleCorrupt(f'live memory does not equal mark {mark.id!r}')
                ring.forget_after(mark)
                boundary.adopt(mark.parent, mark.bit_exact, mark.lineage)
                for hook in boundary.on_restore:
                    hook(mark, (0,))
            except BaseException as error:
                raise self._live.poison(boundary, f'rollback to {mark.id}', error) from error
            now = time.perf_counter()
            return RestoreReport(
                id=mark.id,
                bytes=ring.nbytes,
                us=(now - started) * 1e6,
                bit_exact=mark.bit_exact,
                copy_us=(now - copying) * 1e6,
                source='mark',
                position=mark.position,
            )

    # -- bookkeeping: any thread ------------------------------------------------------------

    def get(self, id: str, session: str = '') -> CapsuleInfo:
        """One capsule's info; raises CapsuleNotFound with those held and why it went."""
        with self._ledger.counted(id):
            return self._ledger.find(session, id).info

    def list(self, tier: str | None = None, session: str | None = None) -> list[CapsuleInfo]:
        """Infos, most recently used first, of one tier or session where given.

        :raises TierUnavailable: no such tier.
        """
        if tier not in (None, *TIERS):
            raise TierUnavailable(f'capsule tier {tier!r} does not exist: use gpu, host or disk')
        infos = [capsule.info for capsule in reversed(self._ledger.all())]
        return [
            info
            for info in infos
            if tier in (None, info.tier) and session in (None, info.session)
        ]

    def pin(self, id: str, pinned: bool = True, session: str = '') -> CapsuleInfo:
        """Keep a capsule in its tier, or let it go again. A pin is never evicted."""
        with self._ledger.counted(id):
            return self._tiers.pin(session, id, bool(pinned))

    def drop(self, id: str, session: str = '') -> None:
        """Delete a capsule and its file.

        :raises CapsuleError: it is pinned, or its file cannot be deleted; it stays as it was.
        :raises TierUnavailable: it has a file in a directory that may only be read.
        """
        with self._ledger.counted(id):
            self._tiers.drop(self._ledger.find(session, id))

    def move(self, id: str, tier: str, session: str = '') -> CapsuleInfo:
        """Bring a capsule to another tier and wait; to disk, until its file is durable.

        Live memory is not touched. A file stays when its capsule moves up.

        :raises BudgetFull, TierUnavailable, CapsuleCorrupt: it stays where it was.
        :raises CapsuleError: another call copies it now; it stays where it was.
        """
        with self._ledger.counted(id):
            capsule = self._ledger.find(session, id)
            wanted = self._tiers.check_tier(tier)
            if wanted == 'disk':
                self._tiers.to_disk(capsule)
            elif not self._tiers.change(capsule, wanted, f'move of {id!r}'):
                raise CapsuleError(
                    f'capsule {id!r} is being copied by another call: it stays in the '
                    f'{capsule.tier} tier; try again'
                )
            self._ledger.touch(capsule)
            return capsule.info

    def prefetch(self, id: str, session: str = '') -> CapsuleInfo:
        """Read a capsule that is only on disk into host memory, so that a restore need not."""
        with self._ledger.counted(id):
            capsule = self._ledger.find(session, id)
            with self._tiers.leased(capsule):
                if capsule.place is None:
                    self._tiers.load(capsule)
            return capsule.info

    def saved(self, id: str, session: str = '') -> Future[CapsuleInfo]:
        """Done once the capsule's file is durable, or failed with why it is not."""
        with self._ledger.counted(id):
            capsule = self._ledger.find(session, id)
            if capsule.saving is not None:
                return capsule.saving
            if not capsule.on_disk:
                raise CapsuleError(f'capsule {id!r} is not being saved: move it to disk')
            done: Future[CapsuleInfo] = Future()
            done.set_result(capsule.info)
            return done

    def digest(self, id: str, session: str = '') -> str:
        """SHA-256 of a capsule's state bytes without gaps, as hex; reads all of it out."""
        capsule = self._ledger.find(session, id)
        state = hashlib.sha256()
        with self._tiers.leased(capsule):
            if capsule.place is None:
                self._tiers.load(capsule)
            for row in capsule.header.tensors:
                if not row.name.startswith(GAP):
                    for data in self._tiers.read(capsule, row.begin, row.end):
                        state.update(data)
        return state.hexdigest()

    def usage(self) -> dict[str, TierUsage]:
        """Budget and use of each tier."""
        return {tier: self._tiers.usage(tier) for tier in TIERS}

    def close(self) -> None:
        """Finish files being written; the store is not used afterwards."""
        if self._tiers.disk is not None:
            self._tiers.disk.close()


def _check_proof(proof: str, continuation: Continuation | None) -> None:
    if proof not in ('off', 'digest', 'replay') or (proof == 'replay') != (
        continuation is not None
    ):
        raise ConfigError(
            f"proof {proof!r} is refused: use 'off', 'digest', or 'replay' together with a "
            'recorded continuation'
        )
