"""A scripted teacher: what to command now, read off the present state alone.

``expert_action`` keeps no memory, so it can label any state, also those another policy went to,
and it recovers from a slipped block, a missed grasp or a displaced arm by seeing them.
"""

from collections.abc import Sequence
import math

import numpy as np
from numpy.typing import NDArray

from flashrt_core.errors import ActionOutOfLimits
from flashrt_core.tabletop import kinematics
from flashrt_core.tabletop.kinematics import FINGER_RADIUS_M
from flashrt_core.tabletop.kinematics import OPEN_WIDTH_M
from flashrt_core.tabletop.state import WorldState
from flashrt_core.tabletop.state import ZONE_RADIUS_M
from flashrt_core.tabletop.tasks import Goal
from flashrt_core.tabletop.tasks import goal_reached
from flashrt_core.tabletop.world import HOLD_GRIPPER
from flashrt_core.tabletop.world import World

_OVER_M = 0.007  # close enough to close or open the fingers
_LEAD_AT_REST_RAD = 0.03  # how far a target runs ahead of the measured joints ...
_LEAD_S = 0.06  # ... and how much further per rad/s
_BRAKING_S = 0.05
_YAWS = (0.0, 0.5, -0.5, 0.9, -0.9)  # tried in this order, away from pointing straight out
_CLEARANCE_M = 0.045  # between a finger and the centre of a block that is in its way
_SPOTS = 8
_SPOT_M = 0.035  # how far off a zone's centre a block is laid beside another
_LAID_M = 0.05  # fingers that open this near a zone's centre go on opening

Joints = tuple[float, float, float]


class Expert:
    """The teacher bound to a world's task."""

    def __init__(self, world: World) -> None:
        """Teach in ``world``; it is read, never changed."""
        self._world = world

    def action(self) -> NDArray[np.float64]:
        """Return the joint target of the next step, float64 ``[4]``."""
        return expert_action(self._world.snapshot(), self._world.goals)


def expert_action(state: WorldState, goals: Sequence[Goal]) -> NDArray[np.float64]:
    """Return the joint target, float64 ``[4]``, that works on the first goal not reached yet.

    With all goals reached the arm opens, rises and goes home, holding on to a block it was to pick
    up. With no goal at all it stands still and keeps what it holds.
    """
    if not goals:
        return _target(_here(state), 1.0 if state.held >= 0 else float(state.joints[3]))
    for goal in goals:
        if goal_reached(goal, state):
            continue
        if goal.verb == 'home':
            return _retreat(state)
        block = state.block_index(goal.block)
        if block is None:
            continue
        if state.held != block:
            return _fetch(state, block)
        zone = state.zone_index(goal.zone)
        if goal.verb == 'pick' or zone is None:
            return _target(_here(state), 1.0)
        return _deliver(state, block, zone)
    if goals[-1].verb == 'pick':
        return _target(_here(state), 1.0)
    return _retreat(state)


def _retreat(state: WorldState) -> NDArray[np.float64]:
    if not _is_clear(state):
        return _target(_here(state), 0.0)
    return _target(_towards(state, kinematics.HOME[:3]), 0.0)


def _fetch(state: WorldState, block: int) -> NDArray[np.float64]:
    x, y = state.blocks[block, :2].tolist()
    goal = _approach(state, block, x, y)
    if _distance(state, x, y) > _OVER_M or _yaw_error(state, goal) > 0.15:
        if not _is_clear(state):
            return _target(_here(state), 0.0)
        return _target(_towards(state, goal), 0.0)
    gripper, speed = float(state.joints[3]), float(state.velocities[3])
    missed = gripper > HOLD_GRIPPER
    opening_or_stalled = speed < 0.01 and gripper > 0.02
    return _target(goal, 0.0 if missed or opening_or_stalled else 1.0)


def _deliver(state: WorldState, block: int, zone: int) -> NDArray[np.float64]:
    x, y = _free_spot(state, block, zone)
    block_x, block_y = state.blocks[block, :2].tolist()
    tool = kinematics.forward(state.joints.tolist())
    goal = _reach(x + tool.x - block_x, y + tool.y - block_y)
    still = max(abs(velocity) for velocity in state.velocities[:3]) < 0.25
    if math.hypot(x - block_x, y - block_y) <= _OVER_M and still:
        return _target(goal, 0.0)
    if state.joints[3] < HOLD_GRIPPER - 0.02 and _distance_in_zone(state, block, zone) < _LAID_M:
        return _target(_here(state), 0.0)
    return _target(_towards(state, goal), 1.0)


def _approach(state: WorldState, block: int, x: float, y: float) -> Joints:
    """Return the pose over a block whose fingers come down clear of the other blocks."""
    outward = math.atan2(y, x)
    best, best_room = None, -math.inf
    for turn in _YAWS:
        try:
            joints = kinematics.inverse(x, y, outward + turn)
        except ActionOutOfLimits:
            continue
        room = _finger_room(state, block, x, y, outward + turn)
        if room >= _CLEARANCE_M:
            return joints
        if room > best_room:
            best, best_room = joints, room
    return best if best is not None else _reach(x, y)


def _finger_room(state: WorldState, block: int, x: float, y: float, yaw: float) -> float:
    across = OPEN_WIDTH_M / 2 + FINGER_RADIUS_M
    room = math.inf
    for side in (-across, across):
        finger = (x - math.sin(yaw) * side, y + math.cos(yaw) * side)
        for index, other in enumerate(state.blocks.tolist()):
            if index != block:
                room = min(room, math.dist(finger, other[:2]))
    return room


def _free_spot(state: WorldState, block: int, zone: int) -> tuple[float, float]:
    """Return the point in the zone furthest from other blocks, its centre if none is near."""
    x, y = state.zones[zone].tolist()
    others = [b[:2] for index, b in enumerate(state.blocks.tolist()) if index != block]
    near = [other for other in others if math.dist(other, (x, y)) < 2 * ZONE_RADIUS_M]
    spots = [(x, y)] + [
        (x + _SPOT_M * math.cos(angle), y + _SPOT_M * math.sin(angle))
        for angle in (2 * math.pi * index / _SPOTS for index in range(_SPOTS))
    ]
    if all(math.dist(other, (x, y)) > 0.085 for other in near):
        return spots[0]
    return max(spots, key=lambda spot: min(math.dist(spot, other) for other in near))


def _reach(x: float, y: float) -> Joints:
    """Return joints for a point, pulled towards the middle of the table if out of reach."""
    for pull in (0.0, 0.1, 0.2, 0.4, 0.8):
        try:
            return kinematics.inverse(x + pull * (0.42 - x), y - pull * y)
        except ActionOutOfLimits:
            continue
    return kinematics.inverse(0.42, 0.0)


def _towards(state: WorldState, goal: Sequence[float]) -> Joints:
    """Return a target on the straight joint path to ``goal``, ahead of the arm by what it can
    follow.
    """
    here = state.joints[:3].tolist()
    errors = [aim - at for aim, at in zip(goal, here, strict=True)]
    longest = max(abs(error) for error in errors)
    speed = max(abs(velocity) for velocity in state.velocities[:3].tolist())
    lead = _LEAD_AT_REST_RAD + _LEAD_S * speed
    share = 1.0 if longest <= lead else lead / longest
    shoulder, elbow, wrist = (at + share * error for at, error in zip(here, errors, strict=True))
    return shoulder, elbow, wrist


def _here(state: WorldState) -> Joints:
    """Return where the arm comes to rest when it brakes now."""
    shoulder, elbow, wrist = (state.joints[:3] + _BRAKING_S * state.velocities[:3]).tolist()
    return shoulder, elbow, wrist


def _is_clear(state: WorldState) -> bool:
    """Say whether the fingers are open and above the blocks, so that the arm may travel."""
    return state.held < 0 and state.lift > 0.7 and state.joints[3] < 0.25


def _distance(state: WorldState, x: float, y: float) -> float:
    tool = kinematics.forward(state.joints.tolist())
    return math.hypot(x - tool.x, y - tool.y)


def _distance_in_zone(state: WorldState, block: int, zone: int) -> float:
    x, y = (state.blocks[block, :2] - state.zones[zone]).tolist()
    return math.hypot(x, y)


def _yaw_error(state: WorldState, goal: Joints) -> float:
    return abs(kinematics.wrap_angle(sum(goal) - float(state.joints[:3].sum())))


def _target(joints: Joints, gripper: float) -> NDArray[np.float64]:
    return np.array([*joints, gripper])
