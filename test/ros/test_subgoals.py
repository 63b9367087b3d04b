"""Tests of flashrt_ros.subgoals."""

import json
import threading

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest
import torch

from flashrt_core.errors import ConfigError
from flashrt_core.errors import SubgoalRefused
from flashrt_ros.conversions import rows_of_record
from flashrt_ros.statistics import Counters
from flashrt_ros.subgoals import SubgoalSlot

S = 1_000_000_000


def slot(**more):
    counters = Counters()
    return SubgoalSlot(max_tokens=4, vocabulary=100, counters=counters, **more), counters


def send(subject, sequence=0, *, episode=0, tokens=(1, 2), epoch=0, current_episode=1,
         current_epoch=1, now_ns=0, **more):
    return subject.admit(
        sequence=sequence, epoch=epoch, episode=episode, text='go', tokens=tokens,
        current_epoch=current_epoch, current_episode=current_episode, now_ns=now_ns, **more)


def test_a_reset_between_a_look_at_the_episode_and_the_slot_counts():
    subject, counters = slot()
    subject.restored(episode=2, epoch=2)
    with pytest.raises(SubgoalRefused, match='for episode 1, the current one is 2'):
        send(subject, 1, episode=1, current_episode=1)
    assert counters['subgoals_wrong_episode'] == 1
    assert send(subject, 1, current_episode=1).episode == 2


def test_a_restore_between_a_look_at_the_epoch_and_the_slot_counts():
    subject, counters = slot()
    subject.restored(episode=1, epoch=2)
    with pytest.raises(SubgoalRefused, match='of epoch 1, the current one is 2'):
        send(subject, 1, epoch=1, current_epoch=1)
    assert counters['subgoals_wrong_epoch'] == 1 and subject.requested == 0
    send(subject, 1, epoch=2, current_epoch=1)


def test_an_accepted_subgoal_stays_pending_until_a_committed_tick_has_latched_it():
    subject, _ = slot()
    send(subject, 5)
    assert subject.pending().sequence == 5
    assert subject.pending().sequence == 5  # the tick was dropped, the next one gets it again
    subject.commit(5)
    assert subject.pending() is None and subject.latched == 5 and subject.requested == 5


def test_zero_asks_for_the_next_number():
    subject, _ = slot()
    assert [send(subject).sequence, send(subject, 7).sequence, send(subject).sequence] == [1, 7, 8]


def test_a_duplicate_is_counted_and_refused():
    subject, counters = slot()
    send(subject, 3)
    with pytest.raises(SubgoalRefused, match='3 was accepted already'):
        send(subject, 3)
    assert counters['subgoals_duplicate'] == 1 and counters['subgoals_accepted'] == 1


def test_one_out_of_order_is_counted_and_refused_and_the_newer_one_stays():
    subject, counters = slot()
    send(subject, 9)
    with pytest.raises(SubgoalRefused, match='4 is out of order, the newest is 9'):
        send(subject, 4)
    assert counters['subgoals_out_of_order'] == 1 and subject.pending().sequence == 9


def test_one_for_another_episode_is_counted_and_refused():
    subject, counters = slot()
    for episode in (1, 3):
        with pytest.raises(SubgoalRefused, match=f'for episode {episode}, the current one is 2'):
            send(subject, 1, episode=episode, current_episode=2)
    assert send(subject, 1, episode=2, current_episode=2).episode == 2
    assert counters['subgoals_wrong_episode'] == 2


def test_one_of_another_epoch_is_counted_and_refused_and_zero_is_whichever_is_current():
    subject, counters = slot()
    for epoch in (1, 3):
        with pytest.raises(SubgoalRefused, match=f'of epoch {epoch}, the current one is 2.*plan'):
            send(subject, 1, epoch=epoch, current_epoch=2)
    assert counters['subgoals_wrong_epoch'] == 2 and subject.pending() is None
    assert send(subject, epoch=2, current_epoch=2).sequence == 1
    assert send(subject, epoch=0, current_epoch=2).sequence == 2


ROWS = np.arange(12, dtype=np.float32).reshape(2, 6)


def wide():
    return slot(embedding=(3, 6))


@pytest.mark.parametrize('given', [ROWS, ROWS.ravel(), torch.from_numpy(ROWS), ROWS[:, ::-1]])
def test_an_embedding_may_stand_in_the_place_of_tokens_and_is_copied(given):
    subject, _ = wide()
    expected = np.asarray(given.tolist(), np.float32).reshape(2, 6)
    given = given.clone() if isinstance(given, torch.Tensor) else given.copy()
    accepted = send(subject, tokens=(), embedding=given)
    given[:] = -1
    assert np.array_equal(subject.pending().embedding.values, expected)
    told = json.loads(json.dumps(accepted.record()))
    assert np.array_equal(rows_of_record(told['embedding']), expected) and told['tokens'] == []
    assert send(subject).embedding is None and 'embedding' not in send(subject).record()


@pytest.mark.parametrize('given, reason', [
    (ROWS.ravel()[:7], r'is 7 values; give rows of 6'),
    (np.zeros(24, np.float32), r'is \[4, 6\], the slot takes at most \[3, 6\]'),
    (ROWS[:, :5], r'is \[2, 5\], the slot takes at most'),
    (ROWS.astype(np.float64), 'is float64; give a float32'),
    (np.zeros((1, 2, 6), np.float32), r'is \[1, 2, 6\]'),
    (np.float32([1, 2, 3, 4, 5, np.nan]), r'holds nan at \[0, 5\]; give finite'),
    (torch.full((1, 6), -torch.inf), 'holds -inf at'),
    (ROWS[:0], r'is \[0, 6\]; give a row')])
def test_an_embedding_that_the_policy_cannot_read_is_counted_and_refused(given, reason):
    subject, counters = wide()
    with pytest.raises(SubgoalRefused, match=f'subgoal embedding {reason}'):
        send(subject, embedding=given)
    assert counters['subgoals_invalid'] == 1
    assert subject.pending() is None and subject.requested == 0


def test_a_policy_that_reads_no_embedding_refuses_one_and_says_what_to_set():
    subject, counters = slot()
    with pytest.raises(SubgoalRefused, match=r'not read by this policy.*subgoal_embedding_tokens'):
        send(subject, embedding=ROWS)
    assert counters['subgoals_invalid'] == 1 and subject.pending() is None


def test_tokens_beside_an_embedding_are_judged_as_ever():
    subject, _ = wide()
    with pytest.raises(SubgoalRefused, match='token ids from 100'):
        send(subject, tokens=(100,), embedding=ROWS)
    with pytest.raises(SubgoalRefused, match='neither tokens nor text nor an embedding'):
        send(subject, tokens=())


def test_a_newer_one_replaces_an_unread_one():
    subject, _ = slot()
    send(subject, 1, tokens=(1,))
    send(subject, 2, tokens=(2,))
    assert subject.pending().tokens == (2,)
    subject.commit(1)  # a late commit of the replaced one
    assert subject.pending().sequence == 2


def test_a_restore_does_not_apply_a_latched_subgoal_again():
    subject, _ = slot()
    send(subject, 5)
    subject.commit(5)
    subject.commit(2)  # the restored boundary had latched number 2
    assert subject.latched == 5 and subject.pending() is None
    with pytest.raises(SubgoalRefused):
        send(subject, 5)
    send(subject, 6)
    assert subject.pending().sequence == 6


def test_what_is_in_force_is_what_the_newest_committed_tick_acted_on():
    subject, _ = slot()
    send(subject, 5)
    assert subject.in_force == 0, 'no tick has latched it'
    subject.commit(5)
    assert subject.in_force == 5
    subject.restored(episode=1, epoch=2)
    assert subject.in_force == 0, 'not known'
    subject.commit(2)
    assert subject.in_force == 2 and subject.latched == 5, 'an older one came back'


def test_a_reset_drops_what_was_meant_for_the_episode_before():
    subject, counters = slot()
    send(subject, 5, deadline_s=1.0)
    assert subject.restored(episode=2, epoch=2) == 5
    assert subject.pending() is None and not subject.overdue(100 * S)
    assert counters['subgoals_dropped_by_restore'] == 1
    with pytest.raises(SubgoalRefused):
        send(subject, 5, current_episode=2)  # the mark is not restored


def test_a_restore_within_the_episode_drops_what_no_tick_has_latched_but_not_its_deadline():
    subject, counters = slot()
    send(subject, 5, deadline_s=1.0)
    assert subject.restored(episode=1, epoch=2) == 5 and subject.restored(episode=1, epoch=2) == 0
    assert subject.pending() is None and subject.overdue(100 * S)
    assert counters['subgoals_dropped_by_restore'] == 1
    send(subject, 6)
    assert subject.pending().sequence == 6
    subject.commit(6)
    assert subject.restored(episode=1, epoch=2) == 0, 'a latched one is in the capsule'


def test_the_deadline_counts_from_acceptance_and_ends_with_a_newer_one():
    subject, _ = slot()
    assert not subject.overdue(100 * S)
    send(subject, 1, deadline_s=2.0, now_ns=10 * S)
    assert not subject.overdue(12 * S) and subject.overdue(12 * S + 1)
    subject.commit(1)
    assert subject.overdue(13 * S)
    send(subject, 2, now_ns=13 * S)
    assert not subject.overdue(100 * S)


@pytest.mark.parametrize(('more', 'message'), [
    ({'tokens': ()}, 'neither tokens nor text'),
    ({'tokens': (1, 2, 3, 4, 5)}, 'has 5 tokens, the slot takes 4'),
    ({'tokens': (100,)}, 'the vocabulary is 0..99'),
    ({'tokens': (-1,)}, 'token ids from -1'),
    ({'deadline_s': -1.0}, 'deadline_s -1.0'),
    ({'deadline_s': float('nan')}, 'deadline_s nan'),
])
def test_content_that_does_not_fit_is_refused_before_the_number_is_used(more, message):
    subject, counters = slot()
    with pytest.raises(SubgoalRefused, match=message):
        send(subject, 1, **more)
    assert counters['subgoals_invalid'] == 1 and subject.requested == 0
    send(subject, 1)


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans())))
def test_numbers_latched_only_grow_and_each_is_latched_once(writes):
    subject, _ = slot()
    latched = []
    for sequence, tick in writes:
        try:
            send(subject, sequence)
        except SubgoalRefused:
            pass
        pending = subject.pending()
        if tick and pending:
            subject.commit(pending.sequence)
            latched.append(pending.sequence)
    assert latched == sorted(set(latched))


def test_many_writers_get_one_number_each(stress):
    subject, counters = slot()
    count = stress(2000)
    numbers = []

    def write():
        for _ in range(count):
            numbers.append(send(subject).sequence)

    writers = [threading.Thread(target=write) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sorted(numbers) == list(range(1, 4 * count + 1))
    assert counters['subgoals_accepted'] == 4 * count


@pytest.mark.parametrize('sizes', [(0, 100), (4, 0)])
def test_a_slot_of_no_use_is_refused(sizes):
    with pytest.raises(ConfigError):
        SubgoalSlot(max_tokens=sizes[0], vocabulary=sizes[1], counters=Counters())
