"""What becomes of the subgoals, as the executor knows it: one outcome for each of them."""

from collections.abc import Callable
import threading

from flashrt_core.policies.done import DoneWatch
from flashrt_core.policies.protocol import Chunk
from flashrt_ros.subgoals import DONE


class OutcomeReporter:
    """Tells done where the policy says so, failed and timed out as it is asked to.

    The first outcome of a subgoal stands; only a new epoch, which may have gone back to before it,
    asks anew. ``played`` on the tick thread, ``tell`` on any.

    :param column: of the action that says done; None for a policy that has none.
    :param publish: told sequence, outcome and reason, once for each subgoal and epoch.
    """

    def __init__(self, column: int | None, publish: Callable[[int, str, str], None]) -> None:
        self._watch = None if column is None else DoneWatch(column)
        self._publish = publish
        self._asked: tuple[int, int] = (-1, 0)  # epoch and sequence
        self._lock = threading.Lock()
        self._told: tuple[int, int] = (-1, 0)

    def played(self, chunk: Chunk, epoch: int) -> None:
        """Take a chunk that came into play; a new subgoal or epoch is asked about anew."""
        if self._watch is None or not chunk.subgoal_sequence:
            return
        if (epoch, chunk.subgoal_sequence) != self._asked:
            self._asked = (epoch, chunk.subgoal_sequence)
            self._watch.clear()
        if self._watch.observe(chunk.actions[0]):
            self.tell(chunk.subgoal_sequence, epoch, DONE, 'the policy says so')

    def tell(self, sequence: int, epoch: int, outcome: str, message: str) -> None:
        """Tell an outcome, unless one of this subgoal or a newer one was told in this epoch."""
        with self._lock:
            if self._told[0] == epoch and sequence <= self._told[1]:
                return
            self._told = (epoch, sequence)
        self._publish(sequence, outcome, message)
