"""Tests of flashrt_ros.hold: the hold machine and the watch over ticks."""

import threading

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant
from hypothesis.stateful import rule
from hypothesis.stateful import RuleBasedStateMachine
import pytest

from flashrt_core.errors import ConfigError
from flashrt_core.errors import WrongState
from flashrt_ros.control_loop import ChunkPlayer
from flashrt_ros.hold import Cause
from flashrt_ros.hold import HoldMachine
from flashrt_ros.hold import Phase
from flashrt_ros.hold import TickWatch
from flashrt_ros.statistics import Counters

MS = 1_000_000


class Gate:
    def __init__(self):
        self.open = True

    def hold(self):
        self.open = False

    def release(self):
        self.open = True


def machine(**options):
    gate, counters = Gate(), Counters()
    return HoldMachine(gate, counters, **options), gate, counters


def running():
    subject, gate, counters = machine(needs_reset=False)
    subject.offer(0, 0)
    assert subject.phase is Phase.RUN and gate.open
    return subject, gate, counters


def test_nobody_sees_a_hold_without_its_cause():
    subject, _, _ = running()
    seen = []

    class Causes(dict):
        def __setitem__(self, cause, latch):
            seen.append(subject.phase)
            super().__setitem__(cause, latch)
            seen.append(subject.phase)

    subject._causes = Causes()
    subject.hold(Cause.REQUEST)
    assert Phase.RESYNC not in seen and subject.phase is Phase.HOLD


def test_after_a_start_no_action_leaves_until_a_reset():
    subject, gate, _ = machine()
    assert subject.phase is Phase.NEEDS_RESET and not gate.open and not subject.may_tick
    assert subject.offer(100, 100) is None
    with pytest.raises(WrongState, match='call ~/reset'):
        subject.resume(100)
    subject.restored(100, reset=False)  # a restore does not say whose episode it is
    assert subject.phase is Phase.NEEDS_RESET
    subject.restored(200, reset=True)
    assert subject.phase is Phase.RESYNC and subject.may_tick and not gate.open
    assert subject.offer(200, 250).kind == 'resync'
    assert subject.phase is Phase.RUN and gate.open


def test_a_chunk_observed_before_the_resync_began_does_not_end_it():
    subject, gate, _ = machine()
    subject.restored(200, reset=True)
    assert subject.offer(199, 300) is None and not gate.open
    transition = subject.offer(200, 300 * MS)
    assert transition.name == 'run' and transition.detail['took_ms'] == pytest.approx(300, abs=0.1)


def test_an_unlatched_hold_ends_through_resync_when_its_cause_is_over():
    subject, gate, counters = running()
    assert subject.hold(Cause.OBSERVATION).detail == {'latched': False}
    assert subject.phase is Phase.HOLD and not gate.open and not subject.may_tick
    assert subject.hold(Cause.OBSERVATION) is None  # one event per change
    assert subject.clear(Cause.OBSERVATION, 500).kind == 'resume'
    assert subject.clear(Cause.OBSERVATION, 501) is None
    assert subject.phase is Phase.RESYNC and not gate.open
    assert subject.offer(499, 600) is None
    assert subject.offer(500, 600) is not None and gate.open
    assert counters['holds'] == 1 and counters['resyncs'] == 2


def test_all_causes_must_be_over():
    subject, _, _ = running()
    subject.hold(Cause.OBSERVATION)
    subject.hold(Cause.EXHAUSTED)
    subject.clear(Cause.OBSERVATION, 10)
    assert subject.phase is Phase.HOLD and subject.causes == (Cause.EXHAUSTED,)
    subject.clear(Cause.EXHAUSTED, 20)
    assert subject.phase is Phase.RESYNC


def test_a_latched_hold_is_left_by_resume_only():
    subject, gate, counters = running()
    subject.hold(Cause.REQUEST, latch=True)
    assert subject.latched and subject.clear(Cause.REQUEST, 10) is None
    subject.restored(20, reset=True)
    subject.restored(30, reset=False)
    assert subject.phase is Phase.HOLD and subject.latched and not gate.open
    assert subject.offer(40, 40) is None
    assert subject.resume(50).detail == {'phase': 'resync', 'causes': []}
    assert subject.offer(50, 60) is not None and gate.open
    assert counters['holds_latched'] == 1


def test_a_cause_that_is_held_can_be_latched_but_not_unlatched():
    subject, _, _ = running()
    subject.hold(Cause.NON_FINITE)
    assert subject.hold(Cause.NON_FINITE, latch=True).detail == {'latched': True}
    assert subject.hold(Cause.NON_FINITE) is None
    assert subject.latched and subject.clear(Cause.NON_FINITE, 10) is None


def test_resume_leaves_causes_that_are_not_over():
    subject, gate, _ = running()
    subject.hold(Cause.REQUEST, latch=True)
    subject.hold(Cause.OBSERVATION)
    assert subject.resume(10).detail == {'phase': 'hold', 'causes': [Cause.OBSERVATION]}
    assert subject.phase is Phase.HOLD and not gate.open


def test_resume_without_a_latched_hold_is_refused_with_the_state():
    subject, _, _ = running()
    with pytest.raises(WrongState, match='the executor is running; nothing to do'):
        subject.resume(0)
    subject.hold(Cause.EXHAUSTED)
    with pytest.raises(WrongState, match='in hold'):
        subject.resume(0)


def test_a_poisoned_session_is_left_by_a_successful_restore_only():
    subject, gate, _ = running()
    subject.poison()
    subject.hold(Cause.REQUEST, latch=True)
    with pytest.raises(WrongState, match='poisoned'):
        subject.resume(10)
    subject.restored(20, reset=False)
    assert subject.causes == (Cause.REQUEST,)
    subject.resume(30)
    assert subject.phase is Phase.RESYNC and not gate.open


def test_a_restore_while_running_goes_through_resync():
    subject, gate, _ = running()
    subject.restored(100, reset=False)
    assert subject.phase is Phase.RESYNC and not gate.open
    assert subject.offer(99, 120) is None  # its observation is from before the restore


def test_offers_while_running_change_nothing():
    subject, gate, counters = running()
    assert subject.offer(10, 10) is None
    assert gate.open and counters['resyncs'] == 1


def test_a_hold_closes_the_gate_while_another_thread_has_the_machine():
    subject, gate, _ = running()
    with subject._lock:
        holder = threading.Thread(target=subject.hold, args=(Cause.REQUEST,))
        holder.start()
        deadline = threading.Event()
        for _ in range(2000):
            if not gate.open:
                break
            deadline.wait(0.005)
        assert not gate.open
    holder.join(20.0)
    assert subject.phase is Phase.HOLD


def test_the_player_is_a_gate():
    player = ChunkPlayer(2)
    subject = HoldMachine(player, Counters(), needs_reset=False)
    assert player.held
    subject.offer(0, 0)
    assert not player.held
    subject.hold(Cause.REQUEST)
    assert player.held


@pytest.mark.parametrize('close', [
    lambda machine: machine.hold(Cause.REQUEST), lambda machine: machine.restored(9, reset=False)])
def test_an_offer_that_slips_in_between_does_not_leave_the_gate_open(close):
    subject, gate, _ = machine()

    class Slipping:
        def hold(self):
            gate.hold()
            if slip:
                slip.pop()
                subject.offer(100, 100)

        def release(self):
            gate.release()

    slip = []
    subject._gate = Slipping()
    subject.restored(50, reset=True)
    slip.append(True)
    close(subject)
    assert not slip and not gate.open and subject.phase is not Phase.RUN


class HoldRules(RuleBasedStateMachine):
    """Any order of calls: actions leave only after a reset, with no cause, on a fresh chunk."""

    def __init__(self):
        super().__init__()
        self.subject, self.gate, _ = machine()
        self.now = 0
        self.reset_done = False
        self.causes = {}
        self.fresh_from = 0
        self.run = False

    def tick(self):
        self.now += 1

    @rule(cause=st.sampled_from(['a', 'b', 'poisoned']), latch=st.booleans())
    def hold(self, cause, latch):
        latch = latch and cause != 'poisoned'
        self.subject.hold(cause, latch=latch)
        self.causes[cause] = self.causes.get(cause, False) or latch
        self.run = False

    @rule(cause=st.sampled_from(['a', 'b']))
    def clear(self, cause):
        self.tick()
        self.subject.clear(cause, self.now)
        if self.causes.get(cause) is False:
            del self.causes[cause]
            self.fresh_from = self.now

    @rule()
    def resume(self):
        self.tick()
        try:
            self.subject.resume(self.now)
        except WrongState:
            assert 'poisoned' in self.causes or not any(self.causes.values())
            return
        self.causes = {name: False for name, latch in self.causes.items() if not latch}
        self.fresh_from = self.now

    @rule(reset=st.booleans())
    def restored(self, reset):
        self.tick()
        self.subject.restored(self.now, reset=reset)
        self.causes = {name: latch for name, latch in self.causes.items() if latch}
        self.reset_done = self.reset_done or reset
        self.fresh_from, self.run = self.now, False

    @rule(age=st.integers(0, 3))
    def offer(self, age):
        self.subject.offer(self.now - age, self.now)
        if not self.causes and self.reset_done and self.now - age >= self.fresh_from:
            self.run = True

    @invariant()
    def the_gate_is_open_only_when_running(self):
        assert self.gate.open == self.run == (self.subject.phase is Phase.RUN)
        assert self.subject.latched == any(self.causes.values())
        assert not (self.run and (self.causes or not self.reset_done))


TestHoldRules = HoldRules.TestCase
TestHoldRules.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def ticks(**options):
    counters = Counters()
    values = {'deadline_s': 0.1, 'error_after': 3, 'heartbeat_s': 0.2} | options
    return TickWatch(counters=counters, **values), counters


def test_only_a_finished_tick_beats():
    subject, _ = ticks()
    assert subject.probe_due(0)
    subject.started(0)
    assert not subject.probe_due(10_000 * MS)  # a wedged tick: silence, no probe beside it
    subject.finished(10_000 * MS)
    assert not subject.probe_due(10_100 * MS) and subject.probe_due(10_200 * MS)


def test_misses_in_a_row_warn_then_make_an_error_and_a_kept_deadline_ends_them():
    subject, counters = ticks()
    levels = []
    for start, took in ((0, 50), (1, 101), (2, 150), (3, 150), (4, 100)):
        subject.started(start * 1000 * MS)
        missed = subject.finished((start * 1000 + took) * MS)
        assert missed == (took > 100)
        levels.append(subject.level)
    assert levels == ['ok', 'warn', 'warn', 'error', 'ok']
    assert counters['tick_deadline_missed'] == 3 and subject.misses_in_a_row == 0


def test_a_dropped_tick_is_neither_a_beat_nor_a_miss():
    subject, counters = ticks()
    subject.started(0)
    subject.dropped()
    assert subject.probe_due(1)
    assert counters['tick_deadline_missed'] == 0


def test_a_probe_beats_without_counting_as_a_tick():
    subject, counters = ticks()
    assert not subject.finished(500 * MS)
    assert not subject.probe_due(600 * MS) and counters['tick_deadline_missed'] == 0


@pytest.mark.parametrize('options', [
    {'deadline_s': 0.0}, {'error_after': 0}, {'heartbeat_s': -1.0}, {'deadline_s': float('nan')}])
def test_a_watch_of_no_use_is_refused(options):
    with pytest.raises(ConfigError):
        ticks(**options)
