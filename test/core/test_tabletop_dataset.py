"""Demonstrations: labels from the state itself, what is held out, files."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flashrt_core.errors import ConfigError
from flashrt_core.policies import letterbox
from flashrt_core.tabletop import dataset
from flashrt_core.tabletop import Expert
from flashrt_core.tabletop import Goal
from flashrt_core.tabletop import goal_reached
from flashrt_core.tabletop import render_state
from flashrt_core.tabletop import World
from flashrt_core.tabletop import WorldState
from flashrt_core.tabletop.instructions import HELD_OUT_PAIRS
from flashrt_core.tabletop.subgoals import encode_subgoal
from flashrt_core.tabletop.subgoals import settled


@pytest.fixture(scope='module')
def samples() -> dataset.Samples:
    return dataset.join([dataset.episode(seed) for seed in (1, 2)])


def test_an_episode_is_the_same_for_the_same_seed(samples: dataset.Samples) -> None:
    again = dataset.join([dataset.episode(1), dataset.episode(2)])
    for name, value in vars(samples).items():
        assert np.array_equal(value, getattr(again, name))
    assert len(dataset.episode(3)) > 0 and not np.array_equal(
        dataset.episode(3).states[0], samples.states[0])


def test_a_label_is_what_the_expert_does_from_that_state_on() -> None:
    world = World(5, blocks=2, zones=2, task=None)
    goal = world.goals[0]
    for _ in range(10):
        world.step(Expert(world).action())
    found = dataset.label(world.snapshot(), goal, World(0))
    for row in found:
        assert row[:4] == pytest.approx(Expert(world).action(), abs=1e-6)
        assert row[4] == settled(goal, world.snapshot())
        world.step(Expert(world).action())


def test_states_are_perturbed_and_goals_are_reached(samples: dataset.Samples) -> None:
    done = samples.actions[:, 0, 4]
    assert 0.02 < done.mean() < 0.6 and set(np.unique(done)) == {0.0, 1.0}
    assert samples.actions.shape[1:] == (dataset.HORIZON, dataset.ACTIONS)
    assert samples.joints.std(0)[:3].min() > 0.05


def test_no_goal_of_training_pairs_held_out_colours() -> None:
    rng, seen = np.random.default_rng(0), set()
    for seed in range(150):
        world = World(seed, blocks=3, zones=3)
        world.set_task('go home')
        world.displace(dataset.draw_pose(rng))
        goal = dataset.draw_goal(rng, world.snapshot(), pairs='seen')
        assert goal is not None
        seen.add(goal.verb)
        assert (goal.block, goal.zone) not in HELD_OUT_PAIRS
    assert seen == {'put', 'pick', 'home'}


def test_frames_are_what_the_executor_makes_of_the_cameras(samples: dataset.Samples) -> None:
    frames = dataset.draw_frames(samples.states[:2], 42)
    state = WorldState.from_vector(samples.states[1])
    for at, view in enumerate(('top', 'wrist')):
        sent = render_state(state, view, 224)  # config/tabletop.yaml
        assert np.array_equal(frames[1, at], letterbox(sent, 42))


def test_a_goals_zone_may_hold_another_block_already() -> None:
    world = World(6, blocks=2, zones=1)
    one, other = world.snapshot().block_names
    goal = Goal('put', one, world.snapshot().zone_names[0])
    dataset.crowd(np.random.default_rng(0), world, goal)
    state = world.snapshot()
    assert goal_reached(Goal('put', other, goal.zone), state) and not goal_reached(goal, state)


def test_samples_come_back_from_their_file(samples: dataset.Samples, tmp_path: Path) -> None:
    dataset.save(samples, tmp_path / 's.safetensors')
    found = dataset.load(tmp_path / 's.safetensors')
    for name, value in vars(samples).items():
        assert np.array_equal(value, getattr(found, name))
    (tmp_path / 'bad').write_bytes(b'no samples')
    with pytest.raises(ConfigError, match='cannot be read'):
        dataset.load(tmp_path / 'bad')
    dataset.save(dataset.Samples(samples.states[:, :9], samples.text, samples.length,
                                 samples.actions), tmp_path / 'old')
    with pytest.raises(ConfigError, match='generate them again'):
        dataset.load(tmp_path / 'old')


def test_every_subgoal_fits_its_slots() -> None:
    goals = [Goal('put', 'orange', 'purple'), Goal('pick', 'yellow'), Goal('home')]
    assert max(len(encode_subgoal(goal)) for goal in goals) <= dataset.SLOTS
    assert len({tuple(encode_subgoal(goal)) for goal in goals}) == 3
