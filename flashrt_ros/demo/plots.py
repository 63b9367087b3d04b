"""Plots of the report, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
import io
from typing import Any

import numpy as np

from flashrt_ros.demo.record import ForkResult
from flashrt_ros.demo.record import percentile
from flashrt_ros.demo.record import RealTime
from flashrt_ros.demo.record import Run

INK, FAINT, ACCENT, WARM = '#22313f', '#d9dee4', '#1f7a8c', '#d1603d'
VERB_COLOURS = {
    'reset': '#22313f',
    'snapshot': '#6aa84f',
    'rollback': '#d1603d',
    'restore': '#d1603d',
    'fork': '#8e6bbf',
}


def _figure(width: float, height: float) -> Any:
    import matplotlib

    matplotlib.use('Agg')
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=150, layout='constrained')


def _tidy(axes: Any) -> None:
    for side in ('top', 'right'):
        axes.spines[side].set_visible(False)
    for side in ('left', 'bottom'):
        axes.spines[side].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=8, length=3)
    axes.grid(axis='y', color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format='png')
    return buffer.getvalue()


def real_time_png(samples: RealTime) -> bytes:
    """Command gaps over time, and histograms of jitter and latencies."""
    figure = _figure(9.6, 4.6)
    ((over_time, jitter), (latency, subgoals)) = figure.subplots(2, 2, width_ratios=(1.3, 1))
    gaps = samples.arrival_gap_ms
    seconds = np.cumsum(gaps) / 1e3
    over_time.plot(seconds, gaps, '.', color=ACCENT, markersize=2.2)
    over_time.axhline(samples.period_ms, color=WARM, linewidth=0.9)
    over_time.set_title('time between commands, ms, over the episode, s', fontsize=9, color=INK,
                        loc='left')
    over_time.set_ylim(bottom=0)
    late = [gap - samples.period_ms for gap in gaps]
    edge = max(1.0, percentile([abs(v) for v in late], 99.5)) if late else 1.0
    jitter.hist(late, bins=41, range=(-edge, edge), color=ACCENT)
    jitter.set_title('jitter of commands, ms', fontsize=9, color=INK, loc='left')
    jitter.set_yscale('symlog')
    _histogram(latency, {'image stamp to chunk, each tick': samples.latency_ms})
    latency.set_title('latency of the ticks, ms', fontsize=9, color=INK, loc='left')
    _histogram(subgoals, {
        'written to first chunk': samples.latch_ms,
        'interrupt: call to first command': [i.to_command_ms for i in samples.interrupts]})
    subgoals.set_title('latency of the subgoals, ms', fontsize=9, color=INK, loc='left')
    for axes in (over_time, jitter, latency, subgoals):
        _tidy(axes)
    return _png(figure)


def _histogram(axes: Any, series: Mapping[str, Sequence[float]]) -> None:
    """Draw series on one axis from zero, those without values left out."""
    there = {name: list(values) for name, values in series.items() if values}
    if not there:
        return
    top = max(max(values) for values in there.values())
    for (name, values), colour in zip(there.items(), (ACCENT, WARM), strict=False):
        axes.hist(values, bins=36, range=(0.0, top), color=colour, alpha=0.75, label=name)
    axes.legend(fontsize=7, frameon=False)


def fork_png(result: ForkResult) -> bytes:
    """Each joint of every branch over the chunk; the selected branch in colour."""
    joints = len(result.joint_names)
    figure = _figure(9.6, 2.1)
    for column, axes in enumerate(figure.subplots(1, joints, squeeze=False)[0]):
        for branch, chunk in enumerate(result.chunks):
            chosen = branch == result.selected
            axes.plot(
                [row[column] for row in chunk],
                color=WARM if chosen else ACCENT,
                linewidth=1.6 if chosen else 0.8,
                alpha=1.0 if chosen else 0.55,
                zorder=3 if chosen else 2,
            )
        axes.set_title(result.joint_names[column], fontsize=9, color=INK, loc='left')
        axes.set_xlabel('step of the chunk', fontsize=7)
        _tidy(axes)
    return _png(figure)


def verbs_png(run: Run) -> bytes:
    """Round trip, service and restore of each verb on one logarithmic axis."""
    names = [v for v in VERB_COLOURS if any(c.verb == v for c in run.verbs)]
    figure = _figure(9.6, 0.7 + 0.42 * max(1, len(names)))
    axes = figure.subplots()
    series: Sequence[tuple[str, str, str]] = (
        ('round_trip_us', 'service round trip', INK),
        ('service_us', 'inside the node', ACCENT),
        ('restore_us', 'copies of the capsule', WARM),
    )
    for key, label, colour in series:
        points = [
            (getattr(call, key), row)
            for row, name in enumerate(names)
            for call in run.verbs
            if call.verb == name and getattr(call, key) > 0
        ]
        if points:
            axes.plot(*zip(*points), 'o', color=colour, markersize=4, alpha=0.75, label=label)
    axes.set_xscale('log')
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel('microseconds', fontsize=8)
    _tidy(axes)
    axes.grid(axis='x', color=FAINT, linewidth=0.6)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7, frameon=False, loc='upper left', bbox_to_anchor=(1.0, 1.0))
    return _png(figure)
