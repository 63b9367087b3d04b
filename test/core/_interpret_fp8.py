"""What the children that interpret FP8 share: rounding as on a GPU, quantised weights."""
from __future__ import annotations

import numpy as np
import torch
from triton.runtime import interpreter

from flashrt_core.nn import fp8

FLIPS = 0.03  # of values that lie between two of E4M3 and are rounded to the other one
_convert = interpreter._convert_float


def round_to_nearest() -> None:
    """Mend the interpreter, which loses the carry of a mantissa that rounds up."""
    interpreter._convert_float = _rounded


def _rounded(value: np.ndarray, source: object, target: object, mode: object) -> np.ndarray:
    if (source.name, target.name) != ('fp32', 'fp8e4nv'):
        return _convert(value, source, target, mode)
    given = torch.from_numpy(np.ascontiguousarray(value).view(np.float32))
    return given.to(fp8.E4M3).view(torch.uint8).numpy().reshape(value.shape)


def quantised(plain: dict[str, torch.Tensor], largest: dict[str, float]) -> fp8.Fp8Weights:
    """Give the weights with those that have a largest input in E4M3."""
    made = dict(plain)
    for name, top in largest.items():
        of_input = torch.tensor(fp8.input_scale(top))
        made[name], made[f'{name}.scale'] = fp8.quantise(plain[name])
        made[f'{name}.input_scale'] = of_input
        made[f'{name}.both_scales'] = made[f'{name}.scale'] * of_input
    return fp8.Fp8Weights(made)
