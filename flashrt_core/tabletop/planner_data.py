"""Token sequences for the small planner: its tokenizer and the batches it is trained on."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
import json
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flashrt_core.errors import ConfigError
from flashrt_core.planners.text import ByteTokenizer
from flashrt_core.planners.vocabularies import json_tokenizer
from flashrt_core.tabletop.instructions import draw_example
from flashrt_core.tabletop.instructions import Example
from flashrt_core.tabletop.instructions import prompt
from flashrt_core.tabletop.training import Recipe
from flashrt_core.tabletop.workers import make_pool

END = '<|endoftext|>'
VOCAB = 384
CORPUS = 20_000  # examples that the tokenizer is made from
IGNORED = -100   # label of a token that is not learnt
LENGTH = 96      # tokens of a training sequence

_tokenizer: ByteTokenizer | None = None


def train_tokenizer(path: str | Path, seed: int) -> None:
    """Write a byte-level BPE ``tokenizer.json`` made from generated training examples.

    :raises ConfigError: the package tokenizers is missing.
    """
    try:
        import tokenizers
    except ImportError:
        raise ConfigError('training a tokenizer needs the package tokenizers; install it: '
                          'pip install tokenizers') from None
    rng = np.random.default_rng([seed, 0])
    corpus = []
    for _ in range(CORPUS):
        example = draw_example(rng)
        corpus.append(prompt(example.scene, example.instruction) + example.answer)
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=[END], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made.train_from_iterator(corpus, trainer)
    # One token a line would be thousands of lines; the file is data.
    Path(path).write_text(json.dumps(json.loads(made.to_str())) + '\n', encoding='utf-8')


def encode(tokenizer: ByteTokenizer, example: Example) -> tuple[list[int], list[int]]:
    """Return the tokens of prompt and answer, the answer's ended by END."""
    before = tokenizer.encode(prompt(example.scene, example.instruction))
    return before, [*tokenizer.encode(example.answer), tokenizer.special[END]]


class Batches:
    """Batches for the steps of a training from ``done`` on, made ahead by other processes."""

    def __init__(self, tokenizer: Path, recipe: Recipe, done: int = 0, workers: int = 0) -> None:
        count = workers or max(1, min(8, (os.cpu_count() or 1) - 1))
        self._pool = make_pool(count, _read_tokenizer, tokenizer)
        self._given = (recipe.batch, recipe.seed)
        self._next = done
        self._ready: deque[Future[NDArray[np.int64]]] = deque()
        self._ahead = 6 * count
        self._submit()
        self._ready[0].result()  # the processes are at work

    def take(self) -> NDArray[np.int64]:
        """Return (tokens, labels) of the next step, int64 [2, batch, LENGTH]."""
        self._submit()
        return self._ready.popleft().result()

    def _submit(self) -> None:
        while len(self._ready) <= self._ahead:
            self._ready.append(self._pool.submit(_batch, *self._given, self._next))
            self._next += 1

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)


def _read_tokenizer(path: Path) -> None:
    global _tokenizer
    _tokenizer = json_tokenizer(path)


def _batch(size: int, seed: int, step: int) -> NDArray[np.int64]:
    assert _tokenizer is not None
    return batch(_tokenizer, size, LENGTH, seed, step)


def batch(tokenizer: ByteTokenizer, size: int, length: int, seed: int,
          step: int) -> NDArray[np.int64]:
    """Return (tokens, labels) of a step, int64 [2, size, length].

    It depends on (seed, step) alone, so training goes on where it stopped. A label stands where
    the token is; prompt and padding are IGNORED. Longer examples are drawn anew.
    """
    end = tokenizer.special[END]
    rng = np.random.default_rng([seed, 1, step])
    found = np.full((2, size, length), IGNORED, np.int64)
    found[0] = end
    row = 0
    while row < size:
        before, answer = encode(tokenizer, draw_example(rng))
        count = len(before) + len(answer)
        if count > length:
            continue
        found[0, row, :count] = [*before, *answer]
        found[1, row, len(before):count] = answer
        row += 1
    return found
