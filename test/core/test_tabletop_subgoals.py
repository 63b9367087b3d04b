"""Subgoals: their tokens, what is drawn and held out, when one counts as done."""
from __future__ import annotations

import numpy as np

from flashrt_core.tabletop.instructions import HELD_OUT_PAIRS
from flashrt_core.tabletop.subgoals import draw_goal
from flashrt_core.tabletop.subgoals import draw_puts
from flashrt_core.tabletop.subgoals import encode_subgoal
from flashrt_core.tabletop.subgoals import HELD_OUT_SPOTS_M
from flashrt_core.tabletop.subgoals import in_held_out_spot
from flashrt_core.tabletop.tasks import Goal
from flashrt_core.tabletop.world import World


def test_no_subgoal_has_no_tokens():
    assert encode_subgoal(None) == []


def test_puts_take_every_block_once_and_at_most_two_to_a_zone():
    rng = np.random.default_rng(0)
    for seed in range(40):
        state = World(seed, blocks=3, zones=2).snapshot()
        goals = draw_puts(rng, state)
        zones = [goal.zone for goal in goals]
        assert sorted(goal.block for goal in goals) == sorted(state.block_names)
        assert max(map(zones.count, zones)) <= 2


def test_pairs_seen_and_held_out_do_not_mix():
    rng, drawn = np.random.default_rng(0), {'seen': 0, 'held out': 0}
    for seed in range(60):
        state = World(seed, blocks=3, zones=3).snapshot()
        for pairs in drawn:
            goal = draw_goal(rng, state, 'put', pairs)
            if goal is not None:
                assert ((goal.block, goal.zone) in HELD_OUT_PAIRS) == (pairs == 'held out')
                drawn[pairs] += 1
    assert all(drawn.values())


def test_a_goal_that_holds_already_is_not_drawn():
    state = World(0, blocks=1, zones=1).snapshot()
    assert draw_goal(np.random.default_rng(0), state, 'home') is None
    assert draw_goal(np.random.default_rng(0), state, 'pick') == Goal(
        'pick', state.block_names[0])


def test_a_block_in_a_held_out_spot_is_seen():
    world = World(0, blocks=1, zones=1)
    world.move_block(world.snapshot().block_names[0], *HELD_OUT_SPOTS_M[0])
    assert in_held_out_spot(world.snapshot())
