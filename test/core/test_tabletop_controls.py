"""The comparisons run through with models that know nothing, and their rows say what they are."""
from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_tabletop_train_policy import CPU
from test_tabletop_train_policy import RECIPE
from test_tabletop_train_policy import shrink

from flashrt_core.tabletop import controls
from flashrt_core.tabletop import dataset
from flashrt_core.tabletop import plan_writer
from flashrt_core.tabletop import planner_data
from flashrt_core.tabletop import train_planner
from flashrt_core.tabletop import train_policy
from flashrt_core.tabletop.driver import Driver
from flashrt_core.tabletop.model_cards import main as cards
from flashrt_core.tabletop.planner_data import Lessons
from flashrt_core.tabletop.training import load_record
from flashrt_core.tabletop.training import Recipe


@pytest.fixture(scope='module')
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy of three steps and a planner of one."""
    path = tmp_path_factory.mktemp('models')
    with pytest.MonkeyPatch.context() as patched:
        shrink(patched)
        patched.setattr(planner_data, 'CORPUS', 400)
        patched.setitem(train_planner.SIZES, 'layers', 3)
        patched.setitem(train_planner.SIZES, 'width', 32)
        (path / 'policy').mkdir()
        dataset.save(dataset.episode(4)[::3], path / 'policy' / train_policy.EXPERT)
        train_policy.train(path / 'policy', RECIPE, CPU, 10, 1, 1)
        train_planner.train(path / 'planner', Recipe(steps=1, batch=2), CPU, 10)
    return path


def test_each_control_runs_on_the_same_tables(
        models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controls, 'LONGEST', 20)
    monkeypatch.setattr(plan_writer, 'MOST_TOKENS', 8)  # an untrained planner finds no end
    policy, planner = models / 'policy/policy.yaml', models / 'planner/planner.yaml'
    driver = Driver(policy)
    try:
        # It knows nothing, so the block never slips and all three are one.
        assert len({controls.retry(driver, 0, how) for how in controls.RETRIES}) == 1
    finally:
        driver.close()
    resets = controls.resets(policy, 3, 'cpu')
    assert [row['n'] for row in resets] == [3, 3, 2]
    assert float(str(resets[2]['reset_ms'])) > float(str(resets[0]['reset_ms']))
    assert all(row['same_tokens'] == '2/2' for row in controls.first_tokens(planner, 2, 'cpu'))
    plain, drafted = controls.speculation(planner, 2, 'cpu')
    assert plain['same_tokens'] == drafted['same_tokens'] == '2/2'
    assert plain['accepted'] == '-' != drafted['accepted']


def train_planner_on(models: Path, folder: Path) -> None:
    """Go on from the planner of the fixture for one step, with its sizes."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(train_planner.SIZES, 'layers', 3)
        patched.setitem(train_planner.SIZES, 'width', 32)
        train_planner.train(folder, Recipe(steps=1, batch=2), CPU, 10,
                            lessons=Lessons(renamed=0.5), begin=models / 'planner')


def test_a_model_is_taken_over_with_a_card_of_its_record(
        models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scores = tmp_path / 'scores.json'
    scores.write_text('{"put": {"good": 3, "count": 4}, "plans, seen": {"good": 1, "count": 1}}')
    arguments = ['--policy', str(models / 'policy'), '--planner', str(models / 'planner'),
                 '--scores', str(scores), '--out', str(tmp_path / 'out')]
    assert cards(arguments) == 0, capsys.readouterr().err
    text = (tmp_path / 'out/policy.md').read_text()
    assert '| steps | 3 |' in text and '| put | 3 | 4 | 75.0% |' in text and 'plans' not in text
    assert '| device | CPU |' in text and '| seed | 1 |' in text
    assert 'plans, seen' in (tmp_path / 'out/planner.md').read_text()
    assert Driver(tmp_path / 'out/policy/policy.yaml').close() is None
    train_planner_on(models, tmp_path / 'more')
    record = load_record(tmp_path / 'more')
    record['facts']['within_minutes'] = 6.8
    (tmp_path / 'more/training.json').write_text(json.dumps(record))
    assert cards(['--planner', str(tmp_path / 'more'), *arguments[4:]]) == 0
    text = (tmp_path / 'out/planner.md').read_text()
    for part in ('train --out FOLDER1`',
                 'train --out FOLDER2 --begin FOLDER1 --renamed 0.5 --within 6.8`'):
        assert part in text
    assert text.count('| steps | 1 |') == 2
    scores.write_text('{}')
    assert cards(arguments) == 2 and 'no scores for policy' in capsys.readouterr().err


@pytest.mark.parametrize('text', ['', '[1]', '{"put": 3}', '{"put": {"good": 1, "count": 0}}',
                                  '{"put": {"good": 3, "count": 2}}'])
def test_scores_that_no_evaluation_wrote_are_refused(
        models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    (tmp_path / 'scores.json').write_text(text)
    assert cards(['--policy', str(models / 'policy'), '--scores', str(tmp_path / 'scores.json'),
                  '--out', str(tmp_path / 'out')]) == 2
    told = capsys.readouterr().err
    assert 'write them by the evaluation' in told and len(told.splitlines()) == 1
    assert not (tmp_path / 'out').exists()


def test_half_a_model_is_told_before_the_work(
        models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / 'policy.yaml').write_text('policy: pi0\n')
    assert controls.main(['--policy', str(tmp_path), '--planner', str(models / 'planner'),
                          '--count', '1', '--device', 'cpu']) == 2
    assert 'lacks policy.safetensors' in capsys.readouterr().err
    assert controls.main(['--policy', str(models / 'policy'), '--planner', str(models / 'planner'),
                          '--json', str(tmp_path / 'none/rows.json')]) == 2
    assert 'rows cannot be written to' in capsys.readouterr().err
