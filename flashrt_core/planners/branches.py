"""Branches: rows that go on from one state, sharing its KV as a read-only prefix."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from flashrt_core.errors import BranchesEnded
from flashrt_core.errors import ConfigError
from flashrt_core.errors import ContractError
from flashrt_core.errors import PromptTooLong
from flashrt_core.errors import TickDropped
from flashrt_core.planners import layout
from flashrt_core.planners.operations import Inputs
from flashrt_core.planners.operations import Job
from flashrt_core.planners.operations import Operation
from flashrt_core.planners.options import Options
from flashrt_core.planners.protocol import BranchStep
from flashrt_core.planners.sampling import check_sampled
from flashrt_core.runtime import BufferSet
from flashrt_core.runtime import Kind
from flashrt_core.runtime import Plan

if TYPE_CHECKING:
    from flashrt_core.planners.session import PlannerSession


@dataclass(frozen=True)
class BranchRoom:
    """What a bind allocates and captures for branches."""

    buffers: BufferSet
    plans: Mapping[tuple[Any, ...], Plan]
    tail_tokens: int
    row_keys: tuple[int, ...]


class Branches:
    """Rows of their own state and KV tail behind the trunk's KV; made by ``session.fork``.

    They step together, one token each. They live until one is committed, they are dropped, a step
    of theirs fails, or the trunk is restored or reset. A branch gives the tokens, the bits of its
    state and of its KV that a single session of its seed and branch number would.
    """

    def __init__(self, session: PlannerSession, room: BranchRoom, epoch: int,
                 seeds: Sequence[int], numbers: Sequence[int] | None = None) -> None:
        self._session = session
        self._room = room
        self._seeds = [check_word('seed', seed) for seed in seeds]
        self._numbers = numbers if numbers is None else [check_word('branch', n) for n in numbers]
        self.count = len(self._seeds)
        if not 1 <= self.count <= room.row_keys[-1]:
            raise ConfigError(
                f'{self.count} seeds are given for at most {room.row_keys[-1]} branches; bind '
                'with more branches or fork in turns'
            )
        if self._numbers is not None and len(self._numbers) != self.count:
            raise ConfigError(
                f'{len(self._numbers)} branch numbers for {self.count} seeds; give one each'
            )
        self._rows = next(key for key in room.row_keys if key >= self.count)
        self._trunk = session.position
        self._tail = 0
        self._epoch = epoch
        self._ended = ''
        self.pending: tuple[int, ...] | None = (
            None if session.pending is None else (session.pending,) * self.count
        )

    # -- what it is -----------------------------------------------------------------------------

    @property
    def live(self) -> bool:
        """Whether they can still step."""
        return not self._ended and self._epoch == self._session.mirror.epoch

    @property
    def position(self) -> int:
        """Tokens in each branch's state."""
        return self._trunk + self._tail

    def check_live(self) -> None:
        """Raise BranchesEnded with the reason."""
        if not self.live:
            reason = self._ended or 'their trunk was restored or reset'
            raise BranchesEnded(f'the {self.count} branches have ended: {reason}; fork again')

    # -- operations -----------------------------------------------------------------------------

    def step(
        self, options: Options | None = None, *, mask: Tensor | None = None
    ) -> Operation[BranchStep]:
        """Sample the next token of every branch, after feeding the one before.

        :param options: shared by the branches, except the seed: each keeps its own. No drafts.
        :param mask: int32 ``[words]`` on the CPU, for all of them.
        :raises BranchesEnded: see ``live``. :raises PromptTooLong: tail or context is full.
        Otherwise as ``session.decode``.
        """
        session = self._session
        with session.runner.starting(self):
            self.check_live()
            fed = self.pending is not None
            greedy = options is not None and options.greedy
            if self._tail + fed > self._room.tail_tokens:
                raise PromptTooLong(
                    f'the tails of {self._room.tail_tokens} tokens are full; commit a branch, or '
                    'bind with more tail_tokens'
                )
            session.check_room(self.position, fed)
            plan = self._room.plans['branch_step' if fed else 'branch_sample', self._rows, greedy]
            inputs = Inputs(options, 1, None if mask is None else mask[None])
            fill = partial(session.fill_sampler, inputs)
            job = Job(plan, fill, partial(self._land, fed))
            return session.runner.launch(
                'branches', [job], self._epoch, _result, self._failed)

    def commit(self, row: int) -> Operation[int]:
        """Make branch ``row`` the trunk: state, KV tail and pending token; the others end.

        :return: a future of the trunk's position.
        :raises ConfigError: no such branch. Otherwise as ``step``.
        """
        if type(row) is not int or not 0 <= row < self.count:
            raise ConfigError(
                f'branch {row!r} does not exist; there are branches 0 to {self.count - 1}'
            )
        session, tail = self._session, self._tail
        with session.runner.starting(self):
            self.check_live()
            notes = [p for p in self._room.plans if p[0] == 'note' and p[1] < tail]
            jobs: list[Job] = [
                Job(self._room.plans[key], partial(self._fill_note, row), lambda: None)
                for key in notes
            ]
            jobs.append(Job(None, lambda: None, partial(self._adopt, row)))
            end = self._trunk + tail
            return session.runner.launch(
                'commit', jobs, self._epoch, lambda done: end, self._failed)

    def drop(self) -> None:
        """End the branches; the trunk is as it was at the fork."""
        self._ended = self._ended or 'they were dropped'

    # -- lane thread ----------------------------------------------------------------------------

    def begin(self) -> None:
        """Copy the trunk's state to every row and give each its seed and branch number."""
        own, trunk = self._room.buffers, self._session.buffers
        rows = own.arena[: self._rows]
        rows.copy_(trunk.arena[0].expand_as(rows))
        for row, seed in enumerate(self._seeds):
            own['seed'].row(row).fill_(seed)
            if self._numbers is not None:
                own['branch'].row(row).fill_(self._numbers[row])

    def _land(self, fed: bool) -> BranchStep:
        tokens = tuple(self._room.buffers['host.tokens'].tensor[: self.count].tolist())
        self._tail += fed
        self.pending = tokens
        for token in tokens:
            check_sampled([token], self.position)
        return BranchStep(tokens, self.position)

    def _fill_note(self, row: int) -> None:
        control = self._session.buffers['host.control'].tensor
        control[layout.ROW], control[layout.COUNT] = row, self._tail

    def _adopt(self, row: int) -> None:
        """Copy row and tail to the trunk. Its KV below the fork is untouched."""
        own, session = self._room.buffers, self._session
        at, end = self._trunk, self._trunk + self._tail
        if session.mirror.position != at:
            raise ContractError(f'the trunk moved from {at} to {session.mirror.position}')
        for buffer in session.buffers.state():
            if buffer.kind is Kind.KV and buffer.name != layout.MTP_KV:
                tail = own[f'tail.{buffer.name}'].row(row)[: self._tail]
                buffer.row(0)[at:end].copy_(tail)
        session.buffers.arena[0].copy_(own.arena[row])
        session.read_mirror()
        self._ended = f'branch {row} was committed'

    def _failed(self, error: BaseException) -> None:
        """End after a plan that failed while it wrote the rows; a dropped one wrote nothing."""
        if not isinstance(error, TickDropped):
            self._ended = self._ended or f'a step failed: {error}'


def check_word(name: str, value: Any) -> int:
    """Return a seed or branch number as a signed 64-bit integer; raises ConfigError."""
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or not -(2**63) <= value < 2**64:
        raise ConfigError(f'{name} is {value!r:.80}; give a whole number of 64 bits')
    return (int(value) + 2**63) % 2**64 - 2**63


def _result(operation: Operation[BranchStep]) -> BranchStep:
    result = operation.results[-1]
    step: BranchStep = result.value
    return BranchStep(step.tokens, step.position, sum(result.segments_us.values()))
