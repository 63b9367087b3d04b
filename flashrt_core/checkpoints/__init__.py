"""Checkpoints: a thin safetensors reader and one key map a family."""

from flashrt_core.checkpoints.keymap import assemble
from flashrt_core.checkpoints.keymap import check_keys
from flashrt_core.checkpoints.keymap import Source
from flashrt_core.checkpoints.keymap import Target
from flashrt_core.checkpoints.pi0 import pi0_canonical
from flashrt_core.checkpoints.pi0 import pi0_ignored
from flashrt_core.checkpoints.pi0 import pi0_targets
from flashrt_core.checkpoints.reader import SafetensorsReader

__all__ = [
    'SafetensorsReader',
    'Source',
    'Target',
    'assemble',
    'check_keys',
    'pi0_canonical',
    'pi0_ignored',
    'pi0_targets',
]
