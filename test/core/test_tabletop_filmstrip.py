"""Film strips."""

import cv2
import numpy as np
import pytest

from flashrt_core.errors import ParameterInvalid
from flashrt_core.tabletop.expert import Expert
from flashrt_core.tabletop.filmstrip import draw_filmstrip
from flashrt_core.tabletop.filmstrip import frames_shown
from flashrt_core.tabletop.filmstrip import write_filmstrip
from flashrt_core.tabletop.world import World


def _run(steps: int) -> list:
    world = World(3, 2)
    states = [world.snapshot()]
    for _ in range(steps):
        world.step(Expert(world).action())
        states.append(world.snapshot())
    return states


def test_a_strip_shows_first_and_last_state_and_comes_back_from_its_png(tmp_path):
    states = _run(60)
    strip = draw_filmstrip(states, frames=5, views=('top', 'wrist'), size=80)
    shown = strip[6:86, 6:86]
    assert strip.shape == (2 * 86 + 26, 5 * 86 + 6, 3)
    assert not np.array_equal(shown, strip[6:86, 6 + 4 * 86:86 + 4 * 86])
    assert np.array_equal(shown, draw_filmstrip(states[:1], frames=1, size=80)[6:86, 6:86])
    path = tmp_path / 'strip.png'
    write_filmstrip(path, strip)
    assert np.array_equal(cv2.imread(str(path))[:, :, ::-1], strip)


def test_fewer_states_than_frames_make_a_shorter_strip():
    assert draw_filmstrip(_run(2), frames=9, size=80).shape[1] == 3 * 86 + 6


def test_a_strip_without_captions_has_the_same_frames_and_no_room_below():
    states = _run(9)
    plain, captioned = (draw_filmstrip(states, frames=4, size=80, captions=c) for c in ((), None))
    assert plain.shape == (92, 4 * 86 + 6, 3)
    assert np.array_equal(plain[:86], captioned[:86])


def test_the_frames_that_a_strip_shows_are_told():
    states = _run(9)
    shown = frames_shown(len(states), 4)
    assert shown == [0, 3, 6, 9]
    whole = draw_filmstrip(states, frames=4, size=80, captions=())
    few = draw_filmstrip([states[i] for i in shown], frames=4, size=80, captions=())
    assert np.array_equal(whole, few)
    assert frames_shown(2, 9) == [0, 1]


@pytest.mark.parametrize(('arguments', 'named'), [
    ({'states': []}, '0 states'), ({'frames': 0}, '0 frames'), ({'views': ()}, '0 views'),
    ({'captions': ['one', 'two']}, '2 captions'),
])
def test_a_strip_of_nothing_is_refused(arguments, named):
    with pytest.raises(ParameterInvalid, match=named):
        draw_filmstrip(**{'states': [World(0).snapshot()], **arguments})
