"""Says when a subgoal is done, where the policy knows: one outcome for each subgoal."""

from collections.abc import Callable

from flashrt_core.policies.done import DoneWatch
from flashrt_core.policies.protocol import Chunk


class DoneReporter:
    """Watches the chunks that are put into play; tick thread.

    :param column: of the action that says it; None for a policy that has none.
    :param tell: told the sequence of a subgoal that is done, once.
    """

    def __init__(self, column: int | None, tell: Callable[[int], None]) -> None:
        self._watch = None if column is None else DoneWatch(column)
        self._tell = tell
        self._asked: tuple[int, int] = (-1, 0)  # epoch and sequence
        self._told = False

    def played(self, chunk: Chunk, epoch: int) -> None:
        """Take a chunk that came into play; a new subgoal or epoch is asked about anew."""
        if self._watch is None or not chunk.subgoal_sequence:
            return
        if (epoch, chunk.subgoal_sequence) != self._asked:
            self._asked, self._told = (epoch, chunk.subgoal_sequence), False
            self._watch.clear()
        if self._watch.observe(chunk.actions[0]) and not self._told:
            self._told = True
            self._tell(chunk.subgoal_sequence)
