"""A stream of tokens that is pulled: nothing runs ahead of what was given out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flashrt_core.errors import PromptTooLong
from flashrt_core.errors import TickDropped
from flashrt_core.planners.options import Options
from flashrt_core.planners.protocol import Step
from flashrt_core.planners.protocol import Token
from flashrt_core.planners.text import TextStream
from flashrt_core.planners.text import Tokenizer

if TYPE_CHECKING:
    from flashrt_core.planners.grammar import Grammar
    from flashrt_core.planners.grammar import Matcher
    from flashrt_core.planners.session import PlannerSession


class Stream(Iterator[Token]):
    """Decodes when it is asked for a token; iterate it on one thread, not the lane's.

    It ends after ``max_tokens``, a stop token, a stop text, a complete grammar, a full context or
    ``cancel``; ``reason`` says which. The state then holds what was given out and no more: the
    last token is pending, and an append or another stream goes on from there. An error of a step
    (a restore meanwhile, a failure) is raised once and ends it too.

    Under a grammar it goes on where the state is in the grammar's text: at its beginning after an
    append, in the middle where another stream or a capsule's was, at its end with no token.

    ``rest``: text held back at the end, half of what might have become a stop text.
    """

    def __init__(
        self,
        session: PlannerSession,
        options: Options,
        tokenizer: Tokenizer | None = None,
        grammar: Grammar | None = None,
        before: Sequence[int] = (),
    ) -> None:
        self.reason = ''
        self.rest = ''
        self.drafted = self.accepted = 0
        self._session = session
        self._options = options
        self._grammar = grammar
        self._matcher: Matcher | None = None
        self._text = None if tokenizer is None else TextStream(tokenizer, options.stop, before)
        self._given = 0
        self._epoch: int | None = None
        self._position = 0
        self._ready: deque[Token] = deque()
        self._cancelled = False

    def cancel(self) -> None:
        """End after the tokens of the step that runs now; any thread."""
        self._cancelled = True

    def __next__(self) -> Token:
        """Return the next token, decoding if none is left of the last step."""
        if not self._ready and not self.reason:
            self._advance()
        if not self._ready:
            raise StopIteration
        return self._ready.popleft()

    def _advance(self) -> None:
        if self._cancelled:
            self._end('cancelled')
            return
        try:
            step = self._step()
            if step is None:
                return
        except PromptTooLong:
            if not self._given:
                raise
            self._end('context')
            return
        except BaseException:
            self.reason = 'error'
            raise
        self.drafted += step.drafted
        self.accepted += step.accepted
        first = step.position - len(step.tokens) + 1
        for i, token in enumerate(step.tokens):
            text = '' if self._text is None else self._text.push(token)
            self._ready.append(Token(token, text, first + i))
            self._given += 1
            reason = self._reason_after(token)
            if reason:
                if i + 1 < len(step.tokens):
                    self._session.keep(i + 1).result()
                self._end(reason)
                return
        self._position = step.position

    def _step(self) -> Step | None:
        session = self._session
        if self._grammar is not None and self._matcher is None:
            self._position = session.position
            self._matcher, self._epoch = session.follow(self._grammar)
            if self._matcher.must_end:
                self._end('grammar')
                return None
        if self._epoch is not None and session.position != self._position:
            raise TickDropped(
                f'the state moved from {self._position} to {session.position} tokens under a '
                'stream; begin another one there'
            )
        step = session.decode(
            self._options,
            limit=self._options.max_tokens - self._given,
            matcher=self._matcher,
            revocable=bool(self._options.stop) and self._options.draft_tokens > 0,
            epoch=self._epoch,
        ).result()
        self._epoch = step.epoch
        return step

    def _reason_after(self, token: int) -> str:
        """Return why the stream ends with this token, '' if it does not."""
        if token in self._session.settings.stop_ids:
            return 'stop token'
        if self._text is not None and self._text.stopped is not None:
            return 'stop text'
        if self._matcher is not None:
            self._matcher.accept(token)
            if self._matcher.must_end:
                return 'grammar'
        return 'length' if self._given >= self._options.max_tokens else ''

    def _end(self, reason: str) -> None:
        self.reason = reason
        if self._text is not None:
            self.rest = self._text.finish()
