"""Between a chunk and the robot: the guard of whole chunks, the limiter of single steps.

Pure: nothing sleeps, nothing touches ROS or the GPU. The checks of what comes in are in
observations.py and subgoals.py, the decision whether actions leave at all is in hold.py. This is
no safety-rated stop.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flashrt_core.errors import ActionJump
from flashrt_core.errors import ActionNonFinite
from flashrt_core.errors import ActionOutOfLimits
from flashrt_core.errors import ConfigError
from flashrt_ros.embodiment import Embodiment
from flashrt_ros.statistics import Counters

Vector = NDArray[np.float64]

COUNTERS = (
    'chunks_checked',
    'chunks_non_finite',
    'chunks_out_of_limits',  # refused
    'chunks_jump',  # refused: a step inside the chunk or at its seam is too large
    'actions_clamped',  # elements moved into the position limits
    'steps_limited',  # elements held back by the step limit
    'pose_gap_refused',
)


TOLERANCE = 1e-9  # of a step limit


def step_sizes(rows: Vector, before: Vector) -> Vector:
    """Return how far each row lies from the one before it, float64 [rows, joints], not negative.

    :param before: float64 [joints], what the first row follows.
    """
    moves = np.empty_like(rows)
    np.subtract(rows[0], before, out=moves[0])
    np.subtract(rows[1:], rows[:-1], out=moves[1:])
    return np.abs(moves, out=moves)


def limit_path(rows: Vector, before: Vector, step: Vector) -> int:
    """Hold each row within ``step`` of the one before, in place; return the elements held back.

    :param rows: float64 [rows, joints]; before: float64 [joints], what the first row follows.
    :param step: float64 [joints], largest move from row to row.
    """
    beyond = step_sizes(rows, before) > step * (1.0 + TOLERANCE)
    if not beyond.any():
        return 0
    limited = 0
    # A recurrence down the rows: plain floats take 0.1 us an element, numpy 5 us a row.
    for joint in np.flatnonzero(beyond.any(axis=0)):
        column, last, most = rows[:, joint].tolist(), float(before[joint]), float(step[joint])
        tolerance = most * TOLERANCE
        for at, wanted in enumerate(column):
            low, high = last - most, last + most
            last = low if wanted < low else high if wanted > high else wanted
            limited += abs(wanted - last) > tolerance
            column[at] = last
        rows[:, joint] = column
    return limited


@dataclass(frozen=True)
class GuardedChunk:
    """A chunk that may be played."""

    actions: Vector  # [horizon, joints], robot units; a new array
    clamped: int  # elements moved into the position limits
    limited: int  # elements held back by the step limit


class ActionGuard:
    """Checks whole chunks against finiteness, position limits and step limits. Tick side."""

    def __init__(self, embodiment: Embodiment, *, limits: str, counters: Counters) -> None:
        """Bind to a robot.

        :param limits: ``clamp`` moves targets into the limits and counts, ``reject`` refuses the
            chunk.
        :raises ConfigError: for another word.
        """
        if limits not in ('clamp', 'reject'):
            raise ConfigError(f'limits is {limits!r}; give clamp or reject')
        counters.declare(COUNTERS)
        self._robot = embodiment
        self._reject = limits == 'reject'
        self._counters = counters
        self._non_finite_in_a_row = 0

    @property
    def must_latch(self) -> bool:
        """Whether two chunks in a row were not finite: the hold that follows is latched."""
        return self._non_finite_in_a_row >= 2

    def reset(self) -> None:
        """Forget the run of non-finite chunks, after a restore or resume."""
        self._non_finite_in_a_row = 0

    def check(
        self, actions: Vector, *, first_step: int = 0, commanded: Vector | None = None
    ) -> GuardedChunk:
        """Check a chunk in robot units before it is played; the input is not changed.

        :param actions: float64 [horizon, joints].
        :param first_step: rows before it are past; only their finiteness is checked.
        :param commanded: float64 [joints], the last command, which the first played row follows
            within one step; None leaves the seam to the step limiter.
        :raises ActionNonFinite: NaN or infinity anywhere; see :attr:`must_latch`.
        :raises ActionOutOfLimits: a target beyond its position limits, when rejecting.
        :raises ActionJump: a step above max_step, when rejecting.
        """
        self._counters.add('chunks_checked')
        checked = np.array(actions, dtype=np.float64, order='C')
        played = checked[first_step:]
        clamped = 0
        # What lies inside is finite too: the usual chunk passes with one look at all of it.
        inside = (checked >= self._robot.minimum) & (checked <= self._robot.maximum)
        if inside.all():
            self._non_finite_in_a_row = 0
        else:
            self._check_finite(checked)
            clamped = self._clamp(played)
        limited = self._limit_steps(played, commanded)
        return GuardedChunk(checked, clamped, limited)

    def check_pose_gap(self, first: Vector, measured: Vector) -> None:
        """Refuse to begin a motion that starts too far from where the robot is.

        :param first: float64 [joints], first target; measured: float64 [joints]. Robot units.
        :raises ActionJump: naming the joint, the gap and its limit.
        """
        gap = np.abs(first - measured)
        beyond = ~(gap <= self._robot.pose_gap)
        if beyond.any():
            self._counters.add('pose_gap_refused')
            worst = int(np.argmax(beyond))
            joint = self._robot.joints[worst]
            raise ActionJump(
                f'{joint.name} would begin {gap[worst]:.4f} {joint.unit} from its measured '
                f'position {measured[worst]:.4f}, pose_gap is {joint.pose_gap}; move the robot '
                'nearer, then call ~/resume'
            )

    def _check_finite(self, actions: Vector) -> None:
        bad = ~np.isfinite(actions)
        if not bad.any():
            self._non_finite_in_a_row = 0
            return
        self._non_finite_in_a_row += 1
        self._counters.add('chunks_non_finite')
        step, joint = (int(at) for at in np.argwhere(bad)[0])
        raise ActionNonFinite(
            f'action {step} of {self._robot.names[joint]} is {actions[step, joint]}; the whole '
            'chunk is dropped; check the observation and the weights, then ~/reset'
        )

    def _clamp(self, played: Vector) -> int:
        outside = (played < self._robot.minimum) | (played > self._robot.maximum)
        clamped = int(outside.sum())
        if clamped:
            if self._reject:
                self._counters.add('chunks_out_of_limits')
                raise ActionOutOfLimits(self._describe_limit(played, outside))
            self._counters.add('actions_clamped', clamped)
            np.clip(played, self._robot.minimum, self._robot.maximum, out=played)
        return clamped

    def _limit_steps(self, played: Vector, commanded: Vector | None) -> int:
        step = self._robot.max_step
        before = played[0] if commanded is None else commanded
        if self._reject:
            moves = step_sizes(played, before)
            beyond = moves > step * (1.0 + TOLERANCE)
            if not beyond.any():
                return 0
            self._counters.add('chunks_jump')
            row, joint = (int(at) for at in np.argwhere(beyond)[0])
            raise ActionJump(
                f'{self._robot.names[joint]} moves {moves[row, joint]:.4f} '
                f'{self._robot.joints[joint].unit} in one step, max_step is {step[joint]:.4f}; '
                'retrain, raise max_step or set limits to clamp'
            )
        limited = limit_path(played, before, step)
        if limited:
            self._counters.add('steps_limited', limited)
        return limited

    def _describe_limit(self, played: Vector, outside: NDArray[np.bool_]) -> str:
        row, column = (int(at) for at in np.argwhere(outside)[0])
        joint = self._robot.joints[column]
        return (
            f'{joint.name} target {played[row, column]:.4f} {joint.unit} lies outside '
            f'{joint.minimum} to {joint.maximum}; retrain, correct the embodiment file or set '
            'limits to clamp'
        )


class StepLimiter:
    """Keeps each command within the step limit of the one before, whatever the target does.

    The target is moved into the position limits first and the step limited after, so a robot found
    outside its limits is led back at the allowed rate instead of jumping. Step thread only, except
    :meth:`rebase` while the player is held.
    """

    def __init__(self, embodiment: Embodiment, counters: Counters) -> None:
        """Start with no pose; :meth:`rebase` gives one."""
        counters.declare(COUNTERS)
        count = len(embodiment.joints)
        self._minimum, self._maximum = embodiment.minimum, embodiment.maximum
        self._full_step = embodiment.max_step
        self._step = np.array(embodiment.max_step)
        self._tolerance = embodiment.max_step * 1e-9
        self._command = np.full(count, np.nan)
        self._move = np.zeros(count)
        self._held_back = np.zeros(count)
        self._blending = False
        self._counters = counters

    @property
    def command(self) -> Vector:
        """The last command, robot units; NaN before the first rebase. A copy."""
        return self._command.copy()

    @property
    def blending(self) -> bool:
        """Whether commands still lag behind the targets after a rebase."""
        return self._blending

    def rebase(self, measured: Vector, *, speed: float = 1.0) -> None:
        """Start from the measured pose, with ``speed`` times the step limit until caught up.

        :raises ConfigError: when speed is not in (0, 1].
        """
        if not 0.0 < speed <= 1.0:
            raise ConfigError(f'resync speed is {speed}; give more than 0, at most 1')
        self._command[:] = measured
        np.multiply(self._full_step, speed, out=self._step)
        self._blending = True

    def limit(self, target: Vector, out: Vector) -> bool:
        """Write the command for this step into ``out`` and return whether it was held back.

        :param target: float64 [joints]; out: float64 [joints], may be the same array.
        :raises ActionJump: before the first rebase: the robot's pose is not known.
        :raises ActionNonFinite: when the target is not finite; the last command stays.
        """
        if self._command[0] != self._command[0]:
            raise ActionJump(
                'a command was asked before the measured pose was known; call rebase first'
            )
        np.clip(target, self._minimum, self._maximum, out=out)
        np.subtract(out, self._command, out=self._move)
        np.clip(self._move, -self._step, self._step, out=self._held_back)
        if not np.isfinite(self._held_back).all():
            raise ActionNonFinite(f'command {out} is not finite; it is not sent')
        self._command += self._held_back
        np.subtract(self._move, self._held_back, out=self._move)
        np.abs(self._move, out=self._move)
        limited = int(np.count_nonzero(self._move > self._tolerance))
        if limited:
            self._counters.add('steps_limited', limited)
        elif self._blending:
            self._blending = False
            self._step[:] = self._full_step
        out[:] = self._command
        return limited > 0
