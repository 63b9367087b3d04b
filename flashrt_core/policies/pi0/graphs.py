"""The three segments of a Pi0 tick: vision | prefix | denoise, over a session's buffers.

Vision is one segment for all views, or one a view where results are reused. Bodies read ``b``,
the bound tensors by name. Every size comes from the config and the key ``(views, rows)`` or
``(views, candidates, BEST)``, every value from device data. The last body alone writes STATE.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flashrt_core.policies import chunking
from flashrt_core.policies.pi0 import fast
from flashrt_core.policies.pi0 import layout
from flashrt_core.policies.pi0 import model
from flashrt_core.policies.pi0 import pi05
from flashrt_core.policies.pi0 import pi05_fast
from flashrt_core.policies.pi0.config import Pi0Config
from flashrt_core.policies.pi0.model import Given
from flashrt_core.policies.pi0.model import Guide
from flashrt_core.policies.pi0.precision import reading
from flashrt_core.policies.selectors import select
from flashrt_core.runtime import BufferSet
from flashrt_core.runtime import Graph
from flashrt_core.runtime import ShapeKey
from flashrt_core.runtime.philox import normal_torch

Ports = Mapping[str, Tensor]
BEST = 'best'  # in a key: the rows are candidates of row 0, of which one is kept


# Beginnings of the names that each segment reads or writes.
PORTS = {
    'vision': ('host.images', 'input.images', 'image_tokens', 'vision.', 'projector.'),
    'prefix': (
        *(f'host.{n}' for n in layout.SMALL_INPUTS), 'host.guidance', 'input.', 'image_tokens',
        'prompt_', 'subgoal_', 'next.', 'prefix_', 'prefix.', 'free_', 'table.rope',
    ),
    'denoise': (
        'input.', 'next.', 'prefix_', 'free_', 'table.', 'state_in', 'action_in', 'time_mlp',
        'expert.', 'action_out', *layout.STATE, *layout.MODE_STATE, 'host.actions', 'host.report',
        'host.scores', 'host.spread',
    ),
}  # fmt: skip


def make_graphs(c: Pi0Config, buffers: BufferSet) -> tuple[list[Graph], Graph, Graph]:
    """Return the graphs of vision, prefix and denoise with every port bound."""
    forward = forward_of(c, buffers['prefix_kv'].tensor.device)

    def graph(kind: str, body: Callable[..., None], name: str = '', **fixed: Any) -> Graph:
        names = [buffer.name for buffer in buffers if buffer.name.startswith(PORTS[kind])]
        made = Graph(name or kind, partial(reading(c, body), c, forward, **fixed), names)
        made.bind_all({port: buffers[port] for port in names})
        return made

    vision = [graph('vision', vision_body)]
    if c.reuse_vision:
        vision = [
            graph('vision', vision_body, vision_label(view), views=slice(i, i + 1))
            for i, view in enumerate(c.views)
        ]
    return vision, graph('prefix', prefix_body), graph('denoise', denoise_body)


def vision_label(view: str) -> str:
    """Return the name of the segment that encodes one view alone."""
    return f'vision.{view}'


def forward_of(c: Pi0Config, device: torch.device) -> ModuleType:
    """Return ``fast`` where its kernels serve these sizes on this device, else ``model``.

    Pi0.5 has its own of both, which differ in the expert.
    """
    if c.modulated:
        return pi05_fast if pi05_fast.selected(c, device) else pi05
    return fast if fast.selected(c, device) else model


def vision_body(
    c: Pi0Config, forward: ModuleType, b: Ports, key: ShapeKey, views: slice = slice(None)
) -> None:
    """Copy images in and encode them into ``image_tokens``: all, or those of ``views``."""
    images = b['input.images'][views]
    images.copy_(b['host.images'][views], non_blocking=True)
    tokens = b['image_tokens'].unflatten(0, (len(c.views), -1))[views].flatten(0, 1)
    tokens.copy_(forward.encode_views(images, b, c))


def prefix_body(c: Pi0Config, forward: ModuleType, b: Ports, key: ShapeKey) -> None:
    """Copy all but images in, latch text into ``next.*``, write the prefix' keys, values and mask.

    The prefix is that of row 0: rows are branches of one observation and share prompt and subgoal.
    """
    for name in layout.inputs(c):
        if name != 'images':
            b[f'input.{name}'].copy_(b[f'host.{name}'], non_blocking=True)
    prompt, subgoal = b['input.prompt'], b['input.subgoal']
    _latch(b, prompt[0], 'prompt_length', prompt[1])
    _latch(b, prompt[0], 'prompt_tokens', prompt[layout.PROMPT_HEAD :])
    _latch(b, subgoal[0], 'subgoal_length', subgoal[1])
    _latch(b, subgoal[0], 'subgoal_sequence', subgoal[2])
    _latch(b, subgoal[0], 'subgoal_tokens', subgoal[layout.SUBGOAL_HEAD :])
    if c.subgoal_embedding_tokens:
        length, rows = b['input.subgoal_embedding_length'], b['input.subgoal_embedding']
        here = torch.arange(len(rows), device=rows.device) < length
        _latch(b, subgoal[0], 'subgoal_embedding_length', length[0])
        _latch(b, subgoal[0], 'subgoal_embedding', torch.where(here[:, None], rows, 0.0))

    views = b['input.control'][layout.VIEW_MASK :].bool()  # [V]
    text, said = language(c, b)
    mask = torch.cat([views[:, None].expand(-1, c.vision.tokens).flatten(), said])  # [P]
    b['prefix_mask'].copy_(mask)
    text = text.clamp(0, c.vocab - 1)  # padding may hold anything
    forward.encode_prefix(
        b['image_tokens'], text, mask, b['prefix_kv'], b, c, given_rows(c, b))
    if c.guidance:
        free = b['free_mask'].copy_(mask)
        free[c.image_tokens : c.prefix_tokens - c.state_tokens] = False  # all language of the task
        forward.encode_prefix(b['image_tokens'], text, free, b['free_kv'], b, c)


def language(c: Pi0Config, b: Ports) -> tuple[Tensor, Tensor]:
    """Return token ids and validity [text_tokens] of this tick's language.

    Pi0 reads the prompt, then the subgoal. Pi0.5 reads one task, the subgoal where there is one
    and else the prompt, and then the state: a subgoal is the low-level command that a planner
    makes of the prompt (arXiv 2504.16054, section IV).
    """
    prompt, subgoal = b['next.prompt_tokens'], b['next.subgoal_tokens']
    slots = torch.arange(c.text_tokens, device=prompt.device)
    length = b['next.subgoal_length']
    if c.subgoal_embedding_tokens:
        rows = b['next.subgoal_embedding_length']
        length = torch.where(rows > 0, rows, length)
    in_prompt = slots[: c.prompt_tokens] < b['next.prompt_length']
    in_subgoal = slots[: c.subgoal_tokens] < length
    if not c.modulated:
        return torch.cat([prompt, subgoal]), torch.cat([in_prompt, in_subgoal])
    planned, room = length > 0, c.text_tokens - c.state_tokens

    def task(of_subgoal: Tensor, of_prompt: Tensor) -> Tensor:
        a, z = (F.pad(t, (0, room - len(t))) for t in (of_subgoal, of_prompt))
        return torch.where(planned, a, z)

    said, state = b['input.state_text'].split([layout.STATE_TEXT_HEAD, c.state_tokens])
    text = torch.cat([task(subgoal, prompt), state.to(prompt.dtype)])
    return text, torch.cat([task(in_subgoal, in_prompt), slots[: c.state_tokens] < said])


def given_rows(c: Pi0Config, b: Ports) -> Given | None:
    """Return the latched embedding of the subgoal in its places among the language tokens.

    It takes the places of the subgoal's tokens from the first on; None where none is bound.
    """
    if not c.subgoal_embedding_tokens:
        return None
    rows = b['next.subgoal_embedding']
    here = torch.arange(len(rows), device=rows.device) < b['next.subgoal_embedding_length']
    first = 0 if c.modulated else c.prompt_tokens
    ends = (first, c.text_tokens - first - len(rows))
    return Given(F.pad(rows, (0, 0, *ends)), F.pad(here, ends))


def denoise_body(c: Pi0Config, forward: ModuleType, b: Ports, key: ShapeKey) -> None:
    """Turn noise into actions, join them to the previous chunk, commit the state, copy out.

    Candidates all start from row 0's state and differ by branch number; the one that is kept goes
    on in row 0, whose seed and branch stay, so row 0's noise is that of a single run.
    """
    rows, best = int(key[1]), key[2:] == (BEST,)  # type: ignore[call-overload]
    control = b['input.control']
    held = {name: _rows_of(b[name], rows, best) for name in layout.state_names(c)}
    seed = torch.where(control[layout.SEED_FLAG] > 0, control[layout.SEED], held['seed'])
    branch = held['branch']
    if best:
        branch = branch + torch.arange(rows, device=branch.device)
    noise = torch.empty((rows, c.horizon, c.action_width), device=seed.device)
    normal_torch(seed, branch, held['tick'], noise)
    noise = torch.where(control[layout.NOISE_FLAG] > 0, b['input.noise'][:rows], noise)

    joints = b['input.state']
    own = F.pad(joints, (0, max(0, c.action_dim - c.state_dim)))[: c.action_dim]
    state = (joints - b['table.state_mean']) / b['table.state_std']
    state = F.pad(state, (0, c.state_width - c.state_dim))
    guide = rtc_guide(c, b, held, own) if c.chunk_mode == 'rtc' else None
    written: dict[str, Tensor] = {}
    prefix = (b['prefix_kv'], b['prefix_mask'])
    if c.guidance:
        asked, value = b['input.guidance'].unbind()
        written['guidance'] = torch.where(asked > 0, value, held['guidance'])
        guide = task_guide(written['guidance'], guide)
        free = (b['free_kv'], b['free_mask'])
        raw = forward.denoise(noise.repeat(2, 1, 1), state, *prefix, b, c, guide, free)[:rows]
    else:
        raw = forward.denoise(noise, state, *prefix, b, c, guide)
    actions = raw[..., : c.action_dim] * b['table.action_std'] + b['table.action_mean']
    if c.relative:
        actions = actions + own * b['table.relative']
    written |= {'raw_chunk': raw, 'anchor': own.expand(rows, -1)}
    chunk = join(c, b, held, actions, written)
    written['previous_chunk'] = chunk
    written['queue_index'] = control[layout.DELAY_STEPS].expand(rows)
    written['seed'] = seed
    written['tick'] = held['tick'] + 1
    for name in layout.NEXT:
        if name in held:
            written[name] = b[f'next.{name}'].expand_as(held[name])

    kept = torch.zeros_like(control[0])
    if best:
        found = select(chunk / b['table.action_std'], c.selector)
        kept = found.selected
        b['host.scores'][:rows].copy_(found.scores, non_blocking=True)
        b['host.spread'].copy_(found.spread, non_blocking=True)
        written = {n: v.index_select(0, kept.view(1)) for n, v in written.items()}
    b['host.report'].copy_(
        torch.stack([held['tick'][0], b['next.subgoal_sequence'], kept]), non_blocking=True
    )
    b['host.actions'][:rows].copy_(chunk, non_blocking=True)
    for name in held:
        if name in written:
            b[name][: 1 if best else rows].copy_(written[name])


def _rows_of(state: Tensor, rows: int, best: bool) -> Tensor:
    """Return the state of each row, or for candidates row 0's, once for each."""
    return state[:1].expand(rows, *state.shape[1:]).contiguous() if best else state[:rows]


def overlap(c: Pi0Config, b: Ports, held: Ports) -> chunking.Overlap:
    """Return where the new chunk's steps lie in the previous one; nowhere in a first tick."""
    start = held['queue_index'] + b['input.control'][layout.STEPS_EXECUTED]
    return chunking.overlap(start, held['tick'] > 0, c.horizon)


def join(
    c: Pi0Config, b: Ports, held: Ports, new: Tensor, written: dict[str, Tensor]
) -> Tensor:
    """Join new [R, H, A] to the previous chunk by the mode of ``c``; state goes to ``written``.

    'rtc' repeats the steps that pass before the chunk comes into play as they are being played.
    """
    if c.chunk_mode == 'sync':
        return new
    where = overlap(c, b, held)
    if c.chunk_mode == 'ensemble':
        out, written['chunk_counts'] = chunking.ensemble(
            new, held['previous_chunk'], held['chunk_counts'], where, c.ensemble_decay
        )
        return out
    steps = c.blend_steps if c.chunk_mode == 'blend' else 0
    delay = b['input.control'][layout.DELAY_STEPS]
    return chunking.blend(new, held['previous_chunk'], where, delay, steps)


def rtc_guide(c: Pi0Config, b: Ports, held: Ports, joints: Tensor) -> Guide:
    """Return the guide of a tick: every step of the flow is led towards the left-over.

    Of a chunk's steps those of ``delay`` are always led: the chunk comes into play behind them.
    """
    where = overlap(c, b, held)
    previous = held['raw_chunk']
    if c.relative:
        previous = chunking.reanchored(
            previous, held['anchor'], joints, b['table.relative'], b['table.action_std']
        )
    left_over = where.take(previous)
    start = held['queue_index'] + b['input.control'][layout.STEPS_EXECUTED]
    delay = b['input.control'][layout.DELAY_STEPS].expand_as(start)
    end = torch.minimum(c.horizon - start, delay.clamp(min=c.rtc_steps)).clamp(min=0)
    prefix = chunking.prefix_weights(c.rtc_schedule, delay, end, c.horizon)
    usable = where.held & left_over.isfinite().all(-1)
    prefix = torch.where(usable, prefix, torch.zeros_like(prefix))[..., None]  # [R, H, 1]

    def guide(step: int, x: Tensor, v: Tensor) -> Tensor:
        weight = chunking.guidance_weight(step, c.flow_steps, c.rtc_max_guidance)
        return chunking.guided(v, x, 1.0 - step / c.flow_steps, weight, prefix, left_over)

    return guide


def task_guide(strength: Tensor, then: Guide | None) -> Guide:
    """Return the guide of classifier-free guidance, over rows [2 R]: with the task, then without.

    v = v_free + strength * (v_task - v_free), in exact arithmetic; lerp gives either end's very
    bits at 0 and 1. Source: arXiv 2207.12598, equation 6, with strength = 1 + w.

    :param strength: float32 [R]. :param then: corrects the velocity that comes of it.
    """

    def guide(step: int, x: Tensor, v: Tensor) -> Tensor:
        of_task, free = v.chunk(2)
        v = torch.lerp(free, of_task, strength[:, None, None])
        if then is not None:
            v = then(step, x.chunk(2)[0], v)
        return v.repeat(2, 1, 1)

    return guide


def _latch(b: Ports, flag: Tensor, name: str, given: Tensor) -> None:
    """Write the given value into ``next.name`` if flagged, else row 0's latched one."""
    held = b[name][0]
    b[f'next.{name}'].copy_(torch.where(flag > 0, given.to(held.dtype), held))
