"""The executor's input slot for subgoals: sequence marks, episode, epoch, what a tick latches.

The marks live on the host, only grow, and are never restored; the latched subgoal itself is in the
capsule.
"""

from collections.abc import Sequence
from dataclasses import dataclass
import threading
from typing import Any

from flashrt_core.errors import ConfigError
from flashrt_core.errors import SubgoalRefused
from flashrt_core.policies import Embedding
from flashrt_ros.clocks import NANOSECONDS
from flashrt_ros.conversions import rows_record
from flashrt_ros.statistics import Counters

DONE, FAILED, TIMED_OUT = OUTCOMES = ('done', 'failed', 'timed_out')  # as in SubgoalOutcome.msg
COUNTERS = (
    'subgoals_accepted',
    'subgoals_duplicate',
    'subgoals_out_of_order',
    'subgoals_wrong_episode',
    'subgoals_wrong_epoch',
    'subgoals_invalid',
    'subgoals_dropped_by_restore',
)


@dataclass(frozen=True)
class Subgoal:
    """An accepted subgoal."""

    sequence: int
    episode: int
    text: str
    tokens: tuple[int, ...]
    interrupt: bool
    accepted_ns: int  # steady time
    deadline_s: float  # 0: never
    embedding: Embedding | None = None  # read in the tokens' place

    def record(self) -> dict[str, Any]:
        """Return all that a replay needs of it, as JSON."""
        told: dict[str, Any] = {
            'sequence': self.sequence, 'episode': self.episode, 'text': self.text,
            'tokens': list(self.tokens), 'interrupt': self.interrupt,
            'deadline_s': self.deadline_s}
        if self.embedding is not None:
            told['embedding'] = rows_record(self.embedding.values)
        return told


class SubgoalSlot:
    """One slot: the newest accepted subgoal, until a committed tick has latched it.

    Writers are service and subscription callbacks, the reader is the tick side; each call swaps or
    reads one immutable object under a lock, so a tick never sees half a subgoal.
    """

    def __init__(self, *, max_tokens: int, vocabulary: int, counters: Counters,
                 embedding: tuple[int, int] = (0, 0)) -> None:
        """Start empty, with both marks at zero.

        :param max_tokens: size of the policy's subgoal port.
        :param vocabulary: token ids lie in [0, vocabulary).
        :param embedding: most rows and the width of the policy's port for them; (0, 0): it has
            none.
        :raises ConfigError: when a number is below 1.
        """
        if max_tokens < 1 or vocabulary < 1:
            raise ConfigError(
                f'subgoal slot of {max_tokens} tokens over {vocabulary} ids; both must be at '
                'least 1'
            )
        counters.declare(COUNTERS)
        self._max_tokens = max_tokens
        self._vocabulary = vocabulary
        self._embedding = embedding
        self._counters = counters
        self._lock = threading.Lock()
        self._newest: Subgoal | None = None
        self._requested = 0
        self._latched = 0
        self._void = 0  # highest sequence accepted before the newest restore
        self._episode = self._epoch = 0  # of the newest restore
        self._in_force = 0

    @property
    def requested(self) -> int:
        """Highest sequence accepted."""
        return self._requested

    @property
    def latched(self) -> int:
        """Highest sequence that a committed tick has latched."""
        return self._latched

    @property
    def in_force(self) -> int:
        """Sequence that the newest committed tick acted on; 0: none, or not known yet."""
        return self._in_force

    def admit(
        self,
        *,
        sequence: int,
        epoch: int,
        episode: int,
        text: str,
        tokens: Sequence[int],
        interrupt: bool = False,
        deadline_s: float = 0.0,
        embedding: Any = None,
        current_epoch: int,
        current_episode: int,
        now_ns: int,
    ) -> Subgoal:
        """Put a subgoal into the slot. Any thread; an unread older one is replaced.

        :param sequence: above every one accepted before; 0 takes the next number.
        :param epoch: it was planned in; must be the current one, 0 means the current one.
        :param episode: must be the current one; 0 means the current one.
        :param current_epoch: as the caller has read it; a restore may have come since.
        :param current_episode: as ``current_epoch``.
        :param tokens: token ids, tokenised by the caller when the message had only text.
        :param embedding: float32 [n, width], array or tensor, or flat as a message has it; it is
            copied here, so call with the stream current that makes it. The tokens may then be
            empty: they are kept for the record alone.
        :param now_ns: steady time.
        :raises SubgoalRefused: duplicate, out of order, other episode or epoch, too long, unknown
            id, bad deadline, an embedding that the policy does not read.
        """
        ids = tuple(int(token) for token in tokens)
        rows = None if embedding is None else self._take_over(embedding)
        self._check_content(ids, deadline_s, rows is not None)
        with self._lock:
            current = max(current_episode, self._episode)
            if episode not in (0, current):
                self._counters.add('subgoals_wrong_episode')
                raise SubgoalRefused(
                    f'subgoal {sequence} is for episode {episode}, the current one is '
                    f'{current}; plan again from the current episode'
                )
            now = max(current_epoch, self._epoch)
            if epoch not in (0, now):
                self._counters.add('subgoals_wrong_epoch')
                raise SubgoalRefused(
                    f'subgoal {sequence} is of epoch {epoch}, the current one is {now}; plan '
                    'again from the state now, or send epoch 0 for whichever is current'
                )
            number = sequence or self._requested + 1
            if number <= self._requested:
                again = number == self._requested
                self._counters.add('subgoals_duplicate' if again else 'subgoals_out_of_order')
                raise SubgoalRefused(
                    f'subgoal sequence {number} '
                    f'{"was accepted already" if again else "is out of order"}, the newest is '
                    f'{self._requested}; send a higher one, or 0 to have it numbered'
                )
            accepted = Subgoal(
                number, current, text, ids, interrupt, now_ns, float(deadline_s), rows
            )
            self._newest, self._requested = accepted, number
        self._counters.add('subgoals_accepted')
        return accepted

    def pending(self) -> Subgoal | None:
        """Return the subgoal the next tick is to latch, or None. Tick side; the slot keeps it.

        A tick that is dropped latches nothing, so the next one gets the same subgoal again.
        """
        with self._lock:
            return self._newest if self._waits() else None

    def commit(self, sequence: int) -> None:
        """Note that a committed tick has latched ``sequence``. Tick side."""
        with self._lock:
            self._latched = max(self._latched, min(sequence, self._requested))
            self._in_force = sequence

    def restored(self, *, episode: int, epoch: int) -> int:
        """After a restore, rollback or reset: what no tick has latched counts no more.

        The marks stay. A subgoal's deadline ends with its episode only: within it the planner is
        still expected to send the next one.

        :param episode: the current one.
        :param epoch: the one that begins.
        :return: sequence of the subgoal that was dropped, 0 when there was none.
        """
        with self._lock:
            newest, dropped = self._newest, 0
            if newest is not None and self._waits():
                dropped = newest.sequence
                self._counters.add('subgoals_dropped_by_restore')
            self._void, self._in_force = self._requested, 0
            self._episode, self._epoch = episode, epoch
            if newest is not None and newest.episode != episode:
                self._newest = None
            return dropped

    def counts(self, sequence: int) -> bool:
        """Whether an accepted subgoal is of the state now, not of before a restore."""
        with self._lock:
            return sequence > self._void

    def _waits(self) -> bool:
        newest = self._newest
        return newest is not None and newest.sequence > max(self._latched, self._void)

    def overdue(self, now_ns: int) -> int:
        """Return the newest subgoal whose deadline has passed, or 0. Any thread, steady time."""
        newest = self._newest
        if newest is None or newest.deadline_s <= 0:
            return 0
        late = now_ns - newest.accepted_ns > int(newest.deadline_s * NANOSECONDS)
        return newest.sequence if late else 0

    def _take_over(self, rows: Any) -> Embedding:
        """Return a copy of rows that fit the policy's port."""
        limit, width = self._embedding
        try:
            if not limit:
                raise ConfigError('embedding is not read by this policy; send text or tokens, or '
                                  'set subgoal_embedding_tokens in its config')
            if rows.ndim == 1:
                if len(rows) % width:
                    raise ConfigError(f'embedding is {len(rows)} values; give rows of {width}')
                rows = rows.reshape(-1, width)
            if rows.ndim == 2 and (len(rows) > limit or rows.shape[1] != width):
                raise ConfigError(f'embedding is {list(rows.shape)}, the slot takes at most '
                                  f'[{limit}, {width}]; give fewer rows, of that width')
            return Embedding(rows)
        except ConfigError as error:
            self._counters.add('subgoals_invalid')
            raise SubgoalRefused(f'subgoal {error}') from error

    def _check_content(self, ids: tuple[int, ...], deadline_s: float, embedded: bool) -> None:
        problem = ''
        if not ids and not embedded:
            problem = ('has neither tokens nor text nor an embedding; send one of them: to stop '
                       'the robot is ~/hold, to go back to its prompt ~/reset')
        elif len(ids) > self._max_tokens:
            problem = f'has {len(ids)} tokens, the slot takes {self._max_tokens}; shorten it'
        elif ids and (min(ids) < 0 or max(ids) >= self._vocabulary):
            problem = (
                f'has token ids from {min(ids)} to {max(ids)}, the vocabulary is '
                f'0..{self._vocabulary - 1}; use '
                "the policy's tokenizer"
            )
        elif not 0 <= deadline_s < 86400:
            problem = f'has deadline_s {deadline_s}; give 0 (never) to 86400'
        if problem:
            self._counters.add('subgoals_invalid')
            raise SubgoalRefused(f'subgoal {problem}')
