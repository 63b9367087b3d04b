"""A bound Pi0: ticks, branches and their state, all on one lane."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Mapping
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from typing import Any

import numpy as np

from flashrt_core.capsule import Boundary
from flashrt_core.errors import ConfigError
from flashrt_core.errors import LaneError
from flashrt_core.errors import LaneTimeout
from flashrt_core.errors import MissingKey
from flashrt_core.policies.pi0.config import Pi0Config
from flashrt_core.policies.pi0.graphs import BEST
from flashrt_core.policies.pi0.inputs import check_input
from flashrt_core.policies.pi0.inputs import check_range
from flashrt_core.policies.pi0.inputs import write_input
from flashrt_core.policies.pi0.layout import ports
from flashrt_core.policies.prompts import StateText
from flashrt_core.policies.protocol import Candidates
from flashrt_core.policies.protocol import Chunk
from flashrt_core.policies.protocol import TickInput
from flashrt_core.policies.text import Tokenizer
from flashrt_core.runtime import BufferSet
from flashrt_core.runtime import Lane
from flashrt_core.runtime import LaneResult
from flashrt_core.runtime import Plan


def reset_state(buffers: BufferSet, c: Pi0Config) -> None:
    """Write the state of a fresh session into every row; lane thread."""
    for buffer in buffers.state():
        buffer.tensor.zero_()
    buffers['seed'].tensor.fill_(c.seed)


class Pi0Session:
    """Buffers, plans and boundary of one robot's policy; made by ``Pi0Policy.bind``.

    Row 0 is the live session. Rows are branches of one observation: a tick evaluates the first
    ``rows`` of them with one vision and prefix pass. All methods may be called from any thread;
    what they do to the device happens on the lane thread, in order.
    """

    def __init__(
        self,
        config: Pi0Config,
        buffers: BufferSet,
        lane: Lane,
        plans: Mapping[tuple[Hashable, ...], Plan],
        boundary: Boundary,
        tokenizer: Tokenizer | None = None,
        state_text: StateText | None = None,
    ) -> None:
        """Take over what ``Pi0Policy.bind`` made.

        :param plans: by (rows,), and by (candidates, BEST).
        :param tokenizer: turns a prompt or subgoal into this family's form of it.
        :param state_text: of Pi0.5, turns the state of a tick into token ids.
        """
        self.config = config
        self.tokenizer = tokenizer
        self.buffers = buffers
        self.lane = lane
        self.boundary = boundary
        self.ports = ports(config)
        self.state_text = state_text
        self._plans = dict(plans)
        keys = {kind: {s.label: s.key for s in plan.segments} for kind, plan in plans.items()}
        self.plan_keys: dict[int, dict[str, tuple[Any, ...]]] = {
            rows: keys[(rows,)] for rows in config.row_keys
        }
        self.best_of_keys: dict[int, dict[str, tuple[Any, ...]]] = {
            n: keys[n, BEST] for n in config.best_of_keys
        }

    def submit(self, tick_input: TickInput, rows: int | None = None) -> Future[Chunk]:
        """Check the input, queue one tick and return its future.

        The future cannot be cancelled: drop a tick with ``lane.at_segment_end``. Its callbacks run
        on the lane thread. State and chunk are both committed or, if it raises, neither.

        :param rows: branches to evaluate, ``tick_input.rows`` if not given; a captured row count,
            1 where the input asks for the best of several.
        :raises ObservationError, ConfigError: the input, before anything is queued.
        :raises MissingKey: a row or candidate count within the bound that was not captured.
        :raises SessionPoisoned: a restore failed half-way (also through the future).
        """
        rows = tick_input.rows if rows is None else rows
        n = tick_input.best_of
        self.boundary.check_usable()
        check_range('best_of', n, 1, self.config.rows)
        if n > 1 and rows != 1:
            raise ConfigError(f'best_of is {n} and rows {rows}; leave rows at 1 to keep the best')
        check_input(tick_input, rows if n == 1 else n, self.config)
        plan = self._plans.get((rows,) if n == 1 else (n, BEST))
        if plan is None:
            what, held, key = (
                (f'rows {rows}', self.plan_keys, 'row_keys')
                if n == 1
                else (f'the best of {n}', self.best_of_keys, 'best_of_keys')
            )
            raise MissingKey(
                f'no plan was captured for {what}; captured are {sorted(held)}; '
                f'use one of them or add it to {key}'
            )

        def before() -> None:
            self.boundary.check_usable()
            write_input(tick_input, max(rows, n), self.buffers, self.config, self.state_text)

        result: Future[Chunk] = Future()
        result.set_running_or_notify_cancel()
        run = self.lane.run(plan, before, lambda: self._read_chunk(rows, n))
        run.add_done_callback(lambda done: _hand_over(done, result))
        return result

    def tick(self, tick_input: TickInput, timeout_s: float = 10.0) -> Chunk:
        """Submit one tick and wait for its chunk.

        :raises LaneError: called on the lane thread, which would wait for itself.
        :raises LaneTimeout: not done in time; the tick is still queued or running.
        Otherwise as ``submit``, and TickDropped when a verb cut it off.
        """
        if self.lane.on_thread:
            raise LaneError('tick() would wait for its own lane thread; use submit() there')
        future = self.submit(tick_input)
        try:
            return future.result(timeout_s)
        except FutureTimeout as error:
            raise LaneTimeout(
                f'the tick was not done within {timeout_s} s; hold the robot'
            ) from error

    def set_branches(
        self, rows: Sequence[int], seeds: Sequence[int], branches: Sequence[int] | None = None
    ) -> Future[None]:
        """Make ``rows`` branches of row 0: copy its whole state there, then set each one's seed.

        :param rows: row indexes; 0 itself may be among them and then only changes its seed.
        :param seeds: one seed a row. :param branches: one branch number a row; None keeps row 0's,
            so that equal seeds give equal chunks.
        :raises ConfigError: rows out of the bound or repeated, lengths that differ, a bad seed.
        """
        for name, values in (('rows', rows), ('seeds', seeds), ('branches', branches or ())):
            if not isinstance(values, Sequence | np.ndarray):
                raise ConfigError(f'{name} is {values!r:.80}; give a sequence of integers')
        chosen = [self._row(row) for row in rows]
        if len(set(chosen)) != len(chosen) or len(seeds) != len(chosen):
            raise ConfigError(
                f'rows {list(rows)} with seeds {list(seeds)}; give one seed a distinct row'
            )
        if branches is not None and len(branches) != len(chosen):
            raise ConfigError(f'rows {list(rows)} with branches {list(branches)}; give one a row')
        for name, values in (('seed', seeds), ('branch', branches or ())):
            for value in values:
                check_range(name, value, 0, 2**63 - 1)

        def apply() -> None:
            self.boundary.check_usable()
            for i, row in enumerate(chosen):
                self._copy_row(0, row)
                self.buffers['seed'].row(row).fill_(seeds[i])
                if branches is not None:
                    self.buffers['branch'].row(row).fill_(branches[i])

        return self.lane.call(apply)

    def commit_branch(self, row: int) -> Future[None]:
        """Copy the state of branch ``row`` to row 0, which goes on from there.

        :raises ConfigError: no such row.
        """
        source = self._row(row)

        def apply() -> None:
            self.boundary.check_usable()
            self._copy_row(source, 0)

        return self.lane.call(apply)

    def close(self) -> None:
        """Drop what runs at its segment's end and end the lane. Closing twice is allowed."""
        self.lane.close()

    def _copy_row(self, source: int, target: int) -> None:
        if source != target:
            for buffer in self.buffers.state():
                buffer.row(target).copy_(buffer.row(source))

    def _row(self, row: int) -> int:
        whole = isinstance(row, int | np.integer) and not isinstance(row, bool)
        if not whole or not 0 <= row < self.config.rows:
            raise ConfigError(
                f'row {row!r} does not exist; this session has rows 0 to {self.config.rows - 1}'
            )
        return int(row)

    def _read_chunk(self, rows: int, best_of: int) -> Chunk:
        """Copy the outputs of the tick that just ended; lane thread."""
        tick, sequence, kept = self.buffers['host.report'].tensor.tolist()
        actions = self.buffers['host.actions'].tensor[: max(rows, best_of)].numpy().copy()
        if best_of > 1:
            candidates = Candidates(
                actions,
                self.buffers['host.scores'].tensor[:best_of].numpy().copy(),
                float(self.buffers['host.spread'].tensor),
                kept,
            )
            keys = self.best_of_keys[best_of]
            return Chunk(
                actions[kept : kept + 1].copy(), tick, sequence, {}, keys, candidates
            )
        return Chunk(actions, tick, sequence, graph_keys=self.plan_keys[rows])


def _hand_over(done: Future[LaneResult[Chunk]], result: Future[Chunk]) -> None:
    error = done.exception()
    if error is not None:
        result.set_exception(error)
    else:
        lane_result = done.result()
        result.set_result(replace(lane_result.value, segments_us=lane_result.segments_us))
