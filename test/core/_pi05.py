"""What the Pi0.5 tests share: the recipe of the golden arrays, and checkpoints made from it."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
import json
from pathlib import Path
import sys
from typing import Any

import numpy as np
from safetensors.torch import save_file
import torch

from flashrt_core.checkpoints import pi0_canonical
from flashrt_core.policies import TickInput
from flashrt_core.policies.pi0 import Pi0Policy
from flashrt_core.policies.pi0 import Pi0Session
from flashrt_core.runtime import Backend

sys.path.insert(0, str(Path(__file__).parents[1] / 'goldens'))

from recipe import Case
from recipe import CONFIG
from recipe import golden
from recipe import tensors

Tensors = dict[str, torch.Tensor]


def lerobot_tensors() -> Tensors:
    """Give a checkpoint under LeRobot's own names; what inference never reads is random."""
    given, made = tensors(CONFIG), {}
    generator = torch.Generator().manual_seed(3)
    for name, shape in json.loads(str(golden()['keys'])).items():
        key = pi0_canonical(name)
        made[name] = given[key] if key in given else torch.randn(shape, generator=generator)
    return made


def save(stored: Tensors, folder: Path, name: str = 'model.safetensors') -> Path:
    """Write a checkpoint."""
    save_file(stored, folder / name)
    return folder / name


@contextmanager
def bound05(backend: Backend, weights: Path | str, **changes: Any) -> Iterator[Pi0Session]:
    """Give a session that is closed afterwards."""
    made = Pi0Policy('pi05').bind(backend, replace(CONFIG, weights=str(weights), **changes))
    try:
        yield made
    finally:
        made.close()


def tick_input(session: Pi0Session, case: Case, **changes: Any) -> TickInput:
    """Give a golden case as the input of a tick."""
    images = case.images
    prompt = session.tokenizer.encode(case.task, session.config.prompt_tokens)
    given = TickInput(images, np.float32(case.state), prompt=prompt, noise=case.noise,
                      rows=case.rows)
    return replace(given, **changes)
