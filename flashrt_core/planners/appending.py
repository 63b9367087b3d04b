"""Taking tokens in: chunks of a prompt behind the state, or behind a capsule that is restored."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from functools import partial
from typing import Any
from typing import TYPE_CHECKING

import numpy as np
import torch

from flashrt_core.capsule import Arrival
from flashrt_core.capsule import CapsuleStore
from flashrt_core.errors import CapsuleCorrupt
from flashrt_core.errors import ContractError
from flashrt_core.errors import PromptEmpty
from flashrt_core.errors import TokenUnknown
from flashrt_core.planners import layout
from flashrt_core.planners.chunks import Chunk
from flashrt_core.planners.chunks import plan_chunks
from flashrt_core.planners.operations import Job
from flashrt_core.planners.operations import Operation
from flashrt_core.planners.protocol import Appended

if TYPE_CHECKING:
    from flashrt_core.planners.session import PlannerSession


def append(session: PlannerSession, tokens: Sequence[int], fresh: bool) -> Operation[Appended]:
    """Take ``tokens`` in behind the state, or with ``fresh`` behind the empty one."""
    ids = check_tokens(tokens, session.vocab)
    with session.runner.starting() as epoch:
        position, pending = (0, None) if fresh else (session.position, session.pending)
        name = 'prefill' if fresh else 'append'
        empty = session.make_empty if fresh else None
        return _launch(session, name, ids, position, pending, epoch, empty)


def restore_and_append(session: PlannerSession, store: CapsuleStore, id: str,
                       tokens: Sequence[int], numerics: str) -> Operation[Appended]:
    """Take ``tokens`` in behind a capsule, whose bytes may arrive meanwhile."""
    ids, boundary = check_tokens(tokens, session.vocab), session.boundary
    with session.runner.starting(restores=True) as epoch:
        info, raw = store.peek(boundary, id, 'pending', numerics=numerics)
        given = int(np.frombuffer(raw, np.int64)[0])
        pending = given if given >= 0 else None

        def restore() -> Arrival:
            return store.start_restore(boundary, id, numerics=numerics)

        def same() -> None:
            if session.pending != pending:
                raise CapsuleCorrupt(f'capsule {id!r} was another one when this append was begun')

        name = 'restore and append'
        return _launch(session, name, ids, info.position, pending, epoch, same, restore)


def _launch(session: PlannerSession, name: str, ids: np.ndarray, position: int,
            pending: int | None, epoch: int, first: Callable[[], None] | None,
            restore: Callable[[], Arrival] | None = None) -> Operation[Appended]:
    """Queue the chunks of ``ids`` from ``position`` on; ``first`` is done before the first one."""
    if ids.size == 0:
        raise PromptEmpty(
            'there are no tokens to append: give at least one, or call decode, which goes on from '
            'what the state holds'
        )
    if pending is not None:
        ids = np.concatenate([np.array([pending], np.int32), ids])
    settings = session.settings
    chunks = plan_chunks(
        ids.size, position, keys=settings.prefill_keys, context=session.context,
        ridge=settings.ridge, smallest_span=settings.smallest_span,
    )  # fmt: skip
    jobs: list[Job] = []
    for chunk, plan in zip(chunks, session.plans_of(chunks)):
        part = ids[chunk.start - position :][: chunk.length]
        send = partial(_send, session, part)
        land = partial(session.land, chunk.start + chunk.length)
        if jobs or restore is None:
            fill = partial(_fill, session, chunk, None if jobs else first, send)
            jobs.append(Job(plan, fill, land))
        else:
            fill = partial(_fill, session, chunk, first)
            jobs.append(Job(plan, fill, land, partial(_restore, send, restore)))
    return session.runner.launch(name, jobs, epoch, partial(_appended, chunks))


def _restore(send: Callable[[], None], restore: Callable[[], Arrival]) -> Arrival:
    """Send the inputs ahead of the capsule, so that they need not queue behind its copies."""
    send()
    return restore()


def _send(session: PlannerSession, ids: np.ndarray) -> None:
    """Bring the inputs of one chunk to the device, in the order of the lane's stream."""
    b = session.buffers
    b['host.tokens'].tensor[: len(ids)].copy_(torch.from_numpy(ids))
    b['host.control'].tensor[layout.LENGTH] = len(ids)
    for name in ('tokens', 'control'):
        b[f'input.{name}'].tensor.copy_(b[f'host.{name}'].tensor, non_blocking=True)


def _fill(session: PlannerSession, chunk: Chunk, first: Callable[[], None] | None,
          send: Callable[[], None] = lambda: None) -> None:
    """Check where one chunk meets the state, and send its inputs; lane thread."""
    if first is not None:
        first()
    if chunk.start != session.position:
        raise ContractError(
            f'a chunk for position {chunk.start} met a state of {session.position} tokens; '
            'restore a capsule or reset'
        )
    send()


def _appended(chunks: tuple[Chunk, ...], operation: Operation[Any]) -> Appended:
    us = tuple(sum(result.segments_us.values()) for result in operation.results)
    return Appended(chunks[-1].start + chunks[-1].length, chunks, us, operation.restored)


def check_tokens(tokens: Sequence[int], vocab: int) -> np.ndarray:
    """Return the ids as int32; raises TokenUnknown for what is not a token."""
    ids = np.asarray(tokens if isinstance(tokens, np.ndarray) else list(tokens))
    if ids.size == 0:
        return np.zeros(0, np.int32)
    if ids.ndim != 1 or ids.dtype.kind not in 'iu':
        raise TokenUnknown(
            f'tokens {tokens!r:.80} are not a list of whole numbers; give token ids'
        )
    bad = ids[(ids < 0) | (ids >= vocab)]
    if bad.size:
        raise TokenUnknown(
            f'token {int(bad[0])} is not in the vocabulary; give ids from 0 to '
            f'{vocab - 1}, made by the tokenizer of this model'
        )
    return np.ascontiguousarray(ids, np.int32)
