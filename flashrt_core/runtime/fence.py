"""Fences: what a captured body waits for that another stream does, anew at each replay."""
from __future__ import annotations

from typing import Any
from typing import Protocol

import torch

from flashrt_core.runtime.backend import Backend


class Fence(Protocol):
    """A point in another stream's work; ``wait`` in a body holds each replay up until it is done.

    A replay waits for what was recorded last before its launch, for nothing where that is done.
    """

    def record(self, stream: Any) -> None:
        """Place it behind the work now in ``stream``."""

    def wait(self) -> None:
        """Have the current stream, or the graph captured from it, wait for it."""


class CudaFence:
    """An external event: a captured wait is a node of the graph (cudaEventWaitExternal)."""

    def __init__(self, stream: Any) -> None:
        self._event = torch.cuda.Event(external=True)
        self.record(stream)  # it exists from its first record on

    def record(self, stream: Any) -> None:
        """As ``Fence``."""
        self._event.record(stream)

    def wait(self) -> None:
        """As ``Fence``."""
        self._event.wait()


class CpuFence:
    """Of the cpu backend: what is submitted is done."""

    def record(self, stream: Any) -> None:
        """Do nothing."""

    def wait(self) -> None:
        """Do nothing."""


def make_fence(backend: Backend, stream: Any) -> Fence:
    """Return a fence that is passed already; ``stream`` of the backend is any that lives."""
    return CudaFence(stream) if backend.name == 'cuda' else CpuFence()
