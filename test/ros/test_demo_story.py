"""The demo's lock-step acts over real DDS, with models whose behaviour is known."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from contextlib import ExitStack
from dataclasses import dataclass
import io
from pathlib import Path
from typing import Any

import pytest
import yaml

from flashrt_core.tabletop import expert_action
from flashrt_core.tabletop import goal_reached
from flashrt_core.tabletop import parse_task
from flashrt_ros import processes
from flashrt_ros.demo import play
from flashrt_ros.demo.brain import Brain
from flashrt_ros.demo.lockstep import LockStep
from flashrt_ros.demo.record import Run
from flashrt_ros.demo.story import Story
from flashrt_ros.demo.terminal import Terminal
from flashrt_ros.msg import SubgoalOutcome
from flashrt_ros.processes import ProcessGroup

pytestmark = pytest.mark.ros
HERE = Path(__file__).parent
PLAIN = HERE.parents[1] / 'config/embodiments/tabletop.yaml'


@dataclass(frozen=True)
class Fakes(Brain):
    """The fake models of _demo_process.py."""

    embodiment: str = ''

    def executor(self) -> dict[str, object]:
        return {'embodiment': self.embodiment}

    def planner(self) -> dict[str, object]:
        return {}


@contextmanager
def a_stage(folder: Path, steps: int, **env: str) -> Iterator[LockStep]:
    robot = yaml.safe_load(PLAIN.read_text())
    robot['pose_gap'] = 3.0  # the fake policy's targets lie anywhere
    (folder / 'robot.yaml').write_text(yaml.safe_dump(robot))
    brain = Fakes('', '', True, True, 2, str(folder / 'robot.yaml'))
    args = argparse.Namespace(device='cpu', out=folder)
    terminal = Terminal(io.StringIO())
    with pytest.MonkeyPatch().context() as patch, ExitStack() as stack:
        patch.setitem(processes.MODULES, 'bringup', '_demo_process')
        env['PYTHONPATH'] = f'{HERE}:{HERE.parents[1]}'
        for attempt in range(3):
            group = stack.enter_context(ProcessGroup(folder / 'log', env=env))
            try:
                conductor = stack.enter_context(
                    play._start(group, args, brain, terminal, lock_step=True))
                break
            except play.DomainCrowded:  # by the end of another test; this lease is kept
                if attempt == 2:
                    raise
        yield LockStep(conductor, brain, Run('', ''), terminal, steps)


@pytest.fixture(scope='module')
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LockStep]:
    with a_stage(tmp_path_factory.mktemp('story'), 200) as made:
        yield made


class Teacher:
    """Takes the policy's place at the arm: commands what the expert would, and says done."""

    def __init__(self, stage: LockStep) -> None:
        self._stage, self._real = stage, stage.conductor.executor_step
        stage.conductor.executor_step = self.step

    def step(self, stamp_ns: int) -> Any:
        stage, reply = self._stage, self._real(stamp_ns)
        item, state = stage.episode.subgoals[-1], stage.states[-1]
        goals = parse_task(item.text)
        reply.positions = expert_action(state, goals).tolist()
        stage.conductor.publish(reply.positions, reply.joint_names, stamp_ns)
        if reply.ticked and item.outcome == 'open' and goal_reached(goals[0], state):
            reply.subgoal_done = item.sequence
            stage.planner.tell(item.sequence, SubgoalOutcome.DONE, 'the teacher says so')
        return reply


@pytest.fixture(scope='module')
def taught(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LockStep]:
    with a_stage(tmp_path_factory.mktemp('taught'), 400, TAUGHT='1') as made:
        Teacher(made)
        yield made


def test_a_plan_goes_on_from_subgoal_to_subgoal_as_the_policy_says_done(stage: LockStep) -> None:
    Story(stage).obeyed('Obeyed', seed=4)
    episode, plan = stage.run.episodes[-1], stage.run.plans[-1]
    first, second = episode.subgoals
    assert (first.outcome, second.outcome, plan.code) == ('done', 'done', 'ok')
    assert [first.text, second.text] == plan.subgoals and second.text == 'go home'
    assert second.sequence == first.sequence + 1
    # Done is said by the second tick in a row; the next subgoal is latched by the tick after it.
    assert (first.written, first.latched, first.ended) == (0, 0, 9)
    assert (second.written, second.latched) == (9, 16)
    assert episode.steps == second.ended


def test_a_policy_that_is_wrong_about_done_is_reported_as_wrong(stage: LockStep) -> None:
    Story(stage).obeyed('Wrong', seed=4)
    episode = stage.run.episodes[-1]
    assert episode.subgoals[0].holds is False
    assert not episode.solved
    assert any('Wrong' in failure and 'not solved' in failure for failure in stage.run.failures)


def test_the_same_again_is_compared_in_all_that_went_in_and_came_out(stage: LockStep) -> None:
    story = Story(stage)
    story.play(2)
    found = stage.run.comparisons[-1]
    assert found.equal and len(found.rows) == 5
    assert all(count > 0 for _, count, _, _ in found.rows)
    assert 'bit for bit' in stage.run.episodes[-1].note


def test_an_episode_that_went_otherwise_is_not_called_the_same(stage: LockStep) -> None:
    story = Story(stage)
    story.play(1)
    name, digests = story._before
    story.obeyed('Another table', seed=4)
    stage.compare(name, digests)
    found = stage.run.comparisons[-1]
    assert not found.equal
    assert any('Another table differs' in failure for failure in stage.run.failures)


def test_an_interrupt_supersedes_the_plan_and_is_latched_at_once(stage: LockStep) -> None:
    stage.limit, kept = 24, stage.limit
    Story(stage).play(1)
    stage.limit = kept
    episode = stage.run.episodes[-1]
    first, second = episode.subgoals[:2]
    assert first.outcome == 'superseded' and stage.run.plans[-2].code == 'superseded'
    assert second.interrupt and second.written == second.latched == 8
    # This planner cannot plan the second instruction, so it went to the policy as it is meant.
    assert second.writer == 'conductor' and stage.run.plans[-1].code == 'cannot'
    assert 'the planner says cannot' in episode.note


def test_a_retry_rolls_back_plays_the_best_of_n_and_plans_anew(stage: LockStep) -> None:
    Story(stage).tried_again()
    (proof,), (fork,) = stage.run.proofs, stage.run.forks
    assert proof.equal and proof.candidates == 2 and proof.second_epoch == proof.first_epoch + 1
    episode = stage.run.episodes[-1]
    assert len(episode.epochs) == 3 and 'nothing was held' in episode.note
    assert [text for _, text in episode.marks][1:] == [
        'snapshot', 'slip', 'rollback', 'fork', 'rollback', 'fork', episode.marks[0][1]]
    assert fork.selected in (0, 1) and len(fork.chunks) == 2
    assert stage.run.plans[-1].code == 'ok'


def test_an_arm_that_is_able_is_interrupted_while_it_carries_and_solves_the_new_task(
        taught: LockStep) -> None:
    Story(taught).play(2)
    for episode in taught.run.episodes[-2:]:
        assert episode.solved, episode
        assert [(item.outcome, item.holds) for item in episode.subgoals] == [
            ('superseded', None), ('done', True), ('done', True)]
        assert episode.subgoals[1].interrupt and episode.subgoals[1].written < 100
    assert taught.run.comparisons[-1].equal, taught.run.comparisons
    assert not taught.run.failures


def test_an_arm_that_is_able_tries_again_after_a_slip(taught: LockStep) -> None:
    Story(taught).tried_again()
    episode, held = taught.run.episodes[-1], [state.held >= 0 for state in taught.states]
    slipped = next(place for place, text in episode.marks if text == 'slip')
    assert held[slipped] and not held[slipped + 1], 'it was held until then'
    assert any(held[slipped + 2:]) and episode.solved
    assert 'nothing was held' not in episode.note
    assert not taught.run.failures
