"""The timeline of an episode as SVG: subgoals from writing to latch to end, epochs below."""

from __future__ import annotations

from collections.abc import Sequence
import html

from flashrt_ros.demo.record import Episode
from flashrt_ros.demo.record import Subgoal

COLOURS = {'done': '#6aa84f', 'superseded': '#c98a1b', 'timed out': '#b5485d', 'open': '#9aa5b1'}
INK, FAINT, CALL = '#22313f', '#d9dee4', '#b4451f'
_LEFT, _WIDTH, _ROW, _TOP, _UNIT_LINE = 16, 960, 26, 34, 16
_RIGHT = _LEFT + _WIDTH + 20  # of the picture
_LETTER, _SMALL_LETTER = 6.6, 6.2  # mean widths at 12 and 11 px


def subgoal_svg(episode: Episode, length: float, unit: str) -> str:
    """Draw an episode's subgoals over its steps, or seconds in real time.

    :param length: of the episode in ``unit``, which is written below the axis.
    """
    if not episode.subgoals:
        return ''
    scale = _WIDTH / max(length, 1e-9)
    height = _TOP + _ROW * len(episode.subgoals) + 22
    parts = [f'<svg viewBox="0 0 {_RIGHT} {height + _UNIT_LINE}" class="timeline" role="img" '
             f'aria-label="subgoals of {html.escape(episode.title)}">',
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
    return (
        f'<p class="legend">{swatches}<span class="key">{_sign(INK)}written by the planner</span>'
        f'<span class="key">{_sign(CALL)}written as an interrupt</span>'
        '<span class="key">● latched by a tick; hatched before that</span>'
        '<span class="key"><i class="call"></i>instruction, slip or verb</span></p>')


def _sign(colour: str) -> str:
    return f'<b style="color:{colour}">▼</b> '


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
                     f'text-anchor="middle">{at:g}</text>')
        at += step
    lines.append(f'<text x="{_LEFT}" y="{height + 11}" class="faint">{html.escape(unit)}</text>')
    return ''.join(lines)


def _subgoal(item: Subgoal, y: float, scale: float, length: float) -> str:
    def x(place: float) -> float:
        return _LEFT + place * scale

    end = length if item.ended is None else item.ended
    latched = item.latched if item.latched is not None else end
    colour = COLOURS.get(item.outcome, FAINT)
    parts = [f'<g><title>{html.escape(_told(item))}</title>',
             f'<rect x="{x(item.written):.1f}" y="{y}" height="17" '
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
    near = x(latched) - x(item.written) < 120 and item.latched is not None
    after, before = (x(latched) if near else x(item.written)) + 9, x(item.written) - 8
    width = _LETTER * len(text)
    if after + width > x(end) and before >= width:
        after = _RIGHT  # a text that the bar cannot hold stands before it
    place, anchor = _fit(before, after, width)
    parts.append(f'<text x="{place:.1f}" y="{y + 13}" '
                 f'text-anchor="{anchor}">{html.escape(text)}</text></g>')
    return ''.join(parts)


def _told(item: Subgoal) -> str:
    """Say in words what the bar shows, for the pointer that rests on it."""
    latched = 'never latched' if item.latched is None else f'latched {item.latched:.4g}'
    ended = '' if item.ended is None else f', {item.outcome} {item.ended:.4g}'
    return f'{item.text}: written {item.written:.4g}, {latched}{ended}'


def _fit(before: float, after: float, width: float) -> tuple[float, str]:
    """Return x and anchor of a text: after its sign, or before it, so that none is cut off."""
    if after + width <= _RIGHT:
        return after, 'start'
    if before >= width:
        return before, 'end'
    return max(0.0, _RIGHT - width), 'start'


def _together(marks: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """Join what happened at one place into one text that says how often."""
    counts: dict[float, dict[str, int]] = {}
    for place, text in marks:
        there = counts.setdefault(place, {})
        there[text] = there.get(text, 0) + 1
    return [(place, ', '.join(f'{text} {n}x' if n > 1 else text for text, n in there.items()))
            for place, there in counts.items()]


def _marks(marks: Sequence[tuple[float, str]], scale: float, height: float) -> list[str]:
    """Draw what happened along the top; texts that would meet go to the second line."""
    parts, ends = [], [0.0, 0.0]
    for place, text in _together(marks):
        x = _LEFT + place * scale
        width = _SMALL_LETTER * len(text)
        at, anchor = _fit(x - 3, x + 3, width)
        left = at if anchor == 'start' else at - width
        line = 0 if left >= ends[0] else 1
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{12 + 11 * line}" y2="{height - 18}" '
                     f'stroke="{CALL}" stroke-dasharray="2 3">'
                     f'<title>{html.escape(text)}</title></line>')
        if left >= ends[line]:  # else the pointer that rests on the line is told
            ends[line] = left + width + 9
            parts.append(f'<text x="{at:.1f}" y="{10 + 11 * line}" class="call" '
                         f'text-anchor="{anchor}">{html.escape(text)}</text>')
    return parts
