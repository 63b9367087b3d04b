"""The executor's subscriptions: joints, cameras, subgoals; what is refused is counted and told."""

from collections.abc import Callable
from typing import Any

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
from flashrt_ros.msg import Subgoal
from flashrt_ros.service_frame import CONFIGURED

SUBGOAL_REST_S = 0.005


class ExecutorInputs:
    """Opened by configure, closed by cleanup.

    Joints and images are taken by a thread of their own, so that neither services nor subgoals
    delay them; subgoals by another one, which rests after each: of a flood it takes the newest.
    """

    def __init__(self, node: Any) -> None:
        """Start closed.

        :param node: the executor node: ``engine``, ``parameters``, ``report``, ``services_made``.
        """
        self._node = node
        self._made: list[Subscription] = []
        self._attendants: list[Attendant] = []

    def open(self, embodiment: Embodiment) -> None:
        """Subscribe to the robot's joints, its cameras and the planner's subgoals."""
        compressed = self._node.parameters['image_transport'] == 'compressed'
        sensors = Attendant(self._node, 'inputs')
        subgoals = Attendant(self._node, 'subgoals', SUBGOAL_REST_S)
        self._attendants = [sensors, subgoals]
        self._attend(sensors, JointState, 'joint_states', self._on_joints, qos.sensor())
        for view, topic in embodiment.views.items():
            self._attend(
                sensors, CompressedImage if compressed else Image,
                f'images/{topic}/compressed' if compressed else f'images/{topic}',
                lambda message, view=view: self._on_image(view, message, compressed),
                qos.sensor())
        self._attend(subgoals, Subgoal, 'subgoal', self._on_subgoal, qos.command())
        for attendant in self._attendants:
            attendant.start()

    def close(self) -> None:
        """Unsubscribe; callable twice."""
        for attendant in self._attendants:
            attendant.close()
        self._attendants.clear()
        for subscription in self._made:
            self._node.destroy_subscription(subscription)
        self._made.clear()

    def _attend(self, attendant: Attendant, message_type: Any, topic: str,
                callback: Callable[[Any], None], profile: QoSProfile) -> None:
        resolved = self._node.resolve_topic_name(topic)
        self._made.append(self._node.create_subscription(
            message_type, topic, callback, profile, callback_group=attendant.group,
            event_callbacks=qos.subscription_events(resolved, self._node.report.qos_mismatch),
            qos_overriding_options=qos.overridable()))
        attendant.listen(self._made[-1], callback)

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
            self._node.services_made.frame.require(CONFIGURED, 'subgoal')
            self._node.services_made.subgoal(message)
        except FlashrtError as error:
            self._node.count_refusal(error)
            self._node.outputs.event(
                'refused', 'subgoal', {'code': error.code, 'message': str(error),
                                       'sequence': message.sequence, 'text': message.text})
