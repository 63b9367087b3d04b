"""A small session without a model: buffers of several kinds, a boundary, and random contents."""
from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
import ctypes
from pathlib import Path
from typing import Any

import torch

from flashrt_core.capsule import Boundary
from flashrt_core.capsule import CapsuleStore
from flashrt_core.capsule import Identity
from flashrt_core.runtime import Backend
from flashrt_core.runtime import BufferSet
from flashrt_core.runtime import BufferSpec
from flashrt_core.runtime import Kind
from flashrt_core.runtime import Lane
from flashrt_core.runtime import Role

MIB = 1 << 20
PAGE = 1 << 16
TOKENS = 96
KV = ('kv.0', 'kv.1')

SPECS = (
    BufferSpec('seed', Role.STATE, torch.int64, (), kind=Kind.RNG),
    BufferSpec('branch', Role.STATE, torch.int64, (), kind=Kind.RNG),
    BufferSpec('tick', Role.STATE, torch.int64, (), kind=Kind.META),
    BufferSpec('recurrent', Role.STATE, torch.float32, (3, 5, 7), kind=Kind.RECURRENT),
    BufferSpec('queue', Role.STATE, torch.float32, (50, 7), kind=Kind.QUEUE),
    BufferSpec('kv.0', Role.STATE, torch.bfloat16, (TOKENS, 2, 4, 64), kind=Kind.KV),
    BufferSpec('kv.1', Role.STATE, torch.bfloat16, (TOKENS, 2, 4, 64), kind=Kind.KV),
    BufferSpec('scratch', Role.SCRATCH, torch.float32, (64,)),
)
IDENTITY = Identity({'config': 'small', 'weights': '0' * 64}, {'torch': '2.x', 'arch': 'test'})


class Session:
    """Buffers and a boundary; `length` and `tick` play the host's mirrors of device data."""

    def __init__(self, backend: Backend, rows: int = 1, *, specs: tuple[BufferSpec, ...] = SPECS,
                 identity: Identity = IDENTITY, name: str = '', lane: Lane | None = None) -> None:
        self.backend = backend
        self.buffers = BufferSet(backend, specs, rows)
        self.length = TOKENS
        self.tick = 0
        self.kv = [spec.name for spec in specs if spec.kind is Kind.KV]
        self.boundary = Boundary(
            self.buffers, identity, self._extent, lambda: self.tick, session=name, lane=lane)
        self.boundary.on_restore.append(self._restored)

    def _extent(self) -> Mapping[str, int]:
        return {name: self.length for name in self.kv}

    def _restored(self, source: Any, rows: tuple[int, ...]) -> None:
        self.tick = source.position
        self.length = next(iter(source.extents.values()), 0)

    def fill(self, seed: int) -> None:
        """Random bytes into every buffer, scratch included."""
        generator = torch.Generator().manual_seed(seed)
        for buffer in self.buffers:
            raw = torch.randint(0, 256, (buffer.nbytes,), dtype=torch.uint8, generator=generator)
            buffer.tensor.copy_(raw.view(buffer.dtype).reshape(buffer.tensor.shape))
        self.backend.synchronize()

    def step(self, seed: int) -> None:
        """One tick's worth of change: new contents, the counter moves on."""
        self.fill(seed)
        self.tick += 1

    def image(self, row: int = 0) -> dict[str, bytes]:
        """Bytes of each state buffer's valid part."""
        found = {}
        for buffer in self.buffers.state():
            tensor = buffer.row(row)
            if buffer.name in self.kv:
                tensor = tensor[:self.length]
            flat = tensor.contiguous().reshape(-1).view(torch.uint8).cpu()
            found[buffer.name] = flat.numpy().tobytes()
        return found


def small_store(backend: Backend, *, gpu: int = 4 * MIB, host: int = 4 * MIB,
                **options: Any) -> CapsuleStore:
    """A store of small pages."""
    return CapsuleStore(backend, gpu, host, page_bytes=PAGE, **options)


def disk_store(backend: Backend, path: Path, **options: Any) -> CapsuleStore:
    """A small store that may save to a directory."""
    defaults: dict = dict(disk_bytes=64 * MIB, directory=path, allow_disk=True)
    return small_store(backend, **{**defaults, **options})


def saved(session: Session, store: CapsuleStore, name: str) -> None:
    """Snapshot to disk and wait until the file is durable."""
    store.snapshot(session.boundary, name, tier='disk')
    store.saved(name).result(30)


def state_pages(session: Session) -> int:
    """Pages that one capsule of the session takes."""
    packing = session.boundary.packing(session.boundary.extents())
    return -(-packing.nbytes // PAGE)


def failing(after: int, error: BaseException) -> Callable[..., None]:
    """A mover that copies `after` ranges with memmove, then raises: a fault during submission."""
    def copy(copies: Any, stream: Any = None, meanwhile: Any = None) -> None:
        for source, target, size in copies.joined[:after]:
            ctypes.memmove(target, source, size)
        raise error
    return copy
