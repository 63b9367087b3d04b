"""Tests of flashrt_ros.clocks."""

import signal
import threading

import pytest

from flashrt_core.errors import ConfigError
from flashrt_ros.clocks import MonotonicClock
from flashrt_ros.clocks import NANOSECONDS
from flashrt_ros.clocks import RosClock

MS = 1_000_000


def test_simulated_time_of_zero_is_not_ready():
    clock = RosClock(lambda: 0)
    assert not clock.read().ready


def test_time_is_ready_once_the_first_clock_message_came():
    times = iter([0, 1, 2])
    clock = RosClock(lambda: next(times))
    assert [clock.read().ready for _ in range(3)] == [False, True, True]


def test_a_jump_back_is_shown_once_and_counted():
    times = iter([100, 200, 50, 60])
    clock = RosClock(lambda: next(times))
    assert [clock.read().jumped_back for _ in range(4)] == [False, False, True, False]
    assert clock.jumps_back == 1


def test_a_clock_set_back_to_zero_has_jumped_and_is_not_ready():
    times = iter([100, 0])
    clock = RosClock(lambda: next(times))
    clock.read()
    reading = clock.read()
    assert reading.jumped_back and not reading.ready


def test_a_step_back_within_the_tolerance_is_no_jump():
    times = iter([100 * MS, 99 * MS, 90 * MS])
    clock = RosClock(lambda: next(times), jump_back_tolerance_s=0.005)
    assert [clock.read().jumped_back for _ in range(3)] == [False, False, True]


def test_small_steps_back_add_up_to_a_jump():
    times = iter([100 * MS, 97 * MS, 94 * MS])
    clock = RosClock(lambda: next(times), jump_back_tolerance_s=0.005)
    assert [clock.read().jumped_back for _ in range(3)] == [False, False, True]


def test_a_reported_jump_counts_even_when_time_has_passed_the_old_mark_again():
    times = iter([100, 300])
    clock = RosClock(lambda: next(times))
    clock.read()
    clock.jumped()
    assert clock.read().jumped_back


def test_a_jump_reported_before_the_first_read_is_the_start_of_the_clock():
    clock = RosClock(lambda: 10)
    clock.jumped()
    assert not clock.read().jumped_back


def test_a_negative_tolerance_is_refused():
    with pytest.raises(ConfigError, match=r'jump_back_tolerance_s is -1'):
        RosClock(lambda: 1, jump_back_tolerance_s=-1)


def test_an_absolute_sleep_does_not_end_before_its_deadline():
    clock = MonotonicClock()
    deadline = clock.now_ns() + 3 * MS
    clock.sleep_until_ns(deadline)
    assert clock.now_ns() >= deadline


def test_a_passed_deadline_does_not_sleep():
    MonotonicClock().sleep_until_ns(0)


def test_a_signal_does_not_shorten_a_sleep():
    clock = MonotonicClock()
    hits = []
    before = signal.signal(signal.SIGUSR1, lambda *_: hits.append(1))
    try:
        deadline = clock.now_ns() + 30 * MS
        sender = threading.Timer(0.005, signal.pthread_kill, (
            threading.main_thread().ident, signal.SIGUSR1))
        sender.start()
        clock.sleep_until_ns(deadline)
        assert clock.now_ns() >= deadline
        sender.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert hits == [1]


def test_the_fallback_sleeps_until_the_deadline_too():
    clock = MonotonicClock()
    clock._nanosleep = None
    deadline = clock.now_ns() + 2 * MS
    clock.sleep_until_ns(deadline)
    assert clock.now_ns() >= deadline


def test_a_clock_that_stands_longer_than_allowed_is_not_ready_until_it_moves() -> None:
    ros, steady = [5 * NANOSECONDS], [0]
    clock = RosClock(lambda: ros[0], still_limit_s=1.0, steady_ns=lambda: steady[0])
    assert clock.read().ready
    steady[0] = NANOSECONDS
    assert clock.read().ready
    steady[0] += 1
    assert not clock.read().ready
    ros[0] += 1
    assert clock.read().ready
    unlimited = RosClock(lambda: ros[0], steady_ns=lambda: steady[0])
    unlimited.read()
    steady[0] *= 100
    assert unlimited.read().ready
