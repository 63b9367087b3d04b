"""Text to token ids: the seam, and a small tokenizer for the tabletop's commands."""

from __future__ import annotations

from collections.abc import Sequence
import re
from typing import Protocol

from flashrt_core.errors import ConfigError


class Tokenizer(Protocol):
    """Text to ids and back; the same text always gives the same ids."""

    name: str
    vocab: int

    def encode(self, text: str, limit: int) -> list[int]:
        """Return at most ``limit`` ids; raises ConfigError for a longer text."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ids, exact for what encode gave."""
        ...


PADDING, END, SPACE = 0, 1, 2
FIRST_BYTE = 3
FIRST_WORD = FIRST_BYTE + 256

# Only ever appended to: an id is part of trained weights.
WORDS = (
    'put the block in zone pick up place go home then and to on a it stop wait open close gripper '
    'move left right forward back down over next of near red orange yellow green blue purple '
    'black white grey object arm table clear all both stack push pull hold release'
).split()

_PIECES = re.compile(r'[a-z]+| |.', re.DOTALL)


class WordTokenizer:
    """Words of the tabletop's grammar as one id each; anything else as UTF-8 bytes.

    A single space before a word belongs to it and takes no id, so 'put the red block in the blue
    zone' has 8 ids. Ids: 0 padding, 1 end, 2 space, 3..258 bytes, then the words. Lower and upper
    case differ: upper case goes by bytes.
    """

    name = 'words'

    def __init__(self) -> None:
        self._ids = {word: FIRST_WORD + i for i, word in enumerate(WORDS)}
        self.vocab = FIRST_WORD + len(WORDS)

    def encode(self, text: str, limit: int) -> list[int]:
        """Return the ids of ``text``, at most ``limit``.

        :raises ConfigError: it needs more; the message says how many.
        """
        pieces = _PIECES.findall(text)
        tokens: list[int] = []
        for i, piece in enumerate(pieces):
            if piece in self._ids:
                tokens.append(self._ids[piece])
            elif piece != ' ':
                tokens += [FIRST_BYTE + byte for byte in piece.encode()]
            elif not (
                0 < i < len(pieces) - 1 and {pieces[i - 1], pieces[i + 1]} <= self._ids.keys()
            ):
                tokens.append(SPACE)
        if len(tokens) > limit:
            raise ConfigError(f'text {text!r:.80} has {len(tokens)} tokens; give at most {limit}')
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ``tokens``; padding and end are skipped.

        :raises ConfigError: an id outside the vocabulary.
        """
        text, pending, after_word = '', bytearray(), False
        for token in [*tokens, END]:
            if not 0 <= token < self.vocab:
                raise ConfigError(f'token {token} is outside the vocabulary of {self.vocab}')
            if FIRST_BYTE <= token < FIRST_WORD:
                pending.append(token - FIRST_BYTE)
                after_word = False
                continue
            text += pending.decode(errors='replace')
            pending.clear()
            if token == SPACE:
                text += ' '
            elif token >= FIRST_WORD:
                text += (' ' if after_word else '') + WORDS[token - FIRST_WORD]
            after_word = token >= FIRST_WORD
        return text


def make_tokenizer(name: str) -> Tokenizer:
    """
    Return the tokenizer called ``name``.

    :raises ConfigError: an unknown or empty name.
    """
    if name == 'words':
        return WordTokenizer()
    raise ConfigError(f"tokenizer {name!r} is unknown; use 'words', or give the policy token ids")
