"""The ~/run_episode action: reset, run until a limit, cancel or hold, with feedback."""

from dataclasses import dataclass
from typing import Any

from rclpy.action import ActionServer
from rclpy.action import CancelResponse
from rclpy.action import GoalResponse
from rclpy.action.server import ServerGoalHandle
from rclpy.callback_groups import ReentrantCallbackGroup
from rclpy.clock import Clock
from rclpy.clock_type import ClockType
from rclpy.task import Future

from flashrt_core.errors import FlashrtError
from flashrt_core.errors import LaneBusy
from flashrt_core.errors import ParameterInvalid
from flashrt_ros.action import RunEpisode
from flashrt_ros.executor_control import Control
from flashrt_ros.executor_control import Run
from flashrt_ros.futures import wake
from flashrt_ros.hold import Cause
from flashrt_ros.hold import Phase
from flashrt_ros.lifecycle import ACTIVE

END = 'episode_end'
FEEDBACK_PERIOD_S = 0.1


@dataclass
class _Run:
    goal: ServerGoalHandle
    ended: Future
    control: Control
    begun: Run
    seen_s: float  # ROS time when it was looked at last
    elapsed_s: float = 0.0


class EpisodeServer:
    """Serves one episode at a time; every method runs on the executor thread.

    The step limit is exact: the step thread itself holds after the last step. The robot holds when
    the episode ends, whatever ended it, until the next reset, restore or episode.
    """

    def __init__(self, node: Any) -> None:
        """Create the action server and its feedback timer.

        :param node: the executor node: ``control``, ``state_label``, ``begin_episode``.
        """
        self._node = node
        self._run: _Run | None = None
        self._busy = False
        group = ReentrantCallbackGroup()
        self._server = ActionServer(
            node, RunEpisode, '~/run_episode', self._execute, callback_group=group,
            goal_callback=lambda request: GoalResponse.ACCEPT,
            cancel_callback=lambda goal: CancelResponse.ACCEPT)
        self._timer = node.create_timer(
            FEEDBACK_PERIOD_S, self._watch, callback_group=group,
            clock=Clock(clock_type=ClockType.STEADY_TIME))
        self._timer.cancel()

    def abandon(self, termination: str) -> None:
        """End the running episode, if any; any thread that holds no lock."""
        run = self._run
        if run is not None and not run.ended.done():
            run.ended.set_result(termination)
            wake(self._node)

    async def _execute(self, goal: ServerGoalHandle) -> RunEpisode.Result:
        result = RunEpisode.Result(code='ok')
        if self._busy:
            return self._refuse(goal, result, LaneBusy(
                'an episode is running; cancel it or wait for its result'))
        self._busy = True
        try:
            control, begun = await self._node.begin_episode(goal.request)
            self._run = run = _Run(goal, Future(executor=self._node.executor), control, begun,
                                   self._ros_now_s())
            self._timer.reset()
            self._watch()  # what has come while it began ends it at once
            self._finish(run, result, await run.ended)
        except FlashrtError as error:
            self._refuse(goal, result, error)
        finally:
            self._timer.cancel()
            self._run, self._busy = None, False
        return result

    def _finish(self, run: _Run, result: RunEpisode.Result, termination: str) -> None:
        goal = run.goal
        count = run.control.end_run(run.begun, hold=self._node.state_label == ACTIVE)
        result.termination = termination
        result.episode, result.steps, result.ticks = run.begun.episode, count.steps, count.ticks
        result.success = termination in ('steps', 'duration')
        result.message = (f'episode {result.episode} ended ({termination}) after {result.steps} '
                          f'steps and {result.ticks} ticks; '
                          + ('a reset has begun the next' if count.over else 'the robot holds'))
        if termination == 'cancelled':
            goal.canceled()
        elif result.success:
            goal.succeed()
        else:
            result.code = termination
            goal.abort()

    def _watch(self) -> None:
        run = self._run
        if run is None or run.ended.done():
            return
        progress, holds = run.control.progress, run.control.holds
        count = run.control.count(run.begun)
        run.goal.publish_feedback(RunEpisode.Feedback(
            episode=progress.episode, step=progress.step, tick=progress.tick,
            phase=self._node.phase))
        limit_s, limit = run.goal.request.max_duration_s, run.goal.request.max_steps
        # A clock that jumps, back or from zero on, makes an episode neither longer nor shorter.
        now_s, last_s = self._ros_now_s(), run.seen_s
        run.elapsed_s += max(now_s - last_s, 0.0) if last_s > 0.0 else 0.0
        run.seen_s = now_s
        if limit and count.steps >= limit:
            self.abandon('steps')
        elif count.over:
            self.abandon('reset')
        elif run.goal.is_cancel_requested:
            self.abandon('cancelled')
        elif limit_s > 0.0 and run.elapsed_s >= limit_s:
            self.abandon('duration')
        elif Cause.FAULT in holds.causes:
            self.abandon('fault')
        elif ((holds.phase is Phase.HOLD and holds.latched) or self._node.state_label != ACTIVE
              or self._node.control is not run.control):
            self.abandon('held')

    def _refuse(self, goal: ServerGoalHandle, result: RunEpisode.Result,
                error: FlashrtError) -> RunEpisode.Result:
        self._node.count_refusal(error)
        result.success, result.code, result.message = False, error.code, str(error)
        result.termination = 'refused'
        goal.abort()
        return result

    def _ros_now_s(self) -> float:
        return self._node.get_clock().now().nanoseconds / 1e9


def check_goal(request: RunEpisode.Goal) -> None:
    """Check the limits of a goal.

    :raises ParameterInvalid: a negative or non-finite duration, or a negative seed.
    """
    if not 0.0 <= request.max_duration_s < 86400.0:
        raise ParameterInvalid(
            f'max_duration_s is {request.max_duration_s}; give 0 (no limit) to 86400')
    if request.set_seed and request.seed < 0:
        raise ParameterInvalid(f'seed is {request.seed}; give 0 to 2**63 - 1')
