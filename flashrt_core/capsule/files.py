"""Capsule files: written so that a kill at any moment loses nothing, read trusting nothing.

Order of a save: data, header, fsync, rename, fsync of the directory; a file under its final name
is complete. Files are opened relative to a directory descriptor without following links, so an id
can neither leave the directory nor be redirected. Pieces of 4 MiB go through the worker pool: each
is hashed by the thread that reads or writes it.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from collections.abc import Generator
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from concurrent.futures import Future
import contextlib
from dataclasses import replace
import errno
import fcntl
import hashlib
import itertools
import os
from pathlib import Path
import stat

from ..errors import CapsuleCorrupt
from ..errors import CapsuleError
from ..errors import CapsuleExists
from ..errors import CapsuleNotFound
from . import format as container
from .format import Header
from .hashing import fold
from .hashing import GROUP_BYTES
from .hashing import LEAF_BYTES
from .hashing import leaves
from .hashing import WORKERS
from .hashing import workers

SUFFIX = '.capsule'
PIECE_BYTES = 4 << 20
_TEMPORARY = itertools.count()


def file_name(session: str, capsule_id: str) -> str:
    """Name of a capsule's file; '@' is in no id, so names of two sessions never meet."""
    return f'{session}@{capsule_id}{SUFFIX}' if session else f'{capsule_id}{SUFFIX}'


def open_directory(path: str | Path, create: bool = False) -> int:
    """Descriptor of a capsule directory, made with mode 0700 if asked.

    :raises CapsuleError: missing or not a directory.
    """
    try:
        if create:
            os.makedirs(path, mode=0o700, exist_ok=True)
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise CapsuleError(
            f'capsule directory {str(path)!r} cannot be used: {_reason(error)}; '
            'give an existing directory that this user may write'
        ) from None


@contextlib.contextmanager
def opened(name: str, directory: int) -> Iterator[tuple[int, int]]:
    """Open a capsule file for reading as (descriptor, bytes); never a link, pipe or device."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, dir_fd=directory)
    except FileNotFoundError:
        raise CapsuleNotFound(f'capsule file {name!r} does not exist') from None
    except OSError as error:
        remedy = 'links are refused' if error.errno == errno.ELOOP else 'check its permissions'
        raise CapsuleCorrupt(
            f'capsule file {name!r} cannot be opened: {error.strerror}; {remedy}'
        ) from None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise CapsuleCorrupt(f'capsule file {name!r} is not a regular file')
        yield fd, found.st_size
    finally:
        os.close(fd)


def read_header(fd: int, size: int) -> Header:
    """Read and check the header of an open file; at most 1 MiB is read."""
    length = container.header_size(_pread(fd, 8), size)
    raw = _pread(fd, length)
    if len(raw) != length:
        raise CapsuleCorrupt(f'capsule file gave {len(raw)} of {length} header bytes')
    return container.parse(raw, size)


def read_data(fd: int, header: Header, into: Sequence[memoryview]) -> None:
    """Read all data into host memory and check every digest.

    :param into: writable views that together hold exactly `header.data_bytes`.
    :raises CapsuleCorrupt: a short read, or a group whose digest differs; `into` is then garbage.
    """
    offset = header.data_offset
    with contextlib.suppress(OSError):
        os.posix_fadvise(fd, offset, header.data_bytes, os.POSIX_FADV_SEQUENTIAL)

    memory = _Spans(into)

    def piece(at: int) -> bytes:
        end = min(at + PIECE_BYTES, header.data_bytes)
        _read_exactly(fd, memory.cut(at, end), offset + at)
        return memory.leaves(at, end)

    with contextlib.closing(_by_group(piece, header)) as groups:
        for number, (found, known) in enumerate(zip(groups, header.digests, strict=True)):
            if found != known:
                raise _bad_group(header, number)


def stream(fd: int, header: Header) -> Iterator[tuple[int, bytearray]]:
    """Verified data in groups of 16 MiB as (position, bytes), in bounded memory."""
    for number, known in enumerate(header.digests):
        at = number * GROUP_BYTES
        data = bytearray(min(GROUP_BYTES, header.data_bytes - at))
        view = memoryview(data)
        _read_exactly(fd, [view], header.data_offset + at)
        if fold(leaves(view))[0] != known:
            raise _bad_group(header, number)
        yield at, data


def save(
    directory: int, name: str, header: Header, data: Sequence[memoryview], replacing: bool = False
) -> Header:
    """Write one capsule file durably and give back its header with digests.

    :param data: host memory that together holds `header.data_bytes`; must not change meanwhile.
    :raises CapsuleExists: the name is taken and `replacing` is False.
    :raises CapsuleError: the system refused (disk full, no permission); nothing is left behind.
    """

    def piece(at: int) -> bytes:
        end = min(at + PIECE_BYTES, header.data_bytes)
        digests = memory.leaves(at, end)
        _write_exactly(fd, memory.cut(at, end), header.data_offset + at)
        return digests

    memory = _Spans(data)
    with _temporary(directory, name, replacing) as (fd, publish):
        done = replace(header, digests=tuple(_by_group(piece, header)))
        _write_exactly(fd, [memoryview(container.encode(done))], 0)
        publish()
    return done


def copy(source: int, header: Header, directory: int, name: str, replacing: bool) -> None:
    """Copy a checked file to another directory, every digest verified on the way."""
    with _temporary(directory, name, replacing) as (fd, publish):
        for at, data in stream(source, header):
            _write_exactly(fd, [memoryview(data)], header.data_offset + at)
        _write_exactly(fd, [memoryview(container.encode(header))], 0)
        publish()


def remove(directory: int, name: str) -> None:
    """Delete a capsule file; a missing one is fine. Raises CapsuleError if it stays.

    Durably, unless the disk refuses that: then it is gone, but a power cut may bring it back.
    """
    try:
        os.unlink(name, dir_fd=directory)
        with contextlib.suppress(OSError):
            os.fsync(directory)
    except FileNotFoundError:
        return
    except OSError as error:
        raise CapsuleError(
            f'capsule file {name!r} was not deleted: {error.strerror}; check the permissions of '
            'its directory'
        ) from error


def clean_temporaries(directory: int) -> list[str]:
    """Delete what killed writers left; a temporary that a live writer locks is kept."""
    flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    removed = []
    for name in os.listdir(directory):
        if not (name.startswith('.') and name.endswith('.tmp') and SUFFIX in name):
            continue
        with contextlib.suppress(OSError):
            fd = os.open(name, flags, dir_fd=directory)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(name, dir_fd=directory)
                removed.append(name)
            finally:
                os.close(fd)
    return removed


@contextlib.contextmanager
def _temporary(directory: int, name: str, replacing: bool) -> Iterator[tuple[int, _Publish]]:
    publish: _Publish | None = None
    try:
        _check_free(directory, name, replacing)
        publish = _Publish(directory, *_created(directory, name), name, replacing)
        yield publish.fd, publish
    except OSError as error:
        raise CapsuleError(
            f'capsule file {name!r} was not written: {error.strerror}; free space or check '
            'permissions, older capsules are untouched'
        ) from error
    finally:
        if publish is not None:
            publish.close()


def _created(directory: int, name: str) -> tuple[int, str]:
    """A new temporary, locked, as (descriptor, name)."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        temporary = f'.{name}.{os.getpid()}-{next(_TEMPORARY)}.tmp'
        try:
            fd = os.open(temporary, flags, 0o600, dir_fd=directory)
        except FileExistsError:  # of a process with this number: killed, or in another container
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            os.lstat(temporary, dir_fd=directory)
        except FileNotFoundError:  # swept before it was locked
            os.close(fd)
        except BaseException:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=directory)
            raise
        else:
            return fd, temporary


class _Publish:
    """Makes a temporary durable under its final name; the order is the promise of a save."""

    def __init__(
        self, directory: int, fd: int, temporary: str, name: str, replacing: bool
    ) -> None:
        self.fd = fd
        self._done = False
        self._replacing = replacing
        self._directory = directory
        self._names = (temporary, name)

    def __call__(self) -> None:
        os.fsync(self.fd)
        with _locked(self._directory):
            _check_free(self._directory, self._names[1], self._replacing)
            os.rename(*self._names, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        self._done = True
        try:
            os.fsync(self._directory)
        except OSError:
            if not self._replacing:
                os.unlink(self._names[1], dir_fd=self._directory)
            raise

    def close(self) -> None:
        """Close the file; a temporary that was not published goes."""
        os.close(self.fd)
        if not self._done:
            with contextlib.suppress(OSError):
                os.unlink(self._names[0], dir_fd=self._directory)


@contextlib.contextmanager
def _locked(directory: int) -> Iterator[None]:
    """Keep other processes from publishing here; without effect where locks are not offered."""
    with contextlib.suppress(OSError):
        fcntl.flock(directory, fcntl.LOCK_EX)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(directory, fcntl.LOCK_UN)


def _check_free(directory: int, name: str, replacing: bool) -> None:
    """Raise CapsuleExists if anything has this name, links included; CapsuleError for a device.

    :param replacing: a regular file or a link may have it; a directory, pipe or device may not.
    """
    try:
        mode = os.lstat(name, dir_fd=directory).st_mode
    except FileNotFoundError:
        return
    if not replacing:
        raise CapsuleExists(f'capsule file {name!r} exists: drop it first or use another id')
    if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
        raise CapsuleError(f'{name!r} is not a regular file and is not replaced: name a file')


def _by_group(
    piece: Callable[[int], bytes], header: Header
) -> Generator[bytes, None, None]:
    """Group digests in order, the pieces read or written in parallel with a bounded window."""
    starts = iter(range(0, header.data_bytes, PIECE_BYTES))
    window: list[Future[bytes]] = []
    pending = b''
    try:
        for at in itertools.islice(starts, 2 * WORKERS):
            window.append(workers().submit(piece, at))
        while window:
            pending += window.pop(0).result()
            for at in itertools.islice(starts, 1):
                window.append(workers().submit(piece, at))
            if len(pending) >= _GROUP_LEAVES or not window:
                yield from fold(pending)
                pending = b''
    finally:
        for waiting in window:
            waiting.cancel()
        for waiting in window:
            if not waiting.cancelled():
                waiting.exception()


_GROUP_LEAVES = GROUP_BYTES // LEAF_BYTES * 32


class _Spans:
    """Several views as one run of bytes."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = views
        self._starts = [0, *itertools.accumulate(len(view) for view in views)]

    def cut(self, begin: int, end: int) -> Iterator[memoryview]:
        """The parts that hold bytes [begin, end)."""
        at = bisect.bisect_right(self._starts, begin) - 1
        while begin < end:
            first = self._starts[at]
            part = self._views[at][begin - first : end - first]
            yield part
            begin += len(part)
            at += 1

    def leaves(self, begin: int, end: int) -> bytes:
        """Leaf digests of [begin, end)."""
        found = []
        for at in range(begin, end, LEAF_BYTES):
            state = hashlib.sha256()
            for view in self.cut(at, min(at + LEAF_BYTES, end)):
                state.update(view)
            found.append(state.digest())
        return b''.join(found)


def _read_exactly(fd: int, views: Iterable[memoryview], offset: int) -> None:
    for view in views:
        while len(view):
            try:
                count = os.preadv(fd, [view], offset)
            except OSError as error:
                raise _unreadable(error) from error
            if count == 0:
                raise CapsuleCorrupt(f'capsule file ended at byte {offset}: it is cut short')
            view, offset = view[count:], offset + count


def _pread(fd: int, size: int) -> bytes:
    """At most `size` bytes from the file's start."""
    try:
        return os.pread(fd, size, 0)
    except OSError as error:
        raise _unreadable(error) from error


def _unreadable(error: OSError) -> CapsuleCorrupt:
    return CapsuleCorrupt(f'capsule file cannot be read: {_reason(error)}; check its disk')


def _reason(error: Exception) -> str:
    return getattr(error, 'strerror', None) or str(error)


def _write_exactly(fd: int, views: Iterable[memoryview], offset: int) -> None:
    for view in views:
        while len(view):
            count = os.pwrite(fd, view, offset)
            view, offset = view[count:], offset + count


def _bad_group(header: Header, number: int) -> CapsuleCorrupt:
    begin = number * GROUP_BYTES
    end = min(begin + GROUP_BYTES, header.data_bytes)
    touched = (t.name for t in header.tensors if t.begin < end and t.end > begin)
    names = [name for name in touched if not name.startswith(container.GAP)]
    return CapsuleCorrupt(
        f'capsule {header.info.id!r}: data bytes {begin} to {end} do not match their digest '
        f'(buffers {", ".join(names[:6])}); drop it and snapshot again'
    )
