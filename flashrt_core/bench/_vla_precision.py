"""What a precision does to a policy's actions: against plain layers, bfloat16 and float32."""
from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import torch

from flashrt_core.policies import TickInput
from flashrt_core.policies.calibration import save_scales
from flashrt_core.policies.pi0 import model
from flashrt_core.policies.pi0 import Pi0Config
from flashrt_core.policies.pi0 import Pi0Session
from flashrt_core.policies.pi0 import pi05
from flashrt_core.policies.pi0.calibration import calibrate
from flashrt_core.policies.pi0.graphs import prefix_body
from flashrt_core.policies.pi0.graphs import vision_body
from flashrt_core.policies.pi0.inputs import write_input
from flashrt_core.policies.pi0.precision import weights_of
from flashrt_core.runtime import Backend

FRAMES = 16       # of a calibration
GRAINS = (1, 2, 4, 8, 16, 32)  # pixels of a texture's spots
Actions = list[np.ndarray]  # of the checked ticks


def in_precision(c: Pi0Config, precision: str, scales: Path) -> Pi0Config:
    """Return ``c`` in a precision, '' for its own; FP8 reads ``scales``."""
    if not precision:
        return c
    return replace(c, dtype='bfloat16', precision=precision,
                   scales=str(scales) if precision == 'fp8' else '')


def make_scales(backend: Backend, c: Pi0Config, path: Path) -> None:
    """Calibrate on random textured frames and write the scales."""
    random = np.random.default_rng(1)
    observations = []
    for i in range(FRAMES):
        tokens = tuple(random.integers(0, c.vocab, c.prompt_tokens).tolist())
        observations.append(TickInput(
            {view: texture(random, c.vision.image_size) for view in c.views},
            random.standard_normal(c.state_dim).astype(np.float32), prompt=tokens,
            steps_executed=c.horizon, seed=i))
    save_scales(calibrate(backend, c, observations), path)


def texture(random: np.random.Generator, side: int) -> np.ndarray:
    """Return uint8 RGB [side, side, 3]: random spots of every grain, of random strength."""
    image = np.full((side, side, 3), 128, np.float32)
    for grain in GRAINS:
        spots = random.uniform(-1, 1, (-(-side // grain), -(-side // grain), 3))
        size = (spots.shape[1] * grain, spots.shape[0] * grain)
        spread = cv2.resize(spots.astype(np.float32), size, interpolation=cv2.INTER_NEAREST)
        image += random.uniform(0, 120) * spread[:side, :side]
    return image.clip(0, 255).astype(np.uint8)


def eager_actions(session: Pi0Session, inputs: Sequence[TickInput], exact: bool) -> Actions:
    """Return what the plain layers make of the inputs; any thread, text as latched.

    :param exact: from the same weights in float32, not in the session's precision. Of a session
        that is not in FP8.
    """
    return session.lane.call(lambda: _eager(session, inputs, exact)).result()


@torch.no_grad()
def _eager(session: Pi0Session, inputs: Sequence[TickInput], exact: bool) -> Actions:
    c, b = session.config, {buffer.name: buffer.tensor for buffer in session.buffers}
    if exact:
        c = replace(c, dtype='float32', precision='')
        b = {name: t.float() if t.dtype == torch.bfloat16 else t for name, t in b.items()}
    weights = weights_of(c, b)
    device, plain, key = b['prefix_kv'].device, pi05 if c.modulated else model, (len(c.views),)
    found = []
    for given in inputs:
        write_input(given, 1, session.buffers, c, session.state_text)
        vision_body(c, plain, weights, key)
        prefix_body(c, plain, weights, key)
        state = torch.zeros(c.state_width, device=device)
        state[:c.state_dim] = torch.from_numpy(given.state).to(device)
        noise = torch.from_numpy(np.asarray(given.noise)).to(device)
        actions = plain.denoise(noise, state, b['prefix_kv'], b['prefix_mask'], weights, c)
        found.append(actions[..., :c.action_dim].cpu().numpy())
    return found


def compared(found: Actions, known: Mapping[str, Actions]) -> dict[str, float | None]:
    """Return worst cosines against what is known, and errors in those of bfloat16.

    :param known: actions by 'plain', 'float32' and 'bf16', as far as there are any.
    """
    worst = {name: min(map(_cosine, found, known[name])) if name in known else None
             for name in ('plain', 'bf16', 'float32')}
    ratio = None
    if 'bf16' in known and 'float32' in known:
        ratio = _error(found, known['float32']) / _error(known['bf16'], known['float32'])
    return {'cosine': worst['plain'], 'cosine_bf16': worst['bf16'],
            'cosine_float32': worst['float32'], 'error_of_bf16': ratio}


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    x, y = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    return float(x @ y / np.linalg.norm(x) / np.linalg.norm(y))


def _error(found: Actions, exact: Actions) -> float:
    """Return the mean relative error."""
    return float(np.mean([np.linalg.norm(a - b) / np.linalg.norm(b)
                          for a, b in zip(found, exact, strict=True)]))
