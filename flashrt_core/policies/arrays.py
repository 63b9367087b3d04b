"""Values that should be numpy arrays: what they are, and how a message shows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def is_array(value: object, dtype: type) -> bool:
    """Whether a value is a whole numpy array of this dtype; a masked one has values missing."""
    masked = isinstance(value, np.ma.MaskedArray)
    return isinstance(value, np.ndarray) and not masked and value.dtype == dtype


def is_sequence(value: object) -> bool:
    """Whether a value is a sequence or an array with a first axis; a text is none."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def shown(value: Any) -> str:
    """Return dtype and shape of an array, else the type."""
    if type(value) is np.ndarray:
        return f'{value.dtype} {list(value.shape)}'
    return f'a {type(value).__name__}'
