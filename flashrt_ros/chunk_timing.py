"""How old the actions are that the steps play, and how late the next chunk will be; in steps.

The age of a step's action is the number of steps played since the observation it was made from:
its index in its chunk. With a tick every p steps and a delay of d, ages below p + d are planned.
"""

from collections import deque

from flashrt_ros.statistics import Ring
from flashrt_ros.statistics import Summary


class ChunkTiming:
    """Counts what a player plays; written under its lock, read by any thread."""

    def __init__(self, delay_window: int = 8) -> None:
        """Start without a chunk.

        :param delay_window: chunks whose measured delay the next one is expected from.
        """
        self._delays: deque[int] = deque(maxlen=max(1, delay_window))
        self._ages = Ring(8192)
        self._last_position = -1
        self.planned_age = 0  # ages from here on are older than planned; 0: nothing is planned
        self.steps = 0
        self.older_than_planned = 0
        self.repeated = 0  # steps of the plan that were played a second time
        self.skipped = 0  # steps of the plan that were never played
        self.starved = 0  # periods in which a used-up chunk gave no action
        self.late_chunks = 0  # that came into play later than expected

    @property
    def expected_delay(self) -> int:
        """Steps that will pass before the next chunk comes into play.

        The largest delay of the last few chunks: one that comes sooner repeats steps as they were
        played, one that comes later would jump over its seam.
        """
        return max(self._delays, default=0)

    def spliced(self, delay: int) -> None:
        """Note the measured delay of a chunk that comes into play."""
        self.late_chunks += bool(self._delays) and delay > self.expected_delay
        self._delays.append(delay)

    def played(self, position: int, age: int) -> None:
        """Note a step.

        :param position: of the action on the axis of executed steps.
        :param age: its index in its chunk.
        """
        last, self._last_position = self._last_position, position
        if last >= 0:
            self.repeated += position <= last
            self.skipped += max(position - last - 1, 0)
        self.steps += 1
        self.older_than_planned += 0 < self.planned_age <= age
        self._ages.record(age)

    def restarted(self) -> None:
        """Note that the next step does not follow on the last one: a hold or another epoch."""
        self._last_position = -1

    @property
    def ages(self) -> Summary:
        """Ages in steps of the newest actions played."""
        return self._ages.summary()

    @property
    def share_older(self) -> float:
        """Share of all steps whose action was older than planned."""
        return self.older_than_planned / self.steps if self.steps else 0.0

    def figures(self) -> dict[str, float]:
        """Return all that was counted, under the names that diagnostics and benches use."""
        ages = self.ages
        return {
            'plan_steps_played': self.steps,
            'chunk_age_p50_steps': ages.p50, 'chunk_age_p99_steps': ages.p99,
            'chunk_age_max_steps': ages.maximum, 'planned_age_steps': self.planned_age,
            'share_older_than_planned': self.share_older,
            'expected_delay_steps': self.expected_delay,
            'chunks_later_than_expected': self.late_chunks,
            'plan_steps_repeated': self.repeated, 'plan_steps_skipped': self.skipped,
            'periods_without_action': self.starved,
        }
