"""Whether observations may be used: order, age, future stamps and skew between streams.

Ages are ROS time minus header stamp, in nanoseconds inside and seconds outside. Nothing here keeps
data.
"""

from collections.abc import Mapping
from dataclasses import dataclass
import threading

from flashrt_core.errors import ConfigError
from flashrt_core.errors import ObservationError
from flashrt_core.errors import ObservationFuture
from flashrt_core.errors import ObservationMissing
from flashrt_core.errors import ObservationSkewed
from flashrt_core.errors import ObservationStale
from flashrt_ros.clocks import NANOSECONDS
from flashrt_ros.clocks import RosReading
from flashrt_ros.statistics import Counters

COUNTERS = (
    'observations_accepted',
    'observations_out_of_order',  # older than the newest of the stream: dropped on arrival
    'observations_future',  # dropped on arrival or at a tick
    'observation_missing',
    'observation_stale',
    'observation_skewed',
    'clock_not_ready',
)
_ERRORS: dict[str, tuple[type[ObservationError], str]] = {
    'missing': (ObservationMissing, 'observation_missing'),
    'stale': (ObservationStale, 'observation_stale'),
    'future': (ObservationFuture, 'observations_future'),
    'skewed': (ObservationSkewed, 'observation_skewed'),
}


@dataclass(frozen=True)
class StreamVerdict:
    """What a tick may do with the newest message of one stream; goes into TickInput as it is."""

    stream: str
    stamp_ns: int  # 0 when missing
    age_s: float  # 0.0 when missing
    verdict: str  # ok, missing, stale, future, skewed
    message: str  # '' when ok, else thing, value, remedy

    @property
    def ok(self) -> bool:
        """Whether the stream may be used."""
        return self.verdict == 'ok'

    def error(self) -> ObservationError:
        """Return the error to raise or answer for a verdict that is not ok."""
        return _ERRORS[self.verdict][0](self.message)


class ObservationWatch:
    """Keeps the newest accepted stamp of each stream and judges what a tick is about to use.

    A message older than the newest of its stream can never be the fresher one, and stamps too far
    ahead never move the mark; so dropping them needs no recovery other than :meth:`clear` after a
    jump of the clock.
    """

    def __init__(
        self,
        max_age_s: Mapping[str, float],
        *,
        max_skew_s: float,
        future_tolerance_s: float,
        counters: Counters,
    ) -> None:
        """Set the limits.

        :param max_age_s: per stream the policy needs (``joint_states``, ``images/<view>``), in
            seconds.
        :param max_skew_s: largest distance between the oldest and the newest stream of one tick.
        :param future_tolerance_s: how far a stamp may lie ahead of ROS time.
        :raises ConfigError: when a limit is not positive (tolerance: negative).
        """
        counters.declare(COUNTERS)
        self._counters = counters
        self._lock = threading.Lock()
        self.set_limits(max_age_s, max_skew_s=max_skew_s, future_tolerance_s=future_tolerance_s)
        self._newest_ns = dict.fromkeys(max_age_s, -1)

    def set_limits(
        self, max_age_s: Mapping[str, float], *, max_skew_s: float, future_tolerance_s: float
    ) -> None:
        """Judge by other limits from the next message and tick on. Any thread; as at the start.

        :raises ConfigError: when one is out of range; the old ones stay.
        """
        for stream, age in max_age_s.items():
            if not 0 < age < 3600:
                raise ConfigError(f'max age of {stream} is {age} s; give more than 0, below 3600')
        if not 0 < max_skew_s < 3600:
            raise ConfigError(f'max_skew_s is {max_skew_s}; give more than 0, below 3600')
        if not 0 <= future_tolerance_s < 3600:
            raise ConfigError(f'future_tolerance_s is {future_tolerance_s}; give 0 to 3600')
        self._max_age_ns = {name: int(age * NANOSECONDS) for name, age in max_age_s.items()}
        self._max_skew_ns = int(max_skew_s * NANOSECONDS)
        self._tolerance_ns = int(future_tolerance_s * NANOSECONDS)

    @property
    def streams(self) -> tuple[str, ...]:
        """Streams a tick needs, in the order given."""
        return tuple(self._max_age_ns)

    def accept(self, stream: str, stamp_ns: int, now: RosReading) -> None:
        """Check the stamp of a message that has just arrived; call it before decoding. Any thread.

        An equal stamp is accepted: a robot may publish again at the same simulated time.

        :raises ObservationStale: older than the newest of the stream; drop the message.
        :raises ObservationFuture: too far ahead of ROS time; drop the message.
        :raises ObservationMissing: ROS time is not ready, so no stamp can be judged; drop the
            message.
        """
        if not now.ready:
            self._counters.add('clock_not_ready')
            raise ObservationMissing(_not_ready(stream))
        if stamp_ns - now.now_ns > self._tolerance_ns:
            self._counters.add('observations_future')
            raise ObservationFuture(self._future(stream, stamp_ns, now.now_ns))
        with self._lock:
            newest = self._newest_ns[stream]
            if stamp_ns < newest:
                self._counters.add('observations_out_of_order')
                raise ObservationStale(
                    f'{stream} is stamped {(newest - stamp_ns) / 1e9:.3f} s before the one '
                    'already held; it is dropped; let one publisher stamp in order'
                )
            self._newest_ns[stream] = stamp_ns
        self._counters.add('observations_accepted')

    def clear(self) -> None:
        """Forget the newest stamps, after ROS time has jumped back. Any thread."""
        with self._lock:
            self._newest_ns = dict.fromkeys(self._newest_ns, -1)

    def judge(
        self, stamps_ns: Mapping[str, int | None], now: RosReading
    ) -> tuple[StreamVerdict, ...]:
        """Judge the messages a tick is about to use: a verdict per stream, in order.

        Counts what is not ok. Tick side; keeps no state.

        :param stamps_ns: header stamp per stream; None or absent when nothing was received.
        """
        verdicts = []
        usable = [
            stamp
            for name in self._max_age_ns
            if (stamp := stamps_ns.get(name)) is not None
            and stamp - now.now_ns <= self._tolerance_ns
        ]
        newest = max(usable, default=0)
        for stream, max_age in self._max_age_ns.items():
            stamp = stamps_ns.get(stream)
            if not now.ready or stamp is None:
                message = (
                    _not_ready(stream)
                    if not now.ready
                    else (
                        f'{stream} has sent nothing yet; check that its publisher runs and the '
                        'topic is remapped'
                    )
                )
                if not now.ready:
                    self._counters.add('clock_not_ready')
                verdicts.append(self._refuse(stream, 0, 0.0, 'missing', message))
                continue
            age = now.now_ns - stamp
            if -age > self._tolerance_ns:
                kind, message = 'future', self._future(stream, stamp, now.now_ns)
            elif age > max_age:
                kind, message = 'stale', _stale(stream, stamp, age, max_age)
            elif newest - stamp > self._max_skew_ns:
                kind, message = (
                    'skewed',
                    (
                        f'{stream} lies {(newest - stamp) / 1e9:.3f} s behind the newest stream, '
                        f'the limit is {self._max_skew_ns / 1e9:.3f} s; synchronise the sensors '
                        'or raise max_skew_s'
                    ),
                )
            else:
                verdicts.append(StreamVerdict(stream, stamp, age / 1e9, 'ok', ''))
                continue
            verdicts.append(self._refuse(stream, stamp, age / 1e9, kind, message))
        return tuple(verdicts)

    def _refuse(
        self, stream: str, stamp_ns: int, age_s: float, kind: str, message: str
    ) -> StreamVerdict:
        self._counters.add(_ERRORS[kind][1])
        return StreamVerdict(stream, stamp_ns, age_s, kind, message)

    def _future(self, stream: str, stamp_ns: int, now_ns: int) -> str:
        return (
            f'{stream} is stamped {(stamp_ns - now_ns) / 1e9:.3f} s ahead of ROS time, the '
            f'tolerance is {self._tolerance_ns / 1e9:.3f} s; use one time base (use_sim_time) on '
            'both sides'
        )


def first_error(verdicts: tuple[StreamVerdict, ...]) -> ObservationError | None:
    """Return the error of the first verdict that is not ok, or None when a tick may run."""
    for verdict in verdicts:
        if not verdict.ok:
            return verdict.error()
    return None


def _not_ready(stream: str) -> str:
    return (
        f'{stream} cannot be judged while simulated time is zero or stands; start the publisher '
        'of /clock or set use_sim_time to false'
    )


def _stale(stream: str, stamp_ns: int, age_ns: int, max_age_ns: int) -> str:
    if stamp_ns == 0:
        return f'{stream} has a zero stamp; let its driver fill header.stamp'
    return (
        f'{stream} is {age_ns / 1e9:.3f} s old, the limit is {max_age_ns / 1e9:.3f} s; check the '
        'sensor, its rate and its clock'
    )
