"""The executor's engine: when to tick, one tick from observation to chunk, and what goes wrong.

Free of ROS. The tick thread runs ``_round`` while the engine is started; in lock-step the caller
of ``tick_now`` takes its place. All that commands the robot lies in executor_control.py.
"""

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import asdict
from dataclasses import replace
from functools import partial
import threading
import time
from typing import Any

from flashrt_core.errors import ActionError
from flashrt_core.errors import DeviceLost
from flashrt_core.errors import LaneError
from flashrt_core.errors import LaneTimeout
from flashrt_core.errors import ObservationError
from flashrt_core.errors import TickDropped
from flashrt_core.errors import WrongState
from flashrt_core.policies.protocol import Chunk
from flashrt_core.policies.protocol import Session
from flashrt_ros.admission import Admission
from flashrt_ros.clocks import NANOSECONDS
from flashrt_ros.clocks import RosClock
from flashrt_ros.clocks import RosReading
from flashrt_ros.embodiment import Embodiment
from flashrt_ros.executor_control import Control
from flashrt_ros.executor_control import InPlay
from flashrt_ros.executor_faults import Faults
from flashrt_ros.executor_interrupt import Interrupts
from flashrt_ros.executor_observation import Observation
from flashrt_ros.executor_observation import ObservationBuffer
from flashrt_ros.executor_parameters import age_limits
from flashrt_ros.executor_tick import Pending
from flashrt_ros.executor_tick import Ports
from flashrt_ros.executor_tick import Prepared
from flashrt_ros.executor_tick import TickBook
from flashrt_ros.executor_tick import TickTimes
from flashrt_ros.hold import Cause
from flashrt_ros.hold import Phase
from flashrt_ros.hold import TickWatch
from flashrt_ros.observations import first_error
from flashrt_ros.observations import ObservationWatch
from flashrt_ros.observations import StreamVerdict
from flashrt_ros.statistics import Counters
from flashrt_ros.subgoals import Subgoal
from flashrt_ros.subgoals import SubgoalSlot

COUNTERS = ('ticks_dropped', 'results_dropped')
_IDLE_WAIT_S = 0.02


class Engine:
    """Drives one session; ``start`` and ``stop`` belong to activate and deactivate."""

    def __init__(
        self,
        session: Session,
        embodiment: Embodiment,
        control: Control,
        parameters: Any,
        clock: RosClock,
        now_ns: Callable[[], int],
        counters: Counters,
        take_mark: Callable[[], None],
    ) -> None:
        """Compose the parts; nothing runs yet.

        :param parameters: mapping of parameter names to values now (ParameterTable).
        :param now_ns: ROS time, for any thread; ``clock`` is read by the tick thread only.
        :param take_mark: runs on the lane thread after each committed tick.
        :raises ConfigError: the policy's ports and the embodiment do not fit.
        """
        counters.declare(COUNTERS)
        self.session, self.control, self.counters = session, control, counters
        self.embodiment = embodiment
        self.ports = Ports.of(session.ports)
        embodiment.check_dims(self.ports.state_dim, self.ports.action_dim)
        embodiment.check_views(tuple(self.ports.views))
        self.times = TickTimes(session.plan_keys[1])
        self._interrupts = Interrupts(counters)
        self.times.rings.update(self._interrupts.rings)
        self.lock_step = bool(parameters['lock_step'])
        # A chunk is made only when the last one is used up; the robot stands still meanwhile.
        self._in_turn = getattr(session.config, 'chunk_mode', '') == 'sync'
        self.slot = SubgoalSlot(max_tokens=max(1, self.ports.subgoal_tokens),
                                vocabulary=int(session.config.vocab), counters=counters,
                                embedding=self.ports.subgoal_embedding)
        self.watch = TickWatch(
            deadline_s=parameters['tick_deadline_s'],
            error_after=parameters['tick_misses_to_hold'],
            heartbeat_s=parameters['heartbeat_period_s'], counters=counters)
        views = {view: self.ports.views[view] for view in embodiment.views}
        self._parameters = parameters
        self.ages = ObservationWatch(
            counters=counters, **age_limits(parameters, embodiment.views))
        self.observations = ObservationBuffer(
            embodiment, views, self.ages, resize=parameters['image_resize'],
            lock_step=self.lock_step, notify=self.wake)
        self.book = TickBook(embodiment, self.ports, self.slot, int(session.config.seed))
        self._faults = Faults(control, session, self.observations, self.ages, self.slot,
                              counters, parameters)
        self._clock = clock
        self._now_ns = now_ns
        self._take_mark = take_mark
        self.admission: Admission | None = None  # of a planner on the same device
        self._running: Future[Chunk] | None = None
        self._idle = threading.Event()  # no tick is in flight, nor its result
        self._idle.set()
        self._dropping: Future[None] | None = None
        self._tick_step = 0
        self._urgent = False
        self.active = False  # whether it ticks or would tick
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        control.measured = self.observations.measured
        control.drop_running = self._drop_running
        control.wake = self.wake
        control.on_step = self._stepped

    def parameters_changed(self) -> None:
        """Take over limits that parts of the engine keep; any thread."""
        self.ages.set_limits(**age_limits(self._parameters, self.embodiment.views))
        self.watch.error_after = self._parameters['tick_misses_to_hold']

    # -- activation -----------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to tick: through resync, or only after a reset when one is required."""
        self.active = True
        self.control.begin_steps()
        self.control.fresh_after_ns = time.monotonic_ns()
        self.control.clear(Cause.DEACTIVATE)
        if not self.lock_step:
            self._thread = threading.Thread(target=self._loop, name='tick', daemon=True)
            self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Hold, publish the hold whatever was said before, end the tick thread."""
        self.control.hold(Cause.DEACTIVATE, force=True)
        self.active = False
        self.wake()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(timeout_s)

    def wake(self) -> None:
        """Have the tick thread look again; any thread."""
        self._wake.set()

    # -- what comes from outside ----------------------------------------------------------------

    @property
    def interrupted(self) -> bool:
        """Whether a tick for an interrupt runs or begins at once; any thread."""
        return self._interrupts.answering or (
            self._interrupts.pending and self.active and not self.lock_step
            and self.control.holds.may_tick)

    def _interrupt(self, sequence: int) -> None:
        """Drop the running tick at its segment's end and tick anew with what is in the slot."""
        with self.control.submit_lock:
            if not self.slot.counts(sequence):
                return  # a restore that has come since it was accepted has dropped it
            self.book.clear_left_overs()
            self._urgent = True
            if self.admission is not None:
                self.admission.tick_soon()
            if self._interrupts.ask(
                    sequence, time.monotonic_ns(), self.control.progress.step):
                self._drop_running()
        self.wake()

    def announce(self, subgoal: Subgoal) -> None:
        """Publish a subgoal that the slot has accepted; an interrupt takes effect at once."""
        self.control.outputs.event('subgoal', str(subgoal.sequence), subgoal.record())
        if subgoal.interrupt:
            self._interrupt(subgoal.sequence)
        self.control.outputs.status()

    def restored(self, pending: Pending | None = None) -> int:
        """The session's state was replaced; under the submit lock.

        :return: sequence of the subgoal that was dropped with it, 0 for none.
        """
        seed, progress = self.book.seed, self.control.progress
        try:
            # Behind every reply and before the next tick: nobody waits for this read.
            seed = partial(self.session.lane.call(self.seed_now).result, 0.0)
        except LaneError:
            pass  # the lane is gone, no tick will ask
        self.book.restored(seed, pending or Pending())
        self._interrupts.void()
        return self.slot.restored(episode=progress.episode, epoch=progress.epoch)

    def seed_now(self) -> int:
        """Read the seed from the session's state; lane thread."""
        return int(self.session.buffers['seed'].row(0))

    def write(self, **changes: Any) -> None:
        """Have the next committed tick take over fields of ``Pending``."""
        with self.control.submit_lock:
            self.book.pending = replace(self.book.pending, **changes)

    def reading(self, observation: Observation) -> RosReading:
        """Return ROS time for judging an observation; in lock-step its own newest stamp."""
        now = observation.newest_stamp_ns if self.lock_step else self._now_ns()
        return RosReading(now, now > 0, False)

    def prepare_fork(
        self, observation: Observation, verdicts: tuple[StreamVerdict, ...]
    ) -> Prepared:
        """Return the input of a branched tick; between ``begin_change`` and ``end_change``."""
        with self.control.submit_lock:
            resync = self.control.holds.phase is not Phase.RUN
            start = self.control.player.begin_tick()
            self._tick_step = start.at_step
            return self.book.prepare(observation, verdicts, start, 0 if resync else self._delay(),
                                     resync, reuse_vision=self._parameters['reuse_vision'])

    def play(self, chunk: Chunk, prepared: Prepared) -> None:
        """Put a committed branch into play as if a tick had made it; under the submit lock."""
        self._finish(chunk, prepared, self.control.holds.may_tick)

    def taken_in(self, timeout_s: float) -> None:
        """Wait until what the last tick has committed is noted here; ``changing``, verb threads.

        :raises LaneTimeout: it was not in time.
        """
        if not self._idle.wait(timeout_s):
            raise LaneTimeout(f'the running tick did not end within {timeout_s:g} s; the device '
                              'may be wedged')

    def settle(self, timeout_s: float) -> None:
        """Wait until a tick dropped by a hold or interrupt has left the lane; verb threads.

        :raises LaneTimeout: it did not in time.
        """
        dropping = self._dropping
        if dropping is not None and not dropping.done():
            try:
                dropping.result(timeout_s)
            except FutureTimeout:
                raise LaneTimeout(f'the running segment did not end within {timeout_s:g} s; '
                                  'the device may be wedged') from None

    # -- ticks ----------------------------------------------------------------------------------

    def tick_now(self, observed_after_ns: int, timeout_s: float) -> bool:
        """Lock-step: wait for the observation and tick if one is due; True when it ticked.

        :raises FlashrtError: why no command can be given.
        """
        observation = self.observations.wait_for(observed_after_ns, timeout_s)
        reading = RosReading(observation.newest_stamp_ns, observation.newest_stamp_ns > 0, False)
        self._faults.review(reading)
        holds = self.control.holds
        if holds.phase not in (Phase.RUN, Phase.RESYNC):
            raise WrongState(
                f'the executor is in {holds.phase.value} ({", ".join(holds.causes)}); '
                'call ~/reset, or ~/resume after a latched hold')
        if not self._tick_due():
            return False
        try:
            return self._tick(observation, reading)
        except ObservationError as error:
            self._faults.observation(error)
            raise
        except (ActionError, TickDropped):
            raise
        except Exception as error:
            self.fault(error)
            raise

    def _loop(self) -> None:
        while self.active:
            try:
                self._round()
            except ObservationError as error:
                self._faults.observation(error)
                self._wake.wait(_IDLE_WAIT_S)
            except (ActionError, TickDropped):
                pass  # held and told where it was found
            except Exception as error:
                self.fault(error)

    def _round(self) -> None:
        self._wake.clear()
        reading = self._clock.read()
        if reading.jumped_back:
            self.observations.clear()
            self.control.hold(
                Cause.CLOCK, message='ROS time jumped back; the observations were cleared')
        self._faults.review(reading)
        if self._tick_due():
            observation = self.observations.newest()
            if self.control.holds.phase is Phase.RUN or self._is_fresh(observation):
                self._tick(observation, replace(reading, now_ns=self._now_ns()))
                return
        if self.watch.probe_due(time.monotonic_ns()):
            self._faults.probe()
            self.watch.finished(time.monotonic_ns())
            self.control.outputs.heartbeat()
        self._wake.wait(_IDLE_WAIT_S)

    def _is_fresh(self, observation: Observation) -> bool:
        return (len(observation.samples) == len(self.observations.streams)
                and observation.oldest_received_ns >= self.control.fresh_after_ns)

    def _tick_due(self) -> bool:
        phase = self.control.holds.phase
        if not self.active or self.control.changing or phase not in (Phase.RUN, Phase.RESYNC):
            return False
        player = self.control.player
        return (phase is Phase.RESYNC or self._urgent or player.exhausted
                or (not self._in_turn and player.steps_executed - self._tick_step
                    >= self._parameters['tick_period_steps']))

    def _stepped(self) -> None:
        if self._tick_due():
            self._wake.set()

    def _tick(self, observation: Observation, reading: RosReading) -> bool:
        """Run one tick to its end; True when its chunk is played.

        :raises FlashrtError: why it was not; an action that failed is held already.
        """
        control = self.control
        begun = time.perf_counter()
        verdicts = self.ages.judge(observation.stamps_ns, reading)
        error = first_error(verdicts)
        if error is not None:
            raise error
        with control.submit_lock:
            if control.changing or not control.holds.may_tick:
                return False
            generation = control.generation
            resync = control.holds.phase is Phase.RESYNC
            if resync and not self.lock_step and not self._is_fresh(observation):
                return False  # it was taken before a hold or reset that has come since
            start = control.player.begin_tick()
            prepared = self.book.prepare(
                observation, verdicts, start, 0 if resync else self._delay(), resync,
                self._parameters['best_of'], self._parameters['reuse_vision'])
            collected = time.perf_counter()
            future = self._running = self.session.submit(prepared.tick_input)
            self._idle.clear()
            self._tick_step, self._urgent = start.at_step, False
            cut = self._interrupts.cut
            self._interrupts.submitted(prepared.subgoal_sequence, prepared.started_ns)
            self.watch.started(prepared.started_ns)
            admission = self.admission
            if admission is not None:
                admission.tick_began(None if resync else self._next_due_ns(prepared))
        submitted = time.perf_counter()
        try:
            try:
                prepared.digests.update(observation.digests())
                chunk = self._await(future)
            finally:
                if admission is not None:
                    admission.tick_ended()
            inferred = time.perf_counter()
            played = self._take_in(chunk, prepared, generation, cut)
        finally:
            with control.submit_lock:
                self._running = None
                self._interrupts.ended()
            self._idle.set()
        if played is not None:
            self.times.record((begun, collected, submitted, inferred, time.perf_counter()),
                              prepared, chunk)
        return bool(played)

    def _take_in(
        self, chunk: Chunk, prepared: Prepared, generation: int, cut: int
    ) -> bool | None:
        """Note what a tick has committed and play it where it is wanted; None when it is not.

        Whatever becomes of its chunk, a tick that came back is a boundary to go back to, and one
        that was judged a sign of life.
        """
        control, watch = self.control, self.watch
        try:
            with control.submit_lock:
                self._running = None
                self._interrupts.ended()
                # A tick that began before a hold, or before the resync after it, saw an older
                # robot; one that began before an interrupt had an older goal.
                wanted = generation == control.generation and control.holds.may_tick and (
                    prepared.resync == (control.holds.phase is Phase.RESYNC)
                ) and cut == self._interrupts.cut
                played = self._finish(chunk, prepared, wanted)
        except ActionError:
            watch.finished(time.monotonic_ns())
            raise
        finally:
            self.session.lane.call(lambda: self._mark(prepared.start.epoch))
        if not wanted:
            self.counters.add('results_dropped')
            watch.dropped()
            return None
        if watch.finished(time.monotonic_ns()) and watch.misses_in_a_row >= watch.error_after:
            control.hold(Cause.TICK_DEADLINE,
                         message=f'{watch.misses_in_a_row} ticks in a row were late')
        return played

    def expects_ticks(self) -> bool:
        """Whether the next tick comes by the clock; any thread."""
        return self.active and not self.lock_step and self.control.holds.phase is Phase.RUN

    def _next_due_ns(self, prepared: Prepared) -> int:
        period_s = self._parameters['tick_period_steps'] * self.embodiment.step_period_s
        return prepared.started_ns + int(period_s * NANOSECONDS)

    def _delay(self) -> int:
        player, horizon = self.control.player, self.ports.horizon
        told = not self.lock_step and not self._in_turn
        delay = min(player.expected_delay_steps, horizon - 1) if told else 0
        period = self._parameters['tick_period_steps']
        player.timing.planned_age = horizon if self._in_turn else period + delay
        return delay

    def _await(self, future: Future[Chunk]) -> Chunk:
        limit = self._parameters['device_timeout_s']
        try:
            return future.result(limit)
        except TickDropped:
            self.counters.add('ticks_dropped')
            self.watch.dropped()
            raise
        except (FutureTimeout, LaneTimeout) as error:
            raise DeviceLost(f'a tick did not end within {limit:g} s ({error!r}); the process '
                             'exits to be respawned') from error

    def _finish(self, chunk: Chunk, prepared: Prepared, wanted: bool) -> bool:
        """Put a chunk into play when it is wanted, then tell of it; under the submit lock.

        The command leaves before anything else is published. A committed tick always tells what it
        took in, played or not: a replay needs it.
        """
        control, outputs = self.control, self.control.outputs
        committed = prepared.start.epoch == control.progress.epoch
        if committed:
            self.book.committed(prepared, chunk)
            control.progress.tick = chunk.tick
        try:
            played = self._play(chunk, prepared) if wanted else None
            answer = None if played is None else self._interrupts.played(
                chunk.subgoal_sequence, time.monotonic_ns(), control.progress.step)
        finally:
            if committed:
                outputs.tick_input(chunk, prepared)
        if played is None:
            return False
        outputs.chunk(chunk, prepared, played.actions, played.first_step)
        outputs.heartbeat()
        control.emit(played.transition)
        if answer is not None:
            outputs.event('interrupt', str(answer.sequence), asdict(answer))
        outputs.status()
        return control.holds.phase is Phase.RUN

    def _play(self, chunk: Chunk, prepared: Prepared) -> InPlay | None:
        control = self.control
        running = control.holds.phase is Phase.RUN
        try:
            return control.put_into_play(
                self.book.robot_actions(chunk, prepared), prepared, running)
        except ActionError as error:
            self._faults.action(error, resync=not running)
            raise

    def _mark(self, epoch: int) -> None:
        # After a verb the boundary is no longer the one this tick has committed.
        if epoch == self.control.progress.epoch and not self.control.changing:
            self._take_mark()

    # -- what goes wrong ------------------------------------------------------------------------

    def fault(self, error: Exception) -> None:
        """Hold for an unexpected error; a lost device asks for the end of the process."""
        self.watch.dropped()
        lost = self._faults.unexpected(error)
        if lost is not None:
            self.active = False
            self.control.outputs.device_lost(lost)

    def _drop_running(self) -> None:
        """Drop the running tick at its segment's end; under the submit lock, waits for nothing."""
        if self._running is None or self._running.done():
            return
        try:
            self._dropping = self.session.lane.at_segment_end(lambda: None, 'hold')
        except LaneError:
            pass  # a verb waits there already; the result will be dropped by its generation
