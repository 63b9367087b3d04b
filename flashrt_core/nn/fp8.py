"""Products in FP8 (E4M3): weights scaled per output channel, activations by a scale of their own.

``linear`` takes a plain weight or an :class:`Fp8Weight`, so a layer is written once for both. The
static scales of its activations come from a calibration on real inputs: ``observing`` runs a
forward pass in the plain precision and notes the largest input of each product. Static scales
saturate: what exceeds them becomes +-448. A :class:`ChannelWeight` needs no calibration: its
activations are scaled row by row as they come, or stay as they are.
Source of the format: arXiv 2209.05433.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping
import math
from typing import Any
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from flashrt_core.errors import ConfigError

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of E4M3
TOPS = (LARGEST, 384.0, 320.0, 256.0)  # what the largest value of a weight's channel may become
HEADROOM = 1.0625  # of a static scale above the largest value that calibration saw


class Fp8Weight(NamedTuple):
    """A quantised weight of a product [K] -> [N]; ``data * scale`` gives the values back."""

    data: Tensor  # E4M3 [N, K]
    scale: Tensor  # float32 [N]
    input_scale: Tensor  # float32 [], of the activations
    both_scales: Tensor | None = None  # float32 [N], scale * input_scale where it is kept ready

    @property
    def product_scale(self) -> Tensor:
        """What a sum of products of E4M3 values stands for, float32 [N]."""
        return self.scale * self.input_scale if self.both_scales is None else self.both_scales

    def values(self) -> Tensor:
        """Return the weight that the product uses, float32 [N, K]."""
        return self.data.float() * self.scale[:, None]


class ChannelWeight(NamedTuple):
    """A quantised weight of a product [K] -> [N] whose activations have no static scale."""

    data: Tensor  # E4M3 [N, K]
    scale: Tensor  # float32 [N]

    def values(self) -> Tensor:
        """Return the weight that the product uses, float32 [N, K]."""
        return self.data.float() * self.scale[:, None]

    def rows(self, at: slice) -> ChannelWeight:
        """Return the output channels ``at``, views of this weight."""
        return ChannelWeight(self.data[at], self.scale[at])

    def look_up(self, at: Tensor) -> Tensor:
        """Return the rows ``at`` (integers [M]) as float32 [M, K]."""
        data = self.data.view(torch.uint8).index_select(0, at).view(E4M3)
        return data.float() * self.scale.index_select(0, at)[:, None]


class Observed(NamedTuple):
    """A plain weight whose inputs are watched; ``largest`` is raised to what passes."""

    weight: Tensor  # [N, K]
    largest: Tensor  # float32 []


Weight = Tensor | Fp8Weight | Observed
SCALES = ('scale', 'input_scale', 'both_scales')  # kept beside a quantised weight's data


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight [N, K] as E4M3 and its scales float32 [N]; a row of zeros has scale 1.

    Of ``TOPS`` each channel takes what leaves the least squared error: the steps just below 448
    are the widest, so a channel that is full there rounds worse than one that ends at 256.

    :raises ConfigError: a value that is not finite.
    """
    x = weight.float()
    largest = x.abs().amax(dim=1)
    if not bool(torch.isfinite(largest).all()):
        raise ConfigError('a weight holds NaN or infinity; FP8 cannot carry it: check the file')
    scales = torch.stack([torch.where(largest == 0, 1.0, largest / top) for top in TOPS])
    errors = torch.stack([_rounding(x / scale[:, None]) * scale for scale in scales])
    scale = scales.gather(0, errors.argmin(dim=0)[None])[0]
    return (x / scale[:, None]).to(E4M3), scale


def _rounding(x: Tensor) -> Tensor:
    """Return by how much each row of x [N, K] differs from itself in E4M3, as a norm [N]."""
    return (x.to(E4M3).float() - x).norm(dim=1)


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [M, K] as E4M3 and its scales float32 [M], each row by its largest value.

    A row of zeros has scale 1; nothing depends on values, so it can be captured.
    """
    largest = x.float().abs().amax(dim=1)
    scale = torch.where(largest == 0, 1.0, largest / LARGEST)
    return (x.float() / scale[:, None]).to(E4M3), scale


def quantise_into(plain: Tensor, data: Tensor, scale: Tensor, rows: int = 4096) -> None:
    """Quantise a weight [N, K] into its E4M3 and scales [N], some rows at a time.

    :raises ConfigError: a value that is not finite.
    """
    parts = zip(plain.split(rows), data.split(rows), scale.split(rows))
    for part, into, scales in parts:
        found, found_scale = quantise(part)
        into.copy_(found)
        scales.copy_(found_scale)


def stored_as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in ``dtype``; in E4M3 it saturates, where a plain cast would give NaN."""
    return (x.clamp(-LARGEST, LARGEST) if dtype == E4M3 else x).to(dtype)


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


def quantise_input(x: Tensor, scale: Tensor) -> Tensor:
    """Return x over its static scale float32 [] as E4M3, saturated."""
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(E4M3)


def scale_of(weight: Weight) -> Tensor | None:
    """Return the static scale float32 [] that a product's input is quantised by, None if not."""
    return weight.input_scale if isinstance(weight, Fp8Weight) else None


def product(x: Tensor, weight: Weight, ones: Tensor | None = None) -> Tensor:
    """As ``linear`` for an x whose writer has quantised it already, without a further kernel.

    :param x: E4M3 where the weight is quantised, then the result is bfloat16.
    :param ones: float32 [rows, 1], needed where the weight is quantised.
    """
    if not isinstance(weight, Fp8Weight):
        return linear(x, weight)
    assert ones is not None
    rows = x.reshape(-1, x.shape[-1])
    y = torch._scaled_mm(
        rows,
        weight.data.t(),
        scale_a=ones[: len(rows)],
        scale_b=weight.product_scale[None],
        out_dtype=torch.bfloat16,
    )
    return y.view(*x.shape[:-1], -1)


def _linear_fp8(x: Tensor, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    q = quantise_input(rows, weight.input_scale)
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


def multiply(q: Tensor, scale: Tensor, weight: ChannelWeight) -> Tensor:
    """Return quantised rows (E4M3 [M, K], float32 [M]) @ weight^T as bfloat16 [M, N].

    K and N are multiples of 16.
    """
    return torch._scaled_mm(q, weight.data.t(), scale_a=scale[:, None],
                            scale_b=weight.scale[None], out_dtype=torch.bfloat16)


def multiply_reference(q: Tensor, scale: Tensor, weight: ChannelWeight) -> Tensor:
    """What ``multiply`` computes, in float32; any sizes, any device."""
    return F.linear(q.float(), weight.data.float()) * scale[:, None] * weight.scale


def multiplies(device: torch.device) -> bool:
    """Return whether the device has instructions that multiply E4M3; the CPU imitates them."""
    return device.type != 'cuda' or torch.cuda.get_device_capability(device) >= (8, 9)


def selected(device: torch.device) -> bool:
    """Return whether the device multiplies E4M3 and agrees with the values it stands for."""
    if not multiplies(device):
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


def rows_selected(device: torch.device) -> bool:
    """Return whether the device multiplies E4M3 scaled row by row; not inside a capture."""
    if not multiplies(device):
        return False
    generator = torch.Generator().manual_seed(1)
    spread = torch.logspace(-3, 3, 48)[:, None]
    x = (torch.randn(48, 64, generator=generator) * spread).to(device, torch.bfloat16)
    weight = ChannelWeight(*quantise((torch.randn(32, 64, generator=generator)).to(device)))
    rows = quantise_rows(x)
    try:
        found = multiply(*rows, weight).float()
    except (RuntimeError, NotImplementedError):
        return False
    expected = multiply_reference(*rows, weight)
    return bool(((found - expected).norm(dim=1) <= 1e-2 * expected.norm(dim=1)).all())


class Fp8Weights(Mapping[str, Any]):
    """Weights by name in which the quantised ones come as :class:`Fp8Weight`.

    :param tensors: holds ``name`` in E4M3 together with ``name.scale`` and ``name.input_scale``
        for each quantised product, perhaps ``name.both_scales``, and every other tensor as it is.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Weight:
        """Return the tensor, or the quantised weight, called ``name``."""
        tensor = self._tensors[name]
        if tensor.dtype != E4M3:
            return tensor
        return Fp8Weight(
            tensor, self._tensors[f'{name}.scale'], self._tensors[f'{name}.input_scale'],
            self._tensors.get(f'{name}.both_scales'))

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class Observing(Mapping[str, Any]):
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
