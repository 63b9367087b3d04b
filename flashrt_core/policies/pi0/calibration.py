"""The static scales of Pi0 and Pi0.5 in FP8: the plain forward pass, its products watched."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from flashrt_core.checkpoints import pi0_check_settings
from flashrt_core.checkpoints import pi0_statistics
from flashrt_core.nn.fp8 import Observing
from flashrt_core.policies.calibration import check_frames
from flashrt_core.policies.calibration import Frame
from flashrt_core.policies.calibration import Scales
from flashrt_core.policies.pi0 import model
from flashrt_core.policies.pi0 import pi05
from flashrt_core.policies.pi0.bind import make_buffers
from flashrt_core.policies.pi0.bind import state_text_of
from flashrt_core.policies.pi0.config import load_config
from flashrt_core.policies.pi0.graphs import prefix_body
from flashrt_core.policies.pi0.graphs import vision_body
from flashrt_core.policies.pi0.inputs import check_input
from flashrt_core.policies.pi0.inputs import write_input
from flashrt_core.policies.pi0.load import check_checkpoint
from flashrt_core.policies.pi0.load import load_constants
from flashrt_core.policies.pi0.load import plain_digest
from flashrt_core.policies.pi0.session import reset_state
from flashrt_core.policies.pi0.weights import products
from flashrt_core.policies.prompts import make_prompts
from flashrt_core.policies.protocol import TickInput
from flashrt_core.runtime import Backend


@torch.no_grad()
def calibrate(
    backend: Backend,
    config: Any,
    observations: Sequence[TickInput],
    done: Callable[[int], None] = lambda count: None,
) -> Scales:
    """Run the plain layers on each observation and return the scales that FP8 needs.

    :param config: as for ``Pi0Policy.bind``; the plain layers are run.
    :param observations: real ones, every view in each, see ``calibration.check_frames``.
    :param done: told how many have run.
    :raises ConfigError: frames that show nothing, or a config or weights that do not fit.
    :raises ObservationError: an image or a state that the policy would not take.
    """
    c = load_config(config)
    c = replace(c, precision='', rows=1, row_keys=(1,), best_of_keys=())
    views: dict[str, list[Frame]] = {view: [] for view in c.views}
    for observation in observations:
        check_input(observation, 1, c)
        for view, image in observation.images.items():
            if image is not None:
                views[view].append(image)
    check_frames(views)
    check_checkpoint(c)
    pi0_check_settings(c)
    c = pi0_statistics(c)
    prompts = make_prompts(c.tokenizer, c.family, c.vocab, bool(c.weights))
    state_text = state_text_of(c, prompts)
    buffers = make_buffers(c, backend, 'calibration')
    load_constants(c, buffers, lambda fraction: None)
    reset_state(buffers, c)
    plain = pi05 if c.modulated else model
    watched = Observing({b.name: b.tensor for b in buffers}, products(c))
    for count, observation in enumerate(observations, start=1):
        write_input(observation, 1, buffers, c, state_text)
        for body in (vision_body, prefix_body):
            body(c, plain, watched, (len(c.views), 1))
        backend.synchronize()
        done(count)
    return Scales(c.family, plain_digest(c, buffers, {}), len(observations), watched.largest())
