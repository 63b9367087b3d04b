"""The segments of a planner over its buffers: chunk, sample, step, draft | verify, branches.

Bodies read ``b``, the bound tensors by name without a row axis. Every size comes from the config
and the key, every value from device data. A plan's last segment alone writes STATE; what a draft
stores in ``mtp.kv`` lies at or beyond its valid extent, where nothing is state.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashrt_core.capsule import Stages
from flashrt_core.planners import layout
from flashrt_core.planners.memory import Branched
from flashrt_core.planners.memory import Live
from flashrt_core.planners.memory import Verify
from flashrt_core.planners.sampling import count_tokens
from flashrt_core.planners.sampling import counts_before
from flashrt_core.planners.sampling import sample
from flashrt_core.runtime import Buffer
from flashrt_core.runtime import BufferSet
from flashrt_core.runtime import Graph
from flashrt_core.runtime import ShapeKey

Views = Mapping[str, Tensor]

NOTE_ROWS = 16  # tokens of a branch that one segment of a commit notes for MTP


@dataclass(frozen=True)
class Model:
    """A family's config and functions as the segments need them; ``mtp``: has such a head.

    ``stages`` in which a capsule's state may still arrive while a chunk runs; ``waits``: the one
    that a layer waits for.
    """

    c: Any
    forward: Any
    mtp: bool
    stages: Stages
    waits: Mapping[int, int]

    def arrived(self, layer: int) -> None:
        """Wait until the state of a layer, and of those before the next that waits, is there."""
        if layer in self.waits:
            self.stages.wait(self.waits[layer])


def make_graph(
    name: str,
    body: Callable[[Model, Views, ShapeKey], None],
    model: Model,
    buffers: Iterable[Buffer],
) -> Graph:
    """Return a graph with every buffer bound as a port of its own name."""
    bound = {buffer.name: buffer for buffer in buffers}

    def run(ports: Mapping[str, Tensor], key: ShapeKey) -> None:
        body(model, {n: t[0] if bound[n].spec.rows else t for n, t in ports.items()}, key)

    graph = Graph(name, run, bound)
    graph.bind_all(bound)
    return graph


def trunk_graphs(model: Model, buffers: BufferSet) -> dict[str, Graph]:
    """Return the graphs of the live session by name."""
    bodies = {
        'chunk': chunk_body,
        'sample': sample_body,
        'step': step_body,
        'draft': draft_body,
        'given': given_body,
        'verify': verify_body,
    }
    return {name: make_graph(name, body, model, buffers) for name, body in bodies.items()}


# -- inputs and outputs -------------------------------------------------------------------------


def copy_in(b: Views, *names: str) -> None:
    """Bring inputs to the device."""
    for name in names:
        b[f'input.{name}'].copy_(b[f'host.{name}'], non_blocking=True)


def sampler(b: Views) -> tuple[Tensor, Tensor]:
    """Return parameters and seed of this step: the request's if it gave any, else the state's."""
    given = b['input.control'][layout.LATCH] > 0
    parameters = torch.where(given, b['input.parameters'], b['parameters'])
    return parameters, torch.where(given, b['input.control'][layout.SEED], b['seed'])


def copy_mask(b: Views, rows: int) -> None:
    """Bring the masks of the first rows to the device."""
    b['input.mask'][:rows].copy_(b['host.mask'][:rows], non_blocking=True)


def choose(b: Views, logits: Tensor, counts: Tensor, position: Tensor, greedy: Any,
           first: int = 0) -> Tensor:
    """Return the token of each row of logits [M, vocab], int32 [M]; ``first``: its mask's row."""
    parameters, seed = sampler(b)
    return sample(
        logits,
        counts=counts,
        mask=b['input.mask'][first : first + len(logits)],
        parameters=parameters,
        seed=seed,
        branch=b['branch'],
        position=position,
        only_greedy=bool(greedy),
    )


def give_out(b: Views, tokens: Tensor, number: Tensor) -> None:
    """Commit the first ``number`` of ``tokens`` as given out, the last of them as pending."""
    parameters, seed = sampler(b)
    b['parameters'].copy_(parameters)
    b['seed'].copy_(seed)
    count_tokens(b['counts'], tokens, number)
    b['sampled'].add_(number)
    follow(b, tokens, number)
    b['pending'].copy_(tokens.index_select(0, number[None] - 1)[0])
    report(b, number)
    out = b['host.report'][layout.REPORT_HEAD :][: len(tokens)]
    out.copy_(tokens.to(out.dtype), non_blocking=True)


def follow(b: Views, tokens: Tensor, number: Tensor) -> None:
    """Note tokens in the history of the step's grammar; a step without one ends that."""
    start, none = b['input.control'][layout.HISTORY], len(b['history']) - 1
    place = torch.arange(len(tokens), device=tokens.device)
    noted = (place < number) & (start < none)
    at = torch.where(noted, start + place, none)
    b['history'].index_copy_(0, at, torch.where(noted, tokens, 0).int())
    b['followed'][0].copy_(torch.where(start < none, start + number, 0))
    b['followed'][1:].copy_(b['input.control'][layout.GRAMMAR :])


def report(b: Views, given: Tensor) -> None:
    """Say how many tokens were given out and where the state is now."""
    head = torch.stack([given, b['position'], b['pending'], b['followed'][0]])
    b['host.report'][: layout.REPORT_HEAD].copy_(head, non_blocking=True)


# -- prefill ------------------------------------------------------------------------------------


def chunk_body(model: Model, b: Views, key: ShapeKey) -> None:
    """Take ``length`` tokens into the state; key (tokens, span). Its inputs were sent before."""
    T, span = (int(size) for size in key)  # type: ignore[call-overload]
    length, position = b['input.control'][layout.LENGTH], b['position']
    tokens = b['input.tokens'][:T]
    hidden = model.forward.chunk(model.c, b, tokens, position, length, span,
                                 model.arrived)  # [T, D]
    model.stages.wait(len(model.stages) - 1)
    if model.mtp:
        # The pair before the first token of all does not exist: shift past it.
        skipped = (position == 0).long()
        at = (torch.arange(T, device=tokens.device) + skipped).clamp(max=T - 1)
        before = torch.cat([b['hidden'][None], hidden[:-1]])
        model.forward.mtp_note(
            model.c, b, tokens[at], before[at], position - 1 + at, length - skipped
        )
    b['hidden'].copy_(hidden.index_select(0, length[None] - 1)[0])
    b['position'].add_(length)
    b['pending'].fill_(layout.NOTHING_PENDING)
    b['followed'].zero_()
    report(b, torch.zeros_like(length))


# -- decode -------------------------------------------------------------------------------------


def sample_body(model: Model, b: Views, key: ShapeKey) -> None:
    """Sample the next token from ``hidden``; key (greedy,)."""
    copy_in(b, 'control', 'parameters')
    copy_mask(b, 1)
    logits = model.forward.head(model.c, b, b['hidden'][None])
    picked = choose(b, logits, b['counts'], b['position'][None], key[0])
    give_out(b, picked, torch.ones_like(b['position']))


def step_body(model: Model, b: Views, key: ShapeKey) -> None:
    """Feed the pending token and sample the next one; key (greedy,)."""
    copy_in(b, 'control', 'parameters')
    copy_mask(b, 1)
    position = b['position']
    tokens, positions = b['pending'][None].int(), position[None].clone()
    one = torch.ones_like(position)
    hidden = model.forward.rows(model.c, b, tokens, positions, Live(model.c, b, position))
    if model.mtp:
        model.forward.mtp_note(model.c, b, tokens, b['hidden'][None], positions - 1, one)
    logits = model.forward.head(model.c, b, hidden)
    picked = choose(b, logits, b['counts'], positions + 1, key[0])
    b['hidden'].copy_(hidden[0])
    b['position'].add_(1)
    give_out(b, picked, one)


def draft_body(model: Model, b: Views, key: ShapeKey) -> None:
    """Propose K tokens after the pending one with the MTP head; key (K, greedy).

    A draft takes the noise that its verification will take, so that drawn tokens agree more often.
    """
    copy_in(b, 'control', 'parameters')
    copy_mask(b, int(key[0]))  # type: ignore[call-overload]
    token, hidden, position = b['pending'].int(), b['hidden'], b['position'] - 1
    for i in range(int(key[0])):  # type: ignore[call-overload]
        logits, hidden = model.forward.mtp_draft(model.c, b, token, hidden, position + i)
        token = choose(b, logits[None], b['counts'], position[None] + (i + 2), key[1], i)[0]
        token = token.clamp(min=0)  # nothing to choose: any token, the verification refuses it
        b['drafts'][i].copy_(token)


def given_body(model: Model, b: Views, key: ShapeKey) -> None:
    """Take the caller's K proposals; key (K,)."""
    copy_in(b, 'drafts')
    b['drafts'].copy_(b['input.drafts'])


def verify_body(model: Model, b: Views, key: ShapeKey) -> None:
    """Feed the pending token and K drafts, keep what the sampler agrees with; key (K, greedy)."""
    K = int(key[0])  # type: ignore[call-overload]
    copy_in(b, 'control', 'parameters')
    copy_mask(b, K + 1)
    position, drafts = b['position'], b['drafts'][:K]
    tokens = torch.cat([b['pending'][None].int(), drafts])  # [K + 1]
    positions = position + torch.arange(K + 1, device=position.device)
    memory = Verify(model.c, b, position)
    hidden = model.forward.rows(model.c, b, tokens, positions, memory)
    logits = model.forward.head(model.c, b, hidden)
    counts = counts_before(b['counts'], drafts)
    picked = choose(b, logits, counts, positions + 1, key[1])  # [K + 1]

    agrees = (picked[:-1] == drafts) & ~(picked[:-1, None] == b['stop_ids']).any(1)
    accepted = agrees.long().cumprod(0).sum()
    number = torch.minimum(accepted + 1, b['input.control'][layout.LIMIT])
    memory.accept(model.c, b, number)
    if model.mtp:
        before = torch.cat([b['hidden'][None], hidden[:-1]])
        model.forward.mtp_note(model.c, b, tokens, before, positions - 1, number)
    b['hidden'].copy_(hidden.index_select(0, number[None] - 1)[0])
    b['position'].add_(number)
    give_out(b, picked, number)


# -- branches -----------------------------------------------------------------------------------


def branch_graphs(model: Model, trunk: BufferSet, branches: BufferSet) -> dict[str, Graph]:
    """Return the graphs of a fork by name: rows of their own state behind the trunk's KV."""
    bodies = {'branch_sample': branch_sample_body, 'branch_step': branch_step_body}
    if model.mtp:
        bodies['note'] = note_body
    bound = {buffer.name: buffer for buffer in trunk}
    bound |= {f'branch.{buffer.name}': buffer for buffer in branches}
    graphs = {}
    for name, body in bodies.items():
        graphs[name] = Graph(name, partial(_run_branches, body, model, trunk, branches), bound)
        graphs[name].bind_all(bound)
    return graphs


def _run_branches(
    body: Callable[[Model, Views, Views, ShapeKey], None],
    model: Model,
    trunk: BufferSet,
    branches: BufferSet,
    ports: Mapping[str, Tensor],
    key: ShapeKey,
) -> None:
    shared = {b.name: ports[b.name][0] if b.spec.rows else ports[b.name] for b in trunk}
    own = {b.name: ports[f'branch.{b.name}'] for b in branches}
    body(model, shared, own, key)


def branch_sample_body(model: Model, b: Views, own: Views, key: ShapeKey) -> None:
    """Sample the next token of every row from its ``hidden``; key (rows, greedy)."""
    rows = int(key[0])  # type: ignore[call-overload]
    copy_in(b, 'control', 'parameters')
    copy_mask(b, 1)
    logits = model.forward.head(model.c, b, own['hidden'][:rows])
    _give_rows(b, own, logits, own['position'][:rows], key)


def branch_step_body(model: Model, b: Views, own: Views, key: ShapeKey) -> None:
    """Feed the pending token of every row and sample its next one; key (rows, greedy)."""
    rows = int(key[0])  # type: ignore[call-overload]
    copy_in(b, 'control', 'parameters')
    copy_mask(b, 1)
    tokens, positions = own['pending'][:rows].int(), own['position'][:rows].clone()
    memory = Branched(model.c, b, {name: t[:rows] for name, t in own.items()}, b['position'])
    hidden = model.forward.rows(model.c, b, tokens, positions, memory)
    if model.mtp:
        at = (torch.arange(rows, device=tokens.device), positions - b['position'])
        own['tail.hidden'].index_put_(at, hidden)
        own['tail.tokens'].index_put_(at, tokens)
    logits = model.forward.head(model.c, b, hidden)
    own['hidden'][:rows].copy_(hidden)
    own['position'][:rows].add_(1)
    _give_rows(b, own, logits, positions + 1, key)


def _give_rows(b: Views, own: Views, logits: Tensor, positions: Tensor, key: ShapeKey) -> None:
    rows = len(logits)
    given = b['input.control'][layout.LATCH] > 0
    parameters = torch.where(given, b['input.parameters'], own['parameters'][:rows])
    picked = sample(
        logits,
        counts=own['counts'][:rows],
        mask=b['input.mask'][0],
        parameters=parameters,
        seed=own['seed'][:rows],
        branch=own['branch'][:rows],
        position=positions,
        only_greedy=bool(key[1]),
    )
    own['parameters'][:rows].copy_(parameters)
    for row, token in enumerate(picked.split(1)):
        count_tokens(own['counts'][row], token, torch.ones_like(b['position']))
    own['sampled'][:rows].add_(1)
    own['followed'][:rows].zero_()
    own['pending'][:rows].copy_(picked)
    own['host.tokens'][:rows].copy_(picked, non_blocking=True)


def note_body(model: Model, b: Views, own: Views, key: ShapeKey) -> None:
    """Note a piece of a branch's tail in the trunk's MTP cache; key (first token of it,)."""
    copy_in(b, 'control')
    control, tail = b['input.control'], own['tail.tokens'].shape[1]
    first = int(key[0])  # type: ignore[call-overload]
    last = min(first + NOTE_ROWS, tail)
    row = control[layout.ROW][None]
    hidden = torch.cat([b['hidden'][None], own['tail.hidden'].index_select(0, row)[0, :-1]])
    tokens = own['tail.tokens'].index_select(0, row)[0]
    positions = b['position'] - 1 + torch.arange(first, last, device=tokens.device)
    model.forward.mtp_note(
        model.c, b, tokens[first:last], hidden[first:last], positions,
        (control[layout.COUNT] - first).clamp(0, last - first),
    )  # fmt: skip
