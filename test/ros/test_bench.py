"""The benches over ROS: their arithmetic, and one short run of each with separate processes."""

import argparse
import json
import os
import subprocess
import sys
from unittest import mock

import pytest
import torch

from flashrt_core.errors import ConfigError
from flashrt_ros.ros_environment import SOURCE_ROOT

pytest.importorskip('rclpy')
from flashrt_ros.bench.interrupts import Moments
from flashrt_ros.bench.pair import short
from flashrt_ros.bench.reset import order_violations
from flashrt_ros.bench.rig import write_robot
from flashrt_ros.bench.tick import inference_rate_hz
from flashrt_ros.bench.tick import plan_rows
from flashrt_ros.bench.tick import stage_table
from flashrt_ros.chunk_timing import ChunkTiming
from flashrt_ros.embodiment import load_embodiment
from flashrt_ros.statistics import Counters
from flashrt_ros.subgoals import SubgoalSlot

BRINGUP = ['--seconds', '3', '--solo-seconds', '1', '--interrupts', '2',
           '--tick-period-steps', '8']
ENV = {**os.environ, 'PYTHONPATH': str(SOURCE_ROOT)}


def _tick(**changes: int) -> dict[str, int]:
    tick = {
        'stamp': 1_000_000_000,
        'entry_ros': 1_000_400_000,
        'entry': 50_000_000,
        'decoded': 50_100_000,
        'begun': 57_100_000,
        'submitted': 57_300_000,
        'inferred': 77_300_000,
        'published': 77_800_000,
        'resync': 0,
    }
    return {**tick, **changes}


def test_the_stages_of_a_tick_add_up_to_the_way_from_stamp_to_command():
    table = stage_table([_tick()])
    assert table['stamp to command'][0] == pytest.approx(0.4 + 27.8)
    assert table['not inference, from the stamp'][0] == pytest.approx(0.4 + 0.1 + 0.2 + 0.5)
    assert table['not inference, from the callback'][0] == pytest.approx(0.1 + 0.2 + 0.5)


def test_an_image_that_arrives_while_the_tick_begins_has_waited_nothing():
    table = stage_table([_tick(begun=50_050_000)])
    assert table['wait for the tick to be due'][0] == 0.0


def test_the_inference_rate_counts_intervals_between_ends():
    ticks = [_tick(inferred=1_000_000_000 + 20_000_000 * i) for i in range(51)]
    assert inference_rate_hz(ticks) == pytest.approx(50.0)
    assert inference_rate_hz(ticks[:1]) == inference_rate_hz([]) == 0.0


def test_the_rows_of_the_plan_are_what_was_counted():
    timing = ChunkTiming()
    timing.planned_age = 3
    for position, age in enumerate([0, 1, 2, 3, 1, 2]):
        timing.played(position, age)
    timing.played(5, 3)  # played a second time
    rows = plan_rows(timing.figures(), {'missed': 2, 'steps': 9},
                     {'ticks': 4, 'tick_deadline_missed': 1}, 50.0)
    ages, *counts = rows
    assert (ages['n'], ages['max_steps'], ages['inferences_per_s']) == (7, 3, 50.0)
    found = {row['what']: (row['count'], row['of']) for row in counts}
    assert found == {
        'tick deadlines missed': (1, 4), 'step deadlines missed': (2, 9),
        'steps repeated': (1, 7), 'steps skipped': (0, 7), 'periods without an action': (0, 9),
        'steps from a chunk older than planned': (2, 7), 'chunks later than expected': (0, 4)}


def test_the_cameras_of_the_built_in_robot_are_the_first_views_of_the_policy(tmp_path):
    arguments = argparse.Namespace(policy='pi0', policy_config='pi0')
    write_robot(arguments, tmp_path / 'robot.yaml', ['top', 'wrist'])
    mapped = load_embodiment(tmp_path / 'robot.yaml').views
    assert mapped == {'base': 'top', 'left_wrist': 'wrist'}


def test_a_clean_order_has_no_violation():
    orders = [(1, 'change', 1), (2, 'chunk', 1), (3, 'command', 1), (4, 'change', 2),
              (5, 'chunk', 2), (6, 'command', 2)]  # fmt: skip
    assert set(order_violations(orders).values()) == {0}


def test_an_old_chunk_and_a_command_before_the_new_chunk_are_counted():
    orders = [(1, 'change', 1), (2, 'chunk', 1), (4, 'change', 2), (5, 'command', 2),
              (6, 'chunk', 1), (7, 'chunk', 2), (8, 'command', 2)]  # fmt: skip
    found = order_violations(orders)
    assert found == {'old chunks': 1, 'commands before the new chunk': 1}


def test_a_change_that_was_refused_keeps_the_epoch_and_the_commands():
    orders = [(1, 'change', 1), (2, 'chunk', 1), (3, 'change', 1), (4, 'command', 1)]
    assert set(order_violations(orders).values()) == {0}
    assert set(order_violations(orders[2:]).values()) == {0}, 'in the first epoch, which is 1'


@pytest.mark.parametrize(('config', 'views'), [
    ('tiny', ['top', 'wrist']), ('pi0', ['base', 'left_wrist', 'right_wrist'])])
def test_the_robot_of_the_bench_has_the_cameras_that_the_policy_wants(tmp_path, config, views):
    arguments = argparse.Namespace(policy='pi0', policy_config=config)
    assert write_robot(arguments, tmp_path / 'robot.yaml') == (views, 0.02)
    robot = load_embodiment(tmp_path / 'robot.yaml')
    assert list(robot.views) == views
    robot.check_views(tuple(views))


def test_a_planner_is_named_by_its_size_or_its_file_and_bound_for_short_plans():
    for name in ('9b', 'qwen3_5_9b'):
        c, s = short(torch.device('cpu'), name)
        assert (c.width, c.layers, c.context) == (4096, 32, 2048)
        assert s.prefill_keys == (16, 64, 256)
    with pytest.raises(ConfigError, match='7b'):
        short(torch.device('cpu'), 'qwen3_5_7b')


def test_an_interrupt_counts_from_its_own_chunk_and_the_command_after_that():
    slot = SubgoalSlot(max_tokens=4, vocabulary=9, counters=Counters())
    subject = Moments(mock.Mock(slot=slot))
    for number in (1, 2):
        slot.admit(sequence=number, epoch=0, episode=0, text='', tokens=[1], current_epoch=1,
                   current_episode=1, now_ns=0)
    subject.begin(2)
    slot.commit(1)
    subject.swapped()
    assert not subject.in_play_ns, 'it is not accepted yet'
    subject.event('subgoal', '2', {})
    subject.swapped()
    subject.commanded()
    assert not subject.in_play_ns and not subject.command_ns, 'of the goal before'
    slot.commit(2)
    subject.swapped()
    subject.event('interrupt', '2', {'to_tick_us': 1.0})
    assert not subject.done.is_set(), 'no command has left'
    subject.commanded()
    first = subject.command_ns
    subject.commanded()
    assert subject.done.is_set() and subject.command_ns == first >= subject.in_play_ns


@pytest.mark.ros
@pytest.mark.slow
@pytest.mark.parametrize(
    ('name', 'options'),
    [('tick', ['--seconds', '4']), ('reset', ['--count', '5']),
     ('tick', ['--seconds', '4', '--robot', 'tabletop', '--tick-period-steps', '8']),
     ('bringup', BRINGUP),
     pytest.param('bringup', [*BRINGUP, '--device', 'cuda'], marks=pytest.mark.gpu)],
)
def test_a_short_run_ends_with_a_table_and_a_json_file(tmp_path, name, options):
    command = [sys.executable, '-m', 'flashrt_core.bench', name, '--out', str(tmp_path)]
    done = subprocess.run(
        [*command, '--device', 'cpu', *options],
        capture_output=True,
        text=True,
        env=ENV,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob(f'{name}-*.json')
    content = json.loads(path.read_text())
    assert content['rows']
    assert content['machine']['cores'] >= 1
    if name == 'bringup':
        tables = {table: [r for r in content['rows'] if r['table'] == table]
                  for table in ('phases', 'executor, ms', 'interrupts, ms')}
        alone, held, together = tables['phases']
        assert together['ticks'] > 0 and together['tokens_per_s'] > 0
        assert (alone['tokens_per_s'], held['ticks']) == (0, 0)
        assert 'inference' in {r['stage'] for r in tables['executor, ms']}
        *parts, whole = tables['interrupts, ms']
        assert len(parts) == 4 and all(r['p50'] <= whole['max'] for r in parts)
        taken = content['details']['interrupts_ms']
        assert [sum(one[:-1]) for one in taken] == pytest.approx([one[-1] for one in taken])
    if name == 'tick':
        (ages,) = (r for r in content['rows'] if r.get('table') == 'chunks in play')
        kept = {r['what']: r for r in content['rows'] if r.get('table') == 'plan kept'}
        assert ages['n'] > 50 and ages['inferences_per_s'] > 0
        assert kept['steps repeated']['count'] == 0 and kept['steps repeated']['of'] == ages['n']
        assert kept['tick deadlines missed']['of'] >= len(content['details']['ticks'])
    if name == 'reset':
        assert content['details']['violations'] == {
            'old chunks': 0,
            'commands before the new chunk': 0,
        }
        assert content['details']['refused'] == []
        assert len(content['details']['calls']) == 5
