"""What the small policy learns from, on the device, and what one step of it lowers."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
import time

import numpy as np
from numpy.typing import NDArray
import torch
from torch import Tensor

from flashrt_core.policies.pi0.batched import velocities
from flashrt_core.policies.pi0.config import Pi0Config
from flashrt_core.policies.pi0.weights import tables
from flashrt_core.tabletop import dataset
from flashrt_core.tabletop.training import Parts


def relative_actions(c: Pi0Config, samples: dataset.Samples) -> NDArray[np.float32]:
    """Return the actions as they are learnt: joint targets relative to the measured joints."""
    actions = samples.actions.copy()
    chosen = list(c.relative)
    actions[..., chosen] -= samples.joints[:, None, chosen]
    return actions


class Shelf:
    """Samples and their frames on the device; the oldest make room when it is full.

    :param capacity: samples. ``held``: how many there are, ``given``: how many were put in.
    ``statistics``: what states and actions are normalised by.
    """

    def __init__(self, c: Pi0Config, capacity: int, device: torch.device) -> None:
        size, rows = c.vision.image_size, (capacity,)
        self.held = self.given = 0
        self.statistics = c.statistics
        self._c, self._capacity, self._device = c, capacity, device
        self.parts = {
            'images': torch.empty((*rows, len(c.views), size, size, 3), dtype=torch.uint8,
                                  device=device),
            'text': torch.zeros((*rows, dataset.SLOTS), dtype=torch.int64, device=device),
            'length': torch.zeros(rows, dtype=torch.int64, device=device),
            'state': torch.zeros((*rows, c.state_width), device=device),
            'actions': torch.zeros((*rows, c.horizon, c.action_width), device=device),
        }

    def put(self, samples: dataset.Samples, frames: NDArray[np.uint8]) -> None:
        """Add samples; ``frames`` uint8 [N, views, size, size, 3] are theirs."""
        s, c = self.statistics, self._c
        actions = np.zeros((len(samples), c.horizon, c.action_width), np.float32)
        mean, std = np.array(s.action_mean), np.array(s.action_std)
        actions[..., : c.action_dim] = (relative_actions(c, samples) - mean) / std
        state = (samples.joints - np.array(s.state_mean)) / np.array(s.state_std)
        new = {'images': frames, 'text': samples.text.astype(np.int64),
               'length': samples.length.astype(np.int64), 'state': state.astype(np.float32),
               'actions': actions}
        at = 0
        while at < len(samples):
            begin = self.given % self._capacity
            count = min(len(samples) - at, self._capacity - begin)
            for name, values in new.items():
                piece = torch.from_numpy(values[at : at + count])
                self.parts[name][begin : begin + count].copy_(piece)
            at += count
            self.given += count
        self.held = min(self.given, self._capacity)


class Step:
    """One step's batch, at the same addresses each time, and the loss of it.

    Flow matching (arXiv 2210.02747) at the very times that the policy infers at.

    :param weights: float32, by name. :param seed: of what is drawn.
    """

    def __init__(self, c: Pi0Config, weights: Mapping[str, Tensor], shelf: Shelf, batch: int,
                 seed: int) -> None:
        device = shelf.parts['state'].device
        self._c, self._shelf, self._seed = c, shelf, seed
        self._learnt = weights
        self._weights = {**{n: t.to(device) for n, t in tables(c).items()}, **weights}
        self._batch = {name: torch.zeros((batch, *values.shape[1:]), dtype=values.dtype,
                                         device=device) for name, values in shelf.parts.items()}
        self._noise = torch.zeros((batch, c.horizon, c.action_width), device=device)
        self._at = torch.zeros(batch, dtype=torch.int64, device=device)
        self._generator = torch.Generator(device)
        self._index = torch.zeros(batch, dtype=torch.int64, device=device)
        self.loss: Callable[[], Parts] = self.parts

    def feed(self, step: int) -> None:
        """Draw the batch of a step, which depends on seed, step and what the shelf holds."""
        g = self._generator.manual_seed(self._seed * 2**32 + step)
        self._index.random_(0, self._shelf.held, generator=g)
        self._at.random_(0, self._c.flow_steps, generator=g)
        self._noise.normal_(generator=g)
        for name, values in self._shelf.parts.items():
            torch.index_select(values, 0, self._index, out=self._batch[name])

    def parts(self) -> Parts:
        """Return the loss of the batch and its share of the last action."""
        c, b, noise = self._c, self._batch, self._noise
        t = (1.0 - self._at / c.flow_steps)[:, None, None]
        x = t * noise + (1.0 - t) * b['actions']
        device = x.device.type
        with torch.autocast(device, torch.bfloat16, enabled=device == 'cuda', cache_enabled=False):
            v = velocities(c, self._weights, b['images'], b['text'], b['length'], b['state'], x,
                           self._at)
        errors = (v.float() - (noise - b['actions'])).square()[..., : c.action_dim]
        return {'loss': errors.mean(), 'done': errors[..., -1].mean()}

    def compile(self) -> None:
        """Compile the loss where that works and agrees with the plain one; say how it went."""
        started = time.monotonic()
        g, b = self._generator.manual_seed(self._seed), self._batch
        b['images'].random_(generator=g)
        b['text'].random_(0, self._c.vocab, generator=g)
        b['length'].random_(0, b['text'].shape[1] + 1, generator=g)
        self._at.random_(0, self._c.flow_steps, generator=g)
        for values in (b['state'], b['actions'], self._noise):
            values.normal_(generator=g)
        weights = self._learnt
        try:
            compiled = torch.compile(self.parts, dynamic=False)
            found = [_gradients(loss, weights) for loss in (self.parts, compiled)]
            (plain, ours), (fast, theirs) = found
            alike = float(torch.dot(ours, theirs) / (ours.norm() * theirs.norm()))
            if abs(fast - plain) > 0.02 * plain or alike < 0.99:
                raise RuntimeError(f'loss {fast:.4f} for {plain:.4f}, gradients alike {alike:.3f}')
        except Exception as error:  # whatever a compiler raises
            print(f'not compiled: {str(error).strip().splitlines()[0]:.200}', flush=True)
        else:
            self.loss = compiled
            print(f'compiled in {time.monotonic() - started:.0f} s: gradients alike '
                  f'{alike:.5f}', flush=True)


def _gradients(loss: Callable[[], Parts], weights: Mapping[str, Tensor]) -> tuple[float, Tensor]:
    for weight in weights.values():
        weight.requires_grad_(True)
        weight.grad = None
    value = loss()['loss']
    value.backward()
    found = torch.cat([w.grad.flatten().double() for w in weights.values() if w.grad is not None])
    for weight in weights.values():
        weight.grad = None
    return float(value.detach()), found
