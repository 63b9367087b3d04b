"""The assembly that widens weights of 4 bits, run instruction by instruction, on every byte.

No interpreter of Triton knows it; on a GPU the kernels' own checks run it.
"""
from __future__ import annotations

from collections.abc import Callable
import re

import pytest
import torch
from torch import Tensor

from flashrt_core.kernels import row_int4
from flashrt_core.kernels import row_nvfp4
from flashrt_core.nn.int4 import Int4Weight
from flashrt_core.nn.nvfp4 import Nvfp4Weight

WORD = 0xFFFFFFFF


def prmt(a: int, b: int, selector: int) -> int:
    """Four bytes of two words, picked by the nibbles of ``selector``; none replicates a sign."""
    given = (a | b << 32).to_bytes(8, 'little')
    picks = [selector >> 4 * i & 15 for i in range(4)]
    assert max(picks) < 8
    return int.from_bytes(bytes(given[pick] for pick in picks), 'little')


def fma(a: int, b: int, c: int) -> int:
    """Two products and sums in bfloat16, which must need no rounding."""
    x, y, z = (torch.tensor([v & 0xFFFF, v >> 16]).to(torch.uint16).view(torch.bfloat16).double()
               for v in (a, b, c))
    exact = x * y + z
    assert torch.equal(exact.bfloat16().double(), exact)
    low, high = exact.bfloat16().view(torch.uint16).tolist()
    return low | high << 16


INSTRUCTIONS: dict[str, Callable[..., int]] = {
    'mov.b32': lambda a: a, 'and.b32': lambda a, b: a & b, 'or.b32': lambda a, b: a | b,
    'shl.b32': lambda a, n: a << n & WORD, 'shr.b32': lambda a, n: a >> n, 'prmt.b32': prmt,
    'fma.rn.bf16x2': fma}


def run(assembly: str, *words: int) -> list[int]:
    """The words $0 to $3 that the assembly makes of $4 and so on."""
    inputs = {f'${4 + i}': word for i, word in enumerate(words)}
    known = dict(inputs)
    for line in assembly.strip('{}\n').split(';'):
        if not line.strip() or '.reg' in line:
            continue
        name, operands = line.split(maxsplit=1)
        to, *given = re.split(r',\s*', operands.strip())
        found = INSTRUCTIONS[name](*(known[word] if word in known else int(word, 0)
                                     for word in given))
        if to.startswith('$'):  # which may be the register that an input is in
            known = {key: word for key, word in known.items() if key not in inputs}
        known[to] = found
    return [known[f'${i}'] for i in range(4)]


def pairs(words: list[int]) -> Tensor:
    """The values of words of two bfloat16, in order, as float32."""
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    return torch.tensor(halves).to(torch.uint16).view(torch.bfloat16).float()


def words_of(data: Tensor) -> list[int]:
    """Four bytes a word."""
    return [int.from_bytes(bytes(four), 'little') for four in data.view(-1, 4).tolist()]


def test_every_byte_of_int4_becomes_its_two_values() -> None:
    data = torch.arange(256, dtype=torch.uint8)
    expected = Int4Weight(data[None], torch.ones(4, 1)).values()[0].unflatten(0, (4, 2, 64))
    low, high = expected.transpose(0, 1).flatten(1)
    for at, word in enumerate(words_of(data)):
        made = run(row_int4.WIDEN, word)
        assert torch.equal(pairs(made[:2]), low[4 * at:4 * at + 4])
        assert torch.equal(pairs(made[2:]), high[4 * at:4 * at + 4])


@pytest.mark.parametrize('bits', [0, 1, 7, 8, 0x38, 0x41, 0x7E], ids=hex)
def test_every_byte_of_nvfp4_becomes_its_two_values_times_the_scale(bits: int) -> None:
    data = torch.arange(256, dtype=torch.uint8)
    scale = torch.full((32, 1), bits, dtype=torch.uint8).view(torch.float8_e4m3fn)
    expected = Nvfp4Weight(data[None], scale, torch.ones(1)).values()[0].unflatten(0, (32, 2, 8))
    low, high = expected.transpose(0, 1).flatten(1)
    (half,) = (scale[0].float() * 2.0**118).bfloat16().view(torch.uint16).tolist()
    for at, word in enumerate(words_of(data)):
        made = run(row_nvfp4.WIDEN, word, half << 16 | half, half << 16 | half)
        assert torch.equal(pairs(made[:2]) * 256, low[4 * at:4 * at + 4])
        assert torch.equal(pairs(made[2:]) * 256, high[4 * at:4 * at + 4])


def test_each_byte_has_a_factor_of_its_own() -> None:
    factors = torch.tensor([1.0, 2.0, 4.0, 8.0])
    given = words_of((factors * 2.0**118).bfloat16().view(torch.uint8))
    made = pairs(run(row_nvfp4.WIDEN, 0x24242424, *given)) * 256
    assert made.tolist() == [2.0, 4.0, 8.0, 16.0, 1.0, 2.0, 4.0, 8.0]
