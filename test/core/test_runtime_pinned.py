"""Where pinned memory comes from; no GPU is needed to choose."""
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashrt_core.runtime import cuda

DEVICE = torch.device('cpu')


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Byte counts asked of torch's pinned pool."""
    asked: list[int] = []
    real = torch.empty

    def empty(nbytes: int, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        asked.append(nbytes)
        return real(nbytes, dtype=dtype)

    monkeypatch.setattr(torch, 'empty', empty)
    return asked


def driver(monkeypatch: pytest.MonkeyPatch, code: int) -> list[int]:
    """A driver that answers a registration with `code`; gives the addresses released."""
    released: list[int] = []
    fake = SimpleNamespace(cudaHostRegister=lambda address, size, flags: code,
                           cudaHostUnregister=released.append)
    monkeypatch.setattr(torch.cuda, 'cudart', lambda: fake)
    return released


def test_pages_of_their_own_are_taken_where_the_driver_locks_them(
        monkeypatch: pytest.MonkeyPatch, pools: list[int]) -> None:
    released = driver(monkeypatch, 0)
    tensor = cuda._pinned(5000, DEVICE, True)
    address = tensor.data_ptr()
    assert tensor.numel() >= 5000 and address % 4096 == 0 and pools == [] and released == []
    del tensor
    assert released == [address]


@pytest.mark.parametrize('code', [801, 2])
def test_a_driver_that_refuses_leads_to_torchs_pool(
        monkeypatch: pytest.MonkeyPatch, pools: list[int], code: int) -> None:
    driver(monkeypatch, code)
    assert cuda._pinned(5000, DEVICE, True).numel() == 5000
    assert pools == [5000]


def test_a_device_without_registration_is_not_asked(
        monkeypatch: pytest.MonkeyPatch, pools: list[int]) -> None:
    def never() -> Any:
        raise AssertionError('the driver was asked')

    monkeypatch.setattr(torch.cuda, 'cudart', never)
    assert cuda._pinned(5000, DEVICE, False).numel() == 5000
    assert pools == [5000]


def test_a_full_pool_is_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(*args: Any, **options: Any) -> Any:
        raise RuntimeError('CUDA error: out of memory')

    monkeypatch.setattr(torch, 'empty', empty)
    with pytest.raises(MemoryError, match='out of memory'):
        cuda._pinned(5000, DEVICE, False)


@pytest.mark.parametrize(('status', 'value', 'expected'),
                         [(0, 1, True), (0, 0, False), (1, 1, False)])
def test_the_device_says_whether_it_registers(
        monkeypatch: pytest.MonkeyPatch, status: int, value: int, expected: bool) -> None:
    runtime = pytest.importorskip('cuda.bindings.runtime')
    monkeypatch.setattr(runtime, 'cudaDeviceGetAttribute', lambda attribute, index: (
        status, value if attribute.name == 'cudaDevAttrHostRegisterSupported' else -1))
    assert cuda._host_register_supported(0) is expected
