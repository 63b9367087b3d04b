"""Token sequences for the small planner: its tokenizer and the batches it is trained on."""

from collections.abc import Iterator
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flashrt_core.errors import ConfigError
from flashrt_core.planners.text import ByteTokenizer
from flashrt_core.tabletop.instructions import draw_example
from flashrt_core.tabletop.instructions import Example
from flashrt_core.tabletop.instructions import prompt

END = '<|endoftext|>'
VOCAB = 384
CORPUS = 20_000  # examples that the tokenizer is made from
IGNORED = -100   # label of a token that is not learnt


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


def batches(tokenizer: ByteTokenizer, size: int, length: int, seed: int,
            step: int = 0) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Give (tokens, labels) int64 [size, length] without end, the first being that of ``step``.

    A batch depends on (seed, step) alone, so training goes on where it stopped. A label stands
    where the token is; prompt and padding are IGNORED. Longer examples are drawn anew.
    """
    end = tokenizer.special[END]
    while True:
        rng = np.random.default_rng([seed, 1, step])
        tokens = np.full((size, length), end, np.int64)
        labels = np.full((size, length), IGNORED, np.int64)
        row = 0
        while row < size:
            before, answer = encode(tokenizer, draw_example(rng))
            count = len(before) + len(answer)
            if count > length:
                continue
            tokens[row, :count] = [*before, *answer]
            labels[row, len(before):count] = answer
            row += 1
        yield tokens, labels
        step += 1
