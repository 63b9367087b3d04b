"""The benches over ROS: their arithmetic, and one short run of each with separate processes."""

import json
import os
import subprocess
import sys

import pytest

from flashrt_ros.ros_environment import SOURCE_ROOT

pytest.importorskip('rclpy')
from flashrt_ros.bench.reset import order_violations
from flashrt_ros.bench.tick import stage_table

ENV = {**os.environ, 'PYTHONPATH': str(SOURCE_ROOT), 'OMP_NUM_THREADS': '2'}


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


@pytest.mark.ros
@pytest.mark.slow
@pytest.mark.parametrize(
    ('name', 'options'),
    [('tick', ['--seconds', '4']), ('reset', ['--count', '5']),
     ('bringup', ['--seconds', '1', '--interrupts', '2'])],
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
        together = next(r for r in content['rows'] if r['phase'] == 'together')
        assert together['ticks'] > 0 and together['tokens_per_s'] > 0
    if name == 'reset':
        assert content['details']['violations'] == {
            'old chunks': 0,
            'commands before the new chunk': 0,
        }
        assert content['details']['refused'] == []
        assert len(content['details']['calls']) == 5
