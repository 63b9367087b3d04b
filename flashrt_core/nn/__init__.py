"""Layers over static buffers: plain torch functions, no modules, no state."""

from flashrt_core.nn.attention import attend
from flashrt_core.nn.attention import attend_shared_prefix
from flashrt_core.nn.gemma import expert_layer
from flashrt_core.nn.gemma import gemma_layer
from flashrt_core.nn.gemma import GemmaDims
from flashrt_core.nn.gemma import GemmaLayer
from flashrt_core.nn.gemma import prefix_layer
from flashrt_core.nn.gemma import project_kv
from flashrt_core.nn.modulated import modulated_expert_layer
from flashrt_core.nn.modulated import modulated_layer
from flashrt_core.nn.modulated import modulated_norm
from flashrt_core.nn.modulated import ModulatedLayer
from flashrt_core.nn.norms import layer_norm
from flashrt_core.nn.norms import rms_norm
from flashrt_core.nn.rope import rope_frequencies
from flashrt_core.nn.rope import rope_tables
from flashrt_core.nn.rope import rotate
from flashrt_core.nn.siglip import siglip_layer
from flashrt_core.nn.siglip import siglip_tower
from flashrt_core.nn.siglip import SiglipDims
from flashrt_core.nn.siglip import SiglipLayer
from flashrt_core.nn.time import time_table

__all__ = [
    'GemmaDims',
    'GemmaLayer',
    'ModulatedLayer',
    'SiglipDims',
    'SiglipLayer',
    'attend',
    'attend_shared_prefix',
    'expert_layer',
    'gemma_layer',
    'layer_norm',
    'modulated_expert_layer',
    'modulated_layer',
    'modulated_norm',
    'prefix_layer',
    'project_kv',
    'rms_norm',
    'rope_frequencies',
    'rope_tables',
    'rotate',
    'siglip_layer',
    'siglip_tower',
    'time_table',
]
