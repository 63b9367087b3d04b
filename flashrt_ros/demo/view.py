"""The live view of an episode: what the camera sees beside what was asked and what is in force."""

from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np
from numpy.typing import NDArray

from flashrt_ros.demo.record import Subgoal

COLUMNS = 36
_RESET = '\x1b[0m'
_SIGNS = {'done': '\x1b[32m✓\x1b[0m', 'superseded': '\x1b[33m↷\x1b[0m',
          'timed out': '\x1b[31m✗\x1b[0m'}


def half_blocks(image: NDArray[np.uint8], columns: int = COLUMNS) -> list[str]:
    """Return an RGB image as lines of coloured half blocks, two pixels a character."""
    small = cv2.resize(image, (columns, columns // 2 * 2), interpolation=cv2.INTER_AREA)
    lines = []
    for upper, lower in zip(small[::2], small[1::2], strict=True):
        cells = [
            f'\x1b[38;2;{u[0]};{u[1]};{u[2]}m\x1b[48;2;{v[0]};{v[1]};{v[2]}m▀'
            for u, v in zip(upper.tolist(), lower.tolist(), strict=True)
        ]
        lines.append(''.join(cells) + _RESET)
    return lines


def subgoal_lines(subgoals: Sequence[Subgoal]) -> list[str]:
    """Return one line for each subgoal: what became of it, where it was written and latched."""
    lines = []
    for item in subgoals:
        sign = _SIGNS.get(item.outcome, '\x1b[36m●\x1b[0m' if item.latched is not None else '○')
        latched = '' if item.latched is None else f', latched {item.latched:g}'
        ended = '' if item.ended is None else f', {item.outcome} {item.ended:g}'
        when = f'written {item.written:g}{latched}{ended}'
        lines.append(f'{sign} {item.text}  \x1b[2m{when}{_RESET}')
    return lines


def beside(picture: Sequence[str], text: Sequence[str]) -> list[str]:
    """Return the picture's lines with those of the text to their right."""
    blank = ' ' * COLUMNS
    rows = max(len(picture), len(text))
    return [
        f'   {picture[row] if row < len(picture) else blank}   '
        f'{text[row] if row < len(text) else ""}'
        for row in range(rows)
    ]
