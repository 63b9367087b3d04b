"""The timeline of an episode as SVG: subgoals from writing to latch to end, epochs below."""

from __future__ import annotations

from collections.abc import Sequence
import html

from flashrt_ros.demo.record import Episode
from flashrt_ros.demo.record import Subgoal

COLOURS = {'done': '#6aa84f', 'superseded': '#c98a1b', 'timed out': '#b5485d', 'open': '#9aa5b1'}
INK, FAINT, CALL = '#22313f', '#d9dee4', '#d1603d'
_LEFT, _WIDTH, _ROW, _TOP = 16, 960, 26, 34
_RIGHT = _LEFT + _WIDTH + 20  # of the picture
_LETTER, _SMALL_LETTER = 6.6, 6.2  # mean widths at 12 and 11 px


def subgoal_svg(episode: Episode, length: float, unit: str) -> str:
    """Draw an episode's subgoals over its steps, or seconds in real time.

    :param length: of the episode in ``unit``.
    """
    if not episode.subgoals:
        return ''
    scale = _WIDTH / max(length, 1e-9)
    height = _TOP + _ROW * len(episode.subgoals) + 22
    parts = [f'<svg viewBox="0 0 {_RIGHT} {height}" class="timeline" role="img">',
             _axis(length, unit, scale, height)]
    for row, item in enumerate(episode.subgoals):
        parts.append(_subgoal(item, _TOP + row * _ROW, scale, length))
    parts += _marks(episode.marks, scale, height)
    parts.append('</svg>')
    return ''.join(parts)


def legend() -> str:
    """Explain bars and signs, as HTML."""
    swatches = ''.join(
        f'<span class="key"><i style="background:{colour}"></i>{name}</span>'
        for name, colour in COLOURS.items())
    return (f'<p class="sub">{swatches}<span class="key">▽ written</span>'
            '<span class="key">● latched by a tick; hatched before that</span></p>')


def _axis(length: float, unit: str, scale: float, height: float) -> str:
    step = next((s for s in (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500) if length / s <= 12), 1000)
    lines = ['<defs><pattern id="wait" width="6" height="6" patternTransform="rotate(45)" '
             f'patternUnits="userSpaceOnUse"><rect width="3" height="6" fill="{FAINT}"/>'
             '</pattern></defs>']
    at = 0.0
    while at <= length:
        x = _LEFT + at * scale
        lines.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 8}" y2="{height - 18}" '
                     f'stroke="{FAINT}"/><text x="{x:.1f}" y="{height - 5}" class="faint" '
                     f'text-anchor="{"middle" if at else "start"}">{at:g}'
                     f'{"" if at else " " + unit}</text>')
        at += step
    return ''.join(lines)


def _subgoal(item: Subgoal, y: float, scale: float, length: float) -> str:
    def x(place: float) -> float:
        return _LEFT + place * scale

    end = length if item.ended is None else item.ended
    latched = item.latched if item.latched is not None else end
    colour = COLOURS.get(item.outcome, FAINT)
    parts = [f'<rect x="{x(item.written):.1f}" y="{y}" height="17" '
             f'width="{max(1.0, (latched - item.written) * scale):.1f}" fill="url(#wait)"/>']
    if item.latched is not None:
        parts.append(f'<rect x="{x(latched):.1f}" y="{y}" height="17" rx="2" fill="{colour}" '
                     f'width="{max(1.5, (end - latched) * scale):.1f}" opacity="0.55"/>'
                     f'<circle cx="{x(latched):.1f}" cy="{y + 8.5}" r="3.4" fill="{INK}"/>')
    sign = CALL if item.interrupt else INK
    parts.append(f'<path d="M{x(item.written):.1f} {y + 3} l4.5 -8 h-9 z" fill="{sign}"/>')
    text = f'{item.text}{" (by the conductor)" if item.writer != "planner" else ""}'
    if item.holds is False:
        text += ': the policy says done, the world does not agree'
    late = x(item.written) > _LEFT + 0.7 * _WIDTH
    near = x(latched) - x(item.written) < 120 and item.latched is not None
    after = _RIGHT if late else (x(latched) if near else x(item.written)) + 9
    place, anchor = _fit(x(item.written) - 8, after, _LETTER * len(text))
    parts.append(f'<text x="{place:.1f}" y="{y + 13}" '
                 f'text-anchor="{anchor}">{html.escape(text)}</text>')
    return ''.join(parts)


def _fit(before: float, after: float, width: float) -> tuple[float, str]:
    """Return x and anchor of a text: after its sign, or before it, so that none is cut off."""
    if after + width <= _RIGHT:
        return after, 'start'
    if before >= width:
        return before, 'end'
    return max(0.0, _RIGHT - width), 'start'


def _marks(marks: Sequence[tuple[float, str]], scale: float, height: float) -> list[str]:
    """Draw what happened along the top; texts that would meet go to the second line."""
    parts, ends = [], [0.0, 0.0]
    for place, text in marks:
        x = _LEFT + place * scale
        width = _SMALL_LETTER * len(text)
        at, anchor = _fit(x - 3, x + 3, width)
        left = at if anchor == 'start' else at - width
        line = 0 if left >= ends[0] else 1
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{12 + 11 * line}" y2="{height - 18}" '
                     f'stroke="{CALL}" stroke-dasharray="2 3"/>')
        if left >= ends[line]:  # else it is told in the caption of the strip
            ends[line] = left + width + 9
            parts.append(f'<text x="{at:.1f}" y="{10 + 11 * line}" class="call" '
                         f'text-anchor="{anchor}">{html.escape(text)}</text>')
    return parts
