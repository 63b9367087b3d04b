"""Run the planner's kernels in Triton's interpreter on host memory; a child of the tests."""
import os

os.environ['TRITON_INTERPRET'] = '1'

import sys

import torch

from flashrt_core.kernels import decode_attention
from flashrt_core.kernels import delta_step
from flashrt_core.kernels import row_products

CPU = torch.device('cpu')
SINGLE = torch.float32
EXACT = 1e-5  # float32 in another order


def row_products_() -> None:
    """Columns that do not fill a tile, splits, gate and fold; rows alone and together."""
    assert row_products.check(CPU, SINGLE, 88, 512, EXACT)


def delta_step_() -> None:
    """Token by token, verified, accepted, branched: the same bits, and those of the layer."""
    assert delta_step.check(CPU, SINGLE, 6, 2, 16, 32, EXACT)


def decode_attention_() -> None:
    """Lengths around the edges of tiles and splits, with tails from before and behind them."""
    decode_attention.SPLITS = 4
    lengths = (0, 63, 64, 130, 300)
    assert decode_attention.check(CPU, SINGLE, 6, 2, 32, lengths, EXACT)
    assert decode_attention.check(CPU, SINGLE, 4, 1, 32, (299, 300), EXACT)


if __name__ == '__main__':
    globals()[f'{sys.argv[1]}_']()
    print('passed')
