"""Run the Triton kernels in Triton's interpreter on host memory; a child of the tests."""
import os

os.environ['TRITON_INTERPRET'] = '1'

import numpy as np
import torch

from flashrt_core.kernels import copy
from flashrt_core.kernels import digest
from flashrt_core.kernels import philox as kernel
from flashrt_core.runtime import philox

PROGRAMS = 3
PIECE = 32 << 10   # smaller than on a GPU: the interpreter is slow
CHUNK = 8 << 10


def check_philox() -> None:
    """The kernel and the reference give the same bits, for strided rows and odd lengths."""
    arena = torch.zeros((3, 64), dtype=torch.int64)
    seed, branch, tick = arena[:, 0], arena[:, 32], arena[:, 33]
    seed.copy_(torch.tensor([5, -1, 2**63 - 1]))
    branch.copy_(torch.tensor([0, 2**32 - 1, 9]))
    tick.copy_(torch.tensor([2**31, 0, 2**32 + 1]))
    out, reference = torch.zeros((3, 7, 99)), torch.ones((3, 7, 99))
    kernel._launch(seed, branch, tick, out, 1)
    philox.normal_reference(seed, branch, tick, reference, 1)
    assert torch.equal(out.view(torch.int32), reference.view(torch.int32))


def check_copy() -> None:
    """Odd, empty, unaligned and full ranges arrive; no byte beside them changes."""
    source = torch.randint(0, 256, (1 << 18,), dtype=torch.uint8)
    target, expected = torch.zeros_like(source), torch.zeros_like(source)
    rows = []
    for at, to, count in ((0, 16, 1), (33, 64, 7), (512, 1024, 0), (4096, 8192, 16_387),
                          (40_001, 40_003, 9_000), (1 << 17, 1 << 17, PIECE)):
        rows.append((source.data_ptr() + at, target.data_ptr() + to, count))
        expected[to:to + count] = source[at:at + count]
    table = torch.zeros((len(rows) + 5, 3), dtype=torch.int64)
    table[0, 0] = len(rows)
    table[1:1 + len(rows)] = torch.tensor(rows)
    copy.copy_ranges[(PROGRAMS,)](table, PROGRAMS, PIECE=PIECE, CHUNK=CHUNK)
    assert torch.equal(target, expected)


def check_digest() -> None:
    """The kernel sums the words as the reference does."""
    data = torch.randint(0, 256, (1 << 17,), dtype=torch.uint8)
    cuts = ((0, 30_000), (256, 8_192), (512, 0), (1024, 13), (77, 20_001))
    rows = np.array([(data.data_ptr() + at, n) for at, n in cuts], np.int64)
    pieces = digest._pieces(rows)
    table = torch.zeros((len(pieces) + 1, 4), dtype=torch.int64)
    table[0, 0] = len(pieces)
    table[1:] = torch.from_numpy(pieces)
    partial = torch.ones(PROGRAMS, dtype=torch.int64)
    digest.digest_ranges[(PROGRAMS,)](table, partial, PROGRAMS, PIECE=PIECE, CHUNK=CHUNK)
    mine = digest.finish(int(partial.sum()), [n for _, n in cuts])
    assert mine == digest.digest(data[at:at + n] for at, n in cuts)


if __name__ == '__main__':
    for check in (check_philox, check_copy, check_digest):
        check()
        print(check.__name__, 'passed')
