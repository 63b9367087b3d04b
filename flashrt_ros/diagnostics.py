"""Diagnostics after REP-107: one message a second on /diagnostics, one status per component.

diagnostic_updater has no wheel; this is the part of it that is used here.
"""

from collections.abc import Callable
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
import threading

from diagnostic_msgs.msg import DiagnosticArray
from diagnostic_msgs.msg import DiagnosticStatus
from diagnostic_msgs.msg import KeyValue
from rclpy.callback_groups import ReentrantCallbackGroup
from rclpy.clock import Clock
from rclpy.clock_type import ClockType
from rclpy.node import Node
from rclpy.qos import QoSProfile

from flashrt_ros.statistics import Summary

OK = DiagnosticStatus.OK
WARN = DiagnosticStatus.WARN
ERROR = DiagnosticStatus.ERROR
STALE = DiagnosticStatus.STALE


@dataclass
class Section:
    """One component's report: a level, a sentence and values."""

    level: bytes = OK
    message: str = 'ok'
    values: dict[str, str] = field(default_factory=dict)

    def worsen(self, level: bytes, message: str) -> None:
        """Raise the level; the first sentence of the worst level stands."""
        if level > self.level:
            self.level, self.message = level, message

    def add(self, key: str, value: object) -> None:
        """Add one value; floats are written short."""
        self.values[key] = f'{value:.6g}' if isinstance(value, float) else str(value)

    def add_counts(self, counts: Mapping[str, int]) -> None:
        """Add all counters."""
        for name, count in counts.items():
            self.add(name, count)

    def add_stages(self, stages: Mapping[str, Summary]) -> None:
        """Add count, p50 and p99 in microseconds of each stage that was measured."""
        for name, summary in stages.items():
            if summary.count:
                self.add(f'{name}_p50_us', round(summary.p50, 1))
                self.add(f'{name}_p99_us', round(summary.p99, 1))


class FaultLog:
    """Standing faults by key, e.g. a QoS mismatch of one topic; any thread sets and clears."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._faults: dict[str, tuple[bytes, str]] = {}

    def set(self, key: str, level: bytes, message: str) -> bool:
        """Note a fault; True when it is new or says something else than before."""
        with self._lock:
            fresh = self._faults.get(key) != (level, message)
            self._faults[key] = (level, message)
            return fresh

    def clear(self, key: str) -> bool:
        """Forget a fault; True when there was one."""
        with self._lock:
            return self._faults.pop(key, None) is not None

    def fill(self, section: Section) -> None:
        """Add every standing fault to a section."""
        with self._lock:
            faults = dict(self._faults)
        for key, (level, message) in faults.items():
            section.worsen(level, message)
            section.add(key, message)


class Diagnostics:
    """Publishes the sections of one node at 1 Hz of steady time, also while ROS time stands.

    ``fill`` functions run on the executor thread and must not wait. Call ``close`` at teardown.
    """

    def __init__(self, node: Node, hardware_id: str, period_s: float = 1.0) -> None:
        self._node = node
        self._prefix = node.get_fully_qualified_name().lstrip('/').replace('/', '.')
        self._hardware_id = hardware_id
        self._sections: dict[str, Callable[[Section], None]] = {}
        self._publisher = node.create_publisher(
            DiagnosticArray, '/diagnostics', QoSProfile(depth=10))
        self._timer = node.create_timer(
            period_s, self.publish, callback_group=ReentrantCallbackGroup(),
            clock=Clock(clock_type=ClockType.STEADY_TIME))

    def add(self, name: str, fill: Callable[[Section], None]) -> None:
        """Add a component; ``fill`` writes its section each time."""
        self._sections[name] = fill

    def report(self) -> dict[str, Section]:
        """Fill every section now."""
        sections = {}
        for name, fill in self._sections.items():
            sections[name] = section = Section()
            try:
                fill(section)
            except Exception as error:
                section.worsen(ERROR, f'diagnostics of {name} failed: {error!r}')
        return sections

    def publish(self) -> None:
        """Publish all sections; also useful right after a change."""
        message = DiagnosticArray()
        message.header.stamp = self._node.get_clock().now().to_msg()
        for name, section in self.report().items():
            message.status.append(DiagnosticStatus(
                level=section.level,
                name=f'{self._prefix}: {name}',
                message=section.message,
                hardware_id=self._hardware_id,
                values=[KeyValue(key=k, value=v) for k, v in section.values.items()],
            ))
        self._publisher.publish(message)

    def close(self) -> None:
        """Stop the timer and remove the publisher."""
        self._node.destroy_timer(self._timer)
        self._node.destroy_publisher(self._publisher)
