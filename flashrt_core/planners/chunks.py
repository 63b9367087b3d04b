"""The chunk plan: how tokens are cut into captured prefill keys. It is part of the result.

Rule: the cheapest cover of the tokens by keys, where a chunk of key T costs ``max(T, ridge)``.
Only the last chunk may be padded. Of equally cheap covers the one with fewer chunks wins, then the
one with less padding; larger keys come first. Reason: below the ridge a chunk is bound by reading
the weights, so one padded key costs less than several small ones; above it padding costs as much
as tokens do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
import functools

from flashrt_core.errors import ConfigError
from flashrt_core.errors import PromptEmpty
from flashrt_core.errors import PromptTooLong


@dataclass(frozen=True)
class Chunk:
    """One prefill plan: ``length`` tokens in a key of ``tokens``, from position ``start`` on.

    ``span``: the KV prefix attended, at least ``start + length``; a power of two or the context.
    """

    tokens: int
    length: int
    start: int
    span: int

    @property
    def key(self) -> tuple[int, int]:
        """The graph key (tokens, span)."""
        return (self.tokens, self.span)


def plan_chunks(
    count: int,
    start: int,
    *,
    keys: Sequence[int],
    context: int,
    ridge: int,
    smallest_span: int,
) -> tuple[Chunk, ...]:
    """Cut ``count`` tokens that follow ``start`` tokens; a pure function, any thread.

    :param keys: captured chunk sizes in tokens. :param ridge: tokens up to which a chunk costs the
        same, about 190 for bf16 weights on an H200 (peak over bandwidth).
    :raises PromptEmpty: no tokens. :raises PromptTooLong: they do not fit the context.
    """
    if count < 1:
        raise PromptEmpty(
            'there are no tokens to append: give at least one, or decode from what the state holds'
        )
    if start + count > context:
        raise PromptTooLong(
            f'{count} tokens after the {start} in the state exceed the context of {context}; '
            f'give at most {context - start}, or bind with a longer context'
        )
    chunks = []
    for tokens, length in cuts(count, tuple(sorted(set(keys))), ridge):
        span = span_of(start + length, smallest_span, context)
        chunks.append(Chunk(tokens, length, start, span))
        start += length
    return tuple(chunks)


def cuts(count: int, keys: tuple[int, ...], ridge: int) -> tuple[tuple[int, int], ...]:
    """Return (key, valid length) of each chunk for ``count`` tokens; ``keys`` ascending."""
    largest = keys[-1]
    # Full chunks of the largest key until less than two of it are left: the table stays small.
    full = max(0, count // largest - 1)
    found = [largest] * full + list(covers(keys, ridge)[count - full * largest])
    last = count - sum(found[:-1])
    return (*((key, key) for key in found[:-1]), (found[-1], last))


@functools.cache
def covers(keys: tuple[int, ...], ridge: int) -> tuple[tuple[int, ...], ...]:
    """Return the cheapest cover, keys descending, of each count below two of the largest key.

    Dynamic programming, tens of milliseconds at first: a bind calls it. An optimal cover has less
    padding than its smallest key, so that one can be the padded one.
    """
    best: list[tuple[int, int, int, tuple[int, ...]]] = [(0, 0, 0, ())]
    for left in range(1, 2 * keys[-1]):
        found = []
        for key in keys:
            cost, chunks, total, rest = best[max(0, left - key)]
            order = tuple(sorted((-key, *rest)))
            found.append((cost + max(key, ridge), chunks + 1, total + key, order))
            if key >= left:
                break
        best.append(min(found))
    return tuple(tuple(-key for key in negative) for *_, negative in best)


def graph_keys(keys: Sequence[int], smallest_span: int, context: int) -> list[tuple[int, int]]:
    """Return every graph key (tokens, span) that a chunk plan can name.

    A key holds more tokens than the next smaller one does, which sets its shortest span.
    """
    found = []
    ordered = sorted(set(keys))
    for smaller, tokens in zip([0, *ordered], ordered):
        span = span_of(smaller + 1, smallest_span, context)
        while True:
            found.append((tokens, span))
            if span == context:
                break
            span = min(2 * span, context)
    return found


def span_of(end: int, smallest: int, context: int) -> int:
    """Return the attended prefix for keys up to ``end``: a power of two times ``smallest``."""
    span = smallest
    while span < end:
        span *= 2
    return min(span, context)


def check_keys(keys: Sequence[int], context: int, ridge: int, smallest_span: int) -> None:
    """Raise ConfigError unless these can make a chunk plan."""
    whole = all(type(value) is int and value >= 1 for value in (*keys, context, smallest_span))
    if not whole or not keys or len(set(keys)) != len(keys) or type(ridge) is not int or ridge < 0:
        raise ConfigError(
            f'prefill_keys {tuple(keys)}, ridge {ridge}, span {smallest_span}, context {context}: '
            'give distinct whole numbers of tokens, all 1 or more, ridge 0 or more'
        )
    if max(keys) > context:
        raise ConfigError(
            f'prefill key {max(keys)} is longer than the context of {context} tokens; '
            'leave it out or bind with a longer context'
        )
