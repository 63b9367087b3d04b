"""Refused requests: each reply carries a code and a sentence, is counted, and changes nothing."""

import json
from pathlib import Path

from _executor_rig import Rig
from _executor_rig import rig
from _fake_policy import FakeConfig
from _fake_policy import FakePolicy
from _ros_fixtures import wait_until
import numpy as np
import pytest
from rclpy.parameter import Parameter

from flashrt_ros.conversions import rows_of_record
from flashrt_ros.msg import Subgoal

pytestmark = pytest.mark.ros


@pytest.mark.parametrize('bad', ['../../etc/passwd', '/tmp/x', '.hidden', 'a b', 'x' * 65, 'é'])
def test_a_path_as_an_id_is_refused_by_every_verb(tmp_path: Path, bad: str) -> None:
    with rig(tmp_path) as r:
        for verb, fields in (
                ('reset', {'capsule_id': bad}), ('restore', {'id': bad}),
                ('snapshot', {'id': bad}),
                ('rollback', {'to': bad}), ('drop', {'id': bad}), ('pin', {'id': bad}),
                ('move', {'id': bad, 'tier': 'host'})):
            reply = r.call(verb, **fields)
            assert (reply.success, reply.code) == (False, 'capsule_id_invalid'), verb
            assert 'A-Z a-z 0-9' in reply.message
        assert r.refusals('capsule_id_invalid') == 7


def test_unknown_ids_tiers_and_numerics_are_refused(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        assert r.call('restore', id='nowhere').code == 'capsule_not_found'
        assert 'c0' in r.call('drop', id='nowhere').message
        assert r.call('snapshot', id='a', tier='moon').success is False
        assert r.call('snapshot', id='a', tier='disk').code == 'tier_unavailable'
        assert r.call('restore', id='c0', numerics='nearly').code == 'parameter_invalid'
        assert r.call('snapshot', id='c0').code == 'capsule_exists'
        assert r.call('pin', id='nowhere', pinned=True).code == 'capsule_not_found'


def test_a_hold_may_not_take_the_name_of_one_that_ends_by_itself(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        r.run()
        for cause in ('observation', 'episode_end', 'x' * 65, 'a\nb'):
            assert r.call('hold', cause=cause).code == 'parameter_invalid'
        assert r.executor.phase == 'ticking'
        assert r.call('hold', cause='lunch', latch=False).success and r.executor.phase == 'holding'
        assert r.call('resume').success, 'an unlatched hold of a request ends so too'
        r.until_phase('ticking')


def test_a_hold_without_more_words_is_ended_by_no_reset_and_no_restore(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        r.run()
        reply = r.call('hold')
        assert reply.success and 'leave it by ~/resume;' in reply.message
        reply = r.call('hold', latch=False)
        assert 'leave it by ~/resume;' in reply.message, 'no later call takes the latch away'
        assert r.call('reset').success and r.call('restore', id='c0').success
        assert r.executor.control.holds.causes == ('request',) and r.executor.phase == 'holding'
        assert r.call('resume').success
        r.until_phase('ticking')


def test_an_unknown_capsule_does_not_even_hold_the_robot(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        r.run()
        generation = r.executor.control.generation
        assert r.call('restore', id='nowhere').code == 'capsule_not_found'
        assert r.executor.control.generation == generation


def test_a_budget_full_of_pins_refuses_the_next_snapshot_with_the_numbers(tmp_path: Path) -> None:
    with rig(tmp_path, capsule_gpu_bytes=4 << 20, capsule_host_bytes=4 << 20) as r:
        replies = [r.call('snapshot', id=f's{i}', pin=True) for i in range(3)]
        assert replies[0].success
        refused = next(reply for reply in replies if not reply.success)
        assert refused.code == 'budget_full'
        assert any(digit.isdigit() for digit in refused.message)
        assert r.refusals('budget_full') >= 1
        assert r.reset().success, 'C0 is pinned and still there'


def test_another_models_capsule_is_refused_with_the_differing_field(tmp_path: Path) -> None:
    folder = tmp_path / 'capsules'
    folder.mkdir()
    disk = {'allow_disk_capsules': True, 'capsule_directory': str(folder),
            'capsule_disk_bytes': 1 << 26}
    with rig(tmp_path, FakePolicy(layout='a'), **disk) as r:
        assert r.call('snapshot', id='theirs', tier='disk').success
    with rig(tmp_path, FakePolicy(layout='b'), **disk) as r:
        assert 'theirs' in {c.id for c in r.call('list_capsules').capsules}
        reply = r.call('restore', id='theirs')
        assert reply.code == 'identity_mismatch' and 'layout' in reply.message
        assert r.executor.control.progress.epoch == 1, 'the first'
        assert r.reset().success


def test_a_snapshot_without_an_id_takes_none_of_an_earlier_process(tmp_path: Path) -> None:
    folder = tmp_path / 'capsules'
    folder.mkdir()
    disk = {'allow_disk_capsules': True, 'capsule_directory': str(folder),
            'capsule_disk_bytes': 1 << 26}
    ids = []
    for _ in range(2):
        with rig(tmp_path, **disk) as r:
            for tier in ('disk', 'gpu'):
                reply = r.call('snapshot', tier=tier)
                assert reply.success, reply.message
                ids.append(reply.info.id)
    assert ids == ['e0-t0-1', 'e0-t0-2', 'e0-t0-2', 'e0-t0-3']


def test_every_service_answers_wrong_state_before_configure(tmp_path: Path) -> None:
    policy = FakePolicy()
    policy.switches.bind_error = RuntimeError('no such weights')
    with rig(tmp_path, policy, arm=False) as r:
        assert r.executor.state_label == 'unconfigured'
        for verb in ('reset', 'snapshot', 'restore', 'rollback', 'fork', 'list_capsules', 'pin',
                     'drop', 'move', 'set_subgoal', 'hold', 'resume', 'step'):
            reply = r.call(verb)
            assert (reply.success, reply.code) == (False, 'wrong_state'), verb
            assert 'unconfigured' in reply.message and 'configure' in reply.message
        assert r.refusals('wrong_state') == 13
        assert 'no such weights' in r.executor.report.sections()['state'].message
        assert r.executor.phase == 'failed'


def test_subgoals_are_numbered_latched_and_told(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        r.run()
        reply = r.call('set_subgoal', subgoal=Subgoal(text='put the red block in the blue zone'))
        assert reply.success and reply.sequence == 1
        wait_until(lambda: r.executor.engine.slot.latched == 1, 'the tick to latch it')
        wait_until(lambda: any(c.subgoal_sequence == 1 for c in r.chunks), 'a chunk to report it')
        event = r.until_event('subgoal', '1')
        assert 'red block' in event.detail and '"tokens": [' in event.detail
        given = next(t for t in r.policy.switches.inputs if t.subgoal is not None)
        assert len(given.subgoal.tokens) == 8
        for subgoal, words in (
                (Subgoal(sequence=1, text='home'), 'already'),
                (Subgoal(), 'neither tokens nor text'),
                (Subgoal(text=' \n'), '~/hold'),
                (Subgoal(tokens=[1] * 25), '25 tokens'),
                (Subgoal(tokens=[9999]), '9999'),
                (Subgoal(text='home', episode=77), 'episode 77')):
            refused = r.call('set_subgoal', subgoal=subgoal)
            assert refused.code == 'subgoal_refused' and words in refused.message
        assert r.call('set_subgoal', subgoal=Subgoal(text='x' * 60)).code == 'config_invalid'


def test_the_subgoal_topic_does_the_same_work(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        r.run()
        publisher = r.probe.create_publisher(Subgoal, 'subgoal', 1)
        wait_until(lambda: publisher.get_subscription_count() > 0, 'the executor to listen')
        publisher.publish(Subgoal(tokens=[5, 6], sequence=4))
        wait_until(lambda: r.executor.engine.slot.latched == 4, 'the tick to latch it')
        publisher.publish(Subgoal(tokens=[5, 6], sequence=4))
        wait_until(lambda: r.refusals('subgoal_refused') == 1, 'the duplicate to be refused')


def epochs_of_restores(r: Rig) -> tuple[list[int], int]:
    """Reset, restore and roll back; returns the epochs before and the one now."""
    before = [r.executor.epoch, r.reset().epoch, r.call('restore', id='c0').epoch]
    return before, r.call('rollback', to='c0').epoch


def test_a_subgoal_of_an_epoch_before_a_restore_is_refused_by_the_service(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        assert r.call('set_subgoal', subgoal=Subgoal(tokens=[5], epoch=r.executor.epoch)).success
        before, now = epochs_of_restores(r)
        for epoch in before:
            refused = r.call('set_subgoal', subgoal=Subgoal(tokens=[5], sequence=2, epoch=epoch))
            assert refused.code == 'subgoal_refused', refused.message
            assert f'of epoch {epoch}, the current one is {now}' in refused.message
        assert r.executor.report.counters['subgoals_wrong_epoch'] == len(before)
        assert r.executor.engine.slot.requested == 1
        for sequence, epoch in ((2, 0), (3, now)):
            reply = r.call('set_subgoal', subgoal=Subgoal(
                tokens=[5], sequence=sequence, epoch=epoch))
            assert reply.success and reply.sequence == sequence, reply.message


def test_a_subgoal_of_an_epoch_before_a_restore_is_dropped_from_the_topic(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        before, now = epochs_of_restores(r)
        publisher = r.probe.create_publisher(Subgoal, 'subgoal', 1)
        wait_until(lambda: publisher.get_subscription_count() > 0, 'the executor to listen')
        for epoch in before:
            publisher.publish(Subgoal(tokens=[5], sequence=1, epoch=epoch))
            wait_until(lambda e=epoch: any(
                event.kind == 'refused' and f'of epoch {e}, the current one is {now}'
                in event.detail for event in r.events), f'one of epoch {epoch} to be refused')
        assert r.executor.report.counters['subgoals_wrong_epoch'] == len(before)
        assert r.refusals('subgoal_refused') == len(before)
        for sequence, epoch in ((1, 0), (2, now)):
            publisher.publish(Subgoal(tokens=[5], sequence=sequence, epoch=epoch))
            wait_until(lambda n=sequence: r.executor.engine.slot.requested == n, 'it in the slot')


def test_a_subgoal_may_give_rows_in_the_place_of_tokens(tmp_path: Path) -> None:
    policy = FakePolicy(FakeConfig(embedding=(3, 4)))
    rows = np.float32([[0.1, -2, 3, 1e-30], [5, 6, 7, 8]])
    with rig(tmp_path, policy) as r:
        r.run()
        reply = r.call('set_subgoal', subgoal=Subgoal(embedding=rows.ravel(), text='the cup'))
        assert reply.success and reply.sequence == 1, reply.message
        wait_until(lambda: r.executor.engine.slot.latched == 1, 'the tick to latch it')
        given = next(t.subgoal for t in r.policy.switches.inputs if t.subgoal is not None)
        assert np.array_equal(given.embedding.values, rows) and given.tokens == ()
        told = json.loads(r.until_event('subgoal', '1').detail)
        assert np.array_equal(rows_of_record(told['embedding']), rows)
        assert told['text'] == 'the cup'
        for values, words in (
                ([1.0] * 5, 'is 5 values; give rows of 4'), ([0.0] * 16, 'at most [3, 4]'),
                ([np.nan] * 4, 'nan at [0, 0]'), ([0.0] * 3 + [np.inf], 'inf at [0, 3]')):
            refused = r.call('set_subgoal', subgoal=Subgoal(embedding=values))
            assert refused.code == 'subgoal_refused' and words in refused.message, refused.message
        publisher = r.probe.create_publisher(Subgoal, 'subgoal', 1)
        wait_until(lambda: publisher.get_subscription_count() > 0, 'the executor to listen')
        publisher.publish(Subgoal(embedding=rows[:1].ravel()))
        wait_until(lambda: r.executor.engine.slot.latched == 2, 'the tick to latch it')
        publisher.publish(Subgoal(embedding=[1.0]))
        wait_until(lambda: r.refusals('subgoal_refused') == 5, 'it to be refused')
        assert r.executor.report.counters['subgoals_invalid'] == 5


def test_a_policy_that_reads_no_rows_refuses_them(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        reply = r.call('set_subgoal', subgoal=Subgoal(embedding=[1.0] * 4, tokens=[5]))
        assert reply.code == 'subgoal_refused' and 'subgoal_embedding_tokens' in reply.message


def test_a_subgoal_from_before_a_restore_is_not_latched_again(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        r.run()
        r.call('set_subgoal', subgoal=Subgoal(tokens=[5]))
        wait_until(lambda: r.executor.engine.slot.latched == 1, 'the subgoal')
        epoch = r.reset().epoch
        wait_until(lambda: sum(c.epoch == epoch for c in r.chunks) >= 2, 'ticks of the new epoch')
        assert {c.subgoal_sequence for c in r.chunks if c.epoch == epoch} == {0}
        assert r.call('set_subgoal', subgoal=Subgoal(tokens=[5], sequence=1)).code == (
            'subgoal_refused'), 'the mark is never restored'


def test_a_subgoal_that_no_tick_has_latched_is_dropped_by_a_reset(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        r.run()
        r.call('hold', cause='test', latch=False)
        r.call('set_subgoal', subgoal=Subgoal(tokens=[5]))
        epoch = r.reset().epoch
        wait_until(lambda: sum(c.epoch == epoch for c in r.chunks) >= 2, 'ticks of the new epoch')
        assert {c.subgoal_sequence for c in r.chunks if c.epoch == epoch} == {0}
        assert r.executor.report.counters['subgoals_dropped_by_restore'] == 1
        assert r.executor.engine.slot.requested == 1


def test_an_interrupt_drops_the_running_tick_and_the_next_one_latches_it(tmp_path: Path) -> None:
    import threading
    with rig(tmp_path) as r:
        r.run()
        gate = r.policy.switches.gate = threading.Event()
        wait_until(lambda: r.executor.engine._running is not None, 'a running tick')
        # Before the call: a tick that had passed the gate is dropped as soon as it is heard.
        dropped = r.executor.report.counters['ticks_dropped']
        r.call('set_subgoal', subgoal=Subgoal(tokens=[7], priority=Subgoal.PRIORITY_INTERRUPT))
        r.policy.switches.gate = None
        gate.set()
        wait_until(lambda: r.executor.engine.slot.latched == 1, 'the next tick to latch it')
        assert r.executor.report.counters['ticks_dropped'] == dropped + 1
        assert r.policy.switches.inputs[-1].subgoal is None or (
            r.policy.switches.inputs[-1].steps_executed == 16), 'left-overs are cleared'


def test_an_overdue_subgoal_holds_until_the_next_one(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        r.run()
        r.call('set_subgoal', subgoal=Subgoal(tokens=[5], deadline_s=0.05))
        r.until_event('hold', 'subgoal_deadline')
        r.call('set_subgoal', subgoal=Subgoal(tokens=[6]))
        r.until_phase('ticking')


def test_prompt_and_parameter_changes_are_told_in_full(tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        r.run()
        set_one = r.executor.set_parameters_atomically
        assert set_one([Parameter('prompt', value='pick up the red block')]).successful
        event = r.until_event('prompt')
        assert 'pick up the red block' in event.detail and '"tokens": [' in event.detail
        wait_until(lambda: any(t.prompt for t in r.policy.switches.inputs), 'a tick to take it')
        assert set_one([Parameter('tick_period_steps', value=2)]).successful
        assert '"new": 2' in r.until_event('parameter', 'tick_period_steps').detail
        too_long = set_one([Parameter('prompt', value='x' * 99)])
        assert not too_long.successful and 'prompt' in too_long.reason
        wrong = set_one([Parameter('tick_period_steps', value='often')])
        assert 'INTEGER' in wrong.reason and r.refusals('parameter_invalid') == 2
        epoch = r.reset().epoch
        wait_until(lambda: any(c.epoch == epoch for c in r.chunks), 'a tick after the reset')
        assert next(t for t in reversed(r.policy.switches.inputs) if t.prompt), 'given anew'


