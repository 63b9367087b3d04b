"""Who may command the robot now: steps, holds, epochs, and the two locks that order them.

``submit_lock`` orders submissions, results and changes of epoch: once ``begin_change`` returned
no tick starts and, where it holds, no result of an earlier one is played; what such a tick took in
is told until the epoch ends. ``publish_lock`` orders commands:
whoever has held it after ``holds.hold`` knows that no older action leaves any more. They are taken
in this order; the step thread takes only the second one, and nobody waits for a device while
holding either.
"""

from collections.abc import Callable
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import replace
import threading
import time
from typing import Any
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from flashrt_core.errors import ActionJump
from flashrt_core.errors import FlashrtError
from flashrt_core.errors import LaneBusy
from flashrt_core.policies.protocol import Chunk
from flashrt_ros.chunk_timing import ChunkTiming
from flashrt_ros.clocks import NANOSECONDS
from flashrt_ros.control_loop import ChunkPlayer
from flashrt_ros.control_loop import Played
from flashrt_ros.embodiment import Embodiment
from flashrt_ros.executor_tick import Prepared
from flashrt_ros.hold import Cause
from flashrt_ros.hold import HoldMachine
from flashrt_ros.hold import Transition
from flashrt_ros.safety import ActionGuard
from flashrt_ros.safety import limit_path
from flashrt_ros.safety import StepLimiter
from flashrt_ros.statistics import Counters

Vector = NDArray[np.float64]
COUNTERS = ('ticks', 'chunks_too_late', 'steps', 'exhausted', 'stalled', 'faults')
STALL_S = 0.2  # after so long a silence of the steps nobody knows where the robot is


@dataclass
class Progress:
    """Host side counters: outside the capsule, monotone, never restored."""

    epoch: int = 1  # the first; 0 in a subgoal is whichever is current
    episode: int = 0
    tick: int = 0  # of the last chunk
    step: int = 0  # commands played
    active_capsule: str = ''
    bit_exact: bool = True


@dataclass(frozen=True)
class Run:
    """A run of steps: the counters that it began at, and when it holds."""

    epoch: int
    episode: int
    step: int
    tick: int  # ticks played before it
    limit: int | None  # hold once so many commands were played in all; None: no limit
    cause: str  # of that hold


@dataclass(frozen=True)
class Count:
    """What was played in a run."""

    steps: int
    ticks: int
    over: bool  # a reset has ended it: nothing that is played now belongs to it


@dataclass(frozen=True)
class InPlay:
    """A chunk that was put into play."""

    actions: Vector  # [horizon, joints], robot units, as checked
    first_step: int  # index of the first one to be played
    transition: Transition | None  # of a resync that it ended


class Outputs(Protocol):
    """Where results go; called under the locks, so nothing here may wait."""

    def command(self, position: Vector) -> None:
        """Send one step's command."""

    def trajectory(self, actions: Vector, first_step: int, commanded: Vector) -> None:
        """Send a chunk's rows from ``first_step`` on."""

    def tick_input(self, chunk: Chunk, prepared: Prepared) -> None:
        """Publish what a committed tick took in."""

    def chunk(self, chunk: Chunk, prepared: Prepared, actions: Vector, first_step: int) -> None:
        """Publish the actions of a tick that is put into play."""

    def outcome(self, sequence: int, outcome: str, message: str) -> None:
        """Publish what became of a subgoal, unless that was told already."""

    def heartbeat(self) -> None:
        """Publish a sign of life of the device."""

    def event(self, kind: str, name: str, detail: Mapping[str, Any]) -> None:
        """Publish a change or an incident."""

    def status(self) -> None:
        """Have the status published soon."""

    def device_lost(self, error: FlashrtError) -> None:
        """Ask for the end of the process."""


class Control:
    """The robot's side of the engine; any thread except where a method says otherwise."""

    def __init__(
        self, embodiment: Embodiment, outputs: Outputs, counters: Counters, parameters: Any,
        progress: Progress,
    ) -> None:
        """Start held.

        :param parameters: mapping of parameter names to values now.
        :param progress: goes on counting from there.
        """
        counters.declare(COUNTERS)
        joints = len(embodiment.joints)
        self._parameters = parameters
        self._lock_step = bool(parameters['lock_step'])
        self.stream = parameters['output_mode'] == 'stream' or self._lock_step
        self.progress = progress
        self.player = ChunkPlayer(joints, epoch=progress.epoch,
                                  timing=ChunkTiming(parameters['delay_window_chunks']))
        self.limiter = StepLimiter(embodiment, counters)
        self.guard = ActionGuard(embodiment, limits=parameters['limits'], counters=counters)
        self.holds = HoldMachine(self.player, counters, needs_reset=parameters['require_reset'])
        self.outputs = outputs
        self.submit_lock = threading.Lock()
        self.publish_lock = threading.Lock()
        self.generation = 0
        self.changing = False
        self.fresh_after_ns = 0  # steady; a resync wants observations received later
        self.still = True  # nothing was commanded since the last hold
        self.measured: Callable[[], Vector | None] = lambda: None
        self.drop_running: Callable[[], None] = lambda: None
        self.wake: Callable[[], None] = lambda: None
        self.on_step: Callable[[], None] = lambda: None
        self.on_hold: Callable[[str, bool, str], None] = lambda cause, latched, message: None
        self._counters = counters
        self._path = StepLimiter(embodiment, Counters())
        self._max_step = embodiment.max_step
        self._speed = 1.0
        self._stall_ns = 2 * round(embodiment.step_period_s * NANOSECONDS)  # at least
        self._run: Run | None = None
        self._count: Count | None = None  # of a run that a reset has ended
        self._exhausted_ns: int | None = None  # steady; since when no action is left to play
        self.ticks_played = 0
        self._stepped_ns = 0  # steady
        self._target = np.zeros(joints)
        self._command = np.zeros(joints)

    # -- steps ----------------------------------------------------------------------------------

    def step(self, _slot: int = 0) -> Vector | None:
        """Play one step and return the command, None when there is none. Step thread."""
        ended, message = None, ''
        with self.publish_lock:
            stalled = self._hold_after_stall()
            played = self.player.next_action(self._target)
            if played is not Played.EXHAUSTED:
                self._exhausted_ns = None
            if played is Played.ACTION:
                self.limiter.limit(self._target, self._command)
                if self.stream:
                    self.outputs.command(self._command)
                self.progress.step += 1
                self._counters.add('steps')
                self.still = False
                run = self._run
                if run is not None and run.limit is not None and self.progress.step >= run.limit:
                    ended = self.holds.hold(run.cause)
                    self.publish_hold()
            elif played is Played.EXHAUSTED:
                self.publish_hold()
                if self._exhausted_for_too_long():
                    ended = self.holds.hold(Cause.EXHAUSTED)
                    message = 'the chunk is used up and no new one came within exhausted_hold_s'
        self.emit(ended, message)
        self.emit(stalled, f'no step was played for more than {self._stall_limit_ns / 1e9:g} s')
        self.on_step()
        return self._command.copy() if played is Played.ACTION else None

    def begin_steps(self) -> None:
        """Say that steps begin, the first one whenever the step thread gets to it."""
        self._stepped_ns = 0

    def _hold_after_stall(self) -> Transition | None:
        last, self._stepped_ns = self._stepped_ns, time.monotonic_ns()
        if (last == 0 or self._lock_step or self.player.held
                or self._stepped_ns - last <= self._stall_limit_ns):
            return None
        self._counters.add('stalled')
        # Nothing is commanded: the last command may lie far from where the robot is by now.
        self.still = True
        return self.holds.hold(Cause.STALLED)

    @property
    def _stall_limit_ns(self) -> int:
        return max(int(STALL_S * NANOSECONDS), self._stall_ns)

    def _exhausted_for_too_long(self) -> bool:
        """Whether the robot may have been moved meanwhile; in lock-step the caller's business."""
        now = time.monotonic_ns()
        if self._exhausted_ns is None:
            self._exhausted_ns = now
            self._counters.add('exhausted')
        limit_ns = self._parameters['exhausted_hold_s'] * NANOSECONDS
        return not self._lock_step and now - self._exhausted_ns >= limit_ns

    # -- runs of steps --------------------------------------------------------------------------

    def begin_run(self, steps: int, cause: str) -> Run:
        """Count from the next step on, and hold for ``cause`` after so many; 0: no limit.

        The hold that the run before has left is over: nothing is played before this one counts.
        """
        with self.submit_lock:
            now = time.monotonic_ns()
            with self.publish_lock:
                run = self._begin_run(steps, cause)
                # With the steps shut out: the next hold for that cause is this run's own.
                transition = self.holds.clear(cause, now)
            if transition is not None:
                self.fresh_after_ns = now
        self.emit(transition)
        self.wake()
        return run

    def begin_run_locked(self, steps: int, cause: str) -> Run:
        """Begin a run within a reset, as ``begin_run``; under the submit lock."""
        with self.publish_lock:
            return self._begin_run(steps, cause)

    def _begin_run(self, steps: int, cause: str) -> Run:
        progress = self.progress
        self._count = None
        self._run = run = Run(progress.epoch, progress.episode, progress.step, self.ticks_played,
                              progress.step + steps if steps else None, cause)
        return run

    def count(self, run: Run) -> Count:
        """Return what was played in the newest run; any thread."""
        with self.publish_lock:
            return self._count or Count(
                self.progress.step - run.step, self.ticks_played - run.tick, False)

    def end_run(self, run: Run, *, hold: bool) -> Count:
        """Count what was played; with ``hold`` stay for its cause, unless a reset has ended it."""
        transition = None
        with self.submit_lock:
            if hold and self._count is None:
                transition = self.holds.hold(run.cause)
                with self.publish_lock:
                    self.publish_hold()
                if not self.changing:
                    self.generation += 1
                    self.drop_running()
            count = self.count(run)
            self._run = self._count = None
        self.emit(transition)
        return count

    def step_failed(self, error: Exception) -> None:
        """Hold after an exception on the step thread."""
        self._counters.add('faults')
        self.hold(Cause.FAULT, latch=True, message=f'step: {error!r}')

    def publish_hold(self, force: bool = False) -> None:
        """Command the robot to stay, once per standstill; under the publish lock."""
        if self.still and not force:
            return
        command, measured = self.limiter.command, self.measured()
        position = measured if self.still or np.isnan(command[0]) else command
        self.still = True
        if position is not None:
            self.outputs.command(position)

    # -- chunks ---------------------------------------------------------------------------------

    def put_into_play(
        self, actions: Vector, prepared: Prepared, running: bool
    ) -> InPlay | None:
        """Check a tick's chunk and have its steps played; under the submit lock.

        :param actions: float64 [horizon, joints], absolute, robot units.
        :param running: whether it follows on a chunk; else it ends a resync.
        :return: None when all of it is past, or a hold came first.
        :raises ActionError: it is refused; the chunk in play goes on.
        """
        late = self.player.steps_executed - prepared.start.at_step
        first = min(late, len(actions) - 1)
        guarded = self.guard.check(
            actions, first_step=first,
            commanded=self.limiter.command if running and not self.still else None)
        if not running:
            self.begin_from_measured(
                guarded.actions[first], self._parameters['resync_speed_ratio'])
        splice = self.player.swap(guarded.actions, prepared.start)
        if not splice.accepted:
            self._counters.add('chunks_too_late')
            return None
        self.ticks_played += 1
        self._counters.add('ticks')
        now = time.monotonic_ns()
        transition = None if running else self.holds.offer(
            now if self._lock_step else prepared.observation.oldest_received_ns, now)
        if not (running or transition):
            return None  # the next resync begins with a newer chunk
        if not self.stream:
            self.publish_chunk(guarded.actions)
        # The step thread may have played another step since ``first`` was read.
        return InPlay(guarded.actions, splice.delay_steps, transition)

    def begin_from_measured(self, first: Vector, speed: float) -> None:
        """Let commands start from where the robot is; only while held.

        :raises ActionJump: the pose is not known, or ``first`` lies beyond the pose gap.
        """
        measured = self.measured()
        if measured is None:
            raise ActionJump('the measured pose is not known; check joint_states')
        self.guard.check_pose_gap(first, measured)
        with self.publish_lock:
            self._speed = speed
            self.limiter.rebase(measured, speed=speed)

    def publish_chunk(self, actions: Vector) -> None:
        """Send the chunk in play to a controller that plays it itself, unless a hold came first.

        From the row on that is the next step's, which the step thread moves until the lock is
        held. The rows are limited as the steps will be, because the controller does not pass by
        here.
        """
        with self.publish_lock:
            first_step = len(actions) - self.player.left_steps
            if self.player.held or first_step == len(actions):
                return
            commanded, limited = self.limiter.command, actions
            if self.limiter.blending:
                limited = actions.copy()
                self._path.rebase(commanded, speed=self._speed)
                for row in limited[first_step:]:
                    self._path.limit(row, row)
            elif not (np.abs(actions[first_step] - commanded) <= self._max_step).all():
                # The guard has limited the rows among each other; only the seam may be too wide.
                limited = actions.copy()
                limit_path(limited[first_step:], commanded, self._max_step)
            self.outputs.trajectory(limited, first_step, commanded)
            self.still = False

    # -- holds ----------------------------------------------------------------------------------

    def hold(
        self, cause: str, *, latch: bool = False, message: str = '', force: bool = False
    ) -> None:
        """Stop commanding at once and drop the running tick at its segment's end.

        Waits for a command that is being published, never for the device. With ``force`` the hold
        is commanded even when the robot stands still already.
        """
        transition = self.holds.hold(cause, latch=latch)
        with self.publish_lock:
            self.publish_hold(force)
        with self.submit_lock:
            if not self.changing:
                self.generation += 1
                self.drop_running()
        self.emit(transition, message)

    def hold_locked(self, cause: str, *, latch: bool, message: str) -> None:
        """Hold for the chunk that is being judged; under the submit lock."""
        transition = self.holds.hold(cause, latch=latch)
        with self.publish_lock:
            self.publish_hold()
        self.emit(transition, message)

    def clear(self, cause: str) -> None:
        """Say that an unlatched cause is over."""
        with self.submit_lock:
            now = time.monotonic_ns()
            transition = self.holds.clear(cause, now)
            if transition is not None:
                self.fresh_after_ns = now
        self.emit(transition)
        self.wake()

    def resume(self) -> None:
        """Leave a latched hold through resync.

        :raises WrongState: nothing is latched.
        """
        with self.submit_lock:
            now = time.monotonic_ns()
            transition = self.holds.resume(now)
            self.guard.reset()
            self.fresh_after_ns = now
        self.emit(transition)
        self.wake()

    # -- changes of epoch -----------------------------------------------------------------------

    def begin_change(self, *, hold: bool) -> None:
        """Let no tick start until ``end_change``; with ``hold`` no chunk and no command either.

        :raises LaneBusy: another change is under way.
        """
        with self.submit_lock:
            if self.changing:
                raise LaneBusy('another capsule verb is at work; try again when it has answered')
            self.changing = True
            if hold:
                self.generation += 1
                self.holds.hold(Cause.RESTORE)  # the verb's own event tells it
                with self.publish_lock:
                    self.publish_hold()
                    self.player.clear()

    def end_change(
        self, restored: bool, *, capsule: str = '', reset: bool = False, bit_exact: bool = True,
        poisoned: bool = False, with_lock: Callable[[], object] = lambda: None,
    ) -> None:
        """Go on: in a new epoch through resync when ``restored``, else in the old one.

        Once this returns nothing of an older epoch is published.

        :param with_lock: called under the submit lock, with the new counters in place when
            ``restored``, before any tick starts.
        """
        poison = None
        with self.submit_lock:
            now = time.monotonic_ns()
            self.changing = False
            self.fresh_after_ns = now
            if restored:
                self.progress.epoch += 1
                self.progress.episode += int(reset)
                if reset and self._run is not None:
                    self._count, self._run = replace(self.count(self._run), over=True), None
                self.progress.active_capsule = capsule
                self.progress.bit_exact = bit_exact
                self.player.new_epoch(self.progress.epoch)
                self.guard.reset()
                with_lock()
                self.holds.restored(now, reset=reset)
                with self.publish_lock:
                    self.publish_hold()  # a controller may still play a chunk of the old epoch
            else:
                poison = self.holds.poison() if poisoned else None
                self.holds.clear(Cause.RESTORE, now)
                with_lock()
        self.emit(poison)
        self.outputs.status()
        if not restored:
            self.wake()  # a resync wants a new observation, which wakes by itself

    def emit(self, transition: Transition | None, message: str = '') -> None:
        """Publish a transition of the hold machine as an event, and the status."""
        if transition is None:
            return
        detail = dict(transition.detail)
        if message:
            detail['message'] = message
        self.outputs.event(transition.kind, transition.name, detail)
        if transition.kind == 'hold':
            self.on_hold(transition.name, bool(detail.get('latched')), message)
        self.outputs.status()
