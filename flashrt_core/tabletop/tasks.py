"""What the robot is told, and when it is done: a small grammar over colours.

``task := goal {", then " goal}``
``goal := "put the C block in the C zone" | "pick up the C block" | "go home"``
"""

from dataclasses import dataclass
import math
import re
from typing import Literal

from flashrt_core.errors import ParameterInvalid
from flashrt_core.tabletop.kinematics import HOME
from flashrt_core.tabletop.state import COLOURS
from flashrt_core.tabletop.state import IN_ZONE_M
from flashrt_core.tabletop.state import WorldState

_PUT = re.compile(r'put the (\w+) block in the (\w+) zone')
_PICK = re.compile(r'pick up the (\w+) block')
_HOME_TEXT = 'go home'
_HOME_TOLERANCE_RAD = 0.06
_EXAMPLE = '"put the red block in the blue zone, then go home"'


@dataclass(frozen=True)
class Goal:
    """One part of a task; ``block`` and ``zone`` are colour names, empty where the verb takes
    none.
    """

    verb: Literal['put', 'pick', 'home']
    block: str = ''
    zone: str = ''

    def __str__(self) -> str:
        if self.verb == 'put':
            return f'put the {self.block} block in the {self.zone} zone'
        if self.verb == 'pick':
            return f'pick up the {self.block} block'
        return _HOME_TEXT


def parse_task(text: str) -> tuple[Goal, ...]:
    """Return the goals of a task in order.

    :raises ParameterInvalid: the text is not of the grammar or names an unknown colour.
    """
    if not isinstance(text, str):
        raise ParameterInvalid(f'task is {text!r:.80}; give text')
    return tuple(_parse_goal(part.strip(), text) for part in text.strip().split(', then '))


def format_task(goals: tuple[Goal, ...]) -> str:
    """Return the text that ``parse_task`` reads back to the same goals."""
    return ', then '.join(str(goal) for goal in goals)


def check_task(goals: tuple[Goal, ...], state: WorldState) -> None:
    """Refuse a task that names what is not on the table.

    :raises ParameterInvalid: a block or zone of that colour does not exist in this world.
    """
    for goal in goals:
        if goal.block and state.block_index(goal.block) is None:
            raise ParameterInvalid(
                f'task {str(goal)!r}: no {goal.block} block on the table; '
                f'there are {", ".join(state.block_names)}'
            )
        if goal.zone and state.zone_index(goal.zone) is None:
            raise ParameterInvalid(
                f'task {str(goal)!r}: no {goal.zone} zone on the table; '
                f'there are {", ".join(state.zone_names)}'
            )


def goal_reached(goal: Goal, state: WorldState) -> bool:
    """Say whether one goal holds in this state.

    put: the block's centre lies in the zone (``IN_ZONE_M``) and it is not held. pick: it is held
    and lifted. home: every joint is within 0.06 rad of home and the gripper is open.
    """
    if goal.verb == 'home':
        near = all(
            abs(joint - home) < _HOME_TOLERANCE_RAD
            for joint, home in zip(state.joints, HOME, strict=True)
        )
        return near and state.held < 0
    block = state.block_index(goal.block)
    if block is None:
        return False
    if goal.verb == 'pick':
        return state.held == block and state.lift > 0.9
    zone = state.zone_index(goal.zone)
    return zone is not None and state.held != block and in_zone(state, block, zone)


def in_zone(state: WorldState, block: int, zone: int) -> bool:
    """Say whether the block's centre lies well inside the zone."""
    x, y = state.blocks[block, :2] - state.zones[zone]
    return math.hypot(x, y) <= IN_ZONE_M


def task_solved(goals: tuple[Goal, ...], state: WorldState) -> bool:
    """Say whether a task is done: all its put goals hold, and so does its last goal."""
    needed = [goal for goal in goals if goal.verb == 'put'] + [goals[-1]]
    return all(goal_reached(goal, state) for goal in needed)


def _parse_goal(part: str, text: str) -> Goal:
    if part == _HOME_TEXT:
        return Goal('home')
    if match := _PUT.fullmatch(part):
        return Goal('put', _colour(match[1], text), _colour(match[2], text))
    if match := _PICK.fullmatch(part):
        return Goal('pick', _colour(match[1], text))
    raise ParameterInvalid(f'task {text!r}: cannot read {part!r}; write it like {_EXAMPLE}')


def _colour(name: str, text: str) -> str:
    if name not in COLOURS:
        raise ParameterInvalid(
            f'task {text!r}: unknown colour {name!r}; the colours are {", ".join(COLOURS)}'
        )
    return name
