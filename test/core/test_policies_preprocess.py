"""The letterbox against openpi's arithmetic, done by torch."""
from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from flashrt_core.errors import BadEncoding
from flashrt_core.errors import BadSize
from flashrt_core.policies import letterbox


def picture(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height * width).integers(
        1, 256, (height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize('height, width', [(480, 640), (640, 480), (100, 33), (20, 30), (84, 84)])
def test_the_image_keeps_its_aspect_and_lies_centred_on_black(height, width):
    image, size = picture(height, width), 84
    out = letterbox(image, size)
    ratio = max(height / size, width / size)
    h, w = int(height / ratio), int(width / ratio)
    top, left = (size - h) // 2, (size - w) // 2
    tensor = torch.from_numpy(image).permute(2, 0, 1)[None].float()
    resized = F.interpolate(tensor, (h, w), mode='bilinear', align_corners=False)
    expected = np.zeros((size, size, 3), np.float32)
    expected[top:top + h, left:left + w] = resized[0].permute(1, 2, 0).numpy()
    assert out.dtype == np.uint8 and out.shape == (size, size, 3)
    assert np.abs(out - expected).max() <= 1.0  # OpenCV interpolates in fixed point
    assert not out[:top].any() and not out[:, left + w:].any()


def test_an_image_of_the_right_size_is_copied_unchanged():
    image = picture(84, 84)
    out = letterbox(image, 84)
    assert np.array_equal(out, image) and not np.shares_memory(out, image)


def test_a_line_of_pixels_still_shows():
    assert letterbox(picture(1, 2000), 84).any()


def test_what_is_no_rgb_image_is_refused():
    with pytest.raises(BadEncoding, match='float32'):
        letterbox(np.zeros((4, 4, 3), np.float32), 84)
    for shape in ((4, 4), (4, 4, 4), (0, 4, 3), (20000, 4, 3)):
        with pytest.raises(BadSize):
            letterbox(np.zeros(shape, np.uint8), 84)
    for value in (None, [[1]], np.ma.masked_array(np.zeros((4, 4, 3), np.uint8))):
        with pytest.raises(BadEncoding, match=type(value).__name__):
            letterbox(value, 84)
