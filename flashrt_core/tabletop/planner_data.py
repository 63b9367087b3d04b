"""Token sequences for the small planner: its tokenizer and the batches it is trained on."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
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
CORPUS = 20_000  # lessons that the tokenizer is made from
IGNORED = -100   # label of a token that is not learnt
# Tokens of a training sequence; longer lessons are dropped. With 96 nothing was shown of the
# length that one in thirty of the held-out plans has.
LENGTH = 128
# Colours that no table has.
OTHER_WORDS = ('pink', 'white', 'black', 'brown', 'grey', 'cyan', 'teal', 'gold', 'silver',
               'violet')
# Kinds of parts that stand for several goals: rare, and mostly in vain, as they are drawn.
LISTS = ('all', 'except', 'sort', 'empty', 'loose')
_COLOUR = re.compile(rf'\b(?:{"|".join(COLOURS)})\b')

_tokenizer: ByteTokenizer | None = None


@dataclass(frozen=True)
class Lessons:
    """What a training shows besides the language as it is drawn; no lesson is held out.

    ``renamed``: share of the lessons in which some colours are called ``OTHER_WORDS``. A planner
    that knows six colours learns by heart which of their 36 pairs there are; with words that any
    pair may hold it learns to copy them. No pair that is held out comes up by it.
    ``lists``: share that begins with one of ``LISTS`` and has a plan.
    ``deep``: share of these that go on with another list. In the language as it is drawn only pick
    and home follow the kinds that put is held out after, which teaches that nothing is put then.
    """

    renamed: float = 0.0
    lists: float = 0.0
    deep: float = 0.0

    def __post_init__(self) -> None:
        for name, share in vars(self).items():
            if not 0 <= share <= 1:
                raise ConfigError(f'{name} is {share}; give a share from 0 to 1')

    def draw(self, rng: np.random.Generator) -> tuple[str, str]:
        """Return (prompt, answer) of a lesson."""
        example = self._example(rng)
        words = self._words(rng)

        def call(text: str) -> str:
            return _COLOUR.sub(lambda found: words.get(found[0], found[0]), text)

        return call(prompt(example.scene, example.instruction)), call(example.answer)

    def _example(self, rng: np.random.Generator) -> Example:
        if not self.lists or rng.random() >= self.lists:
            return draw_example(rng)
        kind = LISTS[int(rng.random() * len(LISTS))]
        deep = bool(self.deep and rng.random() < self.deep)
        while True:
            example = draw_example(rng, first=kind, deep=deep)
            if example.plan and (not deep or set(example.kinds[1:]) & set(LISTS)):
                return example

    def _words(self, rng: np.random.Generator) -> dict[str, str]:
        """Return what some colours are called, each by a word of its own."""
        if not self.renamed or rng.random() >= self.renamed:
            return {}
        others = [OTHER_WORDS[i] for i in np.argsort(rng.random(len(OTHER_WORDS)), kind='stable')]
        drawn = rng.random(len(COLOURS)) < 0.5
        return {c: other for c, other, given in zip(COLOURS, others, drawn) if given}


AS_DRAWN = Lessons()


def train_tokenizer(path: str | Path, seed: int, lessons: Lessons) -> None:
    """Write a byte-level BPE ``tokenizer.json`` made from generated lessons.

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
        corpus.append(''.join(lessons.draw(rng)))
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=[END], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made.train_from_iterator(corpus, trainer)
    # One token a line would be thousands of lines; the file is data.
    Path(path).write_text(json.dumps(json.loads(made.to_str())) + '\n', encoding='utf-8')


def encode(tokenizer: ByteTokenizer, question: str, answer: str) -> tuple[list[int], list[int]]:
    """Return the tokens of prompt and answer, the answer's ended by END."""
    return tokenizer.encode(question), [*tokenizer.encode(answer), tokenizer.special[END]]


class Batches:
    """Batches for the steps of a training from ``done`` on, made ahead by other processes."""

    def __init__(self, tokenizer: Path, recipe: Recipe, lessons: Lessons, done: int = 0,
                 workers: int = 0) -> None:
        count = workers or max(1, min(16, (os.cpu_count() or 1) - 1))
        self._pool = make_pool(count, _read_tokenizer, tokenizer)
        self._given = (lessons, recipe.batch, recipe.seed)
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


def _batch(lessons: Lessons, size: int, seed: int, step: int) -> NDArray[np.int64]:
    assert _tokenizer is not None
    return batch(_tokenizer, lessons, size, LENGTH, seed, step)


def batch(tokenizer: ByteTokenizer, lessons: Lessons, size: int, length: int, seed: int,
          step: int) -> NDArray[np.int64]:
    """Return (tokens, labels) of a step, int64 [2, size, length].

    It depends on (lessons, seed, step) alone, so training goes on where it stopped. A label stands
    where the token is; prompt and padding are IGNORED. Longer lessons are drawn anew.
    """
    end = tokenizer.special[END]
    rng = np.random.default_rng([seed, 1, step])
    found = np.full((2, size, length), IGNORED, np.int64)
    found[0] = end
    row = 0
    while row < size:
        before, answer = encode(tokenizer, *lessons.draw(rng))
        count = len(before) + len(answer)
        if count > length:
            continue
        found[0, row, :count] = [*before, *answer]
        found[1, row, len(before):count] = answer
        row += 1
    return found
