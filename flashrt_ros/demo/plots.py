"""Pictures of the report: matplotlib for the plots, hand-drawn SVG for the timeline."""

from __future__ import annotations

from collections.abc import Sequence
import html
import io
from itertools import pairwise
from typing import Any

from flashrt_ros.demo.record import ForkResult
from flashrt_ros.demo.record import percentile
from flashrt_ros.demo.record import RealTime
from flashrt_ros.demo.record import Run

INK, FAINT, ACCENT, WARM = '#22313f', '#d9dee4', '#1f7a8c', '#d1603d'
EPOCH_COLOURS = ('#1f7a8c', '#6aa84f', '#8e6bbf', '#c98a1b', '#b5485d', '#4b78b8')
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
    """Command gaps over time, their histogram, and latency over time."""
    figure = _figure(9.6, 2.9)
    over_time, histogram, latency = figure.subplots(1, 3, width_ratios=(1.5, 1, 1.5))
    gaps = samples.arrival_gap_ms
    seconds = [sum(gaps[:1])] if not gaps else []
    total = 0.0
    for gap in gaps:
        total += gap / 1000.0
        seconds.append(total)
    over_time.plot(seconds, gaps, '.', color=ACCENT, markersize=2.2)
    over_time.axhline(samples.period_ms, color=WARM, linewidth=0.9)
    over_time.set_title('time between commands, ms', fontsize=9, color=INK, loc='left')
    over_time.set_xlabel('s', fontsize=8)
    over_time.set_ylim(bottom=0)
    late = [gap - samples.period_ms for gap in gaps]
    edge = max(1.0, percentile([abs(v) for v in late], 99.5)) if late else 1.0
    histogram.hist(late, bins=41, range=(-edge, edge), color=ACCENT)
    histogram.set_title('jitter, ms', fontsize=9, color=INK, loc='left')
    histogram.set_yscale('symlog')
    if samples.latency_ms:
        count = len(samples.latency_ms)
        x = [samples.seconds * (i + 0.5) / count for i in range(count)]
        latency.plot(x, samples.latency_ms, color=INK, linewidth=0.8, label='image to chunk')
    if samples.inference_ms:
        count = len(samples.inference_ms)
        x = [samples.seconds * (i + 0.5) / count for i in range(count)]
        latency.plot(x, samples.inference_ms, color=WARM, linewidth=0.8, label='inference alone')
    latency.set_title('latency of each tick, ms', fontsize=9, color=INK, loc='left')
    latency.set_xlabel('s', fontsize=8)
    latency.set_ylim(bottom=0)
    if latency.get_legend_handles_labels()[0]:
        latency.legend(fontsize=7, frameon=False, loc='upper right')
    for axes in (over_time, histogram, latency):
        _tidy(axes)
    return _png(figure)


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


def timeline_svg(run: Run) -> str:
    """Episodes as rows, epochs as coloured stretches, verbs as marks."""
    if not run.episodes:
        return ''
    left, width, row, top = 150, 790, 34, 14
    scale = width / max(1e-6, *(e.ended_s - e.began_s for e in run.episodes))
    height = top + row * len(run.episodes) + 26
    parts = [f'<svg viewBox="0 0 {left + width + 60} {height}" class="timeline" role="img">']
    for index, episode in enumerate(run.episodes):
        y = top + index * row

        def x(seconds: float, begin: float = episode.began_s) -> float:
            return left + (seconds - begin) * scale

        calls = [c for c in run.verbs if episode.began_s <= c.at_s <= episode.ended_s]
        cuts = [c for c in calls if c.verb in ('reset', 'rollback', 'restore')]
        edges = [episode.began_s, *(c.at_s for c in cuts), episode.ended_s]
        first = episode.epochs[0] if episode.epochs else 0
        epochs = [first if not cuts else max(0, cuts[0].epoch - 1), *(c.epoch for c in cuts)]
        parts.append(
            f'<text x="{left - 10}" y="{y + 15}" text-anchor="end">'
            f'{html.escape(episode.title)}</text><text x="{x(episode.ended_s) + 8:.1f}" '
            f'y="{y + 15}" class="faint">{episode.ended_s - episode.began_s:.1f} s</text>'
        )
        for number, (start, stop) in enumerate(pairwise(edges)):
            if (stop - start) * scale < 0.5:
                continue
            colour = EPOCH_COLOURS[epochs[number] % len(EPOCH_COLOURS)]
            if episode.driver == 'expert':
                colour = '#9aa5b1'
            parts.append(
                f'<rect x="{x(start):.1f}" y="{y}" width="{(stop - start) * scale:.1f}" '
                f'height="20" rx="3" fill="{colour}" opacity="0.85"/>'
            )
            if (stop - start) * scale > 46 and episode.driver == 'policy':
                parts.append(
                    f'<text x="{x((start + stop) / 2):.1f}" y="{y + 14}" text-anchor="middle" '
                    f'class="epoch">epoch {epochs[number]}</text>'
                )
        for call in calls:
            colour = VERB_COLOURS.get(call.verb, INK)
            at = x(call.at_s)
            parts.append(
                f'<path d="M{at:.1f} {y - 3} l4 -6 h-8 z" fill="{colour}"><title>{call.verb} '
                f'{html.escape(call.capsule)} at {call.at_s:.2f} s</title></path>'
                f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{y - 3}" y2="{y + 20}" stroke="{colour}" '
                'stroke-width="1.4"/>'
            )
    y = height - 8
    at = left
    for verb, colour in VERB_COLOURS.items():
        if any(c.verb == verb for c in run.verbs):
            parts.append(
                f'<rect x="{at}" y="{y - 9}" width="10" height="10" fill="{colour}"/>'
                f'<text x="{at + 15}" y="{y}">{verb}</text>'
            )
            at += 90
    parts.append('</svg>')
    return ''.join(parts)
