"""Training the small policy: all of it at a tiny size, and an evaluation without the expert."""
from __future__ import annotations

from dataclasses import replace
from itertools import chain
from itertools import repeat
from pathlib import Path
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.torch import load_file
import torch

from flashrt_core.nn import GemmaDims
from flashrt_core.nn import SiglipDims
from flashrt_core.policies.pi0.config import load_config
from flashrt_core.tabletop import dataset
from flashrt_core.tabletop import Goal
from flashrt_core.tabletop import train_policy
from flashrt_core.tabletop import training
from flashrt_core.tabletop import World
from flashrt_core.tabletop.driver import Driver
from flashrt_core.tabletop.driver import REPLAN
from flashrt_core.tabletop.evaluate import pursue
from flashrt_core.tabletop.training import Recipe

CPU = torch.device('cpu')
RECIPE = Recipe(steps=3, batch=4, warmup=2)


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Samples of the expert and a policy of three steps."""
    path = tmp_path_factory.mktemp('policy')
    with pytest.MonkeyPatch.context() as patched:
        shrink(patched)
        part = dataset.episode(4)
        few = dataset.Samples(*(v[::3] for v in vars(part).values()))
        dataset.save(few, path / train_policy.EXPERT)
        assert train_policy.train(path, RECIPE, CPU, 10, 1, 1) == 3
    return path


def shrink(patched: pytest.MonkeyPatch) -> None:
    small = replace(
        train_policy.sizes(),
        vision=SiglipDims(image_size=28, patch_size=14, width=16, layers=1, heads=2, mlp=16),
        prefix=GemmaDims(width=16, layers=1, heads=2, kv_heads=1, head_dim=8, mlp=16),
        expert=GemmaDims(width=16, layers=1, heads=2, kv_heads=1, head_dim=8, mlp=16))
    patched.setattr(train_policy, 'sizes', lambda: small)


def test_the_written_config_is_the_trained_one(
        folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)
    expected = train_policy.with_statistics(
        train_policy.sizes(), dataset.load(folder / train_policy.EXPERT))
    found = load_config(folder / train_policy.CONFIG)
    assert found == replace(expected, weights=str(folder / train_policy.WEIGHTS))
    assert found.units[-1] == 'probability'


def test_a_training_that_stopped_goes_on_to_the_same_weights(
        folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)
    (tmp_path / train_policy.EXPERT).write_bytes((folder / train_policy.EXPERT).read_bytes())
    clock = chain([0.0] * 5, repeat(1e9))
    with monkeypatch.context() as patched:
        # The trainer's clock alone: pools and lanes go by the real one.
        patched.setattr(training, 'time', SimpleNamespace(monotonic=lambda: next(clock)))
        patched.setattr(train_policy, '_progress', lambda what, total: lambda done: None)
        assert 0 < train_policy.train(tmp_path, RECIPE, CPU, 1, 1, 1) < 3
    assert train_policy.train(tmp_path, RECIPE, CPU, 10, 1, 1) == 3
    one, two = (load_file(place / train_policy.WEIGHTS) for place in (folder, tmp_path))
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


def test_a_training_may_begin_with_a_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)
    c = load_config(folder / train_policy.CONFIG)
    held = train_policy.weights_of(folder)
    found = train_policy.first_weights(c, RECIPE, CPU, held)
    trained = training.load_weights(folder / 'turn1')
    assert found.keys() == trained.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, trained[name].to(torch.bfloat16).float()), name


def test_the_second_turn_begins_where_the_first_ended(
        folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)
    dataset.save(dataset.load(folder / train_policy.EXPERT), folder / train_policy.OWN)
    try:
        train_policy.train(folder, replace(RECIPE, steps=1, rate=1e-9), CPU, 10, 1, 2)
    finally:
        (folder / train_policy.OWN).unlink()
    first, second = (training.load_weights(folder / f'turn{n}') for n in (1, 2))
    assert all(torch.allclose(first[n], second[n], atol=1e-4) for n in first)


def test_the_policy_plays_a_few_steps_of_a_chunk_and_says_how_sure_it_is(folder: Path) -> None:
    driver = Driver(folder / train_policy.CONFIG)
    world = World(3, blocks=1, zones=1)
    goal = Goal('home')
    try:
        driver.reset(1)
        first = [driver.act(world.snapshot(), goal) for _ in range(REPLAN + 1)]
        assert driver.done in (True, False)
        driver.reset(1)
        again = [driver.act(world.snapshot(), goal) for _ in range(REPLAN)]
        assert np.array_equal(np.array(first[:REPLAN]), np.array(again))
        assert driver.session.boundary.position() == 1
        assert isinstance(pursue(driver, world, goal), bool)
    finally:
        driver.close()


def test_the_evaluation_runs_where_the_expert_cannot_be_imported(folder: Path) -> None:
    code = (
        'import sys\n'
        'from flashrt_core.tabletop import evaluate as e\n'
        'e.forbid_expert()\n'
        'from flashrt_core.tabletop.driver import Driver\n'
        'driver = Driver(sys.argv[1])\n'
        'e.LONGEST = 12\n'
        'tasks = [("pick", 0), ("home", 0), ("episode", 0)]\n'
        'results = [e.skill(driver, 0, "pick"), e.skill(driver, 0, "home"),\n'
        '           e.whole(driver, 0, None)]\n'
        'print(*e.report(tasks, results), sep=";")\n'
        'driver.close()\n'
        'try:\n'
        '    import flashrt_core.tabletop.expert\n'
        'except ImportError:\n'
        '    print("forbidden")\n')
    run = subprocess.run([sys.executable, '-c', code, str(folder / train_policy.CONFIG)],
                         capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [
        'pick;home;episodes, 1 blocks;episodes;plans of episodes', 'forbidden']


def test_the_policy_goes_back_to_a_mark(folder: Path) -> None:
    driver = Driver(folder / train_policy.CONFIG, best_of=1)
    state = World(3, blocks=1, zones=1).snapshot()
    try:
        driver.reset(1)
        mark = driver.mark()
        first = driver.act(state, Goal('home'))
        driver.rollback(mark, 1)
        assert np.array_equal(first, driver.act(state, Goal('home')))
        driver.rollback(mark, 2)
        assert not np.array_equal(first, driver.act(state, Goal('home')))
    finally:
        driver.close()


def test_a_folder_without_samples_is_refused(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_policy.main(['train', '--out', str(tmp_path), '--device', 'cpu']) == 2
    assert 'run generate first' in capsys.readouterr().err


def test_what_is_no_folder_of_a_model_to_begin_with_is_named_as_it_was_given(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for begin in (tmp_path / 'none', Path(__file__), tmp_path):
        assert train_policy.main(['all', '--out', str(tmp_path / 'out'), '--device', 'cpu',
                                  '--begin', str(begin)]) == 2
        assert f'train_policy: {begin} ' in capsys.readouterr().err
    assert not (tmp_path / 'out').exists()


def test_minutes_that_end_before_the_first_step_are_refused_and_leave_no_model(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_policy.main(['all', '--out', str(tmp_path), '--device', 'cpu', '--workers', '1',
                              '--within', '0.001']) == 2
    assert 'give more minutes' in capsys.readouterr().err
    assert not list(tmp_path.rglob('*.safetensors'))
