"""Lock-step: the caller drives inference and steps under simulated time: the same bits."""

from pathlib import Path

from _executor_rig import executor_node_time
from _executor_rig import image
from _executor_rig import NAMES
from _executor_rig import Rig
from _executor_rig import rig
from _fake_policy import level
import numpy as np
import pytest
from rclpy.parameter import Parameter
from sensor_msgs.msg import Image
from sensor_msgs.msg import JointState

from flashrt_ros import qos

pytestmark = pytest.mark.ros
PERIOD_NS = 20_000_000


class Conductor:
    """A world whose pose is the last command, one observation per step."""

    def __init__(self, r: Rig) -> None:
        self.r = r
        self.now_ns = 1_000_000_000
        self.pose = np.zeros(4)
        make = r.probe.create_publisher
        self.joints = make(JointState, 'joint_states', qos.command())
        self.images = {v: make(Image, f'images/{v}', qos.command()) for v in ('top', 'wrist')}

    def observe(self) -> None:
        stamp = executor_node_time(self.now_ns)
        message = JointState(name=list(NAMES), position=self.pose.tolist())
        message.header.stamp = stamp
        self.joints.publish(message)
        for publisher in self.images.values():
            publisher.publish(image(stamp))

    def step(self) -> object:
        reply = self.r.call('step', observed_after=executor_node_time(self.now_ns))
        if reply.success:
            self.pose = np.array(reply.positions)
            self.now_ns += PERIOD_NS
            self.observe()
        return reply


def run(r: Rig, steps: int, seed: int) -> list[object]:
    from _ros_fixtures import wait_until
    conductor = Conductor(r)
    wait_until(lambda: conductor.joints.get_subscription_count() == 1 and all(
        p.get_subscription_count() == 1 for p in conductor.images.values()), 'the executor')
    conductor.now_ns += 1_000_000_000 * r.executor.control.progress.episode
    conductor.observe()
    r.reset(set_seed=True, seed=seed)
    return [conductor.step() for _ in range(steps)]


def test_two_runs_of_one_seed_give_the_same_commands_and_ticks(tmp_path: Path) -> None:
    with rig(tmp_path, arm=False, lock_step=True, tick_period_steps=4) as r:
        one, two = run(r, 20, seed=5), run(r, 20, seed=5)
        assert all(reply.success for reply in one + two), one[0].message
        assert [r.positions.tolist() for r in one] == [r.positions.tolist() for r in two]
        assert [reply.ticked for reply in one] == [i % 4 == 0 for i in range(20)]
        assert [reply.tick for reply in one] == [i // 4 for i in range(20)]
        assert one[-1].step == 20 and two[-1].step == 40
        assert {reply.epoch for reply in one} == {2} and {reply.epoch for reply in two} == {3}
        assert list(one[0].joint_names) == list(NAMES)
        assert abs(one[-1].positions[0] - level(5)) < 1e-4
        given = r.policy.switches.inputs
        assert [t.delay_steps for t in given] == [0] * 10


def test_a_step_names_the_observation_that_does_not_come(tmp_path: Path) -> None:
    with rig(tmp_path, arm=False, lock_step=True, observation_timeout_s=0.1) as r:
        r.reset()
        reply = r.call('step', observed_after=executor_node_time(5 * 10**9))
        assert reply.code == 'observation_missing' and 'joint_states' in reply.message


def test_a_fork_waits_for_the_observation_that_it_is_asked_for(tmp_path: Path) -> None:
    from _ros_fixtures import wait_until
    with rig(tmp_path, arm=False, lock_step=True) as r:
        assert all(reply.success for reply in run(r, 2, seed=5))
        later = r.executor.engine.observations.newest().newest_stamp_ns + 10**9
        asked = {'n': 2, 'commit_branch': -1, 'observed_after': executor_node_time(later)}
        patience = 'observation_timeout_s'
        assert r.executor.set_parameters([Parameter(patience, value=0.3)])[0].successful
        reply = r.call('fork', **asked)
        assert reply.code == 'observation_missing' and reply.duration_us >= 0.25e6
        assert r.executor.set_parameters([Parameter(patience, value=20.0)])[0].successful
        conductor = Conductor(r)
        conductor.now_ns = later
        wait_until(lambda: conductor.joints.get_subscription_count() == 1 and all(
            p.get_subscription_count() == 1 for p in conductor.images.values()), 'the executor')
        conductor.observe()
        reply = r.call('fork', **asked)
        assert reply.success, reply.message
        given = r.policy.switches.inputs[-1]
        assert given.state[0] == 0.0, 'the pose that was shown last'


def test_a_step_is_refused_before_a_reset_and_in_real_time(tmp_path: Path) -> None:
    with rig(tmp_path, arm=False, lock_step=True) as r:
        conductor = Conductor(r)
        from _ros_fixtures import wait_until
        wait_until(lambda: conductor.observe() or len(
            r.executor.engine.observations.newest().samples) == 3, 'an observation')
        reply = conductor.step()
        assert reply.code == 'wrong_state' and '~/reset' in reply.message
    with rig(tmp_path) as r:
        reply = r.call('step')
        assert reply.code == 'wrong_state' and 'lock_step' in reply.message


def test_a_bad_action_refuses_the_step_and_a_good_one_goes_on(tmp_path: Path) -> None:
    with rig(tmp_path, arm=False, lock_step=True, tick_period_steps=1) as r:
        assert all(reply.success for reply in run(r, 3, seed=1))
        conductor = Conductor(r)
        conductor.now_ns += 10 * 10**9
        conductor.observe()
        r.policy.switches.nan = True
        reply = conductor.step()
        assert reply.code == 'action_non_finite' and 'q1' in reply.message
        r.policy.switches.nan = False
        assert conductor.step().success


def test_the_command_carries_the_time_of_its_observation(tmp_path: Path) -> None:
    from _ros_fixtures import wait_until
    from trajectory_msgs.msg import JointTrajectory
    with rig(tmp_path, arm=False, lock_step=True) as r:
        commands: list[JointTrajectory] = []
        r.probe.create_subscription(
            JointTrajectory, 'joint_trajectory', commands.append, qos.command())
        run(r, 3, seed=1)
        wait_until(lambda: commands, 'a command')
        assert commands[-1].header.stamp.sec == 1
