"""Weights of 4 bits: whole numbers -8 to 7 times one scale for each 128 values of a row.

Layout: of 128 neighbouring values the first 64 lie in the low halves of 64 bytes, the last 64 in
the high halves, each plus 8. So a kernel takes both halves of a byte without moving anything
between lanes. The scale is the group's largest value over -8, as in GGUF's Q4_0: the largest
value itself is exact.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flashrt_core.nn.four_bits import groups_of
from flashrt_core.nn.four_bits import pack
from flashrt_core.nn.four_bits import unpack

GROUP = 128  # values of a row that share a scale
HALF = GROUP // 2
ZERO = 8  # what is stored for 0


class Int4Weight(NamedTuple):
    """A quantised weight of a product [K] -> [N]."""

    data: Tensor  # uint8 [N, K / 2]
    scale: Tensor  # float32 [K / GROUP, N]

    def values(self) -> Tensor:
        """Return the weight that the product uses, float32 [N, K]."""
        whole = unpack(self.data, GROUP).float() - ZERO
        return (whole * self.scale.t()[:, :, None]).flatten(1)

    def rows(self, at: slice) -> Int4Weight:
        """Return the output channels ``at``, views of this weight."""
        return Int4Weight(self.data[at], self.scale[:, at])


def quantise(weight: Tensor) -> Int4Weight:
    """Return a weight [N, K] in 4 bits; a group of zeros has scale 1.

    :raises ConfigError: K is no multiple of GROUP, or a value is not finite.
    """
    groups = groups_of(weight, GROUP, 'int4')
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    scale = torch.where(largest == 0, 1.0, largest / -ZERO)
    whole = (groups / scale).round().clamp(-ZERO, ZERO - 1).to(torch.int8) + ZERO
    return Int4Weight(pack(whole.to(torch.uint8)), scale[:, :, 0].t().contiguous())
