"""Images as a policy wants them: square, uint8 RGB, nothing cropped, nothing stretched."""

from __future__ import annotations

import cv2
import numpy as np
from numpy.typing import NDArray

from flashrt_core.errors import BadEncoding
from flashrt_core.errors import BadSize
from flashrt_core.policies.arrays import is_array
from flashrt_core.policies.arrays import shown

MAX_SIDE = 16384


def letterbox(image: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """Resize to ``size`` x ``size`` keeping the aspect, bilinear, centred on black.

    uint8 [H, W, 3] -> a new uint8 [size, size, 3]; colours are not reordered. An odd pixel of
    padding goes below and to the right. Any thread. Source: openpi ``resize_with_pad``.

    :raises BadEncoding: no array of uint8. :raises BadSize: not [H, W, 3], empty or too large.
    """
    if not is_array(image, np.uint8):
        raise BadEncoding(f'image is {shown(image)}; give uint8 RGB')
    if (
        image.ndim != 3
        or image.shape[2] != 3
        or not 0 < min(image.shape) <= max(image.shape) <= MAX_SIDE
    ):
        raise BadSize(f'image is {list(image.shape)}; give [height, width, 3] up to {MAX_SIDE}')
    height, width = image.shape[:2]
    ratio = max(width / size, height / size)
    inner_height, inner_width = max(1, int(height / ratio)), max(1, int(width / ratio))
    out = np.zeros((size, size, 3), np.uint8)
    top, left = (size - inner_height) // 2, (size - inner_width) // 2
    inner = out[top : top + inner_height, left : left + inner_width]
    if (inner_height, inner_width) == (height, width):
        inner[:] = image
    else:
        inner[:] = cv2.resize(image, (inner_width, inner_height), interpolation=cv2.INTER_LINEAR)
    return out
