"""What the golden arrays of Pi0.5 were made from: sizes, weights, observations, all repeatable.

Both sides read this file: ``pi05_lerobot.py``, which made the arrays once from LeRobot, and the
tests. Weights are Philox words keyed by a tensor's canonical name, so none is stored.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path

import numpy as np
import torch

from flashrt_core.checkpoints import pi0_targets
from flashrt_core.nn import GemmaDims
from flashrt_core.nn import SiglipDims
from flashrt_core.policies.normalise import Statistics
from flashrt_core.policies.pi0.config import Pi0Config
from flashrt_core.policies.pi0.weights import random_weight
from flashrt_core.policies.pi0.weights import WeightSpec

ARRAYS = Path(__file__).with_name('pi05_lerobot.npz')
PROCESSOR = Path(__file__).with_name('lerobot_processor')  # as LeRobot saved it
VIEWS = ('base', 'left_wrist', 'right_wrist')
SEED = 5

# LeRobot fixes the MLP of the vision tower at 4304; every other size is free.
CONFIG = Pi0Config(
    family='pi05',
    views=VIEWS,
    vision=SiglipDims(image_size=28, patch_size=14, width=32, layers=2, heads=4, mlp=4304),
    prefix=GemmaDims(width=48, layers=3, heads=4, kv_heads=2, head_dim=16, mlp=64),
    expert=GemmaDims(width=32, layers=3, heads=4, kv_heads=2, head_dim=16, mlp=48),
    vocab=512,
    prompt_tokens=40,
    subgoal_tokens=44,
    state_tokens=32,
    horizon=8,
    state_dim=4,
    action_dim=3,
    state_width=6,
    action_width=5,
    statistics=Statistics(
        state_q01=(-1.5, -0.2, -2.7, 0.0),
        state_q99=(1.5, 2.0, 2.0, 1.0),
        action_q01=(-0.25, -1.0, 0.0),
        action_q99=(0.25, 1.5, 1.0),
    ),
    rows=2,
    row_keys=(1, 2),
    tokenizer='words',
    cpu_threads=1,
)


@dataclass(frozen=True)
class Case:
    """One observation; ``masked`` views have no image."""

    views: int
    task: str = 'put the red block in the blue zone'
    masked: tuple[str, ...] = ()
    state: tuple[float, ...] = (0.3, 1.1, -0.4, 0.7)
    rows: int = 1
    seed: int = field(default=0, kw_only=True)

    @property
    def images(self) -> dict[str, np.ndarray | None]:
        """Images of the first ``views`` cameras, uint8, None where masked."""
        draw = np.random.default_rng(self.seed)
        side = CONFIG.vision.image_size
        drawn = {v: draw.integers(0, 256, (side, side, 3), dtype=np.uint8)
                 for v in VIEWS[:self.views]}
        return {v: None if v in self.masked else image for v, image in drawn.items()}

    @property
    def noise(self) -> np.ndarray:
        """Standard normals float32 [rows, horizon, action width]."""
        shape = (self.rows, CONFIG.horizon, CONFIG.action_width)
        return np.random.default_rng(self.seed + 100).standard_normal(shape).astype(np.float32)


CASES = {
    'one': Case(1),
    'two': Case(2, seed=1),
    'three': Case(3, seed=2),
    'first masked': Case(3, masked=VIEWS[:1], seed=3),
    'second masked': Case(3, masked=VIEWS[1:2], seed=4),
    'third masked': Case(3, masked=VIEWS[2:], seed=5),
    'two masked': Case(3, masked=VIEWS[1:], seed=6),
    'short prompt': Case(2, task='go', seed=7),
    'empty prompt': Case(2, task='', seed=8),
    'cleaned prompt': Case(2, task=' pick_up the\nred block ', seed=9),
    'state beyond the quantiles': Case(2, state=(-9.0, 9.0, 2.0, 1.0), seed=10),
    'state at the edges': Case(2, state=(-1.5, 2.0, -2.7, 0.0), seed=11),
    'two rows': Case(2, rows=2, seed=12),
}


def tensors(c: Pi0Config) -> dict[str, torch.Tensor]:
    """Return every weight that inference reads, by canonical name, float32, all of them random."""
    found = {}
    for source in (s for target in pi0_targets(c) for s in target.sources):
        fan_in = int(np.prod(source.shape[1:])) if len(source.shape) > 1 else 100
        of_layer_norm = 'layer_norm' in source.key and source.key.startswith('vlm.vision')
        offset = float(of_layer_norm and source.key.endswith('weight'))
        spec = WeightSpec(source.shape, torch.float32, fan_in**-0.5, offset)
        found[source.key] = random_weight(source.key, spec, SEED)
    return found


def golden() -> Mapping[str, np.ndarray]:
    """Return the stored arrays: '<case>/actions' and the like."""
    with np.load(ARRAYS, allow_pickle=False) as stored:
        return {name: stored[name] for name in stored.files}
