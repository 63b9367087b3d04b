"""Admission of a planner's segments beside an executor's ticks on one device.

A segment (a decode step, a prefill chunk) starts only if its measured p99 ends before the next
tick is due, and not while a tick runs or an interrupt waits for its own. One that fits between no
two ticks is let in as a tick ends and is counted: a smaller prefill key would spare that delay. It
starts then even if its thread wakes so late that the next tick runs already: beside ticks without
a pause it would wait for ever.
"""

from collections.abc import Callable
import threading
import time
from typing import Any

from flashrt_core.runtime import Segment
from flashrt_ros.clocks import NANOSECONDS
from flashrt_ros.statistics import Counters
from flashrt_ros.statistics import Ring

COUNTERS = ('segments_admitted', 'segments_waited', 'segments_oversize', 'segments_unmeasured',
            'segments_starved', 'ticks_overdue')
SAMPLES = 256
_LOOK_S = 0.005  # bounds how long a hold of the robot goes unseen
_PATIENCE = 4  # ticks that a segment lets pass while interrupts come without end
Wait = Callable[[threading.Condition, float], object]


class Admission:
    """Between one executor and one planner: ticks announce themselves, segments ask.

    ``tick_*`` on the tick side, ``admit`` and ``done`` on the planner's lane thread. Steady time.
    """

    def __init__(
        self,
        counters: Counters,
        *,
        expects_ticks: Callable[[], bool],
        margin_s: float = 0.0005,
        overdue_s: float = 0.05,
        now_ns: Callable[[], int] = time.monotonic_ns,
        wait: Wait = threading.Condition.wait,
    ) -> None:
        """Begin with nothing due: every segment is admitted until the first tick.

        :param expects_ticks: whether the robot runs; while it holds nothing is due.
        :param margin_s: kept free before a tick is due.
        :param overdue_s: a tick that has not begun so long after it was due is waited for no more.
        """
        counters.declare(COUNTERS)
        self._counters = counters
        self._expects_ticks = expects_ticks
        self.margin_s = margin_s
        self._overdue_ns = int(overdue_s * NANOSECONDS)
        self._now_ns, self._wait = now_ns, wait
        self._changed = threading.Condition()
        self._running = False
        self._due_ns: int | None = None
        self._soon = False
        self._window_ns = 0  # from the end of the newest tick to the next one's due time
        self._asked: int | None = None  # p99 in ns of the segment that waits, 0: not measured
        self._passed = 0  # ticks that have ended since it asked
        self._missed = False  # it should have fitted after one of them
        self._granted = False  # it starts now, whatever comes
        self._durations: dict[tuple[str, Any], Ring] = {}
        self._begun_ns = 0
        self.waits = Ring(SAMPLES)  # microseconds that segments have waited

    # -- tick side ------------------------------------------------------------------------------

    def tick_began(self, next_due_ns: int | None) -> None:
        """A tick was submitted.

        :param next_due_ns: when the one after it is due; None when that is not known.
        """
        with self._changed:
            self._running, self._due_ns, self._soon = True, next_due_ns, False

    def tick_ended(self) -> None:
        """The tick has ended, in whatever way."""
        with self._changed:
            if not self._running:
                return
            self._running = False
            now = self._now_ns()
            if self._soon:
                self._due_ns = now  # the dropped one may have kept it waiting
            self._window_ns = 0 if self._due_ns is None else self._due_ns - now
            self._grant()
            self._changed.notify_all()

    def tick_soon(self) -> None:
        """The next tick begins at once, for an interrupt: no segment starts before it."""
        with self._changed:
            self._due_ns, self._soon = self._now_ns(), True

    # -- the planner's lane ---------------------------------------------------------------------

    def admit(self, segment: Segment) -> None:
        """Wait until a segment may start; as long as ticks come, at most until one has ended."""
        asked_ns = self._now_ns()
        with self._changed:
            ring = self._durations.get((segment.label, segment.key))
            p99_ns = 0 if ring is None or not ring.count else int(ring.summary().p99 * 1e3)
            self._asked, self._passed, self._missed, waited = p99_ns, 0, False, False
            while not self._granted and not self._may_start(p99_ns):
                waited = True
                self._wait(self._changed, _LOOK_S)
            self._asked, self._granted = None, False
        self._begun_ns = self._now_ns()
        self._counters.add('segments_admitted')
        if waited:
            self._counters.add('segments_waited')
        self.waits.record((self._begun_ns - asked_ns) / 1e3)

    def done(self, segment: Segment) -> None:
        """Measure the segment that was admitted last, its launch included."""
        ring = self._durations.setdefault(
            (segment.label, segment.key), Ring(SAMPLES, warm_up=1))
        ring.record((self._now_ns() - self._begun_ns) / 1e3)

    def p99_us(self) -> dict[str, float]:
        """Return the measured p99 of each segment in microseconds; any thread."""
        return {f'{label} {key}': ring.summary().p99
                for (label, key), ring in list(self._durations.items())}

    def _needed_ns(self, p99_ns: int) -> int:
        return int(self.margin_s * NANOSECONDS) + p99_ns

    def _may_start(self, p99_ns: int) -> bool:
        """Say whether a segment fits now; under the lock."""
        if self._running:
            return False
        now, due = self._now_ns(), self._due_ns
        if due is None or not self._expects_ticks():
            return True
        if now - due > self._overdue_ns:
            self._due_ns, self._soon = None, False
            self._counters.add('ticks_overdue')
            return True
        return not self._soon and p99_ns > 0 and now + self._needed_ns(p99_ns) <= due

    def _grant(self) -> None:
        """Let the segment that waits start after the tick that has just ended; under the lock.

        This is the widest window there is: for one that does not fit, and for one that should
        have fitted after the tick before and woke too late.
        """
        if self._asked is None:
            return
        self._passed += 1
        fits = 0 < self._asked and self._needed_ns(self._asked) <= self._window_ns
        if self._passed < _PATIENCE and (self._soon or (fits and not self._missed)):
            self._missed = fits and not self._soon
            return
        self._granted = True
        if self._due_ns is None:
            return
        self._counters.add('segments_unmeasured' if not self._asked else
                           'segments_starved' if self._soon or fits else 'segments_oversize')
