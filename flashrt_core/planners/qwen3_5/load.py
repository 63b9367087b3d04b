"""Fill the constants of a Qwen3.5 session: from a checkpoint, piece by piece, or at random."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from torch import Tensor

from flashrt_core.checkpoints import check_keys
from flashrt_core.checkpoints import read_into
from flashrt_core.checkpoints import SafetensorsReader
from flashrt_core.checkpoints.qwen3_5 import qwen3_5_canonical
from flashrt_core.checkpoints.qwen3_5 import qwen3_5_ignored
from flashrt_core.checkpoints.qwen3_5 import qwen3_5_packed
from flashrt_core.checkpoints.qwen3_5 import qwen3_5_targets
from flashrt_core.planners.qwen3_5.config import Qwen35Config
from flashrt_core.planners.qwen3_5.weights import random_tensor
from flashrt_core.planners.qwen3_5.weights import ROPE
from flashrt_core.planners.qwen3_5.weights import rope_table
from flashrt_core.planners.qwen3_5.weights import tensor_specs
from flashrt_core.policies.pi0.weights import WeightSpec
from flashrt_core.runtime import BufferSet

LOADERS = 4
Draw = Callable[[Qwen35Config, str, WeightSpec], Tensor]


def load_constants(c: Qwen35Config, buffers: BufferSet, tell: Callable[[float], None],
                   draw: Draw = random_tensor) -> None:
    """Fill every CONSTANT buffer of the family; configure, any thread.

    :param tell: is told the fraction done.
    :param draw: gives the random value of a tensor where the config names no weights; a bench
        draws on the device.
    :raises ConfigError: the checkpoint does not fit the config, naming what.
    """
    buffers[ROPE].tensor.copy_(rope_table(c))
    specs = tensor_specs(c)
    if not c.weights:
        _fill(buffers, list(specs), lambda n, into: into.copy_(draw(c, n, specs[n])),
              tell)  # fmt: skip
        return
    shared = buffers.backend.memory().integrated
    with SafetensorsReader(c.weights, drop_cache=shared) as reader:
        packed = qwen3_5_packed(reader.shapes)
        targets = {target.name: target for target in qwen3_5_targets(c, packed)}
        names = check_keys(
            targets.values(), reader.shapes, qwen3_5_canonical, partial(qwen3_5_ignored, c),
            str(reader.path),
        )  # fmt: skip
        _fill(buffers, list(targets), lambda n, into: read_into(targets[n], names, reader, into),
              tell)  # fmt: skip


def _fill(buffers: BufferSet, names: list[str], fill: Callable[[str, Tensor], object],
          tell: Callable[[float], None]) -> None:
    with ThreadPoolExecutor(LOADERS, thread_name_prefix='load') as pool:
        jobs = pool.map(lambda name: fill(name, buffers[name].tensor), names)
        for done, _ in enumerate(jobs, start=1):
            tell(done / len(names))
