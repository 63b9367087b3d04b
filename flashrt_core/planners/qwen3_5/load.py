"""Fill the constants of a Qwen3.5 session: from a checkpoint or at random, piece by piece.

A piece is quantised on the device that keeps it: a weight is never there in two precisions. Files
that are quantised themselves are read as the values they stand for; NVFP4 that is kept as NVFP4 is
not rounded again.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from functools import partial

from torch import Tensor

from flashrt_core.checkpoints import check_keys
from flashrt_core.checkpoints import CodedReader
from flashrt_core.checkpoints import QuantisedReader
from flashrt_core.checkpoints import read_rows
from flashrt_core.checkpoints import SafetensorsReader
from flashrt_core.checkpoints.qwen3_5 import qwen3_5_canonical
from flashrt_core.checkpoints.qwen3_5 import qwen3_5_ignored
from flashrt_core.checkpoints.qwen3_5 import qwen3_5_packed
from flashrt_core.checkpoints.qwen3_5 import qwen3_5_targets
from flashrt_core.checkpoints.workers import in_parallel
from flashrt_core.planners.qwen3_5.config import Qwen35Config
from flashrt_core.planners.qwen3_5.precision import keeps_nvfp4
from flashrt_core.planners.qwen3_5.precision import place
from flashrt_core.planners.qwen3_5.weights import random_tensor
from flashrt_core.planners.qwen3_5.weights import ROPE
from flashrt_core.planners.qwen3_5.weights import rope_table
from flashrt_core.planners.qwen3_5.weights import tensor_specs
from flashrt_core.policies.pi0.weights import WeightSpec
from flashrt_core.runtime import BufferSet

PIECE_BYTES = 256 << 20
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
    b, specs = {buffer.name: buffer.tensor for buffer in buffers}, tensor_specs(c)
    if not c.weights:
        def make(name: str) -> None:
            for at, rows in _pieces(draw(c, name, specs[name])):
                place(c, b, name, at, rows)

        in_parallel(list(specs), make, lambda done: tell(done / len(specs)))
        return
    shared = buffers.backend.memory().integrated
    with SafetensorsReader(c.weights, drop_cache=shared) as files:
        reader = QuantisedReader(files)
        packed = qwen3_5_packed(reader.shapes)
        targets = {target.name: target for target in qwen3_5_targets(c, packed)}
        names = check_keys(
            targets.values(), reader.shapes, qwen3_5_canonical, partial(qwen3_5_ignored, c),
            str(reader.path),
        )  # fmt: skip

        def read(name: str) -> None:
            given = CodedReader(reader) if keeps_nvfp4(c, name) else reader
            for at, rows in read_rows(targets[name], names, given, specs[name].dtype):
                place(c, b, name, at, rows)

        in_parallel(list(targets), read, lambda done: tell(done / len(targets)))


def _pieces(tensor: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Give (where, rows) of a tensor, so many rows that their float32 is PIECE_BYTES."""
    step = max(1, PIECE_BYTES // (4 * max(1, tensor[0].numel())))
    for row in range(0, len(tensor), step):
        yield slice(row, row + step), tensor[row : row + step]
