"""Run the planner's kernels in Triton's interpreter on host memory; a child of the tests."""
import os

os.environ['TRITON_INTERPRET'] = '1'

import torch

from flashrt_core.kernels import decode_attention
from flashrt_core.kernels import delta_chunk
from flashrt_core.kernels import delta_step
from flashrt_core.kernels import fp8_rows
from flashrt_core.kernels import prefill_attention
from flashrt_core.kernels import row_int4
from flashrt_core.kernels import row_nvfp4
from flashrt_core.kernels import row_products
from flashrt_core.kernels import token_rows
from flashrt_core.nn.fp8 import E4M3

CPU = torch.device('cpu')
SINGLE = torch.float32
EXACT = 1e-5  # float32 in another order


def row_products_() -> None:
    """Columns that do not fill a tile, splits, gate and fold; rows alone, together, of a chunk."""
    assert row_products.check(CPU, SINGLE, 280, 512, EXACT)
    assert row_products.check(CPU, SINGLE, 280, 512, EXACT, narrow=True)


def fp8_rows_() -> None:
    """Rows scaled by their largest value: alone, behind a norm, behind a gate in many blocks."""
    fp8_rows.STORED = SINGLE
    fp8_rows.BLOCK = 64
    assert fp8_rows.check(CPU, SINGLE, 5, 200, EXACT)


def row_int4_() -> None:
    """As row_products, and columns that are a view of a larger weight; the values widened."""
    assert row_int4.check(CPU, SINGLE, 88, 512, EXACT)


def row_nvfp4_() -> None:
    """As row_int4, of tiles that the sums fill and of those that they do not; subnormal scales."""
    assert row_nvfp4.check(CPU, SINGLE, 88, 512, EXACT)
    assert row_nvfp4.check(CPU, SINGLE, 72, 1024, EXACT)


def delta_step_() -> None:
    """Token by token, verified, accepted, branched: the same bits, and those of the layer."""
    assert delta_step.check(CPU, SINGLE, 2, 1, 16, 32, EXACT)


def decode_attention_() -> None:
    """Lengths around the edges of tiles and splits, with tails from before and behind them."""
    decode_attention.SPLITS = 4
    lengths = (0, 63, 64, 130, 270)
    assert decode_attention.check(CPU, SINGLE, 3, 1, 32, lengths, EXACT)
    assert decode_attention.check(CPU, SINGLE, 4, 2, 32, (69, 70), EXACT)
    assert decode_attention.check(CPU, SINGLE, 4, 2, 32, (9, 70), EXACT, E4M3)


def delta_chunk_() -> None:
    """Chunks that are full, short, padded, shorter than the convolution, of one word repeated."""
    for tokens in ((16, 16), (64, 2), (200, 130), (128, 128)):
        assert delta_chunk.check(CPU, SINGLE, tokens, 2, 1, 16, EXACT), tokens
    assert delta_chunk.check(CPU, SINGLE, (130, 130), 2, 1, 16, EXACT, alike=True)


def prefill_attention_() -> None:
    """Tokens at the begin and at an offset, all or few of them valid, behind dead keys."""
    for prefill_attention.PROGRAMS in (1, 12):  # one split of the keys, and several
        for T, length, position in ((16, 16, 0), (16, 1, 100), (40, 33, 64), (16, 9, 300)):
            assert prefill_attention.check(CPU, SINGLE, 6, 2, 32, T, length, position, EXACT)
    assert prefill_attention.check(CPU, SINGLE, 6, 2, 32, 16, 9, 70, EXACT, E4M3)


def token_rows_() -> None:
    """Heads are normed, rotated in part and stored where their slot says; the gate."""
    for T in (3, 20):
        assert token_rows.check(CPU, SINGLE, T, 6, 2, 32, 8, EXACT)
    # In place of E4M3, to which the interpreter does not round as it should.
    assert token_rows.check(CPU, SINGLE, 3, 6, 2, 32, 8, 1e-3, torch.float16)


if __name__ == '__main__':
    for check in (row_products_, fp8_rows_, row_int4_, row_nvfp4_, delta_step_,
                  decode_attention_, delta_chunk_, prefill_attention_, token_rows_):
        check()
        print(check.__name__, 'passed')
