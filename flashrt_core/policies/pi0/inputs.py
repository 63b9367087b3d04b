"""From a TickInput to the pinned input buffers: first every check, then every write."""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Mapping
from collections.abc import Sequence

import numpy as np

from flashrt_core.errors import BadEncoding
from flashrt_core.errors import BadJoints
from flashrt_core.errors import BadSize
from flashrt_core.errors import ConfigError
from flashrt_core.errors import ObservationMissing
from flashrt_core.errors import ObservationNonFinite
from flashrt_core.policies.arrays import is_array
from flashrt_core.policies.arrays import is_sequence
from flashrt_core.policies.arrays import shown
from flashrt_core.policies.embeddings import Embedding
from flashrt_core.policies.pi0 import layout
from flashrt_core.policies.pi0.config import Pi0Config
from flashrt_core.policies.prompts import StateText
from flashrt_core.policies.protocol import GUIDANCE_LIMIT
from flashrt_core.policies.protocol import SubgoalWrite
from flashrt_core.policies.protocol import TickInput
from flashrt_core.runtime import BufferSet


def check_input(t: TickInput, rows: int, c: Pi0Config) -> None:
    """Verify that a tick can run on ``t`` with ``rows`` branches; any thread.

    :raises ObservationError: an image or the state is missing, misshapen or not finite.
    :raises ConfigError: an unknown view, text too long or out of vocabulary, counts out of range.
    """
    _check_images(t, c)
    _check_state(t.state, c)
    check_range('rows', rows, 1, c.rows)
    check_range('steps_executed', t.steps_executed, -c.horizon, 2**31 - 1)
    check_range('delay_steps', t.delay_steps, 0, c.horizon)
    if t.seed is not None:
        check_range('seed', t.seed, 0, 2**63 - 1)
    if t.prompt is not None:
        _check_tokens('prompt', t.prompt, c.prompt_tokens, c.vocab)
    if t.subgoal is not None:
        if not isinstance(t.subgoal, SubgoalWrite):
            raise ConfigError(f'subgoal is {t.subgoal!r:.80}; give a SubgoalWrite')
        check_range('subgoal sequence', t.subgoal.sequence, 0, 2**63 - 1)
        _check_tokens('subgoal', t.subgoal.tokens, c.subgoal_tokens, c.vocab)
        if t.subgoal.embedding is not None:
            _check_embedding(t.subgoal.embedding, c)
    if t.guidance is not None:
        _check_guidance(t.guidance, c)
    if t.noise is not None:
        shape = (rows, c.horizon, c.action_width)
        if not is_array(t.noise, np.float32) or t.noise.shape != shape:
            raise ConfigError(f'noise is {shown(t.noise)}; give float32 {list(shape)}')
        if not np.isfinite(t.noise).all():
            raise ConfigError('noise holds NaN or infinity; give finite values')


def write_input(
    t: TickInput,
    rows: int,
    buffers: BufferSet,
    c: Pi0Config,
    state_text: StateText | None = None,
    kept_views: Container[str] = (),
) -> None:
    """Write a checked input into the ``host.*`` buffers; lane thread, no plan running.

    Every field is written each time, so nothing of an earlier tick is left.

    :param state_text: of Pi0.5, turns the normalised state into token ids.
    :param kept_views: whose image stays as it is, because no segment will read it.
    """
    host = {name: buffers[f'host.{name}'].tensor.numpy() for name in layout.inputs(c)}
    control = host['control']
    control[layout.STEPS_EXECUTED] = t.steps_executed
    control[layout.DELAY_STEPS] = t.delay_steps
    control[layout.SEED_FLAG] = t.seed is not None
    control[layout.SEED] = t.seed or 0
    control[layout.NOISE_FLAG] = t.noise is not None
    for i, view in enumerate(c.views):
        image = t.images.get(view)
        control[layout.VIEW_MASK + i] = image is not None
        if view not in kept_views:
            host['images'][i] = 0 if image is None else image
    host['state'][:] = t.state
    host['noise'][:] = 0.0
    if t.noise is not None:
        host['noise'][:rows] = t.noise
    if c.modulated:
        assert state_text is not None
        _write_state(host['state_text'], state_text.tokens(t.state))
    _write_text(host['prompt'], layout.PROMPT_HEAD, t.prompt)
    _write_text(host['subgoal'], layout.SUBGOAL_HEAD, t.subgoal.tokens if t.subgoal else None)
    host['subgoal'][2] = t.subgoal.sequence if t.subgoal else 0
    if c.subgoal_embedding_tokens:
        embedding = t.subgoal.embedding if t.subgoal else None
        host['subgoal_embedding_length'][0] = len(embedding or ())
        if embedding is not None:
            _write_embedding(embedding, buffers)
    if c.guidance:
        host['guidance'][:] = (t.guidance is not None, t.guidance or 0.0)


def _write_embedding(embedding: Embedding, buffers: BufferSet) -> None:
    """Write the rows of an embedding, from where they lie, ahead of the replay in its stream."""
    slot = buffers['input.subgoal_embedding'].tensor[: len(embedding)]
    rows = embedding.rows
    if rows.device != slot.device:
        rows = buffers['host.subgoal_embedding'].tensor[: len(embedding)].copy_(rows)
    slot.copy_(rows, non_blocking=True)


def _write_state(slot: np.ndarray, tokens: Sequence[int]) -> None:
    slot[:] = 0
    slot[0] = len(tokens)
    slot[layout.STATE_TEXT_HEAD : layout.STATE_TEXT_HEAD + len(tokens)] = tokens


def _write_text(slot: np.ndarray, head: int, tokens: Sequence[int] | None) -> None:
    slot[:] = 0
    if tokens is not None:
        slot[0] = 1
        slot[1] = len(tokens)
        slot[head : head + len(tokens)] = tokens


def _check_images(t: TickInput, c: Pi0Config) -> None:
    if not isinstance(t.images, Mapping):
        raise ConfigError(f'images are {shown(t.images)}; give a mapping of views to arrays')
    unknown = sorted(set(t.images) - set(c.views), key=str)
    if unknown:
        raise ConfigError(f'views {unknown} are unknown; this policy has {list(c.views)}')
    side = c.vision.image_size
    given = {view: image for view, image in t.images.items() if image is not None}
    if not given:
        raise ObservationMissing(f'no view has an image; give at least one of {list(c.views)}')
    for view, image in given.items():
        if not is_array(image, np.uint8):
            raise BadEncoding(f'image {view!r} is {shown(image)}; give uint8 RGB')
        if image.shape != (side, side, 3):
            raise BadSize(
                f'image {view!r} is {list(image.shape)}; give [{side}, {side}, 3], '
                'see policies.preprocess.letterbox'
            )
    if not isinstance(t.frames, Mapping) or set(t.frames) - set(given):
        raise ConfigError(f'frames are {t.frames!r:.80}; give a mapping of views with an image')


def _check_state(state: np.ndarray, c: Pi0Config) -> None:
    if not is_array(state, np.float32) or state.shape != (c.state_dim,):
        raise BadJoints(f'state is {shown(state)}; give float32 [{c.state_dim}]')
    if not np.isfinite(state).all():
        raise ObservationNonFinite(f'state is {state.tolist()}; every value must be finite')


def check_range(name: str, value: int, low: int, high: int) -> None:
    """Raise ConfigError unless a value is an integer from low to high."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise ConfigError(f'{name} is {value!r}; give an integer')
    if not low <= value <= high:
        raise ConfigError(f'{name} is {value}; give {low} to {high}')


def _check_guidance(value: float, c: Pi0Config) -> None:
    if not c.guidance:
        raise ConfigError(
            f'guidance is {value!r:.40}; this policy was bound without it: set guidance: true in '
            'its config'
        )
    number = isinstance(value, int | float | np.integer | np.floating)
    number = number and not isinstance(value, bool)
    if not number or not 0.0 <= value <= GUIDANCE_LIMIT:
        raise ConfigError(f'guidance is {value!r:.40}; give a number from 0 to {GUIDANCE_LIMIT:g}')


def _check_embedding(embedding: Embedding, c: Pi0Config) -> None:
    limit, width = c.subgoal_embedding_tokens, c.prefix.width
    if not isinstance(embedding, Embedding):
        raise ConfigError(f'subgoal embedding is {shown(embedding)}; give an Embedding of it')
    if not limit:
        raise ConfigError(
            f'subgoal has an embedding of {len(embedding)} rows; this policy was bound without: '
            'set subgoal_embedding_tokens in its config'
        )
    if len(embedding) > limit:
        raise ConfigError(
            f'subgoal embedding has {len(embedding)} rows; this policy takes at most {limit}'
        )
    if embedding.rows.shape[1] != width:
        raise ConfigError(
            f'subgoal embedding is {list(embedding.rows.shape)}; this policy reads rows of {width}'
        )


def _check_tokens(name: str, tokens: Sequence[int], limit: int, vocab: int) -> None:
    if not is_sequence(tokens):
        raise ConfigError(f'{name} is {shown(tokens)}; give a sequence of token ids')
    if len(tokens) > limit:
        raise ConfigError(f'{name} has {len(tokens)} tokens; this policy takes at most {limit}')
    for token in tokens:
        check_range(f'{name} token', token, 0, vocab - 1)
