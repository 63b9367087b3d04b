"""The kernel bench: it refuses a machine without a GPU, and on one it has a row for each case."""
from __future__ import annotations

import json
import os
from pathlib import Path
import subprocess
import sys
from typing import Any

import pytest
import torch

import flashrt_core
from flashrt_core.bench import kernels
from flashrt_core.bench.__main__ import main


def test_a_machine_without_a_gpu_is_refused_in_one_line(
        tmp_path: Path, capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    assert main(['kernels', '--out', str(tmp_path)]) == 1
    assert 'no CUDA device' in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('nbytes, sets', [(1, 64), (8 << 20, 32), (100 << 20, 3), (1 << 40, 1)])
def test_inputs_rotate_until_they_exceed_the_cache(nbytes: int, sets: int) -> None:
    assert kernels.rotated(nbytes) == sets


class Streams:
    """Stands in for torch.cuda: notes what happens, in order."""

    def __init__(self, noted: list[str]) -> None:
        self.noted = noted

    def __getattr__(self, name: str) -> Any:
        def call(*args: object, **options: object) -> Any:
            if name in ('wait_stream', 'synchronize', 'replay'):
                self.noted.append(name)
            return 1.0 if name == 'elapsed_time' else self
        return call

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


def test_no_launch_begins_before_its_inputs_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The inputs are made in another stream: positions half made send a kernel anywhere."""
    noted: list[str] = []
    monkeypatch.setattr(torch, 'cuda', Streams(noted))
    case = kernels.Case('case', 2, lambda i: noted.append(f'launch {i}'), 1)
    assert kernels.timed(case, 1) == [pytest.approx(1e3 / 20)]
    assert noted[:4] == ['wait_stream', 'launch 0', 'launch 1', 'synchronize']


def test_no_case_reads_or_writes_beyond_its_tensors_in_tritons_interpreter() -> None:
    triton = pytest.importorskip('triton')
    if tuple(int(part) for part in triton.__version__.split('.')[:2]) < (3, 7):
        pytest.skip('older interpreters fail on numpy >= 2.4')
    child = subprocess.run(
        [sys.executable, str(Path(__file__).with_name('_interpret_bounds.py'))],
        capture_output=True, text=True, timeout=300, check=False,
        env=os.environ | {'PYTHONPATH': str(Path(flashrt_core.__path__[0]).parent)})
    assert child.returncode == 0, child.stderr
    for name in ('mix', 'down fp8', 'gate_up int4', 'chunk down int4', 'down nvfp4',
                 'gate_up nvfp4', 'chunk down nvfp4', '2 layers', 'delta step',
                 'decode attention 70 fp8 keys', 'prefill attention', 'delta chunk'):
        assert f'\n{name}' in f'\n{child.stdout}', name
    assert 'found outside' in child.stdout  # of a key that was not there


@pytest.mark.gpu
def test_inputs_that_are_still_being_made_are_waited_for() -> None:
    given, seen = torch.zeros((), device='cuda'), []
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)  # cycles, in the stream that makes the inputs
    given.fill_(1.0)
    kernels.timed(kernels.Case('case', 1, lambda i: seen.append(given.clone()), 4), 1)
    assert float(seen[0]) == 1.0


@pytest.mark.gpu
def test_every_kernel_has_a_row_beside_its_floor(tmp_path: Path) -> None:
    assert main(['kernels', '--config', '0.8b', '--rows', '1', '5', '--lengths', '512',
                 '--tokens', '128', '--repeats', '3', '--out', str(tmp_path)]) == 0
    (path,) = tmp_path.iterdir()
    rows = json.loads(path.read_text())['rows']
    assert not [row['parts'] for row in rows if row['what'] == 'refused']
    for name in ('mix', 'qkv', 'head', 'out', 'down', 'gate_up', 'delta step', 'decode attention',
                 'delta chunk', 'prefill attention', 'layers at', 'layers, chunk', 'mix fp8',
                 'down fp8', 'gate_up fp8', 'chunk down fp8', 'chunk gate fp8', 'chunk scaling',
                 'layers at 512 fp8', 'decode attention 512 fp8 keys', 'mix int4', 'down int4',
                 'gate_up int4', 'chunk down int4', 'mix nvfp4', 'down nvfp4', 'gate_up nvfp4',
                 'chunk down nvfp4'):
        found = [row for row in rows if name in row['what']]
        assert found and all(row['p50_us'] > 0 and row['floor_us'] > 0 for row in found), name
