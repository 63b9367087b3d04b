"""``python -m flashrt_core.tabletop.train_policy``: the small policy, from nothing to a score.

A Pi0 of about four million parameters learns by flow matching (arXiv 2210.02747) to do what the
scripted expert does, from perturbed demonstrations; then once more from where its own mistakes
lead, labelled by the expert (DAgger, arXiv 1011.0686). Every command may be stopped and run again:
``generate``, ``train`` and ``dagger`` go on from the folder's files, ``all`` does what is left.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import replace as changed
import os
from pathlib import Path
import sys
import time

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
import yaml

from flashrt_core.checkpoints import pi0_targets
from flashrt_core.errors import ConfigError
from flashrt_core.errors import FlashrtError
from flashrt_core.nn import GemmaDims
from flashrt_core.nn import SiglipDims
from flashrt_core.policies.pi0.batched import velocities
from flashrt_core.policies.pi0.config import Pi0Config
from flashrt_core.policies.pi0.config import Statistics
from flashrt_core.policies.pi0.config import TINY
from flashrt_core.policies.pi0.weights import random_weight
from flashrt_core.policies.pi0.weights import tables
from flashrt_core.policies.pi0.weights import weight_specs
from flashrt_core.runtime import pick_backend
from flashrt_core.tabletop import dataset
from flashrt_core.tabletop.dagger import roll_out
from flashrt_core.tabletop.training import load_weights
from flashrt_core.tabletop.training import Recipe
from flashrt_core.tabletop.training import replace
from flashrt_core.tabletop.training import save_model
from flashrt_core.tabletop.training import Training

WEIGHTS, CONFIG, EXPERT, OWN = (
    'policy.safetensors', 'policy.yaml', 'expert.safetensors', 'own.safetensors')
UNITS = ('rad', 'rad', 'rad', '1', 'probability')
TURN = 'turn{}'
OWN_SEEDS = 2**30  # first seed of the episodes that the policy itself drives
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
        relative=(0, 1, 2), statistics=Statistics(), blend_steps=0, rows=1, row_keys=(1,),
    )  # fmt: skip


def with_statistics(c: Pi0Config, samples: dataset.Samples) -> Pi0Config:
    """Return the config with mean and deviation of these samples, actions as they are learnt."""
    relative = _relative(c, samples)
    return changed(c, statistics=Statistics(
        state_mean=_row(samples.joints.mean(0)), state_std=_row(samples.joints.std(0)),
        action_mean=_row(relative.mean((0, 1))), action_std=_row(relative.std((0, 1)))))


def _relative(c: Pi0Config, samples: dataset.Samples) -> np.ndarray:
    actions = samples.actions.copy()
    chosen = list(c.relative)
    actions[..., chosen] -= samples.joints[:, None, chosen]
    return actions


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
    w = {n: random_weight(n, s, recipe.seed).to(device) for n, s in weight_specs(c).items()}
    if turn == 2:
        parts.append(dataset.load(folder / OWN))
        begin = load_weights(folder / TURN.format(1))
        for name, tensor in w.items():
            tensor.copy_(begin[name])
    samples = dataset.join(parts)
    place = folder / TURN.format(turn)
    place.mkdir(exist_ok=True)
    training = Training(place, recipe, w, {'statistics': vars(c.statistics)})
    frames = _frames(samples, c, device, workers)
    given = _tensors(samples, c, device)
    held = {**{n: t.to(device) for n, t in tables(c).items()}, **w}

    def loss(step: int) -> dict[str, Tensor]:
        rng = torch.Generator().manual_seed(recipe.seed * 2**32 + step)
        index = torch.randint(0, len(samples), (recipe.batch,), generator=rng).to(device)
        at = torch.randint(0, c.flow_steps, (recipe.batch,), generator=rng).to(device)
        actions = given['actions'][index]
        noise = torch.randn(actions.shape, generator=rng).to(device)
        t = (1.0 - at / c.flow_steps)[:, None, None]
        x = t * noise + (1.0 - t) * actions
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == 'cuda'):
            v = velocities(c, held, frames[index], given['text'][index], given['length'][index],
                           given['state'][index], x, at)
        errors = (v.float() - (noise - actions)).square()[..., : c.action_dim]
        return {'loss': errors.mean(), 'done': errors[..., -1].mean()}

    done = training.run(loss, minutes)
    training.save()
    save_model(pi0_targets(c), w, folder / WEIGHTS, {'steps': str(done)})
    replace(folder / CONFIG, lambda path: path.write_text(_config_text(c), encoding='utf-8'))
    return done


def _frames(samples: dataset.Samples, c: Pi0Config, device: torch.device,
            workers: int) -> Tensor:
    """Draw every frame once; uint8 [N, V, size, size, 3] on the device."""
    size = c.vision.image_size
    frames = torch.empty((len(samples), len(c.views), size, size, 3), dtype=torch.uint8,
                         device=device)
    at = 0
    tell = _progress('frames', len(samples))
    for piece in dataset.frames_in_parallel(samples.states, size, workers, tell):
        frames[at : at + len(piece)].copy_(torch.from_numpy(piece))
        at += len(piece)
    return frames


def _tensors(samples: dataset.Samples, c: Pi0Config, device: torch.device) -> dict[str, Tensor]:
    """Return normalised states and actions and the text, on the device."""
    s = c.statistics
    actions = (_relative(c, samples) - s.action_mean) / s.action_std
    state = (samples.joints - s.state_mean) / s.state_std
    padded = F.pad(torch.tensor(actions, dtype=torch.float32), (0, c.action_width - c.action_dim))
    return {
        'actions': padded.to(device),
        'state': torch.tensor(state, dtype=torch.float32, device=device),
        'text': torch.tensor(samples.text, dtype=torch.int64, device=device),
        'length': torch.tensor(samples.length, dtype=torch.int64, device=device),
    }


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
               'row_keys': list(c.row_keys), 'weights': WEIGHTS}
    return ('# The small policy of the tabletop. The last action is the probability that the '
            'subgoal is done.\n' + yaml.safe_dump(record, sort_keys=False))


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
    parser.add_argument('--episodes', type=int, default=2400, help='of the expert')
    parser.add_argument('--own', type=int, default=400, help='episodes that the policy drives')
    parser.add_argument('--device', default='auto', choices=('auto', 'cpu', 'cuda'))
    parser.add_argument('--workers', type=int, default=os.cpu_count(), help='processes')
    parser.add_argument('--minutes', type=float, default=1e9, help='of a training, at most')
    for name, value in vars(DEFAULT).items():
        parser.add_argument(f'--{name}', type=type(value), default=value)
    o = parser.parse_args(argv)
    recipe = Recipe(**{name: getattr(o, name) for name in vars(DEFAULT)})
    try:
        device = pick_backend(o.device).device
        if o.command in ('generate', 'all'):
            generate(o.out, o.episodes, o.workers)
        if not (o.out / EXPERT).exists():
            raise ConfigError(f'{o.out} has no samples yet; run generate first')
        second = (o.out / OWN).exists()
        if o.command == 'all' or (o.command == 'train' and not second):
            train(o.out, recipe, device, o.minutes, o.workers, 1)
        if o.command in ('dagger', 'all'):
            dagger(o.out, o.own, o.workers)
        if o.command == 'all' or (o.command == 'train' and second):
            after = changed(recipe, steps=recipe.steps // 2, rate=recipe.rate / 2)
            train(o.out, after, device, o.minutes, o.workers, 2)
    except FlashrtError as error:
        print(f'error [{error.code}]: {error}', file=sys.stderr)
        return 2
    return 0


if __name__ == '__main__':
    sys.exit(main())
