"""What a store holds: capsules by (session, id), their use, their leases, and why others went."""

from __future__ import annotations

from collections import Counter
from collections import deque
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from dataclasses import replace
import threading
from weakref import ReferenceType

from ..errors import CapsuleError
from ..errors import CapsuleExists
from ..errors import CapsuleNotFound
from .arena import Place
from .boundary import Boundary
from .boundary import Piece
from .disk import Key
from .format import Header
from .records import CapsuleInfo
from .records import check_id
from .records import StoreEvent
from .records import Tier
from .transfers import Copies

GONE_LIMIT = 1024
EVENT_LIMIT = 1024


@dataclass(frozen=True)
class Thawed:
    """The prepared copies of a restore, good while boundary, place and rows are the same."""

    boundary: ReferenceType[Boundary]
    place: Place
    rows: tuple[int, ...]
    copies: Copies


@dataclass(frozen=True)
class Arriving:
    """The same for one that arrives in stages: live pieces, and copies to live memory, of each."""

    boundary: ReferenceType[Boundary]
    place: Place
    pieces: list[list[Piece]]
    copies: list[list[tuple[int, int, int]]]


class Capsule:
    """Immutable state bytes and the store's notes about them.

    `header` and the bytes at `place` never change once it is published. `leases` counts the copies
    that read or write the place now: its pages are given back only at zero. `fits`, `thawed` and
    `arriving` remember the last session it was checked for and the copies of its last restores,
    `peeked` the bytes of small buffers that were asked for.
    """

    __slots__ = (
        '_shown', 'arriving', 'dropped', 'fits', 'header', 'key', 'last_use', 'leases', 'on_disk',
        'peeked', 'pinned', 'place', 'saving', 'spill', 'thawed',
    )

    def __init__(self, key: Key, header: Header, place: Place | None, pinned: bool) -> None:
        self.key = key
        self.header = header
        self.place = place
        self.pinned = pinned
        self.leases = 0
        self.last_use = 0
        self.on_disk = False
        self.dropped = False
        self.spill = False
        self.saving: Future[CapsuleInfo] | None = None
        self.fits: tuple[ReferenceType[Boundary], bool] | None = None
        self.thawed: Thawed | None = None
        self.arriving: Arriving | None = None
        self.peeked: dict[str, bytes] = {}
        self._shown = header.info

    @property
    def tier(self) -> Tier:
        """The fastest tier that holds it."""
        if self.place is None:
            return 'disk'
        return 'gpu' if self.place.tier == 'gpu' else 'host'

    @property
    def info(self) -> CapsuleInfo:
        """How it is listed now."""
        now = (self.tier, self.pinned, self.on_disk)
        if now != (self._shown.tier, self._shown.pinned, self._shown.on_disk):
            tier, pinned, on_disk = now
            self._shown = replace(
                self.header.info, tier=tier, pinned=pinned, on_disk=on_disk
            )
        return self._shown


class Counted:
    """Notes a CapsuleError that leaves it; a plain class, being on the path of every reset."""

    __slots__ = ('_capsule_id', '_ledger')

    def __init__(self, ledger: Ledger, capsule_id: str | None) -> None:
        self._ledger = ledger
        self._capsule_id = capsule_id

    def __enter__(self) -> None:
        """Begin a verb."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Note why it was refused."""
        if isinstance(error, CapsuleError):
            self._ledger.event(
                f'refused:{error.code}', str(self._capsule_id or '')[:64], str(error)
            )


class Claim:
    """A name held while its capsule is made; a plain class, being on the path of a snapshot."""

    __slots__ = ('_asked', '_key', '_ledger', '_session')

    def __init__(self, ledger: Ledger, session: str, capsule_id: str | None) -> None:
        self._ledger = ledger
        self._session = session
        self._asked = capsule_id

    def __enter__(self) -> Key:
        """Hold the name; raises CapsuleExists, CapsuleIdInvalid."""
        self._key = self._ledger.hold_name(self._session, self._asked)
        return self._key

    def __exit__(self, *exc: object) -> None:
        """Let it go: its capsule is listed now, or there is none."""
        self._ledger.free_name(self._key)


class Ledger:
    """Names, use and reasons.

    `lock` guards it and the page pools; it is held for bookkeeping only, never during a copy, and
    the disk tier is never called under it: one session's file delays no other's reset, and the
    disk's own lock may be held when this one is taken.

    :param listener: called with each event, on whatever thread caused it; must not block. What it
        raises is counted as ``listener_failed``.
    """

    def __init__(self, listener: Callable[[StoreEvent], None] | None = None) -> None:
        self.lock = threading.RLock()
        self.events: deque[StoreEvent] = deque(maxlen=EVENT_LIMIT)
        self.counters: Counter[str] = Counter()
        self._listener = listener
        self._capsules: dict[Key, Capsule] = {}
        self._claimed: set[Key] = set()
        self._gone: OrderedDict[Key, str] = OrderedDict()
        self._uses = 0
        self._names = 0

    def event(self, kind: str, capsule_id: str, reason: str) -> None:
        """Note an eviction, promotion, miss or refusal; takes no lock, never raises."""
        happened = StoreEvent(kind, capsule_id, reason)
        self.events.append(happened)
        self.counters[kind] += 1
        if self._listener is not None:
            try:
                self._listener(happened)
            except Exception:
                # A verb half-way through its bookkeeping may not end in its listener's mistake.
                self.counters['listener_failed'] += 1

    def counted(self, capsule_id: str | None) -> Counted:
        """Note every refusal of the verb inside with its code and reason."""
        return Counted(self, capsule_id)

    def claim(self, session: str, capsule_id: str | None) -> Claim:
        """Hold a free name while its capsule is made; None picks the next ``c000001``."""
        return Claim(self, session, capsule_id)

    def hold_name(self, session: str, capsule_id: str | None) -> Key:
        """Begin a claim.

        :raises CapsuleExists: the name is taken, or claimed by another call.
        """
        with self.lock:
            key = (session, self._next_name(session) if capsule_id is None else capsule_id)
            check_id(key[1])
            if key in self._capsules or key in self._claimed:
                raise CapsuleExists(
                    f'capsule {key[1]!r} exists already: drop it first or use another id'
                )
            self._claimed.add(key)
        return key

    def free_name(self, key: Key) -> None:
        """End a claim."""
        with self.lock:
            self._claimed.discard(key)

    def _next_name(self, session: str) -> str:
        while True:
            self._names += 1
            name = f'c{self._names:06d}'
            if (session, name) not in self._capsules and (session, name) not in self._claimed:
                return name

    def add(self, capsule: Capsule) -> Capsule:
        """Publish a capsule."""
        with self.lock:
            self._capsules[capsule.key] = capsule
            self._gone.pop(capsule.key, None)
            self.touch(capsule)
        return capsule

    def remove(self, capsule: Capsule, reason: str) -> None:
        """Take a capsule off the list and remember why; a newer one of its name stays."""
        with self.lock:
            capsule.dropped = True
            if self._capsules.get(capsule.key) is not capsule:
                return
            del self._capsules[capsule.key]
            self._gone[capsule.key] = reason
            while len(self._gone) > GONE_LIMIT:
                self._gone.popitem(last=False)

    def take_file(self, capsule: Capsule) -> bool:
        """Say whether the caller is the one to delete a capsule's file; it is told once."""
        with self.lock:
            taken, capsule.on_disk = capsule.on_disk, False
            return taken

    def find(self, session: str, capsule_id: str) -> Capsule:
        """The capsule of that name.

        :raises CapsuleNotFound: with those held, and why this one went if it was held before.
        """
        key = (session if session == '' else check_id(session, 'session name'),
               check_id(capsule_id))
        with self.lock:
            capsule = self._capsules.get(key)
            if capsule is not None:
                return capsule
            held = sorted(k[1] for k in self._capsules if k[0] == session)
            why = self._gone.get(key)
        shown = ', '.join(held[:16]) + (f' and {len(held) - 16} more' if len(held) > 16 else '')
        gone = f'it went: {why}; ' if why else ''
        raise CapsuleNotFound(
            f'no capsule {capsule_id!r}{f" of session {session!r}" if session else ""}: {gone}'
            f'held are {shown or "none"}'
        )

    def touch(self, capsule: Capsule) -> None:
        """Make it the most recently used."""
        with self.lock:
            self._uses += 1
            capsule.last_use = self._uses

    def all(self) -> list[Capsule]:
        """Every capsule, least recently used first."""
        with self.lock:
            return sorted(self._capsules.values(), key=lambda capsule: capsule.last_use)

    def pinned(self, key: Key) -> bool:
        """Whether a name is pinned; takes no lock."""
        capsule = self._capsules.get(key)
        return capsule is not None and capsule.pinned

    def forget_file(self, key: Key, reason: str) -> None:
        """A file left the disk tier; a capsule that was nowhere else is gone."""
        with self.lock:
            capsule = self._capsules.get(key)
            if capsule is not None:
                capsule.on_disk = False
                if capsule.place is None:
                    self.remove(capsule, reason)
