"""The demo's record and report: numbers, self-containment, what is shown when things fail."""

from dataclasses import replace
import json
import math
import re

import numpy as np
import pytest

from flashrt_core.tabletop import draw_filmstrip
from flashrt_core.tabletop import encode_png
from flashrt_core.tabletop import Expert
from flashrt_core.tabletop import World
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
    return encode_png(draw_filmstrip(states, frames=8, size=150))


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
                   ['shoulder', 'elbow', 'wrist', 'gripper'])
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


def test_the_report_is_one_file_that_loads_nothing_from_elsewhere(run, tmp_path):
    path = tmp_path / 'report.html'
    write_report(run, path)
    text = path.read_text()
    assert text.startswith('<!doctype html>')
    assert not re.search(r'(?:src|href)="(?!data:)', text)
    assert 'http://' not in text and 'https://' not in text
    assert text.count('data:image/png;base64,') == 4 + 3


def test_text_from_outside_is_escaped(run):
    text = render(run)
    assert 'put the &lt;red&gt; block &amp; go' in text
    assert '<red>' not in text


def test_an_untrained_policy_is_named_so_and_a_trained_one_is_not(run):
    assert 'Untrained, with random weights: policy.' in render(run)
    assert 'Untrained' not in render(replace(run, untrained=''))


def test_the_report_tells_capsules_with_bytes_and_microseconds(run):
    text = render(run)
    assert '3,145,728' in text
    for value in ('mid-episode', 'bit for bit', '2 of 2', 'ROS domain 17', 'torch 2.13.0'):
        assert value in text, value


def test_the_report_tells_plans_and_interrupts(run):
    text = render(run)
    for value in ('25.0', '>100<', 'go home', '31 ms', 'oracle'):
        assert value in text, value


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
    svg = subgoal_svg(run.episodes[0], 120.0, 'steps')
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
    assert len(texts) == 2 and '>rollback<' in svg
    for x, how, text in texts:
        width = 6.0 * len(text)
        left = float(x) - (width if 'end' in how else 0.0)
        assert 0 <= left and left + width <= right, text


def test_a_run_that_ended_in_its_first_episode_still_reports():
    early = Run(started='now', command='demo', failures=['process died'])
    early.episodes.append(Episode('Episode 1', 'policy', 1, 'task'))
    text = render(early)
    assert 'process died' in text


def test_an_episode_that_was_cut_short_counts_in_no_real_time_factor(run):
    cut = Episode('Cut', 'policy', 4, 'task', steps=37, began_s=run.episodes[-1].ended_s + 1.0)
    before, text = render(run), render(replace(run, episodes=[*run.episodes, cut]))
    assert 'nanx' not in text and '37 steps' in text
    factor = re.compile(r'<b>([-0-9.]+)x</b><span>real-time factor')
    assert factor.findall(text) == factor.findall(before) != []


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
