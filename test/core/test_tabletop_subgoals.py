"""Subgoals: their tokens, what is drawn and held out, when one counts as done."""
from __future__ import annotations

import numpy as np

from flashrt_core.tabletop.instructions import HELD_OUT_PAIRS
from flashrt_core.tabletop.kinematics import HOME
from flashrt_core.tabletop.subgoals import draw_goal
from flashrt_core.tabletop.subgoals import encode_subgoal
from flashrt_core.tabletop.subgoals import HELD_OUT_SPOTS_M
from flashrt_core.tabletop.subgoals import in_held_out_spot
from flashrt_core.tabletop.subgoals import settled
from flashrt_core.tabletop.tasks import Goal
from flashrt_core.tabletop.tasks import goal_reached
from flashrt_core.tabletop.world import World


def test_no_subgoal_has_no_tokens():
    assert encode_subgoal(None) == []


def test_a_goal_is_settled_only_where_it_holds_with_room_to_spare():
    world = World(4, blocks=1, zones=1)
    state = world.snapshot()
    goal, (x, y) = Goal('put', state.block_names[0], state.zone_names[0]), state.zones[0].tolist()
    inwards = 1 if x < 0.43 else -1  # away from the rim, which pushes blocks back
    for away, reached, done in ((0.02, True, True), (0.054, True, False), (0.07, False, False)):
        world.move_block(goal.block, x + inwards * away, y)
        state = world.snapshot()
        assert (goal_reached(goal, state), settled(goal, state)) == (reached, done)
    world.move_block(goal.block, x, y)
    world.displace([*HOME[:3], 0.6])
    assert goal_reached(goal, world.snapshot()) and not settled(goal, world.snapshot())
    world.displace(np.array(HOME) + (0.045, 0, 0, 0))
    assert goal_reached(Goal('home'), world.snapshot())
    assert not settled(Goal('home'), world.snapshot())
    world.displace(HOME)
    assert settled(Goal('home'), world.snapshot()) and not settled(None, world.snapshot())


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
