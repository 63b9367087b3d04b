"""Training the small planner: data by step, a stop and a resume, plans by the real session."""
from __future__ import annotations

from itertools import chain
from itertools import repeat
import json
from pathlib import Path
import re
import signal
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.torch import load_file
from safetensors.torch import save_file
import torch

from flashrt_core.errors import ConfigError
from flashrt_core.planners.qwen3_5 import load_config
from flashrt_core.planners.vocabularies import json_tokenizer
from flashrt_core.tabletop import planner_data
from flashrt_core.tabletop import train_planner
from flashrt_core.tabletop import training
from flashrt_core.tabletop.instructions import CANNOT
from flashrt_core.tabletop.instructions import draw_example
from flashrt_core.tabletop.instructions import HELD_OUT_PAIRS
from flashrt_core.tabletop.instructions import prompt
from flashrt_core.tabletop.models import config_of
from flashrt_core.tabletop.planner_data import AS_DRAWN
from flashrt_core.tabletop.planner_data import batch
from flashrt_core.tabletop.planner_data import Batches
from flashrt_core.tabletop.planner_data import encode
from flashrt_core.tabletop.planner_data import IGNORED
from flashrt_core.tabletop.planner_data import Lessons
from flashrt_core.tabletop.planner_data import OTHER_WORDS
from flashrt_core.tabletop.state import COLOURS
from flashrt_core.tabletop.train_planner import evaluate
from flashrt_core.tabletop.train_planner import main
from flashrt_core.tabletop.train_planner import train
from flashrt_core.tabletop.training import load_weights
from flashrt_core.tabletop.training import Recipe
from flashrt_core.tabletop.training import Score

CPU = torch.device('cpu')


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner_data, 'CORPUS', 400)
    monkeypatch.setitem(train_planner.SIZES, 'layers', 3)
    monkeypatch.setitem(train_planner.SIZES, 'width', 32)
    monkeypatch.setitem(train_planner.SIZES, 'mlp', 64)


def test_a_training_that_stopped_goes_on_to_the_same_weights(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe(steps=4, batch=3, warmup=2)
    assert train(tmp_path / 'whole', recipe, CPU, 10) == 4
    halves = Recipe(steps=4, batch=3, warmup=2)
    clock = chain([0.0] * 5, repeat(1e9))
    with monkeypatch.context() as patched:
        # The trainer's clock alone: the pool goes by the real one.
        patched.setattr(training, 'time', SimpleNamespace(monotonic=lambda: next(clock)))
        stopped = train(tmp_path / 'halves', halves, CPU, 1)
    assert 0 < stopped < 4
    assert train(tmp_path / 'halves', halves, CPU, 10) == 4
    whole, resumed = tmp_path / 'whole', tmp_path / 'halves'
    for one, two in ((load_weights(whole), load_weights(resumed)),
                     [load_file(f / train_planner.WEIGHTS) for f in (whole, resumed)]):
        assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
    kept = sorted(path.name for path in resumed.glob('*-*.safetensors'))
    kinds = ('exp_avg', 'exp_avg_sq', 'mean', 'weight')
    assert kept == [f'{kind}-0000004.safetensors' for kind in kinds]
    (resumed / kept[0]).unlink()
    with pytest.raises(ConfigError, match=r'exp_avg-0000004\.safetensors cannot be read'):
        train(resumed, halves, CPU, 10)


def test_a_folder_of_another_recipe_is_refused(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, Recipe(steps=1, batch=2), CPU, 10)
    code = main(['train', '--out', str(tmp_path), '--steps', '2', '--batch', '2', '--device',
                 'cpu'])
    assert code == 2 and 'give the same options or another folder' in capsys.readouterr().err


def test_a_trained_folder_is_a_planner_that_writes_plans(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, Recipe(steps=2, batch=2), CPU, 10)
    c, s = load_config(tmp_path / 'planner.yaml')
    assert c.weights == str(tmp_path / 'planner.safetensors') and s.draft_tokens == 3
    score = evaluate(tmp_path, 3, True, 'cpu', 5)
    assert score.count == 3
    assert 'asked' in capsys.readouterr().out or score.good == 3
    assert json.loads((tmp_path / 'training.json').read_text())['step'] == 2


def test_a_batch_depends_on_seed_and_step_alone(tmp_path: Path) -> None:
    lessons = Lessons(0.5, 0.5)
    planner_data.train_tokenizer(tmp_path / 'tokenizer.json', 1, lessons)
    tokenizer = json_tokenizer(tmp_path / 'tokenizer.json')
    tokens, labels = batch(tokenizer, lessons, 4, planner_data.LENGTH, 7, 2)
    again = Batches(tmp_path / 'tokenizer.json', Recipe(steps=9, batch=4, seed=7), lessons, 1,
                    workers=1)
    with again as source:
        found = [source.take() for _ in range(2)]
    assert np.array_equal(found[1], [tokens, labels])
    assert not np.array_equal(found[0], found[1])
    learnt = labels != IGNORED
    assert np.array_equal(labels[learnt], tokens[learnt]) and bool(learnt.any(1).all())


def test_the_tokenizer_gives_every_example_back(tmp_path: Path) -> None:
    planner_data.train_tokenizer(tmp_path / 'tokenizer.json', 1, AS_DRAWN)
    tokenizer = json_tokenizer(tmp_path / 'tokenizer.json')
    rng = np.random.default_rng(2)
    for _ in range(50):
        question, answer = Lessons(renamed=0.5).draw(rng)
        before, after = encode(tokenizer, question, answer)
        assert tokenizer.decode(before) == question and question.endswith('\nplan: ')
        assert tokenizer.decode(after[:-1]) == answer
        assert after[-1] == tokenizer.special[planner_data.END]


def test_plans_that_are_held_out_fit_the_sequences_that_training_shows() -> None:
    tokenizer = json_tokenizer(config_of(None, 'planner').parent / train_planner.TOKENIZER)
    rng = np.random.default_rng(6)
    for _ in range(300):
        example = draw_example(rng, held_out=True)
        whole = encode(tokenizer, prompt(example.scene, example.instruction), example.answer)
        assert sum(map(len, whole)) <= planner_data.LENGTH, example


def test_without_shares_the_lessons_are_the_language_as_it_is_drawn() -> None:
    lessons, plain = np.random.default_rng(5), np.random.default_rng(5)
    for _ in range(50):
        example = draw_example(plain)
        assert AS_DRAWN.draw(lessons) == (prompt(example.scene, example.instruction),
                                          example.answer)


def test_lists_have_a_plan_and_only_deep_ones_go_on_with_lists() -> None:
    rng = np.random.default_rng(4)
    later = re.compile(
        'empty the|what is in the|what lies on|the loose|every|all b|each block|by colour')
    counts = []
    for deep in (0.0, 1.0):
        several = 0
        for _ in range(300):
            question, answer = Lessons(lists=1.0, deep=deep).draw(rng)
            asked = question.split(' say: ')[1]
            assert answer != CANNOT and later.search(asked)
            several += len(later.findall(asked)) > 1
        counts.append(several)
    assert counts == [0, 300]


def test_renamed_colours_keep_the_plan_and_never_make_a_pair_that_is_held_out() -> None:
    rng, changed = np.random.default_rng(3), 0
    same = Lessons(renamed=1.0)
    for _ in range(1000):
        state = rng.bit_generator.state
        example = draw_example(rng)
        rng.bit_generator.state = state
        question, answer = same.draw(rng)
        plain = prompt(example.scene, example.instruction) + example.answer
        words = dict(zip(re.findall(r'\w+', plain), re.findall(r'\w+', question + answer)))
        again = ''.join(words.get(part, part) for part in re.split(r'(\w+)', plain))
        assert again == question + answer
        moved = {old: new for old, new in words.items() if old != new}
        assert set(moved) <= set(COLOURS) and set(moved.values()) <= set(OTHER_WORDS)
        assert len(set(moved.values())) == len(moved)
        pairs = re.findall(r'put the (\w+) block in the (\w+) zone', answer)
        assert not HELD_OUT_PAIRS & set(pairs)
        changed += bool(moved)
    assert changed > 800


@pytest.mark.parametrize('shares', [{'renamed': -0.1}, {'lists': 1.5}, {'lists': float('nan')}])
def test_a_share_that_is_none_is_refused(shares: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f'{next(iter(shares))} is .*; give a share from 0 to 1'):
        Lessons(**shares)


def test_a_training_goes_on_from_a_model_and_names_it(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / 'first', Recipe(steps=2, batch=2), CPU, 10)

    def command(begin: Path, *options: str) -> int:
        return main(['train', '--out', str(tmp_path / 'second'), '--begin', str(begin), '--device',
                     'cpu', '--steps', '1', '--batch', '2', '--rate', '1e-9', '--renamed', '0.5',
                     *options])

    assert command(tmp_path / 'first') == 0
    one, two = (load_file(tmp_path / f / train_planner.WEIGHTS) for f in ('first', 'second'))
    assert all(torch.allclose(one[key], two[key], atol=1e-6) for key in one)
    first, second = (training.load_record(tmp_path / f) for f in ('first', 'second'))
    assert second['lessons'] == {'renamed': 0.5, 'lists': 0.0, 'deep': 0.0}
    digest = second['begin'].pop('sha256')
    assert second['begin'] == first and len(digest) == 16
    assert (tmp_path / 'second/tokenizer.json').read_bytes() == (
        tmp_path / 'first/tokenizer.json').read_bytes()
    capsys.readouterr()
    assert command(tmp_path / 'none') == 2
    assert 'none' in capsys.readouterr().err
    config = tmp_path / 'first/planner.yaml'
    config.write_text(config.read_text().replace('mlp: 64', 'mlp: 128'))
    assert command(tmp_path / 'first', '--seed', '2') == 2
    assert 'holds a planner of other sizes' in capsys.readouterr().err


@pytest.mark.gpu
def test_a_fused_loss_trains_to_the_weights_of_a_plain_one(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, recipe = torch.device('cuda'), Recipe(steps=6, batch=4, warmup=2)
    train(tmp_path / 'fused', recipe, cuda, 10)
    monkeypatch.setattr(train_planner, 'fused', lambda loss: loss)
    train(tmp_path / 'plain', recipe, cuda, 10)
    fused, plain = (load_weights(tmp_path / name) for name in ('fused', 'plain'))
    far = {name: float((fused[name] - w).norm() / w.norm()) for name, w in plain.items()}
    assert max(far.values()) < 1e-2, far


def test_a_loss_that_cannot_be_fused_is_used_as_it_is(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    weight = torch.ones(3, requires_grad=True)

    def loss() -> dict[str, torch.Tensor]:
        return {'loss': weight.square().sum()}

    def without_compiler() -> dict[str, torch.Tensor]:
        raise RuntimeError('Failed to find C compiler\nand more')

    monkeypatch.setattr(torch, 'compile', lambda _: without_compiler)
    assert training.fused(loss) is loss
    assert 'kernels are not fused: Failed to find C compiler\n' in capsys.readouterr().out


def test_products_are_of_tf32_only_while_a_planner_trains(tmp_path: Path) -> None:
    seen = []

    def watched(*_: object) -> int:
        seen.append(torch.get_float32_matmul_precision())
        return 2

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(training.Training, 'run', watched)
        train(tmp_path, Recipe(steps=2, batch=2), CPU, 10)
    assert seen == ['high'] and torch.get_float32_matmul_precision() == 'highest'


def test_the_interval_is_wilsons() -> None:
    low, high = Score(995, 1000).interval
    assert low == pytest.approx(0.98835, abs=1e-5) and high == pytest.approx(0.99786, abs=1e-5)
    assert Score(0, 10).interval[0] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize('option, value', [
    ('steps', '0'), ('batch', '-1'), ('warmup', '0'), ('rate', 'nan'), ('decay', '-1'),
    ('average', '1'), ('seed', '-1')])
def test_a_recipe_that_cannot_be_followed_is_refused_and_makes_nothing(
        tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: str) -> None:
    assert main(['train', '--out', str(tmp_path / 'new'), f'--{option}', value, '--device',
                 'cpu']) == 2
    told = capsys.readouterr().err
    assert option in told and 'give' in told and len(told.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_an_interrupted_training_keeps_what_it_learnt_and_goes_on_to_the_same_weights(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    def command(name: str) -> int:
        return main(['train', '--out', str(tmp_path / name), '--steps', '4', '--batch', '3',
                     '--warmup', '2', '--device', 'cpu'])

    assert command('whole') == 0
    take = planner_data.Batches.take

    def interrupted(source: Batches) -> np.ndarray:
        signal.raise_signal(signal.SIGINT)
        return take(source)

    with monkeypatch.context() as patched:
        patched.setattr(planner_data.Batches, 'take', interrupted)
        assert command('halves') == 130
    assert capsys.readouterr().err == 'train_planner: stopped\n'
    assert json.loads((tmp_path / 'halves/training.json').read_text())['step'] == 1
    assert (tmp_path / 'halves' / train_planner.WEIGHTS).is_file()
    assert command('halves') == 0
    whole, resumed = (load_weights(tmp_path / name) for name in ('whole', 'halves'))
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)


def test_what_was_learnt_is_saved_now_and_then(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, 'SAVE_S', 0.0)
    taken = []
    take = planner_data.Batches.take

    def killed(source: Batches) -> np.ndarray:
        taken.append(take(source))
        if len(taken) == 3:
            raise MemoryError
        return taken[-1]

    monkeypatch.setattr(planner_data.Batches, 'take', killed)
    with pytest.raises(MemoryError):
        train(tmp_path, Recipe(steps=4, batch=3), CPU, 10)
    assert training.load_record(tmp_path)['step'] == 2


def test_a_folder_serves_one_training_at_a_time(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with training.hold_folder(tmp_path):
        code = main(['train', '--out', str(tmp_path), '--device', 'cpu'])
    assert code == 2 and 'is in use by another training' in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_weights_of_another_model_are_refused_by_name(tmp_path: Path) -> None:
    recipe = Recipe(steps=2, batch=2)
    train(tmp_path, recipe, CPU, 10)
    stored = load_file(tmp_path / 'mean-0000002.safetensors')
    save_file({'other': next(iter(stored.values()))}, tmp_path / 'mean-0000002.safetensors')
    with pytest.raises(ConfigError, match=r'mean-0000002\.safetensors is not of this model'):
        train(tmp_path, recipe, CPU, 10)
