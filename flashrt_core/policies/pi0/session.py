"""A bound Pi0: ticks, branches and their state, all on one lane."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Mapping
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

import numpy as np

from flashrt_core.capsule import Boundary
from flashrt_core.capsule import CapsuleInfo
from flashrt_core.capsule import Mark
from flashrt_core.errors import ConfigError
from flashrt_core.errors import LaneError
from flashrt_core.errors import LaneTimeout
from flashrt_core.errors import MissingKey
from flashrt_core.policies.arrays import is_sequence
from flashrt_core.policies.pi0.config import Pi0Config
from flashrt_core.policies.pi0.graphs import BEST
from flashrt_core.policies.pi0.graphs import vision_label
from flashrt_core.policies.pi0.inputs import check_input
from flashrt_core.policies.pi0.inputs import check_range
from flashrt_core.policies.pi0.inputs import write_input
from flashrt_core.policies.pi0.layout import ports
from flashrt_core.policies.prompts import StateText
from flashrt_core.policies.protocol import Candidates
from flashrt_core.policies.protocol import Chunk
from flashrt_core.policies.protocol import Frame
from flashrt_core.policies.protocol import TickInput
from flashrt_core.policies.text import Tokenizer
from flashrt_core.runtime import BufferSet
from flashrt_core.runtime import Lane
from flashrt_core.runtime import LaneResult
from flashrt_core.runtime import Plan


@dataclass(frozen=True)
class Absent:
    """The frame of a view without an image, which is black and masked."""

    stamp_ns: int = -(2**64)  # outside every clock
    digest: int = 0


ABSENT = Absent()


def reset_state(buffers: BufferSet, c: Pi0Config) -> None:
    """Write the state of a fresh session into every row; lane thread."""
    for buffer in buffers.state():
        buffer.tensor.zero_()
    buffers['seed'].tensor.fill_(c.seed)
    if c.guidance:
        buffers['guidance'].tensor.fill_(1.0)


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
        ticks: list[int],
        tokenizer: Tokenizer | None = None,
        state_text: StateText | None = None,
    ) -> None:
        """Take over what ``Pi0Policy.bind`` made.

        :param plans: by (rows,), and by (candidates, BEST).
        :param ticks: ticks committed in each row, kept up here; the boundary reads its position.
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
        self._ticks = ticks
        self._encoded: dict[str, Frame] = {}  # whose tokens are in image_tokens; lane thread
        boundary.on_restore.append(self._restored)
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

        frames: dict[str, Frame] = {}
        reused: list[str] = []

        def before() -> None:
            self.boundary.check_usable()
            frames.update(self._frames(tick_input))
            reused.extend(v for v, frame in frames.items() if _same(self._encoded.get(v), frame))
            # Until the tick has ended, what it encodes may be half-written.
            self._encoded = {v: self._encoded[v] for v in reused}
            write_input(
                tick_input, max(rows, n), self.buffers, self.config, self.state_text, reused
            )

        def after() -> Chunk:
            self._encoded = frames
            return self._read_chunk(rows, n, tuple(reused))

        result: Future[Chunk] = Future()
        result.set_running_or_notify_cancel()
        run = self.lane.run(plan, before, after, skip=lambda: {vision_label(v) for v in reused})
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
        numbers = () if branches is None else branches
        for name, values in (('rows', rows), ('seeds', seeds), ('branches', numbers)):
            if not is_sequence(values):
                raise ConfigError(f'{name} is {values!r:.80}; give a sequence of integers')
        chosen = [self._row(row) for row in rows]
        if len(set(chosen)) != len(chosen) or len(seeds) != len(chosen):
            raise ConfigError(
                f'rows {list(rows)} with seeds {list(seeds)}; give one seed a distinct row'
            )
        if branches is not None and len(branches) != len(chosen):
            raise ConfigError(f'rows {list(rows)} with branches {list(branches)}; give one a row')
        for name, values in (('seed', seeds), ('branch', numbers)):
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
            self._ticks[target] = self._ticks[source]

    def _restored(self, point: CapsuleInfo | Mark, rows: tuple[int, ...]) -> None:
        """Follow a restore: what is outside the boundary counts as lost, vision included."""
        self._encoded = {}
        for row in rows:
            self._ticks[row] = point.position

    def _frames(self, t: TickInput) -> dict[str, Frame]:
        """Return which frame each view shows, where that is known and of use."""
        if not self.config.reuse_vision:
            return {}
        shown = {v: ABSENT if t.images.get(v) is None else t.frames.get(v) for v in
                 self.config.views}
        return {v: frame for v, frame in shown.items() if frame is not None}

    def _row(self, row: int) -> int:
        whole = isinstance(row, int | np.integer) and not isinstance(row, bool)
        if not whole or not 0 <= row < self.config.rows:
            raise ConfigError(
                f'row {row!r} does not exist; this session has rows 0 to {self.config.rows - 1}'
            )
        return int(row)

    def _read_chunk(self, rows: int, best_of: int, reused: tuple[str, ...]) -> Chunk:
        """Copy the outputs of the tick that just ended and count it; lane thread."""
        for row in range(rows):
            self._ticks[row] += 1
        plan_keys = self.plan_keys[rows] if best_of == 1 else self.best_of_keys[best_of]
        left_out = {vision_label(view) for view in reused}
        keys = {label: key for label, key in plan_keys.items() if label not in left_out}
        tick, sequence, kept = self.buffers['host.report'].tensor.tolist()
        actions = self.buffers['host.actions'].tensor[: max(rows, best_of)].numpy().copy()
        candidates = None
        if best_of > 1:
            candidates = Candidates(
                actions,
                self.buffers['host.scores'].tensor[:best_of].numpy().copy(),
                float(self.buffers['host.spread'].tensor),
                kept,
            )
            actions = actions[kept : kept + 1].copy()
        return Chunk(actions, tick, sequence, {}, keys, candidates, reused)


def _same(encoded: Frame | None, frame: Frame) -> bool:
    return encoded is not None and (
        encoded is frame
        or (encoded.stamp_ns == frame.stamp_ns and encoded.digest == frame.digest)
    )


def _hand_over(done: Future[LaneResult[Chunk]], result: Future[Chunk]) -> None:
    error = done.exception()
    if error is not None:
        result.set_exception(error)
    else:
        lane_result = done.result()
        result.set_result(replace(lane_result.value, segments_us=lane_result.segments_us))
