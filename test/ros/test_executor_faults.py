"""What goes wrong inside: bad actions, failing ticks, a poisoned session, a lost device."""

from pathlib import Path
from unittest import mock

from _executor_rig import rig
from _fake_policy import FakePolicy
from _ros_fixtures import wait_until
import pytest

from flashrt_core.errors import SessionPoisoned
from flashrt_ros.main import EXIT_DEVICE_LOST

pytestmark = pytest.mark.ros


def test_a_non_finite_chunk_holds_and_a_second_in_a_row_latches(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        r.run()
        count = len(r.chunks)
        r.policy.switches.nan = True
        r.until_event('hold', 'action_non_finite')
        wait_until(lambda: r.executor.control.holds.latched, 'the latch after the second')
        assert r.executor.report.counters['chunks_non_finite'] >= 2
        assert all(all(abs(a) < 9 for a in c.actions) for c in r.chunks[count:])
        r.policy.switches.nan = False
        assert r.call('resume').success
        r.until_phase('ticking')


def test_one_non_finite_chunk_passes_after_a_resync(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        r.run()
        session = r.policy.sessions[0]
        chunk = session._chunk

        def ill_once(rows: int) -> object:
            session._chunk = chunk
            found = chunk(rows)
            found.actions[0, 3, 1] = float('inf')
            return found

        session._chunk = ill_once
        r.until_event('hold', 'action_non_finite')
        r.until_phase('ticking')
        assert not r.executor.control.holds.latched


def test_targets_beyond_the_limits_are_clamped_or_refused(tmp_path: Path) -> None:
    with rig(tmp_path, limits='reject') as r:
        r.run()
        r.policy.switches.offset = -0.5  # the gripper's range is 0 to 1
        event = r.until_event('hold', 'action_out_of_limits')
        assert 'gripper' in event.detail and 'lies outside 0.0 to 1.0' in event.detail
    with rig(tmp_path) as r:
        r.run()
        r.policy.switches.offset = -0.1
        wait_until(lambda: r.executor.report.counters['actions_clamped'] > 0, 'the clamp')
        assert all(command[3] >= 0.0 for _, command in r.arm.commands)


def test_a_failing_tick_holds_and_the_next_good_one_goes_on(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        r.run()
        r.policy.switches.error_once = True
        r.policy.switches.error = RuntimeError('a kernel said no')
        event = r.until_event('fault', 'RuntimeError')
        assert 'a kernel said no' in event.detail
        r.until_event('hold', 'fault')
        r.until_phase('ticking')
        assert r.executor.report.counters['faults'] > 0


def test_a_poisoned_session_holds_says_so_and_a_reset_heals_it(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        r.run()

        def half_way(boundary: object, *args: object, **kwargs: object) -> None:
            r.policy.sessions[0].boundary.poisoned = 'copy 2 of 3 failed'
            raise SessionPoisoned('the session is poisoned: copy 2 of 3 failed; restore again')

        with mock.patch.object(r.executor.store, 'restore', half_way):
            reply = r.call('reset')
        assert (reply.success, reply.code) == (False, 'session_poisoned')
        assert 'poisoned' in r.executor.control.holds.causes
        wait_until(lambda: r.statuses[-1].poisoned == 'copy 2 of 3 failed', 'the status')
        assert 'poisoned' in r.executor.report.sections()['state'].message
        assert r.call('resume').code == 'wrong_state'
        assert r.call('snapshot', id='no').code == 'session_poisoned'
        count = len(r.arm.commands)
        assert r.reset().success
        r.until_phase('ticking')
        wait_until(lambda: len(r.arm.commands) > count, 'commands again')


def test_a_restore_that_fails_before_submission_goes_on_in_the_old_epoch(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        r.run()
        reply = r.call('restore', id='nowhere')
        assert reply.code == 'capsule_not_found' and 'epoch 2' in reply.message
        r.until_phase('ticking')
        wait_until(lambda: r.chunks[-1].epoch == 2 and r.chunks[-1].tick > 2, 'ticks go on')


def test_a_lost_device_holds_and_asks_for_the_named_exit_status(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        r.run()
        wait_until(lambda: len(r.arm.commands) > 3, 'commands')
        r.policy.switches.lost = True
        wait_until(r.stop_request.is_set, 'the stop request')
        assert r.stop_request.exit_code == EXIT_DEVICE_LOST
        assert 'device_lost' in r.stop_request.reason
        assert r.executor.control.holds.latched
        event = r.until_event('fault', 'device_lost')
        assert 'switch of a test' in event.detail
        r.policy.switches.lost = False


def test_a_tick_that_never_ends_stops_the_heartbeat_and_counts_as_lost(tmp_path: Path) -> None:
    import threading
    policy = FakePolicy()
    with rig(tmp_path, policy, device_timeout_s=2.0, tick_deadline_s=0.2) as r:
        r.run()
        policy.switches.gate = threading.Event()
        wait_until(r.stop_request.is_set, 'the stop request')
        assert r.stop_request.exit_code == EXIT_DEVICE_LOST
        policy.switches.gate.set()


def test_late_ticks_are_counted_warned_of_and_hold_when_they_repeat(tmp_path: Path) -> None:
    policy = FakePolicy()
    with rig(tmp_path, policy, tick_deadline_s=0.02, tick_misses_to_hold=2) as r:
        r.run()
        policy.switches.segment_s = 0.015
        r.until_event('hold', 'tick_deadline')
        assert r.executor.report.counters['tick_deadline_missed'] >= 2
        policy.switches.segment_s = 0.0


def test_an_exhausted_chunk_holds_still_until_the_next_one(tmp_path: Path) -> None:
    policy = FakePolicy()
    with rig(tmp_path, policy, tick_period_steps=15) as r:
        r.run()
        policy.switches.segment_s = 0.15
        wait_until(lambda: r.executor.report.counters['exhausted'] > 0, 'the end of a chunk')
        policy.switches.segment_s = 0.0
        count = len(r.arm.commands)
        wait_until(lambda: len(r.arm.commands) > count + 5, 'commands again')
