"""The disk tier under faults: full and read-only disks, other processes, clocks, races, close."""
from __future__ import annotations

import errno
import os
from pathlib import Path
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

from _capsules import disk_store
from _capsules import saved
from _capsules import Session
from _capsules import small_store
import pytest
from safetensors import safe_open

from flashrt_core.capsule import disk
from flashrt_core.capsule import files
from flashrt_core.capsule.format import GAP
from flashrt_core.errors import BudgetFull
from flashrt_core.errors import CapsuleCorrupt
from flashrt_core.errors import CapsuleError
from flashrt_core.errors import CapsuleExists
from flashrt_core.errors import CapsuleNotFound
from flashrt_core.errors import ConfigError
from flashrt_core.errors import TierUnavailable
from flashrt_core.runtime import cpu_backend


def refusing(error: int, real: Any = None, after: int = 0) -> Any:
    """A system call that works `after` times, then fails."""
    left = [after]

    def call(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            return real(*args, **options)
        raise OSError(error, os.strerror(error))
    return call


def test_a_directory_that_may_only_be_read_is_not_deleted_from(tmp_path: Path) -> None:
    session = Session(cpu_backend())
    writer = disk_store(cpu_backend(), tmp_path)
    saved(session, writer, 'a')
    writer.close()
    store = small_store(cpu_backend(), directory=tmp_path)
    with pytest.raises(TierUnavailable, match='not allowed'):
        store.drop('a')
    assert (tmp_path / 'a.capsule').exists()
    store.restore(session.boundary, 'a')
    store.close()


def test_a_file_that_cannot_be_deleted_stays_listed(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, store = Session(cpu_backend()), disk_store(cpu_backend(), tmp_path)
    saved(session, store, 'a')
    with monkeypatch.context() as patch:
        patch.setattr(files.os, 'unlink', refusing(errno.EROFS))
        with pytest.raises(CapsuleError, match='not deleted: Read-only'):
            store.drop('a')
    store.restore(session.boundary, 'a')
    store.drop('a')
    assert list(tmp_path.iterdir()) == []
    store.close()


def test_an_old_file_that_cannot_be_deleted_stops_no_save(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, store = Session(cpu_backend()), disk_store(cpu_backend(), tmp_path, max_age_s=3600.0)
    saved(session, store, 'a')
    now = disk.time.monotonic()
    monkeypatch.setattr(disk, 'time', SimpleNamespace(monotonic=lambda: now + 4000.0))
    with monkeypatch.context() as patch:
        patch.setattr(files.os, 'unlink', refusing(errno.EACCES))
        saved(session, store, 'b')
    assert store.counters['expiry_failed'] == 1 and store.get('a').on_disk
    saved(session, store, 'c')
    assert [info.id for info in store.list()] == ['c', 'b']
    store.close()


def test_a_wall_clock_that_jumps_ages_no_file(tmp_path: Path) -> None:
    session, store = Session(cpu_backend()), disk_store(cpu_backend(), tmp_path, max_age_s=3600.0)
    saved(session, store, 'a')
    os.utime(tmp_path / 'a.capsule', (0, 0))  # as written before the clock was set
    saved(session, store, 'b')
    assert {info.id for info in store.list()} == {'a', 'b'}
    store.close()
    os.utime(tmp_path / 'b.capsule', (4e9, 4e9))
    again = disk_store(cpu_backend(), tmp_path, max_age_s=3600.0)
    assert [info.id for info in again.list()] == ['b']
    again.close()


@pytest.mark.parametrize('limits', [
    {'max_age_s': 0}, {'max_age_s': -1}, {'max_age_s': float('nan')}, {'max_age_s': 'x'},
    {'disk_bytes': 1e9}, {'disk_bytes': 'x'}, {'disk_bytes': -1},
])
def test_limits_that_would_delete_everything_are_refused(tmp_path: Path, limits: dict) -> None:
    session, store = Session(cpu_backend()), disk_store(cpu_backend(), tmp_path)
    saved(session, store, 'a')
    store.close()
    with pytest.raises(ConfigError):
        disk_store(cpu_backend(), tmp_path, **limits)
    assert (tmp_path / 'a.capsule').exists()


def test_a_file_system_without_room_is_refused_before_anything_is_dropped(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, store = Session(cpu_backend()), disk_store(cpu_backend(), tmp_path)
    saved(session, store, 'a')
    store.pin('a')
    full = SimpleNamespace(f_bavail=1, f_frsize=4096)
    monkeypatch.setattr(disk.os, 'fstatvfs', lambda fd: full)
    with pytest.raises(BudgetFull, match='4096 free'):
        store.snapshot(session.boundary, 'b', tier='disk')
    assert [info.id for info in store.list()] == ['a']
    assert store.usage()['host'].used_bytes == 0
    store.close()


def test_a_full_file_system_gets_room_from_the_least_recently_used_files(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, store = Session(cpu_backend()), disk_store(cpu_backend(), tmp_path)
    for name in 'abc':
        saved(session, store, name)
    store.pin('a')
    monkeypatch.setattr(disk.os, 'fstatvfs', lambda fd: SimpleNamespace(f_bavail=1, f_frsize=4096))
    saved(session, store, 'd')
    assert {info.id for info in store.list()} == {'a', 'c', 'd'}
    (event,) = [event for event in store.events if event.kind == 'left_disk']
    assert event.id == 'b' and 'least recently used' in event.reason
    store.close()


def test_a_file_that_was_read_lately_is_not_the_first_to_go(tmp_path: Path) -> None:
    session, store = Session(cpu_backend()), disk_store(cpu_backend(), tmp_path)
    for name in ('a', 'b'):
        saved(session, store, name)
    used = store.usage()['disk'].used_bytes
    store.close()
    store = disk_store(cpu_backend(), tmp_path, disk_bytes=used)
    store.restore(session.boundary, 'a')
    saved(session, store, 'c')
    assert {path.name for path in tmp_path.iterdir()} == {'a.capsule', 'c.capsule'}
    store.close()


def test_what_lies_between_the_buffers_reaches_no_file(tmp_path: Path) -> None:
    session, store = Session(cpu_backend()), disk_store(cpu_backend(), tmp_path)
    session.buffers.arena.fill_(255)
    session.fill(1)
    saved(session, store, 'a')
    with safe_open(tmp_path / 'a.capsule', 'pt') as file:
        gaps = [name for name in file.keys() if name.startswith(GAP)]
        assert gaps and all(not file.get_tensor(name).any() for name in gaps)
    store.close()


def test_a_directory_name_that_is_no_name_is_refused() -> None:
    with pytest.raises(CapsuleError, match='null byte'):
        small_store(cpu_backend(), directory='a\0b')


def test_a_disk_that_cannot_be_read_is_an_error_of_its_capsule_only(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, store = Session(cpu_backend()), disk_store(cpu_backend(), tmp_path)
    session.fill(1)
    saved(session, store, 'a')
    session.fill(2)
    before = session.image()
    with monkeypatch.context() as patch:
        patch.setattr(files.os, 'preadv', refusing(errno.EIO))
        with pytest.raises(CapsuleCorrupt, match='Input/output error'):
            store.restore(session.boundary, 'a')
    assert session.image() == before and session.boundary.poisoned is None
    store.close()
    with monkeypatch.context() as patch:
        patch.setattr(files.os, 'pread', refusing(errno.EIO))
        again = disk_store(cpu_backend(), tmp_path)
    assert again.counters['skipped'] == 1 and again.list() == []
    again.close()


@pytest.mark.parametrize('code', [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT])
def test_a_directory_entry_that_is_not_durable_leaves_no_file(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    session, store = Session(cpu_backend()), disk_store(cpu_backend(), tmp_path)
    monkeypatch.setattr(files.os, 'fsync', refusing(code, os.fsync, after=1))
    with pytest.raises(CapsuleError, match='not written'):
        saved(session, store, 'a')
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []
    store.move('a', 'disk')
    assert store.get('a').tier == 'disk'
    store.close()


def test_a_file_that_another_process_wrote_meanwhile_is_not_replaced(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, store = Session(cpu_backend()), disk_store(cpu_backend(), tmp_path)
    real = os.fsync

    def fsync(fd: int) -> None:
        (tmp_path / 'a.capsule').write_bytes(b'of another process')
        real(fd)

    monkeypatch.setattr(files.os, 'fsync', fsync)
    with pytest.raises(CapsuleExists):
        saved(session, store, 'a')
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b'of another process']
    store.close()


def test_a_file_that_someone_else_deleted_is_no_longer_listed(tmp_path: Path) -> None:
    session, store = Session(cpu_backend()), disk_store(cpu_backend(), tmp_path)
    saved(session, store, 'a')
    (tmp_path / 'a.capsule').unlink()
    before = session.image()
    for message in ('does not exist', 'deleted by someone else'):
        with pytest.raises(CapsuleNotFound, match=message):
            store.restore(session.boundary, 'a')
    assert session.image() == before
    assert store.list() == [] and store.usage()['disk'].used_bytes == 0
    assert store.usage()['host'].used_bytes == 0
    saved(session, store, 'a')
    store.close()


FULL = """
import resource, sys
sys.path.insert(0, 'test/core')
from test_capsule_disk_faults import *
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
session, store = Session(cpu_backend()), disk_store(cpu_backend(), Path(sys.argv[1]))
session.fill(1)
before = session.image()
try:
    saved(session, store, 'a')
except CapsuleError as error:
    assert 'File too large' in str(error), error
else:
    raise SystemExit('the write was not refused')
session.fill(2)
store.restore(session.boundary, 'a', proof='digest')
assert session.image() == before
assert list(Path(sys.argv[1]).iterdir()) == []
"""


def test_a_file_size_limit_ends_a_save_and_keeps_capsule_and_process(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, '-c', FULL, str(tmp_path)], cwd=root, timeout=120,
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_closed_store_refuses_the_disk_and_keeps_its_bookkeeping(tmp_path: Path) -> None:
    session, store = Session(cpu_backend()), disk_store(cpu_backend(), tmp_path)
    saved(session, store, 'a')
    store.close()
    store.snapshot(session.boundary, 'b', tier='host')
    for verb in (lambda: store.snapshot(session.boundary, 'c', tier='disk'),
                 lambda: store.move('b', 'disk'), lambda: store.restore(session.boundary, 'a'),
                 lambda: store.drop('a'), lambda: store.prefetch('a')):
        with pytest.raises(TierUnavailable, match='closed'):
            verb()
    store.restore(session.boundary, 'b')
    assert store.usage()['disk'].capsules == 1
    store.drop('b')
    assert store.usage()['host'].used_bytes == store.usage()['gpu'].used_bytes == 0


def test_two_moves_to_disk_at_once_write_one_file(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, store = Session(cpu_backend()), disk_store(cpu_backend(), tmp_path)
    store.snapshot(session.boundary, 'a', tier='host')
    tier = store._tiers.disk
    assert tier is not None
    real, entered = tier.reserve, threading.Event()
    calls: list[int] = []

    def reserve(header: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            entered.set()
            other.join(1.0)  # a second one would run through meanwhile
        real(header)

    monkeypatch.setattr(tier, 'reserve', reserve)
    found: list[Any] = []

    def second() -> None:
        entered.wait(20)
        found.append(store._tiers.save(store._ledger.find('', 'a')).result(30))

    other = threading.Thread(target=second)
    other.start()
    assert store.move('a', 'disk').tier == 'disk'
    other.join(30)
    assert found[0].on_disk and len(calls) == 1
    assert store.counters['save_failed'] == 0 and store.usage()['host'].used_bytes == 0
    store.close()


def test_a_capsule_that_is_promoted_before_its_save_is_never_written_from_the_wrong_pages(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, store = Session(cpu_backend()), disk_store(cpu_backend(), tmp_path)
    session.fill(1)
    store.snapshot(session.boundary, 'a')
    session.fill(2)
    store.snapshot(session.boundary, 'other', tier='host')
    digest = store.digest('a')
    real = store._tiers.change

    def change(capsule: Any, tier: Any, why: str, evict: bool = True) -> bool:
        moved = real(capsule, tier, why, evict)
        return real(capsule, 'gpu', why, evict) and moved

    monkeypatch.setattr(store._tiers, 'change', change)
    with pytest.raises(CapsuleError, match='try again'):
        store.move('a', 'disk')
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []
    assert store.move('a', 'disk').tier == 'disk' and store.digest('a') == digest
    store.close()


def test_memory_of_a_capsule_moved_to_disk_goes_when_its_last_reader_ends(tmp_path: Path) -> None:
    session, store = Session(cpu_backend()), disk_store(cpu_backend(), tmp_path)
    store.snapshot(session.boundary, 'a', tier='host')
    with store._tiers.leased(store._ledger.find('', 'a')):
        assert store.move('a', 'disk').on_disk
        assert store.usage()['host'].used_bytes > 0
    assert store.usage()['host'].used_bytes == 0 and store.get('a').tier == 'disk'
    store.move('a', 'host')
    store.restore(session.boundary, 'a')
    assert store.get('a').tier != 'disk'
    store.close()


def test_a_file_name_of_any_bytes_is_told_as_plain_text(tmp_path: Path) -> None:
    odd = os.fsencode(tmp_path) + b'/\xff\x1b[2J.capsule'
    with open(odd, 'wb') as file:
        file.write(b'nothing')
    store = disk_store(cpu_backend(), tmp_path)
    (event,) = [event for event in store.events if event.kind == 'skipped']
    assert event.id.isascii() and event.id.isprintable() and event.reason.isprintable()
    store.close()


def test_a_deletion_that_is_not_durable_leaves_no_file_listed(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is gone now, whatever a power cut brings back."""
    session, store = Session(cpu_backend()), disk_store(cpu_backend(), tmp_path)
    saved(session, store, 'a')
    monkeypatch.setattr(files.os, 'fsync', refusing(errno.EIO))
    store.drop('a')
    assert store.list() == [] and store.usage()['disk'].used_bytes == 0
    assert not list(tmp_path.iterdir())
    store.close()
