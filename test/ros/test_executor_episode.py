"""The run_episode action: limits, cancel, hold, refusals, feedback."""

from pathlib import Path
import threading
from typing import Any
from unittest import mock

from _executor_rig import Rig
from _executor_rig import rig
from _ros_fixtures import wait_until
from action_msgs.msg import GoalStatus
from lifecycle_msgs.msg import Transition
import pytest
from rclpy.action import ActionClient

from flashrt_ros import executor_node
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


def test_an_episode_that_ends_before_the_reset_is_answered_is_not_let_go_on(
        tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        reset, control = r.executor.verbs.reset, r.executor.control

        def slow(*given: Any) -> Any:
            report = reset(*given)
            wait_until(lambda: 'episode_end' in control.holds.causes, 'the end of the episode')
            return report

        r.executor.verbs.reset = slow
        result = Episode(r, reset=True, max_steps=1).result()[1]
        assert (result.termination, result.steps, control.progress.step) == ('steps', 1, 1)
        assert control.holds.causes == ('episode_end',)


def test_the_limit_of_an_episode_that_a_reset_has_ended_holds_nothing_of_the_next(
        tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        control, timer = r.executor.control, r.executor._episodes._timer
        episode = Episode(r, reset=True, max_steps=30)
        wait_until(lambda: control.progress.step > 3, 'steps')
        timer.cancel()  # the executor thread is busy elsewhere
        r.call('hold', cause='test', latch=False)
        steps, ticks = control.progress.step, control.ticks_played
        r.reset()
        wait_until(lambda: control.progress.step > 40, 'steps of the next episode')
        assert control.holds.causes == ()
        timer.reset()
        result = episode.result()[1]
        assert (result.termination, result.steps, result.ticks) == ('reset', steps, ticks)
        assert 'holds' not in result.message and control.holds.causes == ()


def test_a_refused_goal_leaves_the_prompt_as_it_was(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        r.run()
        with r.executor.verbs._one_at_a_time:
            refused = Episode(r, reset=True, prompt='go home').result()[1]
        assert (refused.termination, refused.code) == ('refused', 'busy')
        before = len(r.policy.switches.inputs)
        wait_until(lambda: len(r.policy.switches.inputs) > before + 1, 'ticks')
        r.reset()
        r.until_phase('ticking')
        assert not any(t.prompt for t in r.policy.switches.inputs)
        assert not [e for e in r.events if e.kind == 'prompt']
        first = Episode(r, reset=True, max_steps=2, prompt='go home')
        assert first.result()[1].termination == 'steps'
        assert r.until_event('prompt').name == 'go home'
        assert r.policy.switches.inputs[-1].prompt or any(
            t.prompt for t in r.policy.switches.inputs)


def test_a_cleanup_while_a_goal_begins_ends_it(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        executor = r.executor
        reset = executor.verbs.reset

        def then_cleaned_up(*given: Any) -> Any:
            report = reset(*given)
            assert executor.transition(Transition.TRANSITION_DEACTIVATE)
            assert executor.transition(Transition.TRANSITION_CLEANUP)
            return report

        executor.verbs.reset = then_cleaned_up
        assert Episode(r, reset=True, max_steps=500).result()[1].termination == 'held'
        with mock.patch.object(executor_node, 'make_policy', lambda name: r.policy):
            assert executor.transition(Transition.TRANSITION_CONFIGURE)
        assert executor.transition(Transition.TRANSITION_ACTIVATE)
        assert Episode(r, reset=True, max_steps=2).result()[1].steps == 2


def test_a_clock_that_jumps_back_does_not_lengthen_an_episode(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        clock = [1000.0]
        r.executor._episodes._ros_now_s = lambda: clock[0]
        episode = Episode(r, reset=True, max_duration_s=2.0)
        for now_s in (1001.0, 5.0, 5.5, 6.5):
            count = len(episode.feedback)
            wait_until(lambda n=count: len(episode.feedback) > n + 1, 'another look')
            clock[0] = now_s
        assert episode.result()[1].termination == 'duration'


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
