"""What both trainings share: AdamW with warm-up and a cosine, an average, resuming, scores."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
from dataclasses import dataclass
import fcntl
import hashlib
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
from flashrt_core.command_line import deferred_interrupt
from flashrt_core.command_line import make_folder
from flashrt_core.errors import ConfigError

RECORD = 'training.json'
WEIGHT = 'weight'
MEAN = 'mean'
MOMENTS = ('exp_avg', 'exp_avg_sq')
EAGER = 3  # steps before one is captured
SAVE_S = 60.0  # of a training may be lost when it is killed
Parts = Mapping[str, Tensor]


@dataclass(frozen=True)
class Recipe:
    """What decides the trained weights besides data and sizes; kept beside them.

    ``average``: share of the old in a running mean of the weights, which is what is used.
    """

    steps: int
    batch: int
    rate: float = 2e-3
    warmup: int = 200
    decay: float = 0.02
    seed: int = 1
    average: float = 0.999

    def __post_init__(self) -> None:
        for name, least in (('steps', 1), ('batch', 1), ('warmup', 1), ('seed', 0)):
            if getattr(self, name) < least:
                raise ConfigError(f'{name} is {getattr(self, name)}; give at least {least}')
        if not 0 < self.rate < math.inf:
            raise ConfigError(f'rate is {self.rate}; give a number above 0')
        if not 0 <= self.decay < math.inf:
            raise ConfigError(f'decay is {self.decay}; give 0 or a number above it')
        if not 0 <= self.average < 1:
            raise ConfigError(f'average is {self.average}; give 0 or more, and less than 1')


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

    On a GPU the whole update is captured once as a CUDA graph and replayed: what a step reads must
    lie in the same tensors each time. Where a capture fails the steps go on without.

    :param weights: float32 tensors, changed in place. :param record: what a resume must agree in.
    ``mean``: the running mean of the weights, by name. ``facts``: what else the record is to say;
    the device, seconds of training and steps by themselves. ``stopped``: Ctrl-C ended ``run``.
    :raises ConfigError: the folder holds a training with another record, or a damaged one.
    """

    def __init__(self, folder: Path, recipe: Recipe, weights: Mapping[str, Tensor],
                 record: Mapping[str, Any]) -> None:
        self.folder, self.recipe, self.weights = folder, recipe, weights
        self.record = {'recipe': vars(recipe), **record}
        self.facts: dict[str, Any] = {'device': device_name(next(iter(weights.values())).device)}
        self.mean = {name: weight.detach().clone() for name, weight in weights.items()}
        matrices = [w for w in weights.values() if w.ndim > 1]
        others = [w for w in weights.values() if w.ndim <= 1]
        self._device = next(iter(weights.values())).device
        self._rate = torch.tensor(recipe.rate, device=self._device)
        self._share = torch.tensor(1.0, device=self._device)  # of the new in the mean
        self._optimizer = torch.optim.AdamW(
            [{'params': matrices, 'weight_decay': recipe.decay},
             {'params': others, 'weight_decay': 0.0}], lr=self._rate, betas=(0.9, 0.98),
            capturable=self._device.type == 'cuda')
        self._graph: tuple[torch.cuda.CUDAGraph, Parts] | None = None
        self._captures = self._device.type == 'cuda'
        self._eager = 0
        self.stopped = False
        self.done = self._resume()
        for tensor in weights.values():
            tensor.requires_grad_(True)

    def run(self, feed: Callable[[int], None], loss: Callable[[], Parts], minutes: float = 1e9,
            progress: Callable[[], float] | None = None, until: float = 1.0) -> int:
        """Train until the recipe's end or for ``minutes``; return the steps done in all.

        Ctrl-C ends it after a whole step. What was learnt is saved now and then.

        :param feed: brings what the step of that number reads to its place.
        :param loss: of one step: named parts, the first of them is what is lowered.
        :param progress: of the whole training, 0 to 1, instead of the recipe's steps: by a clock.
        :param until: the progress at which this call ends.
        """
        with deferred_interrupt() as interrupted:
            self._run(feed, loss, minutes, progress, until, interrupted)
            self.stopped = interrupted()
        return self.done

    def _run(self, feed: Callable[[int], None], loss: Callable[[], Parts], minutes: float,
             progress: Callable[[], float] | None, until: float,
             interrupted: Callable[[], bool]) -> None:
        started = shown = saved = time.monotonic()
        first, steps = self.done, self.recipe.steps
        before = float(self.facts.get('seconds', 0.0))
        gone = progress or (lambda: self.done / steps)
        while (gone() < until and time.monotonic() - started < minutes * 60
               and not interrupted()):
            feed(self.done)
            parts = self._step(loss, min(1.0, gone()))
            self.done += 1
            now = time.monotonic()
            if now - shown > 10 or self.done == first + 1 or gone() >= until:
                shown = now
                told = '  '.join(f'{n} {float(v):.4f}' for n, v in parts.items())
                pace = (time.monotonic() - started) / (self.done - first)
                print(f'step {self.done}  {gone():.1%}  {told}  {pace * 1e3:.1f} ms/step'
                      f'{"  captured" if self._graph else ""}', flush=True)
            self.facts['seconds'] = round(before + now - started, 1)
            if now - saved > SAVE_S:
                self.save()
                saved = time.monotonic()

    def _step(self, loss: Callable[[], Parts], progress: float) -> Parts:
        recipe = self.recipe
        rise = min(1.0, (self.done + 1) / recipe.warmup)
        fall = 0.5 * (1 + math.cos(math.pi * progress))
        self._rate.fill_(recipe.rate * rise * fall + 1e-6)
        self._share.fill_(max(1 - recipe.average, 9 / (10 + self.done)))
        if self._graph is not None:
            self._graph[0].replay()
            return self._graph[1]
        if not self._captures:
            return self._update(loss)
        if self._eager == EAGER:
            self._capture(loss)
            return self._step(loss, progress)
        self._eager += 1
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            parts = self._update(loss)
        torch.cuda.current_stream(self._device).wait_stream(side)
        return parts

    def _capture(self, loss: Callable[[], Parts]) -> None:
        """Capture an update, which runs nothing; the weights stay as they are if it fails."""
        self._captures = False
        torch.cuda.synchronize(self._device)
        self._optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, capture_error_mode='thread_local'):
                parts = self._update(loss)
        except RuntimeError as error:
            torch.cuda.synchronize(self._device)
            print(f'steps are not captured: {str(error).splitlines()[0]}', flush=True)
        else:
            self._graph = graph, parts

    def _update(self, loss: Callable[[], Parts]) -> Parts:
        self._optimizer.zero_grad(set_to_none=True)
        parts = loss()
        next(iter(parts.values())).backward()
        norm = torch.nn.utils.clip_grad_norm_(list(self.weights.values()), 1.0)
        self._optimizer.step()
        with torch.no_grad():
            mean = list(self.mean.values())
            away = torch._foreach_sub([self.weights[name] for name in self.mean], mean)
            torch._foreach_mul_(away, self._share)
            torch._foreach_add_(mean, away)
        return {**{name: value.detach() for name, value in parts.items()}, 'norm': norm}

    def save(self) -> None:
        """Write weights, their mean, moments, and last the record that names their step.

        A stop at any moment leaves what was saved before. One file for each, so that each can be
        carried by itself.
        """
        parts = {WEIGHT: {n: w.detach() for n, w in self.weights.items()}, MEAN: self.mean}
        for moment in MOMENTS:
            parts[moment] = {n: self._optimizer.state[w][moment]
                             for n, w in self.weights.items() if w in self._optimizer.state}
        for kind, tensors in parts.items():
            stored = {n: t.cpu().contiguous() for n, t in tensors.items()}
            _store(stored, self.folder / _file(kind, self.done))
        record = {**self.record, 'facts': self.facts, 'step': self.done}
        text = json.dumps(record, indent=1) + '\n'
        replace(self.folder / RECORD, lambda path: path.write_text(text))
        kept = {_file(kind, self.done) for kind in parts}
        for kind in parts:
            for old in self.folder.glob(f'{kind}-*.safetensors'):
                if old.name not in kept:
                    old.unlink()

    def _resume(self) -> int:
        if not (self.folder / RECORD).exists():
            return 0
        held = load_record(self.folder)
        step = held.pop('step')
        self.facts |= held.pop('facts', {})
        if held != json.loads(json.dumps(self.record)):
            raise ConfigError(f'{self.folder} holds a training with {held}, asked is '
                              f'{self.record}; give the same options or another folder')
        stored = {kind: _load(self.folder, kind, step) for kind in (WEIGHT, MEAN, *MOMENTS)}
        shapes = {name: tensor.shape for name, tensor in self.weights.items()}
        for kind, tensors in stored.items():
            found = {name: tensor.shape for name, tensor in tensors.items()}
            if found != (shapes if step or kind not in MOMENTS else {}):
                raise ConfigError(
                    f'{self.folder / _file(kind, step)} is not of this model: it holds '
                    f'{len(found)} tensors, {len(shapes)} of other names or sizes are needed; '
                    'bring it or start in another folder')
        with torch.no_grad():
            for name, tensor in self.weights.items():
                tensor.copy_(stored[WEIGHT][name])
                self.mean[name].copy_(stored[MEAN][name])
                if step:
                    moments = {m: stored[m][name].to(tensor.device) for m in MOMENTS}
                    count = torch.tensor(float(step))
                    self._optimizer.state[tensor] = {
                        'step': count.to(tensor.device) if self._captures else count, **moments}
        return int(step)


def fused(loss: Callable[[], Parts]) -> Callable[[], Parts]:
    """Return a loss whose kernels, of both passes, ``torch.compile`` has made fewer.

    Compiles, about a minute for a small planner; where that fails the loss itself is returned.
    """
    print('fusing the kernels of a step ...', flush=True)
    begun = time.monotonic()
    compiled = torch.compile(loss)
    try:
        next(iter(compiled().values())).backward()
    except RuntimeError as error:  # what the compilers raise is one
        print(f'kernels are not fused: {str(error).splitlines()[0]}', flush=True)
        return loss
    print(f'  {time.monotonic() - begun:.0f} s', flush=True)
    return compiled


@contextlib.contextmanager
def tf32_products() -> Iterator[None]:
    """Let float32 products of a GPU be of TF32 within the block: a training's noise is larger."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision('high')
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def device_name(device: torch.device) -> str:
    """Return what the device calls itself."""
    return torch.cuda.get_device_name(device) if device.type == 'cuda' else 'CPU'


def take_weights(session: Any, names: Iterable[str]) -> dict[str, Tensor]:
    """Return copies of a bound session's weights by name, and close it."""
    try:
        return {name: session.buffers[name].tensor.clone() for name in names}
    finally:
        session.close()


def digest_of(path: Path) -> str:
    """Return the first 16 digits of a file's SHA-256."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def load_weights(folder: Path) -> dict[str, Tensor]:
    """Return the mean of a training's weights, on the CPU.

    :raises ConfigError: there is none, or it cannot be read.
    """
    return _load(folder, MEAN, load_record(folder)['step'])


def _file(kind: str, step: int) -> str:
    return f'{kind}-{step:07d}.safetensors'


def load_record(folder: Path) -> dict[str, Any]:
    """Return what a training wrote of itself: recipe, facts, steps done.

    :raises ConfigError: there is none, or it cannot be read.
    """
    path = folder / RECORD
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding='utf-8'))
        if type(record['step']) is not int:
            raise ValueError(f'its step is {record["step"]!r}')
        if not isinstance(record['recipe'], dict) or not isinstance(record.get('facts', {}), dict):
            raise ValueError('its recipe or facts are no mapping')
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
    replace(path, lambda draft: _store(stored, draft, metadata))


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write beside and rename, so that a stop leaves the old file."""
    draft = path.with_name(f'.{path.name}.new')
    write(draft)
    os.replace(draft, path)


def _store(tensors: Mapping[str, Tensor], path: Path,
           metadata: Mapping[str, str] | None = None) -> None:
    try:
        save_file(dict(tensors), path, None if metadata is None else dict(metadata))
    except SafetensorError as error:
        raise ConfigError(f'{path} cannot be written: {error}; check the folder and the free '
                          'space') from error


@contextlib.contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Make a folder and keep other processes from training in it meanwhile.

    :raises ConfigError: it cannot be made, or another process trains there.
    """
    make_folder(folder, 'folder of a training')
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f'{folder} is in use by another training; wait for its end or give '
                              'another folder') from error
        yield
    finally:
        os.close(handle)
