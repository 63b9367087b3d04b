"""What the state of a bound policy costs: a new prompt, a choice of many, and capsule verbs.

Every verb is checked to the byte: the state it leaves is compared with the one it should, and the
tick after a restore or rollback with the tick before it.
"""
from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
import time
from typing import Any

import numpy as np
import torch

from flashrt_core.bench._report import percentiles
from flashrt_core.capsule import CapsuleStore
from flashrt_core.policies import TickInput
from flashrt_core.policies.pi0 import Pi0Config
from flashrt_core.policies.pi0 import Pi0Session

BRANCHES = 8
EVERY = 4          # ticks to a new prompt
WARM_UP = 3
ROOM_BYTES = 64 << 20  # of a tier, beside the capsules themselves
BEST_OF_BOUND = 1.5    # of one tick that the best of BRANCHES may take
State = dict[str, torch.Tensor]
Row = dict[str, Any]


def with_branches(c: Pi0Config) -> Pi0Config:
    """Return ``c`` with memory and plans for what ``state_rows`` measures beside one row."""
    return replace(c, rows=BRANCHES, row_keys=(1, BRANCHES), best_of_keys=(BRANCHES,))


def state_rows(session: Pi0Session, inputs: Sequence[TickInput]) -> list[Row]:
    """Return rows of two tables, of ticks in milliseconds and of verbs in microseconds.

    :param session: bound ``with_branches``; any thread but its lane's.
    :param inputs: observations; each kind of tick and each verb is run about so many times.
    """
    views = f'{len(session.config.views)} views'
    rows = [*_prompt_rows(session, inputs), *_choice_rows(session, inputs)]
    rows = [{'table': f'ticks, {views}', **row} for row in rows]
    return rows + [{'table': f'state, {views}', **row} for row in _verb_rows(session, inputs)]


def _timed_ms(session: Pi0Session, tick_input: TickInput) -> float:
    begun = time.perf_counter()
    session.tick(tick_input)
    return (time.perf_counter() - begun) * 1e3


def _prompt_rows(session: Pi0Session, inputs: Sequence[TickInput]) -> list[Row]:
    """Time the first tick after each change of the prompt beside all others."""
    c, random = session.config, np.random.default_rng(1)
    first: list[float] = []
    others: list[float] = []
    for i, given in enumerate(inputs):
        changed = i % EVERY == EVERY - 1
        tokens = tuple(random.integers(0, c.vocab, c.prompt_tokens).tolist())
        took = _timed_ms(session, replace(given, prompt=tokens if changed else None))
        (first if changed else others).append(took)
    found = percentiles(others[WARM_UP:] or others)
    after = percentiles(first or others)
    return [_ticks('other ticks', found), {
        **_ticks('first tick after a new prompt', after),
        'to_the_others': after['p50'] / found['p50'], 'met': after['p50'] <= found['p99']}]


def _choice_rows(session: Pi0Session, inputs: Sequence[TickInput]) -> list[Row]:
    """Time one tick and the best of many in turn."""
    took: dict[int, list[float]] = {1: [], BRANCHES: []}
    for given in inputs:
        for n, samples in took.items():
            samples.append(_timed_ms(session, replace(given, noise=None, prompt=None, best_of=n)))
    one, many = (percentiles(samples[WARM_UP:] or samples) for samples in took.values())
    ratio = many['p50'] / one['p50']
    return [_ticks('one candidate', one), {
        **_ticks(f'best of {BRANCHES}', many), 'to_the_others': ratio,
        'met': ratio <= BEST_OF_BOUND}]


def _ticks(what: str, found: dict[str, float]) -> Row:
    return {'what': what, 'n': int(found['n']), 'p50_ms': found['p50'], 'p99_ms': found['p99']}


def _verb_rows(session: Pi0Session, inputs: Sequence[TickInput]) -> list[Row]:
    """Time snapshot, restore, rollback and fork, and compare what each leaves with what it should.

    The verbs run on the lane thread as the executor has them run; their time is the whole verb.
    """
    nbytes = sum(size for _, size in session.boundary.ranges())
    room = 4 * nbytes + ROOM_BYTES
    store = CapsuleStore(session.lane.backend, room, room)
    store.prepare(session.boundary, EVERY)
    try:
        found = _Verbs(session, store, inputs)
        return [{'what': what, 'n': len(us), **_us(us), 'bytes': nbytes * copies, 'exact': exact}
                for what, us, copies, exact in found.measure()]
    finally:
        store.close()


def _us(samples: list[float]) -> dict[str, float]:
    found = percentiles(samples)
    return {'p50_us': found['p50'], 'p99_us': found['p99']}


class _Verbs:
    def __init__(
        self, session: Pi0Session, store: CapsuleStore, inputs: Sequence[TickInput]
    ) -> None:
        self.session, self.store = session, store
        # Noise from the state's own generator, so that it counts.
        self.inputs = [replace(given, noise=None) for given in inputs]

    def measure(self) -> list[tuple[str, list[float], int, bool]]:
        """Return verb, microseconds, rows written, and whether all it left was as it should be."""
        return [
            self._snapshots('gpu'), self._restores('gpu'), self._restores('host'),
            self._rollbacks(), self._forks()]

    def _do(self, verb: Callable[[], Any]) -> float:
        """Run a verb where a boundary is committed; microseconds."""
        def timed() -> float:
            begun = time.perf_counter()
            verb()
            return (time.perf_counter() - begun) * 1e6

        return float(self.session.lane.at_boundary(timed).result(60.0))

    def _state(self, row: int = 0) -> State:
        """Return a copy of the state of a row, on the host."""
        def copy() -> State:
            return {b.name: b.row(row).cpu().clone() for b in self.session.buffers.state()}

        return self.session.lane.at_boundary(copy).result(60.0)

    def _snapshots(self, tier: str) -> tuple[str, list[float], int, bool]:
        session, store, us, exact = self.session, self.store, [], True
        for i, given in enumerate(self.inputs):
            session.tick(given)
            before = self._state()
            us.append(self._do(lambda: store.snapshot(session.boundary, 'x', tier=tier)))
            if i < WARM_UP:  # what it holds, read back from other state
                session.tick(given)
                self._do(lambda: store.restore(session.boundary, 'x'))
            exact = exact and _equal(before, self._state())
            store.drop('x', session.boundary.session)
        return f'snapshot, {tier}', us[WARM_UP:] or us, 1, exact

    def _restores(self, tier: str) -> tuple[str, list[float], int, bool]:
        session, store, us, exact = self.session, self.store, [], True
        self._do(lambda: store.snapshot(session.boundary, 'x', tier=tier))
        kept, following = self._state(), session.tick(self.inputs[0]).actions
        for given in self.inputs:
            session.tick(given)
            # A lease keeps a host capsule in its tier.
            with store._tiers.leased(store._ledger.find(session.boundary.session, 'x')):
                us.append(self._do(lambda: store.restore(session.boundary, 'x')))
            exact = exact and _equal(kept, self._state())
            again = session.tick(self.inputs[0]).actions
            exact = exact and again.tobytes() == following.tobytes()
        store.drop('x', session.boundary.session)
        return f'restore, {tier}', us[WARM_UP:] or us, 1, exact

    def _rollbacks(self) -> tuple[str, list[float], int, bool]:
        session, store, us, exact = self.session, self.store, [], True
        for given in self.inputs:
            mark = session.lane.at_boundary(partial(store.mark, session.boundary)).result(60.0)
            kept, following = self._state(), session.tick(given).actions
            us.append(self._do(partial(store.rollback, session.boundary, mark)))
            exact = exact and _equal(kept, self._state())
            exact = exact and session.tick(given).actions.tobytes() == following.tobytes()
        return 'rollback to a mark', us[WARM_UP:] or us, 1, exact

    def _forks(self) -> tuple[str, list[float], int, bool]:
        session, store, us, exact = self.session, self.store, [], True
        rows = range(BRANCHES)
        self._do(lambda: store.snapshot(session.boundary, 'x'))
        kept = self._state()
        for given in self.inputs:
            session.tick(given)
            us.append(self._do(lambda: store.restore(
                session.boundary, 'x', rows=rows, overrides={'branch': rows})))
            for row in rows:
                expected = {**kept, 'branch': torch.full_like(kept['branch'], row)}
                exact = exact and _equal(expected, self._state(row))
        store.drop('x', session.boundary.session)
        return f'fork into {BRANCHES} rows', us[WARM_UP:] or us, BRANCHES, exact


def _equal(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(
        x.numpy().tobytes() == b[name].numpy().tobytes() for name, x in a.items())
