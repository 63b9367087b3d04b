"""Parallel SHA-256 over large byte ranges, and the digest of a checkpoint's weights.

A range is cut into groups of 16 MiB; a group's digest is SHA-256 over the digests of its leaves of
1 MiB. Leaves are hashed where the bytes are read or written, so a page is touched while it is in
cache; hashlib releases the GIL, so threads scale.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
import contextlib
import functools
import hashlib
import json
import os
from pathlib import Path
import tempfile

import torch

LEAF_BYTES = 1 << 20
GROUP_BYTES = 16 << 20
DIGEST_BYTES = 32
CACHE_ENTRIES = 4096
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

    Hashed in parallel in pieces of 16 MiB; GPU tensors come over piece by piece, so host memory
    stays bounded. Equal weights give equal digests whatever device or file they came from.
    """
    state = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous()
        flat = tensor.reshape(-1).view(torch.uint8)
        pieces = (flat[at : at + GROUP_BYTES] for at in range(0, flat.numel(), GROUP_BYTES))
        state.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        for group in _in_order(pieces):
            state.update(group)
    return state.hexdigest()


def _in_order(pieces: Iterable[torch.Tensor]) -> Iterable[bytes]:
    pool, window = workers(), []
    for piece in pieces:
        window.append(pool.submit(_piece, piece.cpu()))
        if len(window) >= 2 * WORKERS:
            yield window.pop(0).result()
    for waiting in window:
        yield waiting.result()


def _piece(piece: torch.Tensor) -> bytes:
    return fold(leaves(piece.numpy().data))[0]


def file_digest(path: str | Path, cache: str | Path | None = None) -> str:
    """Digest of a file's bytes as hex, remembered by (path, size, mtime) in the user's cache.

    :param cache: the cache file; default ``$XDG_CACHE_HOME/flashrt/weights.json``. A cache that
        cannot be read or written only costs the time to hash again.
    """
    path = Path(path).resolve()
    cache = Path(cache) if cache is not None else cache_directory() / 'weights.json'
    stat = path.stat()
    key = f'{path}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_ino}'
    known = _load_cache(cache)
    if key in known:
        return known[key]
    found = _hash_file(path, stat.st_size)
    known = {k: v for k, v in known.items() if not k.startswith(f'{path}|')}
    kept = list(known.items())[-CACHE_ENTRIES + 1 :]
    _save_cache(cache, {**dict(kept), key: found})
    return found


def _hash_file(path: Path, size: int) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        starts = range(0, size, GROUP_BYTES)
        groups = workers().map(lambda at: fold(_read_leaves(fd, at, size))[0], starts)
        return _root(size, groups).hex()
    finally:
        os.close(fd)


def _read_leaves(fd: int, start: int, size: int) -> bytes:
    found = []
    for at in range(start, min(start + GROUP_BYTES, size), LEAF_BYTES):
        found.append(hashlib.sha256(os.pread(fd, LEAF_BYTES, at)).digest())
    return b''.join(found)


def cache_directory() -> Path:
    """Where digests of weight files are kept: ``$XDG_CACHE_HOME/flashrt`` or ``~/.cache``."""
    base = os.environ.get('XDG_CACHE_HOME')
    return (Path(base) if base else Path.home() / '.cache') / 'flashrt'


def _load_cache(cache: Path) -> dict[str, str]:
    try:
        known = json.loads(cache.read_text()) if cache.stat().st_size < 16 << 20 else {}
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(known, dict):
        return {}
    return {k: v for k, v in known.items() if isinstance(v, str) and len(v) == 64}


def _save_cache(cache: Path, known: Mapping[str, str]) -> None:
    with contextlib.suppress(OSError):
        cache.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd, temporary = tempfile.mkstemp(dir=cache.parent, prefix='.weights-')
        with os.fdopen(fd, 'w') as file:
            json.dump(known, file)
        os.replace(temporary, cache)
