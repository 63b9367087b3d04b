"""Tests of flashrt_ros.conversions with real messages."""

import hashlib

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest
import yaml

from flashrt_core.errors import BadJoints
from flashrt_core.errors import BadSize
from flashrt_core.errors import ConfigError
from flashrt_core.errors import ObservationNonFinite
from flashrt_ros.conversions import digest
from flashrt_ros.conversions import fill_image
from flashrt_ros.conversions import fill_stamp
from flashrt_ros.conversions import float_field
from flashrt_ros.conversions import JointReader
from flashrt_ros.conversions import stamp_to_ns
from flashrt_ros.conversions import TrajectoryEncoder
from flashrt_ros.embodiment import parse_embodiment

messages = pytest.importorskip('sensor_msgs.msg')
Time = pytest.importorskip('builtin_interfaces.msg').Time
NAN = float('nan')


def robot(names=('a', 'b', 'c'), **top):
    joints = [
        {'name': name, 'unit': 'rad', 'position': {'min': -3, 'max': 3}, 'max_velocity': 1.0}
        for name in names
    ]
    return parse_embodiment(yaml.safe_dump({
        'format': 1, 'name': 'arm', 'control_rate_hz': 50.0, 'pose_gap': 0.3, 'joints': joints,
        **top}), source='arm.yaml')


def joint_state(**values):
    return messages.JointState(
        name=list(values), position=[float(value) for value in values.values()])


@given(st.permutations(['a', 'b', 'c']))
def test_joints_in_any_order_give_the_same_state(names):
    value = {'a': 1.0, 'b': 2.0, 'c': 3.0}
    read = JointReader(robot()).read(joint_state(**{name: value[name] for name in names}))
    assert read.dtype == np.float64 and read.tolist() == [1.0, 2.0, 3.0]


def test_an_order_that_changes_between_messages_is_followed():
    reader = JointReader(robot())
    for names in ('abc', 'cab', 'cab', 'bca'):
        message = joint_state(**{name: ord(name) for name in names})
        assert reader.read(message).tolist() == [97.0, 98.0, 99.0]


def test_a_missing_joint_is_named_with_those_received():
    with pytest.raises(BadJoints, match=r"lacks 'c', it has 'a', 'b'"):
        JointReader(robot()).read(joint_state(a=1, b=2))


def test_an_empty_message_lacks_every_joint():
    with pytest.raises(BadJoints, match='it has none'):
        JointReader(robot()).read(messages.JointState())


def test_a_repeated_joint_is_refused_even_with_equal_values():
    message = messages.JointState(name=['a', 'b', 'c', 'b'], position=[1.0, 2.0, 3.0, 2.0])
    with pytest.raises(BadJoints, match=r"repeats 'b'"):
        JointReader(robot()).read(message)


def test_an_unknown_joint_is_refused_unless_the_embodiment_ignores_those():
    message = joint_state(a=1, wheel=NAN, b=2, c=3)
    with pytest.raises(BadJoints, match=r"'wheel', which arm.yaml does not list"):
        JointReader(robot()).read(message)
    assert JointReader(robot(unknown_joints='ignore')).read(message).tolist() == [1.0, 2.0, 3.0]


def test_a_refused_order_is_refused_again():
    reader = JointReader(robot())
    for _ in range(2):
        with pytest.raises(BadJoints):
            reader.read(joint_state(a=1, b=2))


@pytest.mark.parametrize('count', [0, 2, 4])
def test_positions_that_are_not_one_per_name_are_refused(count):
    message = messages.JointState(name=['a', 'b', 'c'], position=[0.0] * count)
    with pytest.raises(BadSize, match=f'{count} positions for 3 names'):
        JointReader(robot()).read(message)


@pytest.mark.parametrize('field', ['velocity', 'effort'])
def test_velocities_and_efforts_may_be_nan_or_absent_but_not_of_another_length(field):
    message = joint_state(a=1, b=2, c=3)
    setattr(message, field, [NAN] * 3)
    assert JointReader(robot()).read(message).tolist() == [1.0, 2.0, 3.0]
    setattr(message, field, [0.0] * 2)
    with pytest.raises(BadSize, match=f'2 values of {field}'):
        JointReader(robot()).read(message)


@pytest.mark.parametrize('value', [NAN, float('inf'), -float('inf')])
def test_a_position_that_is_not_finite_is_refused_by_name(value):
    with pytest.raises(ObservationNonFinite, match='for b; check its encoder'):
        JointReader(robot()).read(joint_state(a=1, b=value, c=3))


class Decoded:
    """An encoder whose serialised messages are decoded by rclpy."""

    def __init__(self, names, **options):
        self._encoder = TrajectoryEncoder(names, **options)

    def chunk(self, *args, **options):
        return self._decode(self._encoder.chunk(*args, **options))

    def point(self, *args):
        return self._decode(self._encoder.point(*args))

    @staticmethod
    def _decode(data):
        assert isinstance(data, bytes)
        message_type = pytest.importorskip('trajectory_msgs.msg').JointTrajectory
        return pytest.importorskip('rclpy.serialization').deserialize_message(data, message_type)


def encoder(horizon=5, joints=2):
    return Decoded(['a', 'b', 'c'][:joints], horizon=horizon, step_period_s=0.02)


def test_a_chunk_becomes_a_trajectory_with_strictly_increasing_times():
    message = encoder().chunk(np.arange(10.0).reshape(5, 2))
    times = [stamp_to_ns(point.time_from_start) for point in message.points]
    assert times == [20_000_000, 40_000_000, 60_000_000, 80_000_000, 100_000_000]
    assert message.joint_names == ['a', 'b']
    assert stamp_to_ns(message.header.stamp) == 0
    assert [list(point.positions) for point in message.points] == [
        [0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


@given(st.floats(1e-4, 10.0), st.integers(1, 60))
def test_times_increase_strictly_for_any_period(period, horizon):
    message = Decoded(['a'], horizon=horizon, step_period_s=period).chunk(
        np.zeros((horizon, 1)))
    times = [stamp_to_ns(point.time_from_start) for point in message.points]
    assert times[0] > 0 and (np.diff(times) > 0).all()


def test_velocities_are_central_differences_and_the_last_one_is_zero():
    message = encoder().chunk(np.array([[0, 0], [1, 0], [4, 0], [9, 0], [16, 0]]) * 0.02)
    assert [point.velocities[0] for point in message.points] == pytest.approx([1, 2, 4, 6, 0])
    assert list(message.points[-1].velocities) == [0.0, 0.0]


def test_the_first_velocity_looks_back_to_what_is_commanded():
    actions = np.array([[1.0, 0.0], [2.0, 0.0]]) * 0.02
    message = encoder().chunk(actions, commanded=np.array([-0.02, 0.0]))
    assert message.points[0].velocities[0] == pytest.approx(1.5)


def test_past_steps_are_left_out_and_times_start_anew():
    message = encoder().chunk(np.arange(10.0).reshape(5, 2), first_step=3)
    assert [list(point.positions) for point in message.points] == [[6, 7], [8, 9]]
    assert stamp_to_ns(message.points[0].time_from_start) == 20_000_000
    assert message.points[0].velocities[0] == pytest.approx(100.0)
    assert len(encoder().chunk(np.zeros((5, 2))).points) == 5


def test_a_shorter_chunk_after_a_longer_one_leaves_nothing_behind():
    encode = encoder()
    encode.chunk(np.arange(10.0).reshape(5, 2) ** 2)
    message = encode.chunk(np.zeros((2, 2)))
    assert [list(point.velocities) for point in message.points] == [[0, 0], [0, 0]]


def test_a_stream_command_is_one_point_without_velocities():
    message = encoder().point(np.array([0.5, -0.5]))
    assert len(message.points) == 1
    assert list(message.points[0].positions) == [0.5, -0.5]
    assert len(message.points[0].velocities) == 0
    assert stamp_to_ns(message.points[0].time_from_start) == 20_000_000


@pytest.mark.parametrize(('shape', 'first'), [((6, 2), 0), ((5, 3), 0), ((5,), 0), ((5, 2), 5)])
def test_actions_that_do_not_fit_the_trajectory_are_refused(shape, first):
    with pytest.raises(BadSize):
        encoder().chunk(np.zeros(shape), first_step=first)


def test_an_empty_trajectory_is_refused_at_configure():
    with pytest.raises(ConfigError):
        TrajectoryEncoder([], horizon=5, step_period_s=0.02)


@given(st.lists(st.text('ab_c', min_size=1, max_size=9), min_size=1, max_size=5, unique=True),
       st.integers(1, 6), st.integers(0, 2**31 - 1))
def test_a_filled_message_is_what_rclpy_makes_of_the_same_fields(names, horizon, stamp_ns):
    rclpy_serialization = pytest.importorskip('rclpy.serialization')
    encode = Decoded(names, horizon=horizon, step_period_s=0.02)
    actions = np.random.default_rng(1).normal(size=(horizon, len(names)))
    message = encode.chunk(actions)
    assert message.joint_names == names and len(message.points) == horizon
    assert np.array_equal([point.positions for point in message.points], actions)
    assert all(not point.accelerations and not point.effort for point in message.points)
    again = rclpy_serialization.deserialize_message(
        rclpy_serialization.serialize_message(message), type(message))
    assert again == message
    point = encode.point(actions[0], stamp_ns)
    assert stamp_to_ns(point.header.stamp) == stamp_ns
    assert list(point.points[0].positions) == list(actions[0])


def test_a_serialised_trajectory_ends_with_its_last_field():
    encode = TrajectoryEncoder(['a', 'b'], horizon=5, step_period_s=0.02)
    ends = {encode.chunk(np.zeros((rows, 2)))[-8:] for rows in range(1, 6)}
    assert [int.from_bytes(end[4:], 'little') for end in sorted(ends)] == [
        20_000_000, 40_000_000, 60_000_000, 80_000_000, 100_000_000]


@given(st.integers(0, (2**31 - 1) * 10**9 + 999_999_999))
def test_stamps_go_to_nanoseconds_and_back(nanoseconds):
    stamp = Time()
    fill_stamp(stamp, nanoseconds)
    assert stamp_to_ns(stamp) == nanoseconds


@pytest.mark.parametrize('nanoseconds', [-1, 2**31 * 10**9])
def test_nanoseconds_beyond_a_ros_time_are_refused(nanoseconds):
    with pytest.raises(ConfigError, match='does not fit a ROS time'):
        fill_stamp(Time(), nanoseconds)


def test_the_digest_is_the_start_of_blake2b_over_the_bytes_in_c_order():
    values = np.arange(24, dtype=np.float32).reshape(4, 6)
    expected = int.from_bytes(hashlib.blake2b(values.tobytes()).digest()[:8], 'little')
    assert digest(values) == expected < 2**64
    assert digest(np.asfortranarray(values)) == expected
    assert digest(values[:, ::-1]) != expected


def test_a_float_field_holds_the_bytes_of_the_actions():
    actions = np.array([[0.1, 0.2], [0.3, 0.4]], dtype=np.float64)
    field = float_field(actions)
    assert field.typecode == 'f'
    assert np.frombuffer(field, dtype=np.float32).tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_a_written_image_reuses_its_buffer():
    message = messages.Image()
    image = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    fill_image(message, image)
    buffer = message.data
    fill_image(message, image[::-1])
    assert message.data is buffer
    assert (message.height, message.width, message.step) == (2, 4, 12)
    assert bytes(message.data) == image[::-1].tobytes()
    fill_image(message, image[:1], 'bgr8')
    assert len(message.data) == 12 and message.encoding == 'bgr8'
    with pytest.raises(BadSize):
        fill_image(message, image[:, :, 0])
