"""What weights of 4 bits share, int4 and NVFP4: groups of columns, two values a byte."""

from __future__ import annotations

import torch
from torch import Tensor

from flashrt_core.errors import ConfigError


def groups_of(weight: Tensor, size: int, precision: str) -> Tensor:
    """Return a weight [N, K] as float32 [N, K / size, size].

    :raises ConfigError: K is no multiple of ``size``, or a value is not finite.
    """
    if weight.shape[1] % size:
        raise ConfigError(f'a weight of {weight.shape[1]} columns has no whole groups of {size} '
                          f'for {precision}')
    groups = weight.float().unflatten(1, (-1, size))
    if not bool(torch.isfinite(groups).all()):
        raise ConfigError(
            f'a weight holds NaN or infinity; {precision} cannot carry it: check the file')
    return groups


def pack(codes: Tensor) -> Tensor:
    """Return codes uint8 [N, groups, size] as bytes [N, K / 2]: a group's first half is low."""
    low, high = codes.split(codes.shape[2] // 2, 2)
    return (low | high << 4).flatten(1)


def unpack(data: Tensor, size: int) -> Tensor:
    """Return the codes of bytes [N, K / 2], uint8 [N, K / size, size]."""
    groups = data.unflatten(1, (-1, size // 2))
    return torch.cat([groups & 15, groups >> 4], 2)
