"""Whether actions may leave: causes of a hold, latch, resync; and the watch over ticks.

Pure state machines: steady time is passed in as nanoseconds, nothing sleeps, nothing touches ROS
or the GPU. This is no safety-rated stop.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from enum import StrEnum
import threading
from typing import Protocol

from flashrt_core.errors import ConfigError
from flashrt_core.errors import WrongState
from flashrt_ros.clocks import NANOSECONDS
from flashrt_ros.statistics import Counters

COUNTERS = ('holds', 'holds_latched', 'resyncs', 'tick_deadline_missed')


class Phase(StrEnum):
    """Where the hold machine stands; only RUN lets actions out."""

    NEEDS_RESET = 'needs_reset'  # after a start: whose episode this is, is not known
    HOLD = 'hold'
    RESYNC = 'resync'  # causes are gone; waits for a chunk made from an observation taken since
    RUN = 'run'


class Cause:
    """Names of hold causes; any other name may be used too."""

    REQUEST = 'request'  # ~/hold
    OBSERVATION = 'observation'
    NON_FINITE = 'action_non_finite'
    OUT_OF_LIMITS = 'action_out_of_limits'
    POSE_GAP = 'pose_gap'
    EXHAUSTED = 'exhausted'
    STALLED = 'stalled'  # the step thread stood still: a stopped process, a suspended machine
    CLOCK = 'clock_jump'
    TICK_DEADLINE = 'tick_deadline'
    SUBGOAL_DEADLINE = 'subgoal_deadline'
    RESTORE = 'restore'
    POISONED = 'poisoned'
    FAULT = 'fault'
    DEACTIVATE = 'deactivate'


class Gate(Protocol):
    """What lets actions through; :class:`flashrt_ros.control_loop.ChunkPlayer` is one."""

    def hold(self) -> None:
        """Let nothing through from the next step on; waits for no lock."""
        ...

    def release(self) -> None:
        """Let actions through."""
        ...


@dataclass(frozen=True)
class Transition:
    """A change to publish as an event."""

    kind: str  # hold, resume, resync
    name: str  # cause, or the phase reached
    detail: Mapping[str, object] = field(default_factory=dict)


class HoldMachine:
    """Decides whether actions may leave, and why not.

    Causes add up. An unlatched one goes when :meth:`clear` says that it is over, a latched one
    only by
    :meth:`resume`; a restore or reset never clears a latched one. When the last cause is gone the
    machine is in RESYNC until :meth:`offer` accepts a chunk. Any thread; :meth:`hold` closes the
    gate before it takes the machine's lock, which is never held across a wait.
    """

    def __init__(self, gate: Gate, counters: Counters, *, needs_reset: bool = True) -> None:
        """Start closed: waiting for a reset, or in RESYNC when ``needs_reset`` is False."""
        counters.declare(COUNTERS)
        self._gate = gate
        self._counters = counters
        self._lock = threading.Lock()
        self._causes: dict[str, bool] = {}
        self._needs_reset = needs_reset
        self._resync_since_ns = 0
        self._running = False
        gate.hold()

    @property
    def phase(self) -> Phase:
        """Where the machine stands."""
        if self._running:
            return Phase.RUN
        if self._causes:
            return Phase.HOLD
        return Phase.NEEDS_RESET if self._needs_reset else Phase.RESYNC

    @property
    def holding(self) -> bool:
        """Whether actions are kept back, for whatever reason."""
        return not self._running

    @property
    def latched(self) -> bool:
        """Whether a latched cause waits for ~/resume."""
        with self._lock:
            return any(self._causes.values())

    @property
    def causes(self) -> tuple[str, ...]:
        """Causes in force, oldest first; needs_reset last."""
        with self._lock:
            return tuple(self._causes) + (('needs_reset',) if self._needs_reset else ())

    @property
    def may_tick(self) -> bool:
        """Whether a tick may run: actions leave, or a chunk is wanted for resync."""
        return self.phase in (Phase.RUN, Phase.RESYNC)

    def hold(self, cause: str, *, latch: bool = False) -> Transition | None:
        """Hold for a cause; None when it is in force already."""
        self._gate.hold()
        with self._lock:
            self._gate.hold()  # an offer() may have opened the gate between the two
            known = self._causes.get(cause)
            if known is not None and (known or not latch):
                return None
            self._causes[cause] = latch
            self._running = False  # last: who reads the phase without the lock sees RUN or HOLD
            self._counters.add('holds')
            if latch:
                self._counters.add('holds_latched')
            return Transition('hold', cause, {'latched': latch})

    def clear(self, cause: str, now_ns: int) -> Transition | None:
        """Say that an unlatched cause is over; a latched one stays. None when nothing changed."""
        with self._lock:
            if self._causes.get(cause, True):
                return None
            del self._causes[cause]
            return self._after_removal(cause, now_ns)

    def resume(self, now_ns: int) -> Transition:
        """Leave latched holds; causes that are not over go on holding without latch.

        :raises WrongState: when nothing is held, or only a reset would help.
        """
        with self._lock:
            if Cause.POISONED in self._causes:
                raise WrongState(
                    'the session is poisoned by a failed restore; call ~/reset or ~/restore, '
                    'then ~/resume'
                )
            if not any(self._causes.values()):
                state = 'running' if self._running else f'in {self.phase.value}'
                remedy = 'call ~/reset' if self.phase is Phase.NEEDS_RESET else 'nothing to do'
                raise WrongState(f'no latched hold, the executor is {state}; {remedy}')
            self._causes = {name: False for name, latch in self._causes.items() if not latch}
            return self._after_removal('resume', now_ns)

    def restored(self, now_ns: int, *, reset: bool) -> Transition:
        """After a successful restore, rollback or reset: go through resync; latched causes stay.

        :param reset: it began an episode, which is what a fresh start waits for.
        """
        self._gate.hold()
        with self._lock:
            self._gate.hold()
            self._running = False
            self._causes.pop(Cause.POISONED, None)
            self._causes = {name: latch for name, latch in self._causes.items() if latch}
            if reset:
                self._needs_reset = False
            return self._after_removal('reset' if reset else 'restore', now_ns)

    def poison(self) -> Transition | None:
        """A restore failed during submission: hold until one succeeds; resume does not help."""
        return self.hold(Cause.POISONED)

    def offer(self, tick_started_ns: int, now_ns: int) -> Transition | None:
        """Offer to run with a chunk that is in the player already, after its pose gap was checked.

        The caller has swapped the chunk in and rebased the limiter on the measured pose; the gate
        is still closed. None when the machine does not wait for a chunk, or the tick observed
        before resync began.
        """
        with self._lock:
            if self._running or self._causes or self._needs_reset:
                return None
            if tick_started_ns < self._resync_since_ns:
                return None
            self._running = True
            self._gate.release()
            self._counters.add('resyncs')
            took_ms = (now_ns - self._resync_since_ns) / 1e6
            return Transition('resync', Phase.RUN.value, {'took_ms': round(took_ms, 3)})

    def _after_removal(self, name: str, now_ns: int) -> Transition:
        self._resync_since_ns = now_ns
        return Transition(
            'resume', name, {'phase': self.phase.value, 'causes': list(self._causes)}
        )


class TickWatch:
    """Deadlines and heartbeats of ticks: a beat is sent by a finished tick only, never by a timer.

    While the machine holds and no tick runs, the node posts an empty call to the lane when
    :meth:`probe_due` says so and beats when the lane has answered: a wedged GPU stops the
    heartbeat then too.
    """

    def __init__(
        self, *, deadline_s: float, error_after: int, heartbeat_s: float, counters: Counters
    ) -> None:
        """Set the limits.

        :param deadline_s: a longer tick has missed its deadline.
        :param error_after: misses in a row that make an error (and a hold).
        :param heartbeat_s: longest silence while holding.
        :raises ConfigError: when one is out of range.
        """
        if not deadline_s > 0 or error_after < 1 or not heartbeat_s > 0:
            raise ConfigError(
                f'tick deadline {deadline_s} s, error after {error_after}, heartbeat '
                f'{heartbeat_s} s; give positive numbers'
            )
        counters.declare(COUNTERS)
        self._deadline_ns = int(deadline_s * NANOSECONDS)
        self.error_after = error_after  # may be changed from any thread
        self._heartbeat_ns = int(heartbeat_s * NANOSECONDS)
        self._counters = counters
        self._started_ns: int | None = None
        self._last_beat_ns: int | None = None
        self._misses = 0

    def started(self, now_ns: int) -> None:
        """A tick has been submitted."""
        self._started_ns = now_ns

    def finished(self, now_ns: int) -> bool:
        """A tick, or a probe, has come back: beat now. Returns whether it missed the deadline."""
        started, self._started_ns = self._started_ns, None
        self._last_beat_ns = now_ns
        if started is None:
            return False
        missed = now_ns - started > self._deadline_ns
        self._misses = self._misses + 1 if missed else 0
        if missed:
            self._counters.add('tick_deadline_missed')
        return missed

    def dropped(self) -> None:
        """The tick was dropped at a segment's end: no beat, no miss."""
        self._started_ns = None

    def probe_due(self, now_ns: int) -> bool:
        """Whether nothing runs and the last beat is a heartbeat period ago."""
        if self._started_ns is not None:
            return False
        return self._last_beat_ns is None or now_ns - self._last_beat_ns >= self._heartbeat_ns

    @property
    def misses_in_a_row(self) -> int:
        """Deadlines missed since the last one that was kept."""
        return self._misses

    @property
    def level(self) -> str:
        """Diagnostics level: ok, warn after a miss, error after ``error_after`` in a row."""
        if self._misses >= self.error_after:
            return 'error'
        return 'warn' if self._misses else 'ok'
