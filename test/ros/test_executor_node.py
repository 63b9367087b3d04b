"""The executor end to end in one process: configure, tick, step, reset, hold, verbs."""

from pathlib import Path

from _executor_rig import rig
from _fake_policy import level
from _ros_fixtures import wait_until
import numpy as np
import pytest

pytestmark = pytest.mark.ros


def test_after_a_start_it_waits_for_a_reset_then_ticks_and_commands(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        assert r.executor.state_label == 'active'
        assert r.executor.phase == 'needs_reset'
        reply = r.reset(set_seed=True, seed=7)
        assert (reply.code, reply.epoch, reply.episode) == ('ok', 2, 1)
        assert 'episode 1' in reply.message and reply.duration_us >= reply.restore_us > 0
        r.until_phase('ticking')
        wait_until(lambda: len(r.chunks) >= 3, 'three chunks')
        wait_until(lambda: r.arm.commands and abs(
            r.arm.commands[-1][1][0] - level(7)) < 1e-4, 'the arm at the level of seed 7')
        chunk, tick = r.chunks[-1], r.tick_inputs[-1]
        assert list(chunk.joint_names) == ['q1', 'q2', 'q3', 'gripper']
        assert (chunk.epoch, chunk.episode, chunk.horizon) == (2, 1, 16)
        assert len(chunk.actions) == 16 * 4
        assert tick.seed == 7
        assert {o.stream for o in tick.observations} == {
            'joint_states', 'images/top', 'images/wrist'}
        assert all(o.verdict == 'ok' and o.digest for o in tick.observations)
        assert [k.split('(')[0] for k in tick.graph_keys] == ['look', 'think', 'act']


def test_status_is_latched_and_tells_the_configure_progress(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        wait_until(lambda: any(s.state == 'active' for s in r.statuses), 'the active status')
        newest = r.statuses[-1]
        assert newest.policy == 'fake' and newest.holding and newest.hold_cause == 'needs_reset'


def test_heartbeats_come_while_it_holds_too(tmp_path: Path) -> None:
    with rig(tmp_path, heartbeat_period_s=0.02) as r:
        wait_until(lambda: len(r.heartbeats) >= 3, 'heartbeats before the first reset')
        r.run()
        wait_until(lambda: r.heartbeats[-1].tick > 0, 'a heartbeat of a tick')


def test_hold_latches_until_resume_and_never_waits_for_the_device(tmp_path: Path) -> None:
    import threading
    with rig(tmp_path) as r:
        r.run()
        gate = r.policy.switches.gate = threading.Event()
        wait_until(lambda: r.executor.engine._running is not None, 'a running tick')
        reply = r.call('hold', cause='operator', latch=True)
        assert reply.success and 'operator' in reply.message
        assert r.executor.control.holds.latched
        assert r.executor.phase == 'holding'
        gate.set()
        r.policy.switches.gate = None
        assert r.reset().success
        assert r.executor.phase == 'holding', 'a reset never clears a latched hold'
        assert r.call('resume').success
        r.until_phase('ticking')
        assert r.call('resume').code == 'wrong_state'


def test_snapshot_list_pin_drop_and_restore_go_through_services(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        r.run()
        wait_until(lambda: len(r.chunks) >= 3, 'ticks')
        made = r.call('snapshot', id='here', label='a good moment', pin=True)
        assert made.success and made.info.position >= 3 and made.info.pinned
        listed = r.call('list_capsules')
        assert {c.id for c in listed.capsules} == {'c0', 'here'}
        assert listed.gpu_used_bytes > 0 and listed.gpu_budget_bytes == 1 << 24
        assert r.call('drop', id='here').code == 'capsule'
        assert r.call('pin', id='here', pinned=False).success
        back = r.call('restore', id='here')
        assert back.success and back.bit_exact and back.epoch == 3
        assert r.call('move', id='here', tier='host').info.tier == 'host'
        assert r.call('drop', id='here').success
        assert r.call('restore', id='here').code == 'capsule_not_found'


def test_rollback_goes_back_by_ticks_and_to_a_capsule(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        r.run()
        wait_until(lambda: len(r.chunks) >= 6, 'ticks')
        r.call('hold', cause='test', latch=False)
        wait_until(lambda: r.policy.sessions[0].lane.idle, 'the last tick to end')
        here = r.call('snapshot', id='here').info.position
        reply = r.call('rollback', boundaries=3)
        assert reply.success, reply.message
        assert (reply.tick, reply.epoch) == (here - 3, 3)
        r.until_phase('ticking')
        assert r.call('rollback', to='c0').tick == 0
        assert r.call('rollback', to='c0', boundaries=1).code == 'parameter_invalid'
        assert r.call('rollback').code == 'parameter_invalid'
        assert r.call('rollback', boundaries=99).code == 'mark_dead'


def test_fork_evaluates_branches_and_leaves_the_session_where_it_was(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        r.run()
        wait_until(lambda: len(r.chunks) >= 2, 'ticks')
        reply = r.call('fork', n=4, commit_branch=-1)
        assert reply.success, reply.message
        assert len(reply.chunks) == 4 and len(reply.scores) == 4 and reply.spread > 0
        firsts = [chunk.actions[0] for chunk in reply.chunks]
        assert np.allclose(np.diff(firsts), 1e-3, atol=1e-6)
        assert reply.selected in (1, 2), 'the medoid lies in the middle'
        assert r.executor.control.progress.epoch == 2
        count = len(r.chunks)
        wait_until(lambda: len(r.chunks) >= count + 3, 'ticks after the fork')
        ticks = [c.tick for c in r.chunks]
        assert ticks == list(range(len(ticks))), 'the evaluated tick left no trace'


def test_fork_commits_the_selected_branch_and_plays_its_chunk(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        r.run()
        wait_until(lambda: len(r.chunks) >= 2, 'ticks')
        reply = r.call('fork', n=2, seeds=[5, 9], commit_branch=1)
        assert reply.success and 'branch 1 goes on' in reply.message
        wait_until(lambda: abs(r.arm.commands[-1][1][0] - level(9)) < 1e-4, 'seed 9 to be played')
        reply = r.call('fork', n=2, seeds=[5, 9], commit_branch=-2)
        assert reply.success and f'branch {reply.selected} goes on' in reply.message
        assert r.call('fork', n=3, commit_branch=-1).code == 'parameter_invalid'
        assert r.call('fork', n=2, seeds=[1], commit_branch=-1).code == 'parameter_invalid'
        assert r.call('fork', n=2, commit_branch=7).code == 'parameter_invalid'


def test_a_fork_of_another_capsule_can_be_evaluated_and_committed(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        r.run()
        wait_until(lambda: len(r.chunks) >= 4, 'ticks')
        assert r.call('fork', capsule_id='c0', n=2, commit_branch=-1).success
        assert r.executor.control.progress.epoch == 2
        assert r.call('rollback', boundaries=1).success, 'the marks are still those of the session'
        reply = r.call('fork', capsule_id='c0', n=2, commit_branch=-2)
        assert reply.success and r.executor.control.progress.epoch == 4
        r.until_phase('ticking')


def test_deactivate_publishes_a_hold_and_cleanup_allows_another_configure(tmp_path: Path) -> None:
    from lifecycle_msgs.msg import Transition as T
    with rig(tmp_path) as r:
        r.run()
        wait_until(lambda: len(r.arm.commands) > 5, 'commands')
        assert r.executor.transition(T.TRANSITION_DEACTIVATE)
        count = wait_until(lambda: len(r.arm.commands), 'commands')
        assert r.call('step').code == 'wrong_state'
        assert r.call('snapshot', id='still').success, 'an inactive session can be frozen'
        assert len(r.arm.commands) - count <= 2
        assert r.executor.transition(T.TRANSITION_CLEANUP)
        reply = r.call('reset')
        assert reply.code == 'wrong_state' and 'configure' in reply.message
        epoch = r.executor._kept_progress.epoch
        from unittest import mock

        import _executor_rig
        with mock.patch.object(_executor_rig.executor_node, 'make_policy', lambda n: r.policy):
            assert r.executor.transition(T.TRANSITION_CONFIGURE)
        assert r.executor.transition(T.TRANSITION_ACTIVATE)
        assert r.reset().epoch == epoch + 1, 'epochs never go back'
        r.until_phase('ticking')


def test_chunk_mode_sends_whole_trajectories_that_start_from_the_measured_pose(
        tmp_path: Path) -> None:
    from trajectory_msgs.msg import JointTrajectory

    from flashrt_ros import qos
    with rig(tmp_path, output_mode='chunk', resync_speed_ratio=0.1) as r:
        received: list[JointTrajectory] = []
        r.probe.create_subscription(
            JointTrajectory, 'joint_trajectory', received.append, qos.record())
        r.arm.obey = False
        start = np.array([0.2, 0.1, -0.1, 0.1])
        r.arm.position = start
        wait_until(lambda: r.executor.engine.observations.measured() is not None and np.allclose(
            r.executor.engine.observations.measured(), start), 'the pose')
        r.run()
        wait_until(lambda: received, 'a trajectory')
        first = received[0]
        assert len(first.points) == 16 and list(first.joint_names) == ['q1', 'q2', 'q3', 'gripper']
        path = np.array([start, *(p.positions for p in first.points)])
        assert np.abs(np.diff(path, axis=0)).max() <= 4.0 / 50.0 * 0.1 + 1e-9
        times = [p.time_from_start.sec + p.time_from_start.nanosec / 1e9 for p in first.points]
        assert np.allclose(np.diff(times), 0.02) and times[0] == 0.02
        assert list(first.points[-1].velocities) == [0.0] * 4
        r.call('hold', cause='test', latch=True)
        wait_until(lambda: len(received[-1].points) == 1, 'the hold, a single point')
