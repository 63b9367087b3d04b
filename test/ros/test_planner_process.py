"""Planner and executor as processes: a killed planner, two robots, signals, bringup."""

from collections.abc import Iterator
from pathlib import Path
import signal
import sys
from typing import Any

import pytest
from rclpy.action import ActionClient
from test_executor_process import ended
from test_executor_process import ROBOT
from test_executor_process import Watcher

from flashrt_ros import qos
from flashrt_ros.action import Plan
from flashrt_ros.conductor import to_ns
from flashrt_ros.msg import ActionChunk
from flashrt_ros.msg import Event
from flashrt_ros.msg import PlannerStatus
from flashrt_ros.msg import Subgoal
from flashrt_ros.processes import Process
from flashrt_ros.processes import ProcessGroup
from flashrt_ros.srv import Reset

pytestmark = [pytest.mark.ros, pytest.mark.slow]
SCRIPT = str(Path(__file__).with_name('_planner_process.py'))
TWO = 'put the red block in the blue zone, then go home'
SMALL = ['-p', 'planner:capsule_gpu_bytes:=16777216', '-p', 'planner:capsule_host_bytes:=16777216',
         '-p', 'planner:device:=cpu']


@pytest.fixture
def group(tmp_path: Path) -> Iterator[ProcessGroup]:
    with ProcessGroup(log_dir=tmp_path / 'log', env={'OMP_NUM_THREADS': '1'}) as made:
        yield made


@pytest.fixture
def watcher(group: ProcessGroup) -> Iterator[Watcher]:
    made = Watcher(group)
    yield made
    made.close()


def start(group: ProcessGroup, *arguments: str, name: str = 'planner', namespace: str = '',
          **env: str) -> Process:
    ros = ['--ros-args', *SMALL, *(['-r', f'__ns:=/{namespace}'] if namespace else []),
           *arguments]
    first = ['bringup'] if name.startswith('bringup') else []
    return group.start_command([sys.executable, SCRIPT, *first, *ros], name=name, env=env)


class Client:
    """Sends goals to one planner."""

    def __init__(self, watcher: Watcher, prefix: str = '') -> None:
        self._group = watcher.group
        self.status = watcher.listen(PlannerStatus, f'{prefix}/planner/status', qos.status())
        self._client = ActionClient(watcher.node, Plan, f'{prefix}/planner/plan')
        self._group.wait_for(lambda: self.status and self.status[-1].state == 'active', 60,
                             'the planner to be active')
        self._group.wait_for(self._client.server_is_ready, 30, 'the action')

    def plan(self, **fields: Any) -> Any:
        handle = self._client.send_goal_async(Plan.Goal(instruction=TWO, **fields))
        self._group.wait_for(handle.done, 30, 'the goal to be accepted')
        return handle.result()

    def result(self, handle: Any) -> Plan.Result:
        future = handle.get_result_async()
        self._group.wait_for(future.done, 40, 'the result')
        return future.result().result


def test_a_planner_killed_in_mid_plan_makes_the_executor_hold_after_the_subgoals_deadline(
        group: ProcessGroup, watcher: Watcher) -> None:
    group.start('tabletop')
    group.start('executor', params=ROBOT)
    planner = start(group, STUCK_AFTER='42')
    events = watcher.listen(Event, '/executor/events', qos.record())
    chunks = watcher.listen(ActionChunk, '/executor/chunk', qos.record())
    subgoals = watcher.listen(Subgoal, '/subgoal', qos.command())
    client = Client(watcher)
    watcher.active()
    assert watcher.call(Reset, '/executor/reset').success
    group.wait_for(lambda: watcher.node.count_publishers('/subgoal') > 0, 20, 'the planner')
    client.plan(wait=True, deadline_s=3.0)
    group.wait_for(lambda: any(c.subgoal_sequence == 1 for c in chunks), 30, 'the first subgoal')
    group.wait_for(lambda: client.status[-1].phase == 'decode', 10, 'the middle of its plan')
    planner.kill()
    group.wait_for(lambda: any(e.kind == 'hold' and e.name == 'subgoal_deadline' for e in events),
                   20, 'the hold')
    held = next(to_ns(e.header.stamp) for e in events if e.name == 'subgoal_deadline')
    # Both are ROS time, the deadline is steady: they may differ by what NTP slews.
    assert held - to_ns(subgoals[0].header.stamp) > 2_900_000_000, 'not before its deadline'
    start(group, name='planner_again')
    again = Client(watcher)
    result = again.result(again.plan())
    assert list(result.sequences) == [2, 0], result.message  # on from the executor's mark
    group.wait_for(lambda: any(c.subgoal_sequence == 2 for c in chunks), 30, 'the robot to go on')


def test_an_executor_killed_in_mid_plan_ends_the_plan_and_the_next_one_begins_with_a_new_one(
        group: ProcessGroup, watcher: Watcher) -> None:
    executor = group.start('executor', params=ROBOT)
    start(group)
    client = Client(watcher)
    watcher.active()
    handle = client.plan(wait=True)
    group.wait_for(lambda: client.status[-1].sequence == 1, 20, 'the first subgoal')
    executor.kill()
    group.start('executor', name='executor_again', params=ROBOT)
    result = client.result(handle)
    assert result.code == 'wrong_state' and list(result.sequences) == [1, 0], result.message
    watcher.active()
    after = client.result(client.plan())
    assert list(after.sequences) == [1, 0], after.message


def test_two_robots_in_two_namespaces_as_four_processes_do_not_cross_talk(
        group: ProcessGroup, watcher: Watcher) -> None:
    for name in ('left', 'right'):
        group.start('executor', name=f'executor_{name}', namespace=name, params=ROBOT)
        start(group, name=f'planner_{name}', namespace=name)
    events = {name: watcher.listen(Event, f'/{name}/executor/events', qos.record())
              for name in ('left', 'right')}
    root = watcher.listen(Subgoal, '/subgoal', qos.command())
    clients = {name: Client(watcher, f'/{name}') for name in ('left', 'right')}
    for name in ('left', 'right'):
        watcher.active(f'/{name}')
    left = clients['left'].result(clients['left'].plan())
    assert left.success and list(left.sequences) == [1, 0], left.message
    group.wait_for(lambda: any(e.kind == 'subgoal' for e in events['left']), 20, 'its event')
    assert not any(e.kind == 'subgoal' for e in events['right'])
    assert clients['right'].status[-1].plan == 0 and not root
    right = clients['right'].result(clients['right'].plan())
    assert list(right.sequences) == [1, 0], 'each executor counts by itself'
    assert clients['left'].status[-1].plan == 1 and not root


def test_bringup_ends_with_0_at_a_signal_in_mid_plan_and_both_nodes_answer(
        group: ProcessGroup, watcher: Watcher) -> None:
    group.start('tabletop')
    parameters = [part for key, value in ROBOT.items()
                  for part in ('-p', f'executor:{key}:={value}')]
    process = start(group, *parameters, name='bringup', STEP_S='0.02')
    client = Client(watcher)
    watcher.active()
    assert watcher.call(Reset, '/executor/reset').success
    client.plan(wait=True)
    group.wait_for(lambda: client.status[-1].phase == 'decode', 20, 'the plan')
    assert client.status[-1].link == 'bound'
    assert ended(process, signal.SIGINT) == 0, process.tail()
    assert 'Traceback' not in process.log() and 'not acknowledged' not in process.log()


def test_a_client_gets_the_result_of_its_plan_when_the_planner_is_told_to_end(
        group: ProcessGroup, watcher: Watcher) -> None:
    process = start(group, STEP_S='0.05')
    client = Client(watcher)
    result = client.plan(dry_run=True).get_result_async()
    group.wait_for(lambda: client.status[-1].phase == 'decode', 20, 'the plan')
    assert ended(process, signal.SIGTERM) == 0 and 'Traceback' not in process.log()
    group.wait_for(result.done, 20, 'the result')
    assert result.result().result.code == 'cancelled'
    assert 'the node ends' in result.result().result.message


def test_a_planner_alone_ends_with_0_and_a_wrong_parameter_with_2(
        group: ProcessGroup, watcher: Watcher) -> None:
    process = start(group)
    client = Client(watcher)
    result = client.result(client.plan())
    assert result.code == 'wrong_state' and 'silent' in result.message
    assert ended(process, signal.SIGTERM) == 0 and 'Traceback' not in process.log()
    wrong = start(group, '-p', 'grammr:=tabletop', name='planner_wrong')
    wrong.expected_end = True
    assert wrong.wait(40) == 2 and 'grammar' in wrong.log() and 'Traceback' not in wrong.log()
