"""The disk tier: capsule files of one directory under a quota, written in the background."""

from __future__ import annotations

from collections import Counter
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import ThreadPoolExecutor
import contextlib
from dataclasses import dataclass
from datetime import datetime
from datetime import UTC
import os
from pathlib import Path
import threading
import time

from ..errors import BudgetFull
from ..errors import CapsuleCorrupt
from ..errors import CapsuleError
from ..errors import CapsuleNotFound
from ..errors import ConfigError
from ..errors import TierUnavailable
from . import files
from .format import Header
from .records import plain

FILE_LIMIT = 65536
Key = tuple[str, str]
"""(session, id)."""


@dataclass(frozen=True)
class Stored:
    """A durable file: its header as last read, its size, and when it was written.

    :param written_s: on the monotonic clock, so that a wall clock set later ages no file.
    """

    header: Header
    file_bytes: int
    written_s: float


class DiskTier:
    """Files of one directory, oldest use first. All methods may be called from any thread.

    While `lock` is held no file leaves. The ledger's lock may be taken under it, never the other
    way about.

    :param quota_bytes: of all files together. :param max_age_s: older files go at the start (by
        their date) and at each save (by the time passed since); None keeps them.
    :param writable: False lists and loads only.
    :param event: told of what is cleaned, skipped or deleted, as (kind, id, reason).
    :param left: told of each capsule whose file was deleted for room or age, with the reason.
    """

    def __init__(
        self,
        directory: str | Path,
        quota_bytes: int,
        max_age_s: float | None,
        writable: bool,
        event: Callable[[str, str, str], None],
        left: Callable[[Key, str], None],
        pinned: Callable[[Key], bool],
    ) -> None:
        aged = max_age_s is None or (isinstance(max_age_s, int | float) and max_age_s > 0)
        if not isinstance(quota_bytes, int) or quota_bytes < 0 or not aged:
            raise ConfigError(
                f'disk budget {quota_bytes!r} bytes, age limit {max_age_s!r} s refused: give a '
                'whole number of bytes, and more than 0 seconds or None'
            )
        self.directory = Path(directory)
        self.quota_bytes = quota_bytes
        self.writable = writable
        self._max_age_s = max_age_s
        self._event = event
        self._left = left
        self._pinned = pinned
        self.lock = threading.RLock()
        self._files: OrderedDict[Key, Stored] = OrderedDict()
        self._reading: Counter[Key] = Counter()
        self._reserved = 0
        self._fd = files.open_directory(directory, create=writable)
        self._writer = ThreadPoolExecutor(1, 'capsule-writer')
        if writable:
            for name in files.clean_temporaries(self._fd):
                event('cleaned', plain(name), 'left by a writer that was killed')
        self._scan()
        if writable:
            self._expire()

    def _scan(self) -> None:
        names = [name for name in os.listdir(self._fd) if name.endswith(files.SUFFIX)]
        if len(names) > FILE_LIMIT:
            self._event('skipped', '', f'{len(names)} files, of which {FILE_LIMIT} are listed')
        dated = []
        for name in names[:FILE_LIMIT]:
            with contextlib.suppress(OSError):
                dated.append((os.lstat(name, dir_fd=self._fd).st_mtime, name))
        now, wall = time.monotonic(), datetime.now(UTC).timestamp()
        for changed, name in sorted(dated):
            try:
                with files.opened(name, self._fd) as (fd, size):
                    header = files.read_header(fd, size)
                    key = (header.info.session, header.info.id)
                    if files.file_name(*key) != name:
                        raise CapsuleCorrupt(f'file {name!r} holds {key}: rename by import')
                    self._files[key] = Stored(header, size, now - max(0.0, wall - changed))
            except CapsuleError as error:
                self._event('skipped', plain(name)[:100], str(error))

    def _expire(self) -> None:
        if self._max_age_s is None:
            return
        now = time.monotonic()
        for key, stored in list(self._files.items()):
            age = now - stored.written_s
            if age > self._max_age_s and not self._held(key):
                try:
                    self._leave(key, f'{age:.0f} s old, limit {self._max_age_s:.0f} s')
                except CapsuleError as error:
                    self._event('expiry_failed', key[1], str(error))

    def __contains__(self, key: Key) -> bool:
        with self.lock:
            return key in self._files

    def stored(self) -> list[tuple[Key, Stored]]:
        """All files, oldest use first."""
        with self.lock:
            return list(self._files.items())

    def usage(self) -> tuple[int, int, int]:
        """(bytes used, bytes pinned, files)."""
        with self.lock:
            pinned = sum(s.file_bytes for k, s in self._files.items() if self._pinned(k))
            return self._used() + self._reserved, pinned, len(self._files)

    def check_writable(self) -> None:
        """Raise TierUnavailable where saving is not allowed, or no longer."""
        self._check_open()
        if not self.writable:
            raise TierUnavailable(
                'saving capsules to disk is not allowed: set allow_disk and a disk budget'
            )

    def reserve(self, header: Header) -> None:
        """Make room for a file under the quota and on the file system, by dropping others.

        The least recently used that are not pinned leave first.

        :raises BudgetFull: what is left is pinned or being read, or the file is larger than the
            quota or the file system; nothing was dropped.
        """
        asked = header.file_bytes
        with self.lock:
            self.check_writable()
            self._expire()
            loose = [key for key in self._files if not self._held(key)]
            freed = sum(self._files[key].file_bytes for key in loose)
            used = self._used() + self._reserved
            if used - freed + asked > self.quota_bytes:
                raise BudgetFull(
                    f'disk tier: {asked} bytes asked, {used - freed} of {self.quota_bytes} are '
                    'pinned, being read or written: drop or unpin capsules, or raise the disk '
                    'budget'
                )
            try:
                system = os.fstatvfs(self._fd)
            except OSError as error:
                raise CapsuleError(f'disk tier: its file system does not answer: {error}; check '
                                   'its disk') from error
            free = system.f_bavail * system.f_frsize
            if asked > free + freed:
                raise BudgetFull(
                    f'disk tier: {asked} bytes asked, the file system has {free} free: make room '
                    'or use another directory'
                )
            for key in loose:
                used = self._used() + self._reserved
                if used + asked <= self.quota_bytes and asked <= free:
                    break
                free += self._files[key].file_bytes
                self._leave(key, f'least recently used when {asked} bytes were needed on disk')
            self._reserved += asked

    def save(
        self, key: Key, header: Header, data: Sequence[memoryview]
    ) -> Future[Stored]:
        """Write in the background; `reserve` was called. `data` must stay until it is done.

        :raises TierUnavailable: the store closes; the reservation is given back.
        """

        def write() -> Stored:
            try:
                done = files.save(self._fd, files.file_name(*key), header, data, replacing=False)
                stored = Stored(done, done.file_bytes, time.monotonic())
                with self.lock:
                    self._files[key] = stored
                return stored
            finally:
                with self.lock:
                    self._reserved -= header.file_bytes

        try:
            return self._writer.submit(write)
        except RuntimeError:  # shut down since `reserve`
            with self.lock:
                self._reserved -= header.file_bytes
            raise TierUnavailable('the capsule store is closed: make a new one') from None

    @contextlib.contextmanager
    def kept(self, key: Key) -> Iterator[None]:
        """Keep a file that is about to be read from leaving for room or age."""
        with self.lock:
            self._reading[key] += 1
        try:
            yield
        finally:
            with self.lock:
                self._reading[key] -= 1
                if not self._reading[key]:
                    del self._reading[key]

    def load(self, key: Key, expected: Header, into: Sequence[memoryview]) -> None:
        """Read a file's data into host memory, every digest checked.

        :raises CapsuleCorrupt: the file changed since it was listed, or its bytes did.
        :raises CapsuleNotFound: another process deleted it; it is no longer listed.
        """
        name = files.file_name(*key)
        try:
            with self._directory() as directory, files.opened(name, directory) as (fd, size):
                header = files.read_header(fd, size)
                if header.digests != expected.digests or header.tensors != expected.tensors:
                    raise CapsuleCorrupt(f'capsule file {name!r} changed since it was listed')
                files.read_data(fd, header, into)
        except CapsuleNotFound:
            with self.lock:  # a newer one of that name may be listed by now
                listed = self._files.get(key)
                if listed is not None and listed.header.digests == expected.digests:
                    del self._files[key]
                    self._left(key, 'its file was deleted by someone else')
            raise
        with self.lock:
            if key in self._files:
                self._files.move_to_end(key)

    def drop(self, key: Key) -> None:
        """Delete a file; a missing one is fine.

        :raises TierUnavailable: saving is not allowed, so nor is deleting.
        :raises CapsuleError: the system refused; the file stays listed.
        """
        with self.lock:
            self.check_writable()
            files.remove(self._fd, files.file_name(*key))
            self._files.pop(key, None)

    def close(self) -> None:
        """Finish what is being written and let go of the directory; twice is allowed."""
        self._writer.shutdown(wait=True)
        with self.lock:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    def _held(self, key: Key) -> bool:
        return self._pinned(key) or key in self._reading

    @contextlib.contextmanager
    def _directory(self) -> Iterator[int]:
        """A descriptor that stays good while the store is closed by another thread."""
        with self.lock:
            self._check_open()
            directory = os.dup(self._fd)
        try:
            yield directory
        finally:
            os.close(directory)

    def _check_open(self) -> None:
        if self._fd < 0:
            raise TierUnavailable('the capsule store is closed: make a new one')

    def _used(self) -> int:
        return sum(stored.file_bytes for stored in self._files.values())

    def _leave(self, key: Key, reason: str) -> None:
        self.drop(key)
        self._left(key, reason)
        self._event('left_disk', key[1], reason)
