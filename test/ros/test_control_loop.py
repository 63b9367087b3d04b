"""Tests of flashrt_ros.control_loop: splice by executed steps; stepping on a made-up clock."""

import threading

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from flashrt_core.errors import ActionNonFinite
from flashrt_core.errors import ConfigError
from flashrt_core.errors import LaneTimeout
from flashrt_ros.control_loop import ChunkPlayer
from flashrt_ros.control_loop import Played
from flashrt_ros.control_loop import StepThread

MS = 1_000_000


def numbered(first, horizon=10, joints=2):
    """Return a chunk whose action i is the number of the step it was made for."""
    return np.arange(first, first + horizon, dtype=float)[:, None] * np.ones(joints)


def play(player, steps):
    """Play steps; return what came out, None for a step without an action."""
    out, played = np.zeros(2), []
    for _ in range(steps):
        got = player.next_action(out)
        played.append(out[0] if got is Played.ACTION else None)
    return played


def test_the_first_chunk_from_rest_skips_no_step():
    player = ChunkPlayer(2)
    start = player.begin_tick()
    assert play(player, 5) == [None] * 5  # the first inference takes five periods
    splice = player.swap(numbered(0), start)
    assert splice.accepted and splice.delay_steps == 0
    assert play(player, 3) == [0, 1, 2]


def test_a_late_chunk_begins_at_the_step_that_is_due():
    player = ChunkPlayer(2)
    player.swap(numbered(0), player.begin_tick())
    play(player, 2)
    start = player.begin_tick()
    play(player, 3)
    splice = player.swap(numbered(2), start)
    assert splice.delay_steps == 3
    assert play(player, 2) == [5, 6]


def test_only_steps_that_were_really_played_are_skipped():
    player = ChunkPlayer(2)
    player.swap(numbered(0, horizon=4), player.begin_tick())
    play(player, 2)
    start = player.begin_tick()
    assert play(player, 6) == [2, 3, None, None, None, None]
    assert player.swap(numbered(2), start).delay_steps == 2
    assert play(player, 1) == [4]


def test_a_chunk_that_is_all_past_is_dropped_and_the_old_one_plays_on():
    player = ChunkPlayer(2)
    player.swap(numbered(0), player.begin_tick())
    start = player.begin_tick()
    play(player, 3)
    splice = player.swap(numbered(0, horizon=3), start)
    assert not splice.accepted and splice.reason == 'too_late'
    assert play(player, 1) == [3]


def test_after_a_new_epoch_no_old_action_is_played():
    player = ChunkPlayer(2)
    player.swap(numbered(0), player.begin_tick())
    play(player, 2)
    in_flight = player.begin_tick()
    player.new_epoch(1)
    assert player.exhausted and play(player, 1) == [None]
    assert player.swap(numbered(2), in_flight).reason == 'older_epoch'
    assert play(player, 1) == [None]
    player.swap(numbered(100), player.begin_tick())
    assert play(player, 1) == [100]
    assert player.chunks_dropped == 1


def test_an_older_ticks_chunk_does_not_replace_a_newer_one():
    player = ChunkPlayer(2)
    player.swap(numbered(0), player.begin_tick())
    older = player.begin_tick()
    play(player, 1)
    newer = player.begin_tick()
    player.swap(numbered(1), newer)
    assert player.swap(numbered(0), older).reason == 'older_tick'
    assert play(player, 1) == [1]


def test_an_epoch_that_does_not_grow_is_refused():
    player = ChunkPlayer(2, epoch=3)
    with pytest.raises(ConfigError, match='new epoch is 3'):
        player.new_epoch(3)


def test_a_hold_gives_no_action_and_counts_no_step():
    player = ChunkPlayer(2)
    player.swap(numbered(0), player.begin_tick())
    player.hold()
    out = np.full(2, 7.0)
    assert player.next_action(out) is Played.HELD
    assert out.tolist() == [7.0, 7.0] and player.steps_executed == 0
    player.release()
    assert play(player, 1) == [0]


def test_a_hold_is_set_while_another_thread_has_the_lock():
    player = ChunkPlayer(2)
    with player._lock:
        setter = threading.Thread(target=player.hold)
        setter.start()
        setter.join(5.0)
        assert not setter.is_alive() and player.held


def test_the_delay_of_a_chunk_is_measured_in_executed_steps():
    player = ChunkPlayer(2)
    player.swap(numbered(0), player.begin_tick())
    assert player.expected_delay_steps == 0
    start = player.begin_tick()
    play(player, 3)
    player.swap(numbered(0), start)
    assert player.expected_delay_steps == 3
    play(player, 5)
    assert player.expected_delay_steps == 2, 'no more steps can pass than are left'


@pytest.mark.parametrize('drop', [lambda p: p.clear(), lambda p: p.new_epoch(1)])
def test_after_a_dropped_chunk_the_next_one_starts_from_rest(drop):
    player = ChunkPlayer(2)
    start = player.begin_tick()
    player.swap(numbered(0), start)
    play(player, 3)
    player.swap(numbered(0), start)
    drop(player)
    assert player.expected_delay_steps == 0 and play(player, 2) == [None, None]
    player.swap(numbered(50), player.begin_tick())
    assert play(player, 1) == [50]


def test_a_chunk_that_is_not_finite_leaves_the_old_one_playing():
    player = ChunkPlayer(2)
    player.swap(numbered(0), player.begin_tick())
    with pytest.raises(ActionNonFinite):
        player.swap(numbered(0) * np.nan, player.begin_tick())
    assert play(player, 1) == [0]


def test_a_chunk_is_copied_so_the_caller_may_reuse_its_array():
    player = ChunkPlayer(2)
    chunk = numbered(0)
    player.swap(chunk, player.begin_tick())
    chunk[:] = 99
    assert play(player, 1) == [0]


@pytest.mark.parametrize('shape', [(0, 2), (10, 3), (10,), (1, 10, 2)])
def test_a_chunk_of_another_shape_is_refused(shape):
    player = ChunkPlayer(2)
    with pytest.raises(ConfigError, match='one column per joint'):
        player.swap(np.zeros(shape), player.begin_tick())


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 4)), min_size=1, max_size=12))
def test_whatever_the_delays_each_played_action_is_the_one_made_for_its_step(plan):
    player = ChunkPlayer(2)
    for late, before in plan:
        play(player, before)
        start = player.begin_tick()
        play(player, late)
        player.swap(numbered(start.at_step), start)
        at = player.steps_executed
        expected = [float(at)] if player.left_steps else [None]
        assert play(player, 1) == expected


def test_swapping_while_stepping_never_tears_an_action(stress):
    player = ChunkPlayer(8)
    rounds = stress(20_000)
    bad = []

    def step():
        out = np.zeros(8)
        while not done.is_set():
            if player.next_action(out) is Played.ACTION and not (out == out[0]).all():
                bad.append(out.copy())

    done = threading.Event()
    stepper = threading.Thread(target=step)
    stepper.start()
    for round_ in range(rounds):
        player.swap(np.full((5, 8), float(round_)), player.begin_tick())
    done.set()
    stepper.join()
    assert not bad


class MadeUpClock:
    """Steady time that passes only by sleeping and by :meth:`work`; wake-ups come late as told."""

    def __init__(self, latenesses_ms=()):
        self.now = 1_000 * MS
        self.latenesses = list(latenesses_ms)

    def now_ns(self):
        return self.now

    def sleep_until_ns(self, deadline_ns):
        late = self.latenesses.pop(0) if self.latenesses else 0
        self.now = max(self.now, deadline_ns + int(late * MS))

    def work(self, milliseconds):
        self.now += int(milliseconds * MS)


def run_steps(clock, count, *, work=lambda slot: 0, **options):
    """Run a step thread of 20 ms for ``count`` steps; return slots, begin times in ms, report."""
    slots, begins, errors = [], [], []
    origin = clock.now

    def callback(slot):
        slots.append(slot)
        begins.append((clock.now - origin) / MS)
        if len(slots) == count:
            thread.stop()
        clock.work(work(slot))

    thread = StepThread(0.02, callback, on_error=errors.append, clock=clock, **options)
    thread.start()
    thread._thread.join(20.0)
    assert not thread.running
    return slots, begins, thread.report()


def test_deadlines_are_absolute_so_lateness_does_not_add_up():
    _, begins, report = run_steps(MadeUpClock([3] * 4), 5)
    assert begins == [23, 43, 63, 83, 100]
    assert report.missed == 0


def test_missed_steps_are_skipped_and_counted_and_never_bunched():
    slow = {1: 75.0}  # the second step takes almost four periods
    slots, begins, report = run_steps(MadeUpClock(), 5, work=lambda slot: slow.get(slot, 0))
    assert slots == [0, 1, 5, 6, 7]
    assert begins == [20, 40, 120, 140, 160]
    assert report.missed == 3 and report.steps == 5


def test_a_step_that_is_a_little_late_is_played_at_once():
    slots, begins, report = run_steps(
        MadeUpClock(), 3, work=lambda slot: 25.0 if slot == 0 else 0)
    assert slots == [0, 1, 2]
    assert begins == [20, 45, 60]
    assert report.missed == 0 and report.late == 1


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0, 130), min_size=3, max_size=20))
def test_two_steps_never_begin_less_than_half_a_period_apart(works):
    slots, begins, report = run_steps(
        MadeUpClock(), len(works), work=lambda slot: works[slot % len(works)])
    assert (np.diff(begins) >= 10.0 - 1e-6).all()
    assert report.missed == slots[-1] + 1 - len(slots)


def test_lateness_goes_into_the_histogram():
    _, _, report = run_steps(MadeUpClock([0.01, 0.3, 3.0]), 3)
    counts = dict(zip(report.jitter_edges_ms, report.jitter_counts, strict=False))
    assert counts[0.05] == 1 and counts[0.5] == 1 and counts[5.0] == 1
    assert sum(report.jitter_counts) == report.steps == 3
    assert report.lateness_max_ms == pytest.approx(3.0)


def test_steps_go_on_after_a_callback_that_fails_and_a_report_of_it_that_fails_too():
    def callback(slot):
        if slot == 2:
            thread.stop()
            return
        raise ValueError(slot)

    def no_hold(error):
        raise RuntimeError('the publisher is ill') from error

    thread = StepThread(0.02, callback, on_error=no_hold, clock=MadeUpClock())
    thread.start()
    thread._thread.join(10)
    assert (thread.report().steps, thread.report().errors) == (3, 4)


def test_a_failing_callback_is_reported_and_stepping_goes_on():
    seen = []

    def callback(slot):
        if slot == 3:
            thread.stop()
        raise ValueError(slot)

    thread = StepThread(
        0.02, callback, on_error=lambda error: seen.append(error.args[0]), clock=MadeUpClock())
    thread.start()
    thread._thread.join(20.0)
    assert seen == [0, 1, 2, 3] and thread.report().errors == 4


def test_stopping_does_not_wait_for_a_long_period():
    thread = StepThread(10.0, lambda slot: None, on_error=print)
    thread.start()
    thread.stop(timeout_s=5.0)  # below the period, so a stop that slept it out would raise
    assert not thread.running and thread.report().steps == 0


def test_it_can_be_started_again_after_a_stop(wait_until):
    thread = StepThread(0.001, lambda slot: None, on_error=print)
    thread.start()
    wait_until(lambda: thread.report().steps > 2)
    thread.stop()
    before = thread.report().steps
    thread.start()
    wait_until(lambda: thread.report().steps > before)
    thread.stop()


def test_a_blocked_callback_makes_stop_say_so():
    inside, go_on = threading.Event(), threading.Event()

    def callback(slot):
        inside.set()
        go_on.wait(20.0)

    thread = StepThread(0.001, callback, on_error=print)
    thread.start()
    assert inside.wait(20.0)
    with pytest.raises(LaneTimeout, match='callback is blocked'):
        thread.stop(timeout_s=0.01)
    go_on.set()
    thread.stop(timeout_s=20.0)


def test_a_refused_realtime_class_is_reported_and_stepping_goes_on(monkeypatch):
    def refuse(*_):
        raise PermissionError('not allowed')

    monkeypatch.setattr('os.sched_setscheduler', refuse)
    slots, _, report = run_steps(MadeUpClock(), 2, fifo_priority=50)
    assert slots == [0, 1]
    assert not report.realtime and 'CAP_SYS_NICE' in report.realtime_reason


@pytest.mark.parametrize('options', [
    {'period_s': 0.0}, {'period_s': 11.0}, {'period_s': 0.02, 'fifo_priority': 100},
    {'period_s': 0.02, 'late_after_s': 0.0}, {'period_s': float('nan')}])
def test_numbers_out_of_range_are_refused(options):
    with pytest.raises(ConfigError):
        StepThread(callback=lambda slot: None, on_error=print, **options)
