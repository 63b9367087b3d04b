"""Processes of a command end with it, and Ctrl-C is the command's alone."""
from __future__ import annotations

import os
from pathlib import Path
import signal
import subprocess
import sys
import time

import pytest

from flashrt_core.command_line import run
from flashrt_core.tabletop.workers import pool

PARENT = """
import os, sys, time
from flashrt_core.tabletop.workers import make_pool
if __name__ == '__main__':
    made = make_pool(1)
    print(made.submit(os.getpid).result(), flush=True)
    made.submit(time.sleep, 600)
    time.sleep(600)
"""


STOPPED = """
import os, signal, time
from flashrt_core.command_line import run
from flashrt_core.tabletop.workers import pool
def work():
    with pool(1) as processes:
        processes.submit(os.getpid).result()
if __name__ == '__main__':
    raise SystemExit(run('work', work))
print('importing', flush=True)
time.sleep(1.0)
"""


def test_ctrl_c_while_the_processes_begin_is_one_line(tmp_path: Path) -> None:
    script = tmp_path / 'stopped.py'
    script.write_text(STOPPED)
    root = Path(__file__).resolve().parents[2]
    command = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {'PYTHONPATH': str(root)}, start_new_session=True)
    assert command.stdout is not None and command.stderr is not None
    assert command.stdout.readline() == 'importing\n'
    os.killpg(command.pid, signal.SIGINT)
    assert command.stderr.read() == 'work: stopped\n'
    assert command.wait() == 130


def test_ctrl_c_ends_no_process_of_the_pool() -> None:
    with pool(1) as processes:
        first = processes.submit(os.getpid).result()
        processes.submit(signal.raise_signal, signal.SIGINT).result()
        assert processes.submit(os.getpid).result() == first


def test_a_worker_that_is_killed_is_told_in_one_line(
        capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> int:
        with pool(1) as processes:
            processes.submit(signal.raise_signal, signal.SIGKILL).result()
        return 0

    assert run('evaluate', work) == 2
    told = capsys.readouterr().err
    assert 'give fewer --workers' in told and len(told.splitlines()) == 1


def test_no_process_outlives_a_command_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / 'parent.py'
    script.write_text(PARENT)
    root = Path(__file__).resolve().parents[2]
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True,
                              env=os.environ | {'PYTHONPATH': str(root)})
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 60
    while Path(f'/proc/{worker}').exists():
        assert time.monotonic() < deadline, f'process {worker} goes on'
        time.sleep(0.05)
