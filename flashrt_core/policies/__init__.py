"""Policies: one family a folder, all behind ``protocol.Policy``."""

from __future__ import annotations

from flashrt_core.errors import ConfigError
from flashrt_core.policies.embeddings import Embedding
from flashrt_core.policies.preprocess import letterbox
from flashrt_core.policies.protocol import Chunk
from flashrt_core.policies.protocol import Frame
from flashrt_core.policies.protocol import MemoryNeed
from flashrt_core.policies.protocol import Modality
from flashrt_core.policies.protocol import Policy
from flashrt_core.policies.protocol import PortSpec
from flashrt_core.policies.protocol import Session
from flashrt_core.policies.protocol import SubgoalWrite
from flashrt_core.policies.protocol import TickInput
from flashrt_core.policies.text import make_tokenizer
from flashrt_core.policies.text import Tokenizer

POLICIES = ('pi0', 'pi05')

__all__ = [
    'Chunk',
    'Embedding',
    'Frame',
    'MemoryNeed',
    'Modality',
    'POLICIES',
    'Policy',
    'PortSpec',
    'Session',
    'SubgoalWrite',
    'TickInput',
    'Tokenizer',
    'letterbox',
    'make_policy',
    'make_tokenizer',
]


def make_policy(name: str) -> Policy:
    """
    Return the policy family called ``name``.

    :raises ConfigError: an unknown name.
    """
    if name in POLICIES:
        from flashrt_core.policies.pi0 import (
            Pi0Policy,  # a family is imported when it is asked for
        )

        return Pi0Policy(name)
    raise ConfigError(f'policy {name!r} is unknown; choose from {list(POLICIES)}')
