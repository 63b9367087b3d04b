"""A mistake at a command's call is told in one line, before any work."""
from __future__ import annotations

import argparse
from collections.abc import Callable
import importlib
import os
from pathlib import Path
import signal
import subprocess
import sys

import pytest

from flashrt_core import command_line
from flashrt_core.bench.__main__ import main as bench
from flashrt_core.errors import ConfigError


@pytest.mark.parametrize('text', ['0', '-3', '1.5', 'many', '', 'nan', '9' * 5000])
def test_a_number_below_the_least_or_none_at_all_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match='give a whole number from 1 on'):
        command_line.whole_number(1)(text)
    assert command_line.whole_number(1)('7') == 7


@pytest.mark.parametrize('text', ['nan', '-inf', '-1e-9', 'x', ''])
def test_no_number_and_one_out_of_range_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match='give a number from 0 on'):
        command_line.number(0)(text)
    assert command_line.number(0)('0') == 0
    with pytest.raises(argparse.ArgumentTypeError, match='give a number above 0'):
        command_line.number(0, above=True)('0')


def test_a_file_that_cannot_be_written_is_told_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='it is a folder'):
        command_line.check_output(tmp_path, 'scores')
    with pytest.raises(ConfigError, match='none is no folder'):
        command_line.check_output(tmp_path / 'none' / 'scores.json', 'scores')
    command_line.check_output(tmp_path / 'scores.json', 'scores')
    assert not list(tmp_path.iterdir())


def test_a_mistake_is_one_line_and_a_status(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> int:
        raise ConfigError('no')

    def fill() -> int:
        raise OSError(28, 'No space left on device', 'weights')

    def stop() -> int:
        raise KeyboardInterrupt

    found = [command_line.run('name', action) for action in (refuse, fill, stop, lambda: 0)]
    assert found == [2, 2, 130, 0]
    assert capsys.readouterr().err.splitlines() == [
        'name: no [config_invalid]',
        'name: the file system refuses weights: No space left on device; check the path, its '
        'permissions and the free space [file]',
        'name: stopped']


def _importing(name: str) -> Callable[[], int]:
    def action() -> int:
        importlib.import_module(name)
        return 0

    return action


def test_a_package_that_is_not_installed_is_named_and_a_fault_of_our_own_is_not_hidden(
        capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.run('name', _importing('no_such_package')) == 2
    told = capsys.readouterr().err
    assert told.startswith('name: ') and "no module 'no_such_package'" in told
    assert len(told.splitlines()) == 1
    with pytest.raises(ModuleNotFoundError):
        command_line.run('name', _importing('flashrt_core.no_such_room'))


def test_output_that_nobody_reads_ends_a_command_in_one_line() -> None:
    code = ('import sys\nfrom flashrt_core.command_line import run\n'
            'def work():\n    while True:\n        print("line " * 999)\n'
            'sys.exit(run("name", work))\n')
    command = subprocess.Popen([sys.executable, '-c', code], text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    assert command.stdout is not None and command.stderr is not None
    command.stdout.readline()
    command.stdout.close()
    assert command.stderr.read().splitlines() == [
        'name: ended, for nobody reads its output any more [file]']
    assert command.wait() == 2


def test_a_first_interrupt_is_noted_and_a_second_one_interrupts() -> None:
    with pytest.raises(KeyboardInterrupt), command_line.deferred_interrupt() as came:
        assert not came()
        os.kill(os.getpid(), signal.SIGINT)
        assert came()
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_bench_whose_result_has_no_place_does_not_begin(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / 'file').write_text('mine')
    assert bench(['runtime', '--device', 'cpu', '--out', str(tmp_path / 'file')]) == 1
    told = capsys.readouterr()
    assert 'cannot be made' in told.err and len(told.err.splitlines()) == 1 and not told.out
    assert bench(['llm', '--config', 'tiny', '--device', 'cpu', '--out', str(tmp_path / 'out'),
                  '--disk', str(tmp_path / 'none')]) == 1
    assert 'give a directory that exists' in capsys.readouterr().err
