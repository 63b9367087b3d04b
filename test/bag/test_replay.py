"""Tests of flashrt_ros.bag: exact replay of recordings made with a real tiny Pi0, without ROS."""

from contextlib import contextmanager
import json
import subprocess
import sys

from _made_up_run import fresh_session
from _made_up_run import MadeUpRun
from _made_up_run import replay
from _made_up_run import ROBOT_YAML
import numpy as np
import pytest
from rosbags.rosbag2 import StoragePlugin

from flashrt_core.errors import ConfigError
from flashrt_core.policies import Embedding
from flashrt_core.policies import SubgoalWrite
from flashrt_ros.bag.__main__ import main
from flashrt_ros.bag.compare import compare
from flashrt_ros.bag.recording import PARAMETERS_KEY
from flashrt_ros.bag.recording import Recording

pytest.importorskip('flashrt_ros.msg')
pytestmark = pytest.mark.bag


@contextmanager
def recorded(path, config='tiny', **options):
    """A run to be filled in; the recording is complete after the block."""
    with fresh_session(config) as (session, store):
        run = MadeUpRun(path, session, store, **options)
        try:
            yield run
        finally:
            run.close()


@pytest.mark.parametrize('storage', [StoragePlugin.MCAP, StoragePlugin.SQLITE3])
def test_every_tick_of_a_run_is_replayed_bit_for_bit(tmp_path, storage):
    with recorded(tmp_path / 'run', storage=storage) as run:
        run.reset(seed=11, prompt=[5, 6, 7])
        run.ticks(3)
        run.snapshot('middle')
        run.subgoal([9, 10])
        run.ticks(3)
        run.rollback(2)
        run.ticks(2)
        run.prompt([8])
        run.ticks(2)
        run.restore('middle')
        run.ticks(2)
        run.reset(seed=12)
        run.ticks(2)
    report = replay(Recording(tmp_path / 'run'))
    assert report.gaps == [] and report.different == []
    assert report.exact and report.equal == 14 and len(report.chunks) == 14


def test_a_prompt_that_came_while_a_tick_was_in_flight_is_given_to_the_next(tmp_path):
    with recorded(tmp_path / 'run') as run:
        run.reset()
        run.ticks(2)
        run.event('prompt', 'text', tokens=[8, 9])  # the tick in flight did not have it yet
        run.ticks(1)
        run.pending_prompt = [8, 9]
        run.ticks(2)
    assert replay(Recording(tmp_path / 'run')).exact


STEERED = {'base': 'tiny', 'guidance': True, 'reuse_vision': True, 'best_of_keys': [3]}


def test_reused_frames_and_changes_of_guidance_are_replayed_bit_for_bit(tmp_path):
    with recorded(tmp_path / 'run', config=STEERED) as run:
        run.reset(prompt=[5, 6], seed=12, guidance=2.0)
        run.ticks(1)
        run.still = {'top'}
        run.ticks(1)
        run.guidance(2.0, 0.5)
        run.prompt([7])
        run.still = {'top', 'wrist'}
        run.ticks(2)
        run.snapshot('middle')
        run.restore('middle')
        run.ticks(1)
        run.ticks(1, best_of=3)
        assert run.selected  # another one than a tick without choice would give
        # Accepted in this order while a tick was in flight that had the first of them already.
        run.event('parameter', 'guidance', old=0.5, new=3.0)
        run.event('prompt', 'text', tokens=[8, 9])
        run.pending_guidance = 3.0
        run.ticks(1)
        run.pending_prompt = [8, 9]
        run.ticks(1)
    both = ('top', 'wrist')
    assert run.reused == [(), ('top',), both, both, (), both, both, both]
    assert replay(Recording(tmp_path / 'run'), config=STEERED).exact
    report = replay(Recording(tmp_path / 'run'), config=STEERED | {'guidance': False})
    assert 'guidance: true' in report.gaps[0] and not report.equal


EMBEDDED = {'base': 'tiny', 'subgoal_embedding_tokens': 8}


def test_a_subgoal_given_as_an_embedding_is_replayed_bit_for_bit(tmp_path):
    random = np.random.default_rng(3)
    first, second = (
        Embedding(random.standard_normal((n, 128)).astype(np.float32)) for n in (3, 8))
    with recorded(tmp_path / 'run', config=EMBEDDED) as run:
        run.reset(prompt=[5, 6], seed=12)
        run.ticks(1)
        run.subgoal([], first)
        run.ticks(2)
        run.snapshot('embedded')
        run.subgoal([9, 10], second)
        run.ticks(1)
        run.subgoal([9, 10])
        run.ticks(1)
        run.restore('embedded')
        run.ticks(2)
    report = replay(Recording(tmp_path / 'run'), config=EMBEDDED)
    assert report.exact and report.equal == 7
    # The rows are what decided: with the same tokens and without them, the chunk is another one.
    chunks = {tick: actions for _, tick, actions in report.chunks[:5]}
    assert not np.allclose(chunks[3], chunks[4], atol=1e-3)
    report = replay(Recording(tmp_path / 'run'), config='tiny')
    assert 'subgoal_embedding_tokens in its config' in report.gaps[0] and report.equal == 1


def test_an_image_that_was_not_recorded_is_named_and_its_epoch_left_out(tmp_path):
    with recorded(tmp_path / 'run') as run:
        run.reset()
        run.ticks(2)
        run.lose.add('images/overhead')
        run.ticks(2)
        run.reset()
        run.ticks(2)
    report = replay(Recording(tmp_path / 'run'))
    assert not report.exact and report.equal == 4 and report.skipped == 2
    assert len(report.gaps) == 1
    assert 'epoch 1, after 2 ticks' in report.gaps[0]
    assert 'images/top stamped' in report.gaps[0] and 'no such message' in report.gaps[0]


def test_other_bits_under_the_right_stamp_are_refused(tmp_path):
    with recorded(tmp_path / 'run') as run:
        run.reset()
        run.ticks(1)
    recording = Recording(tmp_path / 'run')
    key = next(key for key in recording._stamped if key[0].endswith('wrist'))
    data, kind = recording._stamped[key][0]
    recording._stamped[key] = [(data[:-100] + bytes([data[-100] ^ 1]) + data[-99:], kind)]
    report = replay(recording)
    assert 'none with its digest' in report.gaps[0] and report.equal == 0


def test_of_two_messages_with_one_stamp_the_digest_picks_the_used_one(tmp_path):
    with recorded(tmp_path / 'run') as run:
        run.reset()
        run.ticks(1)
        run.at -= 20_000_000  # a new world at the same simulated time
        run.ticks(1)
    assert replay(Recording(tmp_path / 'run')).equal == 2


def test_a_missing_tick_is_named(tmp_path):
    with recorded(tmp_path / 'run') as run:
        run.reset()
        run.ticks(1)
        run.lose.add('executor/tick_input')
        run.ticks(2)
    report = replay(Recording(tmp_path / 'run'))
    assert 'tick 1 is not recorded, the next one is 2' in report.gaps[0]


def test_a_recording_that_began_too_late_says_so_and_goes_on_at_the_next_reset(tmp_path):
    with recorded(tmp_path / 'run') as run:
        run.ticks(2)
        run.reset()
        run.ticks(2)
    report = replay(Recording(tmp_path / 'run'))
    assert 'record from a reset' in report.gaps[0] and report.equal == 2


def test_a_subgoal_is_written_once(tmp_path, monkeypatch):
    with recorded(tmp_path / 'run') as run:
        run.reset()
        run.subgoal([9])
        run.ticks(3)
    written = []

    def spy(sequence, *more):
        written.append(sequence)
        return SubgoalWrite(sequence, *more)

    monkeypatch.setattr('flashrt_ros.bag.replay.SubgoalWrite', spy)
    assert replay(Recording(tmp_path / 'run')).exact and written == [1]


def test_a_subgoal_without_its_event_is_named(tmp_path):
    with recorded(tmp_path / 'run') as run:
        run.reset()
        run.ticks(1)
        run.lose.add('executor/events')
        run.subgoal([9])
        run.ticks(1)
    report = replay(Recording(tmp_path / 'run'))
    assert 'subgoal 1 was latched, its event is not recorded' in report.gaps[0]


def test_a_committed_fork_is_named_as_not_replayed(tmp_path):
    with recorded(tmp_path / 'run') as run:
        run.reset()
        run.ticks(2)
        run.event('fork', '', committed=1)
        run.ticks(1)
    report = replay(Recording(tmp_path / 'run'))
    assert 'a branch of a fork was committed' in report.gaps[0] and report.equal == 2


def test_another_policy_gives_other_actions_and_each_is_listed(tmp_path):
    with recorded(tmp_path / 'run') as run:
        run.reset(seed=3)
        run.ticks(2)
    report = replay(Recording(tmp_path / 'run'), config={'base': 'tiny', 'weight_seed': 1})
    assert report.equal == 0 and len(report.different) == 2
    assert report.different[0].startswith('epoch 1 tick 0: recorded ')


def test_what_is_no_recording_is_refused(tmp_path):
    with pytest.raises(ConfigError, match='cannot be read'):
        Recording(tmp_path / 'nothing')
    (tmp_path / 'metadata.yaml').write_text('a: [')
    with pytest.raises(ConfigError, match='cannot be read'):
        Recording(tmp_path)


@pytest.mark.parametrize('damage', ['parameters', 'message', 'storage'])
def test_a_damaged_recording_is_refused_in_one_line(tmp_path, capsys, damage):
    with recorded(tmp_path / 'run') as run:
        run.reset()
        if damage == 'message':
            run.connections['/arm1/executor/chunk'] = run.writer.add_connection(
                '/arm1/executor/chunk', 'flashrt_ros/msg/ActionChunk', typestore=run.types)
            run.writer.write(run.connections['/arm1/executor/chunk'], 1, b'\0\1\0\0\xff')
        if damage == 'parameters':
            run.writer.set_custom_data(PARAMETERS_KEY, '7')
    if damage == 'storage':
        about = tmp_path / 'run' / 'metadata.yaml'
        about.write_text(about.read_text().replace('relative_file_paths:', 'other_paths:'))
    for command in (['replay', str(tmp_path / 'run')],
                    ['compare', str(tmp_path / 'run'), str(tmp_path / 'run')]):
        assert main(command) == 2
        told = capsys.readouterr().err
        assert 'cannot be read' in told and len(told.splitlines()) == 1


def test_a_mistake_in_what_replaces_a_parameter_is_refused(tmp_path, capsys):
    for option in (['--image-resize', 'stretch'], ['--device', 'gpu']):
        with pytest.raises(SystemExit):
            main(['replay', str(tmp_path), *option])
        assert 'choose from' in capsys.readouterr().err


def test_two_recordings_of_the_same_run_are_equal_and_a_change_is_found(tmp_path):
    for name, seed in (('first', 3), ('second', 3), ('third', 4)):
        with recorded(tmp_path / name) as run:
            run.reset(seed=3)
            run.ticks(2)
            run.reset(seed=seed)
            run.ticks(2)
    first, second, third = (Recording(tmp_path / n) for n in ('first', 'second', 'third'))
    same = compare(first, second)
    assert same.same and same.compared == same.equal == same.inputs_equal == 4
    other = compare(first, third)
    assert not other.same and other.equal == 2 and other.inputs_equal == 4
    assert other.first_difference == 'epoch 2 tick 0' and other.largest > 0.0


def test_ticks_of_one_recording_only_are_counted(tmp_path):
    for name, ticks, resets in (('short', 1, 1), ('long', 3, 2)):
        with recorded(tmp_path / name) as run:
            for _ in range(resets):
                run.reset()
                run.ticks(ticks)
    found = compare(Recording(tmp_path / 'short'), Recording(tmp_path / 'long'))
    assert found.compared == 1 and found.unmatched == 5 and not found.same


def test_the_command_replays_with_the_recorded_parameters(tmp_path, capsys):
    robot = tmp_path / 'robot.yaml'
    robot.write_text(ROBOT_YAML)
    parameters = {'policy': 'pi0', 'policy_config': 'tiny', 'embodiment': str(robot),
                  'image_resize': 'letterbox', 'device': 'cpu', 'rollback_ticks': 4}
    with recorded(tmp_path / 'run', parameters=parameters) as run:
        run.reset()
        run.ticks(2)
    assert main(['replay', str(tmp_path / 'run')]) == 0
    assert '2 ticks equal bit for bit, 0 different, 0 not replayed' in capsys.readouterr().out
    assert main(['replay', str(tmp_path / 'run'), '--image-resize', 'refuse']) == 1
    assert 'image_resize' in capsys.readouterr().out
    assert main(['compare', str(tmp_path / 'run'), str(tmp_path / 'run')]) == 0
    assert main(['replay', str(tmp_path / 'none')]) == 2


def test_the_command_asks_for_a_parameter_that_was_not_recorded(tmp_path, capsys):
    with recorded(tmp_path / 'run') as run:
        run.reset()
        run.ticks(1)
    assert main(['replay', str(tmp_path / 'run')]) == 2
    assert 'give --embodiment' in capsys.readouterr().err


def test_replaying_imports_no_ros(tmp_path):
    code = (
        'import sys, json\n'
        'class Refuse:\n'
        '    def find_spec(self, name, path=None, target=None):\n'
        '        if name.split(".")[0] in ("rclpy", "sensor_msgs", "rosidl_pycommon"):\n'
        '            raise ImportError(name)\n'
        'sys.meta_path.insert(0, Refuse())\n'
        'import flashrt_ros.bag.replay, flashrt_ros.bag.compare\n'
        'print(json.dumps("rclpy" in sys.modules))\n')
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) is False
