"""Products in FP8 (E4M3): weights scaled per output channel, activations by one static scale.

``linear`` takes a plain weight or an :class:`Fp8Weight`, so a layer is written once for both. The
scales of activations come from a calibration on real inputs: ``observing`` runs a forward pass in
the plain precision and notes the largest input of each product.
Source of the format: arXiv 2209.05433. Static scales saturate: what exceeds them becomes +-448.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping
import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from flashrt_core.errors import ConfigError

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of E4M3
HEADROOM = 1.0625  # of a static scale above the largest value that calibration saw


class Fp8Weight(NamedTuple):
    """A quantised weight of a product [K] -> [N]; ``data * scale`` gives the values back."""

    data: Tensor  # E4M3 [N, K]
    scale: Tensor  # float32 [N]
    input_scale: Tensor  # float32 [], of the activations

    def values(self) -> Tensor:
        """Return the weight that the product uses, float32 [N, K]."""
        return self.data.float() * self.scale[:, None]


class Observed(NamedTuple):
    """A plain weight whose inputs are watched; ``largest`` is raised to what passes."""

    weight: Tensor  # [N, K]
    largest: Tensor  # float32 []


Weight = Tensor | Fp8Weight | Observed


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight [N, K] as E4M3 and its scales float32 [N]; a row of zeros has scale 1.

    :raises ConfigError: a value that is not finite.
    """
    largest = weight.float().abs().amax(dim=1)
    if not bool(torch.isfinite(largest).all()):
        raise ConfigError('a weight holds NaN or infinity; FP8 cannot carry it: check the file')
    scale = torch.where(largest > 0, largest / LARGEST, 1.0)
    return (weight.float() / scale[:, None]).to(E4M3), scale


def input_scale(largest: float) -> float:
    """Return the static scale for inputs up to ``largest`` in absolute value.

    :raises ConfigError: nothing but zeros was seen, or something not finite.
    """
    if not (math.isfinite(largest) and largest > 0):
        raise ConfigError(
            f'the largest input seen in calibration is {largest}; calibrate on real inputs')
    return largest * HEADROOM / LARGEST


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """Return x [..., K] @ weight^T (+ bias [N]) as [..., N] in x's dtype.

    FP8 weights: x is divided by the static scale and saturated to E4M3, the sum is float32.
    Nothing depends on values, so it can be captured.
    """
    if isinstance(weight, Fp8Weight):
        return _linear_fp8(x, weight, bias)
    if isinstance(weight, Observed):
        torch.maximum(weight.largest, x.float().abs().amax(), out=weight.largest)
        weight = weight.weight
    return F.linear(x, weight, bias)


def _linear_fp8(x: Tensor, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    q = (rows.float() / weight.input_scale).clamp(-LARGEST, LARGEST).to(E4M3)
    y = torch._scaled_mm(
        q,
        weight.data.t(),
        scale_a=weight.input_scale.repeat(len(q), 1),
        scale_b=weight.scale[None],
        out_dtype=torch.bfloat16,
    )
    if bias is not None:
        y = y + bias
    return y.to(x.dtype).view(*x.shape[:-1], -1)


def selected(device: torch.device) -> bool:
    """Return whether the device multiplies E4M3 and agrees with the values it stands for."""
    if device.type == 'cuda' and torch.cuda.get_device_capability(device) < (8, 9):
        return False
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 64, generator=generator).to(device, torch.bfloat16)
    data, scale = quantise(torch.randn(48, 64, generator=generator).to(device))
    top = torch.tensor(input_scale(float(x.abs().max())), device=device)
    weight = Fp8Weight(data, scale, top)
    try:
        found = linear(x, weight)
    except (RuntimeError, NotImplementedError):
        return False
    seen = (x.float() / top).to(E4M3).float() * top
    expected = seen @ weight.values().t()
    return torch.allclose(found.float(), expected, rtol=2e-2, atol=2e-2)


class Fp8Weights(Mapping[str, 'Weight']):
    """Weights by name in which the quantised ones come as :class:`Fp8Weight`.

    :param tensors: holds ``name`` in E4M3 together with ``name.scale`` and ``name.input_scale``
        for each quantised product, and every other tensor as it is.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Weight:
        """Return the tensor, or the quantised weight, called ``name``."""
        tensor = self._tensors[name]
        if tensor.dtype != E4M3:
            return tensor
        return Fp8Weight(
            tensor, self._tensors[f'{name}.scale'], self._tensors[f'{name}.input_scale'])

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class Observing(Mapping[str, 'Weight']):
    """Weights by name in which the products of ``names`` note their largest input."""

    def __init__(self, tensors: Mapping[str, Tensor], names: tuple[str, ...]) -> None:
        self._tensors = tensors
        self._largest = {
            name: torch.zeros((), device=tensors[name].device) for name in names
        }

    def __getitem__(self, name: str) -> Weight:
        """Return the tensor called ``name``, watched if it is one of the products."""
        tensor = self._tensors[name]
        return Observed(tensor, self._largest[name]) if name in self._largest else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def largest(self) -> dict[str, float]:
        """Return the largest absolute input of each product so far.

        :raises ConfigError: a product whose input was never above 0, or not finite.
        """
        found = {name: float(value) for name, value in self._largest.items()}
        silent = sorted(name for name, value in found.items() if not 0 < value < math.inf)
        if silent:
            raise ConfigError(
                f'{len(silent)} products saw no finite input above 0 in calibration, first '
                f'{silent[0]!r}; calibrate on real inputs that reach them')
        return found
