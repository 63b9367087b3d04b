"""Gumbel noise by table: equal bits in numpy, torch and Triton.

A Philox word w becomes v = float32(w) / 2**32, and the noise is -ln(-ln(1 - v)): small v, where a
float is fine, are the large values, which decide a draw. The table is indexed by the upper bits of
the float (its octave and 2**-11 of it) and interpolated by the lower 12 in integers, so no
logarithm of a device takes part. Source of the use: the Gumbel-max trick (arXiv 1411.0030, eq. 3).
"""

from __future__ import annotations

import functools
import hashlib
import math

import numpy as np
import torch
from torch import Tensor

from flashrt_core.errors import ContractError
from flashrt_core.runtime import philox

LOW_BITS = 12                              # of a float32 that interpolate
FIRST = (127 << 23 >> LOW_BITS) - 1        # index of w = 0 is 0, of w = 1 it is 1
SIZE = (159 << 23 >> LOW_BITS) - FIRST + 2  # w rounds up to 2**32 at most; one more to interpolate
SCALE = 2.0**-24                           # of the table's integers
TABLE_SHA256 = '865e28cf5b6e2b9ef85969b723207974385dcb66d8664fd2afeae2589eba20ac'

_device_tables: dict[torch.device, Tensor] = {}


@functools.cache
def table() -> np.ndarray:
    """Return the noise at the table's knots in units of 2**-24, int32 ``[SIZE]``, read-only.

    :raises ContractError: this machine's arithmetic gives other bits than the published digest.
    """
    words = (np.arange(1, SIZE - 1, dtype=np.int64) + FIRST << LOW_BITS).astype(np.int32)
    knots = [0.5, *words.view(np.float32).tolist()]  # w = 0 stands for the middle of its interval
    highest = 2.0**32 - 0.5
    values = [-math.log(-math.log1p(-min(w, highest) / 2.0**32)) for w in knots]
    found = np.array([round(value / SCALE) for value in [*values, values[-1]]], np.int32)
    digest = hashlib.sha256(found.astype('<i4').tobytes()).hexdigest()
    if digest != TABLE_SHA256:
        raise ContractError(
            f'the Gumbel table has SHA-256 {digest} here, not {TABLE_SHA256}: sampled tokens '
            'would differ from other machines; report the C library of this one'
        )
    found.setflags(write=False)
    return found


def table_torch(device: torch.device) -> Tensor:
    """Return the table on ``device``; made on first use, so call it before any capture."""
    if device not in _device_tables:
        _device_tables[device] = torch.from_numpy(table().copy()).to(device)
    return _device_tables[device]


def gumbel(seed: int, branch: int, position: int, n: int) -> np.ndarray:
    """Return the noise of ``n`` elements, float32 ``[n]``; arguments as ``philox.uint32``."""
    words = philox.uint32(seed, branch, position, n, philox.SAMPLER)
    bits = words.astype(np.float32).view(np.int32)
    index = np.maximum((bits >> LOW_BITS) - FIRST, 0)
    here, after = table()[index].astype(np.int64), table()[index + 1]
    here += (after - here) * (bits & ((1 << LOW_BITS) - 1)) >> LOW_BITS  # product below 2**37
    noise: np.ndarray = here.astype(np.float32) * np.float32(SCALE)
    return noise


def gumbel_reference(seed: Tensor, branch: Tensor, position: Tensor, n: int) -> Tensor:
    """Do :func:`gumbel_torch` in plain torch, about 200 small operations, on any device."""
    words = philox.uint32_torch(seed, branch, position, n, philox.SAMPLER)
    bits = words.to(torch.float32).view(torch.int32)
    index = ((bits >> LOW_BITS) - FIRST).clamp(min=0).long()
    knots = table_torch(seed.device)
    here, after = knots[index].long(), knots[index + 1]
    here = here + ((after - here) * (bits & ((1 << LOW_BITS) - 1)) >> LOW_BITS)
    return here.to(torch.float32) * SCALE


def gumbel_torch(seed: Tensor, branch: Tensor, position: Tensor, n: int) -> Tensor:
    """Return noise float32 ``[rows, n]`` of the SAMPLER stream.

    :param seed: int64 ``[rows]``, as are ``branch`` and ``position``; read on the device, so a
        captured call follows their present values. Capturable once it ran outside a capture.
    """
    if seed.is_cuda:
        from flashrt_core.kernels.gumbel import noise

        return noise(seed, branch, position, n)
    # On the host a few numpy passes beat 200 small torch operations; a replay runs this anew.
    rows = zip(seed.tolist(), branch.tolist(), position.tolist())
    return torch.from_numpy(np.stack([gumbel(*row, n) for row in rows]))
