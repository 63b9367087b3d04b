"""The planner's own publishers: events in full, and the latched status."""

from collections.abc import Callable
from collections.abc import Mapping
import json
import threading
from typing import Any

from rclpy.node import Node

from flashrt_ros import qos
from flashrt_ros.msg import Event
from flashrt_ros.msg import PlannerStatus


class PlannerOutputs:
    """Any thread; made with the node."""

    def __init__(self, node: Node, report: qos.Report,
                 fill_status: Callable[[PlannerStatus], None]) -> None:
        """Create the publishers.

        :param report: told of an incompatible subscriber (topic, sentence).
        :param fill_status: writes the state now into a message.
        """
        self._node = node
        self._fill_status = fill_status
        self._events = self._publisher(Event, '~/events', qos.record(), report)
        self._status = self._publisher(PlannerStatus, '~/status', qos.status(), report)
        self._lock = threading.Lock()

    def event(self, kind: str, name: str, detail: Mapping[str, Any]) -> None:
        """Publish an event; ``detail`` becomes a JSON object."""
        message = Event(kind=kind, name=name, detail=json.dumps(detail))
        message.header.stamp = self._node.get_clock().now().to_msg()
        self._events.publish(message)

    def publish_status(self) -> None:
        """Publish the status as it is now; the last one published is the newest."""
        with self._lock:
            message = PlannerStatus()
            self._fill_status(message)
            message.header.stamp = self._node.get_clock().now().to_msg()
            self._status.publish(message)

    def _publisher(self, message_type: Any, topic: str, profile: Any, report: qos.Report) -> Any:
        return self._node.create_publisher(
            message_type, topic, profile, qos_overriding_options=qos.overridable(),
            event_callbacks=qos.publisher_events(self._node.resolve_topic_name(topic), report))
