"""The planner node: plans, cancel, subgoals out, outcomes, capsule services."""

from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
import json
from pathlib import Path
import threading
from typing import Any

from _fake_planner import FakePlanner
from _planner_rig import FIRST
from _planner_rig import Goal
from _planner_rig import planner_rig
from _planner_rig import SECOND
from _planner_rig import TWO
from _ros_fixtures import wait_until
from action_msgs.msg import GoalStatus
import pytest
from std_msgs.msg import String

from flashrt_ros import qos
from flashrt_ros.msg import Subgoal
from flashrt_ros.msg import SubgoalOutcome

pytestmark = pytest.mark.ros
EACH = pytest.mark.parametrize('link', ['bound', 'topic', 'service'])


def until_latched(robot, sequence: int) -> None:
    wait_until(lambda: robot.executor.engine.slot.latched == sequence,
               f'subgoal {sequence} to be latched')


def executing_unheard(planner, robot) -> Goal:
    """A plan that waits for its first subgoal, whose node hears every further event too late."""
    robot.run()
    goal = planner.goal(TWO, wait=True).until('execute')
    planner.node.link._heard = lambda *event: None
    return goal


@contextmanager
def held_back(planner, goal: Callable[[], Goal]) -> Iterator[Goal]:
    """A plan that stands in a decode step until it is asked to end, however long that takes."""
    switches = planner.model.switches
    gate, waiting = threading.Event(), switches.waiting
    switches.gate = gate
    made = goal()
    wait_until(lambda: switches.waiting > waiting, 'a decode step')
    plan = planner.node.engine.plan
    yield made
    wait_until(lambda: plan.stopped is not None, 'the plan to be asked to end')
    switches.gate = None
    gate.set()


@EACH
def test_a_plan_is_decoded_and_its_subgoals_are_carried_out_one_after_the_other(
        tmp_path: Path, link: str) -> None:
    with planner_rig(tmp_path, link=link) as (planner, robot):
        robot.run()
        goal = planner.goal(TWO, scene='blocks: red. zones: blue.', wait=True)
        until_latched(robot, 1)
        assert robot.executor.engine.slot.requested == 1, 'the second waits for the first'
        planner.outcome(1)
        until_latched(robot, 2)
        wait_until(lambda: any(c.subgoal_sequence == 2 for c in robot.chunks), 'its chunk')
        planner.outcome(2)
        result = goal.result()
        assert goal.status == GoalStatus.STATUS_SUCCEEDED and result.code == 'ok', result.message
        assert list(result.subgoals) == [FIRST, SECOND] and list(result.sequences) == [1, 2]
        assert list(result.outcomes) == ['done', 'done'] and result.capsule_hit
        assert result.tokens >= len(f'{FIRST}; {SECOND}.') and result.prompt_tokens > 0
        assert 0 < result.restore_us < result.ttft_us and result.append_us < result.ttft_us
        assert ''.join(f.text for f in goal.feedback) == f'{FIRST}; {SECOND}.'
        assert {f.phase for f in goal.feedback} == {'restore', 'append', 'decode', 'execute'}
        told = robot.until_event('subgoal', '2')
        assert SECOND in told.detail and '"deadline_s": 30.0' in told.detail
        wait_until(lambda: planner.statuses[-1].phase == 'ready', 'the last status')
        assert planner.statuses[-1].code == 'ok' and planner.statuses[-1].sequence == 2
        assert 'say: put the red block' in planner.model.switches.prompts[-1]


def test_without_wait_the_result_comes_when_the_plan_is_decoded_and_it_goes_on(
        tmp_path: Path) -> None:
    with planner_rig(tmp_path) as (planner, robot):
        robot.run()
        result = planner.goal(TWO).result()
        assert result.success and list(result.sequences) == [1, 0]
        planner.outcome(1)
        until_latched(robot, 2)
        again = planner.goal(SECOND).result()
        assert again.success and list(again.sequences) == [3], 'a plan without a waiting client'
        assert planner.counter('plans_superseded') == 1


def test_a_dry_run_writes_nothing_and_needs_no_executor(tmp_path: Path) -> None:
    with planner_rig(tmp_path, link='topic', executor='nobody',
                     link_timeout_s=0.3) as (planner, robot):
        result = planner.goal(dry_run=True).result()
        assert result.success and list(result.subgoals) == [FIRST, SECOND]
        assert robot.executor.engine.slot.requested == 0
        refused = planner.goal().result()
        assert refused.code == 'wrong_state' and '/nobody' in refused.message


def test_a_context_whose_capsule_is_gone_is_computed_anew(tmp_path: Path) -> None:
    with planner_rig(tmp_path) as (planner, _):
        first = planner.goal(dry_run=True).result()
        store, name = planner.node.store, planner.session.boundary.session
        store.pin('context', False, name)
        store.drop('context', name)
        again = planner.goal(dry_run=True).result()
        assert (first.capsule_hit, again.capsule_hit) == (True, False)
        assert again.success and list(again.subgoals) == list(first.subgoals)
        assert planner.counter('capsule_misses') == 1 and 0 < again.restore_us < again.ttft_us


def test_an_instruction_outside_the_grammar_is_answered_cannot_and_nothing_moves(
        tmp_path: Path) -> None:
    with planner_rig(tmp_path) as (planner, robot):
        robot.run()
        goal = planner.goal('make me a coffee', wait=True)
        result = goal.result()
        assert goal.status == GoalStatus.STATUS_ABORTED and result.code == 'cannot'
        assert 'coffee' in result.message and not result.subgoals
        assert 'nothing of the language of tasks; say it as' in result.message
        assert robot.executor.engine.slot.requested == 0 and planner.counter('plans_cannot') == 1
        for bad in ('', '  ', 'x' * 5000, 'go home\nplan: ', 'go\x07home'):
            assert planner.goal(bad).result().code == 'parameter_invalid', bad
        for outside in ('hold', 'no', 'do not go home', 'put the pink block in the blue zone'):
            result = planner.goal(outside).result()
            assert result.code == 'parameter_invalid' and 'trained to read' in result.message
        assert robot.executor.engine.slot.requested == 0
        assert planner.goal(SECOND).result().success, 'and it goes on as if nothing was'


def test_an_answer_cannot_says_why_as_far_as_that_is_known(tmp_path: Path) -> None:
    with planner_rig(tmp_path, FakePlanner(script=lambda prompt: 'cannot.')) as (planner, _):
        for scene, words in (('blocks: green. zones: blue.', 'the scene has no red block, it is'),
                             ('blocks: red. zones: blue.', "the planner wrote 'cannot'")):
            result = planner.goal(FIRST, scene=scene, dry_run=True).result()
            assert result.code == 'cannot' and words in result.message, result.message
            assert 'nothing was written; now active' in result.message


def test_what_a_model_writes_against_the_grammar_ends_the_plan_before_it_is_written(
        tmp_path: Path) -> None:
    model = FakePlanner(script=lambda prompt: 'go home; jump.')
    with planner_rig(tmp_path, model, grammar='none') as (planner, robot):
        assert list(planner.goal(SECOND).result().subgoals) == ['go home; jump.'], 'any text'
    with planner_rig(tmp_path, FakePlanner(script=lambda prompt: 'jump.')) as (planner, robot):
        result = planner.goal(SECOND).result()
        assert not result.success and robot.executor.engine.slot.requested == 0


def test_a_subgoal_longer_than_the_slot_is_refused_with_both_lengths(tmp_path: Path) -> None:
    model = FakePlanner(script=lambda prompt: 'z' * 40 + '\n')
    with planner_rig(tmp_path, model, grammar='none') as (planner, robot):
        robot.run()
        result = planner.goal(SECOND, wait=True).result()
        assert result.code == 'config_invalid'
        assert '40 tokens' in result.message and 'at most 24' in result.message
        assert list(result.sequences) == [0] and robot.executor.engine.slot.requested == 0


@EACH
def test_a_cancel_ends_at_a_tokens_boundary_and_goes_back_to_the_mark(
        tmp_path: Path, link: str) -> None:
    with planner_rig(tmp_path, link=link) as (planner, robot):
        robot.run()
        gate = threading.Event()
        goal = planner.goal().until('append')
        goal.result()
        planner.model.switches.gate = gate
        waiting = planner.model.switches.waiting
        goal = planner.goal('go home', wait=True)
        wait_until(lambda: planner.model.switches.waiting > waiting, 'a decode step')
        goal.cancel()
        planner.model.switches.gate = None
        gate.set()
        result = goal.result()
        assert goal.status == GoalStatus.STATUS_CANCELED and result.code == 'cancelled'
        assert planner.session.text.endswith('say: go home\nplan: '), 'its mark'
        assert planner.counter('rollbacks') == 1 and not result.subgoals
        assert planner.goal('go home').result().success


def test_a_cancel_at_any_moment_leaves_a_planner_that_plans(tmp_path: Path) -> None:
    model = FakePlanner(step_s=0.001, chunk_s=0.005)
    with planner_rig(tmp_path, model) as (planner, robot):
        robot.run()
        for wait_ms in range(0, 60, 6):
            goal = planner.goal(wait=True)
            threading.Event().wait(wait_ms / 1e3)
            goal.cancel()
            assert goal.result().code == 'cancelled'
        result = planner.goal().result()
        assert result.success and list(result.subgoals) == [FIRST, SECOND]


def test_one_plan_at_a_time_and_a_preempting_one_takes_its_place(tmp_path: Path) -> None:
    model = FakePlanner()
    with planner_rig(tmp_path, model) as (planner, robot):
        robot.run()
        with held_back(planner, lambda: planner.goal(wait=True)) as slow:
            refused = planner.goal('go home').result()
            assert refused.code == 'busy' and 'preempt' in refused.message
            goal = planner.goal('go home', preempt=True, priority=Subgoal.PRIORITY_INTERRUPT)
        assert slow.result().code == 'superseded'
        result = goal.result()
        assert result.success and list(result.subgoals) == ['go home'], result.message
        until_latched(robot, result.sequences[0])
        assert '"interrupt": true' in robot.until_event('subgoal', '1').detail


@EACH
def test_an_interrupt_of_the_executor_ends_the_plan_and_nothing_of_it_comes_later(
        tmp_path: Path, link: str) -> None:
    with planner_rig(tmp_path, link=link) as (planner, robot):
        robot.run()
        with held_back(planner, lambda: planner.goal(TWO, wait=True)) as goal:
            reply = robot.call('set_subgoal', subgoal=Subgoal(
                text='stop', priority=Subgoal.PRIORITY_INTERRUPT))
            assert reply.success and reply.sequence == 1
        result = goal.result()
        assert result.code == 'superseded', result.message
        assert list(result.sequences) in ([], [0]) and planner.counter('rollbacks') == 1
        until_latched(robot, 1)
        assert robot.executor.engine.slot.requested == 1


@EACH
def test_a_subgoal_of_somebody_else_makes_the_executor_refuse_the_plans_next_one(
        tmp_path: Path, link: str) -> None:
    with planner_rig(tmp_path, link=link) as (planner, robot):
        goal = executing_unheard(planner, robot)
        assert robot.call('set_subgoal', subgoal=Subgoal(text='stop')).sequence == 2
        planner.outcome(1)
        result = goal.result()
        assert result.code == 'subgoal_refused' and 'already' in result.message
        assert robot.executor.engine.slot.requested == 2


@EACH
def test_a_subgoal_for_a_past_episode_is_refused_and_nothing_of_its_plan_is_carried_out(
        tmp_path: Path, link: str) -> None:
    with planner_rig(tmp_path, link=link) as (planner, robot):
        goal = executing_unheard(planner, robot)
        robot.reset()
        planner.outcome(1)
        result = goal.result()
        assert result.code == 'subgoal_refused' and 'for episode 1' in result.message
        assert robot.executor.engine.slot.requested == 1
        assert robot.executor.report.counters['subgoals_wrong_episode'] == 1


@EACH
def test_a_subgoal_planned_before_a_restore_is_refused_and_nothing_of_its_plan_is_carried_out(
        tmp_path: Path, link: str) -> None:
    with planner_rig(tmp_path, link=link) as (planner, robot):
        goal = executing_unheard(planner, robot)
        now = robot.call('restore', id='c0').epoch
        planner.outcome(1)
        result = goal.result()
        assert result.code == 'subgoal_refused', result.message
        assert f'of epoch {now - 1}, the current one is {now}' in result.message
        assert robot.executor.engine.slot.requested == 1
        assert robot.executor.report.counters['subgoals_wrong_epoch'] == 1
        after = planner.goal(SECOND, wait=True).until('execute')
        until_latched(robot, 2)
        planner.outcome(2)
        assert after.result().success, 'a plan of the present epoch'


@EACH
def test_a_hold_that_was_asked_for_ends_what_is_being_decoded(tmp_path: Path, link: str) -> None:
    with planner_rig(tmp_path, link=link) as (planner, robot):
        robot.run()
        with held_back(planner, lambda: planner.goal(TWO, wait=True)) as goal:
            assert robot.call('hold', cause='visitor', latch=True).success
        result = goal.result()
        assert result.code == 'superseded' and 'visitor' in result.message


def test_a_hold_leaves_a_decoded_plan_and_a_reset_ends_it(tmp_path: Path) -> None:
    with planner_rig(tmp_path) as (planner, robot):
        robot.run()
        goal = planner.goal(TWO, wait=True).until('execute')
        assert robot.call('hold', cause='visitor', latch=False).success
        assert robot.call('resume').success
        planner.outcome(1)
        until_latched(robot, 2)
        robot.reset()
        result = goal.result()
        assert result.code == 'superseded' and 'reset' in result.message


def test_a_reset_that_is_heard_late_leaves_the_plan_that_began_after_it(tmp_path: Path) -> None:
    with planner_rig(tmp_path) as (planner, robot):
        robot.run()
        goal = planner.goal(TWO, wait=True).until('execute')
        planner.node._heard('reset', 'c0', {'epoch': robot.executor.control.progress.epoch})
        planner.outcome(1)
        until_latched(robot, 2)
        planner.outcome(2)
        result = goal.result()
        assert result.success, result.message


def test_a_failed_subgoal_is_planned_anew_with_the_newest_scene_and_then_given_up(
        tmp_path: Path) -> None:
    with planner_rig(tmp_path, prompt_form='plain') as (planner, robot):
        robot.run()
        goal = planner.goal(TWO, wait=True).until('execute')
        planner.outcome(1)
        until_latched(robot, 2)
        scene = planner.probe.create_publisher(String, 'scene', 1)
        wait_until(lambda: scene.get_subscription_count() > 0, 'the planner to listen')
        scene.publish(String(data='blocks: red. zones: blue. red in blue.'))
        wait_until(lambda: planner.node._scene, 'the scene')
        planner.outcome(2, SubgoalOutcome.FAILED, message='it slipped')
        until_latched(robot, 3)
        prompt = planner.model.switches.prompts[-1]
        assert 'red in blue' in prompt and f'done: {FIRST}' in prompt and (
            f'failed: {SECOND}' in prompt)
        planner.outcome(3, SubgoalOutcome.FAILED, message='it slipped again')
        result = goal.result()
        assert result.code == 'subgoal_failed' and 'slipped again' in result.message
        assert result.replans == 1 and result.outcomes[0] == 'done'


@EACH
def test_a_subgoal_whose_deadline_passes_holds_the_robot_and_is_planned_anew(
        tmp_path: Path, link: str) -> None:
    with planner_rig(tmp_path, link=link) as (planner, robot):
        robot.run()
        heard: list[SubgoalOutcome] = []
        planner.probe.create_subscription(
            SubgoalOutcome, 'subgoal_outcome', heard.append, qos.record())
        wait_until(lambda: planner.probe.count_publishers('subgoal_outcome') == 2, 'publishers')
        goal = planner.goal(SECOND, wait=True, deadline_s=0.1)
        robot.until_event('hold', 'subgoal_deadline')
        result = goal.result()
        assert result.code == 'subgoal_timed_out' and result.replans == 1
        assert robot.executor.engine.slot.requested == 2
        robot.until_event('subgoal_timed_out', '2')
        timed_out = [e.name for e in robot.events if e.kind == 'subgoal_timed_out']
        assert timed_out == ['1', '2'], 'each of them once'
        wait_until(lambda: len(heard) == 2, 'both as messages')
        assert 'outcome_unexpected' not in planner.node.report.refusals.snapshot()


@EACH
def test_a_subgoal_that_a_latched_fault_has_failed_is_planned_anew_and_begun_after_the_resume(
        tmp_path: Path, link: str) -> None:
    with planner_rig(tmp_path, link=link, prompt_form='plain') as (planner, robot):
        robot.run()
        goal = planner.goal(SECOND, wait=True)
        until_latched(robot, 1)
        robot.policy.switches.error = ValueError('this policy is ill')
        wait_until(lambda: robot.executor.control.holds.latched, 'the latch')
        robot.policy.switches.error = None
        wait_until(lambda: robot.executor.engine.slot.requested == 2, 'the new plan')
        assert f'failed: {SECOND}' in planner.model.switches.prompts[-1]
        assert robot.executor.engine.slot.latched == 1, 'nothing moves before the resume'
        assert robot.call('resume').success
        until_latched(robot, 2)
        planner.outcome(2)
        result = goal.result()
        assert result.success and result.replans == 1, result.message


@pytest.mark.parametrize('link', ['topic', 'service'])
def test_an_executor_that_falls_silent_ends_the_plan_within_its_time(
        tmp_path: Path, link: str) -> None:
    with planner_rig(tmp_path, link=link, link_timeout_s=0.3) as (planner, robot):
        robot.run()
        planner.model.switches.gate = gate = threading.Event()
        waiting = planner.model.switches.waiting
        goal = planner.goal(SECOND, wait=True)
        wait_until(lambda: planner.model.switches.waiting > waiting, 'a decode step')
        robot.executor._inputs.close()
        robot.executor.services_made.frame.close()
        planner.model.switches.gate = None
        gate.set()
        result = goal.result()
        assert result.code == 'executor_silent', result.message
        assert list(result.sequences) == [0] and planner.counter('subgoals_refused') == 1


def test_the_executors_verdict_is_heard_as_its_event_even_where_no_message_comes(
        tmp_path: Path) -> None:
    with planner_rig(tmp_path) as (planner, robot):
        robot.run()
        goal = planner.goal(TWO, wait=True).until('execute')
        for sequence in ('1', '2'):
            until_latched(robot, int(sequence))
            planner.node._heard('subgoal_done', sequence, {'message': 'the policy says so'})
        assert goal.result().success


def test_an_outcome_that_nobody_waits_for_is_counted(tmp_path: Path) -> None:
    with planner_rig(tmp_path) as (planner, _):
        planner.outcome(7)
        planner.outcome(1, 9)
        wait_until(lambda: planner.node.report.refusals.snapshot().get(
            'outcome_unexpected') == 2, 'both to be counted')


def instruct(planner) -> Callable[[str], None]:
    publisher = planner.probe.create_publisher(String, '/planner/instruction', 1)
    wait_until(lambda: publisher.get_subscription_count() > 0, 'the planner to listen')
    return lambda text: publisher.publish(String(data=text))


def plan_event(planner, code: str) -> dict[str, Any]:
    found = wait_until(lambda: [e for e in planner.events if (e.kind, e.name) == ('plan', code)],
                       f'a plan that ends with {code}')
    return json.loads(found[-1].detail)


def test_an_instruction_on_the_topic_is_planned_and_its_end_is_told_in_full(
        tmp_path: Path) -> None:
    with planner_rig(tmp_path) as (planner, robot):
        say = instruct(planner)
        robot.run()
        say(TWO)
        until_latched(robot, 1)
        planner.outcome(1)
        until_latched(robot, 2)
        planner.outcome(2)
        told = plan_event(planner, 'ok')
        assert told['subgoals'] == [FIRST, SECOND] and told['instruction'] == TWO
        wait_until(lambda: planner.statuses and planner.statuses[-1].code == 'ok', 'the status')


def test_a_new_instruction_takes_the_place_of_the_one_before_and_a_wrong_one_changes_nothing(
        tmp_path: Path) -> None:
    with planner_rig(tmp_path) as (planner, robot):
        say = instruct(planner)
        robot.run()
        say(TWO)
        until_latched(robot, 1)
        say('')
        wait_until(lambda: any(e.kind == 'refused' and 'parameter_invalid' in e.detail
                               for e in planner.events), 'the refusal')
        assert planner.node.engine.plan.stopped is None, 'the plan goes on'
        say('make me a coffee')
        assert plan_event(planner, 'superseded')['instruction'] == TWO
        assert 'coffee' in plan_event(planner, 'cannot')['message']
        say('go home')
        until_latched(robot, 2)
        assert robot.executor.engine.slot.requested == 2


def test_an_instruction_ends_the_plan_that_is_being_decoded(tmp_path: Path) -> None:
    with planner_rig(tmp_path) as (planner, robot):
        say = instruct(planner)
        robot.run()
        planner.model.switches.step_s = 0.05
        say(TWO)
        wait_until(lambda: planner.statuses and planner.statuses[-1].phase == 'decode',
                   'its decode')
        say('go home')
        assert plan_event(planner, 'superseded')['instruction'] == TWO
        planner.model.switches.step_s = 0.0
        until_latched(robot, 1)
        assert 'go home' in robot.until_event('subgoal', '1').detail
