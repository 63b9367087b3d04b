"""The run_episode action: limits, cancel, hold, refusals, feedback."""

from pathlib import Path
import threading
from typing import Any

from _executor_rig import Rig
from _executor_rig import rig
from _ros_fixtures import wait_until
from action_msgs.msg import GoalStatus
import pytest
from rclpy.action import ActionClient

from flashrt_ros.action import RunEpisode

pytestmark = pytest.mark.ros


class Episode:
    """One goal sent to the executor."""

    def __init__(self, r: Rig, **goal: Any) -> None:
        self.feedback: list[RunEpisode.Feedback] = []
        client = ActionClient(r.probe, RunEpisode, f'{r.prefix}/run_episode')
        wait_until(client.server_is_ready, 'the action')
        self.handle = wait(client.send_goal_async(
            RunEpisode.Goal(**goal), feedback_callback=lambda m: self.feedback.append(m.feedback)))
        self._result = self.handle.get_result_async()

    def result(self) -> tuple[int, RunEpisode.Result]:
        reply = wait(self._result)
        return reply.status, reply.result


def wait(future: Any) -> Any:
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    assert done.wait(20)
    return future.result()


def test_an_episode_ends_exactly_at_its_step_limit_and_holds(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        status, result = Episode(r, reset=True, set_seed=True, seed=3, max_steps=25,
                                 prompt='go home').result()
        assert status == GoalStatus.STATUS_SUCCEEDED
        assert (result.termination, result.steps, result.episode) == ('steps', 25, 1)
        assert result.ticks > 0 and 'holds' in result.message
        assert r.executor.control.holds.causes == ('episode_end',)
        assert r.executor.control.progress.step == 25
        status, again = Episode(r, max_steps=5).result()
        assert (again.termination, again.steps, again.episode) == ('steps', 5, 1)


def test_steps_count_from_the_reset_on_however_late_its_reply_comes(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        reset, control = r.executor.verbs.reset, r.executor.control

        def slow(*given: Any) -> Any:
            report = reset(*given)
            wait_until(lambda: control.progress.step > 3, 'steps before the reply')
            return report

        r.executor.verbs.reset = slow
        result = Episode(r, reset=True, max_steps=25).result()[1]
        assert (result.steps, control.progress.step) == (25, 25)
        assert result.ticks == control.ticks_played


def test_an_episode_can_be_cancelled_and_gives_feedback(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        episode = Episode(r, reset=True)
        wait_until(lambda: episode.feedback and episode.feedback[-1].step > 0, 'feedback')
        assert episode.feedback[-1].episode == 1
        wait(episode.handle.cancel_goal_async())
        status, result = episode.result()
        assert status == GoalStatus.STATUS_CANCELED and result.termination == 'cancelled'
        assert r.executor.control.holds.holding


def test_an_episode_ends_by_duration_hold_and_reset(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        assert Episode(r, reset=True, max_duration_s=0.2).result()[1].termination == 'duration'
        episode = Episode(r, reset=True)
        wait_until(lambda: episode.feedback, 'it to run')
        r.call('hold', cause='operator', latch=True)
        status, result = episode.result()
        assert status == GoalStatus.STATUS_ABORTED and result.code == 'held'
        r.call('resume')
        episode = Episode(r, reset=True)
        wait_until(lambda: episode.feedback, 'it to run')
        r.reset()
        assert episode.result()[1].termination == 'reset'
        assert not r.executor.control.holds.causes, 'the new episode is not held'


def test_deactivate_ends_an_episode_with_held(tmp_path: Path) -> None:
    from lifecycle_msgs.msg import Transition
    with rig(tmp_path) as r:
        episode = Episode(r, reset=True)
        wait_until(lambda: episode.feedback, 'it to run')
        assert r.executor.transition(Transition.TRANSITION_DEACTIVATE)
        assert episode.result()[1].termination == 'held'


def test_bad_goals_are_refused_with_a_code(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        for goal, code in (({'max_duration_s': -1.0}, 'parameter_invalid'),
                           ({'set_seed': True, 'seed': -4}, 'parameter_invalid'),
                           ({'prompt': 'x' * 99}, 'config_invalid')):
            status, result = Episode(r, **goal).result()
            assert status == GoalStatus.STATUS_ABORTED
            assert (result.success, result.code) == (False, code)
        first = Episode(r, reset=True)
        wait_until(lambda: first.feedback, 'it to run')
        assert Episode(r).result()[1].code == 'busy'
        wait(first.handle.cancel_goal_async())
        first.result()
