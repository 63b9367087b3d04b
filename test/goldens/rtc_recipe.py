"""What the golden arrays of real-time chunking were made from: a flow, left-overs, cases.

Both sides read this file: ``rtc_lerobot.py``, which made the arrays once from LeRobot, and the
tests.
"""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

ARRAYS = Path(__file__).with_name('rtc_lerobot.npz')
HORIZON, WIDTH, FLOW_STEPS = 12, 3, 10


@dataclass(frozen=True)
class RtcCase:
    """One guided flow, with ``left`` steps left of the previous chunk, the first one due now."""

    schedule: str
    delay: int
    steps: int
    left: int
    limit: float = 10.0

    @property
    def name(self) -> str:
        return f'{self.schedule}-{self.delay}-{self.steps}-{self.left}-{self.limit:g}'


CASES = [
    RtcCase(schedule, delay, steps, left)
    for schedule in ('zeros', 'ones', 'linear', 'exp')
    for delay, steps, left in ((0, 6, 9), (3, 8, 9), (2, 10, 5), (5, 5, 8), (4, 12, 12))
] + [RtcCase('linear', 3, 8, 9, 2.5), RtcCase('exp', 1, 9, 4, 0.7)]


def noise() -> torch.Tensor:
    """Give where every flow begins, float32 [HORIZON, WIDTH]."""
    return _draw(1, HORIZON)


def left_over(case: RtcCase) -> torch.Tensor:
    """Give what is left of the previous chunk, normalised, float32 [left, WIDTH]."""
    return _draw(2, case.left)


def velocity(x: torch.Tensor) -> torch.Tensor:
    """Give the velocity of an unguided flow at x [..., HORIZON, WIDTH]; steps and actions mix."""
    return 0.5 * x + torch.sin(x.roll(1, -2)) - 0.3 * x.roll(1, -1)


def _draw(seed: int, steps: int) -> torch.Tensor:
    drawn = np.random.default_rng(seed).standard_normal((steps, WIDTH))
    return torch.from_numpy(drawn.astype(np.float32))
