"""Text to token ids: the seam, a small tokenizer for the tabletop, and SentencePiece files."""

from __future__ import annotations

from collections.abc import Sequence
import hashlib
from pathlib import Path
import re
from typing import Any
from typing import Protocol

from flashrt_core.config_files import lfs_remedy
from flashrt_core.errors import ConfigError


class Tokenizer(Protocol):
    """Text to ids and back; the same text always gives the same ids. Any thread.

    ``begin``: ids that every prompt begins with. ``identity``: equal for equal ids of all texts.
    """

    @property
    def name(self) -> str: ...

    @property
    def vocab(self) -> int: ...

    @property
    def begin(self) -> tuple[int, ...]: ...

    @property
    def identity(self) -> str: ...

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

    name = identity = 'words'
    begin = ()

    def __init__(self) -> None:
        self._ids = {word: FIRST_WORD + i for i, word in enumerate(WORDS)}
        self.vocab = FIRST_WORD + len(WORDS)

    def encode(self, text: str, limit: int) -> list[int]:
        """Return the ids of ``text``, at most ``limit``.

        :raises ConfigError: it needs more; the message says how many. Or it is no UTF-8.
        """
        _check_text(text)
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


class SentencePieceTokenizer:
    """A user's SentencePiece file, such as PaliGemma's ``tokenizer.model``.

    :param path: the file.
    :raises ConfigError: sentencepiece is not installed, or the file is missing or something else.
    """

    def __init__(self, path: str | Path) -> None:
        self.name = str(path)
        try:
            import sentencepiece  # optional: only this tokenizer needs it
        except ImportError:
            raise ConfigError(
                f'tokenizer {self.name!r:.200} needs the package sentencepiece; install it with '
                "'pip install sentencepiece', or give the policy token ids"
            ) from None
        try:
            data = Path(path).read_bytes()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f'tokenizer {self.name!r:.200} cannot be read: {error}; give the tokenizer.model '
                'that goes with the checkpoint'
            ) from None
        self._model: Any = sentencepiece.SentencePieceProcessor()
        try:
            self._model.LoadFromSerializedProto(data)
            self.vocab = int(self._model.vocab_size())
        except (RuntimeError, TypeError) as error:
            raise ConfigError(
                f'tokenizer {self.name!r:.200} is not a SentencePiece model: '
                f'{lfs_remedy(data) or error}; give the tokenizer.model that goes with the '
                'checkpoint'
            ) from None
        first = int(self._model.bos_id())
        self.begin = (first,) if first >= 0 else ()
        self.identity = f'sentencepiece {hashlib.sha256(data).hexdigest()}'

    def encode(self, text: str, limit: int) -> list[int]:
        """Return the ids of ``text``, at most ``limit``, without those of ``begin``.

        :raises ConfigError: it needs more; the message says how many. Or it is no UTF-8.
        """
        _check_text(text)
        tokens: list[int] = self._model.encode(text)
        if len(tokens) > limit:
            raise ConfigError(f'text {text!r:.80} has {len(tokens)} tokens; give at most {limit}')
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ``tokens``; control tokens are skipped.

        :raises ConfigError: an id outside the vocabulary.
        """
        for token in tokens:
            if not 0 <= token < self.vocab:
                raise ConfigError(f'token {token} is outside the vocabulary of {self.vocab}')
        text: str = self._model.decode([int(token) for token in tokens])
        return text


def _check_text(text: str) -> None:
    """Verify that a text has bytes; raises ConfigError."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f'text {text!r:.80} cannot be encoded as UTF-8: {error.reason} at character '
            f'{error.start}; leave it out'
        ) from None


def make_tokenizer(name: str) -> Tokenizer:
    """
    Return the tokenizer called ``name``: 'words', or the path of a SentencePiece ``.model`` file.

    :raises ConfigError: an unknown or empty name, or a file that does not serve.
    """
    if name == 'words':
        return WordTokenizer()
    if name.endswith('.model'):
        return SentencePieceTokenizer(name)
    raise ConfigError(
        f"tokenizer {name!r} is unknown; use 'words' or the path of a tokenizer.model, or give "
        'the policy token ids'
    )
