"""Messages to arrays and back: images, joint states, trajectories, stamps, digests.

Pure functions and small holders of preallocated messages. A reader takes any object with the
attributes of the named message, so this module imports no message type until an encoder is made.
"""

from array import array
import base64
from collections.abc import Mapping
from collections.abc import Sequence
import hashlib
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashrt_core.errors import BadJoints
from flashrt_core.errors import BadSize
from flashrt_core.errors import ConfigError
from flashrt_core.errors import ObservationNonFinite
from flashrt_ros.clocks import NANOSECONDS
from flashrt_ros.embodiment import Embodiment

Vector = NDArray[np.float64]
_LARGEST = 1e30  # of a position; leaves room for the embodiment's scale within float32

_CDR_HEADER = 4  # bytes: representation and options
_STAMP = struct.Struct('<iI')
_MARK = 1.2345678901234567e-200


def stamp_to_ns(stamp: Any) -> int:
    """Return a builtin_interfaces/Time or Duration as nanoseconds."""
    return int(stamp.sec) * NANOSECONDS + int(stamp.nanosec)


def fill_stamp(stamp: Any, nanoseconds: int) -> None:
    """Write nanoseconds into a builtin_interfaces/Time or Duration in place.

    :raises ConfigError: when they do not fit into the message (32 bit seconds, not negative).
    """
    seconds, rest = divmod(nanoseconds, NANOSECONDS)
    if not 0 <= seconds < 2**31:
        raise ConfigError(f'{nanoseconds} ns does not fit a ROS time; give 0 to {2**31 - 1} s')
    stamp.sec, stamp.nanosec = int(seconds), int(rest)


def digest(values: NDArray[Any]) -> int:
    """Return the first 8 bytes, little endian, of BLAKE2b over the array's bytes in C order."""
    data = np.ascontiguousarray(values)
    return int.from_bytes(hashlib.blake2b(data.data).digest()[:8], 'little')


class JointReader:
    """Reads sensor_msgs/JointState by name into the embodiment's order.

    The order of names is looked up once and kept until a message brings another one. One reading
    thread.
    """

    def __init__(self, embodiment: Embodiment, *, stream: str = 'joint_states') -> None:
        """Bind to a robot; ``stream`` is what messages of errors call the topic."""
        self._robot = embodiment
        self._stream = stream
        self._names: list[str] | None = None
        self._order: NDArray[np.intp] = np.zeros(0, dtype=np.intp)

    def read(self, message: Any) -> Vector:
        """Return positions, float64 [joints], robot units, a new array.

        Velocities and efforts are not used and may be NaN; each must be empty or as long as
        ``name``.

        :raises BadSize: when an array's length differs from that of ``name``.
        :raises BadJoints: when a joint is missing, repeated or, unless the embodiment ignores
            those, unknown.
        :raises ObservationNonFinite: when the position of a joint of the embodiment is NaN,
            infinite, or would be in the policy's float32.
        """
        names = message.name
        self._check_lengths(message, len(names))
        if names != self._names:
            self._order = self._find(names)
            self._names = list(names)
        positions = np.asarray(message.position, dtype=np.float64)[self._order]
        usable = np.abs(positions) < _LARGEST
        if not usable.all():
            joint = int(np.argmin(usable))
            raise ObservationNonFinite(
                f'{self._stream} has position {positions[joint]} for {self._robot.names[joint]}; '
                'check its encoder and driver'
            )
        return positions

    def _check_lengths(self, message: Any, count: int) -> None:
        if len(message.position) != count:
            raise BadSize(
                f'{self._stream} has {len(message.position)} positions for {count} names; publish '
                'one each'
            )
        for field in ('velocity', 'effort'):
            length = len(getattr(message, field))
            if length not in (0, count):
                raise BadSize(
                    f'{self._stream} has {length} values of {field} for {count} names; publish '
                    'one each or none'
                )

    def _find(self, names: Sequence[str]) -> NDArray[np.intp]:
        where = {name: at for at, name in enumerate(names)}
        if len(where) != len(names):
            twice = sorted({name for name in names if list(names).count(name) > 1})
            raise BadJoints(
                f'{self._stream} repeats {_listed(twice)}; let one publisher send each joint once'
            )
        missing = [name for name in self._robot.names if name not in where]
        if missing:
            raise BadJoints(
                f'{self._stream} lacks {_listed(missing)}, it has '
                f'{_listed(list(names)) or "none"}; correct joints in {self._robot.source} or the '
                'driver'
            )
        if not self._robot.ignore_unknown_joints:
            extra = [name for name in names if name not in self._robot.index]
            if extra:
                raise BadJoints(
                    f'{self._stream} has {_listed(extra)}, which {self._robot.source} does not '
                    'list; add them or set unknown_joints: ignore'
                )
        return np.array([where[name] for name in self._robot.names], dtype=np.intp)


def _listed(names: list[str], most: int = 12) -> str:
    shown = ', '.join(f'{name!r:.80}' for name in names[:most])
    return shown + (f' and {len(names) - most} more' if len(names) > most else '')


class _Serialized:
    """A serialised JointTrajectory of fixed shape whose stamp and numbers are written in place.

    The bytes are those that the middleware itself makes of a marked message; the marks say where
    its numbers lie. Converting a message of nested points anew would cost 4 us a point.
    """

    def __init__(
        self, joint_names: Sequence[str], rows: int, step_period_s: float, *, velocities: bool
    ) -> None:
        from rclpy.serialization import deserialize_message
        from rclpy.serialization import serialize_message
        from trajectory_msgs.msg import JointTrajectory
        from trajectory_msgs.msg import JointTrajectoryPoint

        joints = len(joint_names)
        marks = _MARK * (1.0 + np.arange(rows * joints * (1 + velocities)))
        message = JointTrajectory(joint_names=list(joint_names))
        for row, numbers in enumerate(marks.reshape(rows, -1)):
            point = JointTrajectoryPoint()
            point.positions = array('d', numbers[:joints].tobytes())
            point.velocities = array('d', numbers[joints:].tobytes())
            fill_stamp(point.time_from_start, round((row + 1) * step_period_s * NANOSECONDS))
            message.points.append(point)
        data = serialize_message(message)
        # CDR aligns doubles to 8 bytes, counted from behind its header. What follows the last
        # field is left over from other messages: the middleware reserves too much.
        numbers = np.frombuffer(data, '<f8', offset=_CDR_HEADER, count=(len(data) - 4) // 8)
        at = np.flatnonzero(np.isin(numbers, marks))[: marks.size]
        last = message.points[-1].time_from_start
        end = data.find(_STAMP.pack(last.sec, last.nanosec), _CDR_HEADER + 8 * int(at[-1]) + 8)
        self._data = bytearray(data[: end + _STAMP.size])
        if end < 0 or deserialize_message(bytes(self._data), JointTrajectory) != message or (
                not np.array_equal(numbers[at], marks)):
            raise ConfigError(
                'the middleware does not serialise JointTrajectory as little endian CDR; set '
                'RMW_IMPLEMENTATION to rmw_fastrtps_cpp or rmw_cyclonedds_cpp')
        self._numbers = np.frombuffer(
            self._data, '<f8', offset=_CDR_HEADER, count=(len(self._data) - _CDR_HEADER) // 8)
        self._at = at.reshape(rows, -1)

    def filled(self, numbers: Vector, stamp_ns: int) -> bytes:
        """Return the message with ``numbers`` [rows, joints (positions) + joints (velocities)]."""
        self._numbers[self._at] = numbers
        _STAMP.pack_into(self._data, _CDR_HEADER, *divmod(stamp_ns, NANOSECONDS))
        return bytes(self._data)


class TrajectoryEncoder:
    """Makes serialised trajectory_msgs/JointTrajectory messages, for ``publish`` as they are.

    A stamp of zero is read by controllers as "start now"; one in the past would make them drop
    points. One calling thread at a time for each method.
    """

    def __init__(self, joint_names: Sequence[str], *, horizon: int, step_period_s: float) -> None:
        """Serialise a template for every number of points up to ``horizon``.

        :raises ConfigError: when there is no joint, no row or no period, or the middleware's
            format is not known.
        """
        if not joint_names or horizon < 1 or not step_period_s > 0:
            raise ConfigError(
                f'trajectory of {len(joint_names)} joints, {horizon} rows, period {step_period_s} '
                's; all must be positive'
            )
        self._joints = len(joint_names)
        self._horizon = horizon
        self._period_s = step_period_s
        self._numbers = np.zeros((horizon, 2 * self._joints))
        self._chunks = [
            _Serialized(joint_names, rows, step_period_s, velocities=True)
            for rows in range(1, horizon + 1)
        ]
        self._single = _Serialized(joint_names, 1, step_period_s, velocities=False)

    def chunk(
        self, actions: Vector, *, first_step: int = 0, commanded: Vector | None = None
    ) -> bytes:
        """Return the rows from ``first_step`` on, a point per step, the first a period from now.

        Velocities are central differences over the neighbouring rows; the last one is zero, so the
        robot comes to rest where the chunk ends when no other follows.

        :param actions: float64 [horizon or fewer, joints], absolute robot units, already checked.
        :param commanded: float64 [joints], what the robot is commanded now; None takes the first
            row.
        :raises BadSize: when the shape does not fit or no row is left.
        """
        rows = np.asarray(actions, dtype=np.float64)
        if rows.ndim != 2 or rows.shape[1] != self._joints or len(rows) > self._horizon:
            raise BadSize(
                f'trajectory from actions of shape {rows.shape}; give at most [{self._horizon}, '
                f'{self._joints}]'
            )
        rows = rows[first_step:]
        count = len(rows)
        if count < 1:
            raise BadSize(
                f'trajectory from step {first_step} of {len(actions)} rows; no row is left'
            )
        numbers = self._numbers[:count]
        numbers[:, : self._joints] = rows
        velocities = numbers[:, self._joints :]
        if count > 1:
            np.subtract(rows[2:], rows[:-2], out=velocities[1:-1])
            velocities[0] = (
                2.0 * (rows[1] - rows[0]) if commanded is None else rows[1] - commanded)
            velocities[:-1] /= 2.0 * self._period_s
        velocities[-1] = 0.0
        return self._chunks[count - 1].filled(numbers, 0)

    def point(self, command: Vector, stamp_ns: int = 0) -> bytes:
        """Return one step's command, float64 [joints], to be reached after one period."""
        return self._single.filled(command, stamp_ns)


def rows_record(rows: NDArray[np.float32]) -> dict[str, Any]:
    """Return rows float32 [n, width] as JSON that keeps every bit; see ``rows_of_record``."""
    data = base64.b64encode(rows.astype('<f4').tobytes())
    return {'shape': list(rows.shape), 'float32': data.decode('ascii')}


def rows_of_record(record: Mapping[str, Any]) -> NDArray[np.float32]:
    """Return the rows that ``rows_record`` made this of."""
    data = np.frombuffer(base64.b64decode(record['float32']), '<f4')
    return data.astype(np.float32).reshape(record['shape'])


def float_field(values: NDArray[Any]) -> array:
    """Return values, row-major, as the array that a ``float32[]`` field keeps as it is."""
    return array('f', np.ascontiguousarray(values, dtype=np.float32).tobytes())


def fill_image(message: Any, image: NDArray[np.uint8], encoding: str = 'rgb8') -> None:
    """Write an image into a sensor_msgs/Image whose buffer is reused when its size fits.

    :param image: uint8 [height, width, 3] in the colour order that ``encoding`` (rgb8, bgr8)
        names.
    :raises BadSize: for another shape or dtype.
    """
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise BadSize(f'image is {image.dtype} {image.shape}; give uint8 [height, width, 3]')
    height, width, channels = image.shape
    message.height, message.width, message.encoding = height, width, encoding
    message.step, message.is_bigendian = width * channels, 0
    if not isinstance(message.data, array) or len(message.data) != image.size:
        message.data = array('B', bytes(image.size))
    np.frombuffer(message.data, dtype=np.uint8).reshape(image.shape)[:] = image
