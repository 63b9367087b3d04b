"""Reset under load: nothing of an old epoch after a reply, each next chunk is of the new."""

from collections.abc import Callable
from pathlib import Path
import threading
import time

from _executor_rig import commands_of
from _executor_rig import Rig
from _executor_rig import rig
from _fake_policy import FakePolicy
from _fake_policy import level
from _fake_policy import LEVEL_STEP
from _ros_fixtures import wait_until
import numpy as np
import psutil
import pytest

pytestmark = pytest.mark.ros


class Recorder:
    """Notes each command and chunk at the moment the executor hands it to its publisher."""

    def __init__(self, r: Rig) -> None:
        self.commands: list[tuple[int, float]] = []
        self.chunks: list[tuple[int, int]] = []
        outputs = r.executor.outputs
        command, chunk = outputs.command, outputs.chunk

        def noted_command(position: np.ndarray) -> None:
            command(position)
            self.commands.append((time.monotonic_ns(), float(position[0])))

        def noted_chunk(*args: object) -> None:
            chunk(*args)
            self.chunks.append((time.monotonic_ns(), outputs.progress.epoch))

        outputs.command, outputs.chunk = noted_command, noted_chunk


@pytest.mark.slow
def test_resets_under_load_leave_no_action_of_an_old_epoch(
        tmp_path: Path, stress: Callable[[int], int], capsys: pytest.CaptureFixture[str]) -> None:
    count = stress(1000)
    policy = FakePolicy()
    with rig(tmp_path, policy, tick_period_steps=1, resync_speed_ratio=1.0) as r:
        recorder = Recorder(r)
        r.run()
        policy.switches.segment_s = 0.003
        replies: list[tuple[int, int]] = []
        calls: list[int] = []
        times_us, restore_us, rss = [], [], []
        process = psutil.Process()
        begun = time.perf_counter()
        for i in range(count):
            called = time.perf_counter()
            calls.append(time.monotonic_ns())
            reply = r.call('reset', set_seed=True, seed=i)
            replies.append((time.monotonic_ns(), reply.epoch))
            assert reply.success, reply.message
            times_us.append((time.perf_counter() - called) * 1e6)
            restore_us.append(reply.restore_us)
            if i % 3 == 0:
                seen = len(recorder.commands)
                wait_until(lambda seen=seen: len(recorder.commands) > seen + 1, 'a command')
            if i % max(1, count // 10) == 0:
                rss.append(process.memory_info().rss)
        elapsed = time.perf_counter() - begun
        wait_until(lambda: recorder.chunks and recorder.chunks[-1][1] == count + 2, 'a last chunk')

        epochs = [epoch for _, epoch in replies]
        assert epochs == list(range(3, count + 3)), 'every reset makes exactly one epoch'
        _no_command_of_an_older_epoch(recorder, replies, calls)
        for replied, epoch in replies:
            following = [e for at, e in recorder.chunks if at > replied][:1]
            assert all(e >= epoch for e in following), 'the next chunk carries the new epoch'
        ticks = r.executor.report.counters.snapshot()
        with capsys.disabled():
            q = np.percentile
            print(f'\n{count} resets in {elapsed:.2f} s; call p50 {q(times_us, 50):.0f} us '
                  f'p99 {q(times_us, 99):.0f} us; restore p50 {q(restore_us, 50):.0f} us; '
                  f'ticks {ticks["ticks"]}, dropped {ticks["ticks_dropped"]}; '
                  f'rss {rss[0] >> 20} -> {rss[-1] >> 20} MiB')
        assert ticks['ticks'] + ticks['ticks_dropped'] > 0
        if count >= 1000:
            assert max(rss[2:]) - rss[2] < 16 << 20, 'memory is flat'


def _no_command_of_an_older_epoch(
        recorder: Recorder, replies: list[tuple[int, int]], calls: list[int]) -> None:
    """Between reply i, of seed i, and the next call every command is at the level of seed i."""
    seen = 0
    for i, ((replied, _), end) in enumerate(
            zip(replies, [*calls[1:], time.monotonic_ns()], strict=True)):
        for at, value in recorder.commands:
            if replied < at < end:
                seen += 1
                assert abs(value - level(i)) < LEVEL_STEP / 2, (i, value, level(i))
    assert seen >= len(replies) // 3


def test_a_result_in_flight_at_a_reset_is_never_played(tmp_path: Path) -> None:
    policy = FakePolicy()
    with rig(tmp_path, policy) as r:
        r.reset(set_seed=True, seed=1)
        r.until_phase('ticking')
        recorder = Recorder(r)
        gate = policy.switches.gate = threading.Event()
        wait_until(lambda: r.executor.engine._running is not None, 'a tick in flight')
        done: list[object] = []
        caller = threading.Thread(
            target=lambda: done.append(r.call('reset', set_seed=True, seed=9)))
        caller.start()
        wait_until(lambda: r.executor.control.changing, 'the reset to wait for the segment')
        busy = r.call('snapshot', id='too-many')
        assert busy.code == 'busy' and not busy.success
        gate.set()
        policy.switches.gate = None
        caller.join(20)
        replied = time.monotonic_ns()
        assert done[0].success
        assert r.executor.report.counters['ticks_dropped'] >= 1
        wait_until(lambda: [v for at, v in recorder.commands if at > replied], 'a new command')
        first = next(v for at, v in recorder.commands if at > replied)
        assert abs(first - level(9)) < LEVEL_STEP / 2
        assert all(e == 3 for at, e in recorder.chunks if at > replied)


def test_a_tick_in_its_last_segment_ends_but_is_not_played_after_a_reset(tmp_path: Path) -> None:
    policy = FakePolicy()
    with rig(tmp_path, policy) as r:
        r.reset(set_seed=True, seed=1)
        r.until_phase('ticking')
        recorder = Recorder(r)
        policy.switches.gated = 'act'
        gate = policy.switches.gate = threading.Event()
        wait_until(lambda: policy.switches.waiting, 'the last segment')
        done: list[object] = []
        caller = threading.Thread(
            target=lambda: done.append(r.call('reset', set_seed=True, seed=9)))
        caller.start()
        wait_until(lambda: r.executor.control.changing, 'the reset to wait for the segment')
        policy.switches.gate = None
        gate.set()
        caller.join(20)
        replied = time.monotonic_ns()
        r.until_phase('ticking')
        wait_until(lambda: [v for at, v in recorder.commands if at > replied], 'a new command')
        assert r.executor.report.counters['results_dropped'] == 1
        assert {e for at, e in recorder.chunks if at > replied} == {3}
        assert all(abs(v - level(9)) < LEVEL_STEP / 2
                   for at, v in recorder.commands if at > replied)


def test_the_first_tick_of_an_epoch_sees_only_what_arrived_after_the_reset(tmp_path: Path) -> None:
    with rig(tmp_path, max_joint_age_s=60.0, max_image_age_s=60.0, max_skew_s=60.0) as r:
        r.run()
        r.arm.frozen = {'joint_states', 'images/top', 'images/wrist'}
        r.arm.obey = False
        r.call('hold', cause='test', latch=False)
        wait_until(lambda: r.policy.sessions[0].lane.idle, 'the last tick to end')
        given = len(r.policy.switches.inputs)
        replied = r.reset()
        r.until_phase('resync')
        r.arm.position = np.array([0.11, 0.12, 0.13, 0.14])
        r.arm.frozen = set()
        wait_until(lambda: len(r.policy.switches.inputs) > given, 'the first tick')
        assert np.allclose(r.policy.switches.inputs[given].state, r.arm.position)
        assert replied.epoch == 3


def test_after_a_rollback_with_a_displaced_arm_the_first_command_starts_from_the_measured_pose(
        tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        r.run()
        wait_until(lambda: len(r.chunks) >= 4, 'ticks')
        r.arm.obey = False
        displaced = np.array([0.2, -0.2, 0.1, 0.2])
        r.arm.position = displaced
        commands = commands_of(r)
        assert r.call('rollback', boundaries=2).success
        r.until_event('resync', 'run')
        # Those of before it lie 0.2 away.
        first = wait_until(lambda: [c for _, c in commands if np.abs(c - displaced).max() < 0.15],
                           'a command after the rollback')[0]
        full_step = 4.0 / 50.0 * 0.5
        assert np.abs(first - displaced).max() <= full_step + 1e-9


def test_a_pose_too_far_from_the_first_action_is_refused_until_resume(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        r.arm.obey = False
        r.arm.position = np.array([1.5, 0.0, 0.0, 0.0])
        wait_until(lambda: r.executor.engine.observations.measured() is not None
                   and r.executor.engine.observations.measured()[0] == 1.5, 'the new pose')
        r.reset()
        r.until_event('hold', 'pose_gap')
        event = r.until_event('refused', 'action_jump')
        assert 'q1' in event.detail and 'pose_gap is 0.3' in event.detail
        assert r.executor.control.holds.latched
        assert not r.arm.commands
        r.arm.position = np.zeros(4)
        wait_until(lambda: r.executor.engine.observations.measured()[0] == 0.0, 'the arm back')
        assert r.call('resume').success
        r.until_phase('ticking')


def test_a_reset_with_a_seed_is_repeatable_and_events_tell_it(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        def first_chunk(seed: int) -> tuple[float, ...]:
            epoch = r.reset(set_seed=True, seed=seed).epoch
            chunk = wait_until(lambda: next((c for c in r.chunks if c.epoch == epoch), None),
                               'its first chunk')
            assert chunk.tick == 0
            return tuple(chunk.actions)
        one, other, again = first_chunk(3), first_chunk(4), first_chunk(3)
        assert one == again != other
        event = r.until_event('reset', 'c0')
        assert '"seed": 3' in event.detail and 'restore_us' in event.detail
        assert r.call('reset', set_seed=True, seed=-1).code == 'parameter_invalid'


def test_reset_to_another_capsule_begins_an_episode_from_there(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        r.run()
        wait_until(lambda: len(r.chunks) >= 3, 'ticks')
        position = r.call('snapshot', id='mid').info.position
        reply = r.reset(capsule_id='mid')
        assert reply.episode == 2
        chunk = wait_until(lambda: next((c for c in r.chunks if c.epoch == reply.epoch), None),
                           'a chunk')
        assert chunk.tick == position
        missing = r.call('reset', capsule_id='nowhere')
        assert missing.code == 'capsule_not_found' and 'c0' in missing.message
        r.until_phase('ticking')
        assert r.executor.control.progress.epoch == reply.epoch, 'a refused reset changes nothing'
