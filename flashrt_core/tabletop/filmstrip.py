"""A run as one picture: states side by side, evenly spaced in time, drawn by the cameras' own
code.
"""

from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from flashrt_core.errors import ParameterInvalid
from flashrt_core.tabletop.scene import render_state
from flashrt_core.tabletop.state import WorldState
from flashrt_core.tabletop.world import CONTROL_PERIOD_S

_PAPER = (255, 255, 255)
_INK = (70, 74, 84)
_FRAME = (150, 142, 130)
_GAP = 6
_CAPTION = 20


def draw_filmstrip(
    states: Sequence[WorldState],
    *,
    frames: int = 8,
    views: Sequence[str] = ('top',),
    size: int = 160,
    captions: Sequence[str] | None = None,
) -> NDArray[np.uint8]:
    """Return the strip as RGB uint8 ``[height, width, 3]``, one row per view, one column per
    frame.

    :param states: in time order; ``frames`` of them are taken, the first and the last always.
    :param captions: one per state, below its column; by default its time, one step being 20 ms.
    :raises ParameterInvalid: no states, no views, or captions that are not one per state.
    """
    if not states or not views or frames < 1:
        raise ParameterInvalid(
            f'film strip of {len(states)} states, {len(views)} views, {frames} frames; '
            f'give at least one of each'
        )
    if captions is not None and len(captions) != len(states):
        raise ParameterInvalid(
            f'{len(captions)} captions for {len(states)} states; give one for each, or none'
        )
    count = min(frames, len(states))
    chosen = np.rint(np.linspace(0, len(states) - 1, count)).astype(int).tolist()
    height = len(views) * (size + _GAP) + _CAPTION + _GAP
    width = count * (size + _GAP) + _GAP
    strip = np.full((height, width, 3), _PAPER, np.uint8)
    for column, index in enumerate(chosen):
        left = _GAP + column * (size + _GAP)
        for row, view in enumerate(views):
            top = _GAP + row * (size + _GAP)
            strip[top : top + size, left : left + size] = render_state(states[index], view, size)
            cv2.rectangle(strip, (left - 1, top - 1), (left + size, top + size), _FRAME, 1)
        text = f'{states[index].step * CONTROL_PERIOD_S:.2f} s'
        _write_text(strip, text if captions is None else captions[index], left, height, size)
    return strip


def write_filmstrip(path: Path, strip: NDArray[np.uint8]) -> None:
    """Write a strip as PNG.

    :raises OSError: the file cannot be written.
    """
    path.write_bytes(encode_png(strip))


def encode_png(image: NDArray[np.uint8]) -> bytes:
    """Return an RGB image ``[height, width, 3]`` as the bytes of a PNG file."""
    done, data = cv2.imencode('.png', cv2.cvtColor(image, cv2.COLOR_RGB2BGR))
    if not done:
        raise OSError(f'OpenCV could not write an image of shape {image.shape} as PNG')
    return data.tobytes()


def _write_text(strip: NDArray[np.uint8], text: str, left: int, height: int, room: int) -> None:
    font, scale = cv2.FONT_HERSHEY_SIMPLEX, 0.4
    (width, _), _ = cv2.getTextSize(text, font, scale, 1)
    if width > room:
        scale *= room / width
        width = room
    place = (left + (room - width) // 2, height - _CAPTION // 2 + 1)
    cv2.putText(strip, text, place, font, scale, _INK, 1, cv2.LINE_AA)
