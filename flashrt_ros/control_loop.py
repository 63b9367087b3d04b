"""The step thread, and the player that splices chunks by executed steps.

A *step* is one control period, a *chunk* the actions of one tick. Nothing here waits for a GPU:
the tick side hands finished chunks in under a lock held for microseconds, and a hold is one
attribute the step thread reads.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
import os
import threading
import traceback

import numpy as np
from numpy.typing import NDArray

from flashrt_core.errors import ActionNonFinite
from flashrt_core.errors import ConfigError
from flashrt_core.errors import LaneTimeout
from flashrt_ros.chunk_timing import ChunkTiming
from flashrt_ros.clocks import MonotonicClock
from flashrt_ros.clocks import NANOSECONDS
from flashrt_ros.clocks import SteadyClock
from flashrt_ros.statistics import Histogram
from flashrt_ros.statistics import Ring

JITTER_EDGES_MS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)


class Played(StrEnum):
    """What :meth:`ChunkPlayer.next_action` gave."""

    ACTION = 'action'
    EXHAUSTED = 'exhausted'  # the chunk is used up, or none came since the last epoch: hold still
    HELD = 'held'


@dataclass(frozen=True)
class TickStart:
    """Where a tick's observation lies on the axis of executed steps."""

    epoch: int
    at_step: int


@dataclass(frozen=True)
class Splice:
    """What became of an offered chunk."""

    accepted: bool
    delay_steps: int  # index of its first action to be played: those before it are past
    left_steps: int  # actions still to be played
    reason: str  # '' when accepted, else 'older_epoch', 'older_tick' or 'too_late'


class ChunkPlayer:
    """Plays a chunk one action a step and splices the next one in by executed steps.

    Action i of a chunk belongs to the step that lies i *executed* steps after its observation.
    Periods in which nothing was played (hold, exhausted, missed) are no steps, so the first chunk
    from rest starts at 0.

    Threads: :meth:`next_action` on the step thread; everything else on any thread.
    """

    def __init__(
        self, joints: int, *, epoch: int = 0, timing: ChunkTiming | None = None
    ) -> None:
        """Start without a chunk.

        :param joints: columns of each chunk.
        :param epoch: chunks of an older epoch are dropped.
        :param timing: told of every step and splice.
        :raises ConfigError: when joints is below 1.
        """
        if joints < 1:
            raise ConfigError(
                f'ChunkPlayer joints is {joints}; give the number of joints, at least 1'
            )
        self._joints = joints
        self._lock = threading.Lock()
        self._held = False
        self._epoch = epoch
        self._actions: NDArray[np.float64] | None = None
        self._index = 0
        self._tick_at = -1
        self._executed = 0
        self.timing = timing or ChunkTiming()
        self.chunks_dropped = 0

    def hold(self) -> None:
        """Stop handing out actions from the next step on. Takes no lock."""
        self._held = True

    def release(self) -> None:
        """Hand out actions again; old ones were dropped by :meth:`clear` or a new epoch."""
        self._held = False

    @property
    def held(self) -> bool:
        """Whether a hold is set."""
        return self._held

    def begin_tick(self) -> TickStart:
        """Say where a tick observes; call it when the observation is taken, before it runs."""
        with self._lock:
            return TickStart(self._epoch, self._executed)

    def swap(self, actions: NDArray[np.float64], start: TickStart) -> Splice:
        """Put a committed tick's chunk in place of the one being played.

        :param actions: float64 [horizon, joints], robot units; copied, so the caller may reuse the
            array.
        :param start: of the tick that made the chunk.
        :return: a refused chunk (older epoch, older tick, all of it already due) leaves the old
            one playing.
        :raises ActionNonFinite: when an element is NaN or infinite; the old chunk goes on.
        :raises ConfigError: when the shape is not [horizon >= 1, joints].
        """
        fresh = np.array(actions, dtype=np.float64, order='C')
        if fresh.ndim != 2 or fresh.shape[0] < 1 or fresh.shape[1] != self._joints:
            raise ConfigError(
                f'chunk has shape {fresh.shape}; give [horizon, {self._joints}], one column per '
                'joint'
            )
        if not np.isfinite(fresh).all():
            raise ActionNonFinite(
                f'chunk of the tick at step {start.at_step} has NaN or infinity; it is not played'
            )
        fresh.flags.writeable = False
        horizon = len(fresh)
        with self._lock:
            delay = self._executed - start.at_step
            if start.epoch < self._epoch:
                reason = 'older_epoch'
            elif start.at_step < self._tick_at:
                reason = 'older_tick'
            elif delay >= horizon:
                reason = 'too_late'
            else:
                self._actions, self._index = fresh, delay
                self._tick_at = start.at_step
                self.timing.spliced(delay)
                return Splice(True, delay, horizon - delay, '')
            self.chunks_dropped += 1
            return Splice(False, delay, 0, reason)

    def clear(self) -> None:
        """Drop the chunk being played, after a hold or interrupt; the next starts from rest.

        The chunk of a tick in flight is accepted still.
        """
        with self._lock:
            self._drop_chunk()

    def new_epoch(self, epoch: int) -> None:
        """Drop the chunk and refuse results in flight from before a reset, restore or rollback.

        :raises ConfigError: when the epoch does not grow.
        """
        with self._lock:
            if epoch <= self._epoch:
                raise ConfigError(
                    f'new epoch is {epoch}, the current one {self._epoch}; it must grow'
                )
            self._epoch = epoch
            self._drop_chunk()

    def _drop_chunk(self) -> None:
        self._actions, self._index, self._tick_at = None, 0, -1
        self.timing.restarted()

    def next_action(self, out: NDArray[np.float64]) -> Played:
        """Copy this step's action into ``out`` (float64 [joints]) and advance; step thread only.

        ``out`` is written only when the result is ACTION.
        """
        if self._held:
            return Played.HELD
        with self._lock:
            if self._actions is None or self._index >= len(self._actions):
                self.timing.starved += self._actions is not None
                return Played.EXHAUSTED
            out[:] = self._actions[self._index]
            self.timing.played(self._tick_at + self._index, self._index)
            self._index += 1
            self._executed += 1
            return Played.ACTION

    @property
    def epoch(self) -> int:
        """Epoch whose chunks are played."""
        return self._epoch

    @property
    def steps_executed(self) -> int:
        """Actions handed out since the start; never goes back."""
        return self._executed

    @property
    def left_steps(self) -> int:
        """Actions left in the chunk being played."""
        with self._lock:
            return 0 if self._actions is None else len(self._actions) - self._index

    @property
    def exhausted(self) -> bool:
        """Whether the next step finds no action."""
        return self.left_steps == 0

    @property
    def expected_delay_steps(self) -> int:
        """Steps expected to be played before the chunk of a tick that begins now is there."""
        return min(self.timing.expected_delay, self.left_steps)


@dataclass(frozen=True)
class StepReport:
    """Counters of a step thread; lateness is wake-up minus deadline."""

    steps: int
    missed: int  # periods skipped because the thread was late; they are never played in a bunch
    late: int  # steps that began later than late_after_s
    errors: int  # callbacks that raised
    lateness_p50_ms: float
    lateness_p99_ms: float
    lateness_max_ms: float
    jitter_edges_ms: tuple[float, ...]
    jitter_counts: tuple[int, ...]
    realtime: bool
    realtime_reason: str  # why SCHED_FIFO is not in force; '' when it is


class StepThread:
    """Calls a function once per control period at absolute steady deadlines.

    A wake-up later than half a period skips to the next slot, so two steps never begin less than
    half a period apart. :meth:`start` and :meth:`stop` are for any other thread.
    """

    _SLICE_NS = 50_000_000  # bounds how long stop waits where the period is long

    def __init__(
        self,
        period_s: float,
        callback: Callable[[int], None],
        *,
        on_error: Callable[[Exception], None],
        name: str = 'step',
        fifo_priority: int = 0,
        late_after_s: float = 0.002,
        clock: SteadyClock | None = None,
    ) -> None:
        """Prepare the thread.

        :param period_s: control period.
        :param callback: called with the slot number (grows by one plus the missed ones) on the
            step thread.
        :param on_error: called on the step thread with what the callback raised; set a hold there.
            What it raises itself is printed and counted too.
        :param fifo_priority: 1..99 asks for SCHED_FIFO, 0 does not; a refusal is reported, not
            raised.
        :param late_after_s: steps beginning later than this are counted as late.
        :raises ConfigError: when a number is out of range.
        """
        if not 1e-4 <= period_s <= 10.0:
            raise ConfigError(f'step period is {period_s} s; give 0.0001 to 10 s')
        if not 0 <= fifo_priority <= 99:
            raise ConfigError(f'fifo_priority is {fifo_priority}; give 1..99, or 0 for none')
        if not late_after_s > 0:
            raise ConfigError(f'late_after_s is {late_after_s}; give a positive number')
        self._period_ns = round(period_s * NANOSECONDS)
        self._callback = callback
        self._on_error = on_error
        self._name = name
        self._priority = fifo_priority
        self._late_after_ns = round(late_after_s * NANOSECONDS)
        self._clock: SteadyClock = clock or MonotonicClock()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._lateness_ms = Ring(8192)
        self._jitter = Histogram(JITTER_EDGES_MS)
        self._steps = self._missed = self._late = self._errors = 0
        self._realtime = False
        self._realtime_reason = 'fifo_priority is 0'

    def start(self) -> None:
        """Start stepping; the first step comes one period from now. Does nothing when running."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 2.0) -> None:
        """End the thread after the step in flight: at most 50 ms or a period, plus that step.

        :raises LaneTimeout: when the callback does not return in time; the thread ends when it
            does.
        """
        self._stopping = True
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        thread.join(timeout_s)
        if thread.is_alive():
            raise LaneTimeout(
                f'step thread {self._name} did not end within {timeout_s} s; its callback is '
                'blocked'
            )
        self._thread = None

    @property
    def running(self) -> bool:
        """Whether the thread is alive."""
        return self._thread is not None and self._thread.is_alive()

    def report(self) -> StepReport:
        """Return the counters. Any thread."""
        lateness = self._lateness_ms.summary()
        return StepReport(
            steps=self._steps,
            missed=self._missed,
            late=self._late,
            errors=self._errors,
            lateness_p50_ms=lateness.p50,
            lateness_p99_ms=lateness.p99,
            lateness_max_ms=lateness.maximum,
            jitter_edges_ms=self._jitter.edges,
            jitter_counts=self._jitter.counts,
            realtime=self._realtime,
            realtime_reason=self._realtime_reason,
        )

    def _run(self) -> None:
        self._ask_for_fifo()
        clock, period = self._clock, self._period_ns
        deadline, slot = clock.now_ns() + period, 0
        while self._sleep_until(deadline):
            late_ns = clock.now_ns() - deadline
            if late_ns > period // 2:
                skipped = (late_ns - period // 2 + period - 1) // period
                self._missed += skipped
                deadline += skipped * period
                slot += skipped
                continue
            self._lateness_ms.record(late_ns / 1e6)
            self._jitter.record(late_ns / 1e6)
            self._late += late_ns > self._late_after_ns
            try:
                self._callback(slot)
            except Exception as error:
                self._errors += 1
                self._tell(error)
            self._steps += 1
            slot += 1
            deadline += period

    def _tell(self, error: Exception) -> None:
        try:
            self._on_error(error)
        except Exception:
            # Steps go on: a robot whose step thread has ended could not be resumed.
            self._errors += 1
            traceback.print_exc()

    def _sleep_until(self, deadline_ns: int) -> bool:
        while not self._stopping:
            now = self._clock.now_ns()
            if deadline_ns - now <= self._SLICE_NS:
                self._clock.sleep_until_ns(deadline_ns)
                return not self._stopping
            self._clock.sleep_until_ns(now + self._SLICE_NS)
        return False

    def _ask_for_fifo(self) -> None:
        if self._priority == 0:
            return
        try:
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(self._priority))
        except (AttributeError, OSError) as refusal:
            self._realtime_reason = (
                f'SCHED_FIFO {self._priority} was refused ({refusal}); grant CAP_SYS_NICE or an '
                'rtprio limit'
            )
            return
        self._realtime, self._realtime_reason = True, ''
