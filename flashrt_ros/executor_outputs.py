"""The executor's publishers: what a tick took in and gave out, commands, events, status.

Called from the step, tick and verb threads; publishing never waits. Commands are serialised by
templates (conversions.py), statuses are published by a thread of their own.
"""

from collections.abc import Callable
from collections.abc import Mapping
import json
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rclpy.duration import Duration
from rclpy.exceptions import InvalidHandle
from rclpy.impl.implementation_singleton import rclpy_implementation
from rclpy.node import Node
from rclpy.publisher import Publisher
from trajectory_msgs.msg import JointTrajectory

from flashrt_core.errors import FlashrtError
from flashrt_core.policies.protocol import Chunk
from flashrt_ros import qos
from flashrt_ros.conversions import digest
from flashrt_ros.conversions import fill_stamp
from flashrt_ros.conversions import float_field
from flashrt_ros.conversions import TrajectoryEncoder
from flashrt_ros.embodiment import Embodiment
from flashrt_ros.executor_control import Progress
from flashrt_ros.executor_outcomes import OutcomeReporter
from flashrt_ros.executor_tick import graph_keys
from flashrt_ros.executor_tick import Ports
from flashrt_ros.executor_tick import Prepared
from flashrt_ros.msg import ActionChunk
from flashrt_ros.msg import Event
from flashrt_ros.msg import ExecutorStatus
from flashrt_ros.msg import Heartbeat
from flashrt_ros.msg import ObservationStamp
from flashrt_ros.msg import SubgoalOutcome
from flashrt_ros.msg import TickInput
from flashrt_ros.subgoals import DONE

RCLError = rclpy_implementation.RCLError
STATUS_DELAY_S = 0.003


class ExecutorOutputs:
    """The publishers of one executor, made with the node; ``bind`` gives them a robot."""

    def __init__(
        self,
        node: Node,
        report: qos.Report,
        fill_status: Callable[[ExecutorStatus], None],
        device_lost: Callable[[FlashrtError], None],
        heartbeat_deadline_s: float,
    ) -> None:
        """Create the publishers.

        :param report: told of an incompatible subscriber (topic, sentence).
        :param fill_status: writes the state now into a status message; any thread.
        :param heartbeat_deadline_s: offered to subscribers, which are told when it passes.
        """
        self._node = node
        self._report = report
        self._fill_status = fill_status
        self.device_lost = device_lost
        self.commands = self._publisher(JointTrajectory, 'joint_trajectory', qos.command())
        self._chunks = self._publisher(ActionChunk, '~/chunk', qos.record())
        self._tick_inputs = self._publisher(TickInput, '~/tick_input', qos.record())
        self._events = self._publisher(Event, '~/events', qos.record())
        self._status = self._publisher(ExecutorStatus, '~/status', qos.status())
        self._outcomes = self._publisher(SubgoalOutcome, 'subgoal_outcome', qos.record())
        self._reporter = OutcomeReporter(None, self._publish_outcome)
        self._newest_done = (0, 0)  # epoch and sequence
        self._heartbeats = self._publisher(
            Heartbeat, '~/heartbeat', qos.heartbeat(heartbeat_deadline_s))
        self._status_lock = threading.Lock()
        self._status_due, self._closed = threading.Event(), threading.Event()
        threading.Thread(target=self._publish_statuses, name='status', daemon=True).start()
        # Told of each event on the thread that tells it, under its locks: they only put it down.
        self.listeners: list[Callable[[str, str, Mapping[str, Any]], None]] = []
        self._encoder: TrajectoryEncoder | None = None
        self._embodiment: Embodiment | None = None
        self.progress = Progress()
        self.stamp_ns = 0  # of commands in lock-step; 0 means "start now"

    def bind(self, embodiment: Embodiment, ports: Ports, progress: Progress) -> None:
        """Take the robot whose commands are sent and the counters that messages carry."""
        self._embodiment, self.progress = embodiment, progress
        self._reporter = OutcomeReporter(ports.done_column, self._publish_outcome)
        self._encoder = TrajectoryEncoder(
            embodiment.names, horizon=ports.horizon, step_period_s=embodiment.step_period_s)

    def command(self, position: NDArray[np.float64]) -> None:
        """Send one step's command."""
        assert self._encoder is not None
        self.commands.publish(self._encoder.point(position, self.stamp_ns))

    def trajectory(self, actions: NDArray[np.float64], first_step: int,
                   commanded: NDArray[np.float64]) -> None:
        """Send a chunk's rows from ``first_step`` on, for a controller that plays them."""
        assert self._encoder is not None
        self.commands.publish(
            self._encoder.chunk(actions, first_step=first_step, commanded=commanded))

    def tick_input(self, chunk: Chunk, prepared: Prepared) -> None:
        """Publish ~/tick_input."""
        self._tick_inputs.publish(self._tick_input(chunk, prepared))

    def chunk(self, chunk: Chunk, prepared: Prepared, actions: NDArray[np.float64],
              first_step: int) -> None:
        """Publish ~/chunk, and the subgoal's outcome where the policy says that it is done."""
        self._chunks.publish(self.chunk_message(
            actions, tick=chunk.tick, branch=0, first_step=first_step,
            subgoal_sequence=chunk.subgoal_sequence))
        self._reporter.played(chunk, self.progress.epoch)

    def chunk_message(self, actions: NDArray[np.float64], *, tick: int, branch: int,
                      first_step: int, subgoal_sequence: int) -> ActionChunk:
        """Return a chunk as a message; actions are [horizon, joints], robot units."""
        assert self._embodiment is not None
        message = ActionChunk(
            epoch=self.progress.epoch, episode=self.progress.episode, tick=tick, branch=branch,
            subgoal_sequence=subgoal_sequence, joint_names=list(self._embodiment.names),
            horizon=len(actions), step_period_s=self._embodiment.step_period_s,
            first_step=first_step, bit_exact=self.progress.bit_exact)
        message.actions = float_field(actions)
        message.header.stamp = self._now()
        return message

    def take_done(self) -> int:
        """Return a subgoal of this epoch that was told to be done since the last call, or 0."""
        (epoch, sequence), self._newest_done = self._newest_done, (0, 0)
        return sequence if epoch == self.progress.epoch else 0

    def outcome(self, sequence: int, outcome: str, message: str) -> None:
        """Publish what became of a subgoal, unless that was told already."""
        self._reporter.tell(sequence, self.progress.epoch, outcome, message)

    def _publish_outcome(self, sequence: int, outcome: str, message: str) -> None:
        if outcome == DONE:
            self._newest_done = (self.progress.epoch, sequence)
        told = SubgoalOutcome(
            sequence=sequence, episode=self.progress.episode, message=message,
            outcome=getattr(SubgoalOutcome, outcome.upper()))
        told.header.stamp = self._now()
        self._outcomes.publish(told)
        self.event(f'subgoal_{outcome}', str(sequence), {'message': message})

    def heartbeat(self) -> None:
        """Publish a sign of life."""
        message = Heartbeat(epoch=self.progress.epoch, tick=self.progress.tick)
        message.header.stamp = self._now()
        self._heartbeats.publish(message)

    def event(self, kind: str, name: str, detail: Mapping[str, Any]) -> None:
        """Publish an event; ``detail`` becomes a JSON object."""
        progress = self.progress
        message = Event(epoch=progress.epoch, episode=progress.episode, tick=progress.tick,
                        step=progress.step, kind=kind, name=name, detail=json.dumps(detail))
        message.header.stamp = self._now()
        self._events.publish(message)
        for listener in tuple(self.listeners):
            listener(kind, name, {**detail, 'epoch': message.epoch})
        told = f'{kind} {name}: {detail.get("message", "on request")}'
        if kind == 'fault' or detail.get('latched'):
            self._node.get_logger().error(told)
        elif kind == 'hold':
            self._node.get_logger().warning(told, throttle_duration_sec=1.0)

    def status(self) -> None:
        """Have the status published soon, by a thread of its own; waits for nothing."""
        self._status_due.set()

    def publish_status(self) -> None:
        """Publish the status as it is now; the last one published is the newest."""
        with self._status_lock:
            message = ExecutorStatus()
            self._fill_status(message)
            message.header.stamp = self._now()
            self._status.publish(message)

    def close(self) -> None:
        """End the thread that publishes statuses; ``publish_status`` works on."""
        self._closed.set()
        self._status_due.set()

    def wait_for_acknowledgement(self, timeout_s: float) -> bool:
        """Wait until every matched reliable subscriber has the last command."""
        return bool(self.commands.wait_for_all_acked(Duration(seconds=timeout_s)))

    def _publish_statuses(self) -> None:
        # Commands and replies go first: a status is a few ms late, and changes may share one.
        while True:
            self._status_due.wait()
            if self._closed.wait(STATUS_DELAY_S):
                return
            self._status_due.clear()
            try:
                self.publish_status()
            except (InvalidHandle, RCLError):
                return  # the node or its context is gone

    def _tick_input(self, chunk: Chunk, prepared: Prepared) -> TickInput:
        given = prepared.tick_input
        message = TickInput(
            epoch=self.progress.epoch, episode=self.progress.episode, tick=chunk.tick,
            steps_executed=given.steps_executed, delay_steps=given.delay_steps,
            subgoal_sequence=prepared.subgoal_sequence, seed=prepared.seed(),
            graph_keys=graph_keys(chunk), actions_digest=digest(chunk.actions[0]))
        for verdict in prepared.verdicts:
            stamp = ObservationStamp(
                stream=verdict.stream, age_s=verdict.age_s, verdict=verdict.verdict,
                digest=prepared.digests.get(verdict.stream, 0))
            fill_stamp(stamp.stamp, verdict.stamp_ns)
            message.observations.append(stamp)
        message.header.stamp = self._now()
        return message

    def _now(self) -> Any:
        return self._node.get_clock().now().to_msg()

    def _publisher(self, message_type: Any, topic: str, profile: Any) -> Publisher:
        name = self._node.resolve_topic_name(topic)
        return self._node.create_publisher(
            message_type, topic, profile, qos_overriding_options=qos.overridable(),
            event_callbacks=qos.publisher_events(name, self._report))
