"""Planners: one LLM family a folder, all behind ``protocol.Planner``; the session is shared."""

from __future__ import annotations

from flashrt_core.errors import ConfigError
from flashrt_core.planners.options import GrammarSource
from flashrt_core.planners.options import Options
from flashrt_core.planners.protocol import Appended
from flashrt_core.planners.protocol import BranchStep
from flashrt_core.planners.protocol import Planner
from flashrt_core.planners.protocol import Session
from flashrt_core.planners.protocol import Settings
from flashrt_core.planners.protocol import Step
from flashrt_core.planners.protocol import Token

PLANNERS = ('llama', 'qwen3_5')

__all__ = [
    'Appended',
    'BranchStep',
    'GrammarSource',
    'Options',
    'PLANNERS',
    'Planner',
    'Session',
    'Settings',
    'Step',
    'Token',
    'make_planner',
]


def make_planner(name: str) -> Planner:
    """
    Return the planner family called ``name``; a family is imported when it is asked for.

    :raises ConfigError: an unknown name.
    """
    if name == 'llama':
        from flashrt_core.planners.llama import LLAMA

        return LLAMA
    if name == 'qwen3_5':
        from flashrt_core.planners.qwen3_5 import QWEN3_5

        return QWEN3_5
    raise ConfigError(f'planner {name!r} is unknown; choose from {list(PLANNERS)}')
