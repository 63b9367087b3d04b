"""The disk tier of the store: saves in the background, loads that check, quota, age, kills."""
from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
import os
from pathlib import Path
import signal
import stat
import subprocess
import sys
import time

from _capsules import disk_store
from _capsules import MIB
from _capsules import PAGE
from _capsules import Session
from _capsules import small_store
from _capsules import state_pages
import pytest
from safetensors import safe_open
import torch

from flashrt_core.capsule import files
from flashrt_core.capsule import Identity
from flashrt_core.errors import BudgetFull
from flashrt_core.errors import CapsuleCorrupt
from flashrt_core.errors import CapsuleError
from flashrt_core.errors import CapsuleExists
from flashrt_core.errors import CapsuleNotFound
from flashrt_core.errors import ConfigError
from flashrt_core.errors import IdentityMismatch
from flashrt_core.errors import TierUnavailable
from flashrt_core.runtime import Backend
from flashrt_core.runtime import cpu_backend


@pytest.mark.parametrize('fold', [False, True])
def test_a_saved_capsule_is_found_and_restored_by_the_next_store(
        backend: Backend, tmp_path: Path, fold: bool) -> None:
    session, store = Session(backend), disk_store(backend, tmp_path, fold=fold)
    session.length = 33
    session.fill(1)
    before = session.image()
    store.snapshot(session.boundary, 'C0', tier='disk', label='the start')
    info = store.saved('C0').result(30)
    assert info.on_disk and store.get('C0').tier == 'disk'
    digest = store.digest('C0')
    store.close()

    again = disk_store(backend, tmp_path, fold=fold)
    session.fill(2)
    found = again.get('C0')
    assert (found.tier, found.label, found.position) == ('disk', 'the start', 0)
    report = again.restore(session.boundary, 'C0', proof='digest')
    assert (report.source, report.bit_exact) == ('disk', True)
    assert session.image() == before and again.digest('C0') == digest
    assert again.get('C0').tier == 'gpu'
    assert again.restore(session.boundary, 'C0').source == 'gpu'
    again.close()


def test_the_file_is_private_and_readable_by_the_safetensors_library(tmp_path: Path) -> None:
    session = Session(cpu_backend())
    store = disk_store(cpu_backend(), tmp_path / 'new')
    session.length = 9
    session.fill(1)
    store.snapshot(session.boundary, 'C0')
    store.move('C0', 'disk')
    path = tmp_path / 'new' / 'C0.capsule'
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    with safe_open(path, 'pt') as file:
        for name in ('queue', 'kv.0', 'seed'):
            live = session.buffers[name].row(0)
            live = live[:9] if name == 'kv.0' else live
            found = file.get_tensor(name)
            assert (found.dtype, found.shape) == (live.dtype, live.shape)
            assert torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8)
                                 for t in (found, live)))
        assert file.metadata()['id'] == 'C0'
    header_bytes = int.from_bytes(path.read_bytes()[:8], 'little') + 8
    assert header_bytes % 4096 == 0
    store.close()


def test_disk_is_off_unless_allowed(backend: Backend, tmp_path: Path) -> None:
    session = Session(backend)
    for store in (small_store(backend), small_store(backend, directory=tmp_path)):
        store.snapshot(session.boundary)
        for verb in (lambda s=store: s.snapshot(session.boundary, 'C0', tier='disk'),
                     lambda s=store: s.move('c000001', 'disk')):
            with pytest.raises(TierUnavailable, match='allow_disk'):
                verb()
        store.close()
    assert list(tmp_path.iterdir()) == []
    for options in (dict(allow_disk=True), dict(allow_disk=True, directory=tmp_path)):
        with pytest.raises(ConfigError, match='capsule_directory and capsule_disk_bytes'):
            small_store(backend, **options)
    with pytest.raises(TierUnavailable, match='host_bytes'):
        disk_store(backend, tmp_path, host=0).snapshot(session.boundary, 'C0', tier='disk')


def test_a_read_only_directory_of_capsules_can_be_restored_from(
        backend: Backend, tmp_path: Path) -> None:
    session, store = Session(backend), disk_store(backend, tmp_path)
    session.fill(1)
    before = session.image()
    store.snapshot(session.boundary, 'C0')
    store.move('C0', 'disk')
    store.close()
    reader = small_store(backend, directory=tmp_path)
    session.fill(2)
    reader.restore(session.boundary, 'C0')
    assert session.image() == before
    reader.close()


def test_eviction_ends_on_disk_and_comes_back(backend: Backend, tmp_path: Path) -> None:
    session = Session(backend)
    pages = state_pages(session) * PAGE
    store = disk_store(backend, tmp_path, gpu=pages, host=pages)
    images = {}
    for number, name in enumerate('abcd'):
        session.fill(number)
        images[name] = session.image()
        store.snapshot(session.boundary, name)
    assert {info.id: info.tier for info in store.list()} == {
        'a': 'disk', 'b': 'disk', 'c': 'host', 'd': 'gpu'}
    for name in 'abcdabcd':
        store.restore(session.boundary, name)
        assert session.image() == images[name]
    assert store.counters['dropped'] == 0
    assert sorted(path.name for path in tmp_path.iterdir())[:2] == ['a.capsule', 'b.capsule']
    store.close()


def test_quota_drops_the_least_recently_used_file_and_pins_stay(
        backend: Backend, tmp_path: Path) -> None:
    session = Session(backend)
    one = disk_store(backend, tmp_path / 'measure')
    one.snapshot(session.boundary, 'a')
    one.move('a', 'disk')
    size = one.usage()['disk'].used_bytes
    one.close()
    store = disk_store(backend, tmp_path / 'real', disk_bytes=2 * size + 100)
    for name in 'abc':
        store.snapshot(session.boundary, name, pin=name == 'a')
        store.move(name, 'disk')
    assert {info.id for info in store.list()} == {'a', 'c'}
    with pytest.raises(CapsuleNotFound, match=r'least recently used when .* needed on disk'):
        store.restore(session.boundary, 'b')
    store.pin('c')
    store.snapshot(session.boundary, 'd')
    with pytest.raises(BudgetFull, match='pinned, being read or written'):
        store.move('d', 'disk')
    assert store.get('d').tier == 'host' or store.get('d').tier == 'gpu'
    store.restore(session.boundary, 'd')
    store.close()


def test_files_over_the_age_limit_go(backend: Backend, tmp_path: Path) -> None:
    session, store = Session(backend), disk_store(backend, tmp_path)
    for name in ('old', 'new'):
        store.snapshot(session.boundary, name)
        store.move(name, 'disk')
    store.close()
    os.utime(tmp_path / 'old.capsule', ns=(0, 0))
    again = disk_store(backend, tmp_path, max_age_s=3600.0)
    assert [info.id for info in again.list()] == ['new']
    assert not (tmp_path / 'old.capsule').exists()
    again.close()


def test_dropping_deletes_the_file(backend: Backend, tmp_path: Path) -> None:
    session, store = Session(backend), disk_store(backend, tmp_path)
    store.snapshot(session.boundary, 'C0', tier='disk')
    store.saved('C0').result(30)
    store.drop('C0')
    store.snapshot(session.boundary, 'C1', tier='disk')
    store.drop('C1')
    store.close()
    assert list(tmp_path.iterdir()) == []


def test_a_foreign_file_is_refused_with_fields_before_its_data_is_read(
        backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Session(backend, identity=Identity({'config': 'other'}, {}))
    store = disk_store(backend, tmp_path)
    store.snapshot(other.boundary, 'foreign')
    store.move('foreign', 'disk')
    session = Session(backend)
    before = session.image()
    monkeypatch.setattr(files, 'read_data', None)
    with pytest.raises(IdentityMismatch, match=r"layout\.config: here 'small', capsule 'other'"):
        store.restore(session.boundary, 'foreign')
    assert session.image() == before
    store.close()


def test_damaged_data_is_refused_and_the_session_is_untouched(
        backend: Backend, tmp_path: Path) -> None:
    session, store = Session(backend), disk_store(backend, tmp_path)
    store.snapshot(session.boundary, 'C0')
    store.move('C0', 'disk')
    path = tmp_path / 'C0.capsule'
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 4
    path.write_bytes(raw)
    session.fill(2)
    before, used = session.image(), store.usage()['host'].used_bytes
    with pytest.raises(CapsuleCorrupt, match=r'do not match their digest \(buffers seed, '):
        store.restore(session.boundary, 'C0')
    assert session.image() == before and session.boundary.poisoned is None
    assert store.usage()['host'].used_bytes == used
    store.close()


def test_a_file_exchanged_after_listing_is_refused(backend: Backend, tmp_path: Path) -> None:
    session, store = Session(backend), disk_store(backend, tmp_path)
    for number, name in enumerate('ab'):
        session.fill(number)
        store.snapshot(session.boundary, name)
        store.move(name, 'disk')
    (tmp_path / 'b.capsule').replace(tmp_path / 'a.capsule')
    with pytest.raises(CapsuleCorrupt, match='changed since it was listed'):
        store.restore(session.boundary, 'a')
    store.close()


def test_links_pipes_and_misnamed_files_are_skipped_with_a_reason(
        backend: Backend, tmp_path: Path) -> None:
    session, store = Session(backend), disk_store(backend, tmp_path / 'real')
    store.snapshot(session.boundary, 'C0')
    store.move('C0', 'disk')
    store.close()
    real = tmp_path / 'real' / 'C0.capsule'
    odd = tmp_path / 'odd'
    odd.mkdir()
    (odd / 'C0.capsule').symlink_to(real)
    (odd / 'other.capsule').write_bytes(real.read_bytes())
    (odd / 'empty.capsule').write_bytes(b'')
    (odd / 'folder.capsule').mkdir()
    os.mkfifo(odd / 'pipe.capsule')
    (odd / 'notes.txt').write_text('not a capsule')
    found = disk_store(backend, odd)
    assert found.list() == []
    skipped = {event.id for event in found.events if event.kind == 'skipped'}
    assert skipped == {'C0.capsule', 'other.capsule', 'empty.capsule', 'folder.capsule',
                       'pipe.capsule'}
    with pytest.raises(CapsuleError, match='exists'):
        found.snapshot(session.boundary, 'C0')
        found.move('C0', 'disk')
    assert real.exists()
    found.close()
    found.close()


def test_two_sessions_share_a_directory(backend: Backend, tmp_path: Path) -> None:
    store = disk_store(backend, tmp_path)
    one, two = Session(backend, name='executor'), Session(backend, name='planner')
    for number, session in enumerate((one, two)):
        session.fill(number)
        store.snapshot(session.boundary, 'C0')
        store.move('C0', 'disk', session=session.boundary.session)
    assert {path.name for path in tmp_path.iterdir()} == {
        'executor@C0.capsule', 'planner@C0.capsule'}
    store.close()
    again = disk_store(backend, tmp_path)
    images = [one.image(), two.image()]
    for session in (one, two):
        session.fill(7)
        again.restore(session.boundary, 'C0')
    assert [one.image(), two.image()] == images
    again.close()


def test_a_write_that_fails_says_why_and_keeps_the_capsule(
        backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, store = Session(backend), disk_store(backend, tmp_path)
    session.fill(1)
    before = session.image()
    store.snapshot(session.boundary, 'C0')

    def full(*args: object) -> int:
        raise OSError(28, 'No space left on device')

    with monkeypatch.context() as patch:
        patch.setattr(os, 'pwrite', full)
        with pytest.raises(CapsuleError, match='No space left'):
            store.move('C0', 'disk')
    assert list(tmp_path.iterdir()) == []
    assert store.usage()['disk'].used_bytes == 0
    session.fill(2)
    store.restore(session.boundary, 'C0')
    assert session.image() == before
    store.move('C0', 'disk')
    store.close()


def test_the_order_of_a_save_is_data_header_fsync_rename_directory_fsync(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, store = Session(cpu_backend()), disk_store(cpu_backend(), tmp_path)
    calls: list[str] = []

    def spy(name: str) -> None:
        real = getattr(os, name)

        def call(*args: object, **options: object) -> object:
            what = name
            if name == 'pwrite':
                what = 'header' if args[2] == 0 else 'data'
            if name == 'fsync':
                is_directory = stat.S_ISDIR(os.fstat(args[0]).st_mode)  # type: ignore[arg-type]
                what = 'fsync directory' if is_directory else 'fsync'
            calls.append(what)
            return real(*args, **options)

        monkeypatch.setattr(os, name, call)

    for name in ('pwrite', 'fsync', 'rename'):
        spy(name)
    store.snapshot(session.boundary, 'C0')
    store.move('C0', 'disk')
    assert [c for n, c in enumerate(calls) if n == 0 or calls[n - 1] != c] == [
        'data', 'header', 'fsync', 'rename', 'fsync directory']
    store.close()


def test_leftovers_of_a_killed_writer_are_cleaned_but_not_those_of_a_live_one(
        backend: Backend, tmp_path: Path) -> None:
    (tmp_path / '.C0.capsule.1-1.tmp').write_bytes(b'half')
    directory = files.open_directory(tmp_path)
    with files._temporary(directory, 'live.capsule', False):
        store = disk_store(backend, tmp_path)
        assert [path.name for path in tmp_path.iterdir()] != []
        assert not (tmp_path / '.C0.capsule.1-1.tmp').exists()
        assert len(list(tmp_path.glob('.live*'))) == 1
    assert list(tmp_path.iterdir()) == []
    store.close()
    os.close(directory)


NURSERY = """
import os, sys
sys.path.insert(0, sys.argv[2])
from _capsules import Session, small_store, MIB
from flashrt_core.runtime import cpu_backend

def save(turn):
    session = Session(cpu_backend())
    store = small_store(
        cpu_backend(), disk_bytes=2048 * MIB, directory=sys.argv[1], allow_disk=True)
    while True:
        session.length = turn % 97
        session.fill(turn)
        print(f'begun {turn}', flush=True)
        store.snapshot(session.boundary, f't{turn}', tier='disk')
        store.saved(f't{turn}').result()
        print(f'saved {turn}', flush=True)
        turn += 1

print('ready', flush=True)
for line in sys.stdin:
    child = os.fork()
    if not child:
        save(int(line))
    print(f'child {child}', flush=True)
    os.waitpid(child, 0)
    print('dead 0', flush=True)
"""


@pytest.mark.slow
def test_a_kill_at_any_moment_loses_nothing_older_and_leaves_nothing_wrong(
        tmp_path: Path, stress: Callable[[int], int]) -> None:
    target, promised, turn, kills = stress(200), set(), 0, 0
    nursery = subprocess.Popen(
        [sys.executable, '-c', NURSERY, str(tmp_path), str(Path(__file__).parent)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, 'OMP_NUM_THREADS': '1'})
    assert nursery.stdin is not None and nursery.stdout is not None
    assert nursery.stdout.readline() == 'ready\n'
    while len(promised) < target:
        nursery.stdin.write(f'{turn}\n')
        nursery.stdin.flush()
        child, begun, lives = 0, 0, 1 + kills % 5
        for line in nursery.stdout:
            what, number = line.split()
            if what == 'dead':
                break
            if what == 'child':
                child = int(number)
                continue
            turn = int(number) + 1
            begun += what == 'begun'
            if what == 'saved':
                promised.add(int(number))
            if child and begun == lives:
                time.sleep(kills * 37 % 101 * 1e-4)
                os.kill(child, signal.SIGKILL)
                child = 0
        kills += 1
    nursery.stdin.close()
    assert nursery.wait(30) == 0
    nursery.stdout.close()

    session, reference = Session(cpu_backend()), Session(cpu_backend())
    store = small_store(cpu_backend(), disk_bytes=2048 * MIB, directory=tmp_path, allow_disk=True)
    held = {info.id for info in store.list()}
    assert {f't{number}' for number in promised} <= held
    assert not [event for event in store.events if event.kind == 'skipped']
    assert not list(tmp_path.glob('.*'))
    for name in held:
        reference.length = int(name[1:]) % 97
        reference.fill(int(name[1:]))
        store.restore(session.boundary, name)
        assert session.image() == reference.image(), name
    store.close()
    assert kills > target / 5


def test_prefetch_reads_the_file_ahead_of_the_restore(backend: Backend, tmp_path: Path) -> None:
    session, store = Session(backend), disk_store(backend, tmp_path)
    store.snapshot(session.boundary, 'C0')
    store.move('C0', 'disk')
    assert store.prefetch('C0').tier == 'host'
    assert store.restore(session.boundary, 'C0').source == 'host'
    with pytest.raises(CapsuleExists):
        store.snapshot(session.boundary, 'C0')
    store.close()


def test_saved_says_when_nothing_is_being_saved(backend: Backend, tmp_path: Path) -> None:
    session, store = Session(backend), disk_store(backend, tmp_path)
    store.snapshot(session.boundary, 'C0')
    with pytest.raises(CapsuleError, match='move it to disk'):
        store.saved('C0')
    store.move('C0', 'disk')
    assert isinstance(store.saved('C0'), Future) and store.saved('C0').result(10).on_disk
    store.close()


def test_a_directory_that_cannot_be_used_is_a_clear_error(
        backend: Backend, tmp_path: Path) -> None:
    (tmp_path / 'file').write_text('x')
    for path in (tmp_path / 'file', tmp_path / 'file' / 'below'):
        with pytest.raises(CapsuleError, match='cannot be used'):
            disk_store(backend, path)
    with pytest.raises(CapsuleError, match='cannot be used'):
        small_store(backend, directory=tmp_path / 'missing')
