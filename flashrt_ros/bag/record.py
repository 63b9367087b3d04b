"""Records an executor and its planner into a rosbag2 folder, with all that they hear and say.

The bytes are taken from raw subscriptions and never decoded, so the recording holds what was sent.
"""

from collections.abc import Sequence
import json
from pathlib import Path
from typing import Any

from rclpy.clock import Clock
from rclpy.clock import ClockType
from rclpy.exceptions import InvalidTopicNameException
from rclpy.node import Node
from rclpy.parameter import parameter_value_to_python
from rclpy.parameter_client import AsyncParameterClient
from rclpy.qos import DurabilityPolicy
from rclpy.qos import QoSProfile
from rclpy.qos import ReliabilityPolicy
from rclpy.validate_full_topic_name import validate_full_topic_name

from flashrt_core.errors import ConfigError
from flashrt_ros.bag.message_types import message_class
from flashrt_ros.bag.recording import EXECUTOR_KEY
from flashrt_ros.bag.recording import PARAMETERS_KEY
from flashrt_ros.bag.writer import BagWriter
from flashrt_ros.executor_parameters import SPECS
from flashrt_ros.main import EXIT_CONFIG
from flashrt_ros.main import run_node
from flashrt_ros.main import StopRequest

_OWN = ('tick_input', 'chunk', 'events', 'status')
_BESIDE = ('joint_states', 'subgoal', 'subgoal_outcome', 'scene', 'joint_trajectory')
_PLANNERS_OWN = ('events', 'status', 'instruction')
# Other transports of the same pictures lie beside these, in types of their own.
_IMAGES = ('sensor_msgs/msg/Image', 'sensor_msgs/msg/CompressedImage')
_LOOK_S = 0.2
_DEPTH = 200


class Recorder(Node):
    """Subscribes to inputs and outputs of an executor and its planner as they appear."""

    def __init__(
        self, path: str | Path, *, executor: str = '/executor', planner: str = '',
        storage: str = 'mcap', request: StopRequest | None = None, **node: Any
    ) -> None:
        """Open the recording.

        :param path: folder to make; it must not exist.
        :param executor: full name of the executor node.
        :param planner: full name of the planner node; empty: `planner` beside the executor.
        :param request: set when the disk refuses something.
        :param node: arguments of rclpy's Node.
        :raises ConfigError: when the folder exists or an argument is refused.
        """
        for role, name in (('executor', executor), ('planner', planner or '/planner')):
            try:
                validate_full_topic_name(name)
            except InvalidTopicNameException as error:
                raise ConfigError(f'{role} is {name!r}; give its full name, e.g. '
                                  f'/arm1/{role}') from error
        super().__init__('recorder', **node)
        try:
            self._writer = BagWriter(Path(path), storage)
        except ConfigError:
            self.destroy_node()
            raise
        self._writer.set_custom_data(EXECUTOR_KEY, executor)
        self._recorded, self._request = executor, request
        self._left: set[str] = set()  # topics of types that cannot be written
        self._inputs = executor.rpartition('/')[0]
        planner = planner or f'{self._inputs}/planner'
        self._wanted = {
            *(f'{executor}/{name}' for name in _OWN),
            *(f'{planner}/{name}' for name in _PLANNERS_OWN),
            *(f'{self._inputs}/{name}' for name in _BESIDE),
        }
        self._wall = Clock(clock_type=ClockType.SYSTEM_TIME)
        self.counts: dict[str, int] = {}
        self._names = [spec.name for spec in SPECS]
        self._asked: Any = None
        self._parameter_client = AsyncParameterClient(self, executor)
        self._timer = self.create_timer(
            _LOOK_S, self._look, clock=Clock(clock_type=ClockType.STEADY_TIME)
        )
        self._look()

    def close(self) -> None:
        """Write what is buffered and the index; drop what comes later. Any thread."""
        self._timer.cancel()
        self._writer.close()

    def stop(self, timeout_s: float) -> bool:
        """End in order, for :func:`flashrt_ros.main.run_node`."""
        try:
            self.close()
        except ConfigError as error:
            self.get_logger().error(f'[{error.code}] {error}')
            if self._request is not None:
                self._request.exit_code = EXIT_CONFIG
            return True
        total = sum(self.counts.values())
        self.get_logger().info(f'recorded {total} messages of {len(self.counts)} topics')
        return True

    @property
    def ready(self) -> bool:
        """Whether the executor's own streams and its parameters are recorded from now on."""
        own = all(f'{self._recorded}/{name}' in self.counts for name in _OWN)
        return own and self._asked is not None and self._asked.done()

    def _look(self) -> None:
        if self._writer.failed and self._request is not None:
            self._request.set('the disk refuses the recording', EXIT_CONFIG)
        for topic, types in self.get_topic_names_and_types():
            if topic not in self.counts and self._is_wanted(topic, types[0]):
                self._subscribe(topic, types[0])
        if self._asked is None and self._parameter_client.services_are_ready():
            self._asked = self._parameter_client.get_parameters(self._names)
            self._asked.add_done_callback(self._keep_parameters)

    def _is_wanted(self, topic: str, kind: str) -> bool:
        if topic not in self._wanted:
            return kind in _IMAGES and topic.startswith(f'{self._inputs}/images/')
        if self._writer.knows(kind):
            return True
        if topic not in self._left:
            self._left.add(topic)
            self.get_logger().warning(f'{topic} is left out: {kind} is no type that is recorded')
        return False

    def _subscribe(self, topic: str, kind: str) -> None:
        publishers = self.get_publishers_info_by_topic(topic)
        if not publishers:
            return
        profiles = [publisher.qos_profile for publisher in publishers]
        reliable = all(p.reliability == ReliabilityPolicy.RELIABLE for p in profiles)
        latched = all(p.durability == DurabilityPolicy.TRANSIENT_LOCAL for p in profiles)
        profile = QoSProfile(
            depth=_DEPTH,
            reliability=ReliabilityPolicy.RELIABLE if reliable else ReliabilityPolicy.BEST_EFFORT,
            durability=(
                DurabilityPolicy.TRANSIENT_LOCAL if latched else DurabilityPolicy.VOLATILE
            ),
        )
        self.counts[topic] = 0

        def keep(data: bytes) -> None:
            self._writer.write(topic, kind, self._wall.now().nanoseconds, data)
            self.counts[topic] += 1

        self.create_subscription(message_class(kind), topic, keep, profile, raw=True)
        self.get_logger().info(f'recording {topic}')

    def _keep_parameters(self, answer: Any) -> None:
        values = {
            name: parameter_value_to_python(value)
            for name, value in zip(self._names, answer.result().values, strict=True)
        }
        self._writer.set_custom_data(PARAMETERS_KEY, json.dumps(values))


def record(
    path: str, executor: str, planner: str, storage: str, ros_arguments: Sequence[str]
) -> int:
    """Record until SIGINT or SIGTERM; returns the exit status."""
    return run_node(
        lambda stop: Recorder(
            path, executor=executor, planner=planner, storage=storage, request=stop),
        ['record', *ros_arguments],
    )
