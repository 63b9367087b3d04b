"""Executor and planner in one process: order of configure, admission, interrupts, one end."""

from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
import random
import threading
from typing import Any
from unittest import mock

from _executor_rig import Arm
from _executor_rig import EMBODIMENT
from _fake_planner import FakePlanner
from _fake_policy import FakePolicy
from _planner_rig import FIRST
from _planner_rig import planner_rig
from _planner_rig import TWO
from _ros_fixtures import ros_graph
from _ros_fixtures import wait_until
import pytest
from rclpy.parameter import Parameter

from flashrt_core.errors import ConfigError
from flashrt_ros import bringup
from flashrt_ros import executor_node
from flashrt_ros import planner_node
from flashrt_ros.msg import Subgoal

pytestmark = pytest.mark.ros


@contextmanager
def both(folder: Path, model: FakePlanner, policy: FakePolicy) -> Iterator[tuple[Any, Any]]:
    """Both nodes as ``bringup`` makes them; not started."""
    path = folder / 'rig.yaml'
    path.write_text(EMBODIMENT)
    sizes = {'capsule_gpu_bytes': 1 << 24, 'capsule_host_bytes': 1 << 24, 'device': 'cpu'}
    given = {'executor': {'embodiment': str(path), 'policy': 'fake', 'output_mode': 'stream',
                          'image_resize': 'refuse', **sizes},
             'planner': {'planner': 'fake', **sizes}}
    with ros_graph() as graph, mock.patch.object(
            executor_node, 'make_policy', lambda name: policy), mock.patch.object(
            planner_node, 'make_planner', lambda name: model):
        arm = None
        overrides = [[Parameter(k, value=v) for k, v in given[name].items()]
                     for name in ('executor', 'planner')]
        executor, planner = bringup.bring_up(
            context=graph.context, executor_overrides=overrides[0],
            planner_overrides=overrides[1])
        graph.spin(executor)
        graph.spin(planner)
        try:
            arm = Arm(graph.node('arm'))
            yield executor, planner
        finally:
            for node in (planner, executor):
                node.stop(10.0)
            if arm is not None:
                arm.close()
        assert not graph.failures


@pytest.mark.parametrize(('name', 'owner'), [
    ('policy_config', 'executor'), ('planner_config', 'planner')])
def test_a_parameter_of_one_that_is_given_to_both_is_refused_with_how_it_is_written(
        name: str, owner: str) -> None:
    with ros_graph() as graph, pytest.raises(ConfigError) as refused:
        given = [Parameter(name, value='x'), Parameter('device', value='cpu')]
        bringup.bring_up(
            context=graph.context, executor_overrides=given, planner_overrides=given)
    assert f'parameter {name} ' in str(refused.value)
    assert f'; write {owner}:{name} or remove it' in str(refused.value)


def test_both_are_configured_before_either_is_activated_and_neither_beside_an_active_one(
        tmp_path: Path) -> None:
    order: list[tuple[str, str, str]] = []
    with both(tmp_path, FakePlanner(), FakePolicy()) as (executor, planner):
        for node in (executor, planner):
            for verb in ('configure', 'activate'):
                real = getattr(node, verb)
                setattr(node, verb, lambda real=real, n=node, v=verb: (
                    order.append((v, executor.state_label, planner.state_label)), real()))
        assert bringup.start_together(executor, planner)
        assert [verb for verb, *_ in order] == ['configure', 'configure', 'activate', 'activate']
        assert executor.state_label == planner.state_label == 'active'
        assert executor.engine.admission is planner.admission is not None
        planner.transition(4)  # deactivate
        assert executor.engine.admission is None, 'ticks announce themselves to nobody'
        planner.transition(2)  # cleanup
        assert not planner.transition(1) and 'executor is active' in planner.last_transition_error
        executor.transition(4)
        assert planner.transition(1) and planner.transition(3) and executor.transition(3)


def test_neither_is_activated_while_the_other_one_is_being_configured(tmp_path: Path) -> None:
    model = FakePlanner()
    with both(tmp_path, model, FakePolicy()) as (executor, planner):
        assert executor.transition(1)
        entered, go, bind = threading.Event(), threading.Event(), model.bind

        def slow(*arguments: Any) -> Any:
            entered.set()
            assert go.wait(20)
            return bind(*arguments)

        model.bind = slow
        configure = threading.Thread(target=planner.transition, args=(1,))
        configure.start()
        assert entered.wait(20)
        assert not executor.transition(3), 'it would tick beside a capture'
        assert executor.state_label == 'inactive', 'and it stays configured'
        go.set()
        configure.join(20)
        assert planner.state_label == 'inactive'
        assert executor.transition(3) and planner.transition(3)


def test_where_one_cannot_be_configured_none_is_activated(tmp_path: Path) -> None:
    model = FakePlanner(bind_error=RuntimeError('no such weights'))
    with both(tmp_path, model, FakePolicy()) as (executor, planner):
        assert not bringup.start_together(executor, planner)
        assert executor.state_label == 'inactive' and planner.state_label == 'unconfigured'
        model.switches.bind_error = None
        assert bringup.start_together(executor, planner), 'and again when it is corrected'


def test_segments_of_a_plan_run_only_where_no_tick_runs(tmp_path: Path) -> None:
    model, policy = FakePlanner(), FakePolicy()
    overlaps: list[str] = []
    with planner_rig(tmp_path, model, policy=policy,
                     executor_parameters={'tick_period_steps': 2}) as (planner, robot):
        robot.run()
        policy.switches.segment_s = 0.004
        engine = robot.executor.engine
        wait_until(lambda: planner.node.admission._due_ns is not None, 'a tick to be announced')

        def look() -> None:
            # The gate's own lock orders it: what it admits while it thinks that a tick runs.
            if planner.node.admission._running:
                overlaps.append('a tick runs')

        real = planner.node.admission._may_start

        def checked(*arguments: Any) -> bool:
            may = real(*arguments)
            if may:
                look()
            return may

        planner.node.admission._may_start = checked
        model.switches.step_s = 0.002
        ticks = robot.executor.control.ticks_played
        result = planner.goal(TWO).result()
        assert result.success, result.message
        assert robot.executor.control.ticks_played > ticks + 2, 'the robot ticked meanwhile'
        counters = planner.node.report.counters
        assert not overlaps and counters['segments_waited'] > 0
        assert counters['segments_admitted'] >= result.tokens
        assert engine.counters['ticks_dropped'] == 0
        names = planner.node.report.sections()['admission'].values
        assert any(name.startswith('decode') for name in names)


def test_interrupts_at_random_moments_of_planning_are_all_latched_and_leave_no_older_goal(
        tmp_path: Path, stress: Callable[[int], int]) -> None:
    chance = random.Random(11)
    with planner_rig(tmp_path, FakePlanner()) as (planner, robot):
        robot.run()
        planner.model.switches.step_s = 0.001
        applied = robot.policy.switches.applied
        admission = planner.node.admission
        admission.tick_soon = mock.Mock(wraps=admission.tick_soon)
        for _ in range(stress(200)):
            goal = planner.goal(TWO, wait=True)
            threading.Event().wait(chance.random() * 0.12)
            reply = robot.call('set_subgoal', subgoal=Subgoal(
                text='stop', priority=Subgoal.PRIORITY_INTERRUPT))
            if not reply.success:
                assert reply.code == 'busy'  # the plan's own first subgoal is no interrupt
                continue
            assert goal.result().code == 'superseded'
            wait_until(lambda n=reply.sequence: robot.executor.engine.slot.latched == n,
                       'the interrupt to be latched')
            assert robot.executor.engine.slot.requested == reply.sequence, 'nothing came after it'
        assert applied == sorted(set(applied)), 'none was applied twice'
        assert admission.tick_soon.call_count == robot.executor.report.counters['interrupts'] > 0
        text = planner.session.text
        assert text == '' or text.endswith('plan: ') or FIRST in text


def test_the_end_of_the_planner_leaves_the_executor_ticking(tmp_path: Path) -> None:
    with planner_rig(tmp_path, FakePlanner()) as (planner, robot):
        robot.run()
        planner.model.switches.step_s = 0.005
        planner.goal(TWO).until('decode')
        planner.node.stop(10.0)
        ticks = robot.executor.control.ticks_played
        wait_until(lambda: robot.executor.control.ticks_played > ticks + 3, 'more ticks')
