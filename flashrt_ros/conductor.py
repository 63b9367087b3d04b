"""Drives robot and executor from outside, as a demo, an evaluation or a test does.

A ``Conductor`` is a ROS node of its own, spun by one thread; its methods block and belong to the
thread that made it. In lock-step it is the only clock: robot step, observation, executor step.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
import hashlib
import threading
import time
from typing import Any
from typing import TYPE_CHECKING

from builtin_interfaces.msg import Duration
from builtin_interfaces.msg import Time
import numpy as np
from numpy.typing import NDArray
from rclpy.executors import ExternalShutdownException
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.qos import QoSProfile
from rclpy.qos import ReliabilityPolicy
from sensor_msgs.msg import Image
from sensor_msgs.msg import JointState
from trajectory_msgs.msg import JointTrajectory
from trajectory_msgs.msg import JointTrajectoryPoint

from flashrt_core.errors import FlashrtError
from flashrt_core.errors import ParameterInvalid
from flashrt_ros import qos
from flashrt_ros.msg import ActionChunk
from flashrt_ros.msg import Event
from flashrt_ros.msg import ExecutorStatus
from flashrt_ros.msg import TickInput
from flashrt_ros.planner_client import PlannerClient
from flashrt_ros.processes import Process
from flashrt_ros.processes import ProcessGroup
from flashrt_ros.processes import WaitTimeout
from flashrt_ros.srv import Drop
from flashrt_ros.srv import Fork
from flashrt_ros.srv import Hold
from flashrt_ros.srv import ListCapsules
from flashrt_ros.srv import Move
from flashrt_ros.srv import Pin
from flashrt_ros.srv import Reset
from flashrt_ros.srv import ResetWorld
from flashrt_ros.srv import Restore
from flashrt_ros.srv import Resume
from flashrt_ros.srv import Rollback
from flashrt_ros.srv import SetSubgoal
from flashrt_ros.srv import SetTask
from flashrt_ros.srv import Snapshot
from flashrt_ros.srv import Step
from flashrt_ros.srv import StepWorld

if TYPE_CHECKING:
    from rclpy.client import Client

EXECUTOR_SERVICES = {
    'drop': Drop, 'fork': Fork, 'hold': Hold, 'list_capsules': ListCapsules, 'move': Move,
    'pin': Pin, 'reset': Reset, 'restore': Restore, 'resume': Resume, 'rollback': Rollback,
    'set_subgoal': SetSubgoal, 'snapshot': Snapshot, 'step': Step,
}  # fmt: skip
NODES = {'bringup': ('executor', 'planner')}  # of processes that hold several
ROBOT_SERVICES = {'reset_world': ResetWorld, 'set_task': SetTask, 'step': StepWorld}


class Refused(FlashrtError):
    """A service answered success=false; the message is the node's own."""

    def __init__(self, service: str, code: str, message: str) -> None:
        super().__init__(f'{service} answered [{code}] {message}')
        self.code = code


class NotReady(FlashrtError):
    """The executor's configure failed; the message carries the end of its log."""

    code = 'not_ready'


@dataclass(frozen=True)
class Observation:
    """One joint state and one image per view, as received."""

    stamp_ns: int
    joints: JointState
    images: Mapping[str, Image]


@dataclass
class Heard:
    """What the executor has published, newest last."""

    chunks: list[ActionChunk] = field(default_factory=list)
    inputs: list[TickInput] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    status: ExecutorStatus | None = None


@dataclass(frozen=True)
class Answer:
    """A service reply and what the caller waited for it."""

    reply: Any
    round_trip_us: float


def to_ns(stamp: Time) -> int:
    """Nanoseconds of a message stamp."""
    return int(stamp.sec) * 1_000_000_000 + int(stamp.nanosec)


def to_stamp(nanoseconds: int) -> Time:
    """Message stamp of nanoseconds."""
    return Time(sec=nanoseconds // 1_000_000_000, nanosec=nanoseconds % 1_000_000_000)


def chunk_digest(chunks: Sequence[ActionChunk]) -> str:
    """BLAKE2b over the float32 bytes of all actions, in order."""
    digest = hashlib.blake2b(digest_size=16)
    for chunk in chunks:
        digest.update(np.asarray(chunk.actions, dtype='<f4').tobytes())
    return digest.hexdigest()


def input_digests(inputs: Sequence[TickInput]) -> list[tuple[tuple[str, int], ...]]:
    """Digests of the observations of each tick, streams in order of name."""
    return [tuple(sorted((o.stream, int(o.digest)) for o in tick.observations)) for tick in inputs]


def chunk_array(chunk: ActionChunk) -> NDArray[np.float32]:
    """Actions of a chunk, float32 ``[horizon, joints]``."""
    return np.asarray(chunk.actions, dtype=np.float32).reshape(chunk.horizon, -1)


class Conductor:
    """Client of one executor, one tabletop and perhaps a planner below one namespace."""

    def __init__(
        self,
        group: ProcessGroup,
        *,
        namespace: str = '',
        views: Sequence[str] = ('top', 'wrist'),
        reliable: bool = True,
        executor_name: str = 'executor',
        robot_name: str = 'tabletop',
        keep_images: bool = True,
        planner_name: str = '',
    ) -> None:
        """Join the group's domain and subscribe.

        :param reliable: ask for reliable sensor data (lock-step); False matches best effort.
        :param keep_images: False leaves the images alone (a bench that must not load the bus).
        :param planner_name: makes ``planner``, a client of the planner of that name.
        """
        self.group = group
        self._context = group.context()
        self.node = Node(
            'conductor',
            context=self._context,
            namespace=namespace or None,
            start_parameter_services=False,
            enable_rosout=False,
        )
        self._executor = SingleThreadedExecutor(context=self._context)
        self._executor.add_node(self.node)
        self._changed = threading.Condition()
        self._images: dict[str, Image] = {}
        self._joints: JointState | None = None
        self.heard = Heard()
        self.on_command: Callable[[JointTrajectory, int], None] | None = None
        self.views = tuple(views)
        self._clients: dict[str, Client] = {}
        for name, kind in EXECUTOR_SERVICES.items():
            self._clients[f'{executor_name}/{name}'] = self.node.create_client(
                kind, f'{executor_name}/{name}'
            )
        for name, kind in ROBOT_SERVICES.items():
            self._clients[f'{robot_name}/{name}'] = self.node.create_client(
                kind, f'{robot_name}/{name}'
            )
        self._executor_name, self._robot_name = executor_name, robot_name
        self._subscribe(reliable, keep_images)
        self.commands = self.node.create_publisher(
            JointTrajectory, 'joint_trajectory', qos.command()
        )
        self.planner = PlannerClient(
            self.node, planner_name, self.wait, self._notify) if planner_name else None
        self._thread = threading.Thread(target=self._spin, name='conductor', daemon=True)
        self._thread.start()

    @staticmethod
    def _sensor_profile(reliable: bool) -> QoSProfile:
        kind = ReliabilityPolicy.RELIABLE if reliable else ReliabilityPolicy.BEST_EFFORT
        return QoSProfile(depth=5, reliability=kind)

    def _subscribe(self, reliable: bool, keep_images: bool) -> None:
        profile = self._sensor_profile(reliable)
        subscribe = self.node.create_subscription
        subscribe(JointState, 'joint_states', self._on_joints, profile)
        for view in self.views if keep_images else ():
            subscribe(
                Image, f'images/{view}', lambda m, view=view: self._on_image(view, m), profile
            )
        base = self._executor_name
        keep = self._keep
        subscribe(ActionChunk, f'{base}/chunk', keep(self.heard.chunks), qos.record())
        subscribe(TickInput, f'{base}/tick_input', keep(self.heard.inputs), qos.record())
        subscribe(Event, f'{base}/events', keep(self.heard.events), qos.record())
        subscribe(ExecutorStatus, f'{base}/status', self._on_status, qos.status())
        subscribe(JointTrajectory, 'joint_trajectory', self._on_command, qos.command())

    def _keep(self, into: list[Any]) -> Callable[[Any], None]:
        def take(message: Any) -> None:
            with self._changed:
                into.append(message)
                self._changed.notify_all()

        return take

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _on_joints(self, message: JointState) -> None:
        with self._changed:
            self._joints = message
            self._changed.notify_all()

    def _on_image(self, view: str, message: Image) -> None:
        with self._changed:
            self._images[view] = message
            self._changed.notify_all()

    def _on_status(self, message: ExecutorStatus) -> None:
        with self._changed:
            self.heard.status = message
            self._changed.notify_all()

    def _on_command(self, message: JointTrajectory) -> None:
        if self.on_command is not None:
            self.on_command(message, time.monotonic_ns())

    def _spin(self) -> None:
        try:
            while self._context.ok():
                self._executor.spin_once(timeout_sec=0.2)
        except (ExternalShutdownException, RuntimeError):
            # The context is being shut down; nothing is left to serve.
            pass

    def close(self) -> None:
        """Leave the domain."""
        self._executor.shutdown(timeout_sec=2.0)
        self._context.try_shutdown()
        self._thread.join(timeout=5.0)
        if self.planner is not None:
            self.planner.close()
        self.node.destroy_node()

    def __enter__(self) -> Conductor:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- waiting ------------------------------------------------------------------------------

    def wait(self, condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
        """Wait for a condition on what was heard; notices a dead child meanwhile.

        :raises WaitTimeout: in vain.
        :raises ProcessDied: a child ended.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                value = condition()
                if value:
                    return value
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(min(left, 0.1))
                self.group.check()
        raise self.group.timeout_error(timeout_s, what)

    def strangers(self) -> list[str]:
        """Nodes on this domain that the group did not start."""
        names = [
            f'{namespace.rstrip("/")}/{name}'
            for name, namespace in self.node.get_node_names_and_namespaces()
            if not name.startswith('_')  # hidden, e.g. the daemon of ros2cli
        ]
        base = self.node.get_namespace().rstrip('/')
        held = [NODES.get(process.name, (process.name,)) for process in self.group.processes]
        # Nodes of the group and this one are expected once each; a second one is a stranger.
        for name in (*(name for nodes in held for name in nodes), 'conductor'):
            if f'{base}/{name}' in names:
                names.remove(f'{base}/{name}')
        return sorted(names)

    def _process_of(self, node: str) -> Process:
        return next((p for p in self.group.processes if node in NODES.get(p.name, ())),
                    None) or self.group[node]

    def wait_for_services(self, timeout_s: float, *, robot: bool = True) -> None:
        """Wait until the servers are discovered.

        :raises WaitTimeout: naming the missing ones.
        """
        wanted = {
            name: client
            for name, client in self._clients.items()
            if robot or not name.startswith(self._robot_name + '/')
        }

        def ready() -> bool:
            return all(client.service_is_ready() for client in wanted.values()) and (
                self.planner is None or self.planner.ready)

        try:
            self.group.wait_for(ready, timeout_s, 'the services', poll_s=0.02)
        except WaitTimeout as error:
            missing = [n for n, c in wanted.items() if not c.service_is_ready()]
            missing += ['planner/plan'] if self.planner and not self.planner.ready else []
            raise WaitTimeout(f'services not discovered: {missing}; {error}') from error

    def wait_until_active(
        self, timeout_s: float, progress: Callable[[ExecutorStatus], None] | None = None
    ) -> ExecutorStatus:
        """Wait for the executor, and the planner, to be active, passing each status on.

        :raises NotReady: a configure has failed.
        """
        told: list[float] = [-1.0]

        def active() -> ExecutorStatus | None:
            status = self.heard.status
            if status is not None and progress is not None and status.progress != told[0]:
                told[0] = status.progress
                progress(status)
            statuses: dict[str, Any] = {self._executor_name: status}
            if self.planner is not None:
                statuses['planner'] = self.planner.status
            for name, heard in statuses.items():
                if heard is not None and heard.phase == 'failed':
                    process = self._process_of(name)
                    raise NotReady(
                        f'the {name} could not be configured; the end of its log '
                        f'({process.log_path}):\n{process.tail()}'
                    )
            ready = all(s is not None and s.state == 'active' for s in statuses.values())
            return status if ready else None

        what = 'executor' if self.planner is None else 'executor and the planner'
        return self.wait(active, timeout_s, f'the {what} to become active')

    # -- services -----------------------------------------------------------------------------

    def call(self, name: str, timeout_s: float = 20.0, **fields: Any) -> Answer:
        """Call ``<node>/<service>`` and return its reply.

        :raises Refused: success is false.
        :raises WaitTimeout: no answer.
        :raises ParameterInvalid: no such service, no such field, or a value that it cannot hold.
        """
        answer = self.try_call(name, timeout_s, **fields)
        if not answer.reply.success:
            raise Refused(name, answer.reply.code, answer.reply.message)
        return answer

    def try_call(self, name: str, timeout_s: float = 20.0, **fields: Any) -> Answer:
        """Like ``call``, but a refusal is returned."""
        if name not in self._clients:
            raise ParameterInvalid(f'there is no service {name!r:.80}; there are '
                                   f'{", ".join(sorted(self._clients))}')
        client = self._clients[name]
        known = client.srv_type.Request.get_fields_and_field_types()
        unknown = sorted(fields.keys() - known.keys())
        if unknown:  # a generated message drops them without a word
            raise ParameterInvalid(f'{", ".join(unknown)} is no field of the request of {name}; '
                                   f'it has {", ".join(known) or "none"}')
        request = client.srv_type.Request(check_fields=True)
        for key, value in fields.items():
            try:
                setattr(request, key, value)
            except AssertionError as error:  # unchecked, the send would fail and not say on what
                raise ParameterInvalid(f'{name}: {error}; it is {value!r:.80}') from None
        done = threading.Event()
        begun = time.perf_counter()
        ended: list[float] = []

        def finish(_: object) -> None:
            ended.append(time.perf_counter())
            done.set()

        try:
            future = client.call_async(request)
        except (TypeError, SystemError) as error:  # of a message within the request
            raise ParameterInvalid(f'{name}: a field holds what it cannot: {error}; the request '
                                   f'is {fields!r:.200}') from None
        future.add_done_callback(finish)
        deadline = time.monotonic() + timeout_s
        while not done.wait(0.1):
            self.group.check()
            if time.monotonic() > deadline:
                client.remove_pending_request(future)
                raise self.group.timeout_error(timeout_s, f'an answer of {name}')
        return Answer(future.result(), (ended[0] - begun) * 1e6)

    def executor(self, verb: str, **fields: Any) -> Answer:
        """Call a service of the executor."""
        return self.call(f'{self._executor_name}/{verb}', **fields)

    def robot(self, verb: str, **fields: Any) -> Answer:
        """Call a service of the robot."""
        return self.call(f'{self._robot_name}/{verb}', **fields)

    # -- lock-step ----------------------------------------------------------------------------

    def observation(self, stamp_ns: int, timeout_s: float = 5.0) -> Observation:
        """Wait for joints and images not older than ``stamp_ns``."""

        def complete() -> Observation | None:
            joints = self._joints
            if joints is None or to_ns(joints.header.stamp) < stamp_ns:
                return None
            if any(
                view not in self._images or to_ns(self._images[view].header.stamp) < stamp_ns
                for view in self.views
            ):
                return None
            return Observation(stamp_ns, joints, dict(self._images))

        what = f'joint states and images stamped {stamp_ns / 1e9:.3f} s or later'
        return self.wait(complete, timeout_s, what)

    def image(self, view: str) -> tuple[int, NDArray[np.uint8]] | None:
        """Newest image of a view, or None: its stamp in ns, RGB uint8 ``[height, width, 3]``."""
        message = self._images.get(view)
        if message is None or message.encoding != 'rgb8':
            return None
        rows = np.frombuffer(message.data, dtype=np.uint8).reshape(message.height, message.step)
        picture = rows[:, : 3 * message.width].reshape(message.height, message.width, 3)
        return to_ns(message.header.stamp), picture

    def wait_a_moment(self, seconds: float) -> None:
        """Let time pass; notices a dead child."""
        threading.Event().wait(seconds)
        self.group.check()

    def executor_step(self, stamp_ns: int) -> Any:
        """Have the executor step on the observation of ``stamp_ns``; return the reply."""
        return self.executor_on('step', stamp_ns).reply

    def executor_on(self, verb: str, stamp_ns: int, patience_s: float = 20.0,
                    **fields: object) -> Answer:
        """Call a verb of the executor on an observation not older than ``stamp_ns``.

        The robot shows its observation again when the executor has missed it, as happens before
        the two have discovered each other.

        :raises Refused: for another reason, or still after ``patience_s``.
        """
        given_up = time.monotonic() + patience_s
        while True:
            try:
                return self.executor(verb, observed_after=to_stamp(stamp_ns), **fields)
            except Refused as error:
                if error.code != 'observation_missing' or time.monotonic() > given_up:
                    raise
                self.robot('step', steps=0)

    def publish(self, positions: Sequence[float], names: Sequence[str], stamp_ns: int) -> None:
        """Command one point at once, through the topic that the executor uses too."""
        point = JointTrajectoryPoint(
            positions=[float(p) for p in positions], time_from_start=Duration()
        )
        message = JointTrajectory(joint_names=list(names), points=[point])
        message.header.stamp = to_stamp(stamp_ns)
        self.commands.publish(message)

    def clear_heard(self) -> None:
        """Forget chunks, inputs and events heard so far."""
        with self._changed:
            self.heard.chunks.clear()
            self.heard.inputs.clear()
            self.heard.events.clear()
