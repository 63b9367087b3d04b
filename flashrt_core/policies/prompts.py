"""The text form that a policy family was trained on, around a prompt and around the state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flashrt_core.errors import ConfigError
from flashrt_core.policies.normalise import Affine
from flashrt_core.policies.normalise import STATE_BINS
from flashrt_core.policies.normalise import state_bins
from flashrt_core.policies.text import make_tokenizer
from flashrt_core.policies.text import Tokenizer

# What stands before and behind a prompt or subgoal. Source: openpi ``PaligemmaTokenizer``.
FORMS = {'pi0': ('', '\n'), 'pi05': ('Task: ', ', State:')}
END_OF_STATE = ';\nAction: '
MOST_FOR_WORDS = 4096  # vocabulary of a trained model that may read the tabletop's words
TRIED = ('go', 'Pick up the red block.', 'place 3 blocks')


class Prompts:
    """A tokenizer with a family's form: ``encode`` gives what the model reads for a text.

    Underscores and line ends become spaces, as in training. Any thread.
    """

    def __init__(self, tokenizer: Tokenizer, family: str) -> None:
        self._tokenizer = tokenizer
        self._before, self._behind = FORMS[family]
        self.name, self.vocab = tokenizer.name, tokenizer.vocab
        self.begin, self.identity = tokenizer.begin, tokenizer.identity

    def encode(self, text: str, limit: int) -> list[int]:
        """Return the ids of the whole form, at most ``limit``.

        :raises ConfigError: it needs more; the message says how many.
        """
        cleaned = text.strip().replace('_', ' ').replace('\n', ' ')
        whole = f'{self._before}{cleaned}{self._behind}'
        return [*self.begin, *self._tokenizer.encode(whole, limit - len(self.begin))]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ids without the form around it.

        :raises ConfigError: an id outside the vocabulary.
        """
        inner = list(tokens)
        if self.begin and tuple(inner[: len(self.begin)]) == self.begin:
            inner = inner[len(self.begin) :]
        text = self._tokenizer.decode(inner)
        return text.removeprefix(self._before).removesuffix(self._behind)


class StateText:
    """The state as Pi0.5 reads it: " s1 s2 ...;", a line end and "Action: ", s the bin numbers.

    The ids of each number are looked up, not tokenised again, so a tick pays microseconds. That is
    right where a tokenizer cuts text at spaces, which is tried here on whole prompts.

    :param size: joints. :param limit: tokens that the state may take.
    :raises ConfigError: the tokenizer joins pieces across spaces, or the longest state needs more.
    """

    def __init__(self, tokenizer: Tokenizer, scale: Affine, size: int, limit: int) -> None:
        self._scale = scale
        self._of_bin = {
            i: tuple(tokenizer.encode(f' {i}', limit)) for i in range(-1, STATE_BINS)
        }
        self._end = tuple(tokenizer.encode(END_OF_STATE, limit))
        longest = size * max(map(len, self._of_bin.values())) + len(self._end)
        if longest > limit:
            raise ConfigError(
                f'state_tokens is {limit}; a state of {size} joints takes up to {longest} tokens: '
                f'give {longest}'
            )
        before, behind = FORMS['pi05']
        for i, text in enumerate(TRIED):
            bins = [(i + 1) * 41 * (j + 1) % (STATE_BINS + 1) - 1 for j in range(size)]
            head = f'{before}{text}{behind}'
            whole = head + ''.join(f' {b}' for b in bins) + END_OF_STATE
            room = limit + len(whole.encode())
            parts = tokenizer.encode(head, room) + self._join(bins)
            if tokenizer.encode(whole, room) != parts:
                raise ConfigError(
                    f'tokenizer {tokenizer.name!r} joins text across spaces ({whole!r}), so the '
                    "state cannot be put behind a prompt; give the checkpoint's own tokenizer"
                )

    def tokens(self, state: NDArray[np.float32]) -> list[int]:
        """Return the ids of a state [joints] in physical units."""
        return self._join(state_bins(self._scale.normalise(state)))

    def _join(self, bins: Sequence[int]) -> list[int]:
        return [token for b in bins for token in self._of_bin[b]] + list(self._end)


def make_prompts(name: str, family: str, vocab: int, trained: bool) -> Tokenizer | None:
    """Return the tokenizer ``name`` in the form of ``family``; None for an empty name.

    The tabletop's words are Pi0's whole prompts: they take no form. They are far fewer than the
    ids of a published model, where they may only stand in while its weights are random.

    :param vocab: of the model. :param trained: whether its weights are from a checkpoint.
    :raises ConfigError: the tokenizer has another vocabulary than the model.
    """
    if not name:
        return None
    tokenizer = make_tokenizer(name)
    words = name == 'words'
    limit = MOST_FOR_WORDS if trained else vocab
    fits = tokenizer.vocab <= vocab <= limit if words else tokenizer.vocab == vocab
    if not fits:
        raise ConfigError(
            f'tokenizer {name!r} has {tokenizer.vocab} tokens, the model {vocab}; give the '
            "tokenizer.model of the checkpoint, for Pi0 and Pi0.5 PaliGemma's"
        )
    return tokenizer if words and family == 'pi0' else Prompts(tokenizer, family)
