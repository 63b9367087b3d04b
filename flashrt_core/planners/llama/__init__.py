"""Llama: plain attention, one kind of state; SmolLM2 from a wheel gives real text at once."""

from __future__ import annotations

from types import ModuleType

import torch

from flashrt_core.planners.bind import Family
from flashrt_core.planners.llama import model
from flashrt_core.planners.llama.config import LlamaConfig
from flashrt_core.planners.llama.config import load_config
from flashrt_core.planners.llama.config import NAMED
from flashrt_core.planners.llama.weights import load_constants

__all__ = ['LLAMA', 'LlamaConfig', 'NAMED', 'load_config']


def _forward_of(c: LlamaConfig, device: torch.device) -> ModuleType:
    return model


LLAMA = Family('llama', load_config, _forward_of, load_constants)
