"""The capsule command: ls, show, diff, verify, export, import."""
from __future__ import annotations

import json
import os
from pathlib import Path
import subprocess
import sys

from _capsules import MIB
from _capsules import Session
from _capsules import small_store
import pytest

from flashrt_core.capsule import cli
from flashrt_core.capsule import Identity
from flashrt_core.capsule.cli import main
from flashrt_core.runtime import cpu_backend


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three capsules: 'a', 'b' (one buffer and the extent differ), 'other' of another identity."""
    backend, path = cpu_backend(), tmp_path / 'capsules'
    store = small_store(backend, disk_bytes=64 * MIB, directory=path, allow_disk=True)
    session = Session(backend)
    session.length = 10
    session.fill(1)
    store.snapshot(session.boundary, 'a', label='first')
    store.restore(session.boundary, 'a')
    session.buffers['tick'].tensor.bitwise_xor_(0x0101)
    session.length = 12
    store.snapshot(session.boundary, 'b')
    other = Session(backend, identity=Identity({'config': 'large'}, {}), name='planner')
    store.snapshot(other.boundary, 'other')
    store.move('a', 'disk')
    store.move('b', 'disk')
    store.move('other', 'disk', session='planner')
    store.close()
    return path


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    code = main([str(item) for item in argv])
    out, err = capsys.readouterr()
    return code, out, err


def test_ls_lists_capsules_and_names_refused_files(
        folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, 'ls', folder)
    assert code == 0 and 'first' in out and 'planner@other' in out
    (folder / 'bad.capsule').write_bytes(b'junk')
    code, out, _ = run(capsys, 'ls', folder, '--json')
    listed = json.loads(out)
    assert code == 1 and [item['id'] for item in listed['capsules']] == ['a', 'b', 'other']
    assert listed['refused'][0]['file'] == 'bad.capsule'
    code, _, err = run(capsys, 'ls', folder / 'none')
    assert code == 2 and 'none' in err and 'give an existing directory' in err


def test_show_names_lineage_identity_and_buffers(
        folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, 'show', folder / 'b.capsule')
    assert code == 0 and 'parent: a' in out and 'layout.config: small' in out
    shown = json.loads(run(capsys, 'show', folder / 'b.capsule', '--json')[1])
    kv = next(item for item in shown['buffers'] if item['name'] == 'kv.0')
    assert kv == {'name': 'kv.0', 'dtype': 'BF16', 'shape': [12, 2, 4, 64], 'bytes': 12288}
    assert shown['extents'] == {'kv.0': 12, 'kv.1': 12}


def test_the_size_of_the_state_and_of_the_file_are_told_apart_and_alike_by_all(
        folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / 'a.capsule'
    [item] = [item for item in json.loads(run(capsys, 'ls', folder, '--json')[1])['capsules']
              if item['id'] == 'a']
    whole = file.stat().st_size
    assert item['file_bytes'] == whole > item['size_bytes']
    words = f'{item["size_bytes"]:,} bytes of state, {whole:,} in the file'
    for command in (('ls', folder), ('verify', file), ('export', folder, 'a', tmp_path / 'x')):
        assert words in run(capsys, *command)[1], command
    [result] = json.loads(run(capsys, 'verify', file, '--json')[1])['files']
    assert (result['size_bytes'], result['file_bytes']) == (item['size_bytes'], whole)


def test_diff_names_the_buffers_and_how_many_bytes(
        folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, 'diff', folder / 'a.capsule', folder / 'b.capsule')
    assert code == 1
    assert 'tick: 2 of 8 bytes differ' in out
    assert 'kv.0: 0 of 10,240 bytes differ, BF16 [10, 2, 4, 64] | BF16 [12, 2, 4, 64]' in out
    assert 'queue' not in out and 'layout' not in out
    code, out, _ = run(capsys, 'diff', folder / 'a.capsule', folder / 'a.capsule')
    assert (code, out) == (0, 'no differences\n')
    code, out, _ = run(capsys, 'diff', folder / 'a.capsule', folder / 'planner@other.capsule')
    assert code == 1 and "layout.config: 'small' | 'large'" in out


def test_verify_finds_the_damaged_file(
        folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [folder / 'a.capsule', folder / 'b.capsule']
    assert run(capsys, 'verify', *files)[0] == 0
    raw = bytearray(files[1].read_bytes())
    raw[-1] ^= 1
    files[1].write_bytes(raw)
    code, out, _ = run(capsys, 'verify', *files)
    assert code == 1 and 'a.capsule: ok' in out and 'b.capsule: damaged' in out
    results = json.loads(run(capsys, 'verify', *files, '--json')[1])['files']
    assert [item['ok'] for item in results] == [True, False]
    assert results[1]['error'] == 'capsule_corrupt'
    code, out, _ = run(capsys, 'verify', files[0], folder / 'c.capsule')
    assert code == 1 and 'c.capsule: not there: ' in out and ': damaged: ' not in out


def test_export_then_import_carries_the_same_bytes(
        folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / 'carried.bin'
    assert run(capsys, 'export', folder, 'other', out, '--session', 'planner')[0] == 0
    assert out.read_bytes() == (folder / 'planner@other.capsule').read_bytes()
    target = tmp_path / 'elsewhere'
    target.mkdir()
    assert run(capsys, 'import', out, target)[0] == 0
    assert (target / 'planner@other.capsule').read_bytes() == out.read_bytes()
    assert (target / 'planner@other.capsule').stat().st_mode & 0o777 == 0o600


def test_nothing_is_overwritten_unless_forced(
        folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / 'out.capsule'
    out.write_bytes(b'precious')
    code, _, err = run(capsys, 'export', folder, 'a', out)
    assert code == 2 and '--force' in err and out.read_bytes() == b'precious'
    code, _, err = run(capsys, 'import', folder / 'a.capsule', folder)
    assert code == 2 and 'capsule_exists' in err
    assert run(capsys, 'export', folder, 'a', out, '--force')[0] == 0
    assert out.read_bytes() == (folder / 'a.capsule').read_bytes()


def test_a_damaged_file_is_not_imported(
        folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = bytearray((folder / 'a.capsule').read_bytes())
    raw[-1] ^= 1
    bad, target = tmp_path / 'bad.capsule', tmp_path / 'target'
    bad.write_bytes(raw)
    target.mkdir()
    code, _, err = run(capsys, 'import', bad, target)
    assert code == 2 and 'capsule_corrupt' in err and list(target.iterdir()) == []


@pytest.mark.parametrize('argv', [
    ['show', 'missing.capsule'], ['ls', 'missing'], ['export', '.', '../x', 'y'],
    ['export', '.', 'nope', 'y'], ['import', 'missing.capsule', '.'], ['diff', 'a', 'b'],
    ['export', '.', 'a', 'y', '--session', '..']])
def test_bad_arguments_give_one_line_and_code_two(
        argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, *argv)
    assert code == 2 and err.startswith('error [') and err.count('\n') == 1


@pytest.mark.parametrize('argv', [[], ['unknown'], ['show'], ['verify']])
def test_wrong_usage_is_code_two(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, *argv)[0] == 2


def test_an_interrupt_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str],
                                  monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.files, 'stream', interrupt)
    file = next(folder.glob('*.capsule'))
    assert cli.main(['verify', str(file)]) == 130
    assert capsys.readouterr().err == 'capsule: stopped\n'


def test_the_module_runs_as_a_command(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, '-m', 'flashrt_core.capsule', 'ls', str(folder)],
        capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and 'first' in done.stdout


def test_hostile_text_of_a_file_reaches_no_terminal_as_it_is(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = small_store(cpu_backend(), disk_bytes=8 * MIB, directory=tmp_path, allow_disk=True)
    hostile = Identity({'config': 'clear \x1b[2J and \ud800\nlayout.weights: good'}, {})
    store.snapshot(Session(cpu_backend(), identity=hostile).boundary, 'a')
    store.move('a', 'disk')
    store.snapshot(Session(cpu_backend()).boundary, 'b')
    store.move('b', 'disk')
    store.close()
    (tmp_path / 'odd\x1b[2J\udcff.capsule').write_bytes(b'junk')
    for argv in (['show', tmp_path / 'a.capsule'], ['ls', tmp_path],
                 ['diff', tmp_path / 'a.capsule', tmp_path / 'b.capsule'],
                 ['verify', tmp_path / 'odd\x1b[2J\udcff.capsule'],
                 ['import', tmp_path / 'odd\x1b[2J\udcff.capsule', tmp_path]):
        code, out, err = run(capsys, *argv)
        assert code in (0, 1, 2) and out + err
        assert all(line.isprintable() for line in (out + err).split('\n'))
        assert not any(line.startswith('layout.weights: good') for line in out.split('\n'))


def test_a_screen_that_cannot_show_a_label_gets_it_escaped(folder: Path) -> None:
    store = small_store(cpu_backend(), disk_bytes=64 * MIB, directory=folder, allow_disk=True)
    store.snapshot(Session(cpu_backend()).boundary, 'c', label='grün')
    store.move('c', 'disk')
    store.close()
    done = subprocess.run(
        [sys.executable, '-m', 'flashrt_core.capsule', 'ls', str(folder)], capture_output=True,
        env={'PATH': '', 'PYTHONIOENCODING': 'ascii'}, cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == 0 and b'gr\\xfcn' in done.stdout


def test_a_directory_a_file_that_is_no_capsule_and_a_wrong_verb_are_told_apart(
        folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = tmp_path / 'notes.txt'
    text.write_text('not a capsule at all')
    code, _, err = run(capsys, 'show', folder)
    assert code == 2 and f'{folder} is a directory' in err and f'ls {folder}' in err
    code, _, err = run(capsys, 'show', text)
    assert code == 2 and f'{text} is no capsule file' in err
    code, _, err = run(capsys, 'ls', text)
    assert code == 2 and f'show {text}' in err


def test_export_takes_the_name_that_ls_prints(
        folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(capsys, 'export', folder, 'planner@other', tmp_path / 'one.capsule')[0] == 0
    assert run(capsys, 'verify', tmp_path / 'one.capsule')[0] == 0
    code, _, err = run(capsys, 'export', folder, 'robot@other', tmp_path / 'two.capsule')
    assert code == 2 and 'planner@other' in err


def test_a_name_that_cannot_be_looked_up_does_not_keep_the_other_files_from_being_verified(
        folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, 'verify', folder / ('x' * 300), folder / 'a.capsule')
    assert code == 1 and 'too long' in out and 'a.capsule: ok' in out


def test_export_refuses_two_sessions_for_one_capsule(
        folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / 'out'
    code, _, err = run(capsys, 'export', folder, 'robot@other', out, '--session', 'planner')
    assert code == 2 and 'robot' in err and 'planner' in err and not out.exists()
    assert run(capsys, 'export', folder, 'planner@other', out, '--session', 'planner')[0] == 0


def test_export_says_that_its_directory_is_missing(
        folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, 'export', folder / 'nowhere', 'a', folder / 'out')
    assert code == 2 and 'nowhere' in err and 'No such file or directory' in err


@pytest.mark.parametrize('force', [(), ('--force',)])
@pytest.mark.parametrize('target', ['.', 'inner'])
def test_export_to_a_directory_is_refused_and_writes_nothing(
        folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
        target: str, force: tuple[str, ...]) -> None:
    (folder / 'here' / 'inner').mkdir(parents=True)
    monkeypatch.chdir(folder / 'here')
    code, _, err = run(capsys, 'export', folder, 'a', target, *force)
    assert code == 2 and 'is a directory' in err
    assert [path.name for path in Path.cwd().rglob('*')] == ['inner']


def test_force_replaces_no_pipe_or_device(
        folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / 'pipe')
    code, _, err = run(capsys, 'export', folder, 'a', tmp_path / 'pipe', '--force')
    assert code == 2 and 'not a regular file' in err and (tmp_path / 'pipe').is_fifo()
