"""Stages: the order in which a session's state arrives when its next plan already runs."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

from ..runtime import Backend
from ..runtime.fence import make_fence


class Stages:
    """What of a session's state arrives when, and the fences that its captured bodies wait at.

    Made at bind, before the captures; one restore at a time. A body calls ``wait`` before it
    touches a stage's buffers, and for the last stage before it ends, so that the end of its plan
    is also the arrival of all state. Where no restore is under way a wait is passed at once.

    :param names: state buffers by stage. The first holds what the host reads before the plan.
    """

    def __init__(self, backend: Backend, names: Iterable[Sequence[str]]) -> None:
        self.names = tuple(tuple(stage) for stage in names)
        self.stream = backend.stream(0)
        self.begun, self.first, self.ended = (backend.event() for _ in range(3))
        self._fences = [make_fence(backend, self.stream) for _ in self.names]
        self._cuda = backend.name == 'cuda'

    def __len__(self) -> int:
        return len(self.names)

    def wait(self, stage: int) -> None:
        """Hold the current stream, or a graph captured from it, up until the stage is there."""
        self._fences[stage].wait()

    def submit(self, copy: Callable[[int, Any], None], after: Any) -> None:
        """Have every stage copied in order, behind what the stream ``after`` does; waits not.

        :param copy: submits the copies of a stage to a stream.
        """
        if self._cuda:
            self.stream.wait_stream(after)  # it may still read what is written over
        self.begun.record(self.stream)
        for stage, fence in enumerate(self._fences):
            copy(stage, self.stream)
            fence.record(self.stream)
            if stage == 0:
                self.first.record(self.stream)
        self.ended.record(self.stream)
