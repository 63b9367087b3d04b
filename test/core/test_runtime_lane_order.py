"""Random verbs against running plans: what a lane promises holds for every interleaving."""
from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError
import random
import threading

from _contract import Counter
import pytest

from flashrt_core.errors import LaneBusy
from flashrt_core.errors import TickDropped
from flashrt_core.runtime import Backend
from flashrt_core.runtime import Graph
from flashrt_core.runtime import Lane
from flashrt_core.runtime import Plan
from flashrt_core.runtime import Segment

WAIT_S = 60.0
FULL = 3000


def drive(counter: Counter, lane: Lane, rng: random.Random, count: int) -> dict[str, int]:
    """
    Submit ticks and verbs at random and check each answer against a model of the state.

    The state is one number: a tick adds 2, a reset sets 1000 * epoch. Returns what happened.
    """
    happened = {'done': 0, 'dropped': 0, 'busy': 0, 'reset': 0, 'looked': 0}
    log: list[tuple[str, int]] = []      # written on the lane thread, in its order
    lock = threading.Lock()

    def note(kind: str) -> Callable[[], int]:
        def fn() -> int:
            assert lane.on_thread and lane.committed
            if kind == 'reset':
                happened['reset'] += 1
                counter.set(1000 * happened['reset'])
            log.append((kind, counter.count))
            return counter.count
        return fn

    pending = []
    for _ in range(count):
        choice = rng.random()
        if choice < 0.6:
            pending.append(('tick', lane.run(
                counter.plan, before=lambda: counter.buffers['step'].tensor.fill_(1),
                after=note('tick'))))
        else:
            kind = 'reset' if choice < 0.8 else 'look'
            submit = lane.at_segment_end if kind == 'reset' else lane.at_boundary
            try:
                pending.append((kind, submit(note(kind), name=kind)))
            except LaneBusy:
                with lock:
                    happened['busy'] += 1
        if len(pending) > 8:
            settle(pending.pop(rng.randrange(len(pending))), happened)
    for item in pending:
        settle(item, happened)

    state = 0
    for kind, value in log:
        state = state + 2 if kind == 'tick' else state
        if kind == 'reset':
            assert value % 1000 == 0
            state = value
        assert value == state, f'after {kind} the state is {value}, the model says {state}'
    assert sum(kind == 'tick' for kind, _ in log) == happened['done']
    assert lane.call(lambda: counter.count).result(WAIT_S) == state
    return happened


def settle(item, happened: dict[str, int]) -> None:
    kind, future = item
    try:
        future.result(WAIT_S)
        happened['done' if kind == 'tick' else 'looked'] += 1
    except TickDropped:
        assert kind == 'tick'
        happened['dropped'] += 1


@pytest.mark.parametrize('seed', [0, 1])
def test_random_verbs_against_running_plans_keep_every_promise(backend, lane, stress, seed):
    counter = Counter(backend, lane)
    happened = drive(counter, lane, random.Random(seed), stress(FULL))
    assert happened['done'] and happened['dropped'] and happened['busy'] and happened['reset']
    assert lane.idle and lane.state == 'running'


def test_many_threads_share_one_lane(backend, lane, stress):
    counter = Counter(backend, lane)
    errors = []
    busy = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(stress(300)):
                try:
                    if rng.random() < 0.5:
                        lane.at_segment_end(lambda: counter.set(0)).result(WAIT_S)
                    else:
                        counter.tick().result(WAIT_S)
                except LaneBusy:
                    busy.append(seed)
                except TickDropped:
                    pass
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert errors == [] and not any(thread.is_alive() for thread in threads)
    assert lane.state == 'running'
    assert lane.at_boundary(lambda: counter.count % 2).result(WAIT_S) == 0


def test_a_dropped_tick_leaves_the_state_of_the_boundary_before(backend, lane, stress):
    counter = Counter(backend, lane)
    for _ in range(stress(500)):
        tick = counter.tick(step=7)
        lane.at_segment_end(lambda: None).result(WAIT_S)
        try:
            expected = tick.result(WAIT_S).value
        except TickDropped:
            expected = None
        seen = lane.call(lambda: counter.count).result(WAIT_S)
        assert seen == expected if expected is not None else seen % 14 == 0


def test_a_gate_is_asked_before_each_segment_and_a_cancel_while_it_waits_drops_that_segment(
        backend: Backend) -> None:
    told: list[str] = []
    waiting, go = threading.Event(), threading.Event()

    class Gate:
        def admit(self, segment: Segment) -> None:
            told.append(f'admit {segment.label}')
            if segment.label == 'second':
                waiting.set()
                go.wait(20)

        def done(self, segment: Segment) -> None:
            told.append(f'done {segment.label}')

    with Lane(backend, 'gated') as lane:
        graphs = [Graph(name, lambda ports, key: None, ()) for name in ('first', 'second')]
        plan = Plan('two')
        for graph in graphs:
            graph.capture((), lane)
            plan.add(graph, ())
        lane.gate = Gate()
        future = lane.run(plan)
        assert waiting.wait(20)
        future.cancel()
        go.set()
        with pytest.raises((TickDropped, CancelledError)):
            future.result(20)
    assert told == ['admit first', 'done first', 'admit second']
