"""What both trainings share: AdamW with warm-up and a cosine, resuming, progress, scores."""

from collections.abc import Callable
from collections.abc import Mapping
from dataclasses import dataclass
import json
import math
import os
from pathlib import Path
import time
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save_file
import torch
from torch import Tensor

from flashrt_core.checkpoints.keymap import split_sources
from flashrt_core.checkpoints.keymap import Target
from flashrt_core.errors import ConfigError

RECORD = 'training.json'
WEIGHT = 'weight'
MOMENTS = ('exp_avg', 'exp_avg_sq')


@dataclass(frozen=True)
class Recipe:
    """What decides the trained weights besides data and sizes; kept beside them."""

    steps: int
    batch: int
    rate: float = 2e-3
    warmup: int = 200
    decay: float = 0.02
    seed: int = 1


@dataclass(frozen=True)
class Score:
    """Successes among ``count`` tries."""

    good: int
    count: int

    @property
    def interval(self) -> tuple[float, float]:
        """Return the Wilson interval at 95 % (Wilson, 1927)."""
        n, p, z = self.count, self.good / self.count, 1.959964
        middle, spread = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return ((middle - spread) / (1 + z * z / n), (middle + spread) / (1 + z * z / n))

    def __str__(self) -> str:
        low, high = self.interval
        return (f'{self.good} of {self.count}: {self.good / self.count:.2%} '
                f'(95 %: {low:.2%} to {high:.2%})')


class Training:
    """Weights by name under AdamW (arXiv 1711.05101), with a place on disk to go on from.

    :param weights: float32 tensors, changed in place. :param record: what a resume must agree in.
    :raises ConfigError: the folder holds a training with another record, or a damaged one.
    """

    def __init__(self, folder: Path, recipe: Recipe, weights: Mapping[str, Tensor],
                 record: Mapping[str, Any]) -> None:
        self.folder, self.recipe, self.weights = folder, recipe, weights
        self.record = {'recipe': vars(recipe), **record}
        matrices = [w for w in weights.values() if w.ndim > 1]
        others = [w for w in weights.values() if w.ndim <= 1]
        self._optimizer = torch.optim.AdamW(
            [{'params': matrices, 'weight_decay': recipe.decay},
             {'params': others, 'weight_decay': 0.0}], lr=recipe.rate, betas=(0.9, 0.98))
        self.done = self._resume()
        for tensor in weights.values():
            tensor.requires_grad_(True)

    def run(self, loss: Callable[[int], Mapping[str, Tensor]], minutes: float) -> int:
        """Train to the recipe's end or for ``minutes``; return the steps done in all.

        :param loss: of one step by its number: named parts, the first of them is what is lowered.
        """
        started = shown = time.monotonic()
        first = self.done
        while self.done < self.recipe.steps and time.monotonic() - started < minutes * 60:
            parts = loss(self.done)
            norm = self._update(next(iter(parts.values())))
            self.done += 1
            now = time.monotonic()
            if now - shown > 10 or self.done in (first + 1, self.recipe.steps):
                shown, pace = now, (now - started) / (self.done - first)
                told = '  '.join(f'{n} {float(v.detach()):.4f}' for n, v in parts.items())
                print(f'step {self.done}/{self.recipe.steps}  {told}  norm {float(norm):.2f}  '
                      f'{pace:.3f} s/step  left {pace * (self.recipe.steps - self.done) / 60:.1f} '
                      'min', flush=True)
        return self.done

    def _update(self, loss: Tensor) -> Tensor:
        step, recipe = self.done, self.recipe
        rise = min(1.0, (step + 1) / recipe.warmup)
        fall = 0.5 * (1 + math.cos(math.pi * step / recipe.steps))
        for group in self._optimizer.param_groups:
            group['lr'] = recipe.rate * rise * fall + 1e-6
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(list(self.weights.values()), 1.0)
        self._optimizer.step()
        return norm

    def save(self) -> None:
        """Write weights, moments, and last the record that names their step.

        A stop at any moment leaves what was saved before. One file for each, so that each can be
        carried by itself.
        """
        parts = {WEIGHT: {n: w.detach() for n, w in self.weights.items()}}
        for moment in MOMENTS:
            parts[moment] = {n: self._optimizer.state[w][moment]
                             for n, w in self.weights.items() if w in self._optimizer.state}
        for kind, tensors in parts.items():
            stored = {n: t.cpu().contiguous() for n, t in tensors.items()}
            save_file(stored, self.folder / _file(kind, self.done))
        text = json.dumps({**self.record, 'step': self.done}) + '\n'
        replace(self.folder / RECORD, lambda path: path.write_text(text))
        kept = {_file(kind, self.done) for kind in parts}
        for kind in parts:
            for old in self.folder.glob(f'{kind}-*.safetensors'):
                if old.name not in kept:
                    old.unlink()

    def _resume(self) -> int:
        if not (self.folder / RECORD).exists():
            return 0
        held = _record(self.folder)
        step = held.pop('step')
        if held != json.loads(json.dumps(self.record)):
            raise ConfigError(f'{self.folder} holds a training with {held}, asked is '
                              f'{self.record}; give the same options or another folder')
        stored = {kind: _load(self.folder, kind, step) for kind in (WEIGHT, *MOMENTS)}
        with torch.no_grad():
            for name, tensor in self.weights.items():
                tensor.copy_(stored[WEIGHT][name])
                if step:
                    moments = {m: stored[m][name].to(tensor.device) for m in MOMENTS}
                    self._optimizer.state[tensor] = {'step': torch.tensor(float(step)), **moments}
        return int(step)


def load_weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a training, on the CPU.

    :raises ConfigError: there is none, or it cannot be read.
    """
    return _load(folder, WEIGHT, _record(folder)['step'])


def _file(kind: str, step: int) -> str:
    return f'{kind}-{step:07d}.safetensors'


def _record(folder: Path) -> dict[str, Any]:
    path = folder / RECORD
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding='utf-8'))
        if type(record['step']) is not int:
            raise ValueError(f'its step is {record["step"]!r}')
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f'{path} is no record of a training: {error}; train there '
                          'first') from error
    return record


def _load(folder: Path, kind: str, step: int) -> dict[str, Tensor]:
    path = folder / _file(kind, step)
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f'{path} cannot be read: {error}; bring it or start in another folder') from error


def save_model(targets: list[Target], weights: Mapping[str, Tensor], path: Path,
               metadata: Mapping[str, str]) -> None:
    """Write weights as a bf16 checkpoint under the family's public names."""
    stored: dict[str, Tensor] = {}
    for target in targets:
        parts = split_sources(target, weights[target.name].detach().cpu())
        stored |= {key: part.to(torch.bfloat16) for key, part in parts.items()}
    replace(path, lambda draft: save_file(stored, draft, dict(metadata)))


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write beside and rename, so that a stop leaves the old file."""
    draft = path.with_name(f'.{path.name}.new')
    write(draft)
    os.replace(draft, path)
