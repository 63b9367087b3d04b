"""What the tests of public faults share: planted bugs and what must notice them."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from _planner import DRAWN
import pytest
import torch

from flashrt_core.capsule import Boundary
from flashrt_core.capsule import CapsuleStore
from flashrt_core.errors import FlashrtError
from flashrt_core.planners import Options
from flashrt_core.planners.memory import Verify
from flashrt_core.planners.session import PlannerSession

FORGOTTEN = ('recurrent.0', 'conv.0')


@contextmanager
def noticed(bug: str) -> Iterator[None]:
    """Expect the checks within to fail exactly where a bug is planted."""
    if not bug:
        yield
        return
    with pytest.raises((AssertionError, FlashrtError, pytest.fail.Exception)):
        yield


def needs_eager(session: PlannerSession, bug: str) -> None:
    if bug and session.lane.backend.name != 'cpu':
        pytest.skip('a captured graph does not see what is patched later')


def drafting(K: int, options: Options = DRAWN) -> Options:
    return Options(**{**vars(options), 'draft_tokens': K})


def boundary_without(session: PlannerSession, bug: str) -> Boundary:
    """The session's boundary, or one that forgets the buffer ``bug``."""
    return session.boundary._without_for_tests(bug) if bug else session.boundary


def spoil(session: PlannerSession) -> None:
    """Leave another state behind, in every buffer."""
    def write() -> None:
        for buffer in session.buffers.state():
            buffer.tensor.fill_(1)
        session.boundary.note_kv_rewrite(0)
    session.lane.call(write).result(20)


def mark(session: PlannerSession, store: CapsuleStore) -> Any:
    return session.lane.at_boundary(lambda: store.mark(session.boundary)).result(20)


def chunks_replayed(session: PlannerSession, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the key of every prefill chunk that runs from now on."""
    seen: list[Any] = []
    graph = next(p for k, p in session._plans.items() if k[0] == 'chunk').segments[0].graph
    real = graph.replay
    monkeypatch.setattr(graph, 'replay', lambda key, lane: (seen.append(key), real(key, lane)))
    return seen


def accept_everything(patched: pytest.MonkeyPatch) -> None:
    real = Verify.accept
    patched.setattr(Verify, 'accept', lambda self, c, b, count: real(
        self, c, b, torch.full_like(count, len(next(iter(self.held.values()))[0]))))


def accept_nothing(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(Verify, 'accept', lambda self, c, b, count: None)
