"""The demo over real DDS with separate processes, and what it says when things go wrong."""

import io
import json
import os
from pathlib import Path
import subprocess
import sys

import pytest

from flashrt_ros.demo.terminal import Terminal
from flashrt_ros.processes import ProcessGroup
from flashrt_ros.ros_environment import require_ros
from flashrt_ros.ros_environment import RosMissing
from flashrt_ros.ros_environment import SOURCE_ROOT

pytest.importorskip('rclpy')
pytestmark = pytest.mark.ros

ENV = {**os.environ, 'PYTHONPATH': str(SOURCE_ROOT), 'OMP_NUM_THREADS': '2'}
DEMO = [sys.executable, '-m', 'flashrt_ros.demo']


def _demo(*arguments: str, timeout_s: float = 300.0) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*DEMO, *arguments], capture_output=True, text=True, env=ENV, timeout=timeout_s
    )


@pytest.fixture(scope='module')
def played(tmp_path_factory):
    out = tmp_path_factory.mktemp('demo')
    done = _demo('--episodes', '2', '--quick', '--no-realtime', '--out', str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    return out, done.stdout, json.loads((out / 'run.json').read_text())


def test_a_two_episode_run_ends_well_and_says_that_the_policy_is_untrained(played):
    _, text, run = played
    assert 'untrained' in text
    assert 'bit for bit' in text
    assert run['failures'] == []
    assert [e['driver'] for e in run['episodes']] == ['policy', 'policy', 'expert']


def test_every_policy_episode_begins_by_restoring_c0(played):
    run = played[2]
    resets = [v for v in run['verbs'] if v['verb'] == 'reset']
    assert [v['episode'] for v in resets] == [1, 2]
    assert all(v['restore_us'] > 0 for v in resets)


def test_the_rollback_repeats_the_same_bits_in_a_later_epoch(played):
    (proof,) = played[2]['proofs']
    assert proof['inputs_equal']
    assert proof['first_digest'] == proof['second_digest']
    assert proof['ticks'] >= 2
    assert proof['second_epoch'] > proof['first_epoch']


def test_epochs_only_grow(played):
    epochs = [v['epoch'] for v in played[2]['verbs']]
    assert epochs == sorted(epochs)
    assert epochs[-1] > epochs[0]


def test_fork_branches_of_different_seeds_differ(played):
    (fork,) = played[2]['forks']
    assert fork['distinct'] == len(fork['seeds'])


def test_the_expert_solves_its_task_through_the_same_topic(played):
    expert = played[2]['episodes'][-1]
    assert expert['solved']
    assert expert['note'] == ''


def test_the_report_holds_a_strip_for_each_episode_and_nothing_from_elsewhere(played):
    text = (played[0] / 'report.html').read_text()
    assert text.count('data:image/png;base64,') >= 3
    assert 'http://' not in text and 'https://' not in text


@pytest.mark.slow
def test_a_real_time_episode_leaves_jitter_and_latency(tmp_path):
    out = tmp_path / 'demo'
    done = _demo('--episodes', '1', '--steps', '20', '--seconds', '2', '--out', str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    samples = json.loads((out / 'run.json').read_text())['real_time']
    assert len(samples['arrival_gap_ms']) > 10
    assert samples['latency_ms']
    assert min(samples['latency_ms']) > 0


def test_an_executor_that_dies_is_named_with_the_end_of_its_log(tmp_path):
    done = _demo('--quick', '--policy-config', 'no_such_size', '--out', str(tmp_path))
    assert done.returncode == 2
    assert 'no_such_size' in done.stdout
    assert 'Traceback' not in done.stderr


def test_a_wrong_argument_is_refused_before_anything_starts(tmp_path):
    done = _demo('--episodes', '0', '--out', str(tmp_path))
    assert done.returncode == 2
    assert '--episodes is 0' in done.stdout
    assert not (Path(tmp_path) / 'log').exists()


def test_without_ros_the_demo_says_where_to_get_it(tmp_path):
    (tmp_path / 'rclpy.py').write_text('raise ImportError("no ROS here")\n')
    env = {**ENV, 'PYTHONPATH': f'{tmp_path}{os.pathsep}{SOURCE_ROOT}', 'FLASHRT_ROS_REEXEC': '1'}
    done = subprocess.run(DEMO, capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 2
    assert 'source /opt/ros/jazzy/setup.bash' in done.stdout


def test_the_terminal_writes_one_line_a_stage_where_nobody_watches():
    out = io.StringIO()
    terminal = Terminal(out)
    terminal.stage('Episode 1')
    for step in range(100):
        terminal.progress(step, 100)
    terminal.done('100 steps')
    assert out.getvalue().count('\n') == 1
    assert '\x1b' not in out.getvalue()


def test_the_terminal_redraws_its_line_on_a_tty():
    out = io.StringIO()
    terminal = Terminal(out, live=True)
    terminal.stage('Episode 1')
    terminal.progress(50, 100, 'half')
    terminal.progress(100, 100, 'whole')
    terminal.done()
    assert out.getvalue().count('\n') == 1
    assert '█' in out.getvalue()


def test_a_domain_where_others_talk_is_refused_with_their_names(tmp_path):
    with ProcessGroup(tmp_path / 'log') as group:
        robot = group.start('tabletop', namespace='elsewhere', params={'lock_step': True})
        group.wait_for(lambda: 'lock-step' in robot.log(), 60, 'the other robot')
        domain = str(group.domain_id)
        done = _demo('--quick', '--domain-id', domain, '--out', str(tmp_path / 'demo'))
    assert done.returncode == 2
    assert '/elsewhere/tabletop' in done.stdout
    assert 'leave out --domain-id' in done.stdout


@pytest.mark.parametrize('out', ['/proc/no', __file__])
def test_a_folder_that_cannot_be_made_is_refused_with_its_name(out):
    done = _demo('--out', out, '--episodes', '1')
    assert done.returncode == 2 and 'Traceback' not in done.stderr + done.stdout
    assert f'--out is {out!r}' in done.stderr + done.stdout


def test_messages_that_are_not_built_are_told(monkeypatch):
    monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
    with pytest.raises(RosMissing, match='make build'):
        require_ros()
