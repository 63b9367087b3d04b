"""Grammars: which tokens may follow, as the mask that the sampler reads.

The matching is llguidance's (a parser over the bytes of all tokens). The state keeps the tokens
that a grammar has followed; after a restore its matcher is made anew from them, see ``followed``.
"""

from __future__ import annotations

from collections.abc import Sequence
import copy
import functools
import re
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashrt_core.errors import ConfigError
from flashrt_core.errors import PlannerError
from flashrt_core.planners.options import GrammarSource
from flashrt_core.planners.sampling import mask_words
from flashrt_core.planners.text import Tokenizer
from flashrt_core.planners.vocabularies import needed

SHOWN = 300  # characters of a parser's complaint


class Grammar:
    """A grammar checked against a vocabulary; makes matchers. Any thread.

    :param vocab: rows of the model's embedding; ids beyond the tokenizer's are never allowed.
    :raises ConfigError: the text is no grammar of its kind (what is wrong, and where), the package
        llguidance is missing, or the tokenizer has no id that ends a text.
    """

    def __init__(self, source: GrammarSource, tokenizer: Tokenizer, vocab: int) -> None:
        self.source = source
        self.vocab = vocab
        self.tokenizer = tokenizer
        self.words = mask_words(vocab)
        self._compiled = check_grammar(source)
        self._inner: Any = _tokens(tokenizer)  # type: ignore[arg-type]

    @property
    def label(self) -> str:
        """Its name for messages."""
        return self.source.label

    def matcher(self, tokens: Sequence[int] = (), start: int = 0) -> Matcher:
        """Return a matcher that has followed ``tokens``, the first of them at position ``start``.

        :raises PlannerError: the grammar does not allow one of them.
        """
        matcher = Matcher(self, start)
        for token in tokens:
            matcher.accept(token)
        return matcher

    def parser(self) -> Any:
        """Return llguidance's matcher at the grammar's beginning."""
        return _library().LLMatcher(self._inner, self._compiled, log_level=0)


@functools.lru_cache(maxsize=8)
def _made(source: GrammarSource, tokenizer: Tokenizer, vocab: int) -> Grammar:
    return Grammar(source, tokenizer, vocab)


def compiled_grammar(source: GrammarSource, tokenizer: Tokenizer, vocab: int) -> Grammar:
    """Return the grammar for a vocabulary, the newest are kept; raises as ``Grammar``."""
    return _made(source, tokenizer, vocab)  # type: ignore[arg-type]


class Matcher:
    """A grammar and the tokens followed so far (``tokens``); one thread at a time.

    An end token is allowed where the text may end, and alone where it must.
    """

    def __init__(self, grammar: Grammar, start: int = 0) -> None:
        self.grammar = grammar
        self.start = start
        self.tokens: list[int] = []
        self._parser = grammar.parser()
        self._ended = False
        self._fail_if_broken()

    @property
    def position(self) -> int:
        """Where the next token will stand."""
        return self.start + len(self.tokens)

    @property
    def may_end(self) -> bool:
        """Whether the text so far satisfies the grammar."""
        return bool(self._parser.is_accepting())

    @property
    def must_end(self) -> bool:
        """Whether nothing but an end token may follow, or one has followed."""
        return self._ended or (self.may_end and bool(self._parser.is_stopped()))

    def fill(self, mask: Tensor) -> None:
        """Write the mask of the next token into int32 ``[words]`` on the CPU.

        :raises PlannerError: no token may follow, or the grammar grew too complex to follow.
        """
        if mask.dtype != torch.int32 or tuple(mask.shape) != (self.grammar.words,):
            raise PlannerError(
                f'the mask is {mask.dtype} {list(mask.shape)}; give int32 [{self.grammar.words}] '
                f'for the {self.grammar.vocab} tokens of the model'
            )
        words = np.frombuffer(self._parser.compute_bitmask(), '<i4')[: self.grammar.words]
        if self._ended:
            raise self._nothing('its text has ended')
        self._fail_if_broken()
        mask.zero_()
        mask[: len(words)].copy_(torch.from_numpy(words.copy()))

    def mask(self) -> Tensor:
        """Return the mask of the next token, int32 ``[words]`` on the CPU; as ``fill``."""
        mask = torch.empty(self.grammar.words, dtype=torch.int32)
        self.fill(mask)
        return mask

    def accept(self, token: int) -> None:
        """Follow one token that was chosen.

        :raises PlannerError: the grammar does not allow it here; the matcher is as it was.
        """
        tokenizer = self.grammar.tokenizer
        if not self._take(token):
            self._fail_if_broken()
            text = tokenizer.raw_piece(token) if 0 <= token < tokenizer.vocab else b''
            raise PlannerError(
                f'grammar {self.grammar.label} does not allow token {token} ({text!r:.40}) at '
                f'position {self.position}; sample with its mask, or rewind to before it'
            )

    def masks(self, drafts: Sequence[int]) -> Tensor:
        """Return the masks of the next tokens if ``drafts`` come, int32 ``[rows, words]``, CPU.

        One row for the next token and one behind each draft, up to the first draft that the
        grammar refuses or with which its text must end: a step that gives out no more than
        ``rows`` tokens gives those that one token at a time gives. The matcher stays as it is.

        :raises PlannerError: as ``fill``, for the next token.
        """
        ahead = copy.copy(self)
        ahead.tokens, ahead._parser = [*self.tokens], self._parser.deep_copy()
        rows = [ahead.mask()]
        for draft in drafts:
            if not ahead._take(draft) or ahead.must_end:
                break
            try:
                rows.append(ahead.mask())
            except PlannerError:  # a dead end: the step after this one says so
                break
        return torch.stack(rows)

    def rewind(self, count: int) -> None:
        """Return to after the first ``count`` tokens: what a restore to there needs.

        :raises PlannerError: fewer tokens than that were followed.
        """
        if not 0 <= count <= len(self.tokens):
            raise PlannerError(
                f'grammar {self.grammar.label} followed {len(self.tokens)} tokens and cannot '
                f'return to {count}; make its matcher from the tokens of the restored state'
            )
        kept, self.tokens = self.tokens[:count], []
        self._parser, self._ended = self.grammar.parser(), False
        for token in kept:
            self.accept(token)

    def _take(self, token: int) -> bool:
        """Follow one token if it is allowed; say whether it was."""
        tokenizer = self.grammar.tokenizer
        if self._ended or not 0 <= token < tokenizer.vocab:
            return False
        if token in tokenizer.ends:
            if not self.may_end:
                return False
            self._ended = True
        elif self._parser.validate_tokens([token]) != 1 or not self._parser.consume_token(token):
            return False
        self.tokens.append(token)
        return True

    def _fail_if_broken(self) -> None:
        if not self._parser.is_error():
            return
        problem = self._parser.get_error().strip().split('\n', 1)[0][:SHOWN]
        if problem.startswith('NoExtension'):  # llguidance's name of a dead end
            raise self._nothing('no token spells what must follow')
        raise PlannerError(
            f'grammar {self.grammar.label} cannot be followed at position {self.position}: '
            f'{problem}; simplify it'
        )

    def _nothing(self, why: str) -> PlannerError:
        return PlannerError(
            f'grammar {self.grammar.label} allows no token at position {self.position}: {why}; '
            'end the stream, or give another grammar'
        )


def check_grammar(source: GrammarSource) -> str:
    """Return the grammar in llguidance's own form; needs no vocabulary.

    :raises ConfigError: the text is no grammar of its kind, or the package is missing.
    """
    library = _library()
    make = {
        'json': library.LLMatcher.grammar_from_json_schema,
        'regex': library.LLMatcher.grammar_from_regex,
        'lark': library.LLMatcher.grammar_from_lark,
    }[source.kind]
    try:
        compiled: str = make(source.text)
    except ValueError as error:
        raise _refusal(source, str(error)) from None
    problem: str = library.LLMatcher.validate_grammar(compiled)
    if problem and not problem.startswith('WARNING'):
        raise _refusal(source, problem)
    return compiled


def _refusal(source: GrammarSource, problem: str) -> ConfigError:
    kind = {'json': 'JSON schema', 'regex': 'regular expression', 'lark': 'Lark grammar'}
    found = re.search(r'(\d+)\((\d+)\)', problem)
    where = f' at line {found[1]}, column {found[2]}' if found else ''
    return ConfigError(
        f'grammar {source.label} is no {kind[source.kind]} that can be used{where}: '
        f'{" ".join(problem.split())[:SHOWN]}; correct its text'
    )


@functools.lru_cache(maxsize=4)
def _tokens(tokenizer: Tokenizer) -> Any:
    """Return llguidance's index of a vocabulary; about a second for 250,000 tokens."""
    if not tokenizer.ends:
        raise ConfigError(
            f'tokenizer {tokenizer.name} has no token that ends a text, which a grammar needs; '
            'give a tokenizer with one'
        )
    library = _library()
    return library.LLTokenizer(
        library.TokenizerWrapper(_Vocabulary(tokenizer)), eos_token=list(tokenizer.ends)
    )


class _Vocabulary:
    """A vocabulary as llguidance reads it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.eos_token_id = tokenizer.ends[0]
        self.bos_token_id = None
        self.tokens = [tokenizer.raw_piece(i) for i in range(tokenizer.vocab)]
        self.special_token_ids = sorted(tokenizer.hidden)
        self._encode = tokenizer.encode

    def __call__(self, text: str | bytes) -> list[int]:
        try:
            return self._encode(text if isinstance(text, str) else text.decode())
        except ConfigError:  # a forced text that cannot be spelled: llguidance finds the dead end
            return []


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise needed('llguidance', 'a grammar') from None
    return llguidance
