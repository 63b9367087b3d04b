"""Bad observations: each is named, counted in diagnostics and keeps the robot still."""

from pathlib import Path

from _executor_rig import image
from _executor_rig import Rig
from _executor_rig import rig
from _ros_fixtures import wait_until
import numpy as np
import pytest

from flashrt_ros.hold import Phase

pytestmark = pytest.mark.ros


def fault(r: Rig, stream: str) -> str:
    return r.executor.report.sections()['observations'].values.get(f'stream {stream}', '')


@pytest.mark.parametrize('names, code, words', [
    (['q1', 'q2', 'q3'], 'bad_size', '4 positions for 3 names'),
    (['q1', 'q2', 'q3', 'claw'], 'bad_joints', "lacks 'gripper'"),
    (['q1', 'q2', 'q3', 'q3'], 'bad_joints', "repeats 'q3'"),
])
def test_wrong_joint_names_are_refused_by_name(
        tmp_path: Path, names: list[str], code: str, words: str) -> None:
    with rig(tmp_path) as r:
        r.arm.names = names
        wait_until(lambda: r.refusals(code) > 0, f'a refusal counted as {code}')
        wait_until(lambda: words in fault(r, 'joint_states'), f'a diagnostic with {words!r}')


def test_a_missing_joint_stops_the_ticks_and_its_return_starts_them_again(tmp_path: Path) -> None:
    with rig(tmp_path, max_joint_age_s=0.1, max_skew_s=5.0) as r:
        r.run()
        r.arm.names = ['q1', 'q2', 'q3', 'claw']
        event = r.until_event('hold', 'observation')
        assert 'observation_stale' in event.detail
        wait_until(lambda: r.executor.report.sections()['observations'].message.startswith(
            'holding'), 'an error in diagnostics')
        r.arm.names = ['q1', 'q2', 'q3', 'gripper']
        r.until_phase('ticking')
        assert fault(r, 'joint_states') == ''


def test_shuffled_names_give_the_same_pose(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        r.arm.obey = False
        r.arm.names = ['gripper', 'q3', 'q2', 'q1']
        r.arm.position = np.array([0.4, 0.3, 0.2, 0.1])
        wait_until(lambda: r.executor.engine.observations.measured() is not None
                   and list(r.executor.engine.observations.measured()) == [0.1, 0.2, 0.3, 0.4],
                   'the pose by name')


def test_nan_positions_are_refused(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        r.arm.position = np.array([0.0, float('nan'), 0.0, 0.0])
        wait_until(lambda: r.refusals('observation_non_finite') > 0, 'the refusal')
        wait_until(lambda: 'q2' in fault(r, 'joint_states'), 'the joint by name')


def bad_images(r: Rig) -> dict[str, tuple[object, str]]:
    stamp = r.probe.get_clock().now().to_msg()
    unknown = image(stamp, encoding='bayer_rggb8')
    lying = image(stamp)
    lying.height = 9
    short_step = image(stamp)
    short_step.step = 3
    other_size = image(stamp, size=16)
    return {'bad_encoding': (unknown, 'bayer_rggb8'), 'height': (lying, 'height 9'),
            'step': (short_step, 'step 3'), 'size': (other_size, '16x16')}


@pytest.mark.parametrize('kind', ['bad_encoding', 'height', 'step', 'size'])
def test_images_that_lie_are_refused_with_thing_value_and_remedy(
        tmp_path: Path, kind: str) -> None:
    with rig(tmp_path, arm=False) as r:
        from sensor_msgs.msg import Image

        from flashrt_ros import qos
        publisher = r.probe.create_publisher(Image, 'images/top', qos.sensor())
        wait_until(lambda: publisher.get_subscription_count() > 0, 'the executor to listen')
        message, words = bad_images(r)[kind]
        code = 'bad_encoding' if kind == 'bad_encoding' else 'bad_size'
        wait_until(lambda: publisher.publish(message) or r.refusals(code) > 0, 'the refusal')
        assert words in fault(r, 'images/top') and code in fault(r, 'images/top')


@pytest.mark.parametrize('offset_s, code, counter', [
    (-5.0, 'observation_stale', 'observation_stale'),
    (5.0, 'observation_future', 'observations_future'),
])
def test_stamps_of_another_time_are_refused(
        tmp_path: Path, offset_s: float, code: str, counter: str) -> None:
    with rig(tmp_path) as r:
        r.arm.stamp_offset_s = offset_s
        r.executor.engine.observations.clear()
        r.reset()
        wait_until(lambda: r.executor.report.counters[counter] > 0, f'the counter {counter}')
        assert r.executor.control.holds.phase is not Phase.RUN


def test_a_frozen_camera_holds_within_its_age_limit_and_skew_is_named(tmp_path: Path) -> None:
    with rig(tmp_path, max_image_age_s=0.15, max_skew_s=10.0) as r:
        r.run()
        r.arm.frozen = {'images/wrist'}
        event = r.until_event('hold', 'observation')
        assert 'images/wrist' in event.detail and 'limit is 0.150' in event.detail
        r.arm.frozen = set()
        r.until_phase('ticking')
    with rig(tmp_path, max_image_age_s=10.0, max_skew_s=0.1) as r:
        r.run()
        r.arm.frozen = {'images/wrist'}
        event = r.until_event('hold', 'observation')
        assert 'observation_skewed' in event.detail and 'images/wrist' in event.detail


def test_a_stream_that_never_came_is_named_as_missing(tmp_path: Path) -> None:
    with rig(tmp_path, arm=False) as r:
        r.reset()
        wait_until(lambda: r.executor.report.sections()['observations'].message.endswith(
            'has sent nothing that could be used yet'), 'the missing stream in diagnostics')
        assert not r.chunks


def test_simulated_time_of_zero_is_not_ready_and_a_jump_back_clears_and_holds(
        tmp_path: Path) -> None:
    from _executor_rig import executor_node_time
    from rosgraph_msgs.msg import Clock
    with rig(tmp_path, use_sim_time=True, arm=False) as r:
        assert 'zero' in r.executor.report.sections()['observations'].message
        clock = r.probe.create_publisher(Clock, '/clock', 10)
        wait_until(lambda: clock.get_subscription_count() > 0, 'the executor on /clock')

        def tell(seconds: float) -> None:
            clock.publish(Clock(clock=executor_node_time(int(seconds * 1e9))))

        wait_until(lambda: tell(100.0) or r.executor.now_ns() == 100 * 10**9, 'time 100 s')
        # The loop reads the clock by itself: a jump back is one from a time that it has read.
        wait_until(lambda: r.executor.engine._clock._newest_ns == 100 * 10**9, 'the loop at 100 s')
        r.reset()
        wait_until(lambda: tell(5.0) or r.executor.now_ns() == 5 * 10**9, 'time 5 s')
        event = r.until_event('hold', 'clock_jump')
        assert 'jumped back' in event.detail
        assert r.executor.engine.observations.measured() is None
