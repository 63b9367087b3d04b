"""The policy of the executor's tests: real buffers, lane and boundary, arithmetic for a model.

Actions say where they come from: every joint's target is ``level(seed)`` plus the tick times
``TICK_STEP``, so that a command betrays its epoch. ``Switches`` make it slow or ill.
"""

from collections.abc import Callable
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
import threading
import time
from typing import Any

import numpy as np
import torch

from flashrt_core.capsule import Boundary
from flashrt_core.capsule import Identity
from flashrt_core.errors import BadSize
from flashrt_core.errors import DeviceLost
from flashrt_core.policies import Chunk
from flashrt_core.policies import Frame
from flashrt_core.policies import make_tokenizer
from flashrt_core.policies import MemoryNeed
from flashrt_core.policies import Modality
from flashrt_core.policies import PortSpec
from flashrt_core.policies import TickInput
from flashrt_core.policies.protocol import Candidates
from flashrt_core.runtime import BufferSet
from flashrt_core.runtime import BufferSpec
from flashrt_core.runtime import Graph
from flashrt_core.runtime import Kind
from flashrt_core.runtime import Lane
from flashrt_core.runtime import Plan
from flashrt_core.runtime import Role

LEVELS, LEVEL_STEP, TICK_STEP = 20, 1e-3, 1e-6
SPREAD = 0.25  # of its candidates, which are all the same
SEGMENTS = ('look', 'think', 'act')
I64, F32 = torch.int64, torch.float32


def level(seed: int) -> float:
    """Return the joint target that a seed leads to."""
    return (seed % LEVELS) * LEVEL_STEP


@dataclass
class Switches:
    """What a test may change while the policy runs."""

    segment_s: float = 0.0  # of each of the three segments
    nan: bool = False
    offset: float = 0.0  # added to every target
    error: Exception | None = None  # raised by the next ticks
    error_once: bool = False  # raised by one tick only: a second in a row latches
    lost: bool = False  # the lane reports a lost device
    bind_error: Exception | None = None
    bind_gate: threading.Event | None = None  # bind waits for it
    binding: int = 0  # times bind has come to the gate
    gate: threading.Event | None = None  # a segment waits for it
    gated: str = 'think'
    waiting: int = 0  # times a segment has come to the gate
    inputs: list[TickInput] = field(default_factory=list)
    done: float = 0.0  # the last action, where its unit is a probability
    goal_step: float = 0.0  # times the latched sequence, added to every target
    applied: list[int] = field(default_factory=list)  # sequences that committed ticks have written


@dataclass(frozen=True)
class FakeConfig:
    views: tuple[str, ...] = ('top', 'wrist')
    image_size: int = 8
    horizon: int = 16
    joints: int = 4
    vocab: int = 512
    prompt_tokens: int = 24
    subgoal_tokens: int = 24
    seed: int = 0
    rows: int = 4
    row_keys: tuple[int, ...] = (1, 2, 4)
    tokenizer: str = 'words'
    chunk_mode: str = 'blend'
    action_units: str = 'rad'
    guidance: bool = False
    embedding: tuple[int, int] = (0, 0)  # rows and their width


def ports_of(c: FakeConfig) -> tuple[PortSpec, ...]:
    side = c.image_size
    return (
        *(PortSpec(v, Modality.IMAGE, 'uint8', (side, side, 3), 'RGB') for v in c.views),
        PortSpec('state', Modality.STATE, 'float32', (c.joints,), 'rad'),
        PortSpec('prompt', Modality.TEXT, 'int64', (c.prompt_tokens,), 'token id'),
        PortSpec('subgoal', Modality.SUBGOAL, 'int64', (c.subgoal_tokens,), 'token id'),
        *([PortSpec('subgoal_embedding', Modality.SUBGOAL_EMBEDDING, 'float32', c.embedding, '')]
          if c.embedding[0] else []),
        *([PortSpec('guidance', Modality.GUIDANCE, 'float32', (), '1')] if c.guidance else []),
        PortSpec('action', Modality.ACTION, 'float32', (c.horizon, c.joints), c.action_units))


def specs_of(c: FakeConfig) -> list[BufferSpec]:
    return [
        BufferSpec('seed', Role.STATE, I64, (), kind=Kind.RNG),
        BufferSpec('branch', Role.STATE, I64, (), kind=Kind.RNG),
        BufferSpec('tick', Role.STATE, I64, (), kind=Kind.META),
        BufferSpec('subgoal_sequence', Role.STATE, I64, (), kind=Kind.SUBGOAL),
        BufferSpec('prompt_length', Role.STATE, I64, (), kind=Kind.META),
        BufferSpec('queue_index', Role.STATE, I64, (), kind=Kind.QUEUE),
        BufferSpec('actions', Role.OUTPUT, F32, (c.horizon, c.joints))]


class FakeSession:
    """A Session of the policy protocol."""

    def __init__(self, backend: Any, config: FakeConfig, switches: Switches,
                 layout: str) -> None:
        c = self.config = config
        self.switches = switches
        self.tokenizer = make_tokenizer(c.tokenizer) if c.tokenizer else None
        self.ports = ports_of(c)
        self.buffers = BufferSet(backend, specs_of(c), rows=c.rows, name='fake')
        self.buffers['seed'].tensor.fill_(c.seed)
        self.lane = Lane(backend, 'fake', timeout_s=30.0).start()
        self._input: TickInput | None = None
        self._shown: Mapping[str, Frame] = {}
        self._plans = {rows: self._plan(rows) for rows in c.row_keys}
        self.plan_keys = {rows: {s.label: s.key for s in plan.segments}
                          for rows, plan in self._plans.items()}
        self.best_of_keys = {2: self.plan_keys[2]}  # it computes the first candidate alone
        self.boundary = Boundary(
            self.buffers, Identity({'family': 'fake', 'layout': layout}, {'device': 'any'}),
            position=lambda: int(self.buffers['tick'].tensor[0]), session='fake', lane=self.lane)
        self.lane.call(self.lane.commit).result(10)

    def submit(self, tick_input: TickInput, rows: int | None = None) -> Future[Chunk]:
        rows = tick_input.rows if rows is None else rows
        self.boundary.check_usable()
        side = self.config.image_size
        for view, image in tick_input.images.items():
            if image is not None and image.shape != (side, side, 3):
                raise BadSize(f'image {view} is {image.shape}')
        if self.switches.lost:
            self.lane._fail('lost', DeviceLost('the device is lost (switch of a test)'))
        self.switches.inputs.append(tick_input)
        result: Future[Chunk] = Future()

        def before() -> None:
            self._input = tick_input

        run = self.lane.run(self._plans[rows], before, lambda: self._chunk(rows))
        run.add_done_callback(lambda done: _hand_over(done, result))
        return result

    def set_branches(self, rows: Any, seeds: Any, branches: Any = None) -> Future[None]:
        def apply() -> None:
            for row in rows:
                if row:
                    for buffer in self.buffers.state():
                        buffer.row(row).copy_(buffer.row(0))
            for i, row in enumerate(rows):
                self.buffers['seed'].row(row).fill_(seeds[i])
                if branches is not None:
                    self.buffers['branch'].row(row).fill_(branches[i])

        return self.lane.call(apply)

    def commit_branch(self, row: int) -> Future[None]:
        def apply() -> None:
            for buffer in self.buffers.state():
                buffer.row(0).copy_(buffer.row(row))

        return self.lane.call(apply)

    def close(self) -> None:
        if self.switches.gate is not None:
            self.switches.gate.set()
        self.lane.close()

    def _plan(self, rows: int) -> Plan:
        plan = Plan(f'fake, {rows} rows')
        after: tuple[int, ...] = ()
        for name in SEGMENTS:
            graph = Graph(name, self._body(name), ())
            graph.capture((rows,), self.lane)
            after = (plan.add(graph, (rows,), after),)
        return plan

    def _body(self, name: str) -> Callable[[Any, Any], None]:
        def body(ports: Any, key: tuple[int, ...]) -> None:
            if self._input is None:
                return  # captured, not run
            s = self.switches
            if s.segment_s:
                time.sleep(s.segment_s)
            gate = s.gate
            if name == s.gated and gate is not None:
                s.waiting += 1
                gate.wait(30)
            if name == 'think' and s.error is not None:
                error, s.error = s.error, None if s.error_once else s.error
                raise error
            if name == 'act':
                self._act(key[0])

        return body

    def _act(self, rows: int) -> None:
        t, b = self._input, self.buffers
        assert t is not None
        for row in range(rows):
            if t.seed is not None:
                b['seed'].row(row).fill_(t.seed)
            if t.subgoal is not None:
                b['subgoal_sequence'].row(row).fill_(t.subgoal.sequence)
                self.switches.applied.append(t.subgoal.sequence)
            if t.prompt is not None:
                b['prompt_length'].row(row).fill_(len(t.prompt))
            b['queue_index'].row(row).fill_(t.delay_steps)
            target = (level(int(b['seed'].row(row))) + LEVEL_STEP * int(b['branch'].row(row))
                      + TICK_STEP * int(b['tick'].row(row)) + self.switches.offset
                      + self.switches.goal_step * int(b['subgoal_sequence'].row(row)))
            b['actions'].row(row).fill_(target)
            if self.config.action_units.endswith('probability'):
                b['actions'].row(row)[:, -1] = self.switches.done
            b['tick'].row(row).add_(1)
        if self.switches.nan:
            b['actions'].row(0)[0, 0] = float('nan')

    def _chunk(self, rows: int) -> Chunk:
        b, t = self.buffers, self._input
        assert t is not None
        reused = tuple(v for v, frame in t.frames.items() if self._shown.get(v) is frame)
        self._shown = t.frames
        actions = b['actions'].tensor[:rows].numpy().copy()
        candidates, n = None, t.best_of
        if n > 1:
            candidates = Candidates(actions.repeat(n, 0), np.zeros(n, np.float32), SPREAD, n - 1)
        return Chunk(actions, int(b['tick'].row(0)) - 1, int(b['subgoal_sequence'].row(0)),
                     graph_keys=self.plan_keys[rows], candidates=candidates, reused_views=reused)


class FakePolicy:
    """A Policy of the protocol; remembers its sessions."""

    name = 'fake'

    def __init__(self, config: FakeConfig | None = None, layout: str = 'a') -> None:
        self.config = config or FakeConfig()
        self.layout = layout
        self.switches = Switches()
        self.sessions: list[FakeSession] = []

    def ports(self, config: Any) -> tuple[PortSpec, ...]:
        return ports_of(self.config)

    def memory(self, config: Any) -> MemoryNeed:
        return MemoryNeed.of(specs_of(self.config), self.config.rows)

    def bind(self, backend: Any, config: Any, progress: Any = None) -> FakeSession:
        for stage in ('load', 'bind', 'capture', 'warm up'):
            if stage == 'bind' and self.switches.bind_gate is not None:
                self.switches.binding += 1
                self.switches.bind_gate.wait(60)
            if progress is not None:
                progress(stage, 0.5)
        if self.switches.bind_error is not None:
            raise self.switches.bind_error
        session = FakeSession(backend, self.config, self.switches, self.layout)
        self.sessions.append(session)
        return session


def _hand_over(done: Future[Any], result: Future[Chunk]) -> None:
    error = done.exception()
    if error is not None:
        result.set_exception(error)
    else:
        lane_result = done.result()
        result.set_result(replace(lane_result.value, segments_us=lane_result.segments_us))
