"""Hard interrupts of the executor: none lost, none applied twice, floods do no harm."""

from collections.abc import Callable
from pathlib import Path
import random
import threading
import time

from _executor_rig import Rig
from _executor_rig import rig
from _ros_fixtures import wait_until
import numpy as np
import pytest

from flashrt_ros.executor_interrupt import Interrupts
from flashrt_ros.msg import Subgoal
from flashrt_ros.statistics import Counters

pytestmark = pytest.mark.ros
GOAL_STEP = 0.01  # a command's first joint says which subgoal it stems from


def goal_of(command: np.ndarray) -> int:
    return round(command[0] / GOAL_STEP)


def stamp_ns(message) -> int:
    return message.header.stamp.sec * 10**9 + message.header.stamp.nanosec


def interrupt(r: Rig, sequence: int = 0, **fields):
    return r.call('set_subgoal', subgoal=Subgoal(
        sequence=sequence, tokens=[5], priority=Subgoal.PRIORITY_INTERRUPT, **fields))


def moving(r: Rig, segment_s: float = 0.003) -> Rig:
    r.policy.switches.goal_step = GOAL_STEP
    r.run()
    r.policy.switches.segment_s = segment_s
    return r


def test_interrupts_at_random_moments_are_neither_lost_nor_applied_twice_and_leave_nothing_old(
        tmp_path: Path, stress: Callable[[int], int], capsys: pytest.CaptureFixture[str]) -> None:
    count, chance = stress(200), random.Random(7)
    with rig(tmp_path) as r:
        moving(r)
        replied, called, first_ns, meanwhile = [], [], [], []
        for _ in range(count):
            threading.Event().wait(chance.random() * 0.06)
            before = len(r.arm.commands)
            called.append(time.monotonic_ns())
            reply = interrupt(r)
            assert reply.success, reply.message
            replied.append((r.probe.get_clock().now().nanoseconds, reply.sequence))
            found = wait_until(lambda n=reply.sequence, b=before: [
                (i, at) for i, (at, command) in enumerate(r.arm.commands[b:])
                if goal_of(command) == n], f'a command for subgoal {reply.sequence}')
            first_ns.append(found[0][1])
            meanwhile.append(sum(at >= called[-1] for at, _ in r.arm.commands[before:]
                                 ) - len(r.arm.commands[before:][found[0][0]:]))
        assert [sequence for _, sequence in replied] == list(range(1, count + 1)), 'none lost'
        applied = r.policy.switches.applied
        assert applied == sorted(set(applied)) == list(range(1, count + 1)), 'none applied twice'
        goals = [goal_of(command) for _, command in r.arm.commands]
        assert goals == sorted(goals), 'no action of an old goal after one of a new goal'
        for at, sequence in replied:
            late = [c.subgoal_sequence for c in r.chunks if stamp_ns(c) > at]
            assert all(s >= sequence for s in late), 'no chunk of an old goal after the reply'
        counters = r.executor.report.counters
        assert counters['interrupts'] == count and counters['interrupts_coalesced'] == 0
        wait_until(lambda: sum(e.kind == 'interrupt' for e in r.events) >= count, 'all answers')
        answers = [e for e in r.events if e.kind == 'interrupt']
        assert [int(e.name) for e in answers] == list(range(1, count + 1))
        stages = {name: ring.summary() for name, ring in r.executor.engine.times.rings.items()
                  if name.startswith('interrupt')}
    to_command = (np.array(first_ns) - np.array(called)) / 1e6
    with capsys.disabled():
        parts = ', '.join(f'{name} p50 {s.p50 / 1e3:.1f} p99 {s.p99 / 1e3:.1f} ms'
                          for name, s in stages.items())
        print(f'\n{count} interrupts: call to first new command p50 '
              f'{np.percentile(to_command, 50):.1f} p99 {np.percentile(to_command, 99):.1f} ms '
              f'({parts}); old commands meanwhile at most {max(meanwhile)}')


def test_a_tick_in_its_last_segment_is_committed_but_its_chunk_of_the_old_goal_is_not_played(
        tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        moving(r, segment_s=0.0)
        gate, r.policy.switches.gated = threading.Event(), 'act'
        r.policy.switches.gate = gate
        waiting = r.policy.switches.waiting
        wait_until(lambda: r.policy.switches.waiting > waiting, 'a tick in its last segment')
        dropped = r.executor.report.counters['results_dropped']
        at = r.probe.get_clock().now().nanoseconds
        assert interrupt(r).success
        r.policy.switches.gate = None
        gate.set()
        wait_until(lambda: r.executor.engine.slot.latched == 1, 'the next tick to latch it')
        assert r.executor.report.counters['results_dropped'] == dropped + 1
        given = next(t for t in r.policy.switches.inputs if t.subgoal is not None)
        assert given.steps_executed == 16, 'nothing of the old goal is blended in'
        wait_until(lambda: any(stamp_ns(c) > at for c in r.chunks), 'its chunk')
        assert {c.subgoal_sequence for c in r.chunks if stamp_ns(c) > at} == {1}


def test_a_second_interrupt_is_answered_busy_while_the_first_ones_tick_runs(
        tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        moving(r, segment_s=0.0)
        old, gate = threading.Event(), threading.Event()
        switches = r.policy.switches
        switches.gate, waiting = old, switches.waiting
        wait_until(lambda: switches.waiting > waiting, 'a tick of the old goal')
        assert interrupt(r).success
        switches.gate, waiting = gate, switches.waiting
        old.set()
        wait_until(lambda: switches.waiting > waiting, 'the tick that answers it')
        refused = interrupt(r)
        assert refused.code == 'busy' and 'again' in refused.message
        assert r.call('set_subgoal', subgoal=Subgoal(tokens=[6])).success, 'normal ones pass'
        switches.gate = None
        gate.set()
        wait_until(lambda: not r.executor.engine.interrupted, 'the chunk')
        assert interrupt(r).success


def test_a_flood_on_the_topic_keeps_the_newest_and_the_robot_moving(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        moving(r)
        publisher = r.probe.create_publisher(Subgoal, 'subgoal', 1)
        wait_until(lambda: publisher.get_subscription_count() > 0, 'the executor to listen')
        commands, ticks = len(r.arm.commands), r.executor.control.ticks_played
        sent, begun = 0, time.monotonic()
        pause = threading.Event()
        while sent < 1500:
            while sent < 1000 * (time.monotonic() - begun):
                sent += 1
                publisher.publish(Subgoal(
                    sequence=sent, tokens=[sent % 500] * (1 + sent % 20),
                    priority=Subgoal.PRIORITY_INTERRUPT))
            pause.wait(0.001)
        wait_until(lambda: r.executor.engine.slot.latched == sent, 'the newest to be latched')
        counters = r.executor.report.counters
        assert r.executor.control.ticks_played > ticks + 5 and len(r.arm.commands) > commands + 20
        assert counters['subgoals_accepted'] <= sent / 3, 'the topic rests after each'
        given = [t.subgoal for t in r.policy.switches.inputs if t.subgoal is not None]
        assert len(given) > 5 and all(
            list(s.tokens) == [s.sequence % 500] * (1 + s.sequence % 20) for s in given), 'torn'
        r.until_phase('ticking')
        assert counters['exhausted'] == 0
        wait_until(lambda: not r.executor.engine.interrupted, 'the last answer')
        assert interrupt(r).success


def test_hold_ends_what_an_interrupt_has_begun_and_the_goal_comes_after_resume(
        tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        moving(r)
        gate = r.policy.switches.gate = threading.Event()
        waiting = r.policy.switches.waiting
        wait_until(lambda: r.policy.switches.waiting > waiting, 'a running tick')
        assert interrupt(r).success and r.call('hold', cause='stop', latch=True).success
        r.policy.switches.gate = None
        gate.set()
        at = r.probe.get_clock().now().nanoseconds
        assert not r.executor.engine.interrupted, 'nothing is answered while the robot holds'
        assert r.call('resume').success
        r.until_phase('ticking')
        wait_until(lambda: any(stamp_ns(c) > at for c in r.chunks), 'its chunk')
        assert next(c for c in r.chunks if stamp_ns(c) > at).subgoal_sequence == 1


def test_an_interrupt_while_an_answer_runs_is_coalesced_and_answered_by_the_next_tick() -> None:
    counters = Counters()
    subject = Interrupts(counters)
    assert subject.ask(1, 1000, 5) and subject.pending and subject.cut == 1
    subject.submitted(1, 3000)
    assert subject.answering and not subject.ask(2, 4000, 6) and subject.cut == 1
    subject.ended()
    assert subject.played(1, 5000, 7) is None, 'the newer one still waits'
    subject.submitted(2, 6000)
    answer = subject.played(2, 9000, 8)
    assert (answer.sequence, answer.to_tick_us, answer.inference_us, answer.steps_meanwhile) == (
        2, 2.0, 3.0, 2)
    assert not subject.pending and counters['interrupts_coalesced'] == 1


def test_a_restore_voids_an_interrupt_that_no_tick_has_latched() -> None:
    subject = Interrupts(Counters())
    subject.ask(4, 0, 0)
    subject.void()
    subject.submitted(4, 1)
    assert not subject.pending and not subject.answering and subject.played(4, 2, 0) is None
