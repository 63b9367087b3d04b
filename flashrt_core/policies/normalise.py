"""Between physical units and what a model was trained on: mean and deviation, or quantiles.

Both are one affine map a joint, ``normalised = (physical - shift) / scale``. Nothing is clipped: a
model may ask for more than it saw in training, and the executor's limits decide about that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flashrt_core.errors import ConfigError

# What each way needs of the statistics, per part ('state', 'action').
NEEDS = {'mean_std': ('mean', 'std'), 'quantiles': ('q01', 'q99'), 'identity': ()}
SMALLEST, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
STATE_BINS = 256
EDGES = np.linspace(-1.0, 1.0, STATE_BINS + 1)[:-1]


@dataclass(frozen=True)
class Statistics:
    """What is known of state and actions in training, in physical units; one value a joint.

    Mean and standard deviation, and the quantiles at 1 % and 99 %. Empty = not known.
    """

    state_mean: tuple[float, ...] = ()
    state_std: tuple[float, ...] = ()
    action_mean: tuple[float, ...] = ()
    action_std: tuple[float, ...] = ()
    state_q01: tuple[float, ...] = ()
    state_q99: tuple[float, ...] = ()
    action_q01: tuple[float, ...] = ()
    action_q99: tuple[float, ...] = ()

    @property
    def given(self) -> bool:
        """Whether anything is known."""
        return any(vars(self).values())


@dataclass(frozen=True)
class Affine:
    """``normalised = (physical - shift) / scale``; float64 [size] each."""

    shift: NDArray[np.float64]
    scale: NDArray[np.float64]

    def normalise(self, values: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return physical values [..., size] as the model wants them."""
        return (values - self.shift) / self.scale

    def restore(self, values: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return what the model gave [..., size] in physical units."""
        return values * self.scale + self.shift


def affine(statistics: Statistics, part: str, way: str, size: int) -> Affine:
    """Return the map of ``part`` ('state', 'action') for ``way``, a key of NEEDS.

    Quantiles go to -1 and 1; those of a joint that never moved lie two float32 steps apart, so
    that it rests at -1. Statistics that are not known give the identity.
    Source: openpi ``transforms.py`` (its epsilons belong to its files, see checkpoints).
    """
    # Rounded as the joints are: a joint that rests at its quantile is then exactly at the edge.
    def known(name: str, otherwise: float) -> NDArray[np.float64]:
        values = getattr(statistics, f'{part}_{name}')
        return np.array(values or (otherwise,) * size, np.float32).astype(np.float64)

    if way == 'mean_std':
        return Affine(known('mean', 0.0), known('std', 1.0))
    if way == 'quantiles':
        low, high = known('q01', -1.0), known('q99', 1.0)
        high = np.maximum(high, low + 2 * np.spacing(np.abs(low).astype(np.float32)))
        return Affine((low + high) / 2, (high - low) / 2)
    return Affine(np.zeros(size), np.ones(size))


def check_statistics(s: Statistics, sizes: Mapping[str, int], way: str) -> None:
    """Verify the statistics of parts with these sizes for ``way``.

    :raises ConfigError: another number of values, not finite, a deviation or a span that is not
        above 0 (as float32, which a policy's tables are), half of a pair, or statistics that lack
        some of what the way needs.
    """
    if way not in NEEDS:
        raise ConfigError(f'normalisation {way!r} is unknown; choose from {sorted(NEEDS)}')
    for part, size in sizes.items():
        for name in ('mean', 'std', 'q01', 'q99'):
            _check_values(f'{part}_{name}', getattr(s, f'{part}_{name}'), size, name == 'std')
        low, high = getattr(s, f'{part}_q01'), getattr(s, f'{part}_q99')
        if bool(low) != bool(high):
            raise ConfigError(f'statistics.{part}_q01 and {part}_q99 go together; give both')
        if any(not b - a >= SMALLEST for a, b in zip(low, high, strict=True)):
            raise ConfigError(
                f'statistics.{part}_q99 is {high}; every value must be above that of '
                f'{part}_q01 {low}'
            )
    needed = [f'{part}_{name}' for part in sizes for name in NEEDS[way]]
    missing = [name for name in needed if not getattr(s, name)]
    if s.given and missing:
        raise ConfigError(
            f'statistics hold no {", ".join(missing)}, which normalisation {way!r} needs; give '
            'them, or set normalisation to the way the model was trained with'
        )


def _check_values(name: str, values: tuple[float, ...], size: int, positive: bool) -> None:
    if values and len(values) != size:
        raise ConfigError(f'statistics.{name} has {len(values)} values; give {size}')
    if not all(abs(v) <= LARGEST for v in values):
        raise ConfigError(f'statistics.{name} is {values}; every value must be finite')
    if positive and any(not v >= SMALLEST for v in values):
        raise ConfigError(f'statistics.{name} is {values}; every value must be above 0')


def state_bins(normalised: NDArray[np.float64]) -> list[int]:
    """Return the bin of each normalised value: 0 to 255 over [-1, 1), -1 below, 255 above.

    Source: openpi ``PaligemmaTokenizer``; a model has seen what lies outside as these numbers.
    """
    bins: list[int] = (np.digitize(normalised, EDGES) - 1).tolist()
    return bins
