"""Qwen3.5 and Qwen3.6: hybrid models of gated delta rule and gated attention."""

from __future__ import annotations

from types import ModuleType

import torch

from flashrt_core.planners.bind import Family
from flashrt_core.planners.qwen3_5 import fast
from flashrt_core.planners.qwen3_5 import model
from flashrt_core.planners.qwen3_5.config import load_config
from flashrt_core.planners.qwen3_5.config import NAMED
from flashrt_core.planners.qwen3_5.config import Qwen35Config
from flashrt_core.planners.qwen3_5.load import load_constants
from flashrt_core.planners.qwen3_5.precision import check_device

__all__ = ['NAMED', 'QWEN3_5', 'Qwen35Config', 'load_config']


def _forward_of(c: Qwen35Config, device: torch.device) -> ModuleType:
    """Return ``fast`` where its kernels serve these sizes on this device, else ``model``.

    The first call per device runs the kernels' checks: not inside a capture.

    :raises ConfigError: the device cannot multiply in this precision.
    """
    check_device(c, device)
    return fast if device.type == 'cuda' and fast.selected(c, device) else model


QWEN3_5 = Family('qwen3_5', load_config, _forward_of, load_constants)
