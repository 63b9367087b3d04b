"""The executor's subscriptions: joints, cameras, subgoals; what is refused is counted and told."""

from collections.abc import Callable
from typing import Any

from rclpy.callback_groups import CallbackGroup
from rclpy.callback_groups import MutuallyExclusiveCallbackGroup
from rclpy.qos import QoSProfile
from rclpy.subscription import Subscription
from sensor_msgs.msg import CompressedImage
from sensor_msgs.msg import Image
from sensor_msgs.msg import JointState

from flashrt_core.errors import FlashrtError
from flashrt_ros import qos
from flashrt_ros.attendant import Attendant
from flashrt_ros.clocks import RosReading
from flashrt_ros.embodiment import Embodiment
from flashrt_ros.executor_engine import Engine
from flashrt_ros.executor_services import CONFIGURED
from flashrt_ros.msg import Subgoal


class ExecutorInputs:
    """Opened by configure, closed by cleanup.

    Joints and images are taken by a thread of their own, so that neither services nor subgoals
    delay them; subgoals by the executor thread.
    """

    def __init__(self, node: Any) -> None:
        """Start closed.

        :param node: the executor node: ``engine``, ``parameters``, ``report``, ``services_made``.
        """
        self._node = node
        self._made: list[Subscription] = []
        self._attendant: Attendant | None = None
        self._group = MutuallyExclusiveCallbackGroup()

    def open(self, embodiment: Embodiment) -> None:
        """Subscribe to the robot's joints, its cameras and the planner's subgoals."""
        compressed = self._node.parameters['image_transport'] == 'compressed'
        self._attendant = Attendant(self._node, 'inputs')
        self._attend(JointState, 'joint_states', self._on_joints)
        for view, topic in embodiment.views.items():
            self._attend(
                CompressedImage if compressed else Image,
                f'images/{topic}/compressed' if compressed else f'images/{topic}',
                lambda message, view=view: self._on_image(view, message, compressed))
        self._attendant.start()
        self._listen(Subgoal, 'subgoal', self._on_subgoal, qos.command(), self._group)

    def close(self) -> None:
        """Unsubscribe; callable twice."""
        if self._attendant is not None:
            self._attendant.close()
        self._attendant = None
        for subscription in self._made:
            self._node.destroy_subscription(subscription)
        self._made.clear()

    def _attend(self, message_type: Any, topic: str, callback: Callable[[Any], None]) -> None:
        assert self._attendant is not None
        self._attendant.listen(
            self._listen(message_type, topic, callback, qos.sensor(), self._attendant.group),
            callback)

    def _listen(self, message_type: Any, topic: str, callback: Callable[[Any], None],
                profile: QoSProfile, group: CallbackGroup) -> Subscription:
        resolved = self._node.resolve_topic_name(topic)
        self._made.append(self._node.create_subscription(
            message_type, topic, callback, profile, callback_group=group,
            event_callbacks=qos.subscription_events(resolved, self._node.report.qos_mismatch),
            qos_overriding_options=qos.overridable()))
        return self._made[-1]

    def _on_joints(self, message: JointState) -> None:
        self._take('joint_states', lambda engine, now: engine.observations.on_joints(message, now))

    def _on_image(self, view: str, message: Any, compressed: bool) -> None:
        self._take(f'images/{view}', lambda engine, now: engine.observations.on_image(
            view, message, now, compressed))

    def _take(self, stream: str, take: Callable[[Engine, RosReading], None]) -> None:
        engine = self._node.engine
        if engine is None:
            return
        now = self._node.now_ns()
        try:
            take(engine, RosReading(now, now > 0, False))
        except FlashrtError as error:
            self._node.count_refusal(error)
            self._node.report.stream_refused(stream, error)
        else:
            self._node.report.stream_accepted(stream)

    def _on_subgoal(self, message: Subgoal) -> None:
        try:
            self._node.services_made.require(CONFIGURED, 'subgoal')
            self._node.services_made.subgoal(message)
        except FlashrtError as error:
            self._node.count_refusal(error)
            self._node.outputs.event(
                'refused', 'subgoal', {'code': error.code, 'message': str(error)})
