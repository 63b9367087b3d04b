"""A thin reader of safetensors files: one file, or a folder of shards.

The library checks the files; the bytes are read here, piece by piece into memory of our own. A
mapped file would stay in the page cache for as long as it is mapped, and where CPU and GPU share
one memory that is a second copy of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
import json
import os
from pathlib import Path
import re
from types import TracebackType
from typing import Any

from safetensors import safe_open
from safetensors import SafetensorError
import torch
from torch import Tensor

from flashrt_core.config_files import LFS_POINTER
from flashrt_core.config_files import lfs_remedy
from flashrt_core.config_files import read_json
from flashrt_core.errors import ConfigError

PIECE_BYTES = 64 << 20
PROCESSOR = re.compile(r'^policy_(pre|post)processor')  # LeRobot's statistics
BELOW = ('*/', '*/*/')  # where a download's cache and LeRobot's training keep them
SHOWN = 4
DTYPES = {
    'F64': torch.float64,
    'F32': torch.float32,
    'F16': torch.float16,
    'BF16': torch.bfloat16,
    'F8_E4M3': torch.float8_e4m3fn,
    'F8_E5M2': torch.float8_e5m2,
    'I64': torch.int64,
    'I32': torch.int32,
    'I16': torch.int16,
    'I8': torch.int8,
    'U8': torch.uint8,
    'BOOL': torch.bool,
}


@dataclass(frozen=True)
class Stored:
    """Where one tensor lies: an open file, the offset of its first byte, its dtype."""

    file: int
    offset: int
    dtype: str


class SafetensorsReader:
    """Names, shapes and tensors of one checkpoint; its files stay open until it is closed.

    :param path: a ``.safetensors`` file, or a folder whose ``.safetensors`` files are its shards
        (LeRobot's processor files beside them are none).
    :param drop_cache: take what was read out of the page cache again.
    :raises ConfigError: nothing there, a file that is not safetensors, a name in two shards, or a
        shard that the folder's index names is missing.

    Any thread; threads may read different tensors at the same time.
    """

    def __init__(self, path: str | Path, drop_cache: bool = False) -> None:
        self.path = Path(path)
        self._drop = drop_cache
        self._files: list[int] = []
        self._where: dict[str, Stored] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        try:
            for file in _files(self.path):
                self._open(file)
            for index in sorted(self.path.glob('*.safetensors.index.json')):
                self._check_index(index)
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path) -> None:
        try:
            with safe_open(str(path), framework='pt', device='cpu') as checked:
                shapes = {n: tuple(checked.get_slice(n).get_shape()) for n in checked.keys()}
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._files.append(file)
            begin, entries = _header(file)
        except (SafetensorError, OSError, ValueError) as error:
            raise ConfigError(
                f'weights {path} cannot be read as safetensors: {_pointer(path) or error}'
            ) from error
        for name, shape in shapes.items():
            if name in self._where:
                raise ConfigError(
                    f'weights {self.path} hold {name!r} twice, again in {path.name}; keep one of '
                    'the files that have it'
                )
            offset, dtype = entries[name]['data_offsets'][0], entries[name]['dtype']
            self._where[name] = Stored(file, begin + offset, dtype)
            self.shapes[name] = shape

    def _check_index(self, path: Path) -> None:
        """Verify that every weight is there that an index of shards names."""
        named = read_json(path).get('weight_map')
        if not isinstance(named, dict) or not all(isinstance(f, str) for f in named.values()):
            raise ConfigError(f'{path} has no weight_map of names to files; copy it again')
        absent = [name for name in named if name not in self._where]
        if absent:
            files = sorted({named[name] for name in absent})
            raise ConfigError(
                f'weights {self.path} lack {len(absent)} tensors, first {absent[0]!r}, of '
                f'{files[:SHOWN]} by their index {path.name}; copy or download these files'
            )

    def pieces(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """Give (first row, rows) of one tensor, CPU tensors in the file's dtype, in order.

        :raises ConfigError: the file ends early or cannot be read, or its dtype is unknown.
        """
        stored, shape = self._where[name], self.shapes[name]
        dtype = DTYPES.get(stored.dtype)
        if dtype is None:
            raise ConfigError(
                f'weights {name!r} are {stored.dtype}; give a checkpoint in one of '
                f'{[str(dtype) for dtype in DTYPES.values()]}'
            )
        whole = torch.Size(shape[1:]).numel() * dtype.itemsize  # bytes of a row
        step = max(1, PIECE_BYTES // max(1, whole))
        for row in range(0, max(1, shape[0]) if shape else 1, step):
            rows = min(step, shape[0] - row) if shape else 1
            data = torch.empty(rows * whole, dtype=torch.uint8)
            self._read(stored.file, stored.offset + row * whole, data.numpy().data, name)
            yield row, data.view(dtype).view((rows, *shape[1:]) if shape else ())

    def read(self, name: str) -> Tensor:
        """Return one whole tensor on the CPU in the file's dtype."""
        parts = [piece for _, piece in self.pieces(name)]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _read(self, file: int, offset: int, into: memoryview, name: str) -> None:
        done = 0
        try:
            while done < len(into):
                count = os.preadv(file, [into[done:]], offset + done)
                if count == 0:
                    raise OSError('the file ends early')
                done += count
            if self._drop:
                os.posix_fadvise(file, offset, len(into), os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise ConfigError(
                f'weights {self.path} cannot be read at {name!r}: {error}; copy the checkpoint '
                'again'
            ) from error

    def close(self) -> None:
        """Close the files; reading afterwards is a mistake."""
        while self._files:
            file = self._files.pop()
            if self._drop:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)
        self._where.clear()

    def __enter__(self) -> SafetensorsReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _pointer(path: Path) -> str:
    """Return what is wrong with a file that is a Git LFS pointer, else nothing."""
    try:
        with path.open('rb') as file:
            return lfs_remedy(file.read(len(LFS_POINTER)))
    except OSError:
        return ''


def _header(file: int) -> tuple[int, dict[str, Any]]:
    """Return where the bytes begin and the entries by name, of a file the library has checked."""
    size = int.from_bytes(os.pread(file, 8, 0), 'little')
    return 8 + size, json.loads(os.pread(file, size, 8))


def _files(path: Path) -> list[Path]:
    try:
        if path.is_dir():
            found = sorted(
                file for file in path.glob('*.safetensors') if not PROCESSOR.search(file.name)
            )
            if not found:
                below = sorted({f.parent for g in BELOW for f in path.glob(f'{g}*.safetensors')})
                remedy = ' or '.join(map(str, below[:SHOWN])) or 'the folder that has them'
                raise ConfigError(
                    f'weights folder {path} holds no .safetensors file; give {remedy}'
                )
            return found
        if path.is_file():
            return [path]
    except OSError as error:
        raise ConfigError(
            f'weights {str(path)!r:.200} cannot be read: {error.strerror}; check the path and its '
            'permissions'
        ) from error
    raise ConfigError(
        f'weights {str(path)!r:.200} do not exist; give a .safetensors file or its folder'
    )
