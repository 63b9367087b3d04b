"""The executor as a process of its own: signals, transitions, failures, two robots."""

from collections.abc import Callable
from collections.abc import Iterator
import os
from pathlib import Path
import signal
import sys
import time
from typing import Any

from diagnostic_msgs.msg import DiagnosticArray
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState
from lifecycle_msgs.srv import GetState
import numpy as np
import pytest
from rcl_interfaces.srv import GetParameters
from rclpy.executors import ExternalShutdownException
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from trajectory_msgs.msg import JointTrajectory

from flashrt_ros import qos
from flashrt_ros.config_files import config_path
from flashrt_ros.msg import ActionChunk
from flashrt_ros.msg import ExecutorStatus
from flashrt_ros.processes import Process
from flashrt_ros.processes import ProcessGroup
from flashrt_ros.srv import Hold
from flashrt_ros.srv import Reset

pytestmark = [pytest.mark.ros, pytest.mark.slow]
ROBOT = {'embodiment': 'embodiments/tabletop_untrained.yaml', 'output_mode': 'stream',
         'capsule_gpu_bytes': 1 << 26, 'capsule_host_bytes': 1 << 26}


class Watcher:
    """A node of the test on the group's domain, spun by a thread."""

    def __init__(self, group: ProcessGroup) -> None:
        import threading
        self.group = group
        self.context = group.context()
        self.node = Node('watcher', context=self.context)
        self._executor = SingleThreadedExecutor(context=self.context)
        self._executor.add_node(self.node)
        self._clients: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._spin, daemon=True)
        self._thread.start()

    def _spin(self) -> None:
        try:
            self._executor.spin()
        except ExternalShutdownException:
            pass

    def listen(self, message_type: Any, topic: str, profile: Any) -> list[Any]:
        received: list[Any] = []
        self.node.create_subscription(message_type, topic, received.append, profile)
        return received

    def call(self, srv_type: Any, name: str, **fields: Any) -> Any:
        client = self._clients.get(name)
        if client is None:
            client = self._clients[name] = self.node.create_client(srv_type, name)
            self.group.wait_for(client.service_is_ready, 30, f'service {name}')
        future = client.call_async(srv_type.Request(**fields))
        self.group.wait_for(future.done, 30, f'the reply of {name}')
        return future.result()

    def active(self, prefix: str = '') -> None:
        status = self.listen(ExecutorStatus, f'{prefix}/executor/status', qos.status())
        self.group.wait_for(lambda: status and status[-1].state == 'active', 60,
                            'the executor to be active')

    def close(self) -> None:
        self._executor.shutdown(timeout_sec=0)
        self._thread.join(10)
        self.node.destroy_node()
        self.context.try_shutdown()


@pytest.fixture
def group(tmp_path: Path) -> Iterator[ProcessGroup]:
    with ProcessGroup(log_dir=tmp_path / 'log', env={'OMP_NUM_THREADS': '1'}) as made:
        yield made


@pytest.fixture
def watcher(group: ProcessGroup) -> Iterator[Watcher]:
    made = Watcher(group)
    yield made
    made.close()


def ended(process: Process, number: int) -> int | None:
    process.interrupt(number)
    return process.wait(20)


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_0_after_an_acknowledged_hold(
        group: ProcessGroup, watcher: Watcher, number: int) -> None:
    group.start('tabletop')
    process = group.start('executor', params={**ROBOT, 'output_mode': 'chunk'})
    commands = watcher.listen(JointTrajectory, '/joint_trajectory', qos.command())
    watcher.active()
    assert watcher.call(Reset, '/executor/reset').success
    group.wait_for(lambda: len(commands) > 3, 30, 'the robot to move')
    assert ended(process, number) == 0
    group.wait_for(lambda: len(commands[-1].points) == 1, 10, 'the hold, a single point')
    assert any(len(command.points) > 1 for command in commands[:-1]), 'chunks came before it'
    log = process.log()
    assert f'ending: {signal.Signals(number).name}' in log
    assert 'not acknowledged' not in log and 'Traceback' not in log


def test_an_invalid_transition_answers_false_and_the_node_lives_in_a_namespace_with_its_yaml(
        group: ProcessGroup, watcher: Watcher, tmp_path: Path) -> None:
    text = config_path('executor.yaml').read_text()
    assert '/**/executor:' in text
    path = tmp_path / 'executor.yaml'
    path.write_text(text.replace('tick_period_steps: 8', 'tick_period_steps: 11'))
    process = group.start('executor', namespace='arm1', params_files=[path],
                          params={**ROBOT, 'autostart': False})
    reply = watcher.call(GetParameters, '/arm1/executor/get_parameters',
                         names=['tick_period_steps'])
    assert reply.values[0].integer_value == 11

    def change(number: int) -> bool:
        return bool(watcher.call(ChangeState, '/arm1/executor/change_state',
                                 transition=Transition(id=number)).success)

    assert change(Transition.TRANSITION_ACTIVATE) is False
    state = watcher.call(GetState, '/arm1/executor/get_state').current_state.label
    assert state == 'unconfigured' and process.running
    assert change(Transition.TRANSITION_CONFIGURE) is True
    assert change(Transition.TRANSITION_CONFIGURE) is False
    assert process.running
    assert ended(process, signal.SIGTERM) == 0


def test_an_exception_in_configure_shows_its_traceback_and_the_node_lives(
        group: ProcessGroup, watcher: Watcher) -> None:
    script = Path(__file__).with_name('_executor_process.py')
    process = group.start_command(
        [sys.executable, str(script), '--ros-args', '-p', 'policy:=fake'], name='executor',
        env={'BROKEN_CONFIGURE': '1'})
    group.wait_for(lambda: 'the bind broke' in process.log(), 40, 'the error')
    group.wait_for(lambda: 'Traceback' in process.log(), 10, 'its traceback')
    reply = watcher.call(Reset, '/executor/reset')
    assert (reply.success, reply.code) == (False, 'wrong_state')
    assert ended(process, signal.SIGINT) == 0


def test_a_wrong_policy_config_is_told_in_a_sentence_and_the_node_lives(
        group: ProcessGroup, watcher: Watcher) -> None:
    process = group.start('executor', params={**ROBOT, 'policy_config': 'no-such-config'})
    group.wait_for(lambda: 'unconfigured now' in process.log(), 40, 'the refusal')
    assert 'no-such-config' in process.log() and 'config_invalid' in process.log()
    assert 'Traceback' not in process.log()
    assert watcher.call(Reset, '/executor/reset').code == 'wrong_state'


def test_a_bad_parameter_at_start_is_named_and_exits_with_2(group: ProcessGroup) -> None:
    process = group.start('executor', params={**ROBOT, 'output_mode': 'drip'})
    process.expected_end = True
    assert process.wait(40) == 2
    assert "output_mode is 'drip'; give one of chunk, stream" in process.log()
    assert 'Traceback' not in process.log()


def test_a_lost_device_exits_with_the_documented_status(
        group: ProcessGroup, watcher: Watcher, tmp_path: Path) -> None:
    script = Path(__file__).with_name('_executor_process.py')
    embodiment = tmp_path / 'rig.yaml'
    from _executor_rig import EMBODIMENT
    embodiment.write_text(EMBODIMENT)
    process = group.start_command(
        [sys.executable, str(script), '--ros-args', '-p', f'embodiment:={embodiment}',
         '-p', 'policy:=fake', '-p', 'require_reset:=false', '-p', 'output_mode:=stream'],
        name='executor')
    process.expected_end = True
    from _executor_rig import Arm
    arm = Arm(watcher.node)
    assert process.wait(60) == 75, process.tail()
    arm.close()
    assert 'device_lost' in process.log() and 'respawned' in process.log()


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_configure_that_hangs_with_0(
        group: ProcessGroup, watcher: Watcher, number: int) -> None:
    script = Path(__file__).with_name('_executor_process.py')
    process = group.start_command(
        [sys.executable, str(script), '--ros-args', '-p', 'policy:=fake',
         '-p', 'shutdown_timeout_s:=0.5'], name='executor', env={'SLOW_CONFIGURE': '1'})
    status = watcher.listen(ExecutorStatus, '/executor/status', qos.status())
    group.wait_for(lambda: status and status[-1].phase == 'loading', 40, 'configure to begin')
    assert ended(process, number) == 0, process.tail()
    assert 'Traceback' not in process.log()


def test_resets_from_another_process_are_followed_by_chunks_of_their_epoch_only(
        group: ProcessGroup, watcher: Watcher, stress: Callable[[int], int],
        capsys: pytest.CaptureFixture[str]) -> None:
    count = stress(500)
    group.start('tabletop')
    group.start('executor', params={**ROBOT, 'tick_period_steps': 1})
    chunks = watcher.listen(ActionChunk, '/executor/chunk', qos.record())
    reports = watcher.listen(DiagnosticArray, '/diagnostics', 10)
    watcher.active()
    replies: list[tuple[int, int]] = []
    times_ms, restores_us = [], []
    for i in range(count):
        called = time.perf_counter()
        reply = watcher.call(Reset, '/executor/reset', set_seed=True, seed=i)
        replied = watcher.node.get_clock().now().nanoseconds
        assert reply.success, reply.message
        times_ms.append((time.perf_counter() - called) * 1e3)
        restores_us.append(reply.restore_us)
        replies.append((replied, reply.epoch))
        if i % 2 == 0:
            group.wait_for(lambda e=reply.epoch: chunks and chunks[-1].epoch == e, 30, 'a chunk')
    assert [epoch for _, epoch in replies] == list(range(2, count + 2))
    stamped = [(c.header.stamp.sec * 10**9 + c.header.stamp.nanosec, c.epoch) for c in chunks]
    for replied, epoch in replies:
        assert all(e >= epoch for at, e in stamped if at > replied)
    assert len({c.epoch for c in chunks}) >= count // 2, 'inference ran throughout'
    group.wait_for(lambda: any(s.name == 'executor: steps' and s.values for r in reports
                               for s in r.status), 20, 'a report')
    steps = next(s for r in reversed(reports) for s in r.status if s.name == 'executor: steps')
    values = {v.key: v.value for v in steps.values}
    with capsys.disabled():
        print(f'\n{count} resets from another process: p50 {np.percentile(times_ms, 50):.1f} ms '
              f'p99 {np.percentile(times_ms, 99):.1f} ms, restore p50 '
              f'{np.percentile(restores_us, 50):.0f} us; steps {values["steps"]} late '
              f'{values["late"]} missed {values["missed"]}; {values["realtime_reason"]}')


def test_two_namespaces_do_not_cross_talk(group: ProcessGroup, watcher: Watcher) -> None:
    for name in ('left', 'right'):
        group.start('tabletop', name=f'tabletop_{name}', namespace=name)
        group.start('executor', name=f'executor_{name}', namespace=name, params=ROBOT)
    chunks = {name: watcher.listen(ActionChunk, f'/{name}/executor/chunk', qos.record())
              for name in ('left', 'right')}
    root = watcher.listen(JointTrajectory, '/joint_trajectory', qos.command())
    for name in ('left', 'right'):
        watcher.active(f'/{name}')
    assert watcher.call(Reset, '/left/executor/reset').success
    group.wait_for(lambda: len(chunks['left']) > 5, 40, 'the left robot to move')
    assert not chunks['right'] and not root
    assert watcher.call(Reset, '/right/executor/reset').success
    assert watcher.call(Hold, '/left/executor/hold', cause='test', latch=True).success
    held = len(chunks['left'])
    group.wait_for(lambda: len(chunks['right']) > 5, 40, 'the right robot to move')
    assert len(chunks['left']) <= held + 1
    names = {name for name, _ in watcher.node.get_topic_names_and_types()}
    assert {'/left/joint_states', '/right/joint_states'} <= names
    assert '/joint_states' not in names and '/executor/status' not in names


def test_the_capsule_command_runs_without_ros(group: ProcessGroup) -> None:
    import subprocess
    import sys
    found = subprocess.run(
        [sys.executable, '-m', 'flashrt_ros.capsule_cli', '--help'],
        env={**os.environ, **group.env}, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0 and 'diff' in found.stdout
