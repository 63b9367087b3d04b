"""The lane: verbs at segment ends and boundaries, drops, cancellation, faults, closing."""
from __future__ import annotations

from concurrent.futures import CancelledError
from concurrent.futures import wait
import threading
import time

from _contract import Counter
import pytest
import torch

from flashrt_core.errors import DeviceLost
from flashrt_core.errors import LaneBusy
from flashrt_core.errors import LaneClosed
from flashrt_core.errors import LaneError
from flashrt_core.errors import LaneTimeout
from flashrt_core.errors import TickDropped
from flashrt_core.runtime import cpu_backend
from flashrt_core.runtime import Lane
from flashrt_core.runtime.cpu import CpuBackend
from flashrt_core.runtime.cpu import CpuEvent

WAIT_S = 20.0


@pytest.fixture
def host_lane():
    with Lane(cpu_backend(), 'host') as lane:
        yield lane


@pytest.fixture
def counter(host_lane):
    """Give a counter whose segments can be held: only bodies run eagerly can block."""
    return Counter(host_lane.backend, host_lane)


def started(counter, index=0):
    """Start a tick and return (its future, the gate that its segment ``index`` waits at)."""
    gate = counter.hold(index)
    future = counter.tick()
    assert counter.entered[index].wait(WAIT_S)
    return future, gate


def test_work_runs_on_the_lane_thread_with_gradients_off(backend, lane):
    assert lane.call(lambda: (lane.on_thread, torch.is_grad_enabled())).result(WAIT_S) == (
        True, False)
    assert not lane.on_thread


def test_runs_and_calls_keep_their_order(backend, lane):
    counter = Counter(backend, lane)
    seen = []
    futures = []
    for value in range(20):
        futures.append(counter.tick())
        futures.append(lane.call(lambda v=value: seen.append((v, counter.count))))
    for future in futures:
        future.result(WAIT_S)
    assert seen == [(value, 2 * (value + 1)) for value in range(20)]


def test_at_segment_end_drops_the_rest_and_leaves_the_state(counter, host_lane):
    tick, gate = started(counter, 0)
    verb = host_lane.at_segment_end(lambda: counter.count)
    gate.set()
    assert verb.result(WAIT_S) == 0
    with pytest.raises(TickDropped, match='1 of 3'):
        tick.result(WAIT_S)
    assert host_lane.committed


def test_at_segment_end_in_the_last_segment_lets_the_tick_complete(counter, host_lane):
    tick, gate = started(counter, 2)
    verb = host_lane.at_segment_end(lambda: counter.count)
    gate.set()
    assert verb.result(WAIT_S) == 2
    assert tick.result(WAIT_S).value == 2


def test_at_boundary_waits_for_the_whole_plan(counter, host_lane):
    tick, gate = started(counter, 0)
    verb = host_lane.at_boundary(lambda: counter.count)
    gate.set()
    assert verb.result(WAIT_S) == 2
    assert tick.result(WAIT_S).value == 2


def test_plans_that_wait_are_dropped_by_at_segment_end_but_calls_are_not(counter, host_lane):
    tick, gate = started(counter, 0)
    waiting, call = counter.tick(), host_lane.call(lambda: 'called')
    verb = host_lane.at_segment_end(lambda: counter.set(100), name='reset')
    later = counter.tick()
    gate.set()
    verb.result(WAIT_S)
    for future in (tick, waiting):
        with pytest.raises(TickDropped, match='reset'):
            future.result(WAIT_S)
    assert call.result(WAIT_S) == 'called'
    assert later.result(WAIT_S).value == 102


@pytest.mark.parametrize('left_out, kept', [
    ('', '012'), ('0', '12'), ('10', '2'), ('012', '2')])
def test_segments_left_out_do_not_run_but_the_last_one_does(counter, host_lane, left_out, kept):
    labels = [segment.label for segment in counter.plan.segments]
    asked = []
    done = host_lane.run(
        counter.plan, before=lambda: asked.append('before'),
        skip=lambda: asked.append('skip') or {labels[int(i)] for i in left_out}).result(WAIT_S)
    assert asked == ['before', 'skip'] and host_lane.committed
    assert list(done.segments_us) == [labels[int(i)] for i in kept]
    assert list(host_lane.run(counter.plan).result(WAIT_S).segments_us) == labels


def test_a_drop_counts_only_the_segments_of_its_run(counter, host_lane):
    gate = counter.hold(1)
    first = counter.plan.segments[0].label
    tick = host_lane.run(counter.plan, skip=lambda: {first})
    assert counter.entered[1].wait(WAIT_S)
    verb = host_lane.at_segment_end(lambda: counter.count)
    gate.set()
    assert verb.result(WAIT_S) == 0 and host_lane.committed
    with pytest.raises(TickDropped, match='1 of 2'):
        tick.result(WAIT_S)


def test_plans_that_wait_run_after_at_boundary(counter, host_lane):
    tick, gate = started(counter, 0)
    waiting = counter.tick()
    verb = host_lane.at_boundary(lambda: counter.count)
    gate.set()
    assert (tick.result(WAIT_S).value, verb.result(WAIT_S), waiting.result(WAIT_S).value) == (
        2, 2, 4)


def test_a_second_verb_is_busy_at_once_and_names_the_first(counter, host_lane):
    tick, gate = started(counter, 0)
    first = host_lane.at_boundary(lambda: 1, name='snapshot')
    for submit in (host_lane.at_segment_end, host_lane.at_boundary):
        with pytest.raises(LaneBusy, match=r'snapshot.*waits'):
            submit(lambda: 2)
    assert LaneBusy.code == 'busy'
    gate.set()
    assert first.result(WAIT_S) == 1
    assert host_lane.at_boundary(lambda: 3).result(WAIT_S) == 3
    tick.result(WAIT_S)


def test_a_verb_that_runs_keeps_others_busy_until_it_is_done(host_lane):
    gate, entered = threading.Event(), threading.Event()

    def slow():
        entered.set()
        assert gate.wait(WAIT_S)

    first = host_lane.at_boundary(slow, name='restore')
    assert entered.wait(WAIT_S)
    with pytest.raises(LaneBusy, match=r'restore.*runs'):
        host_lane.at_segment_end(lambda: 2)
    gate.set()
    first.result(WAIT_S)


def test_the_next_verb_may_come_from_the_callback_of_the_last(host_lane):
    second = []
    first = host_lane.at_boundary(lambda: 1)
    first.add_done_callback(lambda _: second.append(host_lane.at_boundary(lambda: 2)))
    first.result(WAIT_S)
    host_lane.call(lambda: None).result(WAIT_S)
    assert second[0].result(WAIT_S) == 2


def test_the_state_is_not_committed_while_segments_run(counter, host_lane):
    assert host_lane.committed
    tick, gate = started(counter, 1)
    assert not host_lane.committed
    gate.set()
    tick.result(WAIT_S)
    assert host_lane.committed


def test_a_cancelled_plan_stops_at_the_segments_end(counter, host_lane):
    tick, gate = started(counter, 0)
    assert tick.cancel()
    gate.set()
    assert host_lane.call(lambda: counter.count).result(WAIT_S) == 0
    with pytest.raises(CancelledError):
        tick.result(WAIT_S)
    assert counter.tick().result(WAIT_S).value == 2


def test_those_who_wait_for_cancelled_futures_are_told(counter, host_lane):
    tick, gate = started(counter, 0)
    waiting = [counter.tick(), host_lane.call(lambda: 1), host_lane.at_boundary(lambda: 1)]
    futures = [tick, *waiting]
    assert all(future.cancel() for future in futures)
    gate.set()
    assert wait(futures, WAIT_S).not_done == set()
    tick, gate = started(counter, 1)
    late = counter.tick()
    assert late.cancel()
    closing = threading.Thread(target=host_lane.close)
    closing.start()
    gate.set()
    closing.join(WAIT_S)
    assert wait([tick, late], WAIT_S).not_done == set()


def test_a_cancelled_verb_frees_its_slot(counter, host_lane):
    tick, gate = started(counter, 0)
    verb = host_lane.at_boundary(lambda: 1)
    assert verb.cancel()
    gate.set()
    tick.result(WAIT_S)
    host_lane.call(lambda: None).result(WAIT_S)
    assert host_lane.at_boundary(lambda: 2).result(WAIT_S) == 2


@pytest.mark.parametrize('where', ['call', 'at_boundary', 'at_segment_end'])
def test_an_exception_goes_to_its_future_and_the_lane_lives(counter, host_lane, where):
    def fail():
        raise KeyError('mine')

    with pytest.raises(KeyError, match='mine'):
        getattr(host_lane, where)(fail).result(WAIT_S)
    assert counter.tick().result(WAIT_S).value == 2


def test_an_exception_in_before_after_or_an_early_segment_leaves_a_boundary(counter, host_lane):
    def fail():
        raise ValueError('hook')

    for options in ({'before': fail}, {'after': fail}):
        with pytest.raises(ValueError, match='hook'):
            host_lane.run(counter.plan, **options).result(WAIT_S)
        assert host_lane.committed
    counter.failing = {1}
    with pytest.raises(ValueError, match='segment 1'):
        counter.tick().result(WAIT_S)
    assert host_lane.committed and host_lane.state == 'running'


def test_an_exception_in_the_last_segment_leaves_no_boundary_until_one_is_committed(
        counter, host_lane):
    counter.failing = {2}
    with pytest.raises(ValueError, match='segment 2'):
        counter.tick().result(WAIT_S)
    assert not host_lane.committed

    def refuse():
        raise ValueError('before')

    counter.failing = {1}
    for options, said in (({'before': refuse}, 'before'), ({}, 'segment 1')):
        with pytest.raises(ValueError, match=said):
            host_lane.run(counter.plan, **options).result(WAIT_S)
        assert not host_lane.committed, 'what writes no state makes no boundary of it'
    counter.failing = set()
    host_lane.at_segment_end(host_lane.commit).result(WAIT_S)
    assert host_lane.committed


def test_commit_off_the_lane_thread_is_refused(host_lane):
    with pytest.raises(LaneError, match=r'lane.call'):
        host_lane.commit()


def test_waiting_for_itself_on_the_lane_thread_is_an_error_not_a_hang(host_lane):
    with pytest.raises(LaneError, match='wait for itself'):
        host_lane.call(lambda: host_lane.call(lambda: 1).result()).result(WAIT_S)


def test_closing_fails_everything_that_waits_and_ends_the_thread(counter, host_lane):
    tick, gate = started(counter, 0)
    queued, call, verb = counter.tick(), host_lane.call(lambda: 1), host_lane.at_boundary(int)
    closer = threading.Thread(target=host_lane.close)
    closer.start()
    gate.set()
    closer.join(WAIT_S)
    for future in (tick, queued, call, verb):
        with pytest.raises(LaneClosed):
            future.result(WAIT_S)
    assert host_lane.state == 'closed'
    for submit in (lambda: counter.tick(), lambda: host_lane.call(int),
                   lambda: host_lane.at_boundary(int)):
        with pytest.raises(LaneClosed, match=r'closed|closing'):
            submit()
    host_lane.close()


def test_closing_does_not_wait_for_ever_for_a_stuck_segment(counter, host_lane):
    tick, gate = started(counter, 0)
    queued = counter.tick()
    with pytest.raises(LaneTimeout, match='did not end'):
        host_lane.close(timeout_s=0.05)
    for future in (tick, queued):
        with pytest.raises(LaneTimeout):
            future.result(WAIT_S)
    assert host_lane.state == 'wedged'
    gate.set()


@pytest.mark.parametrize('how', ['run', 'call', 'cancelled'])
def test_work_that_ends_after_a_close_that_did_not_wait_changes_nothing(counter, host_lane, how):
    gate, entered = threading.Event(), threading.Event()
    if how == 'call':
        host_lane.call(lambda: (entered.set(), gate.wait(WAIT_S)))
        assert entered.wait(WAIT_S)
    else:
        tick, gate = started(counter, 2)
        if how == 'cancelled':
            tick.cancel()
    with pytest.raises(LaneTimeout, match='did not end'):
        host_lane.close(timeout_s=0.05)
    fault = host_lane.fault
    gate.set()
    host_lane.close()
    assert (host_lane.state, host_lane.fault) == ('wedged', fault)


def test_a_lane_that_was_not_started_or_starts_twice_says_so():
    lane = Lane(cpu_backend(), 'idle')
    with pytest.raises(LaneClosed, match='new'):
        lane.call(int)
    lane.start()
    with pytest.raises(LaneClosed, match='running'):
        lane.start()
    lane.close()
    Lane(cpu_backend(), 'never started').close()


class NeverDone(CpuEvent):
    """An event whose work never ends."""

    def wait(self, timeout_s, expected_s=0.0):
        time.sleep(timeout_s)
        return False


class FaultyBackend(CpuBackend):
    """A CPU backend whose device can be stuck or lost."""

    stuck = False
    broken: str | None = None

    def event(self):
        return NeverDone() if self.stuck else CpuEvent()

    def fault(self):
        return self.broken


def test_a_segment_beyond_its_limit_wedges_the_lane_and_is_reported():
    backend = FaultyBackend()
    lane = Lane(backend, 'stuck').start()
    counter = Counter(backend, lane)
    backend.stuck = True
    tick, queued = counter.tick(timeout_s=0.01), counter.tick()
    with pytest.raises(LaneTimeout, match=r"'segment0'.*0.01 s"):
        tick.result(WAIT_S)
    with pytest.raises(LaneTimeout):
        queued.result(WAIT_S)
    assert lane.state == 'wedged' and isinstance(lane.fault, LaneTimeout)
    with pytest.raises(LaneTimeout):
        lane.at_segment_end(int)
    lane.close()


def test_a_lost_device_ends_the_lane_with_a_named_code():
    backend = FaultyBackend()
    lane = Lane(backend, 'lost').start()
    counter = Counter(backend, lane)
    backend.broken = 'CUDA error: an illegal memory access was encountered'
    counter.failing = {1}
    with pytest.raises(DeviceLost, match='illegal memory access') as caught:
        counter.tick().result(WAIT_S)
    assert caught.value.code == 'device_lost'
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(DeviceLost):
        lane.call(int)
    assert lane.state == 'lost'
    lane.close()


def test_an_idle_lane_uses_no_processor_time(host_lane):
    host_lane.call(lambda: None).result(WAIT_S)
    before = host_lane.call(time.thread_time).result(WAIT_S)
    threading.Event().wait(0.2)
    after = host_lane.call(time.thread_time).result(WAIT_S)
    assert after - before < 0.1
