"""What a grammar has followed of a text: part of the state, so that a restore goes on inside it.

The state keeps how many of its last tokens were sampled under a grammar, these tokens and which
grammar it was. An append, or a step without a grammar, ends its text; another begins after that.
"""

from __future__ import annotations

from dataclasses import dataclass
import functools
import hashlib

import numpy as np

from flashrt_core.errors import CapsuleCorrupt
from flashrt_core.errors import PlannerError
from flashrt_core.planners.options import GrammarSource

DIGEST_WORDS = 4           # of SHA-256, as int64
WORDS = DIGEST_WORDS + 4   # then 32 bytes of the name, for messages
NONE = (0,) * WORDS


@functools.lru_cache(maxsize=64)
def words_of(source: GrammarSource) -> tuple[int, ...]:
    """Return ``WORDS`` int64: the digest of kind and text, the beginning of the name."""
    digest = hashlib.sha256(f'{source.kind}\0{source.text}'.encode()).digest()
    name = source.label.encode()[:32].ljust(32, b'\0')
    return tuple(np.frombuffer(digest + name, '<i8').tolist())


@dataclass(frozen=True)
class Followed:
    """``count``: the state's last tokens that were sampled under the grammar of ``words``."""

    count: int = 0
    words: tuple[int, ...] = NONE

    @classmethod
    def read(cls, values: list[int], context: int) -> Followed:
        """Return what the state's buffer ``followed`` says; raises CapsuleCorrupt for nonsense."""
        if not 0 <= values[0] <= context:
            raise CapsuleCorrupt(
                f'the state says that a grammar has followed {values[0]} tokens of a context of '
                f'{context}; drop its capsule'
            )
        return cls(values[0], tuple(values[1:])) if values[0] else cls()

    @property
    def label(self) -> str:
        """The grammar's name for messages, as much of it as the state keeps."""
        name = np.array(self.words[DIGEST_WORDS:], '<i8').tobytes()
        return name.rstrip(b'\0').decode(errors='replace')

    def check(self, source: GrammarSource, tokens: int | None = None) -> None:
        """Raise PlannerError if the state is inside the text of another grammar.

        :param tokens: how many its matcher has followed, to be checked too.
        """
        if self.count and self.words[:DIGEST_WORDS] != words_of(source)[:DIGEST_WORDS]:
            raise PlannerError(
                f'grammar {source.label} is refused: the state is {self.count} tokens into the '
                f'text of grammar {self.label}, which has another text or kind; go on with that '
                'one, or append, restore or reset before a text of another begins'
            )
        if tokens is not None and tokens != self.count:
            raise PlannerError(
                f'the matcher of grammar {source.label} has followed {tokens} tokens, the state '
                f'{self.count} of its text; take the matcher from follow'
            )
