"""Which implementation runs: the kernel where its check passed, the reference elsewhere."""
from __future__ import annotations

import pytest
import torch

from flashrt_core.kernels import _triton

CUDA = torch.device('cuda', 5)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(_triton, '_choices', {})
    monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: False)
    monkeypatch.delenv(_triton.KERNELS_VARIABLE, raising=False)


def test_a_passed_check_selects_the_kernel_once():
    calls = []
    for _ in range(3):
        assert _triton.triton_selected('k', CUDA, lambda: not calls.append(1))
    assert len(calls) == 1
    assert _triton.choices() == {'k on cuda:5': 'triton'}


def test_other_bits_select_the_reference_and_say_so(caplog):
    assert not _triton.triton_selected('k', CUDA, lambda: False)
    assert 'other bits' in _triton.choices()['k on cuda:5']
    assert 'other bits' in caplog.text


def test_a_check_that_raises_selects_the_reference_with_the_reason():
    def fail() -> bool:
        raise OSError('no ptxas')

    assert not _triton.triton_selected('k', CUDA, fail)
    assert 'no ptxas' in _triton.choices()['k on cuda:5']


def test_the_cpu_and_the_environment_select_the_reference(monkeypatch):
    assert not _triton.triton_selected('k', torch.device('cpu'), lambda: True)
    monkeypatch.setenv(_triton.KERNELS_VARIABLE, 'torch')
    assert not _triton.triton_selected('k', CUDA, lambda: True)


def test_a_first_use_inside_a_capture_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: True)
    with pytest.raises(_triton.ContractError, match='capture'):
        _triton.triton_selected('k', CUDA, lambda: True)
