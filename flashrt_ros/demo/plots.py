"""Plots of the report, drawn by matplotlib as SVG; a point of it is a point on the page."""

from __future__ import annotations

from collections.abc import Sequence
import io
from typing import Any

import numpy as np

from flashrt_core.tabletop import CONTROL_PERIOD_S
from flashrt_ros.demo.record import ForkResult
from flashrt_ros.demo.record import percentile
from flashrt_ros.demo.record import RealTime
from flashrt_ros.demo.record import Run

INK, FAINT, ACCENT, WARM = '#22313f', '#d9dee4', '#1f7a8c', '#c2512c'
VERBS = ('reset', 'snapshot', 'rollback', 'restore', 'fork')
_WIDTH_IN = 10.5  # the report's column is 1008 px wide, 96 px are an inch
_BIG, _SMALL = 10.5, 9.5
_AXIS = {'rad': 'target, rad', 'm': 'target, m', 'ratio': 'target, 0 to 1'}


def _figure(height_in: float) -> Any:
    import matplotlib

    matplotlib.use('Agg')
    from matplotlib.figure import Figure

    return Figure(figsize=(_WIDTH_IN, height_in), layout='constrained')


def _tidy(axes: Any, title: str, across: str, up: str, grid: str = 'y') -> None:
    """Name plot and axes, and make the rest quiet."""
    for side in ('top', 'right'):
        axes.spines[side].set_visible(False)
    for side in ('left', 'bottom'):
        axes.spines[side].set_color(FAINT)
    axes.set_title(title, fontsize=_BIG, color=INK, loc='left')
    axes.set_xlabel(across, fontsize=_SMALL, color=INK)
    axes.set_ylabel(up, fontsize=_SMALL, color=INK)
    axes.tick_params(colors=INK, labelsize=_SMALL, length=3)
    axes.grid(axis=grid, color=FAINT, linewidth=0.7)
    axes.set_axisbelow(True)


def _plain_numbers(axis: Any) -> None:
    """Label an axis with 1,000 rather than with a power of ten."""
    from matplotlib.ticker import FuncFormatter
    from matplotlib.ticker import NullFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: f'{value:,.0f}'))
    axis.set_minor_formatter(NullFormatter())


def _legend_above(place: Any, columns: int, **where: Any) -> None:
    place.legend(fontsize=_SMALL, frameon=False, ncols=columns, labelcolor=INK, **where)


def _svg(figure: Any) -> bytes:
    import matplotlib

    buffer = io.BytesIO()
    # Text stays text, so that it is sharp at every size and is found by a search.
    with matplotlib.rc_context({'svg.fonttype': 'none', 'svg.hashsalt': 'report'}):
        figure.savefig(buffer, format='svg', metadata=dict.fromkeys(
            ('Creator', 'Date', 'Format', 'Type')))
    return buffer.getvalue()


def real_time_svg(samples: RealTime) -> bytes:
    """Command gaps over time, their jitter as a histogram, and each sample of the latencies."""
    latencies = [(name, values) for name, values in samples.latencies() if values]
    figure = _figure(3.1 + 0.6 + 0.45 * len(latencies))
    upper, lower = figure.subfigures(2, 1, height_ratios=(3.1, 0.6 + 0.45 * len(latencies)))
    over_time, jitter = upper.subplots(1, 2, width_ratios=(1.5, 1))
    gaps, period = samples.arrival_gap_ms, samples.period_ms
    over_time.plot(np.cumsum(gaps) / 1e3, gaps, '.', color=ACCENT, markersize=3.5)
    over_time.axhline(period, color=WARM, linewidth=1.0, label=f'the period, {period:g} ms')
    _tidy(over_time, 'From each command to the next', 'time in the episode, s', 'gap, ms')
    _legend_above(over_time, 1, loc='lower right', bbox_to_anchor=(1.0, 0.98), borderpad=0)
    late = [gap - period for gap in gaps]
    jitter.hist(late, bins=41, range=(min([-1.0, *late]), max([1.0, *late])), color=ACCENT)
    jitter.set_yscale('symlog', linthresh=1)
    _plain_numbers(jitter.yaxis)
    _tidy(jitter, 'Jitter of the commands', 'gap minus period, ms', 'commands, log')
    if latencies:
        _rows_of_dots(lower.subplots(), latencies)
    return _svg(figure)


def _rows_of_dots(axes: Any, rows: Sequence[tuple[str, Sequence[float]]]) -> None:
    """Draw every sample of each row, and its median."""
    for row, (_, values) in enumerate(rows):
        axes.plot(values, [row] * len(values), 'o', color=ACCENT, markersize=6, alpha=0.4,
                  markeredgewidth=0, label='a sample' if row == 0 else None)
        axes.plot([percentile(list(values), 50)], [row], '|', color=WARM, markersize=20,
                  markeredgewidth=2.2, label='median' if row == 0 else None)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(left=0)
    _tidy(axes, 'Latencies', 'ms', '', grid='both')
    _legend_above(axes, 2, loc='lower right', bbox_to_anchor=(1.0, 0.98), borderpad=0)


def fork_svg(result: ForkResult) -> bytes:
    """Each joint of every branch over the chunk; the selected branch in colour."""
    figure = _figure(2.9)
    columns = figure.subplots(1, len(result.joint_names), squeeze=False)[0]
    for column, axes in enumerate(columns):
        for branch, chunk in enumerate(result.chunks):
            chosen = branch == result.selected
            first = branch == min(set(range(len(result.chunks))) - {result.selected}, default=0)
            axes.plot(
                [row[column] for row in chunk],
                color=WARM if chosen else ACCENT,
                linewidth=2.0 if chosen else 1.1,
                alpha=1.0 if chosen else 0.6,
                zorder=3 if chosen else 2,
                label=f'candidate {branch}, played' if chosen
                else 'the other candidates' if first else None,
            )
        unit = result.units[column] if column < len(result.units) else ''
        _tidy(axes, result.joint_names[column], f'steps of {1e3 * CONTROL_PERIOD_S:.0f} ms',
              _AXIS.get(unit, 'target'))
    handles, names = columns[0].get_legend_handles_labels()
    _legend_above(figure, 2, handles=handles, labels=names, loc='outside upper right')
    return _svg(figure)


def verbs_svg(run: Run) -> bytes:
    """Round trip, service and restore of each verb on one logarithmic axis."""
    from matplotlib.ticker import LogLocator

    names = [v for v in VERBS if any(c.verb == v for c in run.verbs)]
    figure = _figure(1.0 + 0.45 * max(1, len(names)))
    axes = figure.subplots()
    series = (
        ('round_trip_us', 'service round trip', INK, 'o'),
        ('service_us', 'inside the node', ACCENT, 's'),
        ('restore_us', 'copies of the capsule', WARM, 'D'),
    )
    for height, (key, label, colour, marker) in zip((-0.2, 0.0, 0.2), series, strict=True):
        points = [
            (getattr(call, key), row + height)
            for row, name in enumerate(names)
            for call in run.verbs
            if call.verb == name and getattr(call, key) > 0
        ]
        if points:
            axes.plot(*zip(*points, strict=True), marker, color=colour, markersize=5.5, alpha=0.7,
                      markeredgewidth=0, label=label)
    axes.set_xscale('log', subs=())
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=99))
    _plain_numbers(axes.xaxis)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    _tidy(axes, 'Each call', 'µs, log', '', grid='x')
    if axes.get_legend_handles_labels()[0]:
        _legend_above(axes, 3, loc='lower right', bbox_to_anchor=(1.0, 0.98), borderpad=0)
    return _svg(figure)
