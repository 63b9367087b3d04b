"""The demo over real DDS with separate processes, and what it says when things go wrong."""

import io
import json
import os
from pathlib import Path
import subprocess
import sys

import numpy as np
import pytest

from flashrt_core.tabletop.models import trained
from flashrt_ros.demo.brain import find_brain
from flashrt_ros.demo.record import Comparison
from flashrt_ros.demo.record import Episode
from flashrt_ros.demo.record import Subgoal
from flashrt_ros.demo.terminal import Terminal
from flashrt_ros.demo.timeline import subgoal_svg
from flashrt_ros.demo.view import COLUMNS
from flashrt_ros.demo.view import half_blocks
from flashrt_ros.processes import ProcessGroup
from flashrt_ros.ros_environment import require_ros
from flashrt_ros.ros_environment import RosMissing
from flashrt_ros.ros_environment import SOURCE_ROOT

pytest.importorskip('rclpy')
pytestmark = pytest.mark.ros

ENV = {**os.environ, 'PYTHONPATH': str(SOURCE_ROOT)}
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


def test_a_two_episode_run_ends_well_and_names_its_models(played):
    _, text, run = played
    assert run['failures'] == []
    assert [e['driver'] for e in run['episodes']] == ['policy', 'policy', 'expert']
    shipped = [trained(name) for name in ('policy', 'planner')]
    assert ('Untrained' in text) == (None in shipped)
    assert run['policy'] == f'pi0 {"trained" if shipped[0] else "untrained"}'


def test_every_policy_episode_begins_by_restoring_c0(played):
    resets = [v for v in played[2]['verbs'] if v['verb'] == 'reset']
    assert [v['episode'] for v in resets] == [1, 2]
    assert all(v['restore_us'] > 0 for v in resets)


def test_the_second_episode_is_the_first_one_again_bit_for_bit(played):
    _, text, run = played
    (found,) = run['comparisons']
    assert 'bit for bit' in text
    assert all(count > 0 and first == again for _, count, first, again in found['rows'])
    first, again = (e for e in run['episodes'] if e['driver'] == 'policy')
    assert first['steps'] == again['steps'] > 0
    assert again['epochs'][0] > first['epochs'][0]


def test_every_subgoal_in_force_was_written_before_a_tick_latched_it(played):
    for episode in played[2]['episodes'][:2]:
        assert episode['subgoals']
        latched = [s for s in episode['subgoals'] if s['latched'] is not None]
        assert latched
        assert all(s['written'] <= s['latched'] <= s['ended'] for s in latched)


def test_every_plan_begins_from_the_pinned_context_and_has_ended(played):
    plans = played[2]['plans']
    assert len(plans) >= 2
    assert all(p['capsule_hit'] and p['code'] and p['ttft_us'] > 0 for p in plans)
    capsules = {(c['owner'], c['id']) for c in played[2]['capsules']}
    assert {('executor', 'c0'), ('planner', 'context')} <= capsules


def test_the_expert_solves_its_task_through_the_same_topic(played):
    expert = played[2]['episodes'][-1]
    assert expert['solved']
    assert expert['note'] == ''


def test_the_report_holds_a_strip_for_each_episode_and_nothing_from_elsewhere(played):
    text = (played[0] / 'report.html').read_text()
    assert text.count('data:image/png;base64,') >= 3
    assert 'http://' not in text and 'https://' not in text


def test_the_frames_of_a_strip_have_the_times_of_the_robot(played):
    for episode in played[2]['episodes']:
        times = episode['frame_times_s']
        assert len(times) == 8 and times == sorted(times)
        assert times[0] == 0 and times[-1] == pytest.approx(episode['steps'] * 0.02)


@pytest.mark.slow
def test_a_real_time_episode_of_untrained_models_leaves_jitter_and_latency(tmp_path):
    out = tmp_path / 'demo'
    done = _demo('--episodes', '1', '--steps', '20', '--seconds', '2', '--out', str(out),
                 '--policy-config', 'tiny', '--planner-config', 'planner_bytes/planner.yaml')
    assert done.returncode == 0, done.stdout + done.stderr
    assert 'Untrained, with random weights: policy and planner' in done.stdout
    run = json.loads((out / 'run.json').read_text())
    samples, live = run['real_time'], run['episodes'][-1]
    times = live['frame_times_s']
    assert len(times) > 2 and times == sorted(times)
    assert 0 <= times[0] and 1.5 < times[-1] <= samples['seconds']
    assert all(0 < s['written'] < samples['seconds'] for s in live['subgoals'])
    assert len(samples['arrival_gap_ms']) > 10
    assert samples['latency_ms'] and min(samples['latency_ms']) > 0
    assert samples['interrupts']
    assert all(i['to_command_ms'] > i['to_reply_ms'] > 0 for i in samples['interrupts'])


@pytest.mark.gpu
def test_the_whole_story_runs_on_a_gpu_and_repeats_itself_bit_for_bit(tmp_path):
    done = _demo('--quick', '--device', 'cuda', '--out', str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    run = json.loads((tmp_path / 'run.json').read_text())
    assert run['device'].startswith('cuda')
    (found,) = run['comparisons']
    assert all(first == again for _, _, first, again in found['rows'])
    (proof,) = run['proofs']
    assert proof['first_digest'] == proof['second_digest']


def test_an_executor_that_dies_is_named_with_the_end_of_its_log(tmp_path):
    done = _demo('--quick', '--policy-config', 'no_such_size', '--out', str(tmp_path))
    assert done.returncode == 2
    assert 'the end of its log' in done.stdout and 'no_such_size' in done.stdout
    assert 'Traceback' not in done.stderr


def test_a_wrong_argument_is_refused_before_anything_starts(tmp_path):
    for option, value in (('--episodes', '0'), ('--steps', '-3'), ('--seconds', 'nan')):
        done = _demo(option, value, '--out', str(tmp_path))
        assert done.returncode == 2
        assert f'argument {option}: {value!r} is refused' in done.stderr
    assert not (Path(tmp_path) / 'log').exists()


def test_a_report_that_cannot_be_written_is_told_before_anything_starts(tmp_path):
    (tmp_path / 'run.json').mkdir()
    done = _demo('--out', str(tmp_path))
    assert done.returncode == 2 and 'Traceback' not in done.stderr
    assert 'run.json: it is a folder' in done.stdout
    assert not list((tmp_path / 'log').iterdir())


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


def test_the_terminal_draws_a_panel_below_the_bar_and_clears_it(monkeypatch):
    monkeypatch.setenv('COLUMNS', '120')
    monkeypatch.setenv('LINES', '40')
    out = io.StringIO()
    terminal = Terminal(out, live=True)
    terminal.stage('Episode 1')
    terminal.progress(1, 1, panel=lambda: ['one', '\x1b[32m' + 118 * '-' + '\x1b[0m two more'])
    assert f'\none\n\x1b[32m{118 * "-"}\x1b[0m t\x1b[2A' in out.getvalue()
    terminal.done('well')
    assert out.getvalue().rsplit(' t', 1)[1].startswith('\x1b[2A\r\x1b[J')


def test_a_picture_becomes_half_blocks_of_its_colours():
    image = np.zeros((72, 72, 3), np.uint8)
    image[36:] = (200, 100, 50)
    lines = half_blocks(image)
    assert len(lines) == COLUMNS // 2 and all(line.count('▀') == COLUMNS for line in lines)
    assert '200;100;50' in lines[-1] and '200' not in lines[0]


def test_a_timeline_shows_each_subgoal_from_writing_to_latch_to_end():
    items = [Subgoal(1, 'go <home>', 'planner', 0, latched=2, ended=5, outcome='done',
                     holds=False),
             Subgoal(2, 'pick it up', 'conductor', 5, interrupt=True)]
    episode = Episode('one', 'policy', 1, 'task', steps=10, subgoals=items,
                      marks=[(0, 'ask'), (5, 'slip')])
    svg = subgoal_svg(episode, 10.0, 'steps')
    assert svg.count('<circle') == 1, 'the second one was never latched'
    assert 'go &lt;home&gt;: the policy says done, the world does not agree' in svg
    assert 'pick it up (by the conductor)' in svg and 'slip' in svg
    assert subgoal_svg(Episode('none', 'expert', 1, 'task'), 10.0, 'steps') == ''


def test_a_config_that_names_weights_counts_as_trained_and_its_rows_are_what_is_forked(tmp_path):
    config = tmp_path / 'own.yaml'
    config.write_text('weights: own.safetensors\nrow_keys: [1, 3, 8]\n')
    own = find_brain(str(config), 'planner_bytes/planner.yaml')
    assert (own.policy_trained, own.planner_trained, own.branches) == (True, False, 3)
    assert own.untrained == 'planner' and own.planner()['temperature'] > 0
    assert own.executor()['embodiment'] == 'embodiments/tabletop_trained.yaml'
    assert find_brain('tiny').executor()['embodiment'] == 'embodiments/tabletop_untrained.yaml'
    assert find_brain('tiny').branches == 4


def test_a_repetition_counts_as_equal_only_with_something_to_compare():
    assert not Comparison('a', 'b').equal
    assert not Comparison('a', 'b', [('ticks', 0, 'x', 'x')]).equal
    assert not Comparison('a', 'b', [('ticks', 1, 'x', 'x'), ('more', 1, 'x', 'y')]).equal
    assert Comparison('a', 'b', [('ticks', 1, 'x', 'x')]).equal


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
