"""What the Pi0 tests share: a very small config, observations, a state where all matters."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from flashrt_core.nn import GemmaDims
from flashrt_core.nn import SiglipDims
from flashrt_core.policies import SubgoalWrite
from flashrt_core.policies import TickInput
from flashrt_core.policies.pi0 import Pi0Config
from flashrt_core.policies.pi0 import Pi0Policy
from flashrt_core.policies.pi0 import Pi0Session
from flashrt_core.policies.pi0.config import Statistics
from flashrt_core.runtime import Backend

SMALL = Pi0Config(
    views=('top', 'wrist'),
    vision=SiglipDims(image_size=28, patch_size=14, width=32, layers=2, heads=4, mlp=48),
    prefix=GemmaDims(width=48, layers=2, heads=4, kv_heads=2, head_dim=16, mlp=64),
    expert=GemmaDims(width=32, layers=2, heads=4, kv_heads=2, head_dim=16, mlp=48),
    vocab=40,
    prompt_tokens=6,
    subgoal_tokens=5,
    horizon=8,
    state_dim=4,
    action_dim=3,
    state_width=6,
    action_width=5,
    flow_steps=4,
    blend_steps=3,
    statistics=Statistics(
        state_mean=(0.1, -0.2, 0.3, 0.5),
        state_std=(1.0, 0.5, 2.0, 0.5),
        action_mean=(0.0, 0.1, -0.1),
        action_std=(1.0, 2.0, 0.5),
    ),
    rows=4,
    row_keys=(1, 2, 4),
    seed=11,
    cpu_threads=1,
)


@contextmanager
def bound(backend: Backend, config: Pi0Config = SMALL, **changes: Any) -> Iterator[Pi0Session]:
    """Give a session that is closed afterwards."""
    session = Pi0Policy().bind(backend, replace(config, **changes))
    try:
        yield session
    finally:
        session.close()


def observation(config: Pi0Config = SMALL, draw: int = 0, **changes: Any) -> TickInput:
    """Give a random but repeatable TickInput with every view."""
    random = np.random.default_rng(draw)
    side = config.vision.image_size
    images = {v: random.integers(0, 256, (side, side, 3), dtype=np.uint8) for v in config.views}
    state = random.standard_normal(config.state_dim).astype(np.float32)
    return replace(TickInput(images, state), **changes)


def lived_in(session: Pi0Session) -> None:
    """Tick a fresh session until every state buffer matters to the next tick.

    Afterwards prompt and subgoal are latched, the previous chunk is blended in from a queue index
    above zero, and seed and branch are not those of a fresh session.
    """
    session.tick(observation(session.config, 1, prompt=(3, 1, 4, 1, 5), seed=23, delay_steps=1,
                             subgoal=SubgoalWrite(7, (9, 2, 6))))
    session.set_branches((0,), (23,), (5,)).result()
    session.tick(observation(session.config, 2, steps_executed=1, delay_steps=2))


def state_of(session: Pi0Session, row: int = 0) -> dict[str, torch.Tensor]:
    """Copy one row of the state to the CPU, on the lane thread."""
    return session.lane.call(
        lambda: {b.name: b.row(row).cpu().clone() for b in session.buffers.state()}).result()


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two float32 arrays hold the same bits."""
    return a.shape == b.shape and bool(np.array_equal(a.view(np.uint32), b.view(np.uint32)))


def equal_states(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether two states hold the same values in every buffer."""
    return all(torch.equal(a[name], b[name]) for name in a)
