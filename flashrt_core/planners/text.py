"""Text and tokens: the seam of a tokenizer, text that streams out token by token, chat turns.

All tokenizers here are byte-level: a token is a fixed piece of UTF-8, whatever stands beside it.
So text streams out exactly, and a grammar can be followed byte by byte.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import re
from typing import Protocol

from flashrt_core.errors import ConfigError

# What ends a turn or a text in the families' vocabularies; those that are there count.
END_MARKERS = ('<|im_end|>', '<|eot_id|>', '<|endoftext|>', '<|end_of_text|>')
PADDING_LIMIT = 1024  # rows that a model's embedding may have beyond its tokenizer


class Tokenizer(Protocol):
    """Text to ids and back. ``vocab``: ids are below it. ``ends``: ids that end a text."""

    @property
    def name(self) -> str: ...

    @property
    def vocab(self) -> int: ...

    @property
    def special(self) -> Mapping[str, int]:
        """Markers by their text; plain text never encodes to them."""
        ...

    @property
    def hidden(self) -> frozenset[int]:
        """Markers that control the model and have no text of their own."""
        ...

    @property
    def ends(self) -> tuple[int, ...]: ...

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Return the ids of ``text``; with ``special`` its markers become their ids."""
        ...

    def piece(self, token: int) -> bytes:
        """Return the bytes of one token, none for a hidden marker."""
        ...

    def raw_piece(self, token: int) -> bytes:
        """Return the bytes of one token, a marker's name for a marker."""
        ...

    def decode(self, tokens: Sequence[int], special: bool = False) -> str:
        """Return the text of ids, with ``special`` the controlling markers too."""
        ...


class ByteTokenizer:
    """A tokenizer over pieces of bytes; ``Tokenizer`` says what it promises.

    :param encode_plain: text to ids, blind to markers.
    :param pieces: the bytes of every id, ``vocab`` of them.
    :param special: markers by their text. :param hidden: ids of those without text of their own.
    :param ends: ids that end a text.
    """

    def __init__(
        self,
        name: str,
        encode_plain: Callable[[str], list[int]],
        pieces: Sequence[bytes],
        special: Mapping[str, int],
        hidden: Iterable[int],
        ends: Sequence[int],
    ) -> None:
        self.name = name
        self.vocab = len(pieces)
        self.special = dict(special)
        self.hidden = frozenset(hidden)
        self.ends = tuple(ends)
        self._encode_plain = encode_plain
        self._pieces = pieces
        # Some vocabularies lack rare bytes, which their library drops without a word.
        self._missing = {bytes([b]) for b in range(256)} - set(pieces)
        longest_first = sorted(self.special, key=len, reverse=True)
        self._markers = re.compile(f'({"|".join(map(re.escape, longest_first)) or "(?!)"})')

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Return the ids of ``text``.

        :raises ConfigError: not a text, one with half a surrogate pair, or with a character that
            the vocabulary cannot spell.
        """
        if not isinstance(text, str):
            raise ConfigError(f'the text is {text!r:.80}; give a string')
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f'the text holds {text[error.start]!r} at character {error.start}, half of a '
                'surrogate pair; give valid Unicode'
            ) from None
        if not special:
            return self._spelled(text)
        tokens: list[int] = []
        for part in self._markers.split(text):
            tokens += [self.special[part]] if part in self.special else self._spelled(part)
        return tokens

    def _spelled(self, text: str) -> list[int]:
        tokens = self._encode_plain(text)
        if any(byte in text.encode() for byte in self._missing) and self.decode(tokens) != text:
            lost = next(c for c in text if self.decode(self._encode_plain(c)) != c)
            raise ConfigError(
                f'tokenizer {self.name} cannot spell {lost!r}, at character {text.index(lost)} of '
                'the text; leave it out'
            )
        return tokens

    def piece(self, token: int) -> bytes:
        """Return the bytes of one token, none for a marker that controls the model.

        :raises ConfigError: an id outside the vocabulary.
        """
        return b'' if token in self.hidden else self.raw_piece(token)

    def raw_piece(self, token: int) -> bytes:
        """Return the bytes of one token, a marker's name for a marker."""
        if not 0 <= token < self.vocab:
            raise ConfigError(
                f'token {token} is not in the vocabulary of {self.name}, which has {self.vocab}; '
                'sample with the mask of that many tokens (sampling.open_mask)'
            )
        return self._pieces[token]

    def decode(self, tokens: Sequence[int], special: bool = False) -> str:
        """Return the text of ids; bytes that are not UTF-8 show as U+FFFD."""
        piece = self.raw_piece if special else self.piece
        return b''.join(map(piece, tokens)).decode(errors='replace')


def check_vocabulary(tokenizer: Tokenizer, vocab: int) -> None:
    """Raise ConfigError unless the tokenizer's ids fit a model of ``vocab`` embedding rows.

    A model may have up to PADDING_LIMIT rows more, which no text reaches.
    """
    if not tokenizer.vocab <= vocab <= tokenizer.vocab + PADDING_LIMIT:
        raise ConfigError(
            f'tokenizer {tokenizer.name} has {tokenizer.vocab} tokens, the model {vocab}; '
            'give the tokenizer that the model was trained with'
        )


class TextStream:
    """The text of a growing list of tokens, given out as soon as it is certain.

    Half a character and the beginning of a stop text are held back. What is given out does not
    depend on how the text is cut into tokens. A resumed stream is told the tokens ``before``.

    ``stopped``: the stop text that was met, None so far. Any thread, one at a time.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), before: Sequence[int] = ()
    ) -> None:
        self.stopped: str | None = None
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder('utf-8')('replace')
        self._held = ''
        for token in before:
            self.push(token)

    def push(self, token: int) -> str:
        """Return the text that became certain with ``token``; nothing once a stop was met."""
        if self.stopped is not None:
            return ''
        self._held += self._decoder.decode(self._tokenizer.piece(token))
        found = [(at + len(s), at, s) for s in self._stop if (at := self._held.find(s)) >= 0]
        if found:
            _, at, self.stopped = min(found)
            return self._give(at)
        return self._give(len(self._held) - max(map(self._begun, self._stop), default=0))

    def finish(self) -> str:
        """Return what was held back as a stop text's beginning; half a character is no text."""
        return self._give(len(self._held)) if self.stopped is None else ''

    def _begun(self, stop: str) -> int:
        """Return how many last characters are the beginning of ``stop``."""
        lengths = range(min(len(stop) - 1, len(self._held)), 0, -1)
        return next((n for n in lengths if self._held.endswith(stop[:n])), 0)

    def _give(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return text


class ChatMl:
    """Turns of a chat in the ChatML form of Qwen and SmolLM2, as token ids.

    Texts are encoded as plain text: a marker that a user or a robot writes stays text. ``opening``
    begins every answer; Qwen3.5 answers without thinking after ``NO_THINKING``.

    :raises ConfigError: a tokenizer without the two markers.
    """

    NO_THINKING = '<think>\n\n</think>\n\n'

    def __init__(self, tokenizer: Tokenizer, opening: str = '') -> None:
        missing = [m for m in ('<|im_start|>', '<|im_end|>') if m not in tokenizer.special]
        if missing:
            raise ConfigError(
                f'tokenizer {tokenizer.name} has no {" and no ".join(missing)}, so it knows no '
                'ChatML; give prompts as token ids, or a model with these markers'
            )
        self._tokenizer = tokenizer
        self._start, self._end = (tokenizer.special[f'<|im_{n}|>'] for n in ('start', 'end'))
        self._newline = tokenizer.encode('\n')
        self._opening = tokenizer.encode(opening, special=True)

    def message(self, role: str, text: str) -> list[int]:
        """Return one whole message; a system prompt is ``message('system', text)``."""
        return [*self._head(f'{role}\n{text}'), self._end, *self._newline]

    def ask(self, text: str) -> list[int]:
        """Return a user's message and the head of the answer to it."""
        return [*self.message('user', text), *self._head('assistant\n'), *self._opening]

    def after_answer(self, ended: bool) -> list[int]:
        """Return what closes an answer: it ``ended`` by its marker, or was cut off."""
        return [*([] if ended else [self._end]), *self._newline]

    def _head(self, text: str) -> list[int]:
        return [self._start, *self._tokenizer.encode(text)]
