"""The built-in robot as a ROS node: joints and cameras out, joint trajectories in.

Real time: a thread of its own advances the world every 20 ms at absolute steady deadlines.
Lock-step: the world moves only by ``~/step`` and stamps count simulated time. Either way the arm
holds by itself when commands fall silent. Run it with ``ros2 run flashrt_ros tabletop``.
"""

if __name__ == '__main__':  # the imports take seconds
    from flashrt_core.starting import node_begins

    node_begins()

from array import array
from collections import Counter
from collections.abc import Sequence
import sys
import threading
import time
from typing import Any

from builtin_interfaces.msg import Time
import cv2
import numpy as np
from rclpy.callback_groups import ReentrantCallbackGroup
from rclpy.clock import Clock
from rclpy.clock_type import ClockType
from rclpy.node import Node
from rclpy.publisher import Publisher
from rclpy.qos import QoSProfile
from rclpy.qos import ReliabilityPolicy
from rclpy.task import Future
from rosgraph_msgs.msg import Clock as ClockMessage
from sensor_msgs.msg import CompressedImage
from sensor_msgs.msg import Image
from sensor_msgs.msg import JointState
from trajectory_msgs.msg import JointTrajectory

from flashrt_core.errors import FlashrtError
from flashrt_core.errors import LaneBusy
from flashrt_core.errors import LaneTimeout
from flashrt_core.errors import ParameterInvalid
from flashrt_core.errors import WrongState
from flashrt_core.tabletop import CommandPlayer
from flashrt_core.tabletop import CONTROL_PERIOD_S
from flashrt_core.tabletop import JOINT_NAMES
from flashrt_core.tabletop import read_points
from flashrt_core.tabletop import VIEWS
from flashrt_core.tabletop import World
from flashrt_ros import qos
from flashrt_ros.control_loop import StepThread
from flashrt_ros.conversions import fill_image
from flashrt_ros.conversions import stamp_to_ns
from flashrt_ros.diagnostics import Diagnostics
from flashrt_ros.diagnostics import ERROR
from flashrt_ros.diagnostics import FaultLog
from flashrt_ros.diagnostics import Section
from flashrt_ros.diagnostics import WARN
from flashrt_ros.main import run_node
from flashrt_ros.main import StopRequest
from flashrt_ros.parameters import ParameterTable
from flashrt_ros.srv import ResetWorld
from flashrt_ros.srv import SetTask
from flashrt_ros.srv import StepWorld
from flashrt_ros.tabletop_parameters import SPECS

MAX_STEPS_PER_CALL = 10_000
_PERIOD_NS = round(CONTROL_PERIOD_S * 1e9)
_CLOCK_PERIOD_S = 0.1
_WAIT_POLL_S = 0.02


class TabletopNode(Node):
    """The robot as a plain node.

    Commands and services come in on the executor's thread, real-time steps on the step thread; all
    that touches the world, the player or the publishers does so under one lock.
    """

    def __init__(self, **kwargs: Any) -> None:
        """Lay out the first world and start moving.

        :param kwargs: of ``rclpy.node.Node``.
        :raises ConfigError: a parameter is refused.
        :raises ParameterInvalid: the first task does not fit the first world.
        """
        super().__init__('tabletop', **kwargs)
        self._table = ParameterTable(SPECS)
        self._table.declare(self)
        self._lock_step: bool = self._table['lock_step']
        self._mode = 'lock-step' if self._lock_step else 'real time'
        self._simulated = self._lock_step or self._table['publish_clock']
        self._lock = threading.RLock()
        self._world = World(self._table['seed'], self._table['blocks'],
                            self._table['task'] or None, zones=self._table['zones'])
        self._player = CommandPlayer(self._table['hold_after_s'])
        self._sim_ns = _PERIOD_NS
        self._command_ns = 0
        self._was_holding = False
        self._counts: Counter[str] = Counter()
        self._faults = FaultLog()
        self._stepping = False
        self._awaited: tuple[int, float, Future] | None = None
        self._make_entities()
        self._thread: StepThread | None = None
        if not self._lock_step:
            self._thread = StepThread(
                CONTROL_PERIOD_S, self._on_slot, on_error=self._on_step_error,
                name='tabletop step', fifo_priority=self._table['fifo_priority'])
            self._thread.start()
        self.get_logger().info(
            f'{self._mode}, seed {self._table["seed"]}: {self._world.task}')

    def stop(self, timeout_s: float) -> bool:
        """End the step thread; the arm stays where it is. Any thread but the step thread."""
        if self._thread is None:
            return True
        try:
            self._thread.stop(timeout_s)
        except LaneTimeout as error:
            self.get_logger().error(f'[{error.code}] {error}')
            return False
        return True

    def _make_entities(self) -> None:
        sensor = QoSProfile(
            depth=5,
            # Nothing repeats an observation in lock-step: losing one would stop the conductor.
            reliability=(ReliabilityPolicy.RELIABLE if self._lock_step
                         else ReliabilityPolicy.BEST_EFFORT))
        self._joint_publisher = self._publisher(JointState, 'joint_states', sensor)
        raw = self._table['image_transport'] == 'raw'
        image_type, suffix = (Image, '') if raw else (CompressedImage, '/compressed')
        self._image_publishers, self._images = {}, {}
        for view in VIEWS:
            self._image_publishers[view] = self._publisher(
                image_type, f'images/{view}{suffix}', sensor)
            self._images[view] = image_type()
            self._images[view].header.frame_id = f'camera_{view}'
        self._clock_publisher = None
        if self._table['publish_clock']:
            self._clock_publisher = self.create_publisher(
                ClockMessage, '/clock', QoSProfile(depth=1))
        self.create_subscription(
            JointTrajectory, 'joint_trajectory', self._on_command, qos.command(),
            qos_overriding_options=qos.overridable(),
            event_callbacks=qos.subscription_events('joint_trajectory', self._report_fault))
        # Reentrant: a ~/step that waits for its command must not keep others from an answer.
        group = ReentrantCallbackGroup()
        self.create_service(ResetWorld, '~/reset_world', self._on_reset_world,
                            callback_group=group)
        self.create_service(SetTask, '~/set_task', self._on_set_task, callback_group=group)
        self.create_service(StepWorld, '~/step', self._on_step, callback_group=group)
        steady = Clock(clock_type=ClockType.STEADY_TIME)
        if self._lock_step:
            self.create_timer(_WAIT_POLL_S, self._expire_wait, callback_group=group, clock=steady)
        if self._clock_publisher is not None:
            # Late joiners need the time while the world stands still.
            self.create_timer(_CLOCK_PERIOD_S, self._publish_clock, callback_group=group,
                              clock=steady)
        self._diagnostics = Diagnostics(self, 'tabletop')
        self._diagnostics.add('commands', self._fill_commands)
        self._diagnostics.add('world', self._fill_world)
        self._diagnostics.add('steps', self._fill_steps)

    def _publisher(self, message_type: type, topic: str, profile: QoSProfile) -> Publisher:
        return self.create_publisher(
            message_type, topic, profile, qos_overriding_options=qos.overridable(),
            event_callbacks=qos.publisher_events(topic, self._report_fault))

    def _report_fault(self, topic: str, sentence: str) -> None:
        if self._faults.set(topic, ERROR, sentence):
            self.get_logger().error(sentence)

    # -- time ---------------------------------------------------------------------------------

    def _stamp_now_ns(self) -> int:
        return self._sim_ns if self._simulated else self.get_clock().now().nanoseconds

    def _player_now_s(self) -> float:
        return self._sim_ns / 1e9 if self._lock_step else time.monotonic()

    def _publish_clock(self) -> None:
        if self._clock_publisher is not None:
            with self._lock:
                self._clock_publisher.publish(ClockMessage(clock=_time_message(self._sim_ns)))

    # -- commands -----------------------------------------------------------------------------

    def _on_command(self, message: JointTrajectory) -> None:
        try:
            points = read_points(
                message.joint_names, [point.positions.tolist() for point in message.points])
            times = [stamp_to_ns(point.time_from_start) / 1e9 for point in message.points]
            with self._lock:
                stamp_ns, now_ns = stamp_to_ns(message.header.stamp), self._stamp_now_ns()
                now_s = self._player_now_s()
                start_s = now_s if stamp_ns == 0 else now_s + (stamp_ns - now_ns) / 1e9
                self._player.accept(points, times, start_s, now_s, self._world.resting_joints)
                self._command_ns = stamp_ns or now_ns
                self._counts['accepted'] += 1
                self._resolve_wait()
        except FlashrtError as error:
            self._counts[f'refused_{error.code}'] += 1
            self.get_logger().warning(f'command refused [{error.code}]: {_short(error)}',
                                      throttle_duration_sec=1.0)

    # -- steps --------------------------------------------------------------------------------

    def _on_slot(self, slot: int) -> None:
        """Advance in real time; step thread."""
        with self._lock:
            self._advance()
            self._publish_observation(
                images=self._world.step_count % self._table['camera_period_steps'] == 0)

    def _on_step_error(self, error: Exception) -> None:
        self._counts['step_errors'] += 1
        self.get_logger().error(f'a step failed: {error!r}', throttle_duration_sec=1.0)

    def _advance(self) -> None:
        target = self._player.target(self._player_now_s(), self._world.resting_joints)
        self._world.step(target)
        self._sim_ns += _PERIOD_NS
        if self._player.holding and not self._was_holding:
            self.get_logger().warning(
                f'no command for {self._player.hold_after_s:g} s: holding until the next one')
        elif self._was_holding and not self._player.holding:
            self.get_logger().info('commands are back')
        self._was_holding = self._player.holding

    def _publish_observation(self, images: bool = True) -> int:
        """Publish clock, joints and perhaps images with one stamp; return it in nanoseconds.

        The stamp is of the end of the exposure: images are drawn before it.
        """
        drawn = list(self._images) if images else []
        for view in drawn:
            self._draw(view)
        self._publish_clock()
        stamp_ns = self._stamp_now_ns()
        for view in drawn:
            self._images[view].header.stamp = _time_message(stamp_ns)
            self._image_publishers[view].publish(self._images[view])
        message = JointState()
        message.header.stamp = _time_message(stamp_ns)
        message.name = list(JOINT_NAMES)
        message.position = array('d', self._world.joints)
        message.velocity = array('d', self._world.joint_velocities)
        self._joint_publisher.publish(message)
        return stamp_ns

    def _draw(self, view: str) -> None:
        image = self._world.render(view, self._table['image_size_px'])
        message = self._images[view]
        if isinstance(message, Image):
            fill_image(message, image)
        else:
            _fill_jpeg(message, image, self._table['jpeg_quality'])

    # -- services -----------------------------------------------------------------------------

    def _on_reset_world(
        self, request: ResetWorld.Request, response: ResetWorld.Response
    ) -> ResetWorld.Response:
        def reset() -> str:
            world = World(request.seed, request.blocks, request.task or None,
                          zones=self._table['zones'])
            with self._lock:
                self._world = world
                self._player.clear()
                self._was_holding = False
                self._sim_ns += _PERIOD_NS
                self._counts['worlds'] += 1
                response.stamp = _time_message(self._publish_observation())
                response.task = world.task
            return f'new world of seed {request.seed}: {world.task}'

        return self._answer(response, reset)

    def _on_set_task(
        self, request: SetTask.Request, response: SetTask.Response
    ) -> SetTask.Response:
        def set_task() -> str:
            with self._lock:
                self._world.set_task(request.task)
                return f'the task is: {self._world.task}'

        return self._answer(response, set_task)

    async def _on_step(
        self, request: StepWorld.Request, response: StepWorld.Response
    ) -> StepWorld.Response:
        started = time.perf_counter()
        try:
            self._begin_step(request.steps)
        except FlashrtError as error:
            return self._refuse(response, error, started)
        try:
            await self._command_not_older_than(stamp_to_ns(request.command_stamp))
            message = self._step_and_observe(request, response)
        except FlashrtError as error:
            return self._refuse(response, error, started)
        except Exception as error:
            return self._fail(response, error, started)
        finally:
            self._stepping = False
        return _succeed(response, message, started)

    def _begin_step(self, steps: int) -> None:
        if not self._lock_step:
            raise WrongState('~/step in real time, where a clock moves the world; '
                             'start the node with lock_step:=true')
        if steps > MAX_STEPS_PER_CALL:
            raise ParameterInvalid(f'steps is {steps}; give 0 to {MAX_STEPS_PER_CALL}')
        if self._stepping:
            raise LaneBusy('another ~/step waits for its command; ask again when it has answered')
        self._stepping = True

    def _step_and_observe(
        self, request: StepWorld.Request, response: StepWorld.Response
    ) -> str:
        with self._lock:
            if request.slip:
                self._world.slip()
            for _ in range(request.steps):
                self._advance()
            response.stamp = _time_message(self._publish_observation())
            response.solved = self._world.solved()
            response.step = self._world.step_count
            state = 'holding' if self._player.holding else 'following commands'
            return f'at step {response.step}, {state}'

    async def _command_not_older_than(self, stamp_ns: int) -> None:
        """Wait on the executor's thread.

        :raises LaneTimeout: no such command within step_timeout_s; the world has not moved.
        """
        arrived = Future()
        limit_s = self._table['step_timeout_s']
        with self._lock:
            if stamp_ns <= self._command_ns:
                return
            self._awaited = (stamp_ns, time.monotonic() + limit_s, arrived)
        try:
            if not await arrived:
                raise LaneTimeout(
                    f'no command stamped {stamp_ns / 1e9:.3f} s or later within {limit_s:g} s, '
                    f'the last one is of {self._command_ns / 1e9:.3f} s; the world has not '
                    f'moved')
        finally:
            self._awaited = None

    def _resolve_wait(self) -> None:
        if self._awaited is not None and self._command_ns >= self._awaited[0]:
            if not self._awaited[2].done():
                self._awaited[2].set_result(True)

    def _expire_wait(self) -> None:
        if self._awaited is not None and time.monotonic() > self._awaited[1]:
            if not self._awaited[2].done():
                self._awaited[2].set_result(False)

    def _answer(self, response: Any, work: Any) -> Any:
        started = time.perf_counter()
        try:
            return _succeed(response, work(), started)
        except FlashrtError as error:
            return self._refuse(response, error, started)
        except Exception as error:
            return self._fail(response, error, started)

    def _refuse(self, response: Any, error: FlashrtError, started: float) -> Any:
        self._counts[f'service_refused_{error.code}'] += 1
        return _reply(response, False, error.code, _short(error), started)

    def _fail(self, response: Any, error: Exception, started: float) -> Any:
        self._counts['service_failed'] += 1
        self.get_logger().error(f'a service failed: {error!r}')
        return _reply(response, False, 'internal', f'{error!r}; see the log of tabletop', started)

    # -- diagnostics --------------------------------------------------------------------------

    def _fill_commands(self, section: Section) -> None:
        section.add_counts(dict(self._counts))
        section.add('holds', self._player.holds)
        section.add('holding', self._player.holding)
        self._faults.fill(section)
        if self._player.holding:
            section.worsen(WARN, f'no command for {self._player.hold_after_s:g} s: holding')

    def _fill_world(self, section: Section) -> None:
        with self._lock:
            section.message = self._world.task
            section.add('mode', self._mode)
            section.add('seed', self._world.seed)
            section.add('step', self._world.step_count)
            section.add('solved', self._world.solved())

    def _fill_steps(self, section: Section) -> None:
        if self._thread is None:
            section.message = 'lock-step'
            return
        report = self._thread.report()
        section.add_counts({'steps': report.steps, 'missed': report.missed, 'late': report.late})
        section.add('lateness_p50_ms', report.lateness_p50_ms)
        section.add('lateness_p99_ms', report.lateness_p99_ms)
        section.add('realtime', report.realtime_reason or 'SCHED_FIFO')
        if report.errors:
            section.worsen(ERROR, f'{report.errors} steps failed; see the log')


def _short(error: FlashrtError) -> str:
    # A message repeats what was sent, which may be megabytes; its end says what to do.
    text = str(error)
    return text if len(text) <= 600 else f'{text[:300]} ... {text[-300:]}'


def _fill_jpeg(message: CompressedImage, image: np.ndarray, quality: int) -> None:
    _, jpeg = cv2.imencode('.jpg', cv2.cvtColor(image, cv2.COLOR_RGB2BGR),
                           [cv2.IMWRITE_JPEG_QUALITY, quality])
    message.format = 'rgb8; jpeg compressed bgr8'
    message.data = array('B', jpeg.tobytes())


def _time_message(nanoseconds: int) -> Time:
    return Time(sec=nanoseconds // 10**9, nanosec=nanoseconds % 10**9)


def _succeed(response: Any, message: str, started: float) -> Any:
    return _reply(response, True, 'ok', message, started)


def _reply(response: Any, success: bool, code: str, message: str, started: float) -> Any:
    response.success, response.code, response.message = success, code, message
    response.duration_us = (time.perf_counter() - started) * 1e6
    return response


def main(argv: Sequence[str] | None = None) -> int:
    """Run the node until SIGINT or SIGTERM; return the exit status."""

    def make_node(stop: StopRequest) -> Node:
        return TabletopNode()

    return run_node(make_node, argv)


if __name__ == '__main__':
    sys.exit(main())
