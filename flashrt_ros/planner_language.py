"""What the planner reads and writes: its context, requests in words, subgoals one by one."""

from collections.abc import Sequence
from dataclasses import dataclass
import os
import re
from typing import Any

from flashrt_core.errors import ConfigError
from flashrt_core.errors import ParameterInvalid
from flashrt_core.planners.grammar import compiled_grammar
from flashrt_core.planners.options import GrammarSource
from flashrt_core.planners.options import Options
from flashrt_core.planners.stream import Stream
from flashrt_core.planners.text import ByteTokenizer
from flashrt_core.planners.text import ChatMl
from flashrt_core.planners.text import check_vocabulary
from flashrt_core.tabletop import instructions as tabletop
from flashrt_core.tabletop.state import COLOURS
from flashrt_ros.config_files import expanded

FORMS = ('auto', 'plain', 'chatml', 'tabletop')
_KINDS = {'.lark': 'lark', '.regex': 'regex'}
_MOST_TEXT = 4000  # characters of an instruction or a scene
_COLOUR = f'({"|".join(COLOURS)})'
_GOAL = f'(put the {_COLOUR} block in the {_COLOUR} zone|pick up the {_COLOUR} block|go home)'
_BETWEEN = f'({tabletop.AND}|{tabletop.THEN})'
_ONE_A_LINE = 'Answer with one subgoal a line and nothing else, or "cannot".'


@dataclass(frozen=True)
class SubgoalGrammar:
    """Which plans there are: subgoals with one of ``separators`` between, or ``cannot`` alone."""

    name: str
    source: GrammarSource | None  # None: any text
    description: str  # for the model
    subgoal: str = ''  # regular expression of one, '' for any
    separators: tuple[str, ...] = ('\n',)
    end: str = '\n'
    must_end: bool = False  # a plan without ``end`` was cut short
    cannot: str = 'cannot'


# As flashrt_core/tabletop/instructions.py writes plans, which the small planner is trained on.
TABLETOP = SubgoalGrammar(
    'tabletop',
    GrammarSource('regex', rf'(cannot|{_GOAL}({_BETWEEN}{_GOAL}){{0,7}})\.', 'tabletop'),
    'You plan for a robot arm on a table with coloured blocks and coloured round zones. Answer '
    'with subgoals, "; " between them and "." after the last one, and nothing else. Subgoals are '
    '"put the C block in the C zone", "pick up the C block" and "go home", where C is one of '
    f'{", ".join(COLOURS)}. Answer "{tabletop.CANNOT}" when the instruction asks for anything '
    'else, or for a block or zone that is not on the table.',
    subgoal=_GOAL, separators=(tabletop.AND, tabletop.THEN), end='.', must_end=True,
    cannot=tabletop.CANNOT.removesuffix('.'))


def find_grammar(name: str) -> SubgoalGrammar:
    """Return the grammar that the parameter ``grammar`` names: tabletop, none, or a file.

    A file of kind .lark or .regex holds whole plans: one subgoal a line, the last one ended too.

    :raises ConfigError: neither a name nor a file of these kinds.
    """
    if name == 'tabletop':
        return TABLETOP
    if name == 'none':
        return SubgoalGrammar(name, None, _ONE_A_LINE)
    path = expanded(name)
    if path.suffix not in _KINDS or not os.path.isfile(path):
        raise ConfigError(f'grammar is {name!r:.200}; give tabletop, none, or the path of a .lark '
                          'or .regex file of whole plans, one subgoal a line')
    try:
        text = path.read_text(encoding='utf-8').strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f'grammar {name!r:.200} cannot be read: {error}') from error
    source = GrammarSource(_KINDS[path.suffix], text, path.name)
    return SubgoalGrammar(path.name, source, _ONE_A_LINE)


class Reader:
    """Takes a plan's text as it streams in and gives out its subgoals as they complete."""

    def __init__(self, grammar: SubgoalGrammar) -> None:
        self._grammar = grammar
        self._held = ''
        self._ended = False
        self.count = 0
        self.cannot = False

    def push(self, text: str) -> list[str]:
        """Return the subgoals that became complete with ``text``.

        :raises ParameterInvalid: one that is none of the grammar; those before it stand.
        """
        self._held += text
        found: list[str] = []
        while not self._ended:
            marks = {*self._grammar.separators, self._grammar.end}
            cuts = [(at, len(mark), mark) for mark in marks if (at := self._held.find(mark)) >= 0]
            if not cuts:
                break
            at, length, mark = min(cuts)
            piece, self._held = self._held[:at], self._held[at + length:]
            if subgoal := self._read(piece):
                found.append(subgoal)
            self._ended = self.cannot or mark not in self._grammar.separators
        return found

    def finish(self) -> list[str]:
        """Return the last subgoal where the end of the text has ended it.

        :raises ParameterInvalid: the plan was cut short, or there is none.
        """
        if self._grammar.must_end and not self._ended:
            raise ParameterInvalid(f'the plan was cut short after {self._held[-40:]!r}; raise '
                                   'max_tokens')
        found = [] if self._ended or not (subgoal := self._read(self._held)) else [subgoal]
        if not self.count and not self.cannot:
            raise ParameterInvalid('the planner has answered nothing; give it an instruction that '
                                   f'grammar {self._grammar.name} can plan')
        return found

    def _read(self, piece: str) -> str:
        text = piece.strip()
        if not text:
            return ''
        if text == self._grammar.cannot and not self.count:
            self.cannot = True
            return ''
        if self._grammar.subgoal and not re.fullmatch(self._grammar.subgoal, text):
            raise ParameterInvalid(f'the planner has written {text!r:.80}, which is no subgoal of '
                                   f'grammar {self._grammar.name}; the plan ends there')
        self.count += 1
        return text


class Language:
    """Tokens and texts of one session."""

    def __init__(self, session: Any, grammar: SubgoalGrammar, *, form: str = 'auto',
                 system_prompt: str = '') -> None:
        """Compile the grammar for the session's vocabulary.

        :param form: chatml, plain, tabletop (what the small planner is trained on: no context),
            or auto: chatml where the tokenizer has its markers, else that of the grammar.
        :param system_prompt: stands before the grammar's description in the context.
        :raises ConfigError: no tokenizer, one of another model, or a form that it has not.
        """
        self.tokenizer = tokenizer_of(session)
        vocab = int(session.config.vocab)
        check_vocabulary(self.tokenizer, vocab)
        self.grammar = grammar
        self._system = '\n'.join(text for text in (system_prompt, grammar.description) if text)
        if form == 'auto':
            form = 'tabletop' if grammar is TABLETOP else 'plain'
            form = 'chatml' if '<|im_start|>' in self.tokenizer.special else form
        self.form = form
        opening = ChatMl.NO_THINKING if '<think>' in self.tokenizer.special else ''
        self._chat = ChatMl(self.tokenizer, opening) if form == 'chatml' else None
        if grammar.source is not None:
            compiled_grammar(grammar.source, self.tokenizer, vocab)  # not in the first plan's time

    def context(self) -> list[int]:
        """Return the tokens that every plan begins with; none are an empty state."""
        if self.form == 'tabletop':
            return []
        if self._chat is not None:
            return self._chat.message('system', self._system)
        return self.tokenizer.encode(f'{self._system}\n')

    def request(self, instruction: str, scene: str, done: Sequence[str],
                failed: str) -> list[int]:
        """Return what is appended to the context for one plan.

        In the tabletop form the scene alone tells what is done already.
        """
        if self.form == 'tabletop':
            return self.tokenizer.encode(tabletop.prompt(
                scene or 'blocks: . zones: .', tabletop.read_instruction(instruction)))
        lines = [f'instruction: {instruction}']
        if scene:
            lines.append(f'scene: {scene}')
        if done:
            lines.append(f'done: {", ".join(done)}')
        if failed:
            lines.append(f'failed: {failed}')
        text = '\n'.join(lines)
        if self._chat is not None:
            return self._chat.ask(text)
        return self.tokenizer.encode(f'{text}\nplan:\n')

    def check(self, instruction: str, scene: str) -> None:
        """Refuse an instruction or a scene that cannot be asked about.

        :raises ParameterInvalid: empty, too long, or with line ends or characters that do not
            print, which could pass for parts of the form; in the tabletop form, outside of what
            the planner was trained to read.
        """
        for name, text in (('instruction', instruction), ('scene', scene)):
            if name == 'instruction' and not text.strip():
                raise ParameterInvalid('instruction is empty; say what is to be done')
            if len(text) > _MOST_TEXT:
                raise ParameterInvalid(f'{name} has {len(text)} characters; give at most '
                                       f'{_MOST_TEXT}')
            if not all(part.isprintable() for part in text):
                raise ParameterInvalid(f'{name} is {text!r:.80}; give printable text on one line')
        if self.form == 'tabletop':
            tabletop.read_instruction(instruction)

    def why_cannot(self, instruction: str, scene: str) -> str:
        """Return the cause of a plan that is ``cannot``, as far as it is known."""
        known = tabletop.why_not(instruction, scene) if self.grammar is TABLETOP else ''
        return known or f'the planner wrote {self.grammar.cannot!r}'

    def reader(self) -> Reader:
        """Return a reader for one plan."""
        return Reader(self.grammar)

    def stream(self, session: Any, max_tokens: int, parameters: Any) -> Stream:
        """Return the stream of one plan, constrained to the grammar, with speculation too."""
        options = Options(
            temperature=parameters['temperature'], seed=parameters['seed'], max_tokens=max_tokens,
            draft_tokens=parameters['draft_tokens'], grammar=self.grammar.source)
        stream: Stream = session.stream(options, tokenizer=self.tokenizer)
        return stream


def tokenizer_of(session: Any) -> ByteTokenizer:
    """Return the tokenizer that a session's model was trained with.

    :raises ConfigError: the session names none.
    """
    found: ByteTokenizer | None = getattr(session, 'tokenizer', None)
    if found is None:
        raise ConfigError('the planner has no tokenizer, so it reads no instructions; give a '
                          'planner_config that names one')
    return found
