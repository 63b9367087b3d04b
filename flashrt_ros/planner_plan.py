"""One plan: what was asked, which subgoals came of it, which of them is in force, why it ended.

A subgoal goes to the executor when its turn comes: the first as soon as it is complete, each other
one when the one before is done. Their sequence numbers follow each other without a gap from the
executor's mark at the plan's begin, so that any subgoal written by somebody else meanwhile makes
the executor refuse the plan's next one: nothing of a superseded plan is ever applied.
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
import threading

from flashrt_ros.subgoals import DONE
from flashrt_ros.subgoals import FAILED
from flashrt_ros.subgoals import TIMED_OUT

DECODING = ('restore', 'append', 'decode', 'rollback')
_LOOK_S = 1.0  # how often a plan that hears nothing looks whether its executor is there


@dataclass(frozen=True)
class PlanRequest:
    """A checked goal of ``~/plan``."""

    instruction: str
    scene: str = ''
    dry_run: bool = False
    wait: bool = False
    priority: int = 0  # of the first subgoal
    deadline_s: float = 0.0  # of each


@dataclass(frozen=True)
class Base:
    """Where the executor stood when a plan began."""

    episode: int
    sequence: int  # highest accepted
    epoch: int = 0


@dataclass
class Item:
    """One subgoal of a plan."""

    text: str
    sequence: int = 0  # 0: not written
    outcome: str = ''
    message: str = ''


@dataclass
class Times:
    """Microseconds and tokens of the newest decode of a plan."""

    capsule_hit: bool = False
    context_tokens: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    restore_us: float = 0.0
    append_us: float = 0.0
    ttft_us: float = 0.0
    decode_us: float = 0.0


@dataclass(frozen=True)
class Told:
    """One piece of feedback."""

    phase: str
    text: str = ''
    item: Item = field(default_factory=lambda: Item(''))


@dataclass(frozen=True)
class End:
    """Why a plan ended; ``code`` is ok, cannot, cancelled, superseded, or an error's code."""

    code: str
    message: str


Write = Callable[[str, int, Base, int, float], None]  # text, sequence, base, priority, deadline


class Plan:
    """A plan under way. Its worker decodes and waits; any thread ends it or reports an outcome."""

    def __init__(self, number: int, request: PlanRequest, write: Write,
                 tell: Callable[[Told], None], check: Callable[[int], None]) -> None:
        """Begin with nothing decoded.

        :param write: gives one subgoal to the executor; raises to refuse.
        :param tell: called with each piece of feedback, on the thread that made it happen.
        :param check: raises where the executor does not know a written subgoal any more.
        """
        self.number, self.request = number, request
        self.times = Times()
        self.replans = 0
        self.phase = 'restore'
        self.decoded: Future[None] = Future()  # all subgoals are known and are carried out
        self.ended: Future[End] = Future()
        self.base = Base(0, 0)
        self._items: list[Item] = []
        self._written = 0  # items given to the executor
        self._complete = False  # no more are decoded
        self._why: End | None = None
        self._heard: dict[int, str] = {}  # outcomes by sequence
        self._write, self._tell, self._check = write, tell, check
        self._changed = threading.Condition()
        self._on_stop: list[Callable[[], object]] = []

    # -- looking at it --------------------------------------------------------------------------

    @property
    def items(self) -> list[Item]:
        """Return copies of the subgoals so far."""
        with self._changed:
            return [replace(item) for item in self._items]

    @property
    def current(self) -> int:
        """Index of the newest subgoal that was written; 0 before the first."""
        return max(0, self._written - 1)

    @property
    def sequence(self) -> int:
        """Sequence of the newest subgoal that was written, 0 before the first."""
        with self._changed:
            return self._items[self._written - 1].sequence if self._written else 0

    @property
    def decoding(self) -> bool:
        """Whether its state is being restored, appended to or decoded."""
        return self.phase in DECODING and not self.ended.done()

    @property
    def stopped(self) -> End | None:
        """Why it is to end, None while it may go on."""
        return self._why

    def end_now(self) -> End:
        """Return how it ended or is to end; one that is decoded and goes on is well so far."""
        if self.ended.done():
            return self.ended.result()
        if (why := self._why) is not None:
            return why
        return End('ok', f'{len(self.items)} subgoals, carried out one after the other')

    # -- ending it: any thread ------------------------------------------------------------------

    def stop(self, code: str, message: str) -> bool:
        """Ask for its end at the next token's boundary; the first reason stands."""
        with self._changed:
            if self._why is not None or self.ended.done():
                return False
            self._why = End(code, message)
            self._changed.notify_all()
            callbacks = list(self._on_stop)
        for callback in callbacks:
            callback()
        return True

    def on_stop(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` when the plan is asked to end; at once if it was already."""
        with self._changed:
            self._on_stop.append(callback)
            late = self._why is not None
        if late:
            callback()

    # -- its worker -----------------------------------------------------------------------------

    def enter(self, phase: str, text: str = '', item: Item | None = None) -> None:
        """Note and tell a phase."""
        self.phase = phase
        self._tell(Told(phase, text, replace(item) if item else Item('')))

    def add(self, text: str) -> None:
        """Take a complete subgoal; it is written at once when its turn has come.

        :raises SubgoalRefused: the executor does not take it.
        """
        with self._changed:
            self._items.append(Item(text))
            item = self._items[-1]
        self.enter(self.phase, item=item)
        self.advance()

    def complete(self) -> None:
        """No more subgoals are decoded."""
        with self._changed:
            self._complete = True
        if not self.decoded.done():
            self.decoded.set_result(None)

    def follow(self) -> Item | None:
        """Wait until all are done (None) or one is not (that one).

        Returns None as well when the plan is asked to end; see ``stopped``.

        :raises SubgoalRefused: the executor does not take the next one.
        :raises WrongState: it is gone or was started anew, so nobody will tell an outcome.
        """
        while True:
            told = True
            with self._changed:
                if self._why is not None:
                    return None
                bad = next((i for i in self._items if i.outcome in (FAILED, TIMED_OUT)), None)
                if bad is not None:
                    return replace(bad)
                if self._complete and all(item.outcome == DONE for item in self._items):
                    return None
                due = self._due() is not None
                if not due:
                    told = self._changed.wait(_LOOK_S)
            if due:
                self.advance()
            elif not told:
                self._check(self.sequence)

    def begin_again(self) -> tuple[list[str], str]:
        """Forget what is not done; return what is, and what was not."""
        with self._changed:
            done = [item for item in self._items if item.outcome == DONE]
            bad = next(i.text for i in self._items if i.outcome in (FAILED, TIMED_OUT))
            last = max((item.sequence for item in self._items), default=0)
            self.base = replace(self.base, sequence=max(self.base.sequence, last))
            self._items, self._written, self._complete = done, len(done), False
            self.replans += 1
        return [item.text for item in done], bad

    def _due(self) -> Item | None:
        """Return the subgoal whose turn it is; under the lock."""
        if self.request.dry_run or self._written >= len(self._items) or self._why is not None:
            return None
        if self._written and self._items[self._written - 1].outcome != DONE:
            return None
        return self._items[self._written]

    def advance(self) -> None:
        """Write the subgoal whose turn it is, if any.

        :raises SubgoalRefused: the executor does not take it.
        """
        with self._changed:
            item = self._due()
            if item is None:
                return
            before = max([self.base.sequence, *(i.sequence for i in self._items)])
            # Known as ours before the executor tells of it.
            item.sequence = before + 1
            self._written += 1
            priority = 0 if before > self.base.sequence or self.replans else self.request.priority
        try:
            self._write(item.text, item.sequence, self.base, priority, self.request.deadline_s)
        except BaseException:
            with self._changed:
                item.sequence = 0
                self._written -= 1
            raise
        self.enter(self.phase, item=item)

    # -- what is heard of the executor: any thread ----------------------------------------------

    def outcome(self, sequence: int, episode: int, outcome: str, message: str) -> bool:
        """Take what became of a subgoal; False when it is none in force here.

        The executor's own verdicts are heard twice, as an event and as a message.
        """
        with self._changed:
            if self._heard.get(sequence) == outcome:
                return True
            item = next((i for i in self._items if i.sequence == sequence and sequence), None)
            if item is None or item.outcome or episode not in (0, self.base.episode):
                return False
            item.outcome, item.message = outcome, message
            self._heard[sequence] = outcome
            self._changed.notify_all()
        self._tell(Told(self.phase, '', replace(item)))
        return True

    def is_own(self, sequence: int) -> bool:
        """Whether a subgoal that the executor has accepted is of this plan, or older."""
        with self._changed:
            newest = max([self.base.sequence, *(i.sequence for i in self._items)])
        return sequence <= newest
