"""Tests of flashrt_ros.admission, under a clock that moves only when something waits."""

import random
import threading
from types import SimpleNamespace

import pytest

from flashrt_ros.admission import Admission
from flashrt_ros.statistics import Counters

MS = 1_000_000
PERIOD = 80 * MS


class Robot:
    """A clock and ticks on a schedule: ``(begin, end, next due)`` in ms, played while waiting."""

    def __init__(self, **options) -> None:
        self.now_ms, self.expects, self.counters = 0.0, True, Counters()
        self.schedule: list[tuple[float, float, float | None]] = []
        self.subject = Admission(
            self.counters, expects_ticks=lambda: self.expects, now_ns=lambda: int(
                self.now_ms * MS), wait=self._wait, **options)

    def _wait(self, condition: threading.Condition, seconds: float) -> None:
        until = self.now_ms + seconds * 1e3
        while self.schedule and min(self.schedule[0][:2]) <= until:
            begin, end, due = self.schedule.pop(0)
            if begin > -1:
                self.now_ms = max(self.now_ms, begin)
                self.subject.tick_began(None if due is None else int(due * MS))
                self.schedule.insert(0, (-1, end, None))
                if end > until:
                    break
            else:
                self.now_ms = max(self.now_ms, end)
                self.subject.tick_ended()
                return
        self.now_ms = max(self.now_ms, until)

    def segment(self, label: str, takes_ms: float) -> float:
        """Run one; return when it began."""
        segment = SimpleNamespace(label=label, key=(1,))
        self.subject.admit(segment)
        begun = self.now_ms
        self.now_ms += takes_ms
        self.subject.done(segment)
        return begun

    def measured(self, label: str, takes_ms: float) -> None:
        for _ in range(4):
            self.segment(label, takes_ms)

    def tick(self, took_ms: float, due_in_ms: float | None) -> None:
        """Run a tick now."""
        due = None if due_in_ms is None else int((self.now_ms + due_in_ms) * MS)
        self.subject.tick_began(due)
        self.now_ms += took_ms
        self.subject.tick_ended()

    def __getitem__(self, name: str) -> int:
        return self.counters[name]


def test_before_the_first_tick_everything_is_admitted() -> None:
    robot = Robot()
    assert robot.segment('decode', 5) == 0 and robot['segments_waited'] == 0


def test_a_segment_that_ends_before_the_next_tick_is_due_starts_at_once() -> None:
    robot = Robot()
    robot.measured('decode', 5)
    begun = robot.now_ms
    robot.tick(14, 80)
    assert [robot.segment('decode', 5) for _ in range(12)] == [
        begun + 14 + 5 * i for i in range(12)]
    assert robot['segments_waited'] == 0


def test_one_that_would_overlap_the_next_tick_waits_until_that_has_ended() -> None:
    robot = Robot()
    robot.measured('decode', 5)
    begun = robot.now_ms
    robot.tick(14, 80)
    robot.now_ms = begun + 75  # 5 ms are left, and a margin is kept
    robot.schedule = [(begun + 80, begun + 94, begun + 160)]
    assert robot.segment('decode', 5) == begun + 94
    assert robot['segments_waited'] == 1 and robot['segments_oversize'] == 0


def test_none_starts_while_a_tick_runs() -> None:
    robot = Robot()
    robot.measured('decode', 1)
    at = robot.now_ms
    robot.subject.tick_began(int((at + 80) * MS))
    robot.schedule = [(-1, at + 14, None)]
    assert robot.segment('decode', 1) == at + 14


def test_the_p99_counts_not_the_mean() -> None:
    robot = Robot()
    robot.measured('decode', 1)
    robot.segment('decode', 30)
    at = robot.now_ms
    robot.tick(10, 80)
    robot.now_ms = at + 55  # 25 ms are left: enough for the usual one
    robot.schedule = [(at + 80, at + 90, at + 160)]
    assert robot.segment('decode', 1) == at + 90


def test_one_that_fits_between_no_two_ticks_starts_right_after_one_and_is_counted() -> None:
    robot = Robot()
    robot.measured('chunk 2048', 100)
    at = robot.now_ms
    robot.tick(14, 80)
    robot.schedule = [(at + 80, at + 94, at + 160)]
    assert robot.segment('chunk 2048', 100) == at + 94
    assert robot['segments_oversize'] == 1


def test_one_never_measured_starts_right_after_a_tick_and_is_counted() -> None:
    robot = Robot()
    at = robot.now_ms
    robot.tick(14, 80)
    robot.schedule = [(at + 80, at + 94, at + 160)]
    assert robot.segment('new', 3) == at + 94
    assert robot['segments_unmeasured'] == 1


def test_a_minute_of_decoding_beside_ticks_keeps_most_tokens_and_meets_no_tick() -> None:
    robot, chance = Robot(), random.Random(3)
    robot.measured('decode', 5)
    first, tick_ms, gap_ms = robot.now_ms + 10, 14.5, 0.2
    begins = [first + 80 * i for i in range(750)]
    robot.schedule = [(at, at + tick_ms, at + 80) for at in begins]
    robot.subject.tick_began(int(first * MS))
    robot.subject.tick_ended()
    spent_ms, decoded = 0.0, []
    while robot.now_ms < begins[-1]:
        takes_ms = chance.uniform(4.8, 5.4)
        decoded.append((robot.segment('decode', takes_ms), takes_ms))
        robot.now_ms += gap_ms
        spent_ms += takes_ms + gap_ms
    share = spent_ms / (decoded[-1][0] - decoded[0][0])
    assert 0.7 < share < 1 - tick_ms / 80
    assert robot['segments_waited'] >= 740 and robot['segments_oversize'] == 0
    phases = [(begun - first) % 80 for begun, _ in decoded if begun > first]
    assert min(phases) >= tick_ms - 1e-6, 'none begins while a tick runs'
    ends = [(begun - first) % 80 + takes for begun, takes in decoded if begun > first]
    assert max(ends) < 80, 'none is still running when the next one begins'


def test_while_the_robot_holds_nothing_is_due() -> None:
    robot = Robot()
    robot.measured('decode', 5)
    at = robot.now_ms
    robot.tick(14, 16)
    robot.expects = False
    assert robot.segment('decode', 5) == at + 14


def test_a_hold_is_noticed_while_waiting() -> None:
    robot = Robot()
    robot.measured('decode', 5)
    robot.tick(14, 16)
    looks = []
    robot.subject._expects_ticks = lambda: looks.append(1) or len(looks) < 3
    robot.segment('decode', 5)
    assert len(looks) == 3


def test_a_tick_that_does_not_come_is_waited_for_only_so_long() -> None:
    robot = Robot(overdue_s=0.05)
    robot.measured('decode', 5)
    at = robot.now_ms
    robot.tick(10, 12)
    assert robot.segment('decode', 5) == pytest.approx(at + 12 + 50, abs=6)
    assert robot['ticks_overdue'] == 1
    robot.segment('decode', 5)
    assert robot['ticks_overdue'] == 1, 'until the next tick nothing is due'


def test_before_the_tick_of_an_interrupt_nothing_starts_not_even_after_the_one_it_has_dropped(
        ) -> None:
    robot = Robot()
    robot.measured('decode', 5)
    at = robot.now_ms
    robot.subject.tick_began(int((at + 80) * MS))
    robot.subject.tick_soon()
    robot.schedule = [(-1, at + 3, None), (at + 4, at + 18, at + 84)]
    assert robot.segment('decode', 5) == at + 18
    assert robot['segments_oversize'] == robot['segments_starved'] == 0
    assert robot.segment('decode', 5) == at + 23, 'then all is as before'
    robot.subject.tick_soon()
    robot.expects = False
    assert robot.segment('decode', 5) == at + 28, 'a robot that holds does not tick'


def test_the_tick_of_an_interrupt_is_waited_for_from_the_end_of_the_one_it_has_dropped(
        ) -> None:
    robot = Robot(overdue_s=0.05)
    robot.measured('decode', 5)
    at = robot.now_ms
    robot.subject.tick_began(int((at + 80) * MS))
    robot.subject.tick_soon()
    robot.schedule = [(-1, at + 70, None), (at + 72, at + 86, at + 166)]
    assert robot.segment('decode', 5) == at + 86, 'its segment took longer than overdue_s'


class Slow(Robot):
    """One whose planner wakes so late after a tick that the next one runs already."""

    late_ms = 2.0

    def _wait(self, condition: threading.Condition, seconds: float) -> None:
        before = self.subject._running
        super()._wait(condition, seconds)
        if not before or self.subject._running:
            return
        self.now_ms += self.late_ms
        if self.schedule and self.schedule[0][0] <= self.now_ms:
            _, end, due = self.schedule.pop(0)
            self.subject.tick_began(int(due * MS))
            self.schedule.insert(0, (-1, end, None))


def test_beside_ticks_without_a_pause_each_one_lets_a_segment_start_however_late_it_wakes(
        ) -> None:
    robot = Slow()
    robot.measured('decode', 5)
    at = robot.now_ms
    robot.subject.tick_began(int((at + 20) * MS))
    robot.schedule = [(-1, at + 20, None), *(
        (at + 20 * i + 1, at + 20 * i + 20, at + 20 * i + 20) for i in range(1, 30))]
    begun = [robot.segment('decode', 5) for _ in range(10)]
    assert begun == [at + 20 * i + 22 for i in range(10)]
    assert robot['segments_oversize'] == 10


def test_one_that_just_fits_and_wakes_too_late_twice_starts_after_the_second_tick() -> None:
    robot = Slow()
    robot.measured('decode', 5)
    at = robot.now_ms
    robot.subject.tick_began(int((at + 26) * MS))
    robot.schedule = [(-1, at + 20, None), *(
        (at + 26 * i, at + 26 * i + 20, at + 26 * (i + 1)) for i in range(1, 30))]
    assert robot.segment('decode', 5) == at + 26 + 20 + robot.late_ms
    assert robot['segments_starved'] == 1 and robot['segments_oversize'] == 0


def test_a_flood_of_interrupts_keeps_a_segment_back_for_some_ticks_only() -> None:
    robot = Robot()
    robot.measured('decode', 5)
    at = robot.now_ms
    began = robot.subject.tick_began

    def flooded(due: int | None) -> None:
        began(due)
        robot.subject.tick_soon()

    robot.subject.tick_began = flooded
    robot.subject.tick_began(int((at + 80) * MS))
    robot.schedule = [(-1, at + 14, None), *(
        (at + 15 * i, at + 15 * i + 14, at + 15 * i + 80) for i in range(1, 30))]
    assert robot.segment('decode', 5) == at + 15 * 3 + 14
    assert robot['segments_starved'] == 1


def test_while_the_next_tick_is_not_known_only_a_running_one_keeps_segments_back() -> None:
    robot = Robot()
    at = robot.now_ms
    robot.tick(10, None)
    assert robot.segment('decode', 5) == at + 10
    robot.subject.tick_began(None)
    robot.schedule = [(-1, at + 20, None)]
    assert robot.segment('decode', 5) == at + 20
    assert all(robot[f'segments_{why}'] == 0 for why in ('oversize', 'unmeasured', 'starved'))
