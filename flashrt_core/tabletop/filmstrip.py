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
        Empty: none, and no room for them.
    :raises ParameterInvalid: no states, no views, or captions that are not one per state.
    """
    if not states or not views or frames < 1:
        raise ParameterInvalid(
            f'film strip of {len(states)} states, {len(views)} views, {frames} frames; '
            f'give at least one of each'
        )
    if captions and len(captions) != len(states):
        raise ParameterInvalid(
            f'{len(captions)} captions for {len(states)} states; give one for each, or none'
        )
    chosen = frames_shown(len(states), frames)
    captioned = captions is None or len(captions) > 0
    height = len(views) * (size + _GAP) + _GAP + (_CAPTION if captioned else 0)
    width = len(chosen) * (size + _GAP) + _GAP
    strip = np.full((height, width, 3), _PAPER, np.uint8)
    for column, index in enumerate(chosen):
        left = _GAP + column * (size + _GAP)
        for row, view in enumerate(views):
            top = _GAP + row * (size + _GAP)
            strip[top : top + size, left : left + size] = render_state(states[index], view, size)
            cv2.rectangle(strip, (left - 1, top - 1), (left + size, top + size), _FRAME, 1)
        if captioned:
            text = f'{states[index].step * CONTROL_PERIOD_S:.2f} s'
            _write_text(strip, captions[index] if captions else text, left, height, size)
    return strip


def frames_shown(states: int, frames: int) -> list[int]:
    """Return which of ``states`` states a strip of ``frames`` frames shows, in order."""
    return np.rint(np.linspace(0, states - 1, min(frames, states))).astype(int).tolist()


def write_filmstrip(path: Path, strip: NDArray[np.uint8]) -> None:
    """Write a strip as PNG.

    :raises OSError: the file cannot be written.
    """
    path.write_bytes(encode_png(strip))


def encode_png(image: NDArray[np.uint8]) -> bytes:
    """Return an RGB image ``[height, width, 3]`` as the bytes of a PNG file."""
    # The smallest file: drawn pictures take a third of what the default level makes of them.
    done, data = cv2.imencode('.png', cv2.cvtColor(image, cv2.COLOR_RGB2BGR),
                              [cv2.IMWRITE_PNG_COMPRESSION, 9])
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
