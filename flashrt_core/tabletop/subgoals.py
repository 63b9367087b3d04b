"""Subgoals as the small policy reads them, how they are drawn, and when one counts as done.

A subgoal is a ``tasks.Goal``; its text fills the policy's subgoal slot (or, to the same effect,
its prompt slot). The policy says itself when it is done: the last action is a probability.
"""

from collections.abc import Sequence
import math

import numpy as np

from flashrt_core.policies.text import WordTokenizer
from flashrt_core.tabletop.instructions import HELD_OUT_PAIRS
from flashrt_core.tabletop.kinematics import HOME
from flashrt_core.tabletop.state import WorldState
from flashrt_core.tabletop.tasks import Goal
from flashrt_core.tabletop.tasks import goal_reached

SLOTS = 8  # text tokens of the longest subgoal
DONE = 4  # the action that says, from 0 to 1, whether the subgoal holds
REPLAN = 8  # steps of a chunk that are played
CAMERA = 224  # width and height that a camera sends; the policy letterboxes them to its own size
_AT_HOME_RAD = 0.03
_LAID_M = 0.05

# No table of the training set has a block whose centre lies in one of these discs at the start.
HELD_OUT_SPOTS_M = ((0.36, 0.16), (0.52, -0.12))
HELD_OUT_RADIUS_M = 0.04
MOST_IN_A_ZONE = 2
_WORDS = WordTokenizer()


def encode_subgoal(goal: Goal | None) -> list[int]:
    """Return the token ids of a subgoal, at most ``SLOTS``; none for no subgoal."""
    return [] if goal is None else _WORDS.encode(str(goal), SLOTS)


def in_held_out_spot(state: WorldState) -> bool:
    """Say whether a block lies where no block of a training table lies at the start."""
    return any(
        math.dist(block, spot) < HELD_OUT_RADIUS_M
        for block in state.blocks[:, :2].tolist()
        for spot in HELD_OUT_SPOTS_M
    )


def draw_goal(
    rng: np.random.Generator,
    state: WorldState,
    verb: str = '',
    pairs: str = 'any',
) -> Goal | None:
    """Draw a subgoal for this table that does not hold yet, None where there is none.

    :param verb: 'put', 'pick' or 'home'; empty draws one.
    :param pairs: of block and zone colour: 'any', 'seen' in training, or 'held out'.
    """
    chosen = verb or ('put', 'put', 'pick', 'home')[int(rng.random() * 4)]
    goals = [goal for goal in _goals(state, chosen, pairs) if not goal_reached(goal, state)]
    return goals[int(rng.random() * len(goals))] if goals else None


def settled(goal: Goal | None, state: WorldState) -> bool:
    """Say whether a policy is to call the subgoal done: it holds, with room for an error of sight.

    put: laid down within 5 cm of the zone's centre, the fingers open and off the block. home: each
    joint within 0.03 rad. Without a subgoal nothing is ever done.
    """
    if goal is None or not goal_reached(goal, state):
        return False
    if goal.verb == 'home':
        return bool(np.abs(state.joints - HOME).max() < _AT_HOME_RAD)
    block, zone = state.block_index(goal.block), state.zone_index(goal.zone)
    if block is None or zone is None:
        return True
    away = math.dist(state.blocks[block, :2], state.zones[zone])
    return away < _LAID_M and state.lift > 0.9 and bool(state.joints[3] < 0.25)


def _goals(state: WorldState, verb: str, pairs: str) -> Sequence[Goal]:
    if verb == 'home':
        return [Goal('home')]
    if verb == 'pick':
        return [Goal('pick', block) for block in state.block_names]
    wanted = {'any': (True, False), 'seen': (False,), 'held out': (True,)}[pairs]
    return [
        Goal('put', block, zone)
        for block in state.block_names
        for zone in state.zone_names
        if ((block, zone) in HELD_OUT_PAIRS) in wanted and _has_room(state, block, zone)
    ]


def _has_room(state: WorldState, block: str, zone: str) -> bool:
    others = [Goal('put', other, zone) for other in state.block_names if other != block]
    return sum(goal_reached(goal, state) for goal in others) < MOST_IN_A_ZONE
