"""The demo's lock-step acts over real DDS, with models whose behaviour is known."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
import io
from pathlib import Path

import pytest
import yaml

from flashrt_ros import processes
from flashrt_ros.demo import play
from flashrt_ros.demo.brain import Brain
from flashrt_ros.demo.lockstep import LockStep
from flashrt_ros.demo.record import Run
from flashrt_ros.demo.story import Story
from flashrt_ros.demo.terminal import Terminal
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


@pytest.fixture(scope='module')
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LockStep]:
    folder = tmp_path_factory.mktemp('story')
    robot = yaml.safe_load(PLAIN.read_text())
    robot['pose_gap'] = 3.0  # the fake policy's targets lie anywhere
    (folder / 'robot.yaml').write_text(yaml.safe_dump(robot))
    brain = Fakes('', '', True, True, 2, str(folder / 'robot.yaml'))
    args = argparse.Namespace(device='cpu', out=folder)
    terminal = Terminal(io.StringIO())
    patch = pytest.MonkeyPatch()
    patch.setitem(processes.MODULES, 'bringup', '_demo_process')
    patch.setenv('PYTHONPATH', f'{HERE}:{HERE.parents[1]}')
    with ProcessGroup(folder / 'log') as group:
        with play._start(group, args, brain, terminal, lock_step=True) as conductor:
            yield LockStep(conductor, brain, Run('', ''), terminal, 200)
    patch.undo()


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
