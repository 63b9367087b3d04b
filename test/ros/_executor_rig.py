"""An executor with the fake policy and a simulated arm in one process, over real DDS."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
import threading
import time
from typing import Any
from unittest import mock

from _fake_policy import FakePolicy
from _ros_fixtures import Graph
from _ros_fixtures import ros_graph
from _ros_fixtures import wait_until
import numpy as np
from rclpy.node import Node
from rclpy.parameter import Parameter
from sensor_msgs.msg import Image
from sensor_msgs.msg import JointState
from trajectory_msgs.msg import JointTrajectory

from flashrt_ros import executor_control
from flashrt_ros import executor_node
from flashrt_ros import qos
from flashrt_ros import srv
from flashrt_ros.executor_node import ExecutorNode
from flashrt_ros.main import StopRequest
from flashrt_ros.msg import ActionChunk
from flashrt_ros.msg import Event
from flashrt_ros.msg import ExecutorStatus
from flashrt_ros.msg import Heartbeat
from flashrt_ros.msg import TickInput

PATIENT_S = 30.0  # a step thread that waits for a core beside other tests has not stalled
NAMES = ('q1', 'q2', 'q3', 'gripper')
EMBODIMENT = """
format: 1
name: rig
control_rate_hz: 50.0
actions: absolute
unknown_joints: refuse
pose_gap: 0.3
joints:
  - {name: q1, unit: rad, position: {min: -3.0, max: 3.0}, max_velocity: 4.0}
  - {name: q2, unit: rad, position: {min: -3.0, max: 3.0}, max_velocity: 4.0}
  - {name: q3, unit: rad, position: {min: -3.0, max: 3.0}, max_velocity: 4.0}
  - {name: gripper, unit: ratio, position: {min: 0.0, max: 1.0}, max_velocity: 4.0}
views: {top: top, wrist: wrist}
"""


class Arm:
    """Publishes joints and two cameras at 100 Hz from a thread, and obeys commands at once."""

    def __init__(self, node: Node, obey: bool = True) -> None:
        self.node = node
        self.position = np.zeros(4)
        self.names = list(NAMES)
        self.obey = obey
        self.stamp_offset_s = 0.0
        self.frozen: set[str] = set()  # streams that send nothing
        self.commands: list[tuple[int, np.ndarray]] = []  # (steady ns, last point)
        self._joints = node.create_publisher(JointState, 'joint_states', qos.sensor())
        self._images = {v: node.create_publisher(Image, f'images/{v}', qos.sensor())
                        for v in ('top', 'wrist')}
        node.create_subscription(JointTrajectory, 'joint_trajectory', self._command, qos.command())
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _command(self, message: JointTrajectory) -> None:
        target = np.array(message.points[-1].positions)
        self.commands.append((time.monotonic_ns(), target))
        if self.obey:
            self.position = target

    def _run(self) -> None:
        while not self._stop.wait(0.01):
            self.publish()

    def publish(self) -> None:
        """Send one set of observations."""
        now = self.node.get_clock().now().nanoseconds + int(self.stamp_offset_s * 1e9)
        stamp = executor_node_time(now)
        if 'joint_states' not in self.frozen:
            message = JointState(name=self.names, position=self.position.tolist())
            message.header.stamp = stamp
            self._joints.publish(message)
        for view, publisher in self._images.items():
            if f'images/{view}' not in self.frozen:
                publisher.publish(image(stamp))

    def close(self) -> None:
        """Stop publishing."""
        self._stop.set()
        self._thread.join(5)


def executor_node_time(nanoseconds: int) -> Any:
    from builtin_interfaces.msg import Time
    return Time(sec=nanoseconds // 10**9, nanosec=nanoseconds % 10**9)


def image(stamp: Any, encoding: str = 'rgb8', size: int = 8) -> Image:
    """Return a black camera image."""
    message = Image(height=size, width=size, encoding=encoding, step=size * 3)
    message.data = bytes(size * size * 3)
    message.header.stamp = stamp
    return message


class Rig:
    """The executor, the arm and a node that listens and calls."""

    def __init__(self, graph: Graph, folder: Path, policy: FakePolicy, *, namespace: str = '',
                 arm: bool = True, activate: bool = True, wait: bool = True,
                 **parameters: Any) -> None:
        path = folder / 'rig.yaml'
        path.write_text(EMBODIMENT)
        given = {'embodiment': str(path), 'policy': 'fake', 'output_mode': 'stream',
                 'capsule_gpu_bytes': 1 << 24, 'capsule_host_bytes': 1 << 24, 'device': 'cpu',
                 'tick_period_steps': 4, 'image_resize': 'refuse', 'max_joint_age_s': 1.0,
                 'max_image_age_s': 1.0, 'max_skew_s': 1.0, **parameters}
        self.graph, self.policy, self.stop_request = graph, policy, StopRequest()
        with mock.patch.object(executor_node, 'make_policy', lambda name: policy):
            self.executor: ExecutorNode = graph.spin(ExecutorNode(
                self.stop_request, context=graph.context, namespace=namespace,
                parameter_overrides=[Parameter(k, value=v) for k, v in given.items()]))
            self.started = self.executor.autostart(activate=activate)
            if wait:
                self.started.join(30)
            else:
                wait_until(lambda: policy.switches.binding, 'the policy to bind')
        prefix = f'/{namespace}/executor' if namespace else '/executor'
        self.prefix = prefix
        self.probe = graph.node('probe', namespace=namespace)
        self.chunks: list[ActionChunk] = []
        self.tick_inputs: list[TickInput] = []
        self.events: list[Event] = []
        self.statuses: list[ExecutorStatus] = []
        self.heartbeats: list[Heartbeat] = []
        listen = self.probe.create_subscription
        listen(ActionChunk, f'{prefix}/chunk', self.chunks.append, qos.record())
        listen(TickInput, f'{prefix}/tick_input', self.tick_inputs.append, qos.record())
        listen(Event, f'{prefix}/events', self.events.append, qos.record())
        listen(ExecutorStatus, f'{prefix}/status', self.statuses.append, qos.status())
        listen(Heartbeat, f'{prefix}/heartbeat', self.heartbeats.append, qos.heartbeat())
        self.arm = Arm(graph.node('arm', namespace=namespace)) if arm else None
        self._clients: dict[str, Any] = {}

    def call(self, name: str, **fields: Any) -> Any:
        """Call one of the executor's services."""
        if name not in self._clients:
            srv_type = getattr(srv, ''.join(part.title() for part in name.split('_')))
            self._clients[name] = self.graph.client(
                self.probe, srv_type, f'{self.prefix}/{name}')
        return self._clients[name](**fields)

    def reset(self, **fields: Any) -> Any:
        """Reset successfully."""
        reply = self.call('reset', **fields)
        assert reply.success, reply.message
        return reply

    def run(self) -> 'Rig':
        """Reset and wait until the robot moves."""
        self.reset()
        self.until_phase('ticking')
        return self

    def until_phase(self, phase: str) -> None:
        wait_until(lambda: self.executor.phase == phase,
                   f'phase {phase}; now {self.executor.phase}')

    def until_event(self, kind: str, name: str = '') -> Event:
        """Return the newest event of a kind, once there is one."""
        def found() -> list[Event]:
            return [e for e in self.events if e.kind == kind and name in ('', e.name)]
        return wait_until(found, f'event {kind} {name}')[-1]

    def refusals(self, code: str) -> int:
        """Return how often a code was counted in diagnostics."""
        return int(self.executor.report.sections()['refusals'].values.get(code, 0))

    def close(self) -> None:
        if self.arm is not None:
            self.arm.close()
        self.policy.switches.segment_s = 0.0
        if self.policy.switches.gate is not None:
            self.policy.switches.gate.set()
        self.executor.stop(10.0)


def commands_of(r: Rig) -> list[tuple[int, np.ndarray]]:
    """Return a list of the commands as they leave from now on: (steady ns, position).

    The arm's topic keeps the newest only, so a busy machine may not see each of them there.
    """
    noted: list[tuple[int, np.ndarray]] = []
    command = r.executor.outputs.command

    def note(position: np.ndarray) -> None:
        command(position)
        noted.append((time.monotonic_ns(), np.array(position)))

    r.executor.outputs.command = note
    return noted


def patient() -> Any:
    """Call nothing a stall that a busy machine brings about."""
    return mock.patch.object(executor_control, 'STALL_S', PATIENT_S)


@contextmanager
def rig(folder: Path, policy: FakePolicy | None = None, **parameters: Any) -> Iterator[Rig]:
    """A running rig on its own domain."""
    with ros_graph() as graph, patient():
        made = Rig(graph, folder, policy or FakePolicy(), **parameters)
        try:
            yield made
        finally:
            made.close()
        assert not graph.failures
