"""Launch every case of bench kernels in Triton's interpreter, each access checked; a child.

An access beyond what a kernel was given is an error here; on a GPU it may be one, and then no
later call of the process works. Prefetches are checked, too.
"""
import os

os.environ['TRITON_INTERPRET'] = '1'

from collections.abc import Iterator
from dataclasses import replace
import sys
from types import SimpleNamespace

import numpy as np
import torch
from triton.runtime import interpreter

from flashrt_core.bench import _kernels_products as products
from flashrt_core.bench import kernels
from flashrt_core.bench._kernels_products import Case
from flashrt_core.kernels import decode_attention
from flashrt_core.planners.qwen3_5 import fast
from flashrt_core.planners.qwen3_5 import NAMED
from flashrt_core.planners.qwen3_5 import Qwen35Config

CPU = torch.device('cpu')
# Columns that no tile divides, rows that no tile divides, one layer of each kind.
SMALL = replace(NAMED['0.8b'][0], width=128, mlp=512, heads=8, kv_heads=2, head_dim=64, rotary=8,
                key_heads=2, value_heads=8, key_dim=32, value_dim=64, vocab=72, full_every=2)
Builder = interpreter.InterpreterBuilder
Executor = interpreter.GridExecutor


class Outside(Exception):
    """An address that belongs to no argument of the kernel."""


class Guard:
    """The ranges of addresses that the running kernel was given."""

    def __init__(self) -> None:
        self.begins = self.ends = np.zeros(0, np.uint64)
        self.accesses = 0

    def take(self, args) -> None:
        """Know the tensors among a kernel's arguments, from first to last element."""
        given = [interpreter._unwrap_tensor(a) for a in args if hasattr(a, 'data_ptr')]
        ranges = sorted((t.data_ptr(), t.data_ptr() + t.element_size() * (1 + sum(
            (n - 1) * step for n, step in zip(t.shape, t.stride())))) for t in given if t.numel())
        self.begins, self.ends = np.array(ranges, np.uint64).reshape(-1, 2).T
        self.ends = np.maximum.accumulate(self.ends)

    def check(self, pointers, mask=None) -> None:
        """Raise Outside for an address that is in no range; masked ones are not looked at."""
        at = pointers.data.ravel() if mask is None else pointers.data[mask.data.astype(bool)]
        nbytes = np.uint64(max(1, pointers.get_element_ty().primitive_bitwidth // 8))
        found = np.searchsorted(self.begins, at, 'right') - 1
        bad = (found < 0) | (at + nbytes > self.ends[found])
        self.accesses += at.size
        if bad.any():
            raise Outside(f'{int(bad.sum())} of {at.size} addresses, first {hex(at[bad][0])}, lie '
                          f'outside {[(hex(a), hex(b)) for a, b in zip(self.begins, self.ends)]}')


def watch(guard: Guard) -> None:
    """Check every access of the interpreter from now on."""
    load, store = Builder.create_masked_load, Builder.create_masked_store
    arguments = Executor._init_args_hst

    def taken(self, args, kwargs):
        found = arguments(self, args, kwargs)
        guard.take([*found[0], *found[1].values()])
        return found

    def checked_load(self, pointers, mask, *others):
        guard.check(pointers, mask)
        return load(self, pointers, mask, *others)

    def checked_store(self, pointers, value, mask, *others):
        guard.check(pointers, mask)
        return store(self, pointers, value, mask, *others)

    def assembly(self, text, constraints, values, dtypes, pure, pack):
        for pointers in values:
            guard.check(pointers)
        shape = values[0].data.shape if values else ()
        result = interpreter.TensorHandle(np.zeros(shape, np.int32), dtypes[0].scalar)
        return SimpleNamespace(get_result=lambda i: result)

    Executor._init_args_hst = taken
    Builder.create_masked_load, Builder.create_masked_store = checked_load, checked_store
    Builder.create_inline_asm = assembly


def cases(c: Qwen35Config) -> Iterator[Case]:
    """Yield what bench kernels measures, of one set of inputs each."""
    for precision in kernels.PRECISIONS:
        p = replace(c, precision=precision)
        yield from products.products(p, CPU, ROWS, False)
        yield from products.products(p, CPU, ROWS, True)
        yield from products.gated(p, CPU, ROWS)
        yield from products.chunk_rows(p, CPU, TOKENS)
        if precision != 'fp8':  # which takes the library
            yield from products.few_products(p, CPU, FEW)
        if precision in ('int4', 'nvfp4'):
            yield from products.chunk_products(p, CPU, TOKENS)
    yield from kernels.layers(c, CPU, ROWS, [LENGTH], TOKENS)
    yield from kernels.steps(c, CPU, ROWS)
    for precision in kernels.KV_PRECISIONS:
        kv = replace(c, kv_precision=precision)
        yield from kernels.decoding(kv, CPU, ROWS, [LENGTH])
        yield from kernels.prefill(kv, CPU, TOKENS, [LENGTH])
    yield from kernels.chunks(c, CPU, TOKENS)


if __name__ == '__main__':
    # bfloat16 is widened by assembly that the interpreter does not know; an address is the same.
    if len(sys.argv) > 1:  # the name of a published size: minutes
        sizes, ROWS = replace(NAMED[sys.argv[1]][0], vocab=2080), [1, 5]
        FEW, TOKENS, LENGTH = 64, 128, 512
    else:
        sizes, ROWS, FEW, TOKENS, LENGTH = SMALL, [5], 18, 18, 70
        kernels.LAYERS, decode_attention.SPLITS = 2, 4
    fast.selected = lambda c, device: True
    for module in (products, kernels, fast):
        module.overlaps = lambda device: True
    products.rotated = kernels.rotated = lambda nbytes: 1
    guard = Guard()
    watch(guard)
    with torch.no_grad():
        for case in cases(replace(sizes, dtype='float32')):
            case.launch(0)
            print(case.name, 'passed', flush=True)
        (case,) = kernels.decoding(replace(sizes, dtype='float32'), CPU, [1], [LENGTH])
        case.launch.args[3].fill_(1 << 20)  # the position of a key that is not there
        try:
            case.launch(0)
        except interpreter.InterpreterError as error:
            assert isinstance(error.__cause__, Outside), error
            print('found outside')
