"""What the cameras see."""

from dataclasses import replace

import numpy as np
import pytest

from flashrt_core.errors import ParameterInvalid
from flashrt_core.tabletop.scene import PAINT
from flashrt_core.tabletop.scene import render_state
from flashrt_core.tabletop.state import COLOURS
from flashrt_core.tabletop.world import World


def _amount(image: np.ndarray, colour: int) -> int:
    """Return how many pixels are close to a block's paint."""
    return int((np.abs(image.astype(int) - PAINT[colour]).sum(-1) < 40).sum())


@pytest.mark.parametrize('view', ['top', 'wrist'])
@pytest.mark.parametrize('size', [16, 64, 97, 224])
def test_a_view_is_an_rgb_image_of_its_size_and_the_same_each_time(view, size):
    world = World(7, 3)
    image = world.render(view, size)
    assert image.shape == (size, size, 3)
    assert image.dtype == np.uint8
    assert image.flags.c_contiguous and image.flags.writeable
    assert np.array_equal(image, world.render(view, size))


@pytest.mark.parametrize('colour', range(len(COLOURS)))
@pytest.mark.parametrize('size', [64, 224])
def test_each_colour_of_block_shows_where_it_lies_and_no_other_does(colour, size):
    state = World(7, 1, zones=1).snapshot()
    state = replace(state, block_colours=(colour,), zone_colours=((colour + 3) % 6,))
    image = render_state(state, 'top', size)
    seen = [_amount(image, other) for other in range(len(COLOURS))]
    assert seen[colour] >= 3 * (size / 64) ** 2
    for other in range(len(COLOURS)):
        if other not in (colour, (colour + 3) % 6):
            assert seen[other] == 0


@pytest.mark.parametrize('change', ['joints', 'gripper', 'block', 'zone'])
def test_what_moves_is_seen_from_above(change):
    state = World(7, 1).snapshot()
    other = {
        'joints': replace(state, joints=state.joints + np.array([0.05, 0.0, 0.0, 0.0])),
        'gripper': replace(state, joints=state.joints + np.array([0.0, 0.0, 0.0, 0.3])),
        'block': replace(state, blocks=state.blocks + np.array([0.01, 0.0, 0.0])),
        'zone': replace(state, zones=state.zones + np.array([0.0, 0.01])),
    }[change]
    assert (render_state(state, 'top', 64) != render_state(other, 'top', 64)).sum() > 20


def test_the_wrist_camera_turns_with_the_tool_and_keeps_the_fingers_in_place():
    state = World(7, 1).snapshot()
    turned = replace(state, joints=state.joints + np.array([0.3, 0.0, 0.0, 0.0]))
    first, second = render_state(state, 'wrist', 96), render_state(turned, 'wrist', 96)
    dark_first, dark_second = ((image.sum(-1) < 160) for image in (first, second))
    assert dark_first.sum() > 300
    assert (dark_first != dark_second).sum() < 0.1 * dark_first.sum()
    assert not np.array_equal(first, second)


@pytest.mark.parametrize(('view', 'size', 'named'), [
    ('side', 64, 'side'), ('top', 8, '8'), ('top', 5000, '5000'),
])
def test_a_view_that_does_not_exist_is_refused(view, size, named):
    with pytest.raises(ParameterInvalid, match=named):
        World(0).render(view, size)
