"""The HTML report of a demo run: one file, no network, pictures inside."""

from __future__ import annotations

import base64
from collections.abc import Iterable
import html
from pathlib import Path

from flashrt_core.tabletop import CONTROL_PERIOD_S
from flashrt_ros.demo import plots
from flashrt_ros.demo import timeline
from flashrt_ros.demo.record import Episode
from flashrt_ros.demo.record import percentile
from flashrt_ros.demo.record import Run

_STEP = f'{1e3 * CONTROL_PERIOD_S:.0f} ms'
_SAMPLES_OF_P99 = 100  # that it takes before p99 is another one than the largest
_STYLE = (Path(__file__).parent / 'report.css').read_text()


def write_report(run: Run, path: Path) -> None:
    """Draw ``run`` into ``path``."""
    path.write_text(render(run), encoding='utf-8')


def render(run: Run) -> str:
    """Return the report as HTML text."""
    sections = [
        _head(run),
        _cards(run),
        _episodes(run),
        _comparisons(run),
        _rollbacks(run),
        _plans(run),
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


def _img(picture: bytes, alt: str, kind: str = 'svg+xml') -> str:
    data = base64.b64encode(picture).decode('ascii')
    return f'<img alt="{html.escape(alt)}" src="data:image/{kind};base64,{data}">'


def _table(header: Iterable[str], rows: Iterable[Iterable[object]], kind: str = '') -> str:
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
    return _scroll(f'<table class="{kind}"><tr>{head}</tr>{"".join(lines)}</table>')


def _scroll(table: str) -> str:
    """Let a table that is wider than the window scroll by itself."""
    return f'<div class="scroll">{table}</div>'


def _head(run: Run) -> str:
    parts = [
        '<h1>flashrt_ros demo</h1>',
        f'<div class="sub">{html.escape(run.started)} &middot; {html.escape(run.policy)} and '
        f'{html.escape(run.planner)} on {html.escape(run.device)} &middot; {run.seconds:.1f} s '
        f'&middot; ROS domain {run.domain_id}</div>',
    ]
    if run.untrained:
        parts.append(
            f'<div class="note"><b>Untrained, with random weights: {run.untrained}.</b> The arm '
            'wanders and plans are random. What is shown is the runtime: every episode begins by '
            'restoring a capsule, and the same episode repeats itself bit for bit. The scripted '
            'expert drives the same robot through the same topic and solves its task.</div>')
    parts.append(
        '<p>The scene that the planner reads, and what is called solved, held or slipped, come '
        'from the simulator: an oracle. The policy sees pictures and joints alone.</p>')
    for failure in run.failures:
        parts.append(f'<div class="note bad">{html.escape(failure)}</div>')
    return ''.join(parts)


def _card(value: str, text: str, kind: str = '') -> str:
    body = f'<b>{html.escape(value)}</b><span>{html.escape(text)}</span>'
    return f'<div class="card {kind}">{body}</div>'


def _ms(value: float) -> str:
    """Write milliseconds in three figures, as many as a card has room for."""
    return f'{value:,.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f} ms'


def _cards(run: Run) -> str:
    cards = []
    resets = [c.restore_us for c in run.verbs if c.verb == 'reset' and c.restore_us > 0]
    if resets:
        cards.append(_card(f'{percentile(resets, 50):.0f} µs',
                           'restore of an episode reset, median'))
    proofs = [*run.comparisons, *run.proofs]
    if proofs:
        equal = sum(p.equal for p in proofs)
        kind = 'good' if equal == len(proofs) else 'poor'
        cards.append(_card(f'{equal} of {len(proofs)}', 'repetitions bit for bit', kind))
    stepped = [e for e in run.episodes if e.driver == 'policy' and not _is_real_time(e)]
    if stepped:
        solved = sum(e.solved for e in stepped)
        kind = 'good' if solved == len(stepped) else 'poor'
        cards.append(_card(f'{solved} of {len(stepped)}', 'tasks solved by the policy', kind))
        ended = [e for e in stepped if e.ended_s > e.began_s]
        steps = sum(e.steps for e in ended)
        wall = sum(e.ended_s - e.began_s for e in ended)
        if wall > 0:
            cards.append(_card(f'{steps * CONTROL_PERIOD_S / wall:.1f}x',
                               'of real time in lock-step'))
    firsts = [p.ttft_us / 1e3 for p in run.plans if p.ttft_us]
    if firsts:
        cards.append(_card(_ms(percentile(firsts, 50)),
                           'a plan, restore to first token, median'))
    if run.real_time and run.real_time.arrival_gap_ms:
        late = [abs(g - run.real_time.period_ms) for g in run.real_time.arrival_gap_ms]
        which = 'p99' if len(late) >= _SAMPLES_OF_P99 else 'largest'
        cards.append(_card(_ms(percentile(late, 99)), f'jitter of commands, {which}'))
    if run.real_time and run.real_time.interrupts:
        value = percentile([i.to_command_ms for i in run.real_time.interrupts], 50)
        cards.append(_card(_ms(value), 'interrupt to first command, median'))
    return f'<div class="cards">{"".join(cards)}</div>'


def _is_real_time(episode: Episode) -> bool:
    return episode.driver == 'policy' and episode.title.startswith('Real time')


def _episodes(run: Run) -> str:
    figures = []
    for episode in run.episodes:
        live = _is_real_time(episode)
        tags = f'<span class="tag {episode.driver}">{episode.driver}</span>'
        if not live:
            word, kind = ('solved', ' good') if episode.solved else ('not solved', '')
            tags += f'<span class="tag{kind}">{word}</span>'
        detail = f'seed {episode.seed}, {episode.steps} {"commands" if live else "steps"}'
        if episode.ticks:
            detail += f', {episode.ticks} ticks'
        if not live and episode.ended_s > episode.began_s:
            plans = ' with all plans and verbs' if episode.driver == 'policy' else ''
            detail += f', {episode.real_time_factor:.1f}x real time{plans}'
        if episode.epochs:
            several = 's' if len(episode.epochs) > 1 else ''
            detail += f', epoch{several} {", ".join(map(str, episode.epochs))}'
        length = run.real_time.seconds if live and run.real_time else float(episode.steps)
        lines = timeline.subgoal_svg(episode, length, 'seconds' if live else f'steps of {_STEP}')
        note = f' &middot; {html.escape(episode.note)}' if episode.note else ''
        figures.append(
            f'<figure><figcaption><b>{html.escape(episode.title)}</b>'
            f'&ldquo;{html.escape(episode.task)}&rdquo;{tags}<br><span class="sub">'
            f'{html.escape(detail)}{note}</span></figcaption>'
            f'{_strip(episode, live)}{lines}</figure>'
        )
    return (
        f'<h2>Episodes</h2><p>Film strips run from the first to the last step; a step is {_STEP} '
        "of the robot's time. Below each: every subgoal from where it was written into the slot "
        'to the tick that latched it, to its end. A tick is one inference of the policy; an epoch '
        'begins whenever its mind is restored, by a reset or a rollback.</p>'
        + timeline.legend() + ''.join(figures))


def _strip(episode: Episode, live: bool) -> str:
    """Show the film strip, and below each frame when it was."""
    if not episode.strip_png:
        return ''
    times = ''.join(
        f'<span>{at:.2f}&nbsp;s</span>' if live
        else f'<span>step&nbsp;{at / CONTROL_PERIOD_S:.0f}, {at:.2f}&nbsp;s</span>'
        for at in episode.frame_times_s)
    picture = _img(episode.strip_png, f'{episode.title}: film strip', 'png')
    return f'{picture}<div class="times">{times}</div>'


def _comparisons(run: Run) -> str:
    if not run.comparisons:
        return ''
    parts = [
        '<h2>Reset by a capsule, and the same again</h2><p>The mind is put back by restoring C0, '
        'the world by its seed, then the same is asked at the same steps. The digests cover every '
        'bit of all that went in and came out (BLAKE2b; the first half of each is shown).</p>']
    for found in run.comparisons:
        parts.append(_table(
            (f'{found.first} / {found.again}', '>count', 'first', 'again', 'equal'),
            [(what, count, before[:16], after[:16], 'bit for bit' if before == after else 'NO')
             for what, count, before, after in found.rows]))
    return ''.join(parts)


def _rollbacks(run: Run) -> str:
    if not run.proofs:
        return ''
    rows = [(p.capsule, p.candidates, f'{p.first_epoch}, {p.second_epoch}', p.first_digest[:16],
             p.second_digest[:16], 'bit for bit' if p.equal else 'NO') for p in run.proofs]
    parts = [
        '<h2>A failed grasp: rollback, best of N, try again</h2><p>The mind goes back to a '
        'capsule taken before the grasp; the world stays as the slip has left it. Candidates '
        'of one observation, each with its own noise; the medoid is played, the one whose mean '
        'distance to the others is least. Rolled back twice on the same observation they are the '
        'same bits.</p>'
        + _table(('capsule', '>candidates', 'epochs', 'first', 'again', 'equal'), rows)]
    for fork in run.forks:
        parts.append(_table(
            ('candidate', '>score: minus the mean distance to the others', ''),
            [(i, f'{score:.4f}', 'played' if i == fork.selected else '')
             for i, score in enumerate(fork.scores)], 'narrow'))
        if fork.chunks and fork.joint_names:
            picture = _img(plots.fork_svg(fork), 'joint targets of each candidate')
            parts.append(
                f'<figure>{picture}<figcaption class="sub">The joint targets of each candidate, '
                f'{fork.distinct} different. A distance is the RMS over all steps and joints of '
                f'what two of them differ by, each joint in its own unit; the mean of all pairs '
                f'is {fork.spread:.4f}.</figcaption></figure>')
    return ''.join(parts)


def _plans(run: Run) -> str:
    if not run.plans:
        return ''
    rows = [
        (run.episodes[p.episode - 1].title, p.instruction, '; '.join(p.subgoals) or '–', p.code,
         p.prompt_tokens, p.tokens, f'{p.restore_us / 1e3:.2f}', f'{p.append_us / 1e3:.1f}',
         f'{p.ttft_us / 1e3:.1f}', f'{p.tokens_per_s:.0f}' if p.decode_us else '–')
        for p in run.plans]
    header = ('episode', 'instruction', 'plan', 'end', '>tokens read', '>tokens written',
              '>restore, ms', '>append, ms', '>first token, ms', '>tokens/s')
    return (
        '<h2>Plans</h2><p>Each plan restores the pinned context, appends scene and instruction, '
        'and decodes under the grammar. A plan that is interrupted or rolled away ends as '
        'superseded; one of an untrained planner is random.</p>' + _table(header, rows))


def _verbs(run: Run) -> str:
    if not run.verbs:
        return ''
    rows = []
    for verb in plots.VERBS:
        calls = [c for c in run.verbs if c.verb == verb]
        if not calls:
            continue
        restores = [c.restore_us for c in calls if c.restore_us > 0]
        rows.append(
            (
                verb,
                len(calls),
                f'{percentile([c.round_trip_us for c in calls], 50):,.0f}',
                f'{percentile([c.service_us for c in calls], 50):,.0f}',
                f'{percentile(restores, 50):,.0f}' if restores else '–',
            )
        )
    header = ('verb', '>calls', '>round trip, µs', '>inside the node, µs', '>copies, µs')
    return (
        '<h2>What the verbs cost</h2><p>Medians of the calls. The round trip is what a client in '
        'another process waits for, over DDS; the copies are the restore itself.</p>'
        + _table(header, rows)
        + f'<figure>{_img(plots.verbs_svg(run), "cost of each verb")}</figure>'
    )


def _capsules(run: Run) -> str:
    if not run.capsules:
        return ''
    taken = {c.capsule: c for c in run.verbs if c.verb == 'snapshot'}
    rows = []
    for c in run.capsules:
        restored = [v.restore_us for v in run.verbs
                    if v.capsule == c.id and v.restore_us > 0 and c.owner == 'executor']
        if c.owner == 'planner':
            restored = [p.restore_us for p in run.plans if p.capsule_hit]
        rows.append(
            (
                c.owner,
                c.id,
                c.label,
                c.tier + (', pinned' if c.pinned else ''),
                c.parent or 'root',
                c.position,
                f'{c.bytes:,}',
                f'{taken[c.id].service_us:,.0f}' if c.id in taken else '–',
                len(restored),
                f'{percentile(restored, 50):,.0f}' if restored else '–',
            )
        )
    header = ('of', 'capsule', 'label', 'tier', 'parent', '>position', '>bytes', '>snapshot, µs',
              '>times restored', '>restore, µs')  # fmt: skip
    return (
        '<h2>Capsules held at the end</h2><p>A position counts the ticks of a policy, the tokens '
        'of a planner that lie behind the capsule; restores are medians. Tier gpu is the memory '
        f'of the device that computes, here {html.escape(run.device)}.</p>'
        + _table(header, rows))


def _real_time(run: Run) -> str:
    samples = run.real_time
    if samples is None:
        return ''
    late = [abs(g - samples.period_ms) for g in samples.arrival_gap_ms]
    rows = []
    for name, values in (('jitter of commands (arrival in another process)', late),
                         *samples.latencies()):
        if values:
            tail = f'{percentile(values, 99):.2f}' if len(values) >= _SAMPLES_OF_P99 else '–'
            rows.append((name, len(values), f'{percentile(values, 50):.2f}', tail,
                         f'{max(values):.2f}'))
    counters = [(name, f'{value:,.0f}' if value >= 100 else f'{value:.3g}')
                for name, value in samples.counters.items()]
    told = _table(('the executor itself says', '>'), counters, 'narrow') if counters else ''
    return (
        f'<h2>Real-time episode</h2><p>{samples.seconds:.1f} s at '
        f'{1000 / samples.period_ms:.0f} Hz: executor and planner in one process, the robot in '
        'another, on a machine that also runs this demo: figures of this machine today, no '
        'promise. p99 is what 99 of 100 samples do not exceed; fewer samples have none. Jitter '
        'is how far a gap between commands is from the period.</p>'
        + _table(('', '>samples', '>median, ms', '>p99, ms', '>largest, ms'), rows)
        + f'<figure>{_img(plots.real_time_svg(samples), "jitter and latency")}</figure>' + told
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
    return '<h2>Where and with what</h2>' + _scroll(f'<table>{lines}</table>')
