"""How the weights of the products are stored, and what they compute in plain torch.

One copy serves chunks and rows. FP8: a chunk's activations are scaled row by row and rounded to
E4M3 like the weights; few rows keep theirs. int4 and nvfp4: activations always stay as they are.
The layers' products and the head are quantised; norms, the convolution and the decays are not, nor
is an embedding that is only looked up. Of a tied one FP8 takes every row with a scale of its own.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from flashrt_core.errors import ConfigError
from flashrt_core.nn import fp8
from flashrt_core.nn import int4
from flashrt_core.nn import nvfp4
from flashrt_core.nn.fp8 import ChannelWeight
from flashrt_core.nn.int4 import Int4Weight
from flashrt_core.nn.nvfp4 import Nvfp4Weight
from flashrt_core.nn.rows import rows_linear as plain_rows_linear
from flashrt_core.planners.qwen3_5.config import Qwen35Config

Tensors = Mapping[str, Tensor]
Weight = Tensor | ChannelWeight | Int4Weight | Nvfp4Weight
Stored = dict[str, tuple[torch.dtype, tuple[int, ...]]]

PRODUCTS = ('.mix', '.qkv', '.out', '.gate_up', '.down', '.fc')


def check_device(c: Qwen35Config, device: torch.device) -> None:
    """Raise ConfigError where ``device`` does not know the number formats of ``c``."""
    for key, others in (('precision', 'nvfp4, int4 or bf16'), ('kv_precision', 'bf16')):
        if getattr(c, key) == 'fp8' and not fp8.multiplies(device):
            major, minor = torch.cuda.get_device_capability(device)
            raise ConfigError(
                f'{key} fp8 needs a GPU with E4M3 (compute capability 8.9 or later), {device} has '
                f'{major}.{minor}; give {key} {others}')


def is_quantised(c: Qwen35Config, name: str) -> bool:
    """Return whether a tensor of ``weights.tensor_specs`` is stored in fewer bits."""
    if c.precision == 'bf16':
        return False
    if name == 'embed':
        return c.tied and c.precision == 'fp8'
    return name == 'head' or name.endswith(PRODUCTS)


def stored(c: Qwen35Config, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Stored:
    """Return dtype and shape of every buffer that holds a tensor: itself, and its scales."""
    if not is_quantised(c, name):
        return {name: (dtype, shape)}
    N, K = shape
    if c.precision == 'fp8':
        return {name: (fp8.E4M3, shape), f'{name}.scale': (torch.float32, (N,))}
    found: Stored = {name: (torch.uint8, (N, K // 2))}
    if c.precision == 'int4':
        return found | {f'{name}.scale': (torch.float32, (K // int4.GROUP, N))}
    return found | {f'{name}.scale': (fp8.E4M3, (K // nvfp4.GROUP, N)),
                    f'{name}.whole': (torch.float32, (N,))}


def keeps_nvfp4(c: Qwen35Config, name: str) -> bool:
    """Return whether a tensor is stored as NVFP4, so that a checkpoint's own needs no rounding."""
    return c.precision == 'nvfp4' and is_quantised(c, name)


def quantise(c: Qwen35Config, name: str, rows: Tensor | Nvfp4Weight) -> dict[str, Tensor]:
    """Return what is stored of a tensor's ``rows`` [R, K], by buffer, on their device.

    :param rows: in NVFP4 if ``keeps_nvfp4``: they are stored as they are.
    :raises ConfigError: a value that is not finite.
    """
    if isinstance(rows, Nvfp4Weight) or keeps_nvfp4(c, name):
        w = nvfp4.quantise(rows) if isinstance(rows, Tensor) else rows
        return {name: w.data, f'{name}.scale': w.scale, f'{name}.whole': w.whole}
    if not is_quantised(c, name):
        return {name: rows}
    data, scale = fp8.quantise(rows) if c.precision == 'fp8' else int4.quantise(rows)
    return {name: data, f'{name}.scale': scale}


def place(c: Qwen35Config, b: Tensors, name: str, at: slice | Tensor,
          rows: Tensor | Nvfp4Weight) -> None:
    """Store ``rows`` [R, ...] of a tensor, see ``quantise``, as its rows ``at`` (or int64 [R])."""
    if is_quantised(c, name):
        rows = rows.to(b[name].device)
    for key, value in quantise(c, name, rows).items():
        into = b[key]
        if into.dtype == fp8.E4M3:
            into, value = into.view(torch.uint8), value.view(torch.uint8)
        if key.endswith('.scale') and c.precision != 'fp8':
            into, value = into.t(), value.t()
        if isinstance(at, slice):
            into[at].copy_(value)
        else:
            into.index_copy_(0, at.to(into.device), value.to(into.device))


def weight(b: Tensors, name: str) -> Weight:
    """Return the weight called ``name`` as the products take it."""
    data = b[name]
    if data.dtype == fp8.E4M3:
        return ChannelWeight(data, b[f'{name}.scale'])
    if data.dtype == torch.uint8:
        scale, whole = b[f'{name}.scale'], b.get(f'{name}.whole')
        return Int4Weight(data, scale) if whole is None else Nvfp4Weight(data, scale, whole)
    return data


def rows_of(w: Weight, at: slice) -> Weight:
    """Return the output channels ``at`` of a weight, views of it."""
    return w[at] if isinstance(w, Tensor) else w.rows(at)


def embed(c: Qwen35Config, b: Tensors, tokens: Tensor) -> Tensor:
    """Return the embeddings [T, width] of tokens [T]; padding may hold anything."""
    tokens, w = tokens.clamp(0, c.vocab - 1), weight(b, 'embed')
    if isinstance(w, ChannelWeight):
        return w.look_up(tokens).to(c.torch_dtype)
    return F.embedding(tokens, b['embed'])


def linear(x: Tensor, w: Weight) -> Tensor:
    """Return x [T, K] @ w^T of a chunk as [T, N] in x's dtype: the reference."""
    if isinstance(w, Tensor):
        return F.linear(x, w)
    if isinstance(w, ChannelWeight):
        return fp8.multiply_reference(*fp8.quantise_rows(x), w).to(x.dtype)
    return F.linear(x.float(), w.values()).to(x.dtype)


def rows_linear(x: Tensor, w: Weight) -> Tensor:
    """Return x [M, K] @ w^T as [M, N] in x's dtype, each row as if alone: the reference."""
    if isinstance(w, Tensor):
        return plain_rows_linear(x, w)
    return plain_rows_linear(x.float(), w.values()).to(x.dtype)
