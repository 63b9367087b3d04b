"""Two clocks with two names: ROS time for the age of data, steady time for deadlines.

ROS time may be simulated: it is zero until the first ``/clock`` message and may jump back when a
bag or a simulation restarts. Steady time (CLOCK_MONOTONIC) does neither and is never compared with
a header stamp.
"""

from collections.abc import Callable
import ctypes
from dataclasses import dataclass
import errno
import os
import time
from typing import Protocol

from flashrt_core.errors import ConfigError
from flashrt_core.errors import LaneError

NANOSECONDS = 1_000_000_000


class SteadyClock(Protocol):
    """What the step thread needs of a clock; tests give a simulated one."""

    def now_ns(self) -> int:
        """Return steady time in nanoseconds."""
        ...

    def sleep_until_ns(self, deadline_ns: int) -> None:
        """Return at the deadline or soon after; at once when it has passed."""
        ...


class _Timespec(ctypes.Structure):
    _fields_ = [('tv_sec', ctypes.c_long), ('tv_nsec', ctypes.c_long)]


class MonotonicClock:
    """CLOCK_MONOTONIC with absolute sleeps (clock_nanosleep), so that errors do not add up.

    Where the C library has no clock_nanosleep the sleep is a relative one, computed once per call.
    Each sleeping thread owns its own instance. The GIL is released while sleeping.
    """

    _TIMER_ABSTIME = 1

    def __init__(self) -> None:
        """Look up clock_nanosleep in the C library of this process."""
        self._request = _Timespec()
        self._nanosleep = None
        try:
            self._nanosleep = ctypes.CDLL(None, use_errno=False).clock_nanosleep
        except (AttributeError, OSError):
            return
        self._nanosleep.argtypes = [
            ctypes.c_int,
            ctypes.c_int,
            ctypes.POINTER(_Timespec),
            ctypes.c_void_p,
        ]
        self._nanosleep.restype = ctypes.c_int

    def now_ns(self) -> int:
        """Return CLOCK_MONOTONIC in nanoseconds. Any thread."""
        return time.monotonic_ns()

    def sleep_until_ns(self, deadline_ns: int) -> None:
        """Sleep until ``deadline_ns``, not shortened by a signal. Owner thread only.

        :raises LaneError: when the kernel refuses the request.
        """
        if self._nanosleep is None:
            left = deadline_ns - time.monotonic_ns()
            if left > 0:
                time.sleep(left / NANOSECONDS)
            return
        self._request.tv_sec, self._request.tv_nsec = divmod(max(deadline_ns, 0), NANOSECONDS)
        while True:
            result = self._nanosleep(
                time.CLOCK_MONOTONIC, self._TIMER_ABSTIME, ctypes.byref(self._request), None
            )
            if result == 0:
                return
            if result != errno.EINTR:
                raise LaneError(
                    f'clock_nanosleep until {deadline_ns} ns failed with {os.strerror(result)}; '
                    'give a deadline in CLOCK_MONOTONIC nanoseconds'
                )


@dataclass(frozen=True)
class RosReading:
    """One look at ROS time."""

    now_ns: int
    ready: bool  # False while simulated time is zero or stands: no stamp can be judged
    jumped_back: bool  # True once for each jump back: clear what was observed and hold


class RosClock:
    """ROS time with readiness and jump-back detection over a function that returns nanoseconds.

    A jump is seen by comparing reads, and may be reported too (:meth:`jumped`, from rclpy's jump
    callback), so a restart of ``/clock`` that falls between two reads and ends later than the last
    one is not missed.
    """

    def __init__(
        self, now_ns: Callable[[], int], *, jump_back_tolerance_s: float = 0.0,
        still_limit_s: float = 0.0, steady_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Wrap a clock.

        :param now_ns: e.g. ``lambda: node.get_clock().now().nanoseconds``.
        :param jump_back_tolerance_s: steps back up to this size are not called a jump (a
            disciplined wall clock steps back by microseconds); 0 for simulated time.
        :param still_limit_s: a clock that stands longer is not ready: while the simulator sleeps
            or is gone nothing grows old, so no age would tell; 0: never look.
        :raises ConfigError: when the tolerance is negative.
        """
        if not jump_back_tolerance_s >= 0.0:
            raise ConfigError(
                f'jump_back_tolerance_s is {jump_back_tolerance_s}; give 0 or a positive number'
            )
        self._now_ns = now_ns
        self._tolerance_ns = int(jump_back_tolerance_s * NANOSECONDS)
        self._still_ns = int(still_limit_s * NANOSECONDS)
        self._steady_ns = steady_ns
        self._last_ns, self._moved_ns = -1, 0
        self._newest_ns = 0
        self._reported = False
        self.jumps_back = 0

    def jumped(self) -> None:
        """Note a jump back that rclpy reported; the next read shows it. Any thread."""
        self._reported = True

    def read(self) -> RosReading:
        """Return ROS time and whether it is ready and has jumped back since the last read.

        One reading thread; another thread calls ``now_ns`` of its own clock instead.
        """
        now = self._now_ns()
        jumped = self._newest_ns - now > self._tolerance_ns
        if self._reported:
            self._reported = False
            jumped = jumped or self._newest_ns > 0
        if jumped:
            self.jumps_back += 1
            self._newest_ns = now
        self._newest_ns = max(self._newest_ns, now)
        if now != self._last_ns:
            self._last_ns, self._moved_ns = now, self._steady_ns()
        stands = self._still_ns > 0 and self._steady_ns() - self._moved_ns > self._still_ns
        return RosReading(now_ns=now, ready=now > 0 and not stands, jumped_back=jumped)
