"""A policy that says itself when its subgoal is done: one of its actions is a probability."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flashrt_core.policies.protocol import Modality
from flashrt_core.policies.protocol import PortSpec

UNIT = 'probability'  # of the action that says it
TICKS_IN_A_ROW = 2    # that must say done


def done_column(ports: Sequence[PortSpec]) -> int | None:
    """Return which action says whether the subgoal is done, None where none does.

    It is the one whose unit is ``probability``; a port's units are listed one an action.
    """
    units = next((p.unit.split() for p in ports if p.modality is Modality.ACTION), [])
    return units.index(UNIT) if UNIT in units else None


class DoneWatch:
    """Decides from a policy's chunks when a subgoal is done; one thread.

    :param column: of the action that says it, see ``done_column``.
    """

    def __init__(self, column: int) -> None:
        self._column = column
        self.clear()

    def clear(self) -> None:
        """Forget what was said, as for a new subgoal."""
        self._said = 0

    def observe(self, actions: NDArray[np.float32]) -> bool:
        """Take one tick's actions ``[horizon, > column]``; return whether the subgoal is done.

        Two ticks in a row must say so of the state they saw: one alone is now and then wrong
        while the arm comes to rest.
        """
        self._said = self._said + 1 if actions[0, self._column] > 0.5 else 0
        return self._said >= TICKS_IN_A_ROW
