"""Weights of 4 bits in NVFP4: E2M1 values, a scale in E4M3 for each 16, one in float32 over them.

Layout: of the 16 values of a block the first 8 lie in the low halves of 8 bytes, the last 8 in
the high halves, so both halves of a byte have one scale. The scale in float32 is kept for each
row. In a checkpoint it belongs to a tensor, and then a tensor's rows have the same; what is
quantised here has the row's own: tensors that lie one below the other keep theirs, and a row
does not depend on the piece of a file that it comes in.
Source of E2M1: OCP Microscaling Formats 1.0; of the scales: NVIDIA's NVFP4.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flashrt_core.nn.four_bits import groups_of
from flashrt_core.nn.four_bits import pack
from flashrt_core.nn.four_bits import unpack
from flashrt_core.nn.fp8 import E4M3
from flashrt_core.nn.fp8 import LARGEST

GROUP = 16  # values of a row that share a scale, a block
TOP = 6.0  # of E2M1
# Between two neighbours each; a value that lies there goes to the one whose last bit is 0.
MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


class Nvfp4Weight(NamedTuple):
    """A quantised weight of a product [K] -> [N]."""

    data: Tensor  # uint8 [N, K / 2]
    scale: Tensor  # E4M3 [K / GROUP, N], none below 0
    whole: Tensor  # float32 [N]

    def values(self) -> Tensor:
        """Return the weight that the product uses, float32 [N, K]."""
        codes = unpack(self.data, GROUP)
        size = (codes & 7).float()
        size = torch.where(size < 4, size / 2, torch.where(size < 6, size - 2, 2 * size - 8))
        scaled = torch.where(codes > 7, -size, size) * self.scale.float().t()[:, :, None]
        return scaled.flatten(1) * self.whole[:, None]

    def rows(self, at: slice) -> Nvfp4Weight:
        """Return the output channels ``at``, views of this weight."""
        return Nvfp4Weight(self.data[at], self.scale[:, at], self.whole[at])

    def to(self, device: torch.device) -> Nvfp4Weight:
        """Return this weight on a device."""
        return Nvfp4Weight(*(tensor.to(device) for tensor in self))


def quantise(weight: Tensor) -> Nvfp4Weight:
    """Return a weight [N, K] in NVFP4: a block's largest value is 6, a row's largest scale 448.

    :raises ConfigError: K is no multiple of GROUP, or a value is not finite.
    """
    blocks = groups_of(weight, GROUP, 'nvfp4')
    largest = blocks.abs().amax(2)
    whole = largest.amax(1) / (TOP * LARGEST)
    whole = torch.where(whole == 0, 1.0, whole)
    scale = (largest / TOP / whole[:, None]).to(E4M3)
    step = (scale.float() * whole[:, None])[:, :, None]
    size = torch.where(step == 0, 0.0, blocks.abs() / step)
    codes = torch.zeros_like(blocks, dtype=torch.uint8)
    for below, middle in enumerate(MIDDLES):
        codes += size > middle if below % 2 == 0 else size >= middle
    codes |= (blocks < 0).to(torch.uint8) << 3
    return Nvfp4Weight(pack(codes), scale.t().contiguous(), whole)


def from_pairs(data: Tensor, scale: Tensor, whole: Tensor) -> Nvfp4Weight:
    """Return rows as checkpoints store them, not one bit rounded.

    :param data: uint8 [R, K / 2], even columns in the low halves.
    :param scale: E4M3 [R, K / GROUP].
    :param whole: float32, one value.
    """
    codes = torch.stack([data & 15, data >> 4], 2).flatten(1).unflatten(1, (-1, GROUP))
    return Nvfp4Weight(pack(codes), scale.t().contiguous(), whole.float().expand(len(data)))
