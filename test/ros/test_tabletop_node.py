"""The built-in robot as a node, in the test's process: its rules."""

from collections.abc import Iterator
from pathlib import Path
import threading
from typing import Any

from _ros_fixtures import Graph
from _ros_fixtures import ros_graph
from _ros_fixtures import wait_until
from builtin_interfaces.msg import Duration
from builtin_interfaces.msg import Time
import cv2
import numpy as np
import pytest
from rclpy.parameter import Parameter
from rclpy.qos import qos_profile_sensor_data
from rclpy.qos import QoSProfile
from rosgraph_msgs.msg import Clock as ClockMessage
from sensor_msgs.msg import CompressedImage
from sensor_msgs.msg import Image
from sensor_msgs.msg import JointState
from trajectory_msgs.msg import JointTrajectory
from trajectory_msgs.msg import JointTrajectoryPoint
import yaml

from flashrt_core.errors import ConfigError
from flashrt_core.tabletop import Expert
from flashrt_core.tabletop import JOINT_NAMES
from flashrt_core.tabletop import World
from flashrt_ros.conversions import stamp_to_ns
from flashrt_ros.diagnostics import WARN
from flashrt_ros.embodiment import load_embodiment
from flashrt_ros.srv import ResetWorld
from flashrt_ros.srv import SetTask
from flashrt_ros.srv import StepWorld
from flashrt_ros.tabletop_node import TabletopNode
from flashrt_ros.tabletop_parameters import SPECS

pytestmark = pytest.mark.ros
ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / 'config'
PERIOD_NS = 20_000_000
GOAL = [0.3, 1.0, -0.4, 0.0]


class Client:
    """A robot node and someone beside it who commands and watches."""

    def __init__(self, graph: Graph, node: str = 'tabletop') -> None:
        self.node = graph.node('watcher')
        self.joints: list[JointState] = []
        self.images: dict[str, list[Any]] = {'top': [], 'wrist': []}
        self.clocks: list[int] = []
        sensor = QoSProfile(depth=200, reliability=qos_profile_sensor_data.reliability)
        self.node.create_subscription(JointState, 'joint_states', self.joints.append, sensor)
        for view, seen in self.images.items():
            self.node.create_subscription(Image, f'images/{view}', seen.append, sensor)
        self.node.create_subscription(
            ClockMessage, '/clock', lambda m: self.clocks.append(stamp_to_ns(m.clock)), sensor)
        self.publisher = self.node.create_publisher(JointTrajectory, 'joint_trajectory', 1)
        self.reset = graph.client(self.node, ResetWorld, f'{node}/reset_world')
        self.set_task = graph.client(self.node, SetTask, f'{node}/set_task')
        self.step = graph.client(self.node, StepWorld, f'{node}/step')
        wait_until(lambda: self.publisher.get_subscription_count() == 1, 'the robot to listen')

    def send(
        self,
        *positions: Any,
        names: Any = JOINT_NAMES,
        times_s: Any = (0.0,),
        stamp_ns: int = 0,
    ) -> None:
        message = JointTrajectory(joint_names=list(names))
        message.header.stamp = _time(stamp_ns)
        for row, time_s in zip(positions, times_s, strict=True):
            message.points.append(JointTrajectoryPoint(
                positions=[float(value) for value in row],
                time_from_start=Duration(nanosec=round(time_s * 1e9))))
        self.publisher.publish(message)

    def observation(self, stamp: Time) -> tuple[JointState, np.ndarray, np.ndarray]:
        """Return joints, top and wrist image of one stamp."""
        def find() -> Any:
            seen = (self.joints, self.images['top'], self.images['wrist'])
            found = [[m for m in list(s) if m.header.stamp == stamp] for s in seen]
            return found if all(found) else None

        joints, top, wrist = wait_until(find, f'the observation of {stamp}')
        return joints[0], _array(top[0]), _array(wrist[0])


def _time(nanoseconds: int) -> Time:
    return Time(sec=nanoseconds // 10**9, nanosec=nanoseconds % 10**9)


def _array(image: Image) -> np.ndarray:
    assert image.encoding == 'rgb8' and image.step == 3 * image.width
    return np.frombuffer(image.data, np.uint8).reshape(image.height, image.width, 3)


def _make(graph: Graph, **parameters: Any) -> TabletopNode:
    overrides = [Parameter(name, value=value) for name, value in parameters.items()]
    node = TabletopNode(context=graph.context, parameter_overrides=overrides)
    graph.spin(node)
    return node


@pytest.fixture
def graph() -> Iterator[Graph]:
    with ros_graph() as made:
        yield made


@pytest.fixture
def live(graph: Graph) -> Iterator[tuple[TabletopNode, Client]]:
    """A robot in real time."""
    node = _make(graph, image_size_px=64)
    yield node, Client(graph)
    node.stop(2.0)


@pytest.fixture
def stepped(graph: Graph) -> tuple[TabletopNode, Client]:
    """A robot in lock-step with a clock."""
    node = _make(graph, image_size_px=64, lock_step=True, publish_clock=True,
                 step_timeout_s=20.0)
    return node, Client(graph)


def _section(node: TabletopNode, name: str) -> Any:
    return node._diagnostics.report()[name]


def _count(node: TabletopNode, name: str) -> int:
    return int(_section(node, 'commands').values.get(name, 0))


def test_in_real_time_it_sends_joints_every_step_and_images_every_other(live):
    node, client = live
    wait_until(lambda: len(client.joints) >= 40, 'joint states')
    message = client.joints[-1]
    assert message.name == list(JOINT_NAMES)
    assert len(message.position) == len(message.velocity) == 4
    stamps = [stamp_to_ns(m.header.stamp) for m in list(client.joints)]
    assert stamps == sorted(set(stamps))
    wait_until(lambda: len(client.images['wrist']) >= 10, 'images')
    assert _array(client.images['top'][-1]).shape == (64, 64, 3)
    assert {m.header.frame_id for m in client.images['top']} == {'camera_top'}

    def stamps_of(messages: list[Any]) -> set[int]:
        return {stamp_to_ns(m.header.stamp) for m in list(messages)}

    wait_until(lambda: len(stamps_of(client.joints) & stamps_of(client.images['top'])) >= 5,
               'images and joint states of the same stamp')
    assert node._thread is not None and node._thread.report().errors == 0


def test_a_stream_moves_the_arm_and_its_silence_holds_it(live):
    node, client = live
    sent = threading.Event()
    far = [2.0, 1.0, -0.4, 0.0]
    timer = client.node.create_timer(0.02, lambda: sent.is_set() or client.send(far))
    wait_until(lambda: client.joints and client.joints[-1].velocity[0] > 0.1,
               'the arm on its way')
    assert _count(node, 'holds') == 0
    sent.set()
    wait_until(lambda: _count(node, 'holds') == 1, 'the hold')
    section = _section(node, 'commands')
    assert section.level == WARN and 'holding' in section.message
    wait_until(lambda: max(abs(v) for v in client.joints[-1].velocity) < 1e-3, 'the arm at rest')
    assert client.joints[-1].position[0] < far[0] - 0.1
    timer.cancel()
    wait_until(lambda: client.send(far) or not _section(node, 'commands').level == WARN,
               'the end of the hold')


def test_a_block_slips_out_of_the_fingers_when_a_step_is_asked_to_let_it(stepped):
    node, client = stepped
    client.reset(seed=1, blocks=1)
    world = node._world
    teacher = Expert(world)
    while world.snapshot().lift < 0.95 or world.snapshot().held < 0:
        world.step(teacher.action())
    assert client.step(steps=2).success and world.snapshot().held == 0
    assert client.step(steps=1, slip=True).success and world.snapshot().held < 0
    assert client.step(steps=1, slip=True).success, 'nothing left to let fall'


def test_a_chunk_is_played_by_its_times(stepped):
    node, client = stepped
    stamp = client.reset(seed=1, blocks=1).stamp
    start = np.array(client.observation(stamp)[0].position)
    rows = [start + np.array([0.1 * k, 0.0, 0.0, 0.0]) for k in (1, 2)]
    client.send(*rows, times_s=(0.2, 0.4))
    wait_until(lambda: _count(node, 'accepted') == 1, 'the chunk')
    reply = client.step(steps=11)
    halfway = client.observation(reply.stamp)[0].position[0]
    reply = client.step(steps=19)
    at_end = client.observation(reply.stamp)[0].position[0]
    assert start[0] + 0.03 < halfway < start[0] + 0.12
    assert at_end == pytest.approx(start[0] + 0.2, abs=1e-3)
    assert 'following' in reply.message
    reply = client.step(steps=2)
    assert 'holding' in reply.message


def test_joints_are_taken_by_name_in_any_order(stepped):
    node, client = stepped
    client.reset(seed=1, blocks=1)
    names = ['gripper', 'wrist', 'elbow', 'shoulder']
    client.send([0.5, -0.4, 1.0, 0.3], names=names)
    wait_until(lambda: _count(node, 'accepted') == 1, 'the command')
    for _ in range(20):
        client.send([0.5, -0.4, 1.0, 0.3], names=names)
        reply = client.step(steps=10)
    position = client.observation(reply.stamp)[0].position
    assert position == pytest.approx([0.3, 1.0, -0.4, 0.5], abs=1e-2)


@pytest.mark.parametrize(('code', 'send'), [
    ('bad_joints', lambda c: c.send([0.0] * 3, names=JOINT_NAMES[:3])),
    ('bad_joints', lambda c: c.send([0.0] * 4, names=['q1', 'q2', 'q3', 'gripper'])),
    ('bad_joints', lambda c: c.send([0.0] * 4, names=['wrist', *JOINT_NAMES[1:]])),
    ('action_non_finite', lambda c: c.send([0.0, np.nan, 0.0, 0.0])),
    ('action_non_finite', lambda c: c.send(GOAL, [np.inf] * 4, times_s=(0.1, 0.2))),
    ('bad_size', lambda c: c.send(times_s=())),
    ('bad_size', lambda c: c.send([0.0] * 3)),
    ('bad_size', lambda c: c.send(GOAL, GOAL, times_s=(0.2, 0.1))),
])
def test_a_bad_command_is_refused_counted_and_leaves_the_arm_at_rest(stepped, code, send):
    node, client = stepped
    before = client.observation(client.reset(seed=1, blocks=1).stamp)[0].position
    send(client)
    wait_until(lambda: _count(node, f'refused_{code}') == 1, 'the refusal')
    assert _count(node, 'accepted') == 0
    after = client.observation(client.step(steps=5).stamp)[0].position
    assert after == pytest.approx(before)


def test_lock_step_moves_only_when_asked_under_its_own_clock(stepped):
    _, client = stepped
    first = client.reset(seed=4, blocks=2)
    assert first.success and first.code == 'ok' and first.task
    start = stamp_to_ns(first.stamp)
    reply = client.step(steps=3)
    assert reply.success and reply.step == 3
    assert stamp_to_ns(reply.stamp) == start + 3 * PERIOD_NS
    reply = client.step(steps=0)
    assert reply.step == 3 and stamp_to_ns(reply.stamp) == start + 3 * PERIOD_NS
    wait_until(lambda: stamp_to_ns(reply.stamp) in client.clocks, 'the clock')
    again = client.reset(seed=4, blocks=2)
    assert stamp_to_ns(again.stamp) > stamp_to_ns(reply.stamp)
    assert again.task == first.task
    seen = len(client.joints)
    client.observation(again.stamp)
    known = len(client.clocks)
    wait_until(lambda: len(client.clocks) >= known + 3, 'the clock while the world stands')
    assert client.clocks == sorted(client.clocks)
    assert len(client.joints) <= seen + 1


def test_lock_step_shows_exactly_the_world_that_its_commands_make(stepped):
    node, client = stepped
    stamp = client.reset(seed=4, blocks=2).stamp
    shadow = World(4, 2)
    teacher = Expert(shadow)
    solved = False
    for _ in range(300):
        action = teacher.action()
        client.send(action, stamp_ns=stamp_to_ns(stamp))
        reply = client.step(steps=1, command_stamp=stamp)
        assert reply.success, reply.message
        stamp = reply.stamp
        shadow.step(action)
        joints, top, wrist = client.observation(stamp)
        assert np.array(joints.position).tobytes() == shadow.joints.tobytes()
        assert np.array_equal(top, shadow.render('top', 64))
        assert np.array_equal(wrist, shadow.render('wrist', 64))
        solved = reply.solved
        if solved:
            break
    assert solved and shadow.solved()
    assert _count(node, 'holds') == 0


def test_a_step_waits_for_its_command_and_moves_nothing_when_none_comes(stepped):
    node, client = stepped
    stamp = client.reset(seed=4, blocks=1).stamp
    later = _time(stamp_to_ns(stamp) + 1)
    assert node.set_parameters([Parameter('step_timeout_s', value=0.3)])[0].successful
    refused = client.step(steps=1, command_stamp=later)
    assert not refused.success and refused.code == 'lane_timeout'
    assert 'has not moved' in refused.message
    assert node.set_parameters([Parameter('step_timeout_s', value=20.0)])[0].successful
    replies: list[Any] = []
    waiting = threading.Thread(
        target=lambda: replies.append(client.step(steps=1, command_stamp=later)))
    waiting.start()
    wait_until(lambda: node._awaited is not None, 'the step to wait')
    busy = client.step(steps=1)
    assert not busy.success and busy.code == 'busy'
    client.send(GOAL, stamp_ns=stamp_to_ns(later))
    waiting.join(20.0)
    assert replies[0].success and replies[0].step == 1


def test_step_in_real_time_and_too_many_steps_are_refused(live, graph):
    _, client = live
    reply = client.step(steps=1)
    assert not reply.success and reply.code == 'wrong_state' and 'lock_step' in reply.message


@pytest.mark.parametrize(('request_fields', 'named'), [
    ({'seed': 1, 'blocks': 0}, 'blocks'),
    ({'seed': 1, 'blocks': 4}, 'blocks'),
    ({'seed': 1, 'blocks': 1, 'task': 'fly'}, 'fly'),
    ({'seed': 1, 'blocks': 1, 'task': 'pick up the pink block'}, 'pink'),
])
def test_a_bad_world_is_refused_and_the_old_one_stays(stepped, request_fields, named):
    node, client = stepped
    client.reset(seed=4, blocks=2)
    before = node._world.snapshot().to_vector()
    reply = client.reset(**request_fields)
    assert not reply.success and reply.code == 'parameter_invalid' and named in reply.message
    assert np.array_equal(node._world.snapshot().to_vector(), before)
    assert _count(node, 'service_refused_parameter_invalid') == 1
    too_many = client.step(steps=10_001)
    assert too_many.code == 'parameter_invalid' and '10001' in too_many.message


def test_the_task_is_set_for_what_is_on_the_table_and_refused_otherwise(stepped):
    node, client = stepped
    client.reset(seed=4, blocks=2)
    state = node._world.snapshot()
    task = f'put the {state.block_names[1]} block in the {state.zone_names[0]} zone'
    reply = client.set_task(task=task)
    assert reply.success and task in reply.message and reply.duration_us > 0
    assert node._world.task == task
    refused = client.set_task(task='put the pink block in the red zone')
    assert not refused.success and refused.code == 'parameter_invalid'
    assert node._world.task == task


def test_compressed_images_decode_to_what_was_drawn(graph):
    node = _make(graph, image_size_px=96, lock_step=True, image_transport='compressed')
    watcher = graph.node('watcher')
    seen: list[CompressedImage] = []
    watcher.create_subscription(CompressedImage, 'images/top/compressed', seen.append, 5)
    reset = graph.client(watcher, ResetWorld, 'tabletop/reset_world')
    wait_until(lambda: reset(seed=2, blocks=3).success and seen, 'a compressed image')
    assert seen[-1].format == 'rgb8; jpeg compressed bgr8'
    decoded = cv2.imdecode(np.frombuffer(seen[-1].data, np.uint8), cv2.IMREAD_COLOR)[:, :, ::-1]
    drawn = node._world.render('top', 96)
    assert np.abs(decoded.astype(int) - drawn).mean() < 4.0


def test_a_robot_in_a_namespace_hears_only_its_own(graph):
    arms = {name: TabletopNode(
        context=graph.context, namespace=name,
        parameter_overrides=[Parameter('lock_step', value=True)]) for name in ('arm1', 'arm2')}
    for arm in arms.values():
        graph.spin(arm)
    someone = graph.node('someone')
    publisher = someone.create_publisher(JointTrajectory, '/arm1/joint_trajectory', 1)
    wait_until(lambda: publisher.get_subscription_count() == 1, 'arm1')
    message = JointTrajectory(joint_names=list(JOINT_NAMES))
    message.points.append(JointTrajectoryPoint(positions=GOAL))
    publisher.publish(message)
    wait_until(lambda: _count(arms['arm1'], 'accepted') == 1, 'the command')
    assert _count(arms['arm2'], 'accepted') == 0
    for name in arms:
        assert graph.client(someone, ResetWorld, f'/{name}/tabletop/reset_world')(blocks=1).success


def test_a_parameter_out_of_range_is_refused_naming_it(graph):
    with pytest.raises(ConfigError, match='image_size_px'):
        _make(graph, image_size_px=4)


def test_the_shipped_parameter_file_names_every_parameter_with_its_default():
    text = yaml.safe_load((CONFIG / 'tabletop.yaml').read_text())
    shipped = text['/**/tabletop']['ros__parameters']
    assert shipped == {spec.name: spec.default for spec in SPECS}


def test_the_shipped_embodiment_is_this_robot():
    robot = load_embodiment(CONFIG / 'embodiments' / 'tabletop.yaml')
    assert robot.names == JOINT_NAMES
    world = World(0)
    for _ in range(400):
        world.step(robot.minimum)
    assert world.joints == pytest.approx(robot.minimum)
    for _ in range(400):
        world.step(robot.maximum)
    assert world.joints == pytest.approx(robot.maximum)
