"""Noise: the published vectors, the same bits in numpy and torch, streams that differ."""
from __future__ import annotations

import numpy as np
import pytest
import torch

from flashrt_core.errors import ContractError
from flashrt_core.runtime import philox

# Random123 1.14, tests/kat_vectors: philox4x32 10 (counter, key, block).
PUBLISHED = (
    ('00000000 00000000 00000000 00000000', '00000000 00000000',
     '6627e8d5 e169c58d bc57ac4c 9b00dbd8'),
    ('ffffffff ffffffff ffffffff ffffffff', 'ffffffff ffffffff',
     '408f276d 41c83b0e a20bc7c6 6d5451fd'),
    ('243f6a88 85a308d3 13198a2e 03707344', 'a4093822 299f31d0',
     'd16cfe09 94fdcceb 5001e420 24126ea1'),
)
SEEDS = (0, 1, -1, 2**40 + 17, 2**63 - 1, -2**63)
TICKS = (0, 1, 2**31, 2**32 - 1, 2**32 + 5)


def words(text: str) -> np.ndarray:
    return np.array([int(word, 16) for word in text.split()], np.uint32)


def slow_philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 in unbounded Python integers, written from the paper's figure."""
    c, k = list(counter), list(key)
    for _ in range(10):
        left, right = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(right >> 32) ^ c[1] ^ k[0], right % 2**32, (left >> 32) ^ c[3] ^ k[1], left % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


@pytest.mark.parametrize('counter, key, block', PUBLISHED)
def test_philox_gives_the_published_vectors(counter, key, block):
    mine = philox.philox4x32(words(counter)[None], words(key))
    assert mine[0].tolist() == words(block).tolist()


def test_philox_agrees_with_a_second_derivation_on_random_counters():
    rng = np.random.default_rng(3)
    counters = rng.integers(0, 2**32, (50, 4), np.uint32)
    keys = rng.integers(0, 2**32, (50, 2), np.uint32)
    mine = philox.philox4x32(counters, keys)
    for row in range(50):
        assert mine[row].tolist() == slow_philox(counters[row].tolist(), keys[row].tolist())


def test_an_element_depends_on_its_place_only_not_on_the_length():
    long = philox.uint32(5, 6, 7, 1001)
    for n in (0, 1, 3, 4, 5, 1000):
        assert philox.uint32(5, 6, 7, n).tolist() == long[:n].tolist()


def test_the_counter_is_block_tick_branch_stream():
    assert philox.uint32(0x0000000A_0000000B, 4, 3, 8, stream=9)[4:].tolist() == slow_philox(
        [1, 3, 4, 9], [0xB, 0xA])


@pytest.mark.parametrize('seed', SEEDS)
def test_numpy_and_torch_give_the_same_bits(backend, seed):
    rows = len(TICKS)
    tensors = [torch.tensor(values, dtype=torch.int64, device=backend.device)
               for values in ([seed] * rows, range(rows), TICKS)]
    mine = philox.uint32_torch(*tensors, n=37).cpu().numpy()
    out, reference = (torch.empty((rows, 5, 7), device=backend.device) for _ in range(2))
    philox.normal_torch(*tensors, out)
    philox.normal_reference(*tensors, reference)
    assert torch.equal(out.view(torch.int32), reference.view(torch.int32))
    for row, tick in enumerate(TICKS):
        assert mine[row].tolist() == philox.uint32(seed, row, tick, 37).tolist()
        expected = philox.normal(seed, row, tick, 35).view(np.uint32)
        assert out[row].flatten().cpu().numpy().view(np.uint32).tolist() == expected.tolist()


def test_parameters_are_read_from_device_memory_at_each_replay(backend, lane):
    from flashrt_core.runtime import BufferSet
    from flashrt_core.runtime import BufferSpec
    from flashrt_core.runtime import Graph
    from flashrt_core.runtime import Kind
    from flashrt_core.runtime import Plan
    from flashrt_core.runtime import Role
    names = ('seed', 'branch', 'tick')
    buffers = BufferSet(backend, [
        *(BufferSpec(n, Role.STATE, torch.int64, (), kind=Kind.RNG) for n in names),
        BufferSpec('noise', Role.OUTPUT, torch.float32, (10, 3)),
    ], rows=2)
    graph = Graph('noise', lambda p, key: philox.normal_torch(
        p['seed'], p['branch'], p['tick'], p['noise']), [*names, 'noise'])
    for port in graph.ports:
        graph.bind(port, buffers[port])
    graph.capture((), lane)
    plan = Plan('noise')
    plan.add(graph, ())
    for tick in range(3):
        def fill(tick=tick):
            for name, values in (('seed', (8, 9)), ('branch', (0, 1)), ('tick', (tick, tick))):
                buffers[name].tensor.copy_(torch.tensor(values))
        noise = lane.run(plan, before=fill,
                         after=lambda: buffers['noise'].tensor.cpu().numpy()).result(20).value
        for row in range(2):
            expected = philox.normal(8 + row, row, tick, 30)
            assert noise[row].reshape(-1).tolist() == expected.tolist()


def test_seeds_branches_ticks_and_streams_give_other_noise():
    base = philox.uint32(1, 1, 1, 400, stream=1)
    for other in ((2, 1, 1, 1), (1 + 2**32, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)):
        seed, branch, tick, stream = other
        assert (philox.uint32(seed, branch, tick, 400, stream) == base).sum() == 0


def test_the_table_is_the_normal_quantile_function():
    exact = torch.special.ndtri((torch.arange(65536, dtype=torch.float64) + 0.5) / 65536)
    table = philox.table()
    assert table.dtype == np.float32 and table.shape == (65536,)
    assert np.array_equal(table, exact.to(torch.float32).numpy())
    assert np.array_equal(table, -table[::-1])
    assert (np.diff(table) > 0).all()
    with pytest.raises(ValueError):
        table[0] = 0


def test_another_table_is_refused(monkeypatch):
    monkeypatch.setattr(philox, 'TABLE_SHA256', '00')
    philox.table.cache_clear()
    try:
        with pytest.raises(ContractError, match='SHA-256'):
            philox.table()
    finally:
        monkeypatch.undo()
        philox.table.cache_clear()


def test_normals_have_the_moments_of_a_normal():
    values = philox.normal(7, 0, 0, 200_000).astype(np.float64)
    assert abs(values.mean()) < 0.01
    assert abs(values.var() - 1) < 0.01
    assert abs((values**3).mean()) < 0.03
    assert abs((values**4).mean() - 3) < 0.06
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.01


@pytest.mark.parametrize('name, change', [
    ('seed', {'seed': torch.zeros(2, dtype=torch.int32)}),
    ('tick', {'tick': torch.zeros(3, dtype=torch.int64)}),
    ('out', {'out': torch.zeros(2, 4, dtype=torch.float16)}),
])
def test_noise_arguments_that_do_not_fit_are_named(name, change):
    zeros = torch.zeros(2, dtype=torch.int64)
    arguments = {'seed': zeros, 'branch': zeros, 'tick': zeros, 'out': torch.zeros(2, 4)} | change
    with pytest.raises(ContractError, match=name):
        philox.normal_torch(**arguments)
