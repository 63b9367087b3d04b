"""World states as vectors."""

import numpy as np
import pytest

from flashrt_core.errors import BadSize
from flashrt_core.tabletop.expert import Expert
from flashrt_core.tabletop.scene import render_state
from flashrt_core.tabletop.state import VECTOR_SIZE
from flashrt_core.tabletop.state import WorldState
from flashrt_core.tabletop.world import World


def _midway(steps: int) -> WorldState:
    world = World(5, 2, zones=3)
    teacher = Expert(world)
    for _ in range(steps):
        world.step(teacher.action())
    return world.snapshot()


@pytest.mark.parametrize('steps', [0, 37, 60])
def test_a_state_comes_back_from_its_vector_bit_for_bit_and_draws_the_same(steps):
    state = _midway(steps)
    vector = state.to_vector()
    again = WorldState.from_vector(vector)
    assert vector.shape == (VECTOR_SIZE,) and vector.dtype == np.float64
    assert again.to_vector().tobytes() == vector.tobytes()
    assert again.block_names == state.block_names
    for view in ('top', 'wrist'):
        assert np.array_equal(render_state(again, view, 96), render_state(state, view, 96))


def test_a_state_shares_no_memory_with_its_vector():
    vector = _midway(3).to_vector()
    state = WorldState.from_vector(vector)
    before = state.to_vector()
    vector[:] = 0.0
    assert np.array_equal(state.to_vector(), before)


@pytest.mark.parametrize(
    ('index', 'value'),
    [(0, np.nan), (9, 2.0), (9, -2.0), (14, 4.0), (14, -1.0), (15, 9.0), (19, 6.0)],
    ids=['nan', 'held', 'held below', 'blocks', 'blocks below', 'zones', 'colour'],
)
def test_a_vector_that_is_no_state_is_refused(index, value):
    vector = _midway(0).to_vector()
    vector[index] = value
    with pytest.raises(BadSize, match='world state vector'):
        WorldState.from_vector(vector)


def test_a_vector_of_another_size_is_refused():
    with pytest.raises(BadSize, match=r'\(3,\)'):
        WorldState.from_vector(np.zeros(3))
