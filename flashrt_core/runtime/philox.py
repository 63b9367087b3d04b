"""
Counter-based noise: Philox4x32-10 and a quantile table; equal bits in numpy, torch and Triton.

Formula: J. K. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Philox).
The key is (low, high) 32 bits of ``seed``; the counter is (block, tick, branch, stream), each
modulo 2**32, where element ``e`` is word ``e % 4`` of block ``e // 4``. A normal takes the 16 high
bits of its word as an index into the quantiles of the normal distribution at (i + 1/2) / 65,536.
"""
from __future__ import annotations

import functools
import hashlib
from statistics import NormalDist

import numpy as np
import torch

from flashrt_core.errors import ContractError

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
TABLE_SIZE = 65536
TABLE_SHA256 = '1cfbba1e07e34386a57626f82aeb43e6ed54ba70a3ea6b7d964dc66a841074a8'
MASK = 0xFFFFFFFF

ACTION_NOISE = 0   # counter word 3: the start of a denoising
SAMPLER = 1        # counter word 3: token sampling

_device_tables: dict[torch.device, torch.Tensor] = {}


def philox4x32(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """
    Return the Philox4x32-10 block of each counter.

    :param counter: uint32 ``[n, 4]``.
    :param key: uint32 ``[n, 2]`` or ``[2]``.
    :return: uint32 ``[n, 4]``.
    """
    c0, c1, c2, c3 = (counter[:, i].astype(np.uint64) for i in range(4))
    keys = np.broadcast_to(key, (len(counter), 2)).astype(np.uint64)
    k0, k1 = keys[:, 0], keys[:, 1]
    mask, half = np.uint64(MASK), np.uint64(32)
    for _ in range(ROUNDS):
        p0, p1 = c0 * np.uint64(MULTIPLIERS[0]), c2 * np.uint64(MULTIPLIERS[1])
        c0, c1, c2, c3 = (p1 >> half) ^ c1 ^ k0, p1 & mask, (p0 >> half) ^ c3 ^ k1, p0 & mask
        k0, k1 = (k0 + np.uint64(WEYL[0])) & mask, (k1 + np.uint64(WEYL[1])) & mask
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def uint32(seed: int, branch: int, tick: int, n: int, stream: int = ACTION_NOISE) -> np.ndarray:
    """
    Return ``n`` random words, uint32 ``[n]``.

    :param seed: 64 bits, signed or not; ``branch``, ``tick`` and ``stream`` count modulo 2**32.
    """
    blocks = -(-n // 4)
    counter = np.empty((blocks, 4), np.uint32)
    counter[:, 0] = np.arange(blocks, dtype=np.uint32)
    counter[:, 1], counter[:, 2], counter[:, 3] = tick & MASK, branch & MASK, stream & MASK
    key = np.array([seed & MASK, (seed >> 32) & MASK], np.uint32)
    return philox4x32(counter, key).reshape(-1)[:n]


def normal(seed: int, branch: int, tick: int, n: int, stream: int = ACTION_NOISE) -> np.ndarray:
    """Return ``n`` standard normals, float32 ``[n]``; parameters as :func:`uint32`."""
    return table()[uint32(seed, branch, tick, n, stream) >> np.uint32(16)]


@functools.cache
def table() -> np.ndarray:
    """
    Return the quantile table, float32 ``[65536]``, read-only.

    Computed in float64 (Wichura's AS 241, through the standard library), mirrored to be exactly
    odd, rounded once.

    :raises ContractError: this machine's arithmetic gives other bits than the published digest.
    """
    quantile = NormalDist().inv_cdf
    lower = np.array([quantile((i + 0.5) / TABLE_SIZE) for i in range(TABLE_SIZE // 2)])
    both = np.concatenate([lower, -lower[::-1]]).astype(np.float32)
    digest = hashlib.sha256(both.astype('<f4').tobytes()).hexdigest()
    if digest != TABLE_SHA256:
        raise ContractError(
            f'the normal quantile table has SHA-256 {digest} here, not {TABLE_SHA256}: noise '
            'would differ from other machines; report the C library of this one')
    both.setflags(write=False)
    return both


def table_torch(device: torch.device) -> torch.Tensor:
    """Return the table on ``device``; made on first use, so call it before any capture."""
    if device not in _device_tables:
        _device_tables[device] = torch.from_numpy(table().copy()).to(device)
    return _device_tables[device]


def uint32_torch(seed: torch.Tensor, branch: torch.Tensor, tick: torch.Tensor, n: int,
                 stream: int = ACTION_NOISE) -> torch.Tensor:
    """
    Return random words of every row, int64 ``[rows, n]`` with values below 2**32.

    :param seed: int64 ``[rows]``, as are ``branch`` and ``tick``; read on the device, so a
        captured call follows their present values.
    """
    blocks = -(-n // 4)
    c0 = torch.arange(blocks, dtype=torch.int64, device=seed.device).expand(len(seed), blocks)
    c1, c2 = (tick & MASK)[:, None], (branch & MASK)[:, None]
    c3 = torch.zeros_like(c0) + (stream & MASK)
    k0, k1 = (seed & MASK)[:, None], ((seed >> 32) & MASK)[:, None]
    for _ in range(ROUNDS):
        high0, low0 = _mul32(c0, MULTIPLIERS[0])
        high1, low1 = _mul32(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    words = torch.stack(torch.broadcast_tensors(c0, c1, c2, c3), dim=-1)  # [rows, blocks, 4]
    return words.flatten(1)[:, :n]


def _mul32(a: torch.Tensor, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return high and low 32 bits of a * b, through 16-bit halves of b: int64 never overflows."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)          # below 2**48 each
    middle = high + (low >> 16)                          # below 2**49
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def normal_torch(seed: torch.Tensor, branch: torch.Tensor, tick: torch.Tensor,
                 out: torch.Tensor, stream: int = ACTION_NOISE) -> None:
    """
    Write standard normals into ``out``, float32 ``[rows, ...]``; element order is row-major.

    The fastest implementation of this device, all with the same bits. Capturable once it ran
    outside a capture; parameters as :func:`uint32_torch`.

    :raises ContractError: dtypes or row counts that do not fit.
    """
    check_normal_arguments(seed, branch, tick, out)
    if out.is_cuda:
        from flashrt_core.kernels.philox import normal_
        normal_(seed, branch, tick, out, stream)
        return
    # On the host a few numpy passes beat 200 small torch operations; a replay runs this anew.
    for row, target in enumerate(out):
        values = normal(int(seed[row]), int(branch[row]), int(tick[row]), target.numel(), stream)
        target.copy_(torch.from_numpy(values).view(target.shape))


def normal_reference(seed: torch.Tensor, branch: torch.Tensor, tick: torch.Tensor,
                     out: torch.Tensor, stream: int = ACTION_NOISE) -> None:
    """Do :func:`normal_torch` in plain torch, about 200 small operations, on any device."""
    words = uint32_torch(seed, branch, tick, out[0].numel(), stream)
    out.copy_(table_torch(out.device)[words >> 16].view(out.shape))


def check_normal_arguments(seed: torch.Tensor, branch: torch.Tensor, tick: torch.Tensor,
                           out: torch.Tensor) -> None:
    """Raise ContractError unless the arguments fit :func:`normal_torch`."""
    for name, tensor in (('seed', seed), ('branch', branch), ('tick', tick)):
        if tensor.dtype != torch.int64 or tensor.shape != out.shape[:1]:
            raise ContractError(
                f'noise {name} is {tensor.dtype} {list(tensor.shape)}; '
                f'it must be int64 [{out.shape[0] if out.ndim else 1}]')
    if out.dtype != torch.float32 or out.ndim < 2:
        raise ContractError(
            f'noise out is {out.dtype} {list(out.shape)}; it must be float32 [rows, ...]')
