"""From commands with a life of their own to one joint target per control period.

A command is one point (stream: go there now) or several with times (chunk: play them). When
commands fall silent the arm holds where it is; the gripper keeps its last target, so that a hold
drops nothing.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike
from numpy.typing import NDArray

from flashrt_core.errors import ActionNonFinite
from flashrt_core.errors import BadJoints
from flashrt_core.errors import BadSize
from flashrt_core.tabletop.kinematics import JOINT_NAMES

MAX_POINTS = 4096
_GRIPPER = JOINT_NAMES.index('gripper')


def read_points(names: Sequence[str], positions: ArrayLike) -> NDArray[np.float64]:
    """Return positions ``[points, joints]`` in the order of ``JOINT_NAMES`` for names in any
    order.

    :raises BadJoints: names missing, unknown or repeated.
    :raises BadSize: no points, too many, or rows of another length than the names.
    :raises ActionNonFinite: NaN or infinity.
    """
    if sorted(names) != sorted(JOINT_NAMES):
        raise BadJoints(
            f'command names the joints {list(names)}; name each of {list(JOINT_NAMES)} once'
        )
    try:
        values = np.asarray(positions, dtype=np.float64)
    except ValueError:
        values = np.empty(0)
    if values.ndim != 2 or values.shape[1] != len(names) or not 1 <= len(values) <= MAX_POINTS:
        raise BadSize(
            f'command positions of shape {values.shape}; give 1 to {MAX_POINTS} points of '
            f'{len(names)} positions, all of the same length'
        )
    if not np.isfinite(values).all():
        raise ActionNonFinite(
            f'command has {np.count_nonzero(~np.isfinite(values))} positions that are not finite; '
            f'the whole command is refused'
        )
    return values[:, [list(names).index(name) for name in JOINT_NAMES]]


class CommandPlayer:
    """Plays the newest command; one thread, or under the caller's lock. ``now_s`` is any clock
    that never goes back: steady time, or simulated time in lock-step.
    """

    def __init__(self, hold_after_s: float) -> None:
        """Hold when nothing is to be played for ``hold_after_s``."""
        self.hold_after_s = hold_after_s
        self.holds = 0
        self.clear()

    def clear(self) -> None:
        """Forget all commands, as after a new world: the arm rests until the next one."""
        self._points: NDArray[np.float64] | None = None
        self._times: NDArray[np.float64] = np.empty(0)
        self._held_at: NDArray[np.float64] | None = None
        self._quiet_from = 0.0

    @property
    def holding(self) -> bool:
        """Whether commands have fallen silent."""
        return self._held_at is not None and self._points is not None

    def accept(
        self,
        points: NDArray[np.float64],
        times_s: Sequence[float],
        start_s: float,
        now_s: float,
        rest: NDArray[np.float64],
    ) -> None:
        """Replace what is being played.

        :param points: float64 ``[points, 4]`` from ``read_points``.
        :param times_s: of the points after ``start_s``, strictly increasing; of no account for one
            point.
        :param rest: where the arm comes to rest if it brakes now, float64 ``[4]``; a first
            chunk begins there.
        :raises BadSize: times that do not increase, are not finite, or are not one per point.
        :raises BadJoints: a chunk whose last point has passed already.
        """
        times = np.asarray(times_s, dtype=np.float64)
        if len(points) == 1:
            self._points, self._times = points, np.array([now_s])
        else:
            if times.shape != (len(points),) or not np.isfinite(times).all():
                raise BadSize(
                    f'{len(points)} command points with times {times.tolist()}; '
                    f'give one finite time_from_start for each'
                )
            if times[0] < 0.0 or (np.diff(times) <= 0.0).any():
                raise BadSize(
                    f'time_from_start of the command points is {times.tolist()} s; '
                    f'it must increase from point to point and not be negative'
                )
            if start_s + times[-1] < now_s:
                raise BadJoints(
                    f'command ended {now_s - start_s - times[-1]:.3f} s ago; send it in time, '
                    f'or with a zero stamp to start now'
                )
            times = start_s + times
            first = self.target(now_s, rest) if self._points is not None else rest
            ahead = times > now_s
            self._points = np.vstack([first, points[ahead]]) if ahead.any() else points[-1:]
            self._times = np.concatenate([[now_s], times[ahead]]) if ahead.any() else times[-1:]
        self._held_at = None
        self._quiet_from = float(self._times[-1])

    def target(self, now_s: float, rest: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the joint target now, float64 ``[4]``; linear between the points of a chunk.

        After ``hold_after_s`` of silence since the last point the target is ``rest`` of that
        moment and stays there.
        """
        if self._held_at is None and (
            self._points is None or now_s - self._quiet_from > self.hold_after_s
        ):
            self._held_at = rest.copy()
            if self._points is not None:
                self._held_at[_GRIPPER] = self._points[-1, _GRIPPER]
                self.holds += 1
        if self._held_at is not None:
            return self._held_at
        assert self._points is not None
        if len(self._points) == 1:
            return self._points[0]
        return np.array(
            [np.interp(now_s, self._times, self._points[:, joint]) for joint in range(4)]
        )
