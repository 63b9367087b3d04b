"""The demo's record and report: numbers, self-containment, what is shown when things fail."""

import json
import math
import re

import numpy as np
import pytest

from flashrt_core.tabletop import draw_filmstrip
from flashrt_core.tabletop import encode_png
from flashrt_core.tabletop import Expert
from flashrt_core.tabletop import World
from flashrt_ros.demo.plots import timeline_svg
from flashrt_ros.demo.record import Capsule
from flashrt_ros.demo.record import Episode
from flashrt_ros.demo.record import ForkResult
from flashrt_ros.demo.record import percentile
from flashrt_ros.demo.record import RealTime
from flashrt_ros.demo.record import ReplayProof
from flashrt_ros.demo.record import Run
from flashrt_ros.demo.record import VerbCall
from flashrt_ros.demo.report import render
from flashrt_ros.demo.report import write_report


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
    made.proofs.append(ReplayProof('mid', 3, 2, 3, 'ab' * 16, 'ab' * 16, True))
    rng = np.random.default_rng(0)
    chunks = (rng.normal(size=(4, 16, 4)).cumsum(axis=1) * 0.1).tolist()
    made.forks.append(
        ForkResult('mid2', [1, 2, 3, 4], [-0.4, -0.2, -0.5, -0.6], 0.31, 1, 4, chunks,
                   ['shoulder', 'elbow', 'wrist', 'gripper'])
    )  # fmt: skip
    made.capsules = [
        Capsule('C0', 'episode start', 'gpu', '', 0, 3_145_728, True),
        Capsule('mid', 'mid-episode', 'gpu', 'C0', 8, 3_145_728, False),
    ]
    made.real_time = RealTime(
        20.0,
        8.0,
        (20 + rng.normal(size=400) * 0.3).tolist(),
        (30 + rng.gamma(2, 2, size=50)).tolist(),
        (22 + rng.gamma(2, 1, size=50)).tolist(),
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
    assert 'untrained' in render(run)
    run.trained = True
    assert 'untrained' not in render(run)
    run.trained = False


def test_the_report_tells_capsules_with_bytes_and_microseconds(run):
    text = render(run)
    assert '3,145,728' in text
    for value in ('mid-episode', 'bit for bit', '1 of 1', 'ROS domain 17', 'torch 2.13.0'):
        assert value in text, value


def test_a_proof_needs_equal_inputs_equal_bits_and_a_later_epoch():
    good = ReplayProof('c', 3, 2, 3, 'aa', 'aa', True)
    assert good.equal
    assert not ReplayProof('c', 3, 2, 3, 'aa', 'ab', True).equal
    assert not ReplayProof('c', 3, 2, 3, 'aa', 'aa', False).equal
    assert not ReplayProof('c', 3, 2, 2, 'aa', 'aa', True).equal
    assert not ReplayProof('c', 0, 2, 3, 'aa', 'aa', True).equal


def test_failures_and_a_broken_replay_are_shown(run):
    run.failures.append('executor did not end in order: exit -9')
    run.proofs.append(ReplayProof('mid', 3, 2, 3, 'aa', 'bb', True))
    try:
        text = render(run)
    finally:
        run.failures.pop()
        run.proofs.pop()
    assert 'exit -9' in text
    assert '1 of 2' in text


def test_the_timeline_has_one_stretch_for_each_epoch(run):
    svg = timeline_svg(run)
    assert all(f'epoch {n}' in svg for n in (1, 2, 3))
    assert timeline_svg(Run(started='', command='')) == ''


def test_a_run_that_ended_in_its_first_episode_still_reports():
    early = Run(started='now', command='demo', failures=['process died'])
    early.episodes.append(Episode('Episode 1', 'policy', 1, 'task'))
    text = render(early)
    assert 'process died' in text


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
