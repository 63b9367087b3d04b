"""A descriptor table in pinned and device memory, and the captured graph that uploads it."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from flashrt_core.errors import ContractError
from flashrt_core.errors import LaneTimeout
from flashrt_core.runtime.backend import Backend
from flashrt_core.runtime.backend import Event

SMALL = 64  # rows; a submission of at most so many uploads only these
TIMEOUT_S = 30.0


class DeviceTable:
    """
    Rows of int64 that one kernel reads; row 0 holds the count, the rows follow.

    ``capture`` makes two graphs per size class: upload of that many rows, then the kernel; and the
    kernel alone, for rows that are on the device from the submission before. ``replay`` picks one.
    On cpu only the host rows exist.
    """

    def __init__(self, backend: Backend, capacity: int, columns: int) -> None:
        if capacity < 1:
            raise ContractError(f'a table holds {capacity} rows; it needs at least 1')
        self._backend = backend
        self._capacity = capacity
        self._host = backend.empty((capacity + 1, columns), torch.int64, host=True).zero_()
        self._numpy = self._host.numpy()
        self._device = self._host
        self._event = backend.event()
        self._submitted = False
        self._uploaded = False
        self._stream: Any = None
        self._token: object = None
        self._graphs: list[tuple[int, Any, Any]] = []
        self.rows: np.ndarray = self._numpy[1:1]

    @property
    def event(self) -> Event:
        """The end of the last submission."""
        return self._event

    def fill(self, rows: np.ndarray, token: object = None) -> None:
        """
        Write the rows once the submission before no longer needs them.

        :param token: stands for these very rows; filled again under it, they cost nothing.
        """
        if token is not None and token is self._token:
            return
        if len(rows) > self._capacity:
            raise ContractError(
                f'{len(rows)} pieces do not fit a table of {self._capacity}; make it larger')
        if self._submitted and not self._event.wait(TIMEOUT_S):
            raise LaneTimeout(
                f'a copy or digest table is still in use after {TIMEOUT_S} s: the device is '
                'stuck; restart the process')
        self._submitted = self._uploaded = False
        self._token = token
        self._numpy[0, 0] = len(rows)
        self.rows = self._numpy[1:1 + len(rows)]
        self.rows[:] = rows

    def capture(self, launch: Callable[[torch.Tensor, bool], None],
                then: Callable[[], None] | None = None) -> None:
        """
        Capture upload, ``launch(device table, small)`` and ``then`` for each size class (cuda).

        ``small`` tells the class of few rows. The kernel runs on an empty table meanwhile. In
        configure.
        """
        self._device = self._backend.empty(self._host.shape, torch.int64).zero_()
        stream, pool = self._backend.stream(), self._backend.pool()
        self._numpy[0, 0] = 0
        for limit in sorted({min(SMALL, self._capacity), self._capacity}):
            def kernel(small: bool = limit <= SMALL) -> None:
                launch(self._device, small)
                if then is not None:
                    then()

            def both(rows: int = limit + 1, kernel: Callable[[], None] = kernel) -> None:
                self._device[:rows].copy_(self._host[:rows], non_blocking=True)
                kernel()
            capture = self._backend.capture
            self._graphs.append(
                (limit, capture(both, stream, pool), capture(kernel, stream, pool)))

    def replay(self, stream: Any) -> None:
        """Replay the smallest graph that holds the rows, in ``stream``."""
        both, kernel = next(g[1:] for g in self._graphs if len(self.rows) <= g[0])
        if self._uploaded and stream is not self._stream:
            self.wait()
        graph = kernel if self._uploaded else both
        self._uploaded = False  # until all of it is submitted
        if torch.cuda.current_stream(self._backend.device) == stream:
            graph.replay()
        else:
            with self._backend.use(stream):
                graph.replay()
        self._stream, self._uploaded = stream, True
        self.record(stream)

    def record(self, stream: Any) -> None:
        """Place the end of the submission behind the work now in ``stream``."""
        self._event.record(stream)
        self._submitted = True

    def wait(self) -> None:
        """Wait for the last submission; raises LaneTimeout."""
        if self._submitted and not self._event.wait(TIMEOUT_S):
            raise LaneTimeout(f'a digest did not finish within {TIMEOUT_S} s; restart')


class _Raw:
    """Device memory at an address, in the form that torch takes without a copy."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            'data': (address, False), 'shape': (nbytes,), 'typestr': '|u1', 'version': 3}


def raw_bytes(address: int, nbytes: int) -> torch.Tensor:
    """Return a uint8 view ``[nbytes]`` of device memory that the caller keeps alive."""
    return torch.as_tensor(_Raw(address, nbytes), device='cuda')
