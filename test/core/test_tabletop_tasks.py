"""The task grammar and when a task is done."""

from dataclasses import replace

import numpy as np
import pytest

from flashrt_core.errors import ParameterInvalid
from flashrt_core.tabletop.tasks import format_task
from flashrt_core.tabletop.tasks import Goal
from flashrt_core.tabletop.tasks import goal_reached
from flashrt_core.tabletop.tasks import parse_task
from flashrt_core.tabletop.tasks import task_solved
from flashrt_core.tabletop.world import World


@pytest.mark.parametrize('text', [
    'put the red block in the blue zone',
    'pick up the green block',
    'put the red block in the blue zone, then put the green block in the blue zone, then go home',
])
def test_a_task_reads_back_as_it_was_written(text):
    assert format_task(parse_task(text)) == text


@pytest.mark.parametrize(('text', 'named'), [
    ('', "''"),
    ('stack the red block', 'stack the red block'),
    ('put the pink block in the blue zone', 'pink'),
    ('put the red block in the blue zone, then', 'zone, then'),
    ('put the red block in the blue zone; go home', 'cannot read'),
])
def test_a_text_outside_the_grammar_is_refused_naming_it(text, named):
    with pytest.raises(ParameterInvalid, match=named):
        parse_task(text)


def test_a_task_for_what_is_not_on_the_table_names_what_is():
    world = World(1, 1)
    missing = next(c for c in ('red', 'blue') if c not in world.snapshot().block_names)
    before = world.task
    with pytest.raises(ParameterInvalid, match=world.snapshot().block_names[0]):
        world.set_task(f'pick up the {missing} block')
    assert world.task == before


def _with_block_in_zone(held: int = -1):
    state = World(4, 2, zones=2).snapshot()
    blocks = state.blocks.copy()
    blocks[0, :2] = state.zones[1]
    return replace(state, blocks=blocks, held=held)


def test_a_block_is_put_once_it_lies_in_the_zone_and_is_let_go():
    state = _with_block_in_zone()
    goal = Goal('put', state.block_names[0], state.zone_names[1])
    assert goal_reached(goal, state)
    assert not goal_reached(goal, replace(state, held=0))
    assert not goal_reached(replace(goal, zone=state.zone_names[0]), state)
    assert not goal_reached(replace(goal, block=state.block_names[1]), state)


def test_a_block_is_picked_up_once_it_is_held_and_lifted():
    state = _with_block_in_zone(held=0)
    goal = Goal('pick', state.block_names[0])
    assert goal_reached(goal, replace(state, lift=1.0))
    assert not goal_reached(goal, replace(state, lift=0.5))
    assert not goal_reached(goal, replace(state, held=-1, lift=1.0))


def test_a_sequence_is_solved_when_all_its_blocks_lie_right_and_its_last_goal_holds():
    state = _with_block_in_zone()
    put = Goal('put', state.block_names[0], state.zone_names[1])
    home = Goal('home')
    away = replace(state, joints=state.joints + np.array([0.5, 0.0, 0.0, 0.0]))
    assert task_solved((put, home), state)
    assert not task_solved((put, home), away)
    assert task_solved((home, put), away)
    other = Goal('put', state.block_names[1], state.zone_names[1])
    assert not task_solved((other, put), state)
