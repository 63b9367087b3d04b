"""The digest: one formula on every device, and every change of a byte or an order shows."""
from __future__ import annotations

import numpy as np
import pytest
import torch

from flashrt_core.errors import ContractError
from flashrt_core.kernels import digest as module
from flashrt_core.kernels.digest import C1
from flashrt_core.kernels.digest import C2
from flashrt_core.kernels.digest import C3
from flashrt_core.kernels.digest import digest
from flashrt_core.kernels.digest import DigestTable
from flashrt_core.kernels.digest import MASK
from flashrt_core.kernels.digest import PIECE


def numpy_digest(ranges: list[bytes]) -> int:
    """Write the documented formula once more, in numpy's unsigned integers."""
    def mix(x):
        for multiplier in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            x = (x ^ (x >> np.uint64(33))) * np.uint64(multiplier)
        return x ^ (x >> np.uint64(33))

    with np.errstate(over='ignore'):
        total = np.zeros(1, np.uint64)
        for number, data in enumerate(ranges):
            salt = [np.array([(number + 1) * c & MASK], np.uint64) for c in (C2, C3)]
            words = np.frombuffer(data + bytes(-len(data) % 8), '<u8').astype(np.uint64)
            place = np.arange(1, len(words) + 1, dtype=np.uint64) * np.uint64(C1)
            total += mix(words + place + salt[0]).sum(dtype=np.uint64)
            total += mix(np.array([len(data)], np.uint64) + salt[1])
        return int(mix(total)[0])


def run(backend, tensors: list[torch.Tensor]) -> int:
    table = DigestTable(backend, 64)
    stream = backend.stream()
    backend.synchronize()
    rows = [(t.data_ptr(), t.numel()) for t in tensors]
    table.fill(np.array(rows, np.int64).reshape(-1, 2))
    table.submit(stream)
    return table.result()


def data(backend, nbytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    return tensor.to(backend.device)


@pytest.mark.parametrize('cuts', [
    [], [(0, 0)], [(0, 1)], [(0, 8)], [(3, 1000)], [(0, PIECE + 4097)],
    [(0, 65_536), (256, 7), (512, 0), (1024, 2 * PIECE + 3), (77, 20_001)],
])
def test_the_table_the_reference_and_numpy_agree(backend, cuts):
    memory = data(backend, 3 * PIECE)
    tensors = [memory[at:at + n] for at, n in cuts]
    expected = numpy_digest([t.cpu().numpy().tobytes() for t in tensors])
    assert run(backend, tensors) == expected
    assert digest(tensors) == expected


def test_the_digest_of_a_known_text_is_fixed():
    text = torch.frombuffer(bytearray(b'flashrt keeps the whole state'), dtype=torch.uint8)
    assert digest([text]) == numpy_digest([b'flashrt keeps the whole state'])
    assert digest([text]) == 7703736015257013940


def test_one_changed_bit_anywhere_changes_it(backend):
    memory = data(backend, 10_001)
    first = run(backend, [memory])
    for at in (0, 1, 4999, 8191, 8192, 9999, 10_000):
        memory[at] ^= 1
        assert run(backend, [memory]) != first, f'byte {at}'
        memory[at] ^= 1
    assert run(backend, [memory]) == first


def test_order_cuts_and_lengths_count(backend):
    memory = data(backend, 4096)
    a, b = memory[:1024], memory[1024:2048]
    seen = {run(backend, t) for t in (
        [a, b], [b, a], [memory[:2048]], [a], [b], [a, b, memory[:0]], [memory[:0], a, b])}
    assert len(seen) == 7
    zeros = torch.zeros(64, dtype=torch.uint8, device=backend.device)
    assert len({run(backend, [zeros[:n]]) for n in (0, 1, 7, 8, 9, 64)}) == 6


def test_swapped_words_are_noticed(backend):
    memory = data(backend, 256)
    swapped = memory.clone()
    swapped[:8], swapped[8:16] = memory[8:16], memory[:8]
    assert run(backend, [swapped]) != run(backend, [memory])


@pytest.mark.parametrize('rows', [
    np.zeros((2, 3), np.int64), np.zeros((1, 2), np.int32), np.array([[0, -4]], np.int64),
    np.array([[0, 65 * PIECE]], np.int64),
])
def test_ranges_that_cannot_be_digested_are_refused(backend, rows):
    with pytest.raises(ContractError):
        DigestTable(backend, 64).fill(rows)


@pytest.mark.gpu
def test_the_fallback_without_triton_gives_the_same(backend, monkeypatch):
    memory = data(backend, 100_001)
    expected = digest([memory])
    monkeypatch.setattr(module, 'triton_selected', lambda *_: False)
    assert run(backend, [memory]) == expected
