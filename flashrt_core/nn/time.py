"""Sinusoidal embedding of flow-matching time."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def time_table(
    steps: int,
    width: int,
    min_period: float,
    max_period: float,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Embed the times 1, 1 - 1/steps, ... 1/steps of an Euler flow from noise (1) to actions (0).

    Sine then cosine of 2 pi t / period, width / 2 periods geometric from ``min_period`` to
    ``max_period``, computed in ``dtype``, returned as float32 [steps, width] on the CPU. Source:
    openpi, LeRobot (float64); transformers' float32 differs by 1e-4 in the fastest sines.
    """
    fraction = torch.linspace(0.0, 1.0, width // 2, dtype=dtype)
    period = min_period * (max_period / min_period) ** fraction  # [width / 2]
    frequency = 1.0 / period * 2 * math.pi
    time = torch.tensor([1.0 - step / steps for step in range(steps)], dtype=dtype)  # [steps]
    angle = frequency * time[:, None]  # [steps, width / 2]
    return torch.cat([angle.sin(), angle.cos()], dim=-1).float()
