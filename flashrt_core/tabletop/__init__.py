"""The built-in robot: a planar arm over coloured blocks and zones, seen by two cameras.

The expert is imported when it is asked for: an evaluation runs where it cannot be.
"""

from typing import Any

from flashrt_core.tabletop.commands import CommandPlayer
from flashrt_core.tabletop.commands import read_points
from flashrt_core.tabletop.filmstrip import draw_filmstrip
from flashrt_core.tabletop.filmstrip import encode_png
from flashrt_core.tabletop.filmstrip import frames_shown
from flashrt_core.tabletop.filmstrip import write_filmstrip
from flashrt_core.tabletop.kinematics import forward
from flashrt_core.tabletop.kinematics import HOME
from flashrt_core.tabletop.kinematics import inverse
from flashrt_core.tabletop.kinematics import JOINT_NAMES
from flashrt_core.tabletop.scene import render_state
from flashrt_core.tabletop.scene import VIEWS
from flashrt_core.tabletop.state import COLOURS
from flashrt_core.tabletop.state import VECTOR_SIZE
from flashrt_core.tabletop.state import WorldState
from flashrt_core.tabletop.tasks import format_task
from flashrt_core.tabletop.tasks import Goal
from flashrt_core.tabletop.tasks import goal_reached
from flashrt_core.tabletop.tasks import parse_task
from flashrt_core.tabletop.tasks import task_solved
from flashrt_core.tabletop.world import CONTROL_PERIOD_S
from flashrt_core.tabletop.world import World

__all__ = [
    'COLOURS',
    'CONTROL_PERIOD_S',
    'CommandPlayer',
    'Expert',
    'Goal',
    'HOME',
    'JOINT_NAMES',
    'VECTOR_SIZE',
    'VIEWS',
    'World',
    'WorldState',
    'draw_filmstrip',
    'encode_png',
    'expert_action',
    'format_task',
    'forward',
    'frames_shown',
    'goal_reached',
    'inverse',
    'parse_task',
    'read_points',
    'render_state',
    'task_solved',
    'write_filmstrip',
]


def __getattr__(name: str) -> Any:
    if name in ('Expert', 'expert_action'):
        from flashrt_core.tabletop import expert
        return getattr(expert, name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
