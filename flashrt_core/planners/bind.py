"""Bind a planner: constants, buffers, graphs, plans, boundary; all that can fail fails here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import torch

from flashrt_core.capsule import Boundary
from flashrt_core.capsule import config_fields
from flashrt_core.capsule import Identity
from flashrt_core.capsule import numerics_of
from flashrt_core.capsule import Stages
from flashrt_core.capsule import weights_digest
from flashrt_core.capsule.marks import MarkRing
from flashrt_core.planners import layout
from flashrt_core.planners.branches import BranchRoom
from flashrt_core.planners.chunks import covers
from flashrt_core.planners.chunks import graph_keys
from flashrt_core.planners.graphs import branch_graphs
from flashrt_core.planners.graphs import Model
from flashrt_core.planners.graphs import NOTE_ROWS
from flashrt_core.planners.graphs import trunk_graphs
from flashrt_core.planners.operations import Mirror
from flashrt_core.planners.operations import Runner
from flashrt_core.planners.protocol import Progress
from flashrt_core.planners.protocol import Settings
from flashrt_core.planners.session import PlannerSession
from flashrt_core.planners.session import reset_state
from flashrt_core.planners.text import check_vocabulary
from flashrt_core.runtime import Backend
from flashrt_core.runtime import BufferSet
from flashrt_core.runtime import Graph
from flashrt_core.runtime import Kind
from flashrt_core.runtime import Lane
from flashrt_core.runtime import Plan
from flashrt_core.runtime import Role

Plans = dict[tuple[Any, ...], Plan]


@dataclass(frozen=True)
class Family:
    """What a family adds to the shared session; a ``protocol.Planner``.

    ``load_config``: from a config, a name, a path or a mapping to config and settings. The config
    has ``context``, ``vocab``, ``width``, ``torch_dtype``, ``tokenizer`` (a name or '') and
    ``layout()``, its identity's fields.
    ``forward_of``: the module of its functions (design section 8) on a device.
    ``load_constants``: fills every CONSTANT buffer that ``weight_specs`` of that module names.
    """

    name: str
    load_config: Callable[[Any], tuple[Any, Settings]]
    forward_of: Callable[[Any, torch.device], ModuleType]
    load_constants: Callable[[Any, BufferSet, Callable[[float], None]], None]

    def bind(self, backend: Backend, config: Any,
             progress: Progress | None = None) -> PlannerSession:
        """Return a session, see ``bind``."""
        return bind(self, backend, config, progress)


def bind(
    family: Family, backend: Backend, config: Any, progress: Progress | None = None
) -> PlannerSession:
    """Return a session with an empty state; any thread, seconds to minutes.

    The tokenizer's end tokens and its size stand in for settings that name none.

    :param progress: told stage ('load', 'bind', 'capture', 'warm up') and fraction done.
    :raises ConfigError: the config, the settings or the weights do not fit.
    :raises OutOfMemory, CaptureFailed: the device refuses.
    """
    c, s = family.load_config(config)
    tokenizer = None
    if c.tokenizer:
        from flashrt_core.planners.vocabularies import make_tokenizer  # only texts need it

        tokenizer = make_tokenizer(c.tokenizer)
        check_vocabulary(tokenizer, c.vocab)
        s = replace(s, stop_ids=s.stop_ids or tokenizer.ends,
                    known_tokens=s.known_tokens or tokenizer.vocab)
    s.check(c.context, c.vocab)
    covers(s.prefill_keys, s.ridge)
    tell = progress or (lambda stage, fraction: None)
    forward = family.forward_of(c, backend.device)
    memory = forward.state_specs(c)
    mtp = any(spec.name == layout.MTP_KV for spec in memory)
    state = layout.state_specs(memory, c.width, c.vocab, c.context, c.torch_dtype)
    order, waits = layout.arrival_order(memory, state)
    stages = Stages(backend, order)
    model = Model(c, forward, mtp, stages, waits)
    specs = [*state, *layout.session_specs(s, c.vocab), *forward.scratch_specs(c),
             *forward.weight_specs(c)]
    buffers = BufferSet(backend, specs, name=family.name)
    branches = None
    if s.branches:
        own = layout.branch_specs(memory, state, s, c.width, c.torch_dtype, mtp)
        branches = BufferSet(backend, own, rows=s.branches, name=f'{family.name} branches')
    buffers['stop_ids'].tensor.copy_(_padded(s.stop_ids))
    family.load_constants(c, buffers, lambda fraction: tell('load', fraction))
    # Stop ids end a stream; they do not change how a state is read.
    digest = weights_digest({b.name: b.tensor for b in buffers.by_role(Role.CONSTANT)
                             if b.name != 'stop_ids'})
    backend.synchronize()  # zeroing ran on another stream than the captures will
    tell('bind', 0.0)
    lane = Lane(backend, family.name).start()
    try:
        use_threads(s, backend)
        lane.call(partial(use_threads, s, backend)).result()
        ready = partial(prime, buffers, branches)
        plans = capture_trunk(model, s, buffers, lane, ready, tell)
        room = None
        if branches is not None:
            own_plans = capture_branches(model, s, buffers, branches, lane, ready)
            room = BranchRoom(branches, own_plans, s.tail_tokens, s.branch_keys)
        for i, plan in enumerate(dict.fromkeys(plans.values())):
            tell('warm up', i / len(plans))
            lane.run(plan, ready).result()
        lane.call(lambda: reset_state(buffers)).result()
        lane.call(lane.commit).result()
        lane.seal()
        mirror = Mirror()
        kv = [spec.name for spec in memory if spec.kind is Kind.KV]
        boundary = Boundary(
            buffers,
            lane.call(partial(make_identity, family, c, s, forward, digest, backend)).result(),
            extent=lambda: mirror.extents(kv),
            position=lambda: mirror.position,
            order=[spec.name for spec in state],
            session=family.name,
            lane=lane,
            stages=stages,
            notes=lambda: (mirror.pending, mirror.followed),
        )
        runner = Runner(lane, boundary, mirror, MarkRing(backend, boundary, 1))
    except BaseException:
        lane.close()
        raise
    tell('warm up', 1.0)
    return PlannerSession(c, s, buffers, lane, plans, boundary, runner, room, tokenizer)


def make_identity(family: Family, c: Any, s: Settings, forward: ModuleType, digest: str,
                  backend: Backend) -> Identity:
    """Return who a state belongs to: config, weights; kernels, chunk plan, device; lane thread."""
    layout_fields = {'family': family.name, 'weights': digest, **c.layout()}
    cuts = {'prefill_keys': s.prefill_keys, 'ridge': s.ridge, 'smallest_span': s.smallest_span}
    numerics = {
        'forward': f'{family.name}.{forward.__name__.rsplit(".", 1)[-1]}',
        **config_fields(cuts, 'chunks'),
    }
    return Identity(layout_fields, numerics_of(backend.device, numerics))


def capture_trunk(model: Model, s: Settings, buffers: BufferSet, lane: Lane,
                  ready: Callable[[], None], tell: Progress) -> Plans:
    """Capture every graph key of the live session and return its plans by (kind, *key)."""
    graphs = trunk_graphs(model, buffers)
    chunks = chunk_keys(model, s)
    wanted: list[tuple[tuple[Any, ...], list[tuple[str, tuple[Any, ...]]]]] = [
        (('chunk', *key), [('chunk', key)]) for key in dict.fromkeys(chunks.values())
    ]
    for greedy in (True, False):
        wanted += [((kind, greedy), [(kind, (greedy,))]) for kind in ('sample', 'step')]
        for K in range(1, s.draft_tokens + 1):
            verify = ('verify', (K, greedy))
            wanted.append((('given', K, greedy), [('given', (K,)), verify]))
            if model.mtp:
                draft = ('draft', (K, greedy))
                wanted.append((('draft', K, greedy), [draft, verify]))
                wanted.append((('propose', K, greedy), [draft]))
    plans: Plans = {}
    for i, (name, segments) in enumerate(wanted):
        tell('capture', i / len(wanted))
        plans[name] = make_plan(name, graphs, segments, lane, ready)
    plans |= {('chunk', *key): plans['chunk', *captured] for key, captured in chunks.items()}
    tell('capture', 1.0)
    return plans


def chunk_keys(model: Model, s: Settings) -> dict[tuple[int, int], tuple[int, int]]:
    """Return by each key of a chunk plan the key of the graph that runs it.

    A family whose ``READS_SPAN`` is False reads as many keys as there are, whatever the span: one
    graph a chunk size does.
    """
    context = model.c.context
    reads_span = getattr(model.forward, 'READS_SPAN', True)
    return {key: key if reads_span else (key[0], context)
            for key in graph_keys(s.prefill_keys, s.smallest_span, context)}


def capture_branches(model: Model, s: Settings, buffers: BufferSet, branches: BufferSet,
                     lane: Lane, ready: Callable[[], None]) -> Plans:
    """Capture the graphs of a fork and return its plans by (kind, *key)."""
    graphs = branch_graphs(model, buffers, branches)
    keys: list[tuple[str, tuple[Any, ...]]] = [
        (kind, (rows, greedy))
        for kind in ('branch_sample', 'branch_step')
        for rows in s.branch_keys
        for greedy in (True, False)
    ]
    if model.mtp:
        keys += [('note', (first,)) for first in range(0, s.tail_tokens, NOTE_ROWS)]
    return {(kind, *key): make_plan((kind, *key), graphs, [(kind, key)], lane, ready)
            for kind, key in keys}


def make_plan(name: tuple[Any, ...], graphs: dict[str, Graph],
              segments: list[tuple[str, tuple[Any, ...]]], lane: Lane,
              ready: Callable[[], None]) -> Plan:
    """Capture the segments and return the plan that runs them in order.

    :param ready: writes a state that the bodies can run on; they leave garbage.
    """
    plan = Plan(' '.join(str(part) for part in name))
    last: tuple[int, ...] = ()
    for kind, key in segments:
        lane.call(ready).result()
        graphs[kind].capture(key, lane)
        last = (plan.add(graphs[kind], key, after=last),)
    plan.check()
    return plan


def prime(buffers: BufferSet, branches: BufferSet | None) -> None:
    """Write a state and inputs with which every body can run: one token in, one pending."""
    reset_state(buffers)
    buffers['position'].tensor.fill_(1)
    buffers['pending'].tensor.fill_(0)
    control = buffers['host.control'].tensor
    control[[layout.LENGTH, layout.LIMIT]] = 1
    buffers['input.control'].tensor.copy_(control)
    buffers['host.mask'].tensor.fill_(-1)
    buffers['host.parameters'].tensor.copy_(buffers['parameters'].tensor[0])
    if branches is not None:
        branches.arena.copy_(buffers.arena.expand_as(branches.arena))
    buffers.backend.synchronize()  # a capture warms up on another stream


def use_threads(s: Settings, backend: Backend) -> None:
    """Set torch's CPU threads, here and (as torch has it) partly for the whole process."""
    if backend.name == 'cpu' and s.cpu_threads:
        torch.set_num_threads(s.cpu_threads)


def _padded(ids: tuple[int, ...]) -> torch.Tensor:
    padding = (layout.NOTHING_PENDING,) * (layout.STOP_IDS_LIMIT - len(ids))
    return torch.tensor((*ids, *padding), dtype=torch.int32)
