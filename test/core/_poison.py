"""
Find every tensor that a session can reach, and overwrite all but its constants.

A capsule is complete only if a tick after ``poison`` and a restore equals the tick before: what
the boundary does not list, the poison has destroyed. The search walks the object graph, not the
boundary's list: attributes, containers, closures, modules' buffers, the lane thread's frames, the
memory segments of the lane's graph pool.
"""
from __future__ import annotations

from collections.abc import Iterable
import ctypes
from dataclasses import dataclass
from dataclasses import field
import gc
import hashlib
import logging
import sys
import types
from typing import Any

import torch

from flashrt_core.kernels._table import raw_bytes
from flashrt_core.runtime import BufferSet
from flashrt_core.runtime import Lane
from flashrt_core.runtime import Role

PACKAGE = 'flashrt_core'
NAN_BYTE = 0xFF  # every float type reads NaN, int64 reads -1


@dataclass(frozen=True)
class Memory:
    """One piece of memory: a tensor's whole storage, or a segment of a graph pool."""

    address: int
    nbytes: int
    device: str
    owner: Any = field(repr=False, compare=False, default=None)

    def view(self) -> torch.Tensor:
        """Return its bytes, uint8 ``[nbytes]``."""
        if self.device == 'cuda':
            return raw_bytes(self.address, self.nbytes)
        kind = ctypes.c_uint8 * self.nbytes
        return torch.frombuffer(kind.from_address(self.address), dtype=torch.uint8)

    def digest(self) -> str:
        """Return the SHA-256 of its bytes."""
        return hashlib.sha256(self.view().cpu().numpy().tobytes()).hexdigest()


@dataclass
class Reach:
    """What a session reaches: ``writable`` is fair game, ``constants`` must never change."""

    writable: list[Memory]
    constants: list[Memory]
    objects: list[Any] = field(repr=False)


@dataclass
class Poisoned:
    """What was overwritten, and the digests of what was not."""

    memory: list[Memory]
    constants: dict[Memory, str] = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes overwritten."""
        return sum(memory.nbytes for memory in self.memory)

    def covers(self, tensor: torch.Tensor) -> bool:
        """Return whether the memory of ``tensor`` was overwritten."""
        at = tensor.data_ptr()
        return any(m.address <= at < m.address + m.nbytes for m in self.memory)

    def check_constants(self) -> None:
        """Assert that no constant changed since."""
        changed = [memory for memory, digest in self.constants.items()
                   if memory.digest() != digest]
        assert not changed, f'constants changed: {changed}'


def reachable_tensors(session: Any, keep: Iterable[Any] = ()) -> list[torch.Tensor]:
    """Return every tensor that ``session`` reaches, without entering the objects in ``keep``."""
    return [o for o in walk([session], keep) if isinstance(o, torch.Tensor)]


def reach(session: Any, keep: Iterable[Any] = ()) -> Reach:
    """
    Sort all memory of ``session`` into writable and constant.

    Constant are: buffers of role CONSTANT, tensors held only by module globals of the package,
    and memory that the process may not write. ``keep`` is not entered (a store with its capsules).
    """
    keep = list(keep)
    own = walk([session], keep)
    frames = [value for lane in own if isinstance(lane, Lane) for value in _frame_values(lane)]
    own = walk([session, *frames], keep)
    shared = walk([vars(module) for module in list(sys.modules.values())
                   if _is_package(getattr(module, '__name__', ''))], [*keep, *own])
    fixed = [b.tensor for s in own if isinstance(s, BufferSet) for b in s.by_role(Role.CONSTANT)]
    fixed += [o for o in shared if isinstance(o, torch.Tensor)]
    constants = _memory_of(fixed)
    known = {memory.address for memory in constants}
    writable = []
    for memory in _memory_of(o for o in own if isinstance(o, torch.Tensor)):
        if memory.address in known:
            continue
        (writable if _may_write(memory) else constants).append(memory)
    for lane in own:
        if isinstance(lane, Lane) and lane.backend.name == 'cuda':
            writable += _pool_memory(lane)
    return Reach(writable, constants, own)


def poison(session: Any, keep: Iterable[Any] = (), byte: int = NAN_BYTE) -> Poisoned:
    """
    Overwrite all that ``session`` reaches except constants; call it while the lane is idle.

    :param keep: objects not to enter, such as the capsule store.
    """
    found = reach(session, keep)
    result = Poisoned(found.writable, {m: m.digest() for m in found.constants})
    for memory in found.writable:
        if memory.device == 'cuda':
            memory.view().fill_(byte)
        else:
            ctypes.memset(memory.address, byte, memory.nbytes)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result


def walk(roots: Iterable[Any], keep: Iterable[Any] = ()) -> list[Any]:
    """
    Return every object reachable from ``roots``, those in ``keep`` and beyond left out.

    Module dictionaries, modules, loggers and classes outside the package are not entered: through
    them everything in the process is reachable.
    """
    globals_of = {id(vars(module)) for module in list(sys.modules.values())
                  if isinstance(module, types.ModuleType)}
    roots = list(roots)
    seen = {id(o): o for o in keep}
    kept = len(seen)
    todo = [o for o in roots if id(o) not in seen]
    entered = {id(o) for o in roots}
    while todo:
        item = todo.pop()
        if id(item) in seen or (id(item) in globals_of and id(item) not in entered):
            continue
        if isinstance(item, (types.ModuleType, logging.Logger, types.FrameType)):
            continue
        if isinstance(item, type) and not _is_package(item.__module__):
            continue
        seen[id(item)] = item
        if isinstance(item, torch.Tensor):
            todo += [t for t in (item._base, item.grad if item.is_leaf else None)
                     if t is not None]
        todo += gc.get_referents(item)
    return list(seen.values())[kept:]


def _is_package(name: str) -> bool:
    return name == PACKAGE or name.startswith(PACKAGE + '.')


def _frame_values(lane: Lane) -> list[Any]:
    """Return what the lane thread's frames hold now."""
    values: list[Any] = []
    frame = sys._current_frames().get(lane._thread.ident or 0)
    while frame is not None:
        values += list(frame.f_locals.values())
        frame = frame.f_back
    return values


def _memory_of(tensors: Iterable[torch.Tensor]) -> list[Memory]:
    found: dict[int, Memory] = {}
    for tensor in tensors:
        if tensor.layout is not torch.strided or tensor.device.type not in ('cpu', 'cuda'):
            continue
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found[storage.data_ptr()] = Memory(
                storage.data_ptr(), storage.nbytes(), tensor.device.type, tensor)
    return list(found.values())


def _pool_memory(lane: Lane) -> list[Memory]:
    """Return the segments of the lane's graph pool: what captured bodies use as temporaries."""
    return [Memory(segment['address'], segment['total_size'], 'cuda')
            for segment in torch.cuda.memory_snapshot()
            if tuple(segment['segment_pool_id']) == tuple(lane.pool)]


def _may_write(memory: Memory) -> bool:
    """Return whether the process may write there; a mapped checkpoint is read-only."""
    if memory.device == 'cuda':
        return True
    try:
        with open('/proc/self/maps', encoding='ascii', errors='replace') as lines:
            for line in lines:
                span, mode = line.split()[:2]
                begin, end = (int(part, 16) for part in span.split('-'))
                if begin <= memory.address < end:
                    return 'w' in mode
    except OSError:
        return True
    return False
