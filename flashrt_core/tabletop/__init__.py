"""The built-in robot: a planar arm over coloured blocks and zones, seen by two cameras."""

from flashrt_core.tabletop.commands import CommandPlayer, read_points
from flashrt_core.tabletop.expert import Expert, expert_action
from flashrt_core.tabletop.filmstrip import draw_filmstrip, encode_png, write_filmstrip
from flashrt_core.tabletop.kinematics import HOME, JOINT_NAMES, forward, inverse
from flashrt_core.tabletop.scene import VIEWS, render_state
from flashrt_core.tabletop.state import COLOURS, VECTOR_SIZE, WorldState
from flashrt_core.tabletop.tasks import Goal, format_task, goal_reached, parse_task, task_solved
from flashrt_core.tabletop.world import CONTROL_PERIOD_S, World

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
    'goal_reached',
    'inverse',
    'parse_task',
    'read_points',
    'render_state',
    'task_solved',
    'write_filmstrip',
]
