"""The ports and buffers of a Pi0 session, by name.

Inputs exist twice: ``host.*`` (pinned, written between ticks) and ``input.*`` (device, copied by
the first segment that reads them). ``input.subgoal_embedding`` is written between ticks itself,
and only by a tick that has one: it may come from the device. ``next.*`` carry latched text from
the prefix to the last segment, the only one that writes STATE. Constants are the weights and
tables under their own names.
"""

from __future__ import annotations

import torch

from flashrt_core.policies.pi0.config import Pi0Config
from flashrt_core.policies.pi0.modulation import MODULATION
from flashrt_core.policies.pi0.modulation import table_spec
from flashrt_core.policies.pi0.weights import stored_specs
from flashrt_core.policies.pi0.weights import tables
from flashrt_core.policies.protocol import Modality
from flashrt_core.policies.protocol import PortSpec
from flashrt_core.runtime import BufferSpec
from flashrt_core.runtime import Kind
from flashrt_core.runtime import Role

I32, I64, F32, U8 = torch.int32, torch.int64, torch.float32, torch.uint8

# Fields of the control vector, before the mask of the views.
STEPS_EXECUTED, DELAY_STEPS, SEED_FLAG, SEED, NOISE_FLAG = range(5)
VIEW_MASK = 5
# Text slots: prompt [flag, length, tokens...], subgoal [flag, length, sequence, tokens...],
# and in Pi0.5 state_text [length, tokens...].
PROMPT_HEAD, SUBGOAL_HEAD, STATE_TEXT_HEAD = 2, 3, 1

REPORT = 3  # of a tick: its number, the subgoal's sequence, which candidate was kept

SMALL_INPUTS = ('control', 'prompt', 'subgoal', 'state', 'noise')
INPUTS = ('images', *SMALL_INPUTS)
STATE = (  # of the chunk mode 'blend'; see state_names for the others
    'seed', 'branch', 'tick', 'prompt_tokens', 'prompt_length', 'subgoal_tokens', 'subgoal_length',
    'subgoal_sequence', 'previous_chunk', 'queue_index',
)  # fmt: skip
EMBEDDING = ('subgoal_embedding', 'subgoal_embedding_length')
MODE_STATE = ('raw_chunk', 'anchor', 'chunk_counts', 'guidance', *EMBEDDING)
NEXT = (
    'prompt_tokens', 'prompt_length', 'subgoal_tokens', 'subgoal_length', 'subgoal_sequence',
    *EMBEDDING,
)  # fmt: skip


def ports(c: Pi0Config) -> tuple[PortSpec, ...]:
    """Return the ports: images, state, text, subgoal, its embedding, guidance, noise, action."""
    side = c.vision.image_size
    unit = ' '.join(c.units) if c.units else 'physical'
    images = [
        PortSpec(view, Modality.IMAGE, 'uint8', (side, side, 3), 'RGB 0-255') for view in c.views
    ]
    return (
        *images,
        PortSpec('state', Modality.STATE, 'float32', (c.state_dim,), unit),
        PortSpec('prompt', Modality.TEXT, 'int64', (c.prompt_tokens,), 'token id'),
        PortSpec('subgoal', Modality.SUBGOAL, 'int64', (c.subgoal_tokens,), 'token id'),
        *(
            [
                PortSpec(
                    'subgoal_embedding', Modality.SUBGOAL_EMBEDDING, 'float32',
                    (c.subgoal_embedding_tokens, c.prefix.width), 'as the embedding table',
                )
            ]
            if c.subgoal_embedding_tokens
            else []
        ),
        *(
            [PortSpec('guidance', Modality.GUIDANCE, 'float32', (), '1 as trained')]
            if c.guidance
            else []
        ),
        PortSpec(
            'noise', Modality.NOISE, 'float32', (c.horizon, c.action_width), 'standard normal'
        ),
        PortSpec('action', Modality.ACTION, 'float32', (c.horizon, c.action_dim), unit),
    )


def inputs(c: Pi0Config) -> tuple[str, ...]:
    """Return the names of the inputs that a tick copies in, without ``host.`` or ``input.``."""
    text = ('state_text',) if c.modulated else ()
    rows = ('subgoal_embedding_length',) if c.subgoal_embedding_tokens else ()
    return (*INPUTS, *text, *rows, *(('guidance',) if c.guidance else ()))


def input_shapes(c: Pi0Config) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return dtype and shape of every input but noise, which alone has the row axis."""
    side = c.vision.image_size
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        'images': (U8, (len(c.views), side, side, 3)),
        'control': (I64, (VIEW_MASK + len(c.views),)),
        'prompt': (I64, (PROMPT_HEAD + c.prompt_tokens,)),
        'subgoal': (I64, (SUBGOAL_HEAD + c.subgoal_tokens,)),
        'state': (F32, (c.state_dim,)),
    }
    if c.modulated:
        shapes['state_text'] = (I64, (STATE_TEXT_HEAD + c.state_tokens,))
    if c.subgoal_embedding_tokens:
        shapes['subgoal_embedding'] = (F32, (c.subgoal_embedding_tokens, c.prefix.width))
        shapes['subgoal_embedding_length'] = (I64, (1,))
    if c.guidance:
        shapes['guidance'] = (F32, (2,))  # flag, value
    return shapes


def state_names(c: Pi0Config) -> tuple[str, ...]:
    """Return the names of the boundary's buffers in the order a capsule lists them.

    A chunk mode keeps what it reads and no more: 'sync' nothing; 'ensemble' in ``previous_chunk``
    the mean and in ``chunk_counts`` of how many; 'rtc' beside the chunk as played, in physical
    units, the one the model gave (``raw_chunk``) and the joints it is relative to (``anchor``).
    """
    names = [*STATE]
    if c.chunk_mode == 'sync':
        names = [n for n in STATE if n not in ('previous_chunk', 'queue_index')]
    elif c.chunk_mode == 'ensemble':
        names.append('chunk_counts')
    elif c.chunk_mode == 'rtc':
        names += ['raw_chunk', 'anchor'] if c.relative else ['raw_chunk']
    if c.subgoal_embedding_tokens:
        names += EMBEDDING
    if c.guidance:
        names.append('guidance')
    return tuple(names)


def state_specs(c: Pi0Config) -> list[BufferSpec]:
    """Return the boundary: all that the next tick depends on, in the order a capsule lists it."""
    P, S, H, A = c.prompt_tokens, c.subgoal_tokens, c.horizon, c.action_dim
    fields: dict[str, tuple[Kind, torch.dtype, tuple[int, ...]]] = {
        'seed': (Kind.RNG, I64, ()),
        'branch': (Kind.RNG, I64, ()),
        'tick': (Kind.META, I64, ()),
        'prompt_tokens': (Kind.META, I32, (P,)),
        'prompt_length': (Kind.META, I64, ()),
        'subgoal_tokens': (Kind.SUBGOAL, I32, (S,)),
        'subgoal_length': (Kind.SUBGOAL, I64, ()),
        'subgoal_sequence': (Kind.SUBGOAL, I64, ()),
        'previous_chunk': (Kind.QUEUE, F32, (H, A)),
        'queue_index': (Kind.QUEUE, I64, ()),
        'raw_chunk': (Kind.QUEUE, F32, (H, c.action_width)),
        'anchor': (Kind.QUEUE, F32, (A,)),
        'chunk_counts': (Kind.QUEUE, I64, (H,)),
        'guidance': (Kind.META, F32, ()),
        'subgoal_embedding': (Kind.SUBGOAL, F32, (c.subgoal_embedding_tokens, c.prefix.width)),
        'subgoal_embedding_length': (Kind.SUBGOAL, I64, ()),
    }
    return [
        BufferSpec(name, Role.STATE, fields[name][1], fields[name][2], kind=fields[name][0])
        for name in state_names(c)
    ]


def buffer_specs(c: Pi0Config) -> list[BufferSpec]:
    """Return every buffer of a session: state, inputs, outputs, scratch and constants."""
    specs = state_specs(c)
    next_specs = [s for s in specs if s.name in NEXT]
    noise = (c.horizon, c.action_width)
    for where, host in (('host', True), ('input', False)):
        specs += [
            BufferSpec(f'{where}.{name}', Role.INPUT, dtype, shape, host=host, rows=False)
            for name, (dtype, shape) in input_shapes(c).items()
        ]
        specs.append(BufferSpec(f'{where}.noise', Role.INPUT, F32, noise, host=host))
    d = c.prefix
    kv = (d.layers, c.prefix_tokens, 2, d.kv_heads, d.head_dim)
    scratch: list[tuple[str, torch.dtype, tuple[int, ...]]] = [
        ('image_tokens', c.torch_dtype, (c.image_tokens, d.width)),
        ('prefix_kv', c.torch_dtype, kv),
        ('prefix_mask', torch.bool, (c.prefix_tokens,)),
        *((f'next.{s.name}', s.dtype, s.shape) for s in next_specs),
    ]
    if c.guidance:  # the prefix without the task
        scratch += [('free_kv', c.torch_dtype, kv), ('free_mask', torch.bool, kv[1:2])]
    specs += [BufferSpec(n, Role.SCRATCH, dtype, shape, rows=False) for n, dtype, shape in scratch]
    specs += [
        BufferSpec('host.actions', Role.OUTPUT, F32, (c.horizon, c.action_dim), host=True),
        BufferSpec('host.report', Role.OUTPUT, I64, (REPORT,), host=True, rows=False),
        BufferSpec('host.scores', Role.OUTPUT, F32, (), host=True),
        BufferSpec('host.spread', Role.OUTPUT, F32, (), host=True, rows=False),
    ]
    constants = {name: (s.dtype, s.shape) for name, s in stored_specs(c).items()}
    constants |= {name: (t.dtype, tuple(t.shape)) for name, t in tables(c).items()}
    if c.modulated:
        table = table_spec(c)
        constants[MODULATION] = (table.dtype, table.shape)
    specs += [
        BufferSpec(name, Role.CONSTANT, dtype, shape, rows=False)
        for name, (dtype, shape) in constants.items()
    ]
    return specs
