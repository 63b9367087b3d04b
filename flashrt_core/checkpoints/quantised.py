"""Checkpoints that are stored quantised, read as the values they stand for, or NVFP4 as it is.

A tensor's format follows from the tensors beside it, so files of mixed formats are read, too:

- FP8 by blocks of 128 x 128: ``weight`` E4M3 and ``weight_scale_inv`` (Qwen's own);
- FP8 by tensor or by channel: ``weight`` E4M3 and ``weight_scale``;
- NVFP4 of ModelOpt: ``weight`` two E2M1 a byte, ``weight_scale`` E4M3 for 16 values,
  ``weight_scale_2`` for all;
- NVFP4 of compressed-tensors: ``weight_packed``, ``weight_scale``, ``weight_global_scale``, which
  is the reciprocal;
- int4 of compressed-tensors, symmetric: ``weight_packed`` eight a word, ``weight_scale``,
  ``weight_shape``.

Scales of activations and of KV caches are passed over: ours come with the data.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import dataclass
import re

import torch
from torch import Tensor

from flashrt_core.checkpoints.reader import SafetensorsReader
from flashrt_core.errors import ConfigError
from flashrt_core.nn.fp8 import E4M3
from flashrt_core.nn.nvfp4 import from_pairs
from flashrt_core.nn.nvfp4 import GROUP
from flashrt_core.nn.nvfp4 import Nvfp4Weight

NAN = 0x7F  # the first byte of E4M3 that is no number from 0 on
BLOCK = 128  # rows and columns that share a scale of FP8
UNUSED = re.compile(r'\.(input_scale|input_global_scale|k_scale|v_scale)$')
FOREIGN = re.compile(r'\.(qweight|qzeros|g_idx|weight_zero_point)$')


@dataclass(frozen=True)
class Packed:
    """One quantised weight: what stores its rows, what else, and how rows become values.

    ``widen(data, first row, *others)`` returns float32 rows, or rows in NVFP4.
    """

    data: str
    others: tuple[str, ...]
    dtype: torch.dtype
    widen: Callable[..., Tensor | Nvfp4Weight]


class QuantisedReader:
    """A reader's tensors by name and shape as if none were quantised; any thread.

    :raises ConfigError: a format that is not read, or scales of a shape that do not fit.
    """

    def __init__(self, reader: SafetensorsReader) -> None:
        self.path = reader.path
        self._reader = reader
        self._packed: dict[str, Packed] = {}
        stored, hidden = reader.shapes, set()
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name in stored:
            if FOREIGN.search(name):
                raise ConfigError(
                    f'weights {str(reader.path)!r:.200} are AWQ, GPTQ or asymmetric ({name!r}); '
                    'give FP8, NVFP4 or symmetric int4 of ModelOpt or compressed-tensors')
            if UNUSED.search(name):
                hidden.add(name)
            at = name.removesuffix('_packed')
            if not at.endswith('.weight'):
                continue
            found = _format(name, at, stored)
            if found is not None:
                self._packed[at] = found
                hidden |= {found.data, *found.others} - {at}
                self.shapes[at] = _shape(found, stored)
        self.shapes |= {n: shape for n, shape in stored.items()
                        if n not in hidden and n not in self.shapes}

    def pieces(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """Give (first row, rows) of one tensor in order; quantised ones as float32.

        :raises ConfigError: see ``SafetensorsReader.pieces``; data of another dtype, scales of
            NVFP4 that are none.
        """
        for row, rows in self.coded_pieces(name):
            yield row, rows if isinstance(rows, Tensor) else rows.values()

    def coded_pieces(self, name: str) -> Iterator[tuple[int, Tensor | Nvfp4Weight]]:
        """As ``pieces``, but NVFP4 as it is: its codes and its scales, bit by bit."""
        packed = self._packed.get(name)
        if packed is None:
            yield from self._reader.pieces(name)
            return
        others = [self._reader.read(other) for other in packed.others]
        columns = self.shapes[name][1]
        for row, data in self._reader.pieces(packed.data):
            if data.dtype != packed.dtype:
                raise ConfigError(
                    f'weights {packed.data!r} are {data.dtype} beside scales that belong to '
                    f'{packed.dtype}; give a checkpoint of a known format')
            rows = packed.widen(data, row, *others)
            if isinstance(rows, Nvfp4Weight):
                _check(packed, rows)
                yield row, rows
            else:
                yield row, rows[:, :columns]


class CodedReader:
    """A QuantisedReader that gives NVFP4 as it is, see ``QuantisedReader.coded_pieces``."""

    def __init__(self, reader: QuantisedReader) -> None:
        self.pieces = reader.coded_pieces


def _format(name: str, at: str, stored: dict[str, tuple[int, ...]]) -> Packed | None:
    """Return how the weight called ``at`` is stored in tensor ``name``, None if plainly."""
    scale, block = f'{at}_scale', f'{at}_scale_inv'
    if name != at:
        whole = f'{at}_global_scale'
        if whole in stored:
            return Packed(name, (scale, whole), torch.uint8,
                          lambda data, row, s, g: _nvfp4(data, row, s, 1.0 / g.float()))
        return Packed(name, (scale, f'{at}_shape'), torch.int32, _int4)
    if block in stored:
        return Packed(name, (block,), E4M3, _fp8_blocks)
    if f'{at}_scale_2' in stored:
        return Packed(name, (scale, f'{at}_scale_2'), torch.uint8, _nvfp4)
    if scale in stored:
        return Packed(name, (scale,), E4M3, _fp8)
    return None


def _shape(packed: Packed, stored: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape of the values.

    :raises ConfigError: scales are missing or do not fit it.
    """
    for name in packed.others:
        if name not in stored:
            raise ConfigError(f'weights {packed.data!r} are quantised and {name!r} is missing')
    shape = stored[packed.data]
    if len(shape) != 2:
        raise ConfigError(
            f'weight {packed.data!r} has shape {list(shape)} beside scales, which go with a '
            'matrix; give a checkpoint of a known format')
    N, width = shape
    K = width * {torch.uint8: 2, torch.int32: 8}.get(packed.dtype, 1)
    scale = stored[packed.others[0]]
    if packed.widen is _fp8_blocks:
        fits = scale == (-(-N // BLOCK), -(-K // BLOCK))
    elif packed.widen is _fp8:
        fits = scale in ((), (1,), (N,), (N, 1))
    elif packed.widen is _int4:
        fits = len(scale) == 2 and scale[0] == N and scale[1] > 0 and K % scale[1] == 0
    else:
        fits = K % GROUP == 0 and scale == (N, K // GROUP)
    if not fits:
        raise ConfigError(
            f'scales {packed.others[0]!r} have shape {list(scale)}, which does not fit weights '
            f'of {N} x {K}; give a checkpoint of a known format')
    for name in () if packed.widen is _int4 else packed.others[1:]:
        if stored[name] not in ((), (1,)):
            raise ConfigError(
                f'scales {name!r} have shape {list(stored[name])}, of which one value goes with '
                'the whole weight; give a checkpoint of a known format')
    return N, K


def _fp8_blocks(data: Tensor, row: int, scale: Tensor) -> Tensor:
    rows = (row + torch.arange(len(data))) // BLOCK
    each = scale.float().index_select(0, rows).repeat_interleave(BLOCK, 1)
    return data.float() * each[:, : data.shape[1]]


def _fp8(data: Tensor, row: int, scale: Tensor) -> Tensor:
    scale = scale.float().flatten()
    if len(scale) > 1:
        scale = scale[row : row + len(data)]
    return data.float() * scale[:, None]


def _nvfp4(data: Tensor, row: int, scale: Tensor, whole: Tensor) -> Nvfp4Weight:
    return from_pairs(data, scale[row : row + len(data)], whole)


def _check(packed: Packed, rows: Nvfp4Weight) -> None:
    """Raise ConfigError for scales that are not E4M3 from 0 on, or one of all not finite."""
    if rows.scale.dtype != E4M3 or bool((rows.scale.view(torch.uint8) >= NAN).any()):
        raise ConfigError(
            f'scales {packed.others[0]!r} are no NVFP4: {rows.scale.dtype}, or NaN or below 0 in '
            'it; give a checkpoint of a known format')
    if not bool(rows.whole.isfinite().all()):
        raise ConfigError(
            f'scale {packed.others[1]!r} gives {float(rows.whole[0])}; the checkpoint is damaged: '
            'give another')


def _int4(data: Tensor, row: int, scale: Tensor, shape: Tensor) -> Tensor:
    whole = torch.stack([(data >> 4 * i) & 15 for i in range(8)], 2).flatten(1) - 8
    each = scale[row : row + len(data)].float()
    return whole * each.repeat_interleave(whole.shape[1] // each.shape[1], 1)
