"""The copy table: every byte of every range arrives, and no other byte changes."""
from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from flashrt_core.errors import ContractError
from flashrt_core.kernels import copy
from flashrt_core.kernels._table import DeviceTable
from flashrt_core.kernels.copy import CopyTable
from flashrt_core.kernels.copy import PIECE
from flashrt_core.runtime import cpu_backend

SIZES = (0, 1, 2, 15, 16, 17, 255, 256, 4096, 16_383, 16_384, 16_385, 100_001, PIECE, PIECE + 1,
         2 * PIECE + 12_345)


def pair(backend, nbytes):
    generator = torch.Generator().manual_seed(nbytes)
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    source = source.to(backend.device)
    return source, torch.full_like(source, 0xA5)


def run(backend, table, rows):
    stream = backend.stream()
    backend.synchronize()
    pieces = table.fill(np.array(rows, np.int64).reshape(-1, 3))
    table.submit(stream)
    backend.synchronize()
    return pieces


@pytest.mark.parametrize('to, at', [(0, 0), (256, 512), (16, 0), (3, 0), (0, 5), (7, 7)])
def test_sizes_and_alignments_copy_exactly(backend, at, to):
    table = CopyTable(backend, 16)
    for size in SIZES:
        source, target = pair(backend, size + 1024)
        expected = target.clone()
        expected[to:to + size] = source[at:at + size]
        run(backend, table, [(source.data_ptr() + at, target.data_ptr() + to, size)])
        assert torch.equal(target, expected), f'{size} bytes from +{at} to +{to}'


@pytest.mark.parametrize('count', [1, 63, 64, 65, 300])
def test_many_ranges_go_in_one_submission_and_empty_ones_are_left_out(backend, count):
    rng = np.random.default_rng(count)
    source, target = pair(backend, 1 << 20)
    expected = target.clone()
    edges = np.sort(rng.choice(np.arange(1, 1 << 20), 2 * count, replace=False))
    rows = []
    for begin, end in edges.reshape(-1, 2).tolist():
        size = 0 if rng.random() < 0.2 else end - begin
        rows.append((source.data_ptr() + begin, target.data_ptr() + begin, size))
        expected[begin:begin + size] = source[begin:begin + size]
    pieces = run(backend, CopyTable(backend, 512), rows)
    assert pieces == sum(size > 0 for _, _, size in rows)
    assert torch.equal(target, expected)


def test_a_table_is_used_again_with_fewer_ranges(backend):
    table = CopyTable(backend, 8)
    source, target = pair(backend, 4096)
    run(backend, table, [(source.data_ptr() + i * 512, target.data_ptr() + i * 512, 512)
                         for i in range(8)])
    assert torch.equal(source, target)
    target.fill_(1)
    run(backend, table, [(source.data_ptr(), target.data_ptr(), 512)])
    assert torch.equal(target[:512], source[:512]) and target[512:].eq(1).all()
    target.fill_(2)
    run(backend, table, [])
    assert target.eq(2).all() and table.bytes == 0


def test_long_ranges_are_cut_into_pieces_that_cover_them():
    rows = np.array([[0, 1 << 40, 3 * PIECE + 5], [7, 9, 0], [100, 200, PIECE]], np.int64)
    pieces = copy.pieces(rows).rows
    assert pieces[:, 2].tolist() == [PIECE, PIECE, PIECE, 5, PIECE]
    assert pieces[:, 0].tolist() == [0, PIECE, 2 * PIECE, 3 * PIECE, 100]
    assert (pieces[:4, 1] - pieces[:4, 0]).tolist() == [1 << 40] * 4


@pytest.mark.parametrize('rows, text', [
    (np.zeros((2, 2), np.int64), 'int64'), (np.zeros((1, 3), np.int32), 'int32'),
    (np.array([[0, 0, -1]], np.int64), '-1 bytes'),
    (np.array([[0, 0, 8]] * 5, np.int64), '5 pieces.*4'),
    (np.array([[0, 0, 5 * PIECE]], np.int64), '5 pieces.*4'),
])
def test_ranges_that_cannot_be_copied_are_refused_before_anything_is_copied(backend, rows, text):
    table = CopyTable(backend, 4)
    with pytest.raises(ContractError, match=text):
        table.fill(rows)


@pytest.mark.gpu
def test_submissions_allocate_nothing_on_cuda(backend):
    if backend.name != 'cuda':
        pytest.skip('counts CUDA allocations')
    table = CopyTable(backend, 128)
    source, target = pair(backend, 1 << 22)
    stream = backend.stream()
    rows = np.array([(source.data_ptr(), target.data_ptr(), 1 << 22)], np.int64)
    before = torch.cuda.memory_stats()['allocation.all.allocated']
    for _ in range(100):
        table.fill(rows)
        table.submit(stream)
    backend.synchronize()
    assert torch.cuda.memory_stats()['allocation.all.allocated'] == before
    assert torch.equal(source, target)


@pytest.mark.gpu
def test_the_fallback_without_triton_copies_the_same(backend, monkeypatch):
    monkeypatch.setattr(copy, 'triton_selected', lambda *_: False)
    source, target = pair(backend, 1 << 20)
    run(backend, CopyTable(backend, 8), [(source.data_ptr() + 3, target.data_ptr() + 3, 99_999)])
    assert torch.equal(source[3:100_002], target[3:100_002])
    assert target[:3].eq(0xA5).all() and target[100_002:].eq(0xA5).all()


def test_pieces_filled_again_copy_the_same_ranges_from_new_bytes(backend, lane):
    source = torch.arange(1 << 16, dtype=torch.int32, device=backend.device)
    target, other = torch.zeros_like(source), torch.zeros_like(source)
    table = copy.CopyTable(backend, 8)
    again = copy.pieces(np.array([(source.data_ptr(), target.data_ptr(), 1 << 18)], np.int64))
    between = copy.pieces(np.array([(source.data_ptr(), other.data_ptr(), 64)], np.int64))
    backend.synchronize()

    def copied(pieces, offset):
        source.copy_(torch.arange(1 << 16, dtype=torch.int32) + offset)
        table.fill(pieces)
        table.submit(lane.stream)
        assert table.event.wait(10.0)

    for pieces, offset in ((again, 0), (again, 7), (between, 9), (again, 11)):
        lane.call(partial(copied, pieces, offset)).result()
        if pieces is again:
            assert torch.equal(target.cpu(), source.cpu())
    assert other[0] == 9 and not other[16:].any()


def test_rows_whose_submission_failed_are_uploaded_when_they_are_submitted_again(monkeypatch):
    replayed = []

    class Graph:
        def __init__(self, name):
            self.name, self.fault = name, None

        def replay(self):
            replayed.append(self.name)
            if self.fault:
                raise self.fault

    both, kernel, rows = Graph('upload and copy'), Graph('copy'), np.ones((1, 3), np.int64)
    table = DeviceTable(cpu_backend(), 4, columns=3)
    table._graphs = [(4, both, kernel)]
    monkeypatch.setattr(torch.cuda, 'current_stream', lambda device: 'stream')
    for graph in (both, kernel):
        table.fill(rows, rows)
        graph.fault = RuntimeError('no launch')
        with pytest.raises(RuntimeError, match='no launch'):
            table.replay('stream')
        graph.fault = None
        table.fill(rows, rows)
        table.replay('stream')
        assert replayed[-2:] == [graph.name, 'upload and copy']
    table.replay('stream')
    assert replayed[-1] == 'copy'
