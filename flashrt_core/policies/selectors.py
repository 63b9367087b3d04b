"""Which of N chunks of one observation to play: named selectors over their distances.

Everything is plain torch over [N, N] or smaller, capturable; of equals the first is chosen.
The distance of two chunks is the RMS over all their steps and actions of what they differ by, so
its unit is that of the actions: divide them by their standard deviations where units are mixed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flashrt_core.errors import ConfigError

# Chunks [N, H, A] -> scores [N]; the largest is chosen.
Selector = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Selection:
    """What a selector found; tensors, so that it can be part of a graph."""

    scores: Tensor  # [N], larger is better
    spread: Tensor  # [], see ``spread``
    selected: Tensor  # int64 []


def distances(chunks: Tensor) -> Tensor:
    """Return the RMS difference of each pair of chunks [N, H, A], [N, N]."""
    flat = chunks.flatten(1)
    return (flat[:, None] - flat[None]).square().mean(-1).sqrt()


def spread(chunks: Tensor) -> Tensor:
    """Return how far the chunks [N, H, A] disagree, []: the mean distance of all pairs; 0 of one.

    Large where the policy is undecided between several motions.
    """
    n = len(chunks)
    return distances(chunks).sum() / max(n * (n - 1), 1)


def medoid(chunks: Tensor) -> Tensor:
    """Score each chunk by minus its mean distance to the others: the most typical one is best."""
    return -distances(chunks).sum(1) / max(len(chunks) - 1, 1)


def mean_nearest(chunks: Tensor) -> Tensor:
    """Score each chunk by minus its distance to the mean of all of them."""
    off = chunks - chunks.mean(0, keepdim=True)
    return -off.flatten(1).square().mean(-1).sqrt()


def first(chunks: Tensor) -> Tensor:
    """Score the first chunk best and each other by how late it comes."""
    return -torch.arange(len(chunks), dtype=chunks.dtype, device=chunks.device)


SELECTORS: dict[str, Selector] = {'medoid': medoid, 'mean_nearest': mean_nearest, 'first': first}


def select(chunks: Tensor, name: str = 'medoid') -> Selection:
    """Score chunks [N, H, A] by the selector called ``name`` and choose one.

    A chunk that is not finite is never chosen while another one is; the mean of the others stands
    in its place for their scores and the spread.

    :raises ConfigError: an unknown name.
    """
    if name not in SELECTORS:
        raise ConfigError(f'selector {name!r} is unknown; choose from {sorted(SELECTORS)}')
    finite = chunks.flatten(1).isfinite().all(1)
    usable = torch.where(finite[:, None, None], chunks, torch.zeros_like(chunks))
    mean = usable.sum(0) / finite.sum().clamp(min=1)
    usable = torch.where(finite[:, None, None], chunks, mean)
    scores = SELECTORS[name](usable)
    scores = torch.where(finite, scores, torch.full_like(scores, -torch.inf))
    return Selection(scores, spread(usable), scores.argmax())
