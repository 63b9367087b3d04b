"""What goes wrong around a tick: which hold it means, and when that hold is over."""

from concurrent.futures import TimeoutError as FutureTimeout
import time
import traceback
from typing import Any

from flashrt_core.errors import ActionError
from flashrt_core.errors import ActionJump
from flashrt_core.errors import DeviceLost
from flashrt_core.errors import FlashrtError
from flashrt_core.errors import LaneError
from flashrt_core.errors import ObservationError
from flashrt_core.policies.protocol import Session
from flashrt_ros.clocks import RosReading
from flashrt_ros.executor_control import Control
from flashrt_ros.executor_observation import ObservationBuffer
from flashrt_ros.hold import Cause
from flashrt_ros.observations import first_error
from flashrt_ros.observations import ObservationWatch
from flashrt_ros.statistics import Counters
from flashrt_ros.subgoals import FAILED
from flashrt_ros.subgoals import SubgoalSlot
from flashrt_ros.subgoals import TIMED_OUT

# Holds that end by themselves, through resync, once the observations can be used.
PASSING = (Cause.OBSERVATION, Cause.CLOCK, Cause.NON_FINITE, Cause.OUT_OF_LIMITS,
           ActionJump.code, Cause.TICK_DEADLINE, Cause.STALLED, Cause.EXHAUSTED, Cause.FAULT)
# Holds of the executor's own that fail the subgoal in force where they are latched.
FAILING = (*PASSING, Cause.POSE_GAP)


class Faults:
    """Turns errors into holds and lets passing holds go; tick side."""

    def __init__(
        self,
        control: Control,
        session: Session,
        observations: ObservationBuffer,
        ages: ObservationWatch,
        slot: SubgoalSlot,
        counters: Counters,
        parameters: Any,
    ) -> None:
        """Take the parts that are looked at."""
        self._control, self._session = control, session
        self._observations, self._ages, self._slot = observations, ages, slot
        self._counters, self._parameters = counters, parameters
        self._played_at_fault = -1
        control.on_hold = self._held

    def review(self, reading: RosReading) -> None:
        """Hold for what has become true and let go what is over."""
        causes = self._control.holds.causes
        overdue = self._slot.overdue(time.monotonic_ns())
        if overdue and Cause.SUBGOAL_DEADLINE not in causes:
            self._control.hold(Cause.SUBGOAL_DEADLINE,
                               message='no newer subgoal came within its deadline_s')
            self._control.outputs.outcome(
                overdue, TIMED_OUT,
                'its deadline_s has passed; the robot holds until the next subgoal')
        elif Cause.SUBGOAL_DEADLINE in causes and not overdue:
            self._control.clear(Cause.SUBGOAL_DEADLINE)
        passing = [cause for cause in PASSING if cause in causes]
        if passing and first_error(self._ages.judge(
                self._observations.newest().stamps_ns, reading)) is None:
            for cause in passing:
                self._control.clear(cause)

    def _held(self, cause: str, latched: bool, message: str) -> None:
        """Tell that the subgoal in force has failed when a hold will not end by itself."""
        ill = cause == Cause.POISONED or (latched and cause in FAILING)
        in_force = self._slot.in_force  # read once: a tick or a restore may change it meanwhile
        if ill and in_force:
            self._control.outputs.outcome(
                in_force, FAILED,
                f'the robot holds for {cause} and needs help{": " if message else ""}{message}')

    def observation(self, error: ObservationError) -> None:
        """Hold until the observations can be used."""
        self._control.hold(Cause.OBSERVATION, message=f'[{error.code}] {error}')

    def action(self, error: ActionError, resync: bool) -> None:
        """Hold for a refused chunk; under the submit lock."""
        gap = isinstance(error, ActionJump) and resync
        self._control.outputs.event('refused', error.code, {'message': str(error)})
        self._control.hold_locked(
            Cause.POSE_GAP if gap else error.code,
            latch=gap or self._control.guard.must_latch, message=f'[{error.code}] {error}')

    def unexpected(self, error: Exception) -> FlashrtError | None:
        """Hold for any other error; returns it when it means that the device is lost."""
        self._counters.add('faults')
        lost = isinstance(error, DeviceLost) or self._session.lane.fault is not None
        code = error.code if isinstance(error, FlashrtError) else type(error).__name__
        told = str(error) if isinstance(error, FlashrtError) else ''.join(
            traceback.format_exception(error))
        self._control.outputs.event('fault', code, {'message': told})
        # A second one without a chunk played between them will not go away by itself.
        again = self._control.ticks_played == self._played_at_fault
        self._played_at_fault = self._control.ticks_played
        self._control.hold(Cause.FAULT, latch=lost or again, message=f'[{code}] {error}')
        if not lost:
            return None
        return error if isinstance(error, FlashrtError) else DeviceLost(repr(error))

    def probe(self) -> None:
        """Ask the lane for a sign of life.

        :raises DeviceLost: it did not answer in time.
        """
        limit = self._parameters['device_timeout_s']
        try:
            self._session.lane.call(lambda: None).result(limit)
        except (LaneError, FutureTimeout) as error:
            raise DeviceLost(f'the lane did not answer within {limit:g} s ({error!r}); the '
                             'process exits to be respawned') from error
