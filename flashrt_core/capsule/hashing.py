"""Parallel SHA-256 over large byte ranges, and the digest of a checkpoint's weights.

A range is cut into groups of 16 MiB; a group's digest is SHA-256 over the digests of its leaves of
1 MiB. Leaves are hashed where the bytes are read or written, so a page is touched while it is in
cache; hashlib releases the GIL, so threads scale.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
import functools
import hashlib
import json
import os

import torch

LEAF_BYTES = 1 << 20
GROUP_BYTES = 16 << 20
DIGEST_BYTES = 32
WORKERS = min(16, max(2, os.cpu_count() or 2))


@functools.cache
def workers() -> ThreadPoolExecutor:
    """The process-wide pool for hashing and file pieces; made once, used by all stores."""
    return ThreadPoolExecutor(WORKERS, 'capsule-io')


# A forked child inherits the pool without its threads and would wait for them for ever.
os.register_at_fork(after_in_child=workers.cache_clear)


def leaves(data: memoryview) -> bytes:
    """Digests of each 1 MiB leaf of `data`, one after the other."""
    return b''.join(
        hashlib.sha256(data[at : at + LEAF_BYTES]).digest()
        for at in range(0, len(data), LEAF_BYTES)
    )


def fold(leaf_digests: bytes) -> list[bytes]:
    """Group digests from leaf digests that start at a group's first leaf."""
    step = GROUP_BYTES // LEAF_BYTES * DIGEST_BYTES
    return [
        hashlib.sha256(leaf_digests[at : at + step]).digest()
        for at in range(0, len(leaf_digests), step)
    ]


def groups_of(size: int) -> int:
    """Number of group digests of `size` bytes."""
    return -(-size // GROUP_BYTES)


def digest(data: memoryview) -> bytes:
    """One digest of a byte range: SHA-256 over its length and its group digests."""
    pieces = [data[at : at + GROUP_BYTES] for at in range(0, len(data), GROUP_BYTES)]
    found = workers().map(leaves, pieces) if len(pieces) > 1 else map(leaves, pieces)
    return _root(len(data), [group for piece in found for group in fold(piece)])


def _root(size: int, groups: Iterable[bytes]) -> bytes:
    state = hashlib.sha256(size.to_bytes(8, 'little'))
    for group in groups:
        state.update(group)
    return state.digest()


def weights_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Digest of named weights: names, dtypes, shapes and bytes, in name order, as hex.

    Read out and hashed in parallel in pieces of 16 MiB, so host memory stays bounded. Equal
    weights give equal digests whatever device or file they came from.
    """
    state = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous()
        flat = tensor.reshape(-1).view(torch.uint8)
        if tensor.is_cuda:  # the pool's threads read on another stream than this one writes
            torch.cuda.current_stream(tensor.device).synchronize()
        pieces = (flat[at : at + GROUP_BYTES] for at in range(0, flat.numel(), GROUP_BYTES))
        state.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        for group in _in_order(pieces):
            state.update(group)
    return state.hexdigest()


def _in_order(pieces: Iterable[torch.Tensor]) -> Iterable[bytes]:
    pool, window = workers(), []
    for piece in pieces:
        window.append(pool.submit(_piece, piece))
        if len(window) >= 2 * WORKERS:
            yield window.pop(0).result()
    for waiting in window:
        yield waiting.result()


def _piece(piece: torch.Tensor) -> bytes:
    return fold(leaves(piece.cpu().numpy().data))[0]
