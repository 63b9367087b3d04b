"""Hostile surroundings: stalls, standing clocks, twins, raising policies; nothing may jump."""

from collections.abc import Callable
from pathlib import Path
import time
from typing import Any
from unittest import mock

from _executor_rig import rig
from _ros_fixtures import ros_graph
from _ros_fixtures import wait_until
import numpy as np
import pytest

from flashrt_core.capsule import files
from flashrt_ros import executor_control
from flashrt_ros import qos
from flashrt_ros.diagnostics import ERROR
from flashrt_ros.msg import ExecutorStatus
from flashrt_ros.srv import SetTask
from flashrt_ros.tabletop_node import TabletopNode

pytestmark = pytest.mark.ros
STALL_S = executor_control.STALL_S  # as it is where no rig is patient
FULL_STEP = 4.0 / 50.0  # max_velocity over control_rate_hz of the rig


def test_after_a_stall_of_the_step_thread_commands_start_from_the_measured_pose(
        tmp_path: Path) -> None:
    with rig(tmp_path) as r, mock.patch.object(executor_control, 'STALL_S', STALL_S):
        r.run()
        control, arm = r.executor.control, r.arm
        arm.obey = False
        with control.publish_lock:  # as if the process stood still
            arm.position = arm.position + np.array([0.25, 0.0, 0.0, 0.0])
            observed = r.executor.engine.observations.measured
            wait_until(lambda: np.allclose(observed(), arm.position), 'the displaced pose')
            wait_until(_after(0.3), 'a stall of 0.3 s')
            count = len(arm.commands)
        r.until_event('hold', 'stalled')
        wait_until(lambda: len(arm.commands) > count, 'commands after the stall')
        first = arm.commands[count][1]
        assert abs(first[0] - arm.position[0]) <= FULL_STEP
        r.until_phase('ticking')


def _after(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end


def test_a_policy_that_keeps_raising_is_latched_at_the_second_time_and_its_traceback_is_told(
        tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        r.run()
        r.policy.switches.error = ValueError('this policy is ill')
        wait_until(lambda: r.executor.control.holds.latched, 'the latch')
        r.policy.switches.error = None
        faults = [e for e in r.events if e.kind == 'fault']
        assert 1 <= len(faults) <= 2
        assert 'Traceback' in faults[0].detail and 'this policy is ill' in faults[0].detail
        count = len(r.arm.commands)
        assert r.call('resume').success
        r.until_phase('ticking')
        wait_until(lambda: len(r.arm.commands) > count, 'commands after the resume')


def test_one_raise_passes_by_itself(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        r.run()
        session = r.policy.sessions[0]
        submit = session.submit

        def raise_once(*args: Any, **kwargs: Any) -> Any:
            session.submit = submit
            raise ValueError('once')

        session.submit = raise_once
        r.until_event('hold', 'fault')
        r.until_phase('ticking')
        assert not r.executor.control.holds.latched


def test_two_executors_of_one_name_are_an_error_in_diagnostics(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        assert not r.executor.report.faults.clear('twin')
        twin = r.graph.node('executor')
        twin.create_publisher(ExecutorStatus, '/executor/status', qos.status())

        def told() -> str:
            section = r.executor.report.sections()['state']
            return section.message if section.level == ERROR else ''

        assert 'another node is called /executor too' in wait_until(told, 'the error')


def test_c0_can_neither_be_dropped_nor_unpinned(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        for reply in (r.call('drop', id='c0'), r.call('pin', id='c0', pinned=False)):
            assert reply.code == 'parameter_invalid' and 'c0' in reply.message
        r.run()


def test_negative_seeds_of_a_fork_are_refused(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        r.run()
        reply = r.call('fork', n=2, seeds=[-1, 2])
        assert reply.code == 'parameter_invalid' and '[-1, 2]' in reply.message


def test_a_joint_position_beyond_the_policys_numbers_is_refused(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        r.run()
        r.arm.obey = False
        r.arm.position = np.array([1e39, 0.0, 0.0, 0.0])
        wait_until(lambda: r.refusals('observation_non_finite') > 0, 'the refusal')
        assert abs(r.executor.engine.observations.measured()[0]) < 10
        r.until_event('hold', 'observation')


def test_refusals_of_long_texts_stay_short(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        r.arm.names = ['x' * 100_000, 'q2', 'q3', 'gripper']
        wait_until(lambda: r.refusals('bad_joints') > 0, 'the refusal')
        values = r.executor.report.sections()['observations'].values
        assert 'bad_joints' in values['stream joint_states']
        assert max(len(value) for value in values.values()) < 1000


def test_a_snapshot_whose_file_cannot_be_written_is_refused_and_says_where_the_capsule_is(
        tmp_path: Path) -> None:
    folder = tmp_path / 'capsules'
    folder.mkdir()
    with rig(tmp_path, allow_disk_capsules=True, capsule_directory=str(folder),
             capsule_disk_bytes=1 << 26) as r:
        assert r.call('snapshot', id='good', tier='disk').success
        assert list(folder.glob('*good*')), 'the file is there when the reply is'
        with mock.patch.object(files, 'save', side_effect=OSError(28, 'No space left')):
            reply = r.call('snapshot', id='bad', tier='disk')
        assert (reply.success, reply.code) == (False, 'tier_unavailable')
        assert "'bad'" in reply.message and 'No space left' in reply.message
        assert 'host memory' in reply.message and '~/drop' in reply.message
        assert r.call('restore', id='bad').success and r.refusals('tier_unavailable') == 1


def test_refusals_of_the_robot_stay_short() -> None:
    with ros_graph() as graph:
        robot = graph.spin(TabletopNode(context=graph.context))
        call = graph.client(graph.node('probe'), SetTask, '/tabletop/set_task')
        reply = call(task='x' * 100_000)
        assert reply.code == 'parameter_invalid' and len(reply.message) < 700
        assert reply.message.endswith('then go home"')
        robot.stop(5.0)
