"""Token sequences for the small planner: its tokenizer and the batches it is trained on."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
import json
import os
from pathlib import Path
import re

import numpy as np
from numpy.typing import NDArray

from flashrt_core.errors import ConfigError
from flashrt_core.planners.text import ByteTokenizer
from flashrt_core.planners.vocabularies import json_tokenizer
from flashrt_core.tabletop.instructions import draw_example
from flashrt_core.tabletop.instructions import Example
from flashrt_core.tabletop.instructions import prompt
from flashrt_core.tabletop.state import COLOURS
from flashrt_core.tabletop.training import Recipe
from flashrt_core.tabletop.workers import make_pool

END = '<|endoftext|>'
VOCAB = 384
CORPUS = 20_000  # examples that the tokenizer is made from
IGNORED = -100   # label of a token that is not learnt
LENGTH = 96      # tokens of a training sequence
# Colours that no table has: words to learn copying from, so that pairs are not learnt by heart.
OTHER_WORDS = ('pink', 'white', 'black', 'brown', 'grey', 'cyan', 'teal', 'gold', 'silver',
               'violet')
RENAMED_SHARE = 0.5  # of the examples
# Kinds of parts that stand for several goals: rare, and mostly in vain, as they are drawn.
LISTS = ('all', 'except', 'sort', 'empty', 'loose')
LISTS_SHARE = 0.5  # of the examples begin with one and have a plan
_COLOUR = re.compile(rf'\b(?:{"|".join(COLOURS)})\b')

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
        corpus.append(''.join(renamed(rng, draw_lesson(rng))))
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=[END], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made.train_from_iterator(corpus, trainer)
    # One token a line would be thousands of lines; the file is data.
    Path(path).write_text(json.dumps(json.loads(made.to_str())) + '\n', encoding='utf-8')


def draw_lesson(rng: np.random.Generator) -> Example:
    """Return an example that training may show; every other one begins with one of ``LISTS``."""
    if rng.random() >= LISTS_SHARE:
        return draw_example(rng)
    kind = LISTS[int(rng.random() * len(LISTS))]
    while True:
        example = draw_example(rng, first=kind)
        if example.plan:
            return example


def renamed(rng: np.random.Generator, example: Example) -> tuple[str, str]:
    """
    Return prompt and answer, in every other example with some colours called other words.

    Training holds out pairs of colours, and a planner that knows six colours learns by heart which
    of the 36 pairs there are. No pair that is held out comes up by it: a colour keeps its name or
    gets one of ``OTHER_WORDS``.
    """
    words = dict(zip(COLOURS, COLOURS))
    if rng.random() < RENAMED_SHARE:
        others = [OTHER_WORDS[i] for i in np.argsort(rng.random(len(OTHER_WORDS)), kind='stable')]
        drawn = rng.random(len(COLOURS)) < 0.5
        words |= {c: other for c, other, given in zip(COLOURS, others, drawn) if given}

    def call(text: str) -> str:
        return _COLOUR.sub(lambda found: words[found[0]], text)

    return call(prompt(example.scene, example.instruction)), call(example.answer)


def encode(tokenizer: ByteTokenizer, question: str, answer: str) -> tuple[list[int], list[int]]:
    """Return the tokens of prompt and answer, the answer's ended by END."""
    return tokenizer.encode(question), [*tokenizer.encode(answer), tokenizer.special[END]]


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
        before, answer = encode(tokenizer, *renamed(rng, draw_lesson(rng)))
        count = len(before) + len(answer)
        if count > length:
            continue
        found[0, row, :count] = [*before, *answer]
        found[1, row, len(before):count] = answer
        row += 1
    return found
