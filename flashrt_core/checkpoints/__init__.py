"""Checkpoints: a thin safetensors reader, one key map a family, and the statistics beside them."""

from flashrt_core.checkpoints.keymap import check_keys
from flashrt_core.checkpoints.keymap import read_into
from flashrt_core.checkpoints.keymap import read_rows
from flashrt_core.checkpoints.keymap import Source
from flashrt_core.checkpoints.keymap import Target
from flashrt_core.checkpoints.pi0 import pi0_canonical
from flashrt_core.checkpoints.pi0 import pi0_check_family
from flashrt_core.checkpoints.pi0 import pi0_ignored
from flashrt_core.checkpoints.pi0 import pi0_targets
from flashrt_core.checkpoints.pi0_settings import pi0_check_settings
from flashrt_core.checkpoints.pi0_statistics import pi0_statistics
from flashrt_core.checkpoints.quantised import CodedReader
from flashrt_core.checkpoints.quantised import QuantisedReader
from flashrt_core.checkpoints.reader import SafetensorsReader

__all__ = [
    'CodedReader',
    'QuantisedReader',
    'SafetensorsReader',
    'Source',
    'Target',
    'check_keys',
    'pi0_canonical',
    'pi0_check_family',
    'pi0_check_settings',
    'pi0_ignored',
    'pi0_statistics',
    'pi0_targets',
    'read_into',
    'read_rows',
]
