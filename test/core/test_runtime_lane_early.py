"""The lane launches a segment shortly before the one before ends, and what that does to verbs."""
from __future__ import annotations

import threading

from _contract import Counter
import pytest

from flashrt_core.errors import TickDropped
from flashrt_core.runtime import Lane
from flashrt_core.runtime import Segment
from flashrt_core.runtime.cpu import CpuBackend
from flashrt_core.runtime.cpu import CpuEvent

WAIT_S = 20.0
SEGMENT_US = 5000.0  # what each of them is said to take
LIMIT_S = 5.0        # of one segment: a wait so long finds it ended


class Told(CpuEvent):
    """An event whose segment still runs at every look but the one for its end, which is told."""

    def __init__(self, ended: list[str]) -> None:
        super().__init__()
        self._ended = ended

    def wait(self, timeout_s: float, expected_s: float = 0.0) -> bool:
        if timeout_s < LIMIT_S:
            return False
        self._ended.append('ended')
        return True

    def elapsed_us(self, later: object) -> float:
        return SEGMENT_US


class SlowBackend(CpuBackend):
    """A CPU backend whose segments seem to take a while."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def event(self) -> Told:
        return Told(self.told)


@pytest.fixture
def backend():
    return SlowBackend()


@pytest.fixture
def lane(backend):
    with Lane(backend, 'slow', timeout_s=LIMIT_S) as lane:
        yield lane


@pytest.fixture
def counter(backend, lane):
    """Give a counter of which every segment's length is known; its launches are told."""
    made = Counter(backend, lane)
    made.tick(step=0).result(WAIT_S)
    for index, graph in enumerate(made.graphs):
        graph.replay = told(backend, graph.replay, f'launch {index}')
    backend.told.clear()
    return made


def told(backend, replay, what):
    def run(key, lane):
        backend.told.append(what)
        replay(key, lane)
    return run


def started(counter, index):
    """Start a tick and return (its future, the gate that its segment ``index`` waits at)."""
    gate = counter.hold(index)
    future = counter.tick()
    assert counter.entered[index].wait(WAIT_S)
    return future, gate


def test_each_segment_is_launched_before_the_one_before_has_ended(backend, counter):
    assert counter.tick(step=3).result(WAIT_S).value == 6
    assert backend.told == ['launch 0', 'launch 1', 'ended', 'launch 2', 'ended', 'ended']


def test_a_segment_of_unknown_length_ends_before_the_next_is_launched(backend, lane):
    counter = Counter(backend, lane)
    for index, graph in enumerate(counter.graphs):
        graph.replay = told(backend, graph.replay, f'launch {index}')
    counter.tick().result(WAIT_S)
    assert backend.told == ['launch 0', 'ended', 'launch 1', 'ended', 'launch 2', 'ended']


def test_a_verb_that_came_before_leaves_the_next_segment_out(counter, lane):
    future, gate = started(counter, 0)
    verb = lane.at_segment_end(lambda: counter.count)
    gate.set()
    with pytest.raises(TickDropped, match='after 1 of 3 segments'):
        future.result(WAIT_S)
    assert verb.result(WAIT_S) == 0


def test_a_verb_that_comes_after_waits_for_the_segment_launched_early_and_no_other(
        backend, counter, lane):
    future, gate = started(counter, 1)
    verb = lane.at_segment_end(lambda: counter.count)
    gate.set()
    with pytest.raises(TickDropped, match='after 2 of 3 segments'):
        future.result(WAIT_S)
    assert verb.result(WAIT_S) == 0 and lane.committed
    assert backend.told == ['launch 0', 'launch 1', 'ended', 'ended']


def test_a_tick_whose_last_segment_was_launched_early_completes(counter, lane):
    future, gate = started(counter, 2)
    verb = lane.at_segment_end(lambda: counter.count)
    assert not lane.committed
    gate.set()
    assert future.result(WAIT_S).value == 2
    assert verb.result(WAIT_S) == 2


def test_a_last_segment_that_fails_when_launched_early_leaves_no_boundary(counter, lane):
    counter.failing = {2}
    with pytest.raises(ValueError):
        counter.tick().result(WAIT_S)
    assert not lane.committed


def test_a_middle_segment_that_fails_when_launched_early_leaves_the_boundary(counter, lane):
    counter.failing = {1}
    with pytest.raises(ValueError):
        counter.tick().result(WAIT_S)
    assert lane.committed


def test_a_lane_with_a_gate_launches_nothing_early(backend, counter, lane):
    class Gate:
        def admit(self, segment: Segment) -> None:
            backend.told.append('admit')

        def done(self, segment: Segment) -> None:
            pass

    lane.gate = Gate()
    counter.tick().result(WAIT_S)
    lane.gate = None
    assert backend.told == [word for index in range(3)
                            for word in ('admit', f'launch {index}', 'ended')]


def test_a_cancel_between_two_segments_is_seen_before_the_next_is_launched(counter, lane):
    future, gate = started(counter, 0)
    cancelled = threading.Event()
    future.add_done_callback(lambda _: cancelled.set())
    future.cancel()
    gate.set()
    assert cancelled.wait(WAIT_S)
    assert lane.call(lambda: counter.count).result(WAIT_S) == 0
