"""The ports and buffers of a planner session, by name; the same for every family.

A family declares its weights, its memory (``kv.*``, ``recurrent.*``, ``conv.*``, ``mtp.kv``) and
its scratch; all else is here. Inputs exist twice: ``host.*`` (pinned, written between plans) and
``input.*`` (device, copied by the segment that reads them).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flashrt_core.planners.followed import WORDS
from flashrt_core.planners.options import PARAMETERS
from flashrt_core.planners.protocol import Settings
from flashrt_core.planners.protocol import STOP_IDS_LIMIT
from flashrt_core.planners.sampling import mask_words
from flashrt_core.policies.protocol import Modality
from flashrt_core.policies.protocol import PortSpec
from flashrt_core.runtime import BufferSpec
from flashrt_core.runtime import Kind
from flashrt_core.runtime import Role

I32, I64, F32 = torch.int32, torch.int64, torch.float32

NOTHING_PENDING = -1

# Fields of the control vector. LATCH: take parameters and seed from the input, else keep the
# state's. LIMIT: tokens that a step may give out. ROW, COUNT: of a branch to be committed.
# HISTORY: where a step's tokens go in the history of its grammar, the context's size: it has none.
# GRAMMAR: the first of the words of that grammar.
LENGTH, LATCH, SEED, LIMIT, ROW, COUNT, HISTORY, GRAMMAR = range(8)
CONTROL = GRAMMAR + WORDS
# Fields of the report of a plan; REPORT_HEAD: the tokens follow.
GIVEN, POSITION, PENDING, FOLLOWED, REPORT_HEAD = range(5)

MTP_KV = 'mtp.kv'


def ports(context: int, vocab: int) -> tuple[PortSpec, ...]:
    """Return what goes in and out: token ids, below ``vocab``."""
    unit = f'token id below {vocab}'
    return (
        PortSpec('prompt', Modality.TEXT, 'int64', (context,), unit),
        PortSpec('tokens', Modality.TEXT, 'int64', (context,), unit),
    )


def state_specs(memory: Sequence[BufferSpec], width: int, vocab: int, context: int,
                dtype: torch.dtype) -> list[BufferSpec]:
    """Return the boundary: the family's memory, then what the shared session keeps.

    ``hidden``: of the last token in the state, after the final norm. ``counts``: how often each
    token was sampled, ``sampled`` how many were. ``parameters``, ``seed``, ``branch``: the
    sampler's. ``position``: tokens in the state. ``pending``: a token given out but not yet in it.
    ``followed``: how many of the last tokens a grammar has followed, and the words of it;
    ``history``: these tokens, and a last place that stays 0.
    """
    fields: dict[str, tuple[Kind, torch.dtype, tuple[int, ...]]] = {
        'hidden': (Kind.MTP, dtype, (width,)),
        'position': (Kind.META, I64, ()),
        'pending': (Kind.META, I64, ()),
        'sampled': (Kind.META, I64, ()),
        'counts': (Kind.META, I32, (vocab,)),
        'parameters': (Kind.META, F32, (len(PARAMETERS),)),
        'seed': (Kind.RNG, I64, ()),
        'branch': (Kind.RNG, I64, ()),
        'followed': (Kind.META, I64, (1 + WORDS,)),
        'history': (Kind.META, I32, (context + 1,)),
    }
    return [*memory, *(
        BufferSpec(name, Role.STATE, dtype, shape, kind=kind)
        for name, (kind, dtype, shape) in fields.items()
    )]


def arrival_order(memory: Sequence[BufferSpec], state: Sequence[BufferSpec]
                  ) -> tuple[list[list[str]], dict[int, int]]:
    """Return the stages in which state arrives, and by layer which of them it waits for.

    What is not of a layer comes first, MTP's KV last; in between each layer that attends begins a
    stage, which takes along what the layers after it keep. A layer not named waits for nothing.
    """
    stages = [[spec.name for spec in state if spec not in memory]]
    waits: dict[int, int] = {}
    for spec in memory:
        if spec.kind is Kind.KV or len(stages) == 1:
            if spec.name != MTP_KV:
                waits[int(spec.name.rsplit('.', 1)[-1])] = len(stages)
            stages.append([])
        stages[-1].append(spec.name)
    return stages, waits


def session_specs(s: Settings, vocab: int) -> list[BufferSpec]:
    """Return inputs, outputs and scratch of the shared session."""
    drafts = max(1, s.draft_tokens)
    inputs: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        'tokens': (I32, (max(s.prefill_keys),)),
        'control': (I64, (CONTROL,)),
        'parameters': (F32, (len(PARAMETERS),)),
        'mask': (I32, (drafts + 1, mask_words(vocab))),
        'drafts': (I32, (drafts,)),
    }
    specs = [
        BufferSpec(f'{where}.{name}', Role.INPUT, dtype, shape, host=host, rows=False)
        for where, host in (('host', True), ('input', False))
        for name, (dtype, shape) in inputs.items()
    ]
    out = REPORT_HEAD + drafts + 1
    return [
        *specs,
        BufferSpec('drafts', Role.SCRATCH, I32, (drafts,), rows=False),
        BufferSpec('stop_ids', Role.CONSTANT, I32, (STOP_IDS_LIMIT,), rows=False),
        BufferSpec('host.report', Role.OUTPUT, I64, (out,), host=True, rows=False),
    ]


def branch_specs(memory: Sequence[BufferSpec], state: Sequence[BufferSpec], s: Settings,
                 width: int, dtype: torch.dtype, mtp: bool) -> list[BufferSpec]:
    """Return the buffers of the branches, all with a row each: own state, own KV tail.

    Small state has the trunk's names and order, so that its arena rows are the trunk's. With MTP
    the tail keeps hidden states and tokens, from which a commit writes the trunk's MTP cache.
    """
    specs = [spec for spec in state if spec.in_arena]
    for spec in memory:
        if spec.kind is Kind.KV and spec.name != MTP_KV:
            shape = (s.tail_tokens, *spec.shape[1:])
            specs.append(BufferSpec(f'tail.{spec.name}', Role.SCRATCH, spec.dtype, shape))
    if mtp:
        specs.append(BufferSpec('tail.hidden', Role.SCRATCH, dtype, (s.tail_tokens, width)))
        specs.append(BufferSpec('tail.tokens', Role.SCRATCH, I32, (s.tail_tokens,)))
    specs.append(BufferSpec('host.tokens', Role.OUTPUT, I32, (), host=True))
    return specs


def memory_report(buffers: Any, branches: Any, undo_bytes: int) -> dict[str, int]:
    """Return bytes by purpose: what a bind allocates, and what a capsule holds.

    :param buffers: the session's BufferSet. :param branches: that of its branches, or None.
    """
    weights = sum(b.nbytes for b in buffers.by_role(Role.CONSTANT))
    kv = [b for b in buffers.state() if b.kind is Kind.KV]
    state = sum(b.nbytes for b in kv) + buffers.arena.numel()
    return {
        'weights': weights,
        'state': state,
        'other_buffers': buffers.nbytes - weights - state,
        'undo': undo_bytes,
        'branches': 0 if branches is None else branches.nbytes,
        'total': buffers.nbytes + undo_bytes + (0 if branches is None else branches.nbytes),
        'capsule_fixed': int(buffers.arena.shape[-1]),
        'capsule_per_token': sum(b.nbytes // b.shape[1] for b in kv),
    }
