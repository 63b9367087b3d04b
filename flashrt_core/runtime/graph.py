"""Graphs: a body over bound buffers, captured once per ShapeKey and replayed ever after."""
from __future__ import annotations

from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Iterable
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from flashrt_core.errors import CaptureFailed
from flashrt_core.errors import ConfigError
from flashrt_core.errors import ContractError
from flashrt_core.errors import MissingKey
from flashrt_core.errors import UnboundPort
from flashrt_core.runtime.backend import Captured
from flashrt_core.runtime.buffers import Buffer

if TYPE_CHECKING:
    from flashrt_core.runtime.lane import Lane

ShapeKey = tuple[Hashable, ...]
Body = Callable[[Mapping[str, torch.Tensor], ShapeKey], None]


class Graph:
    """
    A body with named ports and its captured variants, one per ShapeKey.

    ``body(ports, key)`` reads and writes the bound tensors in place. It must take every size that
    decides its shapes from ``key``, every other value from device data, and keep no tensor that it
    allocates: memory made during a capture is reused by the next graph of the lane. Bind and
    capture in configure; replay on the lane thread.

    :param ports: the names that the body reads from its ``ports`` mapping.
    :raises ConfigError: a port named twice.
    """

    def __init__(self, name: str, body: Body, ports: Iterable[str]) -> None:
        self.name = name
        self._body = body
        self.ports = tuple(ports)
        if len(set(self.ports)) != len(self.ports):
            raise ConfigError(f'graph {name!r} names a port twice: {self.ports}')
        self._bound: dict[str, Buffer] = {}
        self._variants: dict[ShapeKey, Captured] = {}
        self._lane: Lane | None = None

    def bind(self, port: str, buffer: Buffer) -> None:
        """
        Bind ``port`` to ``buffer``; a port keeps the dtype and shape it was first bound with.

        :raises ContractError: an unknown port, another dtype or shape, or a captured graph.
        """
        if port not in self.ports:
            raise ContractError(
                f'graph {self.name!r} has no port {port!r}; it has {list(self.ports)}')
        if self._variants:
            raise ContractError(
                f'port {port!r} of graph {self.name!r} cannot be bound to {buffer.name!r}: '
                f'variants {self.keys} hold the old address; bind before capture')
        old = self._bound.get(port)
        if old is not None and (old.dtype, old.shape) != (buffer.dtype, buffer.shape):
            raise ContractError(
                f'port {port!r} of graph {self.name!r} holds {old!r}; {buffer!r} differs in '
                'dtype or shape')
        self._bound[port] = buffer

    def bind_all(self, buffers: Mapping[str, Buffer]) -> None:
        """Bind several ports, see :meth:`bind`."""
        for port, buffer in buffers.items():
            self.bind(port, buffer)

    @property
    def bound(self) -> Mapping[str, Buffer]:
        """Return the buffers bound so far, by port."""
        return MappingProxyType(self._bound)

    @property
    def keys(self) -> tuple[ShapeKey, ...]:
        """Return the keys it holds a captured variant for."""
        return tuple(self._variants)

    def capture(self, key: ShapeKey, lane: Lane) -> None:
        """
        Capture the variant for ``key``; waits for the lane if called from another thread.

        The body runs first (twice on cuda, once on cpu), so what it writes is garbage afterwards:
        write initial state after the last capture. A key held already is left as it is.

        :raises UnboundPort: naming the ports without a buffer.
        :raises CaptureFailed: the lane is sealed, or the body failed.
        :raises ContractError: other variants live on another lane.
        """
        self._check_ports()
        if lane.sealed:
            raise CaptureFailed(
                f'graph {self.name!r} cannot capture key {key!r}: lane {lane.name!r} is sealed; '
                'capture in configure, before the first tick')
        if self._lane not in (None, lane):
            raise ContractError(
                f'graph {self.name!r} was captured on lane {self._lane.name!r} and cannot be '
                f'captured on {lane.name!r}; make one graph per session')
        if key in self._variants:
            return
        if not lane.on_thread:
            lane.call(lambda: self.capture(key, lane)).result()
            return
        for buffer in self._bound.values():
            buffer.check_address()
        tensors = MappingProxyType({port: b.tensor for port, b in self._bound.items()})
        try:
            variant = lane.backend.capture(
                lambda: self._body(tensors, key), lane.capture_stream, lane.pool)
        except CaptureFailed as error:
            lane.pool = lane.backend.pool()  # torch leaves the pool of a failed capture open
            raise CaptureFailed(f'graph {self.name!r}, key {key!r}: {error}') from error
        self._variants[key] = variant
        self._lane = lane

    def check(self, key: ShapeKey) -> None:
        """
        Verify that the variant for ``key`` can be replayed.

        :raises UnboundPort: naming the ports without a buffer.
        :raises MissingKey: naming the keys held.
        """
        self._check_ports()
        if key not in self._variants:
            raise MissingKey(
                f'graph {self.name!r} holds no variant for key {key!r}; it holds '
                f'{list(self._variants)}; capture it in configure')

    def replay(self, key: ShapeKey, lane: Lane) -> None:
        """
        Launch the variant for ``key`` on the lane's stream; on the lane thread only.

        :raises MissingKey: naming the keys held.
        :raises ContractError: called off the lane thread, or with another lane.
        """
        variant = self._variants.get(key)
        if variant is None:
            self.check(key)
        if self._lane is not lane or not lane.on_thread:
            raise ContractError(
                f'graph {self.name!r} replays on the thread of the lane it was captured on, not '
                f'of {lane.name!r} from here; use lane.run or lane.call')
        assert variant is not None
        variant.replay()

    def _check_ports(self) -> None:
        unbound = [port for port in self.ports if port not in self._bound]
        if unbound:
            raise UnboundPort(
                f'graph {self.name!r} has no buffer at {unbound}; bind them before capture')

    def __repr__(self) -> str:
        return f'Graph({self.name!r}, ports={list(self.ports)}, keys={list(self._variants)})'
