"""Ticks, verbs, subgoals and services beside each other: what each of them sees and tells."""

from collections.abc import Callable
from contextlib import contextmanager
import json
from pathlib import Path
import threading
from typing import Any
from unittest import mock

from _executor_rig import Rig
from _executor_rig import rig
from _ros_fixtures import wait_until
from lifecycle_msgs.msg import Transition
import pytest

from flashrt_ros import executor_node
from flashrt_ros.msg import Subgoal

pytestmark = pytest.mark.ros


@contextmanager
def in_its_last_segment(r: Rig, meanwhile: Callable[[], Any]) -> Any:
    """Call while a tick is in its last segment; on leaving the tick ends, then the call."""
    switches, results = r.policy.switches, []
    switches.gated, switches.waiting = 'act', 0
    gate = switches.gate = threading.Event()
    wait_until(lambda: switches.waiting, 'the last segment')
    caller = threading.Thread(target=lambda: results.append(meanwhile()))
    caller.start()
    wait_until(lambda: r.executor.control.changing, 'the verb to wait for the boundary')
    yield results
    switches.gate = None
    gate.set()
    caller.join(20)


def ticks_told(r: Rig, more: int = 3) -> list[int]:
    """Return the ticks of which ~/tick_input told in this epoch, some more of them waited for."""
    before = len(r.tick_inputs)
    wait_until(lambda: len(r.tick_inputs) > before + more, 'ticks')
    epoch = r.executor.control.progress.epoch
    return [t.tick for t in r.tick_inputs if t.epoch == epoch]


def test_a_tick_that_commits_while_a_rollback_is_refused_is_told(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        r.run()
        control, counters = r.executor.control, r.executor.report.counters
        end_change = control.end_change

        def after_the_tick(*given: Any, **named: Any) -> None:
            wait_until(lambda: counters['results_dropped'], 'the tick')
            end_change(*given, **named)

        with mock.patch.object(control, 'end_change', after_the_tick):
            with in_its_last_segment(r, lambda: r.call('rollback', boundaries=999)) as replies:
                pass
        assert replies[0].code == 'mark_dead'
        ticks = ticks_told(r)
        assert ticks == list(range(ticks[0], ticks[0] + len(ticks))), 'a replay needs each'


def test_a_tick_that_ends_while_a_fork_begins_is_told_and_seen_by_it(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        r.run()
        with in_its_last_segment(r, lambda: r.call('fork', n=2, commit_branch=-1)) as replies:
            pass
        assert replies[0].success, replies[0].message
        ticks = ticks_told(r)
        assert ticks == list(range(ticks[0], ticks[0] + len(ticks)))


def test_the_next_tick_goes_on_from_the_branch_that_a_fork_has_committed(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        r.run()
        control, session = r.executor.control, r.policy.sessions[0]
        submit, end_change = session.submit, control.end_change
        seen: list[tuple[int, int]] = []  # rows and the last tick known as a tick is submitted

        def noted(tick_input: Any) -> Any:
            seen.append((tick_input.rows, control.progress.tick))
            return submit(tick_input)

        def then_a_tick(*given: Any, **named: Any) -> None:
            end_change(*given, **named)
            wait_until(lambda: seen[-1][0] == 1, 'the next tick')

        with mock.patch.object(control, 'end_change', then_a_tick), \
                mock.patch.object(session, 'submit', noted):
            reply = r.call('fork', n=2, commit_branch=1)
        assert reply.success, reply.message
        at = next(i for i, (rows, _) in enumerate(seen) if rows == 2)
        assert seen[at + 1] == (1, reply.chunks[1].tick)


def test_every_committed_tick_is_a_boundary_whatever_became_of_its_chunk(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        r.run()
        wait_until(lambda: len(r.chunks) > 3, 'ticks')
        switches, counters = r.policy.switches, r.executor.report.counters
        switches.gated, switches.waiting = 'act', 0
        gate = switches.gate = threading.Event()
        wait_until(lambda: switches.waiting, 'the last segment')
        r.call('hold', cause='test', latch=False)
        switches.gate = None
        gate.set()
        wait_until(lambda: counters['results_dropped'] == 1, 'its chunk to be dropped')
        position = r.call('snapshot', id='here').info.position
        r.call('resume')
        wait_until(lambda: r.tick_inputs[-1].tick >= position, 'the next tick')
        r.call('hold', cause='test', latch=False)
        wait_until(lambda: r.policy.sessions[0].lane.idle, 'the last tick to end')
        here = r.call('snapshot', id='later').info.position
        assert r.call('rollback', boundaries=here - position).tick == position


def test_a_tick_of_a_new_epoch_takes_no_observation_of_before(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        r.run()
        engine, control = r.executor.engine, r.executor.control
        judge, prepare = engine.ages.judge, engine.book.prepare
        resets: list[Any] = []
        fresh: list[bool] = []

        def reset_meanwhile(*given: Any) -> Any:
            if threading.current_thread().name == 'tick' and not resets:
                resets.append(r.executor.verbs.reset('', None))
            return judge(*given)

        def noted(observation: Any, *given: Any, **named: Any) -> Any:
            if resets:
                fresh.append(observation.oldest_received_ns >= control.fresh_after_ns)
            return prepare(observation, *given, **named)

        engine.book.prepare, engine.ages.judge = noted, reset_meanwhile
        wait_until(lambda: len(fresh) > 2, 'ticks after the reset')
        assert all(fresh[:1]), 'the first one saw the robot after the reset'


def test_an_observation_that_comes_as_the_clock_is_read_is_none_of_the_future(
        tmp_path: Path) -> None:
    with rig(tmp_path, future_tolerance_s=0.0) as r:
        observations, counters = r.executor.engine.observations, r.executor.report.counters
        newest = observations.newest

        def after_the_next_ones() -> Any:
            if threading.current_thread().name == 'tick':
                now = r.executor.now_ns()
                wait_until(lambda: newest().newest_stamp_ns > now, 'the next ones')
            return newest()

        observations.newest = after_the_next_ones
        r.run()
        wait_until(lambda: len(r.tick_inputs) > 4, 'ticks')
        observations.newest = newest
        assert counters['observations_future'] == 0


def test_a_service_that_meets_a_cleanup_says_so(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        frame = r.executor.services_made.frame
        require = frame.require

        def then_cleaned_up(*given: Any) -> None:
            require(*given)
            for step in (Transition.TRANSITION_DEACTIVATE, Transition.TRANSITION_CLEANUP):
                assert r.executor.transition(step)

        with mock.patch.object(frame, 'require', then_cleaned_up):
            reply = r.call('reset')
        assert (reply.success, reply.code) == (False, 'wrong_state')
        assert 'unconfigured' in reply.message


def test_ticks_are_told_after_a_second_configure_without_a_reset(tmp_path: Path) -> None:
    with rig(tmp_path, require_reset=False) as r:
        r.run()
        epoch = r.executor.control.progress.epoch
        assert epoch == 2
        for step in (Transition.TRANSITION_DEACTIVATE, Transition.TRANSITION_CLEANUP):
            assert r.executor.transition(step)
        told = len(r.tick_inputs)
        with mock.patch.object(executor_node, 'make_policy', lambda name: r.policy):
            assert r.executor.transition(Transition.TRANSITION_CONFIGURE)
        progress = r.executor.control.progress
        assert (progress.epoch, progress.tick, progress.active_capsule) == (2, 0, '')
        assert r.executor.transition(Transition.TRANSITION_ACTIVATE)
        wait_until(lambda: len(r.tick_inputs) > told + 3, 'ticks')
        ticks = [t.tick for t in r.tick_inputs[told:]]
        assert ticks == list(range(len(ticks)))


def test_a_node_that_holds_after_a_refused_chunk_still_shows_signs_of_life(tmp_path: Path) -> None:
    with rig(tmp_path, heartbeat_period_s=0.02) as r:
        r.run()
        r.policy.switches.nan = True
        wait_until(lambda: r.executor.control.holds.latched, 'the latch')
        r.policy.switches.nan = False
        count = len(r.heartbeats)
        wait_until(lambda: len(r.heartbeats) > count + 2, 'heartbeats while it holds')
        assert r.executor.control.holds.latched


def test_one_resume_leaves_every_hold_that_was_asked_for(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        r.run()
        r.call('hold', cause='lunch', latch=False)
        r.call('hold', cause='operator', latch=True)
        assert r.call('resume').success
        r.until_phase('ticking')
        r.call('hold', cause='lunch', latch=False)
        r.executor.control.hold('fault', latch=True)
        assert r.call('resume').success
        r.until_phase('ticking')


def test_the_reply_of_a_reset_tells_its_own_episode(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        reset = r.executor.verbs.reset

        def then_another(*given: Any) -> Any:
            report = reset(*given)
            reset('', None)
            return report

        with mock.patch.object(r.executor.verbs, 'reset', then_another):
            reply = r.reset()
        assert (reply.epoch, reply.episode) == (2, 1)
        assert r.executor.control.progress.episode == 2


def test_a_subgoal_that_comes_as_the_last_one_is_overdue_has_not_timed_out(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        r.run()
        slot = r.executor.engine.slot
        overdue = slot.overdue

        def then_a_newer_one(now_ns: int) -> Any:
            found = overdue(now_ns)
            if found:
                slot.overdue = overdue
                slot.admit(sequence=0, epoch=0, episode=0, text='', tokens=(6,), current_epoch=2,
                           current_episode=1, now_ns=now_ns)
            return found

        slot.overdue = then_a_newer_one
        r.call('set_subgoal', subgoal=Subgoal(tokens=[5], deadline_s=0.05))
        assert r.until_event('subgoal_timed_out').name == '1'


def test_an_interrupt_that_a_reset_has_dropped_does_not_wait_for_an_answer(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        r.run()
        slot, verbs = r.executor.engine.slot, r.executor.verbs
        admit = slot.admit

        def then_a_reset(**given: Any) -> Any:
            accepted = admit(**given)
            slot.admit = admit
            verbs.reset('', None)
            return accepted

        slot.admit = then_a_reset
        asked = Subgoal(tokens=[7], priority=Subgoal.PRIORITY_INTERRUPT)
        assert r.call('set_subgoal', subgoal=asked).success
        r.until_phase('ticking')
        assert not r.executor.engine.interrupted
        assert json.loads(r.until_event('reset').detail)['subgoal_dropped'] == 1
        wait_until(lambda: r.call('set_subgoal', subgoal=asked).success, 'the next interrupt')
