"""Sets the chunks of two recordings side by side: equal bits, or how far apart and where first."""

from dataclasses import dataclass

import numpy as np

from flashrt_ros.bag.recording import Recording


@dataclass(frozen=True)
class Comparison:
    """Ticks are matched by their order within the epochs of equal rank."""

    compared: int
    equal: int  # digests of the policy's actions are the same
    inputs_equal: int  # every observation's digest is the same
    unmatched: int  # ticks that only one recording has
    largest: float  # distance of played actions, robot units; 0.0 when none were compared
    first_difference: str  # '' when all are equal

    @property
    def same(self) -> bool:
        """Whether all ticks are matched and equal."""
        return self.compared > 0 and self.equal == self.compared and self.unmatched == 0


def compare(first: Recording, second: Recording) -> Comparison:
    """Compare two recordings tick by tick."""
    compared = equal = inputs = unmatched = 0
    largest, where = 0.0, ''
    pairs = list(zip(sorted(first.epochs), sorted(second.epochs), strict=False))
    for mine, other in pairs:
        left, right = first.epochs[mine].ticks, second.epochs[other].ticks
        unmatched += abs(len(left) - len(right))
        for a, b in zip(left, right, strict=False):
            compared += 1
            inputs += [o.digest for o in a.given.observations] == [
                o.digest for o in b.given.observations
            ]
            if a.given.actions_digest == b.given.actions_digest:
                equal += 1
            elif not where:
                where = f'epoch {a.given.epoch} tick {a.given.tick}'
            if a.chunk is not None and b.chunk is not None:
                left_actions, right_actions = a.chunk.actions, b.chunk.actions
                if len(left_actions) == len(right_actions):
                    gap = float(np.abs(left_actions - right_actions).max(initial=0.0))
                    largest = max(largest, gap)
    for recording, matched in ((first, pairs), (second, pairs)):
        known = {pair[0 if recording is first else 1] for pair in matched}
        unmatched += sum(
            len(epoch.ticks) for n, epoch in recording.epochs.items() if n not in known
        )
    return Comparison(compared, equal, inputs, unmatched, largest, where)
