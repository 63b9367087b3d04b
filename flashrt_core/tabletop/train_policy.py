"""``python -m flashrt_core.tabletop.train_policy``: the small policy, from nothing to a score.

A Pi0 of about four million parameters learns by flow matching (arXiv 2210.02747) to do what the
scripted expert does, from perturbed demonstrations; then once more from where its own mistakes
lead, labelled by the expert (DAgger, arXiv 1011.0686). ``generate``, ``train``, ``dagger`` and
``train`` again are short steps that may be stopped and go on from the folder's files. ``all`` does
everything at once, the GPU and every core busy, in a time that is given.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import replace as changed
import os
from pathlib import Path
import sys
import time

import numpy as np
import torch
from torch import Tensor
import yaml

from flashrt_core.checkpoints import pi0_targets
from flashrt_core.command_line import number
from flashrt_core.command_line import run
from flashrt_core.command_line import whole_number
from flashrt_core.errors import ConfigError
from flashrt_core.nn import GemmaDims
from flashrt_core.nn import SiglipDims
from flashrt_core.policies import make_policy
from flashrt_core.policies.pi0.config import load_config
from flashrt_core.policies.pi0.config import Pi0Config
from flashrt_core.policies.pi0.config import Statistics
from flashrt_core.policies.pi0.config import TINY
from flashrt_core.policies.pi0.weights import random_weight
from flashrt_core.policies.pi0.weights import weight_specs
from flashrt_core.runtime import pick_backend
from flashrt_core.tabletop import dataset
from flashrt_core.tabletop.dagger import roll_out
from flashrt_core.tabletop.models import config_of
from flashrt_core.tabletop.policy_learner import relative_actions
from flashrt_core.tabletop.policy_learner import Shelf
from flashrt_core.tabletop.policy_learner import Step
from flashrt_core.tabletop.producer import OWN_SEEDS
from flashrt_core.tabletop.producer import Piece
from flashrt_core.tabletop.producer import Producer
from flashrt_core.tabletop.training import digest_of
from flashrt_core.tabletop.training import hold_folder
from flashrt_core.tabletop.training import load_weights
from flashrt_core.tabletop.training import Recipe
from flashrt_core.tabletop.training import RECORD
from flashrt_core.tabletop.training import replace
from flashrt_core.tabletop.training import save_model
from flashrt_core.tabletop.training import take_weights
from flashrt_core.tabletop.training import Training

WEIGHTS, CONFIG, EXPERT, OWN = (
    'policy.safetensors', 'policy.yaml', 'expert.safetensors', 'own.safetensors')
UNITS = ('rad', 'rad', 'rad', '1', 'probability')
TURN = 'turn{}'
CANDIDATES = 8  # that a tick may choose from
BRANCHES = 4    # of a fork
TIMED = 'timed'
SPARE_S = 12.0         # to write what was learnt
ROUND_S = 30.0         # from one version of the policy that records episodes to the next
FIRST_SAMPLES = 6000   # before the first step
DEFAULT = Recipe(steps=12000, batch=512, rate=1e-3, warmup=300, decay=0.01)
Tell = Callable[[int], None]


def sizes() -> Pi0Config:
    """Return the config that is trained, in float32 and without statistics."""
    return changed(
        TINY,
        vision=SiglipDims(image_size=84, patch_size=14, width=160, layers=4, heads=4, mlp=480),
        prefix=GemmaDims(width=192, layers=4, heads=4, kv_heads=1, head_dim=48, mlp=512),
        expert=GemmaDims(width=160, layers=4, heads=4, kv_heads=1, head_dim=48, mlp=384),
        prompt_tokens=dataset.SLOTS, subgoal_tokens=dataset.SLOTS, flow_steps=5,
        horizon=dataset.HORIZON, state_dim=4, action_dim=dataset.ACTIONS, state_width=4,
        action_width=8, units=UNITS,
        relative=(0, 1, 2), statistics=Statistics(), blend_steps=0, rows=CANDIDATES,
        row_keys=(1, BRANCHES), best_of_keys=(CANDIDATES,),
    )  # fmt: skip


def with_statistics(c: Pi0Config, samples: dataset.Samples) -> Pi0Config:
    """Return the config with mean and deviation of these samples, actions as they are learnt."""
    relative = relative_actions(c, samples)
    return changed(c, statistics=Statistics(
        state_mean=_row(samples.joints.mean(0)), state_std=_row(samples.joints.std(0)),
        action_mean=_row(relative.mean((0, 1))), action_std=_row(relative.std((0, 1)))))


def _row(values: np.ndarray) -> tuple[float, ...]:
    return tuple(round(float(value), 6) for value in values)


def train(folder: Path, recipe: Recipe, device: torch.device, minutes: float,
          workers: int, turn: int) -> int:
    """Train on the folder's samples; return the steps done in this turn.

    :param turn: 1 begins at random, with the expert's samples; 2 where turn 1 ended, with the
        policy's own samples too.
    """
    parts = [dataset.load(folder / EXPERT)]
    c = with_statistics(sizes(), parts[0])  # of the first turn, so that weights keep their scale
    w = first_weights(c, recipe, device,
                      load_weights(folder / TURN.format(1)) if turn == 2 else {})
    if turn == 2:
        parts.append(dataset.load(folder / OWN))
    samples = dataset.join(parts)
    place = folder / TURN.format(turn)
    place.mkdir(exist_ok=True)
    training = Training(place, recipe, w, {'statistics': vars(c.statistics)})
    shelf = Shelf(c, len(samples), device)
    at, tell = 0, _progress('frames', len(samples))
    for frames in dataset.frames_in_parallel(samples.states, c.vision.image_size, workers, tell):
        shelf.put(samples[at : at + len(frames)], frames)
        at += len(frames)
    step = Step(c, w, shelf, recipe.batch, recipe.seed)
    done = training.run(step.feed, step.loss, minutes)
    training.save()
    write_model(folder, c, training.mean, done)
    if training.stopped:
        raise KeyboardInterrupt
    return done


def first_weights(c: Pi0Config, recipe: Recipe, device: torch.device,
                  begin: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights to begin with: random, or those of ``begin``."""
    w = {n: random_weight(n, s, recipe.seed).to(device) for n, s in weight_specs(c).items()}
    for name in begin:
        w[name].copy_(begin[name])
    return w


def weights_of(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a trained model, as stored in bf16, on the CPU."""
    session = make_policy('pi0').bind(pick_backend('cpu'), str(folder / CONFIG))
    return take_weights(session, weight_specs(session.config))


def write_model(folder: Path, c: Pi0Config, weights: Mapping[str, Tensor], steps: int) -> None:
    """Write the model and its config as the policy reads them."""
    save_model(pi0_targets(c), weights, folder / WEIGHTS, {'steps': str(steps)})
    replace(folder / CONFIG, lambda path: path.write_text(_config_text(c), encoding='utf-8'))


def train_by_the_clock(folder: Path, recipe: Recipe, device: torch.device, minutes: float,
                       workers: int, capacity: int, begin: Path | None = None) -> int:
    """Generate, train and let the policy drive at once, all of it in ``minutes``.

    The GPU trains while every core records episodes: the expert's first, then mostly those of the
    policy as it was last written, drawn and labelled at once (DAgger without rounds). The rate
    falls to zero when the time is over; Ctrl-C ends it early and leaves a model of what was
    learnt. Steps and episodes depend on the machine; the record says how many there were.

    :param capacity: samples kept on the device, the newest.
    :param begin: folder of a model to go on from, with a rate that begins anew.
    """
    end = time.monotonic() + minutes * 60 - SPARE_S
    place = folder / TIMED
    if (place / RECORD).exists():
        raise ConfigError(f'{place} holds a training already; give another folder, and this one '
                          'with --begin to go on from it')
    place.mkdir(parents=True, exist_ok=True)
    c = sizes()
    w = first_weights(c, recipe, device, {} if begin is None else weights_of(begin))
    shelf = Shelf(c, capacity, device)
    step = Step(c, w, shelf, recipe.batch, recipe.seed)
    producer = Producer(workers, c.vision.image_size)
    try:
        if device.type == 'cuda':
            step.compile()
        first: list[Piece] = []
        while sum(len(s) for s, _ in first) < FIRST_SAMPLES and time.monotonic() < end:
            time.sleep(0.2)
            first += producer.take()
        if not first or time.monotonic() >= end:
            raise ConfigError(
                f'the {minutes:g} minutes were over with {sum(len(s) for s, _ in first)} of the '
                f'{FIRST_SAMPLES} samples that come before the first step; give more minutes, or '
                'more workers')
        begun = time.monotonic()
        c = with_statistics(c, dataset.join(s for s, _ in first))
        if begin is not None:
            c = changed(c, statistics=load_config(begin / CONFIG).statistics)
        shelf.statistics = c.statistics
        training = Training(place, recipe, w, {'statistics': vars(c.statistics)})

        def progress() -> float:
            return (time.monotonic() - begun) / max(1e-9, end - begun)

        rounds = max(1, round((end - begun) / ROUND_S))
        for number in range(rounds):
            for samples, frames in [*first, *producer.take()]:
                shelf.put(samples, frames)
            first = []
            print(f'samples {shelf.held} of {shelf.given}, episodes {producer.episodes}',
                  flush=True)
            training.run(step.feed, step.loss, progress=progress, until=(number + 1) / rounds)
            if training.stopped:
                break
            if number + 1 < rounds and (number + 1 >= 2 or begin is not None):
                own = folder / 'own' / f'{number:03}'
                own.mkdir(parents=True, exist_ok=True)
                write_model(own, c, training.mean, training.done)
                producer.drive(own / CONFIG)
                write_model(folder, c, training.mean, training.done)
        training.facts |= {
            'episodes': producer.episodes, 'samples': shelf.given, 'minutes in all': minutes,
            'first seeds': {'expert': 0, 'own': OWN_SEEDS},
            'went on from': '' if begin is None else digest_of(begin / WEIGHTS)}
    finally:
        producer.close()
    training.save()
    write_model(folder, c, training.mean, training.done)
    if training.stopped:
        raise KeyboardInterrupt
    return training.done


def _config_text(c: Pi0Config) -> str:
    """Return the YAML that ``policies.pi0.load_config`` reads back to ``c`` and the weights."""
    record: dict[str, object] = {'policy': 'pi0', 'base': 'tiny'}
    for name in ('vision', 'prefix', 'expert', 'statistics'):
        values = {k: list(v) if isinstance(v, tuple) else v
                  for k, v in vars(getattr(c, name)).items()}
        record[name] = {k: v for k, v in values.items() if v not in ([], None)}
    for name in ('prompt_tokens', 'subgoal_tokens', 'flow_steps', 'horizon', 'state_dim',
                 'action_dim', 'state_width', 'action_width', 'blend_steps', 'rows'):  # fmt: skip
        record[name] = getattr(c, name)
    record |= {'units': list(c.units), 'relative': list(c.relative),
               'row_keys': list(c.row_keys), 'best_of_keys': list(c.best_of_keys),
               'weights': WEIGHTS}
    return ('# The small policy of the tabletop. The last action is the probability that the '
            'subgoal is done.\n' + yaml.safe_dump(record, sort_keys=False))


def _capacity(c: Pi0Config, device: torch.device, episodes: int) -> int:
    """Return how many samples the device may keep: half of what is free, or so many episodes."""
    if device.type != 'cuda':
        return episodes * 120
    each = len(c.views) * c.vision.image_size**2 * 3
    return int(torch.cuda.mem_get_info(device)[0] * 0.5) // each


def _progress(what: str, total: int) -> Tell:
    started, shown = time.monotonic(), 0.0

    def tell(done: int) -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown > 5 or done == total:
            shown = now
            left = (now - started) / done * (total - done)
            print(f'{what} {done}/{total}  left {left / 60:.1f} min', flush=True)

    return tell


def generate(folder: Path, episodes: int, workers: int) -> None:
    """Record the expert's episodes unless the folder has them."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / EXPERT).exists():
        found = dataset.generate(0, episodes, workers, _progress('episodes', episodes))
        replace(folder / EXPERT, lambda path: dataset.save(found, path))
        print(f'{len(found)} samples of the expert')


def dagger(folder: Path, episodes: int, workers: int) -> None:
    """Record episodes that the trained policy drives unless the folder has them."""
    if not (folder / OWN).exists():
        found = roll_out(folder / CONFIG, OWN_SEEDS, episodes, workers,
                         _progress('own episodes', episodes))
        replace(folder / OWN, lambda path: dataset.save(found, path))
        print(f'{len(found)} samples of its own')


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 fine, 2 refused."""
    parser = argparse.ArgumentParser('train_policy', description=__doc__)
    parser.add_argument('command', choices=('generate', 'train', 'dagger', 'all'))
    parser.add_argument('--out', type=Path, required=True, help='folder of samples and model')
    parser.add_argument('--episodes', type=whole_number(1), default=2400, help='of the expert')
    parser.add_argument('--own', type=whole_number(1), default=400,
                        help='episodes that the policy drives')
    parser.add_argument('--within', type=number(0, above=True), default=9.3,
                        help='minutes for all of it: the command "all" goes by the clock')
    parser.add_argument('--begin', type=Path, help='folder of a trained model to go on from')
    parser.add_argument('--device', default='auto', choices=('auto', 'cpu', 'cuda'))
    parser.add_argument('--workers', type=whole_number(1), default=os.cpu_count(),
                        help='processes')
    parser.add_argument('--minutes', type=number(0, above=True), default=1e9,
                        help='of a training, at most')
    for name, value in vars(DEFAULT).items():
        parser.add_argument(f'--{name}', type=type(value), default=value)
    o = parser.parse_args(argv)
    return run('train_policy', lambda: _command(o))


def _command(o: argparse.Namespace) -> int:
    recipe = Recipe(**{name: getattr(o, name) for name in vars(DEFAULT)})
    device = pick_backend(o.device).device
    if o.begin is not None:
        if not o.begin.is_dir():
            raise ConfigError(f'{o.begin} is no folder; give the one of a trained policy to begin '
                              'with')
        config_of(o.begin, 'policy')
    if o.command in ('train', 'dagger') and not (o.out / EXPERT).exists():
        raise ConfigError(f'{o.out} has no samples yet; run generate first')
    with hold_folder(o.out):
        if o.command == 'all':
            done = train_by_the_clock(
                o.out, recipe, device, o.within, o.workers,
                _capacity(sizes(), device, o.episodes), o.begin)
            print(f'{done} steps; {o.out / WEIGHTS} written')
        elif o.command == 'generate':
            generate(o.out, o.episodes, o.workers)
        elif o.command == 'dagger':
            dagger(o.out, o.own, o.workers)
        elif not (o.out / OWN).exists():
            train(o.out, recipe, device, o.minutes, o.workers, 1)
        else:
            after = changed(recipe, steps=max(1, recipe.steps // 2), rate=recipe.rate / 2)
            train(o.out, after, device, o.minutes, o.workers, 2)
    return 0


if __name__ == '__main__':
    sys.exit(main())
