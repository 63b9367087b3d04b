"""Ages of actions, expected delays, and counters that would tell of a broken plan."""

import numpy as np

from flashrt_ros.chunk_timing import ChunkTiming
from flashrt_ros.control_loop import ChunkPlayer


def chunk(horizon=12, joints=2):
    return np.zeros((horizon, joints))


def steps(player, count):
    out = np.zeros(2)
    for _ in range(count):
        player.next_action(out)


def test_the_expected_delay_is_the_largest_of_the_last_chunks():
    timing = ChunkTiming(3)
    assert timing.expected_delay == 0
    for delay, expected in ((1, 1), (4, 4), (2, 4), (0, 4), (1, 2)):
        timing.spliced(delay)
        assert timing.expected_delay == expected
    assert timing.late_chunks == 1  # the one of 4 steps; the first had nothing to be later than


def test_every_step_has_the_age_of_its_action_and_is_played_once():
    player = ChunkPlayer(2, timing=ChunkTiming())
    player.timing.planned_age = 6
    for _ in range(5):  # a tick every 4 steps, each 2 steps late
        start = player.begin_tick()
        steps(player, 2)
        player.swap(chunk(), start)
        steps(player, 2)
    timing = player.timing
    # From rest the first chunk starts at 0; then indices 2 to 5 are played of each.
    assert timing.steps == player.steps_executed == 18
    assert timing.ages.maximum == 5 and timing.older_than_planned == 0
    assert (timing.repeated, timing.skipped) == (0, 0)
    assert timing.expected_delay == 2


def test_steps_of_a_chunk_that_should_have_been_replaced_are_counted():
    player = ChunkPlayer(2)
    player.timing.planned_age = 6
    player.swap(chunk(), player.begin_tick())
    steps(player, 9)
    assert player.timing.older_than_planned == 3
    assert player.timing.share_older == 3 / 9


def test_a_used_up_chunk_is_counted_and_a_player_at_rest_is_not():
    player = ChunkPlayer(2)
    steps(player, 3)
    assert player.timing.starved == 0
    player.swap(chunk(4), player.begin_tick())
    steps(player, 6)
    assert player.timing.starved == 2 and player.timing.steps == 4


def test_a_plan_played_twice_or_with_a_gap_is_told():
    timing = ChunkTiming()
    for position in (0, 1, 2, 2, 5):
        timing.played(position, position)
    assert (timing.repeated, timing.skipped) == (1, 2)
    timing.restarted()
    timing.played(40, 0)
    assert (timing.repeated, timing.skipped) == (1, 2)


def test_a_hold_or_a_new_epoch_is_neither_a_gap_nor_a_repetition():
    player = ChunkPlayer(2)
    player.swap(chunk(), player.begin_tick())
    steps(player, 3)
    player.clear()
    player.swap(chunk(), player.begin_tick())
    steps(player, 3)
    player.new_epoch(1)
    player.swap(chunk(), player.begin_tick())
    steps(player, 3)
    assert (player.timing.repeated, player.timing.skipped) == (0, 0)
    assert player.timing.steps == 9
