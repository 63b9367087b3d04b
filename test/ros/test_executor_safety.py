"""What must be so before a robot moves on: exhausted chunks, limits set late, silence, seeds."""

from pathlib import Path
import threading

from _executor_rig import commands_of
from _executor_rig import Rig
from _executor_rig import rig
from _fake_policy import FakePolicy
from _ros_fixtures import wait_until
from lifecycle_msgs.msg import Transition
import numpy as np
import pytest
from rclpy.action import ActionClient
from rclpy.event_handler import SubscriptionEventCallbacks
from rclpy.parameter import Parameter

from flashrt_ros import qos
from flashrt_ros.action import RunEpisode
from flashrt_ros.msg import Heartbeat
from flashrt_ros.msg import Subgoal

pytestmark = pytest.mark.ros
FULL_STEP = 4.0 / 50.0


def tick_of(r: Rig, epoch: int) -> object:
    return wait_until(lambda: next((t for t in r.tick_inputs if t.epoch == epoch), None),
                      f'a tick of epoch {epoch}')


def test_after_an_exhausted_chunk_motion_begins_from_where_the_arm_was_moved_to(
        tmp_path: Path) -> None:
    with rig(tmp_path, exhausted_hold_s=0.05) as r:
        r.run()
        gate = r.policy.switches.gate = threading.Event()
        r.until_event('hold', 'exhausted')
        assert 'exhausted_hold_s' in r.until_event('hold', 'exhausted').detail
        r.arm.obey = False
        moved = np.array([0.25, -0.25, 0.2, 0.2])
        r.arm.position = moved
        wait_until(lambda: np.array_equal(r.executor.engine.observations.measured(), moved),
                   'the new pose')
        commands = commands_of(r)
        r.policy.switches.gate = None
        gate.set()
        r.until_phase('ticking')
        first = wait_until(lambda: commands, 'a command')[0][1]
        assert np.abs(first - moved).max() <= FULL_STEP + 1e-9
        assert r.executor.report.counters['results_dropped'] >= 1, 'its tick saw the older pose'


def test_a_chunk_used_up_for_a_moment_only_goes_on_without_a_hold(tmp_path: Path) -> None:
    with rig(tmp_path, exhausted_hold_s=30.0) as r:
        r.run()
        gate = r.policy.switches.gate = threading.Event()
        wait_until(lambda: r.executor.report.counters['exhausted'], 'the end of the chunk')
        r.policy.switches.gate = None
        gate.set()
        count = len(r.arm.commands)
        wait_until(lambda: len(r.arm.commands) > count + 5, 'commands again')
        assert not [e for e in r.events if e.kind == 'hold']


def test_the_command_of_a_tick_leaves_before_anything_that_tells_of_it(tmp_path: Path) -> None:
    with rig(tmp_path, output_mode='chunk') as r:
        order: list[str] = []
        outputs = r.executor.outputs

        def note(name: str) -> None:
            kept = getattr(outputs, name)
            setattr(outputs, name, lambda *given: (order.append(name), kept(*given)))

        for name in ('trajectory', 'tick_input', 'chunk', 'heartbeat'):
            note(name)
        r.run()
        wait_until(lambda: order.count('trajectory') > 4, 'some ticks')
        begin = order.index('trajectory')
        assert order[begin:begin + 8] == ['trajectory', 'tick_input', 'chunk', 'heartbeat'] * 2


def test_an_age_limit_that_is_changed_counts_at_once(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        r.run()
        change = r.executor.set_parameters_atomically
        assert change([Parameter('max_joint_age_s', value=0.001)]).successful
        r.until_event('hold', 'observation')
        assert change([Parameter('max_joint_age_s', value=1.0)]).successful
        r.until_phase('ticking')
        assert change([Parameter('tick_misses_to_hold', value=7)]).successful
        assert r.executor.engine.watch.error_after == 7
        for name in ('tick_deadline_s', 'heartbeat_period_s'):
            reply = change([Parameter(name, value=0.5)])
            assert not reply.successful and 'read-only' in reply.reason


def test_a_subscriber_of_the_heartbeat_is_told_when_a_tick_hangs(tmp_path: Path) -> None:
    with rig(tmp_path, tick_deadline_s=0.3, heartbeat_period_s=0.1) as r:
        told: list[object] = []
        r.probe.create_subscription(
            Heartbeat, f'{r.prefix}/heartbeat', lambda _: None, qos.heartbeat(0.4),
            event_callbacks=SubscriptionEventCallbacks(deadline=told.append))
        r.run()
        count = len(r.heartbeats)
        wait_until(lambda: len(r.heartbeats) > count + 3, 'heartbeats')
        told.clear()
        r.policy.switches.gate = threading.Event()
        wait_until(lambda: told, 'the missed deadline')
        offered = r.probe.get_publishers_info_by_topic(f'{r.prefix}/heartbeat')[0].qos_profile
        assert offered.deadline.nanoseconds == pytest.approx(4e8)


def test_tick_inputs_name_the_seed_in_force_after_every_kind_of_restore(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        epoch = r.reset(set_seed=True, seed=7).epoch
        assert tick_of(r, epoch).seed == 7
        assert r.call('snapshot', id='seven').success
        assert tick_of(r, r.reset().epoch).seed == 0, 'the seed of the fresh session'
        assert tick_of(r, r.call('restore', id='seven').epoch).seed == 7
        wait_until(lambda: len([t for t in r.tick_inputs if t.seed == 7]) > 3, 'more ticks')
        assert r.call('fork', n=2, seeds=[5, 9], commit_branch=1).success
        wait_until(lambda: r.tick_inputs[-1].seed == 9, 'the seed of the branch')


def test_the_seed_of_an_episode_without_reset_is_told_by_an_event(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        r.run()
        client = ActionClient(r.probe, RunEpisode, f'{r.prefix}/run_episode')
        wait_until(client.server_is_ready, 'the action')
        client.send_goal_async(RunEpisode.Goal(set_seed=True, seed=6, max_steps=40))
        assert '"seed": 6' in r.until_event('seed', '6').detail
        wait_until(lambda: r.tick_inputs[-1].seed == 6, 'a tick with it')


def test_a_restore_within_the_episode_drops_the_subgoal_that_no_tick_has_latched(
        tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        r.run()
        r.call('hold', cause='test', latch=False)
        r.call('set_subgoal', subgoal=Subgoal(tokens=[5]))
        epoch = r.call('restore', id='c0').epoch
        wait_until(lambda: sum(c.epoch == epoch for c in r.chunks) >= 2, 'ticks of the new epoch')
        assert {c.subgoal_sequence for c in r.chunks if c.epoch == epoch} == {0}
        assert tick_of(r, epoch).subgoal_sequence == 0
        assert '"subgoal_dropped": 1' in r.until_event('restore', 'c0').detail
        assert r.call('set_subgoal', subgoal=Subgoal(tokens=[6])).sequence == 2
        wait_until(lambda: r.chunks[-1].subgoal_sequence == 2, 'a newer one to count')


def test_a_configure_under_way_is_given_up_when_the_node_ends(tmp_path: Path) -> None:
    policy = FakePolicy()
    policy.switches.bind_gate = threading.Event()
    with rig(tmp_path, policy, arm=False, wait=False) as r:
        wait_until(lambda: policy.switches.binding, 'the policy to bind')
        ended: list[bool] = []
        thread = threading.Thread(target=lambda: ended.append(r.executor.stop(20.0)))
        thread.start()
        wait_until(lambda: r.executor.ending, 'the end to be asked for')
        policy.switches.bind_gate.set()
        thread.join(20)
        assert ended == [True]
        assert not policy.sessions, 'no session was made'
        assert not r.executor.transition(Transition.TRANSITION_ACTIVATE)
