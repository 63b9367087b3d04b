"""A table drawn from a seed: where blocks and zones lie, their colours, and a task for them."""

import math

import numpy as np

from flashrt_core.errors import ParameterInvalid
from flashrt_core.tabletop.contacts import TRAY_X_M
from flashrt_core.tabletop.contacts import TRAY_Y_M
from flashrt_core.tabletop.kinematics import HOME
from flashrt_core.tabletop.state import COLOURS
from flashrt_core.tabletop.state import MAX_BLOCKS
from flashrt_core.tabletop.state import MAX_ZONES
from flashrt_core.tabletop.state import WorldState
from flashrt_core.tabletop.state import ZONE_RADIUS_M
from flashrt_core.tabletop.tasks import Goal

_BLOCK_MARGIN_M = 0.05
_ZONE_MARGIN_M = ZONE_RADIUS_M + 0.008
_BLOCK_GAP_M = 0.11  # between block centres: room for a finger
_ZONE_GAP_M = 2 * ZONE_RADIUS_M + 0.012
_BLOCK_ZONE_GAP_M = ZONE_RADIUS_M + 0.042
_TRIES = 200


def draw_layout(seed: int, blocks: int, zones: int) -> tuple[WorldState, tuple[Goal, ...]]:
    """Return the state of a new table with the arm at home, and a task for it.

    Only ``Generator.random`` is drawn from, whose stream NumPy keeps.

    :raises ParameterInvalid: a number is out of range.
    """
    _check_range('seed', seed, 0, 2**64 - 1)
    _check_range('blocks', blocks, 1, MAX_BLOCKS)
    _check_range('zones', zones, 1, MAX_ZONES)
    rng = np.random.Generator(np.random.PCG64(seed))
    positions = None
    while positions is None:
        positions = _place(rng, blocks, zones)
    block_colours = _draw_colours(rng, blocks)
    zone_colours = _draw_colours(rng, zones)
    angles = (rng.random(blocks) - 0.5) * (math.pi / 2)
    state = WorldState(
        joints=np.array(HOME),
        velocities=np.zeros(4),
        lift=1.0,
        held=-1,
        grip=np.zeros(3),
        step=0,
        blocks=np.column_stack([positions[zones:], angles]),
        block_colours=block_colours,
        zones=positions[:zones].copy(),
        zone_colours=zone_colours,
    )
    block, zone = int(rng.random() * blocks), int(rng.random() * zones)
    return state, (Goal('put', state.block_names[block], state.zone_names[zone]),)


def _place(rng: np.random.Generator, blocks: int, zones: int) -> np.ndarray | None:
    """Return zone then block centres ``[zones + blocks, 2]``, None where the table filled up."""
    placed: list[tuple[float, float]] = []
    for index in range(zones + blocks):
        is_zone = index < zones
        for _ in range(_TRIES):
            point = _draw_point(rng, _ZONE_MARGIN_M if is_zone else _BLOCK_MARGIN_M)
            if all(
                math.dist(point, other) >= _gap(is_zone, at < zones)
                for at, other in enumerate(placed)
            ):
                placed.append(point)
                break
        else:
            return None
    return np.array(placed)


def _gap(is_zone: bool, other_is_zone: bool) -> float:
    if is_zone and other_is_zone:
        return _ZONE_GAP_M
    return _BLOCK_ZONE_GAP_M if is_zone or other_is_zone else _BLOCK_GAP_M


def _draw_point(rng: np.random.Generator, margin: float) -> tuple[float, float]:
    low_x, high_x = TRAY_X_M[0] + margin, TRAY_X_M[1] - margin
    low_y, high_y = TRAY_Y_M[0] + margin, TRAY_Y_M[1] - margin
    u, v = rng.random(2)
    return float(low_x + u * (high_x - low_x)), float(low_y + v * (high_y - low_y))


def _draw_colours(rng: np.random.Generator, count: int) -> tuple[int, ...]:
    return tuple(int(index) for index in np.argsort(rng.random(len(COLOURS)))[:count])


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, int) or not low <= value <= high:
        raise ParameterInvalid(f'{name} is {value!r}; give a whole number from {low} to {high}')
