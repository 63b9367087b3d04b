"""The planner of the tests: a real lane, boundary and stream over a script instead of a model.

The state is the text so far, one byte a token. What follows is a function of that text alone: the
script's answer to what stands before ``plan: `` (or ``plan:`` and a line end).
"""

from collections.abc import Callable
from concurrent.futures import CancelledError
from concurrent.futures import Future
from dataclasses import dataclass
from dataclasses import field
import re
import threading
import time
from typing import Any

import torch

from flashrt_core.capsule import Boundary
from flashrt_core.capsule import Identity
from flashrt_core.errors import DeviceLost
from flashrt_core.errors import PromptTooLong
from flashrt_core.errors import TickDropped
from flashrt_core.planners.grammar import compiled_grammar
from flashrt_core.planners.grammar import Grammar
from flashrt_core.planners.grammar import Matcher
from flashrt_core.planners.options import Options
from flashrt_core.planners.protocol import Appended
from flashrt_core.planners.protocol import Step
from flashrt_core.planners.stream import Stream
from flashrt_core.planners.text import ByteTokenizer
from flashrt_core.runtime import BufferSet
from flashrt_core.runtime import BufferSpec
from flashrt_core.runtime import Graph
from flashrt_core.runtime import Kind
from flashrt_core.runtime import Lane
from flashrt_core.runtime import Plan
from flashrt_core.runtime import Role
from flashrt_core.tabletop import instructions

END = 256
I64 = torch.int64
Script = Callable[[str], str]


def obedient(prompt: str) -> str:
    """Answer with the goals that the instruction names in the tabletop's own words."""
    found = re.search(r'(?:say|instruction): (.*)', prompt)
    try:
        return instructions.format_plan(
            instructions.parse_plan(found[1].replace(', then ', '; ') + '.'))
    except Exception:
        return instructions.CANNOT


@dataclass
class Switches:
    """What a test may change while the planner runs."""

    script: Script = obedient
    step_s: float = 0.0  # of each decode step
    chunk_s: float = 0.0  # of each append
    gate: threading.Event | None = None  # each decode step waits for it
    waiting: int = 0
    lost: bool = False
    bind_error: Exception | None = None
    prompts: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class FakeConfig:
    context: int = 4096
    vocab: int = 257


@dataclass(frozen=True)
class FakeSettings:
    stop_ids: tuple[int, ...] = (END,)


def tokenizer() -> ByteTokenizer:
    return ByteTokenizer('bytes', lambda text: list(text.encode()),
                         [*(bytes([i]) for i in range(256)), b'<end>'], {'<end>': END}, {END},
                         (END,))


class FakeSession:
    """A Session of the planner protocol, as far as the node uses it."""

    def __init__(self, backend: Any, config: FakeConfig, switches: Switches) -> None:
        self.config, self.settings, self.switches = config, FakeSettings(), switches
        self.tokenizer = tokenizer()
        self.ports = ()
        self.buffers = BufferSet(backend, [
            BufferSpec('text', Role.STATE, I64, (config.context,), kind=Kind.RECURRENT),
            BufferSpec('position', Role.STATE, I64, (), kind=Kind.META)], name='fake-llm')
        self.lane = Lane(backend, 'fake-llm', timeout_s=30.0).start()
        self._work: Callable[[], Any] | None = None
        self._plans = {name: self._plan(name) for name in ('append', 'decode')}
        self.boundary = Boundary(
            self.buffers, Identity({'family': 'fake-llm'}, {'device': 'any'}),
            position=lambda: self.position, session='fake-llm', lane=self.lane)
        self.lane.call(self.reset_now).result(10)
        self.lane.call(self.lane.commit).result(10)

    @property
    def position(self) -> int:
        return int(self.buffers['position'].tensor[0])

    @property
    def text(self) -> str:
        return bytes(self.buffers['text'].row(0)[:self.position].tolist()).decode()

    def memory(self) -> dict[str, int]:
        return {'capsule_fixed': self.buffers.nbytes, 'capsule_per_token': 0}

    def reset_now(self) -> None:
        self.buffers.arena.zero_()

    def reset(self) -> Future:
        return self.lane.at_segment_end(self.reset_now, 'reset')

    def prefill(self, tokens: Any) -> Future[Appended]:
        self.reset().result(10)
        return self.append(tokens)

    def restore_and_append(self, store: Any, id: str, tokens: Any) -> Future[Appended]:
        restored: list[Any] = [store.get(id, self.boundary.session)]

        def restore() -> None:
            restored.append(store.restore(self.boundary, id))

        return self._append(tokens, restore, lambda: Appended(self.position, (), (), restored[-1]))

    def append(self, tokens: Any) -> Future[Appended]:
        return self._append(tokens, None, lambda: Appended(self.position, (), ()))

    def _append(self, tokens: Any, first: Any, value: Any) -> Future[Appended]:
        ids = list(tokens)
        if first is None and self.position + len(ids) > self.config.context:
            raise PromptTooLong(f'{len(ids)} tokens exceed the context')

        def work() -> None:
            time.sleep(self.switches.chunk_s)
            self._put(ids)
            if b'plan:' in bytes(ids):
                self.switches.prompts.append(self.text)

        return self._run('append', work, value, first)

    def decode(self, options: Options | None = None, **_: Any) -> Future[Step]:
        if self.switches.lost:
            self.lane._fail('lost', DeviceLost('the device is lost (switch of a test)'))
        out: list[int] = []

        def work() -> None:
            s = self.switches
            time.sleep(s.step_s)
            gate = s.gate
            if gate is not None:
                s.waiting += 1
                gate.wait(30)
            prompt, given = re.split(r'plan:[ \n]', self.text, maxsplit=1)
            answer = s.script(prompt).encode()
            at = len(given.encode())
            out.append(answer[at] if at < len(answer) else END)
            self._put(out)

        return self._run('decode', work, lambda: Step(tuple(out), self.position))

    def stream(self, options: Options, *, tokenizer: Any = None) -> Stream:
        grammar = options.grammar and compiled_grammar(
            options.grammar, tokenizer, self.config.vocab)
        return Stream(self, options, tokenizer, grammar)

    def follow(self, grammar: Grammar) -> tuple[Matcher, int]:
        return grammar.matcher(), 0

    def close(self) -> None:
        if self.switches.gate is not None:
            self.switches.gate.set()
        self.lane.close()

    def _put(self, ids: list[int]) -> None:
        at = self.position
        self.buffers['text'].row(0)[at:at + len(ids)] = torch.tensor(ids)
        self.buffers['position'].tensor[0] = at + len(ids)

    def _run(self, name: str, work: Callable[[], Any], value: Callable[[], Any],
             first: Callable[[], Any] | None = None) -> Future:
        if first is None:
            self.boundary.check_usable()

        def before() -> None:
            if first is not None:
                first()
            self._work = work

        done = self.lane.run(self._plans[name], before, value)
        return _Value(done)

    def _plan(self, name: str) -> Plan:
        def body(ports: Any, key: Any) -> None:
            if self._work is not None:
                self._work()

        graph = Graph(name, body, ())
        graph.capture((1,), self.lane)
        plan = Plan(name)
        plan.add(graph, (1,))
        return plan


class _Value:
    """A lane's future as the value of its plan."""

    def __init__(self, future: Any) -> None:
        self._future = future
        self.cancel, self.done = future.cancel, future.done

    def result(self, timeout: float | None = None) -> Any:
        try:
            return self._future.result(timeout).value
        except CancelledError:
            raise TickDropped('cancelled') from None


class FakePlanner:
    """A Planner of the protocol; remembers its sessions."""

    name = 'fake-llm'

    def __init__(self, **switches: Any) -> None:
        self.switches = Switches(**switches)
        self.sessions: list[FakeSession] = []

    def bind(self, backend: Any, config: Any, progress: Any = None) -> FakeSession:
        if progress is not None:
            for stage in ('load', 'bind', 'capture', 'warm up'):
                progress(stage, 0.5)
        if self.switches.bind_error is not None:
            raise self.switches.bind_error
        self.sessions.append(FakeSession(backend, FakeConfig(), self.switches))
        return self.sessions[-1]
