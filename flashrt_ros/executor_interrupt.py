"""Hard interrupts: which running tick one drops, when it is answered, and what passed meanwhile.

The rule of what is commanded. Once an interrupt is accepted, no chunk of an earlier goal is put
into play any more; the one in play goes on until the first chunk of the new goal, which is not
blended with it and starts under the rate limit. With nothing left to play the robot holds still.
The bound is one segment (the running one ends), one inference and one step.

An interrupt that comes while the tick of an earlier one runs does not drop that tick: its goal is
latched by the next one. So a flood of them costs fresh goals, never the robot's motion.
"""

from dataclasses import dataclass

from flashrt_ros.statistics import Counters
from flashrt_ros.statistics import Ring

COUNTERS = ('interrupts', 'interrupts_coalesced')
STAGES = ('interrupt_to_tick', 'interrupt_tick_to_chunk', 'interrupt_to_chunk')


@dataclass(frozen=True)
class Answer:
    """An interrupt whose first chunk was put into play; times in microseconds."""

    sequence: int
    to_tick_us: float  # from acceptance to the submission of the tick that latched it
    inference_us: float  # from there to its chunk in play
    steps_meanwhile: int  # commands of the chunk that was in play


class Interrupts:
    """The interrupts of one engine; every method is called under the submit lock."""

    def __init__(self, counters: Counters) -> None:
        counters.declare(COUNTERS)
        self._counters = counters
        self.cut = 0  # those that dropped what ran; a tick of before is not put into play
        self._sequence = 0  # of the newest that no chunk has answered, 0 for none
        self._asked_ns = self._submitted_ns = 0  # steady
        self._asked_step = 0
        self._answering = False  # whether the running tick was submitted for one
        self.rings = {stage: Ring() for stage in STAGES}

    @property
    def pending(self) -> bool:
        """Whether one waits for its first chunk."""
        return self._sequence > 0

    @property
    def answering(self) -> bool:
        """Whether the running tick is one's answer."""
        return self._answering

    def ask(self, sequence: int, now_ns: int, step: int) -> bool:
        """Note an accepted interrupt; True when the running tick is to be dropped.

        :param step: commands played so far.
        """
        self._counters.add('interrupts')
        self._sequence, self._asked_ns, self._asked_step = sequence, now_ns, step
        if self._answering:
            self._counters.add('interrupts_coalesced')
            return False
        self.cut += 1
        return True

    def submitted(self, sequence: int, now_ns: int) -> None:
        """A tick was submitted that latches ``sequence``."""
        self._answering = 0 < self._sequence <= sequence
        self._submitted_ns = now_ns

    def ended(self) -> None:
        """The running tick has ended, in whatever way."""
        self._answering = False

    def played(self, sequence: int, now_ns: int, step: int) -> Answer | None:
        """A chunk with latched ``sequence`` was put into play; the interrupt that it answers."""
        if not 0 < self._sequence <= sequence:
            return None
        found = Answer(self._sequence, (self._submitted_ns - self._asked_ns) / 1e3,
                       (now_ns - self._submitted_ns) / 1e3, step - self._asked_step)
        for stage, value in zip(STAGES, (found.to_tick_us, found.inference_us,
                                         found.to_tick_us + found.inference_us), strict=True):
            self.rings[stage].record(value)
        self._sequence = 0
        return found

    def void(self) -> None:
        """The state was replaced: what no tick has latched counts no more."""
        self._sequence = 0
