"""The HTML report of a demo run: one file, no network, pictures inside."""

from __future__ import annotations

import base64
from collections.abc import Iterable
import html
from pathlib import Path

from flashrt_ros.demo import plots
from flashrt_ros.demo.record import Episode
from flashrt_ros.demo.record import percentile
from flashrt_ros.demo.record import Run

_STYLE = (Path(__file__).parent / 'report.css').read_text()


def write_report(run: Run, path: Path) -> None:
    """Draw ``run`` into ``path``."""
    path.write_text(render(run), encoding='utf-8')


def render(run: Run) -> str:
    """Return the report as HTML text."""
    sections = [
        _head(run),
        _cards(run),
        '<h2>Episodes and epochs</h2><p>Each reset, restore or rollback begins a new epoch; '
        'a result in flight from an older one is dropped. All rows have the same scale.</p>'
        + plots.timeline_svg(run),
        _strips(run.episodes),
        _proofs(run),
        _forks(run),
        _verbs(run),
        _capsules(run),
        _real_time(run),
        _environment(run),
    ]
    body = '\n'.join(section for section in sections if section)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<title>flashrt_ros demo</title><style>{_STYLE}</style><main>{body}</main></html>\n'
    )


def _img(png: bytes, alt: str) -> str:
    data = base64.b64encode(png).decode('ascii')
    return f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{data}">'


def _table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Build a table; a header that begins with '>' makes a right-aligned column."""
    names = list(header)
    classes = [' class="n"' if name.startswith('>') else '' for name in names]
    head = ''.join(f'<th{c}>{html.escape(n.lstrip(">"))}</th>' for n, c in zip(names, classes))
    lines = []
    for row in rows:
        cells = ''.join(
            f'<td{c}>{html.escape(str(v))}</td>' for v, c in zip(row, classes, strict=True)
        )
        lines.append(f'<tr>{cells}</tr>')
    return f'<table><tr>{head}</tr>{"".join(lines)}</table>'


def _head(run: Run) -> str:
    parts = [
        '<h1>flashrt_ros demo</h1>',
        f'<div class="sub">{html.escape(run.started)} &middot; {html.escape(run.policy)} on '
        f'{html.escape(run.device)} &middot; {run.seconds:.1f} s &middot; ROS domain '
        f'{run.domain_id}</div>',
    ]
    if not run.trained:
        parts.append(
            '<div class="note"><b>The policy is untrained</b>: random weights, so its arm wanders '
            'and solves nothing. What is shown is the runtime: every episode begins by restoring '
            'a capsule, and a rollback repeats itself bit for bit. The scripted expert drives the '
            'same robot through the same topic and solves the task.</div>'
        )
    for failure in run.failures:
        parts.append(f'<div class="note bad">{html.escape(failure)}</div>')
    return ''.join(parts)


def _card(value: str, text: str, kind: str = '') -> str:
    body = f'<b>{html.escape(value)}</b><span>{html.escape(text)}</span>'
    return f'<div class="card {kind}">{body}</div>'


def _cards(run: Run) -> str:
    cards = []
    resets = [c.restore_us for c in run.verbs if c.verb == 'reset' and c.restore_us > 0]
    if resets:
        cards.append(_card(f'{percentile(resets, 50):.0f} µs', 'restore of an episode reset, p50'))
    if run.proofs:
        equal = sum(p.equal for p in run.proofs)
        kind = 'good' if equal == len(run.proofs) else 'poor'
        cards.append(
            _card(f'{equal} of {len(run.proofs)}', 'rollbacks replayed bit for bit', kind)
        )
    if run.forks:
        fork = run.forks[-1]
        cards.append(_card(f'{fork.distinct} of {len(fork.seeds)}', 'fork branches that differ'))
    expert = [e for e in run.episodes if e.driver == 'expert']
    if expert:
        solved = sum(e.solved for e in expert)
        kind = 'good' if solved == len(expert) else 'poor'
        cards.append(_card(f'{solved} of {len(expert)}', 'tasks solved by the expert', kind))
    if run.real_time and run.real_time.arrival_gap_ms:
        late = [abs(g - run.real_time.period_ms) for g in run.real_time.arrival_gap_ms]
        cards.append(_card(f'{percentile(late, 99):.2f} ms', 'jitter of commands, p99'))
    if run.real_time and run.real_time.latency_ms:
        value = percentile(run.real_time.latency_ms, 50)
        cards.append(_card(f'{value:.1f} ms', 'image stamp to chunk, p50'))
    return f'<div class="cards">{"".join(cards)}</div>'


def _strips(episodes: list[Episode]) -> str:
    figures = []
    for episode in episodes:
        tags = f'<span class="tag {episode.driver}">{episode.driver}</span>'
        if episode.solved:
            tags += '<span class="tag good">solved</span>'
        detail = f'seed {episode.seed}, {episode.steps} steps'
        if episode.ticks:
            detail += f', {episode.ticks} ticks'
        if episode.epochs:
            detail += f', epochs {", ".join(map(str, episode.epochs))}'
        picture = _img(episode.strip_png, episode.title) if episode.strip_png else ''
        note = f' &middot; {html.escape(episode.note)}' if episode.note else ''
        figures.append(
            f'<figure><figcaption><b>{html.escape(episode.title)}</b>'
            f'&ldquo;{html.escape(episode.task)}&rdquo;{tags}<br><span class="sub">'
            f'{html.escape(detail)}{note}</span></figcaption>{picture}</figure>'
        )
    return ''.join(figures)


def _proofs(run: Run) -> str:
    if not run.proofs:
        return ''
    rows = [
        (
            p.capsule,
            p.ticks,
            f'{p.first_epoch} → {p.second_epoch}',
            'equal' if p.inputs_equal else 'DIFFER',
            p.first_digest[:16],
            p.second_digest[:16],
            'bit for bit' if p.equal else 'NO',
        )
        for p in run.proofs
    ]
    header = (
        'capsule',
        '>ticks',
        'epoch',
        'observations',
        'chunks, first',
        'chunks, again',
        'equal',
    )
    return (
        '<h2>Rollback, and the same again</h2><p>From a capsule taken in mid-episode the policy '
        'ticks on a few observations; a rollback brings the state back, the same observations are '
        'shown once more. The digests cover every bit of every action.</p>' + _table(header, rows)
    )


def _forks(run: Run) -> str:
    if not run.forks:
        return ''
    parts = [
        '<h2>Fork</h2><p>Branches of one boundary on one observation, each with its own seed; the '
        'medoid is selected. On a robot this means: look at several futures, commit one.</p>'
    ]
    for fork in run.forks:
        rows = [
            (i, seed, f'{score:.4f}', 'selected' if i == fork.selected else '')
            for i, (seed, score) in enumerate(zip(fork.seeds, fork.scores, strict=False))
        ]
        parts.append(_table(('branch', '>seed', '>score', ''), rows))
        if fork.chunks and fork.joint_names:
            picture = _img(plots.fork_png(fork), 'joint targets of each branch')
            parts.append(
                f'<figure>{picture}<figcaption class="sub">joint targets of each branch, '
                f'spread {fork.spread:.4f}</figcaption></figure>'
            )
    return ''.join(parts)


def _verbs(run: Run) -> str:
    if not run.verbs:
        return ''
    rows = []
    for verb in plots.VERB_COLOURS:
        calls = [c for c in run.verbs if c.verb == verb]
        if not calls:
            continue
        restores = [c.restore_us for c in calls if c.restore_us > 0]
        rows.append(
            (
                verb,
                len(calls),
                f'{percentile([c.round_trip_us for c in calls], 50):.0f}',
                f'{percentile([c.service_us for c in calls], 50):.0f}',
                f'{percentile(restores, 50):.0f}' if restores else '–',
            )
        )
    header = ('verb', '>calls', '>round trip p50, µs', '>in the node p50, µs', '>copies p50, µs')
    return (
        '<h2>What the verbs cost</h2><p>The round trip is what a client in another process waits '
        'for, over DDS; the copies are the restore itself.</p>'
        + _table(header, rows)
        + f'<figure>{_img(plots.verbs_png(run), "cost of each verb")}</figure>'
    )


def _capsules(run: Run) -> str:
    if not run.capsules:
        return ''
    taken = {c.capsule: c for c in run.verbs if c.verb == 'snapshot'}
    rows = []
    for c in run.capsules:
        restored = [v.restore_us for v in run.verbs if v.capsule == c.id and v.restore_us > 0]
        rows.append(
            (
                c.id,
                c.label,
                c.tier + (', pinned' if c.pinned else ''),
                c.parent or 'root',
                c.position,
                f'{c.bytes:,}',
                f'{taken[c.id].service_us:.0f}' if c.id in taken else '–',
                len(restored),
                f'{percentile(restored, 50):.0f}' if restored else '–',
            )
        )
    header = ('capsule', 'label', 'tier', 'parent', '>tick', '>bytes', '>snapshot, µs',
              '>restored', '>restore p50, µs')  # fmt: skip
    return '<h2>Capsules held at the end</h2>' + _table(header, rows)


def _real_time(run: Run) -> str:
    samples = run.real_time
    if samples is None:
        return ''
    late = [abs(g - samples.period_ms) for g in samples.arrival_gap_ms]
    rows = []
    for name, values in (
        ('jitter of commands (arrival in another process)', late),
        ('image stamp to chunk', samples.latency_ms),
        ('inference alone', samples.inference_ms),
    ):
        if values:
            rows.append(
                (name, len(values), *(f'{percentile(values, q):.2f}' for q in (50, 99, 100)))
            )
    counters = ', '.join(f'{k}: {v:.4g}' for k, v in samples.counters.items())
    return (
        f'<h2>Real-time episode</h2><p>{samples.seconds:.1f} s at '
        f'{1000 / samples.period_ms:.0f} Hz, robot and executor in separate processes on a '
        'machine that also runs this demo: figures of this machine today, no promise.</p>'
        + _table(('', '>samples', '>p50, ms', '>p99, ms', '>max, ms'), rows)
        + f'<figure>{_img(plots.real_time_png(samples), "jitter and latency")}</figure>'
        + (f'<p class="sub">The executor says: {html.escape(counters)}.</p>' if counters else '')
    )


def _environment(run: Run) -> str:
    rows = [
        ('command', run.command),
        *run.machine.items(),
        ('versions', ', '.join(f'{k} {v}' for k, v in run.versions.items())),
        ('start-up', ', '.join(f'{k} {v:.1f} s' for k, v in run.startup.items())),
        *((f'process {p["name"]}', p['command']) for p in run.processes),
    ]
    lines = ''.join(
        f'<tr><td>{html.escape(str(k))}</td><td><code>{html.escape(str(v))}</code></td></tr>'
        for k, v in rows
        if v
    )
    return f'<h2>Where and with what</h2><table>{lines}</table>'
