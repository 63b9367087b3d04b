"""The demo's record and report: numbers, self-containment, what is shown when things fail."""

from dataclasses import replace
import json
import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from flashrt_core.tabletop import draw_filmstrip
from flashrt_core.tabletop import encode_png
from flashrt_core.tabletop import Expert
from flashrt_core.tabletop import World
from flashrt_ros.demo import plots
from flashrt_ros.demo.record import Capsule
from flashrt_ros.demo.record import Comparison
from flashrt_ros.demo.record import Episode
from flashrt_ros.demo.record import ForkResult
from flashrt_ros.demo.record import Interrupt
from flashrt_ros.demo.record import percentile
from flashrt_ros.demo.record import PlanMade
from flashrt_ros.demo.record import RealTime
from flashrt_ros.demo.record import RollbackProof
from flashrt_ros.demo.record import Run
from flashrt_ros.demo.record import Subgoal
from flashrt_ros.demo.record import VerbCall
from flashrt_ros.demo.report import render
from flashrt_ros.demo.report import write_report
from flashrt_ros.demo.timeline import subgoal_svg


def _strip() -> bytes:
    world = World(5)
    expert = Expert(world)
    states = [world.snapshot()]
    for _ in range(40):
        world.step(expert.action())
        states.append(world.snapshot())
    return encode_png(draw_filmstrip(states, frames=8, size=150, captions=()))


def _words(svg: bytes) -> list[str]:
    """Every text of a plot, in the order in which it is drawn."""
    return [''.join(e.itertext()).replace('−', '-') for e in ElementTree.fromstring(svg).iter()
            if e.tag.endswith('}text')]


@pytest.fixture(scope='module')
def run() -> Run:
    strip = _strip()
    made = Run(
        started='2026-01-02 03:04:05+00:00',
        command='python -m flashrt_ros.demo --quick',
        policy='pi0 tiny',
        planner='qwen3_5 trained',
        untrained='policy',
        device='cpu',
        domain_id=17,
        seconds=31.4,
        machine={'machine': 'x86_64, 2 cores', 'system': 'Linux 6.1'},
        versions={'python': '3.11.7', 'torch': '2.13.0'},
        startup={'robot and executor': 4.2},
        processes=[{'name': 'executor', 'command': 'python -m flashrt_ros.executor_node'}],
    )
    at = 5.0
    for number in (1, 2, 3):
        episode = Episode(f'Episode {number}', 'policy', number, 'put the <red> block & go')
        episode.began_s, episode.steps, episode.ticks, episode.strip_png = at, 120, 15, strip
        episode.epochs = [number * 3 - 2]
        episode.subgoals = [
            Subgoal(1, 'put the <red> block', 'planner', 0, latched=0, ended=60, outcome='done'),
            Subgoal(2, 'go home', 'conductor', 60, interrupt=True, latched=64, ended=120,
                    outcome='superseded', holds=False)]
        made.plans.append(PlanMade(
            number, 'put the <red> block & go', 'red in green.', 0.0, 'ok', ['go home'],
            capsule_hit=True, prompt_tokens=40, tokens=11, ttft_us=25_000, decode_us=100_000))
        made.verbs.append(VerbCall('reset', 'C0', number, number * 3 - 2, at + 0.1, 900, 210, 41))
        if number == 1:
            made.verbs.append(VerbCall('snapshot', 'mid', 1, 1, at + 1, 820, 150, 0, 3_145_728))
            made.verbs.append(VerbCall('rollback', 'mid', 1, 2, at + 1.5, 1010, 260, 44))
            made.verbs.append(VerbCall('rollback', 'mid', 1, 3, at + 2.4, 990, 240, 43))
            episode.epochs += [2, 3]
        if number == 2:
            made.verbs.append(VerbCall('fork', 'mid2', 2, 4, at + 1.2, 21000, 20500))
        at += 3.5
        episode.ended_s = at
        episode.frame_times_s = [0.0, 0.34, 2.4]
        made.episodes.append(episode)
    expert = Episode('Scripted expert', 'expert', 5, 'put the orange block in the red zone')
    expert.solved, expert.steps, expert.began_s, expert.ended_s = True, 46, at, at + 0.6
    expert.strip_png = strip
    made.episodes.append(expert)
    made.proofs.append(RollbackProof('mid', 4, 2, 3, 'ab' * 16, 'ab' * 16))
    made.comparisons.append(Comparison(
        'Episode 1', 'Episode 2', [('actions', 15, 'cd' * 16, 'cd' * 16)]))
    rng = np.random.default_rng(0)
    chunks = (rng.normal(size=(4, 16, 4)).cumsum(axis=1) * 0.1).tolist()
    made.forks.append(
        ForkResult('mid2', [-0.4, -0.2, -0.5, -0.6], 0.31, 1, 4, chunks,
                   ['shoulder', 'elbow', 'slide', 'gripper'], ['rad', 'rad', 'm', 'ratio'])
    )  # fmt: skip
    made.capsules = [
        Capsule('executor', 'C0', 'episode start', 'gpu', '', 0, 3_145_728, True),
        Capsule('executor', 'mid', 'mid-episode', 'gpu', 'C0', 8, 3_145_728, False),
    ]
    made.real_time = RealTime(
        20.0,
        8.0,
        (20 + rng.normal(size=400) * 0.3).tolist(),
        (30 + rng.gamma(2, 2, size=50)).tolist(),
        (22 + rng.gamma(2, 1, size=50)).tolist(),
        [Interrupt(9, 'go home', 3.0, 31.0)],
        {'late': 1, 'missed': 0},
    )
    return made


@pytest.fixture(scope='module')
def page(run: Run) -> str:
    return render(run)


def test_the_report_is_one_file_that_loads_nothing_from_elsewhere(run, tmp_path):
    path = tmp_path / 'report.html'
    write_report(run, path)
    text = path.read_text()
    assert text.startswith('<!doctype html>')
    assert not re.search(r'(?:src|href)="(?!data:)', text)
    assert 'http://' not in text and 'https://' not in text
    assert text.count('data:image/png;base64,') == 4
    assert text.count('data:image/svg+xml;base64,') == 3
    assert '<script' not in text


def test_every_frame_of_a_strip_says_when_it_was(run):
    live = Episode('Real time, 50 Hz', 'policy', 2, 'task', strip_png=b'x',
                   frame_times_s=[0.02, 1.137])
    text = render(replace(run, episodes=[run.episodes[0], live], plans=[]))
    text = text.replace('&nbsp;', ' ')
    assert re.findall('<div class="times">(.*?)</div>', text) == [
        '<span>step 0, 0.00 s</span><span>step 17, 0.34 s</span><span>step 120, 2.40 s</span>',
        '<span>0.02 s</span><span>1.14 s</span>']


def test_each_joint_of_a_fork_has_its_unit_on_its_axis_and_the_played_one_is_named(run):
    words = _words(plots.fork_svg(run.forks[0]))
    assert [w for w in words if w.startswith('target')] == [
        'target, rad', 'target, rad', 'target, m', 'target, 0 to 1']
    assert words.count('steps of 20 ms') == 4
    assert words.count('candidate 1, played') == words.count('the other candidates') == 1


@pytest.mark.parametrize('selected', [0, 1])
def test_a_fork_of_few_candidates_has_each_of_them_once_in_its_legend(selected):
    chunk = [[0.0], [1.0]]
    two = ForkResult('c', [0.0, 0.0], 0.1, selected, 2, [chunk, chunk], ['slide'], ['m'])
    one = replace(two, chunks=[chunk], selected=0)
    words = _words(plots.fork_svg(two))
    assert words.count(f'candidate {selected}, played') == words.count('the other candidates') == 1
    assert 'the other candidates' not in _words(plots.fork_svg(one))


def test_every_axis_of_the_real_time_plots_has_its_unit(run):
    words = _words(plots.real_time_svg(run.real_time))
    for label in ('time in the episode, s', 'gap, ms', 'the period, 20 ms', 'gap minus period, ms',
                  'commands, log', 'ms', 'a sample', 'median', 'image stamp to chunk',
                  'interrupt: call to first command of the new goal'):
        assert words.count(label) == 1, label


def test_a_command_that_came_very_late_is_in_the_histogram_too(run):
    late = replace(run.real_time, arrival_gap_ms=[20.0] * 400 + [520.0])
    assert '400' in _words(plots.real_time_svg(late))


@pytest.mark.parametrize('samples', [
    RealTime(20.0), RealTime(20.0, 1.0, [20.0]), RealTime(20.0, 1.0, [], [30.0])])
def test_an_episode_with_hardly_a_sample_is_drawn(samples):
    assert 'gap, ms' in _words(plots.real_time_svg(samples))


def test_the_cost_of_verbs_is_on_an_axis_of_plain_microseconds(run):
    words = _words(plots.verbs_svg(run))
    assert 'µs, log' in words and {'50', '1,000', '10,000'} <= set(words)
    assert words.count('copies of the capsule') == 1


def test_a_p99_is_told_only_of_samples_enough_for_one(page):
    row = r'<td>{}</td><td class="n">{}</td><td class="n">[\d.]+</td><td class="n">{}</td>'
    assert re.search(row.format('jitter of commands.*?', 400, r'[\d.]+'), page)
    assert re.search(row.format('image stamp to chunk', 50, '–'), page)
    assert 'jitter of commands, p99<' in page


def test_the_jitter_of_few_commands_is_called_the_largest(run):
    few = replace(run.real_time, arrival_gap_ms=[20.0, 27.5], latency_ms=[])
    assert '<b>7.50 ms</b><span>jitter of commands, largest<' in render(
        replace(run, real_time=few, episodes=[], plans=[]))


def test_text_from_outside_is_escaped(page):
    assert 'put the &lt;red&gt; block &amp; go' in page
    assert '<red>' not in page


def test_an_untrained_policy_is_named_so_and_a_trained_one_is_not(run, page):
    assert 'Untrained, with random weights: policy.' in page
    assert 'Untrained' not in render(replace(run, untrained=''))


def test_the_report_tells_capsules_with_bytes_and_microseconds(page):
    assert '3,145,728' in page
    for value in ('mid-episode', 'bit for bit', '2 of 2', 'ROS domain 17', 'torch 2.13.0'):
        assert value in page, value


def test_the_report_tells_plans_and_interrupts(page):
    for value in ('25.0', '>100<', 'go home', '31.0 ms', 'oracle'):
        assert value in page, value


def test_a_proof_needs_candidates_equal_bits_and_a_later_epoch():
    assert RollbackProof('c', 4, 2, 3, 'aa', 'aa').equal
    assert not RollbackProof('c', 4, 2, 3, 'aa', 'ab').equal
    assert not RollbackProof('c', 4, 2, 2, 'aa', 'aa').equal
    assert not RollbackProof('c', 0, 2, 3, 'aa', 'aa').equal


def test_a_comparison_needs_something_to_compare_and_every_digest_equal():
    assert Comparison('a', 'b', [('actions', 3, 'aa', 'aa')]).equal
    assert not Comparison('a', 'b').equal
    assert not Comparison('a', 'b', [('actions', 0, 'aa', 'aa')]).equal
    assert not Comparison('a', 'b', [('x', 3, 'aa', 'aa'), ('actions', 3, 'aa', 'ab')]).equal


def test_failures_and_a_broken_replay_are_shown(run):
    run.failures.append('executor did not end in order: exit -9')
    run.proofs.append(RollbackProof('mid', 3, 2, 3, 'aa', 'bb'))
    try:
        text = render(run)
    finally:
        run.failures.pop()
        run.proofs.pop()
    assert 'exit -9' in text
    assert '2 of 3' in text


def test_the_timeline_shows_each_subgoal_and_when_it_was_latched(run):
    svg = subgoal_svg(run.episodes[0], 120.0, 'steps of 20 ms')
    assert '>steps of 20 ms</text>' in svg
    assert '<title>put the &lt;red&gt; block: written 0, latched 0, done 60</title>' in svg
    assert 'put the &lt;red&gt; block' in svg and '<red>' not in svg
    assert 'go home (by the conductor): the policy says done, the world does not agree' in svg
    assert svg.count('<circle') == 2
    assert subgoal_svg(Episode('e', 'policy', 1, 'task'), 1.0, 'steps') == ''


@pytest.mark.parametrize('at', [0.0, 35.0, 69.0, 97.0])
def test_no_text_of_a_timeline_is_cut_off_at_its_edges(at):
    items = [Subgoal(1, 'put the yellow block in the purple zone', 'conductor', at, latched=at,
                     ended=99.0, outcome='done', holds=False)]
    episode = Episode('one', 'policy', 1, 'task', steps=100, subgoals=items, marks=[
        (at, '“move the yellow block to the purple zone, then go home”'), (at, 'rollback')])
    svg = subgoal_svg(episode, 100.0, 'steps')
    right = float(re.search(r'viewBox="0 0 (\d+) ', svg)[1])
    texts = re.findall(r'<text x="([-\d.]+)"([^>]*)>([^<]{12,})</text>', svg)
    assert len(texts) == 2 and texts[1][2].endswith('”, rollback')
    for x, how, text in texts:
        width = 6.0 * len(text)
        left = float(x) - (width if 'end' in how else 0.0)
        assert 0 <= left and left + width <= right, text


def test_what_happened_at_one_place_is_one_text_that_says_how_often():
    items = [Subgoal(1, 'go home', 'planner', 0, latched=0, ended=9, outcome='done')]
    svg = subgoal_svg(Episode('one', 'policy', 1, 'task', subgoals=items, marks=[
        (5, 'rollback'), (5, 'fork'), (5, 'rollback'), (5, 'fork'), (7, 'slip')]), 10.0, 's')
    assert re.findall('class="call"[^>]*>([^<]*)</text>', svg) == ['rollback 2x, fork 2x', 'slip']


def test_a_text_that_its_bar_cannot_hold_stands_before_it_where_there_is_room():
    def anchor(written: float, ended: float) -> str:
        items = [Subgoal(1, 'pick up the green block', 'planner', written, latched=written,
                         ended=ended, outcome='done')]
        svg = subgoal_svg(Episode('one', 'policy', 1, 'task', subgoals=items), 100.0, 's')
        return re.search('text-anchor="(start|end)">pick', svg)[1]

    assert anchor(50, 52) == 'end'
    assert anchor(50, 90) == 'start'
    assert anchor(2, 4) == 'start', 'there is no room before it'


def test_a_run_that_ended_in_its_first_episode_still_reports():
    early = Run(started='now', command='demo', failures=['process died'])
    early.episodes.append(Episode('Episode 1', 'policy', 1, 'task'))
    text = render(early)
    assert 'process died' in text


def test_an_episode_that_was_cut_short_counts_in_no_real_time_factor(run, page):
    cut = Episode('Cut', 'policy', 4, 'task', steps=37, began_s=run.episodes[-1].ended_s + 1.0)
    text = render(replace(run, episodes=[*run.episodes, cut]))
    assert 'nanx' not in text and '37 steps' in text
    factor = re.compile(r'<b>([-0-9.]+)x</b><span>of real time')
    assert factor.findall(text) == factor.findall(page) != []


def test_the_json_beside_it_has_everything_but_pictures(run, tmp_path):
    run.save(tmp_path / 'run.json')
    data = json.loads((tmp_path / 'run.json').read_text())
    assert len(data['episodes']) == 4
    assert 'strip_png' not in data['episodes'][0]
    assert data['verbs'][0]['restore_us'] == 41


def test_percentiles_are_nearest_rank():
    values = [float(v) for v in range(1, 101)]
    assert percentile(values, 50) == 50
    assert percentile(values, 99) == 99
    assert percentile(values, 100) == 100
    assert percentile([7.0], 99) == 7.0
    assert math.isnan(percentile([], 50))
