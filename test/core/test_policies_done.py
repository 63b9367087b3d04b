"""A policy's own word that its subgoal is done."""
from __future__ import annotations

import numpy as np

from flashrt_core.policies.done import done_column
from flashrt_core.policies.done import DoneWatch
from flashrt_core.policies.protocol import Modality
from flashrt_core.policies.protocol import PortSpec


def port(unit: str) -> tuple[PortSpec, ...]:
    return (PortSpec('state', Modality.STATE, 'float32', (2,), 'probability rad'),
            PortSpec('action', Modality.ACTION, 'float32', (4, 3), unit))


def test_the_action_whose_unit_is_a_probability_says_it() -> None:
    assert done_column(port('rad 1 probability')) == 2
    assert done_column(port('rad')) is None
    assert done_column(()) is None


def test_a_subgoal_is_done_when_two_ticks_in_a_row_say_so() -> None:
    watch = DoneWatch(2)

    def actions(done: float) -> np.ndarray:
        found = np.zeros((4, 3), np.float32)
        found[0, 2] = done
        return found

    said = [watch.observe(actions(done)) for done in (0.9, 0.2, 0.8, 0.7, 0.6)]
    assert said == [False, False, False, True, True]
    watch.clear()
    assert not watch.observe(actions(1.0))
    assert not watch.observe(actions(float('nan'))) and not watch.observe(actions(1.0))
