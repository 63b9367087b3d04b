"""The built-in robot as a process of its own: signals, kills, a wrong parameter."""

from collections.abc import Callable
from collections.abc import Iterator
import os
from pathlib import Path
import signal
import threading

import pytest
import rclpy
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.qos import qos_profile_sensor_data
from sensor_msgs.msg import JointState

from flashrt_ros.processes import ProcessGroup

pytestmark = [pytest.mark.ros, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]

COMMANDER = """
import math
import time
import rclpy
from rclpy.node import Node
from trajectory_msgs.msg import JointTrajectory, JointTrajectoryPoint
rclpy.init()
node = Node('commander')
publisher = node.create_publisher(JointTrajectory, 'joint_trajectory', 1)
def swing():
    message = JointTrajectory(joint_names=['shoulder', 'elbow', 'wrist', 'gripper'])
    shoulder = math.sin(time.monotonic())
    message.points.append(JointTrajectoryPoint(positions=[shoulder, 1.0, -0.4, 0.0]))
    publisher.publish(message)
node.create_timer(0.02, swing)
rclpy.spin(node)
"""


class Watcher:
    """The parent's own node on a process group's domain."""

    def __init__(self, group: ProcessGroup) -> None:
        self.context = group.context()
        self.node = Node('watcher', context=self.context)
        self.joints: list[JointState] = []
        self.node.create_subscription(
            JointState, 'joint_states', self.joints.append, qos_profile_sensor_data)
        self._executor = SingleThreadedExecutor(context=self.context)
        self._executor.add_node(self.node)
        self._thread = threading.Thread(target=self._spin, daemon=True)
        self._thread.start()

    def _spin(self) -> None:
        try:
            self._executor.spin()
        except rclpy.executors.ExternalShutdownException:
            pass

    def close(self) -> None:
        self._executor.shutdown(timeout_sec=0)
        self._thread.join(5.0)
        self.node.destroy_node()
        rclpy.try_shutdown(context=self.context)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Callable[[], ProcessGroup]]:
    path = os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')])
    with ProcessGroup(tmp_path, env={'PYTHONPATH': path}) as made:
        yield made


def test_the_arm_holds_by_itself_when_its_commander_is_killed(group):
    robot = group.start('tabletop', params={'image_size_px': 64})
    watcher = Watcher(group)
    try:
        commander = group.start_command(
            [group.python, '-c', COMMANDER], name='commander')
        group.wait_for(
            lambda: watcher.joints and abs(watcher.joints[-1].velocity[0]) > 0.3, 30,
            'the arm to swing')
        phrase = 'holding until the next one'
        earlier = robot.log().count(phrase)  # on a busy machine the commander may pause too
        os.kill(commander.pid, signal.SIGKILL)
        commander.expected_end = True
        group.wait_for(lambda: robot.log().count(phrase) > earlier, 10, 'the hold')

        def at_rest() -> bool:
            last = [list(m.position) for m in watcher.joints[-50:]]
            return len(last) == 50 and all(row == last[0] for row in last)

        group.wait_for(at_rest, 20, 'the rest')
        seen = len(watcher.joints)
        group.wait_for(lambda: len(watcher.joints) > seen + 25, 20, 'more joint states')
        assert at_rest()
        assert robot.log().rstrip().endswith(phrase)
    finally:
        watcher.close()


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_process_with_status_0_and_no_traceback(group, number):
    robot = group.start('tabletop', namespace='arm', params_files=[ROOT / 'config/tabletop.yaml'],
                        params={'seed': 7})
    group.wait_for(lambda: 'seed 7' in robot.log(), 30, 'the robot')
    robot.interrupt(number)
    assert robot.wait(15.0) == 0
    assert 'Traceback' not in robot.log()
    assert signal.Signals(number).name in robot.log()


def test_a_wrong_parameter_ends_the_process_with_a_sentence_and_status_2(group):
    robot = group.start('tabletop', params={'hold_after_s': -1.0})
    assert robot.wait(30.0) == 2
    robot.expected_end = True
    assert 'hold_after_s' in robot.log() and 'Traceback' not in robot.log()
