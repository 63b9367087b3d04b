"""Decoding options: one frozen record, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass
import math

from flashrt_core.errors import ConfigError

GRAMMAR_KINDS = ('json', 'regex', 'lark')
DRAFTS_LIMIT = 16
STOPS_LIMIT = 64

# Columns of the sampler's state buffer, float32 [..., 6]; top_k is exact there up to 2**24.
PARAMETERS = ('temperature', 'top_k', 'top_p', 'presence', 'frequency', 'repetition')


@dataclass(frozen=True)
class GrammarSource:
    """A grammar as text: a JSON schema, a regular expression or a Lark grammar.

    :raises ConfigError: an unknown kind or an empty text.
    """

    kind: str
    text: str
    name: str = ''

    def __post_init__(self) -> None:
        if self.kind not in GRAMMAR_KINDS:
            raise ConfigError(
                f'grammar kind {self.kind!r} is unknown; choose from {", ".join(GRAMMAR_KINDS)}'
            )
        if not isinstance(self.text, str) or not self.text.strip():
            raise ConfigError(f'grammar {self.label} is empty; give its text')

    @property
    def label(self) -> str:
        """Its name for messages."""
        return repr(self.name) if self.name else f'of kind {self.kind!r}'


@dataclass(frozen=True)
class Options:
    """How tokens are chosen, and when a stream ends.

    ``temperature`` 0 is greedy. ``top_k`` 0 and ``top_p`` 1 keep every token. ``presence`` and
    ``frequency`` are subtracted from the logits of tokens sampled before, once and per occurrence;
    ``repetition`` divides their logits above 0 and multiplies those below.
    ``seed``: signed or unsigned 64 bits. ``stop``: texts that end the stream, themselves left out.
    ``draft_tokens``: of speculation, 0 without.

    :raises ConfigError: a value out of range, named with what is allowed.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    grammar: GrammarSource | None = None
    draft_tokens: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            raise ConfigError(f'stop is the text {self.stop!r:.80}; give a list of texts')
        object.__setattr__(self, 'stop', tuple(self.stop))
        self._check_numbers()
        if len(self.stop) > STOPS_LIMIT or not all(isinstance(s, str) and s for s in self.stop):
            raise ConfigError(
                f'stop is {list(self.stop)!r:.200}; give at most {STOPS_LIMIT} texts, none empty'
            )

    def _check_numbers(self) -> None:
        ranges = {
            'temperature': (float, 0.0, 1e4),
            'top_k': (int, 0, 2**24),
            'top_p': (float, 0.0, 1.0),
            'seed': (int, -(2**63), 2**64 - 1),
            'presence': (float, -1e4, 1e4),
            'frequency': (float, -1e4, 1e4),
            'repetition': (float, 1e-4, 1e4),
            'max_tokens': (int, 1, 2**31 - 1),
            'draft_tokens': (int, 0, DRAFTS_LIMIT),
        }
        for name, (kind, low, high) in ranges.items():
            value = getattr(self, name)
            allowed = (int, float) if kind is float else (int,)
            if type(value) not in allowed or not math.isfinite(value):
                raise ConfigError(f'{name} is {value!r}; give a finite {kind.__name__}')
            if not low <= value <= high or (name == 'top_p' and value == 0):
                over = ' above 0' if name == 'top_p' else ''
                raise ConfigError(f'{name} is {value!r}; give {low} to {high}{over}')

    def parameters(self) -> tuple[float, ...]:
        """Return the sampler's row of the state buffer, in the order of ``PARAMETERS``."""
        return tuple(float(getattr(self, name)) for name in PARAMETERS)

    @property
    def signed_seed(self) -> int:
        """The seed as an int64 holds it; the same 64 bits."""
        return (self.seed + 2**63) % 2**64 - 2**63

    @property
    def greedy(self) -> bool:
        """Whether the seed has no influence."""
        return self.temperature == 0 or self.top_k == 1
