"""The disk tier when two come at once: pins, drops, readers, writers, sweeps and close."""
from __future__ import annotations

from collections.abc import Callable
import itertools
import os
from pathlib import Path
import threading
from typing import Any

from _capsules import disk_store
from _capsules import PAGE
from _capsules import saved
from _capsules import Session
from _capsules import small_store
from _capsules import state_pages
import pytest

from flashrt_core.capsule import CapsuleInfo
from flashrt_core.capsule import CapsuleStore
from flashrt_core.capsule import files
from flashrt_core.capsule import Identity
from flashrt_core.errors import CapsuleError
from flashrt_core.errors import CapsuleNotFound
from flashrt_core.errors import TierUnavailable
from flashrt_core.runtime import cpu_backend

HELD_S = 0.3  # how long a call may be held up by another before the test lets the other go on


class Meanwhile:
    """Runs a verb on another thread in the middle of this one's, and keeps what came of it."""

    def __init__(self, verb: Callable[[], Any]) -> None:
        self.value: Any = None
        self.error: BaseException | None = None
        self._verb = verb
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self.value = self._verb()
        except BaseException as error:
            self.error = error

    def begin(self) -> None:
        """Start it once, and go on when it is done or held up."""
        if self._thread.ident is None:
            self._thread.start()
            self._thread.join(HELD_S)

    def end(self) -> Meanwhile:
        """Wait until it has answered."""
        self._thread.join(30)
        assert self.value is not None or self.error is not None
        return self


def before_each_removal(monkeypatch: pytest.MonkeyPatch, verb: Callable[[], Any]) -> Meanwhile:
    """Have `verb` come while the first file is being deleted."""
    other, real = Meanwhile(verb), files.remove

    def remove(directory: int, name: str) -> None:
        other.begin()
        real(directory, name)

    monkeypatch.setattr(files, 'remove', remove)
    return other


def assert_pin_was_kept_or_refused(store: CapsuleStore, pin: Meanwhile, name: str) -> None:
    if isinstance(pin.value, CapsuleInfo):
        assert store.get(name).pinned
    else:
        assert isinstance(pin.error, CapsuleNotFound)


def test_a_restore_does_not_push_its_own_file_out(tmp_path: Path) -> None:
    """The capsule that leaves host memory for it is spilled into a directory that is full."""
    session, writer = Session(cpu_backend()), disk_store(cpu_backend(), tmp_path)
    for name in ('a', 'b'):
        session.fill(ord(name))
        saved(session, writer, name)
    writer.close()
    session.fill(ord('a'))
    before, size = session.image(), (tmp_path / 'a.capsule').stat().st_size
    store = disk_store(cpu_backend(), tmp_path, gpu=0, host=state_pages(session) * PAGE,
                       disk_bytes=2 * size + PAGE)
    session.fill(3)
    store.snapshot(session.boundary, 'c', tier='host')
    store.restore(session.boundary, 'a')
    assert session.image() == before
    assert {info.id for info in store.list()} == {'a', 'c'}
    store.close()


def test_a_pin_that_comes_while_files_leave_for_room_is_kept_or_refused(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, store = Session(cpu_backend()), disk_store(cpu_backend(), tmp_path)
    for name in ('a', 'b'):
        saved(session, store, name)
    assert store._tiers.disk is not None
    store._tiers.disk.quota_bytes = (tmp_path / 'a.capsule').stat().st_size + PAGE
    pin = before_each_removal(monkeypatch, lambda: store.pin('b'))
    saved(session, store, 'c')
    assert_pin_was_kept_or_refused(store, pin.end(), 'b')
    store.close()


@pytest.mark.parametrize('tier', ['gpu', 'disk'])
def test_a_pin_that_comes_while_its_capsule_is_dropped_is_kept_or_refused(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: str) -> None:
    session, store = Session(cpu_backend()), disk_store(cpu_backend(), tmp_path)
    saved(session, store, 'a')
    store.move('a', tier)
    pin = before_each_removal(monkeypatch, lambda: store.pin('a'))
    store.drop('a')
    assert_pin_was_kept_or_refused(store, pin.end(), 'a')
    assert not list(tmp_path.iterdir())
    store.close()


def test_a_drop_that_comes_while_its_capsule_is_pinned_is_refused(
        monkeypatch: pytest.MonkeyPatch) -> None:
    session, store = Session(cpu_backend()), small_store(cpu_backend())
    store.snapshot(session.boundary, 'a')
    other, real = Meanwhile(lambda: store.drop('a') or 'dropped'), store._ledger.find

    def find(name: str, id: str) -> Any:
        capsule = real(name, id)
        other.begin()
        return capsule

    monkeypatch.setattr(store._ledger, 'find', find)
    store.pin('a')
    assert 'is pinned' in str(other.end().error) and store.get('a').pinned


def test_a_reader_that_finds_no_file_leaves_the_next_one_of_that_name_listed(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, store = Session(cpu_backend()), disk_store(cpu_backend(), tmp_path)
    session.fill(1)
    saved(session, store, 'a')
    real, turns = files.opened, itertools.count()

    def opened(name: str, directory: int) -> Any:
        if next(turns) == 0:
            store.drop('a')
            session.fill(2)
            saved(session, store, 'a')
            raise CapsuleNotFound('it was deleted when it was about to be opened')
        return real(name, directory)

    monkeypatch.setattr(files, 'opened', opened)
    with pytest.raises(CapsuleNotFound):
        store.restore(session.boundary, 'a')
    before = session.image()
    session.fill(3)
    store.restore(session.boundary, 'a')
    assert session.image() == before and store.usage()['disk'].capsules == 1
    store.drop('a')
    assert not list(tmp_path.iterdir())
    store.close()


def test_a_store_that_closes_refuses_a_save_and_keeps_its_accounts(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, store = Session(cpu_backend()), disk_store(cpu_backend(), tmp_path)
    real, writing, go_on = files.save, threading.Event(), threading.Event()

    def save(*args: Any, **options: Any) -> Any:
        writing.set()
        go_on.wait(30)
        return real(*args, **options)

    monkeypatch.setattr(files, 'save', save)
    store.snapshot(session.boundary, 'a', tier='disk')
    assert writing.wait(30) and store._tiers.disk is not None
    closing = threading.Thread(target=store.close)
    shut = threading.Event()
    shutdown = store._tiers.disk._writer.shutdown

    def told(wait: bool) -> None:
        shutdown(wait=False)
        shut.set()
        shutdown(wait=wait)

    monkeypatch.setattr(store._tiers.disk._writer, 'shutdown', told)
    closing.start()
    assert shut.wait(30)
    with pytest.raises(TierUnavailable, match='closed'):
        store.snapshot(session.boundary, 'b', tier='disk')
    go_on.set()
    closing.join(30)
    assert [info.id for info in store.list()] == ['a'] and store.usage()['host'].used_bytes == 0
    assert store.usage()['disk'].used_bytes == (tmp_path / 'a.capsule').stat().st_size


def test_a_file_that_is_being_read_when_the_store_closes_is_read_to_its_end(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, store = Session(cpu_backend()), disk_store(cpu_backend(), tmp_path)
    session.fill(1)
    before = session.image()
    saved(session, store, 'a')
    session.fill(2)
    real = files.opened

    def opened(name: str, directory: int) -> Any:
        store.close()
        return real(name, directory)

    monkeypatch.setattr(files, 'opened', opened)
    store.restore(session.boundary, 'a')
    assert session.image() == before
    with pytest.raises(TierUnavailable, match='closed'):
        store.drop('a')


@pytest.mark.parametrize('refused', [False, True])
def test_a_capsule_to_disk_cannot_be_pinned_or_moved_before_its_file_is_accepted(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: bool) -> None:
    session, store = Session(cpu_backend()), disk_store(cpu_backend(), tmp_path)
    real = store._tiers.save

    def save(capsule: Any) -> Any:
        for verb in (lambda: store.pin('a'), lambda: store.move('a', 'gpu')):
            with pytest.raises(CapsuleNotFound):
                verb()
        if refused:
            raise CapsuleError('no room for its file')
        return real(capsule)

    monkeypatch.setattr(store._tiers, 'save', save)
    if refused:
        with pytest.raises(CapsuleError, match='no room'):
            store.snapshot(session.boundary, 'a', tier='disk')
        assert store.usage()['host'].used_bytes == 0 and not store.list()
    else:
        saved(session, store, 'a')
        assert store.get('a').on_disk
    store.close()


def test_a_capsule_that_no_file_can_hold_stops_no_eviction(tmp_path: Path) -> None:
    wide = Session(cpu_backend(), name='wide',
                   identity=Identity({f'field{at}': 'x' * 4000 for at in range(300)}))
    store = disk_store(cpu_backend(), tmp_path, gpu=0, host=state_pages(wide) * PAGE)
    store.snapshot(wide.boundary, 'w', tier='host')
    store.snapshot(Session(cpu_backend()).boundary, 'a', tier='host')
    assert [info.id for info in store.list()] == ['a']
    assert store.counters['spill_failed'] == store.counters['dropped'] == 1
    store.close()


def test_a_sweep_waits_for_no_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / '.a.capsule.1-1.tmp')
    other = Meanwhile(lambda: disk_store(cpu_backend(), tmp_path))
    other.begin()
    try:
        other.end().value.close()
    finally:  # lets a sweep go that does wait
        os.close(os.open(tmp_path / '.a.capsule.1-1.tmp', os.O_RDONLY | os.O_NONBLOCK))


def test_a_temporary_of_another_process_with_this_number_is_left_alone(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two containers on one directory: both writers may be process 1."""
    monkeypatch.setattr(files, '_TEMPORARY', itertools.count())
    session, store = Session(cpu_backend()), disk_store(cpu_backend(), tmp_path)
    foreign = tmp_path / f'.a.capsule.{os.getpid()}-0.tmp'
    foreign.write_bytes(b'being written')
    saved(session, store, 'a')
    assert store.get('a').on_disk and foreign.read_bytes() == b'being written'
    store.close()


def test_a_temporary_that_is_swept_before_it_is_locked_is_made_anew(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, store = Session(cpu_backend()), disk_store(cpu_backend(), tmp_path)
    real, swept = files.fcntl.flock, []

    def flock(fd: int, how: int) -> None:
        if not swept:
            swept.append(fd)
            directory = os.open(tmp_path, os.O_RDONLY)
            swept.extend(files.clean_temporaries(directory))
            os.close(directory)
        real(fd, how)

    monkeypatch.setattr(files.fcntl, 'flock', flock)
    saved(session, store, 'a')
    assert len(swept) == 2 and os.listdir(tmp_path) == ['a.capsule']
    store.close()
