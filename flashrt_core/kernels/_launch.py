"""What the policy kernels share: overlapping launches, comparing with a reference.

Programmatic dependent launch (Hopper and later): a kernel starts while the one before still runs,
loads constants, and waits for that kernel's writes (``griddepcontrol.wait``) before it
reads anything else or writes at all. Only constants, and what an earlier graph wrote, may be read
before the wait.
"""
from __future__ import annotations

import torch
from torch import Tensor


def overlaps(device: torch.device) -> bool:
    """Return whether kernels on ``device`` may be launched before the one before has ended."""
    return device.type == 'cuda' and torch.cuda.get_device_capability(device)[0] >= 9


def close(mine: Tensor, reference: Tensor, tolerance: float = 1e-2) -> bool:
    """Return whether ||mine - reference|| is at most tolerance * ||reference||; NaN is not."""
    error = (mine.double() - reference.double()).norm()
    return bool(error <= tolerance * reference.double().norm())


def draw(device: torch.device, dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    """Return repeatable normals of one shape without touching the global generator."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)
