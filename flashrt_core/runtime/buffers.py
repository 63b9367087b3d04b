"""Buffers: named memory with one address for life, and the set that one session owns."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
import math
import operator
from typing import TYPE_CHECKING

import torch

from flashrt_core.errors import AddressChanged
from flashrt_core.errors import ConfigError

if TYPE_CHECKING:
    from flashrt_core.runtime.backend import Backend

ALIGN = 256  # bytes; the alignment of the CUDA allocator and of every slot of the state arena


class Role(StrEnum):
    """What a buffer is for; decides who may write it and whether a capsule carries it."""

    INPUT = 'input'
    OUTPUT = 'output'
    STATE = 'state'
    SCRATCH = 'scratch'
    CONSTANT = 'constant'


class Kind(StrEnum):
    """What a STATE buffer holds; KV buffers have a valid extent in tokens."""

    KV = 'kv'
    RECURRENT = 'recurrent'
    CONV = 'conv'
    MTP = 'mtp'
    RNG = 'rng'
    QUEUE = 'queue'
    SUBGOAL = 'subgoal'
    META = 'meta'


@dataclass(frozen=True)
class BufferSpec:
    """
    The declaration of one buffer.

    ``shape`` is written without the row axis; with ``rows`` the tensor is ``[rows, *shape]``, one
    row per branch. ``host`` asks for host memory, pinned where the backend is CUDA. A KV buffer
    has the shape ``[tokens, 2, heads, dim]`` so that the valid extent is one contiguous range.

    :raises ConfigError: a STATE buffer without a kind, a kind on another role, a bad shape.
    """

    name: str
    role: Role
    dtype: torch.dtype
    shape: tuple[int, ...]
    kind: Kind | None = None
    host: bool = False
    rows: bool = True

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, 'role', Role(self.role))
            object.__setattr__(self, 'shape', tuple(map(operator.index, self.shape)))
            if self.kind is not None:
                object.__setattr__(self, 'kind', Kind(self.kind))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f'buffer {self.name!r} has role {self.role!r}, kind {self.kind!r}, shape '
                f'{self.shape!r}: {error}; give a Role, a Kind and whole numbers') from None
        if not self.name:
            raise ConfigError(f'a buffer spec has the name {self.name!r}; give it a name')
        if (self.role is Role.STATE) != (self.kind is not None):
            raise ConfigError(
                f'buffer {self.name!r} has role {self.role.value!r} and kind {self.kind}; '
                'a state buffer needs a kind and no other role has one')
        if any(size < 1 for size in self.shape):
            raise ConfigError(
                f'buffer {self.name!r} has the shape {self.shape}; every size must be 1 or more')
        if self.kind is Kind.KV and len(self.shape) != 4:
            raise ConfigError(
                f'KV buffer {self.name!r} has the shape {self.shape}; '
                'use [tokens, 2, heads, dim]')

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row (of the whole buffer where it has no row axis)."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def in_arena(self) -> bool:
        """Whether the buffer is small per-row state, which lies in the set's arena."""
        return (self.role is Role.STATE and self.kind is not Kind.KV
                and self.rows and not self.host)


class Buffer:
    """
    One tensor that never moves: captured graphs hold its address.

    Reading and writing ``tensor`` in place is the owner's business (on the lane thread once the
    lane runs); the tensor object itself cannot be replaced.
    """

    __slots__ = ('__weakref__', '_address', '_layout', '_spec', '_tensor')

    def __init__(self, spec: BufferSpec, tensor: torch.Tensor) -> None:
        self._spec = spec
        self._tensor = tensor
        self._address = tensor.data_ptr()
        self._layout = (tensor.dtype, tuple(tensor.shape), tensor.stride())

    @property
    def spec(self) -> BufferSpec:
        """Return the declaration it was made from."""
        return self._spec

    @property
    def name(self) -> str:
        """Return its name, unique in the set."""
        return self._spec.name

    @property
    def role(self) -> Role:
        """Return its role."""
        return self._spec.role

    @property
    def kind(self) -> Kind | None:
        """Return the kind of a STATE buffer, None for other roles."""
        return self._spec.kind

    @property
    def dtype(self) -> torch.dtype:
        """Return its element type."""
        return self._layout[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the tensor's shape, with the row axis where there is one."""
        return self._layout[1]

    @property
    def host(self) -> bool:
        """Return whether it lies in host memory."""
        return self._spec.host

    @property
    def tensor(self) -> torch.Tensor:
        """Return the tensor; a strided view ``[rows, *shape]`` for small state."""
        return self._tensor

    @property
    def nbytes(self) -> int:
        """Return the bytes of its elements, without gaps between the rows of small state."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def address(self) -> int:
        """Return the address it was made at."""
        return self._address

    def row(self, index: int) -> torch.Tensor:
        """
        Return row ``index``, one contiguous tensor of the spec's shape.

        :raises ConfigError: no such row, or a buffer without a row axis.
        """
        if not self._spec.rows or not 0 <= index < self.shape[0]:
            rows = self.shape[0] if self._spec.rows else 'no'
            raise ConfigError(
                f'row {index} of buffer {self.name!r} does not exist; it has {rows} rows')
        return self._tensor[index]

    def check_address(self) -> None:
        """
        Verify that the tensor still lies where it was made.

        :raises AddressChanged: its storage, type, shape or strides were exchanged.
        """
        now = (self._tensor.dtype, tuple(self._tensor.shape), self._tensor.stride())
        if self._tensor.data_ptr() != self._address or now != self._layout:
            raise AddressChanged(
                f'buffer {self.name!r} was made at {self._address:#x} as {self._layout} and is '
                f'now at {self._tensor.data_ptr():#x} as {now}; write into the tensor in place '
                'instead of exchanging its storage')

    def __repr__(self) -> str:
        return f'Buffer({self.name!r}, {self.role.value}, {self.dtype}, {list(self.shape)})'


class BufferSet:
    """
    All buffers of one session, allocated once and zeroed.

    Small state (STATE, not KV, per row) lies in one uint8 arena ``[rows, row_bytes]`` of 256-byte
    aligned slots, so that a row's small state is one contiguous range; those buffers are strided
    views into it. KV and every other buffer stand alone. Made in configure, on any thread.

    :param backend: where the buffers live.
    :param specs: the declarations, in the order that a boundary will list them.
    :param rows: number of branches.
    :param name: names the owner in out-of-memory messages.
    :raises ConfigError: two buffers of one name, or no rows.
    :raises OutOfMemory: the message says asked, free and who holds the rest.
    """

    def __init__(self, backend: Backend, specs: Iterable[BufferSpec], rows: int = 1,
                 name: str = 'session') -> None:
        self.backend = backend
        self.name = name
        self.rows = rows
        ordered = list(specs)
        if rows < 1:
            raise ConfigError(f'buffer set {name!r} has {rows} rows; it needs at least 1')
        repeated = [n for n, uses in Counter(spec.name for spec in ordered).items() if uses > 1]
        if repeated:
            raise ConfigError(f'buffer set {name!r} names {repeated} more than once')
        self._slots: dict[str, int] = {}
        row_bytes = 0
        for spec in ordered:
            if spec.in_arena:
                self._slots[spec.name] = row_bytes
                row_bytes += _aligned(spec.row_nbytes)
        for host in (False, True):
            backend.reserve(_total_bytes(ordered, rows, host), name, host=host)
        self._arena = backend.empty((rows, row_bytes), torch.uint8).zero_()
        self._buffers = {spec.name: Buffer(spec, self._allocate(spec)) for spec in ordered}
        backend.register(self)

    def _allocate(self, spec: BufferSpec) -> torch.Tensor:
        if not spec.in_arena:
            shape = (self.rows, *spec.shape) if spec.rows else spec.shape
            return self.backend.empty(shape, spec.dtype, host=spec.host).zero_()
        start = self._slots[spec.name]
        flat = self._arena[:, start:start + spec.row_nbytes].view(spec.dtype)  # [rows, elements]
        return flat.squeeze(1) if not spec.shape else flat.unflatten(1, spec.shape)

    def __getitem__(self, name: str) -> Buffer:
        """Return the buffer called ``name``."""
        if name not in self._buffers:
            raise ConfigError(
                f'buffer set {self.name!r} has no buffer {name!r}; it has {list(self._buffers)}')
        return self._buffers[name]

    def __contains__(self, name: object) -> bool:
        return name in self._buffers

    def __iter__(self) -> Iterator[Buffer]:
        return iter(self._buffers.values())

    def __len__(self) -> int:
        return len(self._buffers)

    def by_role(self, role: Role) -> list[Buffer]:
        """Return the buffers of one role, in declared order."""
        return [buffer for buffer in self if buffer.role is role]

    def state(self) -> list[Buffer]:
        """Return the STATE buffers, in declared order."""
        return self.by_role(Role.STATE)

    @property
    def arena(self) -> torch.Tensor:
        """Return the small state of all rows, uint8 ``[rows, row_bytes]``."""
        return self._arena

    def slot(self, name: str) -> tuple[int, int]:
        """
        Return (offset, bytes) of a small state buffer inside each row of the arena.

        :raises ConfigError: the buffer is not small state.
        """
        if name not in self._slots:
            raise ConfigError(
                f'buffer {name!r} is not small state of {self.name!r}; that is: '
                f'{list(self._slots)}')
        return self._slots[name], self._buffers[name].spec.row_nbytes

    @property
    def nbytes(self) -> int:
        """Return the bytes allocated for the set, device and host together."""
        alone = sum(b.nbytes for b in self if not b.spec.in_arena)
        return alone + self._arena.numel()

    def addresses(self) -> dict[str, int]:
        """Return the present address of every buffer."""
        return {buffer.name: buffer.tensor.data_ptr() for buffer in self}

    def check_addresses(self) -> None:
        """
        Verify that no buffer moved since the set was made.

        :raises AddressChanged: naming the first buffer that did.
        """
        for buffer in self:
            buffer.check_address()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def _total_bytes(specs: list[BufferSpec], rows: int, host: bool) -> int:
    return sum(_aligned(spec.row_nbytes) * (rows if spec.rows else 1)
               for spec in specs if spec.host is host)
