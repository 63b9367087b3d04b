"""Ask a planner in a terminal: ``python -m flashrt_core.planners.chat --prompt 'Who are you?'``.

Every question is asked from the restored capsule of the system prompt: no answer depends on the
one before, and no question pays for the system prompt again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
import sys
import time
from typing import Any
from typing import TextIO

from flashrt_core.capsule import CapsuleStore
from flashrt_core.command_line import run
from flashrt_core.config_files import read_yaml
from flashrt_core.errors import ConfigError
from flashrt_core.planners import GrammarSource
from flashrt_core.planners import make_planner
from flashrt_core.planners import Options
from flashrt_core.planners.grammar import check_grammar
from flashrt_core.planners.session import PlannerSession
from flashrt_core.planners.text import ChatMl
from flashrt_core.runtime import pick_backend

SYSTEM = 'You are a helpful AI assistant named SmolLM, trained by Hugging Face'
CAPSULE = 'system'
LEAST_BUDGET = 16 << 20  # bytes; capsules take whole pages of 2 MiB


@dataclass(frozen=True)
class Answer:
    """What one question gave: its text, and wall times in milliseconds.

    ``ttft_ms``: from the question's text to the first token. ``reason``: why the answer ended.
    """

    text: str
    tokens: int
    ttft_ms: float
    total_ms: float
    reason: str

    @property
    def rate(self) -> float:
        """Tokens per second after the first; 0 for a single one."""
        rest = self.total_ms - self.ttft_ms
        return (self.tokens - 1) / rest * 1000 if self.tokens > 1 and rest > 0 else 0.0


class Chat:
    """A session whose system prompt is a pinned capsule; one thread.

    :param opening: begins every answer; None lets a model that thinks answer at once.
    """

    def __init__(
        self, session: PlannerSession, store: CapsuleStore, opening: str | None = None
    ) -> None:
        if session.tokenizer is None:
            raise ConfigError("the model's config names no tokenizer; add one, as tokenizer: qwen")
        self.session = session
        self.store = store
        self.tokenizer = session.tokenizer
        if opening is None:
            opening = ChatMl.NO_THINKING if '<think>' in self.tokenizer.special else ''
        self.form = ChatMl(self.tokenizer, opening)

    def begin(self, system: str) -> float:
        """Take the system prompt in and keep it as a capsule; milliseconds of both."""
        started = time.perf_counter()
        self.session.prefill(self.form.message('system', system)).result()
        boundary = self.session.boundary
        self.session.lane.at_boundary(
            lambda: self.store.snapshot(boundary, CAPSULE, pin=True)
        ).result()
        return (time.perf_counter() - started) * 1000

    def restore(self) -> Any:
        """Return to the system prompt; a RestoreReport."""
        boundary = self.session.boundary
        return self.session.lane.at_segment_end(
            lambda: self.store.restore(boundary, CAPSULE), 'restore'
        ).result()

    def ask(self, question: str, options: Options, out: TextIO) -> Answer:
        """Append the question and write the answer to ``out`` as it comes."""
        session = self.session
        stream = session.stream(options)  # makes the grammar, which takes a while
        started = time.perf_counter()
        session.append(self.form.ask(question)).result()
        parts: list[str] = []
        first_at, count = started, 0
        for token in stream:
            if not count:
                first_at = time.perf_counter()
            count += 1
            parts.append(token.text)
            print(token.text, end='', file=out, flush=True)
        ended = time.perf_counter()
        parts.append(stream.rest)
        print(stream.rest, file=out, flush=True)
        return Answer(
            ''.join(parts), count, (first_at - started) * 1000, (ended - started) * 1000,
            stream.reason,
        )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 done, 1 refused with a reason, 2 used wrongly."""
    arguments = _parser().parse_args(argv)
    return run('chat', lambda: _chat(arguments), refused=1)


def _chat(arguments: argparse.Namespace) -> int:
    options = _options(arguments)
    family, config = _model(arguments)
    backend = pick_backend(arguments.device)
    started = time.perf_counter()
    session = make_planner(family).bind(backend, config, _Progress())
    assert isinstance(session, PlannerSession)
    try:
        state = session.memory()['state']
        budget = state + LEAST_BUDGET  # the system prompt is one capsule of at most that
        store = CapsuleStore(backend, budget, 0)
        chat = Chat(session, store, arguments.opening)
        _say(f'model ready in {time.perf_counter() - started:.1f} s on {backend.name}')
        spent = chat.begin(arguments.system)
        info = store.get(CAPSULE, session.boundary.session)
        _say(f'system prompt: {session.position} tokens taken in and kept as a capsule of '
             f'{info.size_bytes / 1e6:.2f} MB in {spent:.1f} ms')
        for i, question in enumerate(arguments.prompt or _lines()):
            if i:
                report = chat.restore()
                _say(f'restored the system prompt in {report.us / 1000:.2f} ms, bit-exact: '
                     f'{"yes" if report.bit_exact else "no"}')
            print(f'> {question}', flush=True)
            answer = chat.ask(question, options, sys.stdout)
            _say(f'{answer.tokens} tokens, first after {answer.ttft_ms:.1f} ms, '
                 f'{answer.rate:.1f} tokens/s, ended by: {answer.reason}')
    finally:
        session.close()
    return 0


def _model(arguments: argparse.Namespace) -> tuple[str, Any]:
    """Return family and config: overrides on a YAML file, or on a base of that name."""
    changes = {
        name: getattr(arguments, name)
        for name in ('context', 'dtype', 'cpu_threads')
        if getattr(arguments, name) is not None
    }
    model, family = arguments.model, arguments.planner
    if not model.endswith(('.yaml', '.yml')):
        return family or 'llama', {'base': model, **changes}
    record = read_yaml(Path(model), 'planner config', beside=('weights', 'tokenizer'))
    return family or str(record.get('planner', 'llama')), {**record, **changes}


def _options(arguments: argparse.Namespace) -> Options:
    given = [kind for kind in ('json', 'regex', 'lark') if getattr(arguments, kind)]
    if len(given) > 1:
        raise ConfigError(f'--{" and --".join(given)} are given; give one grammar')
    grammar = None
    if given:
        grammar = GrammarSource(given[0], _text_of(getattr(arguments, given[0])), f'--{given[0]}')
        check_grammar(grammar)  # before a model is loaded
    return Options(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
        repetition=arguments.repetition,
        max_tokens=arguments.max_tokens,
        stop=tuple(arguments.stop),
        grammar=grammar,
        draft_tokens=arguments.draft_tokens,
    )


def _text_of(value: str) -> str:
    """Return ``value``, or what the file holds that '@path' names."""
    if not value.startswith('@'):
        return value
    try:
        return Path(value[1:]).read_text(encoding='utf-8')
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f'grammar file {value[1:]!r:.200} cannot be read: {error}') from error


def _lines() -> Any:
    """Give questions from the standard input until it ends.

    :raises ConfigError: it is no UTF-8.
    """
    try:
        for line in sys.stdin:
            if line.strip():
                yield line.strip()
    except UnicodeDecodeError as error:
        raise ConfigError(f'the standard input is no text: {error}; give questions in '
                          f'{error.encoding}') from error


class _Progress:
    """Tells each stage of a bind once, on the error stream."""

    def __init__(self) -> None:
        self._stage = ''

    def __call__(self, stage: str, fraction: float) -> None:
        if stage != self._stage:
            self._stage = stage
            _say(f'{stage} ...')


def _say(text: str) -> None:
    print(f'  [{text}]', file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog='python -m flashrt_core.planners.chat', description=__doc__.split('\n', 1)[0]
    )
    add = parser.add_argument
    add('--model', default='smollm2', metavar='MODEL',
        help="'smollm2', a .gguf file, a checkpoint's folder, or a YAML file (default: smollm2)")
    add('--planner', help="family, where no YAML file names it (default: 'llama')")
    add('--prompt', action='append', metavar='TEXT',
        help='a question; again for more; without it, lines of the standard input')
    add('--system', default=SYSTEM, metavar='TEXT', help='the system prompt')
    add('--opening', metavar='TEXT',
        help='how every answer begins (default: a model that thinks is told that it has)')
    add('--max-tokens', type=int, default=128, metavar='N', help='default: %(default)s')
    add('--temperature', type=float, default=0.0, metavar='T', help='0, the default, is greedy')
    add('--top-k', type=int, default=0, metavar='K', help='0, the default, keeps all')
    add('--top-p', type=float, default=1.0, metavar='P', help='1, the default, keeps all')
    add('--repetition', type=float, default=1.0, metavar='R', help='penalty; 1 is none')
    add('--seed', type=int, default=0, metavar='N')
    add('--stop', action='append', default=[], metavar='TEXT',
        help='ends an answer; again for more')
    add('--json', metavar='SCHEMA', help='JSON schema that answers must satisfy, or @file')
    add('--regex', metavar='REGEX', help='regular expression of answers, or @file')
    add('--lark', metavar='GRAMMAR', help='Lark grammar of answers, or @file')
    add('--draft-tokens', type=int, default=0, metavar='N', help='of speculation')
    add('--device', default='auto', choices=('auto', 'cpu', 'cuda'))
    add('--dtype', choices=('float32', 'bfloat16'))
    add('--context', type=int, metavar='N', help='tokens that the state holds')
    add('--cpu-threads', type=int, metavar='N')
    return parser


if __name__ == '__main__':
    raise SystemExit(main())
