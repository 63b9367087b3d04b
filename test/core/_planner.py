"""What the planner tests share: a small hybrid, prompts, runs to compare bit for bit."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from flashrt_core.capsule import Boundary
from flashrt_core.capsule import CapsuleStore
from flashrt_core.planners import GrammarSource
from flashrt_core.planners import make_planner
from flashrt_core.planners import Options
from flashrt_core.planners import Settings
from flashrt_core.planners.grammar import compiled_grammar
from flashrt_core.planners.qwen3_5 import Qwen35Config
from flashrt_core.planners.session import PlannerSession
from flashrt_core.planners.text import ByteTokenizer
from flashrt_core.runtime import Backend

# One layer that recurs, one that attends, an MTP head; short keys so that prompts take many.
SMALL = Qwen35Config(
    width=32, mlp=48, layers=2, full_every=2, heads=2, kv_heads=1, head_dim=16, key_heads=1,
    value_heads=2, key_dim=16, value_dim=16, vocab=48, context=96, rotary=8, dtype='float32',
)  # fmt: skip
SETTINGS = Settings(
    prefill_keys=(4, 16), ridge=4, smallest_span=32, draft_tokens=4, branches=3, tail_tokens=12,
    cpu_threads=1,
)
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5)      # two chunks of 4 and one of 3
SUFFIX = (8, 9, 7, 9, 3)
GREEDY = Options()
# Every sampler parameter matters, the seed too.
DRAWN = Options(temperature=1.3, top_k=30, top_p=0.95, seed=7, presence=0.4, frequency=0.2,
                repetition=1.1)
MIB = 1 << 20
END = 47
LETTERS = ''.join(chr(ord('A') + i) for i in range(END))
# What may follow depends on what came: letters of two kinds in turns.
TURNS = GrammarSource('regex', '([A-H][I-P]){10,20}[Q-Z]', 'turns')


@contextmanager
def bound(backend: Backend, config: Any = SMALL, settings: Settings = SETTINGS,
          family: str = 'qwen3_5', **changes: Any) -> Iterator[PlannerSession]:
    """Give a session that is closed afterwards; ``changes`` are of config or settings."""
    mine = {k: v for k, v in changes.items() if hasattr(settings, k)}
    model = {k: v for k, v in changes.items() if k not in mine}
    given = (replace(config, **model), replace(settings, **mine))
    session = make_planner(family).bind(backend, given)
    try:
        yield session
    finally:
        session.close()


_shared: dict[str, PlannerSession] = {}


def shared(backend: Backend) -> PlannerSession:
    """Give one session of ``SMALL`` a backend for all tests that leave it working, reset."""
    session = _shared.get(backend.name)
    if session is None or session.lane.state != 'running':
        session = make_planner('qwen3_5').bind(backend, (SMALL, SETTINGS))
        _shared[backend.name] = session
    session.reset().result(20)
    return session


def run(session: PlannerSession, count: int, options: Options | None = GREEDY) -> list[int]:
    """Decode exactly ``count`` tokens."""
    tokens: list[int] = []
    while len(tokens) < count:
        step = session.decode(options, limit=count - len(tokens)).result(20)
        tokens += step.tokens
    return tokens


def letters() -> ByteTokenizer:
    """One letter a token, the last one ends a text."""
    return _LETTERS


_LETTERS = ByteTokenizer(
    'letters', lambda text: [LETTERS.index(c) for c in text],
    [*(c.encode() for c in LETTERS), b'<end>'], {'<end>': END}, (END,), (END,))


def run_under(session: PlannerSession, count: int, options: Options | None = GREEDY,
              source: GrammarSource = TURNS) -> list[int]:
    """Decode exactly ``count`` tokens under a grammar, from where the state is in its text."""
    matcher, epoch = session.follow(compiled_grammar(source, letters(), SMALL.vocab))
    tokens: list[int] = []
    while len(tokens) < count:
        step = session.decode(options, matcher=matcher, limit=count - len(tokens),
                              epoch=epoch).result(20)
        for token in step.tokens:
            matcher.accept(token)
        tokens += step.tokens
    return tokens


def state_of(session: PlannerSession) -> dict[str, torch.Tensor]:
    """Copy the valid state to the CPU, on the lane thread: KV up to its extent."""
    def copy() -> dict[str, torch.Tensor]:
        extents = session.boundary.extents()
        return {b.name: b.row(0)[: extents.get(b.name)].cpu().clone() if b.name in extents
                else b.row(0).cpu().clone() for b in session.buffers.state()}
    return session.lane.call(copy).result(20)


def unequal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """Names of the buffers whose bits differ."""
    return [n for n in a if a[n].shape != b[n].shape or not torch.equal(a[n], b[n])]


def lived_in(session: PlannerSession) -> None:
    """Bring a session to a boundary where every state buffer matters to what follows.

    The sampler has counted, the parameters are not the default, a token is pending, the trunk has
    the branch number 5, and a grammar has followed the last three tokens.
    """
    session.prefill(PROMPT).result(20)
    branches = session.fork([7], [5])
    branches.step(DRAWN).result(20)
    branches.commit(0).result(20)
    run(session, 4, DRAWN)
    run_under(session, 3, DRAWN)


def snapshot(session: PlannerSession, store: CapsuleStore, id: str = 'c0',
             boundary: Boundary | None = None, **options: Any) -> None:
    chosen = boundary or session.boundary
    session.lane.at_boundary(lambda: store.snapshot(chosen, id, **options)).result(20)


def restore(session: PlannerSession, store: CapsuleStore, id: str = 'c0',
            boundary: Boundary | None = None, **options: Any) -> Any:
    chosen = boundary or session.boundary
    return session.lane.at_segment_end(lambda: store.restore(chosen, id, **options)).result(20)
