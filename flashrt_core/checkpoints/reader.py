"""A thin reader of safetensors files: one file, or a folder of shards."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import safe_open
from safetensors import SafetensorError
from torch import Tensor

from flashrt_core.errors import ConfigError


class SafetensorsReader:
    """Names, shapes and tensors of one checkpoint; files stay mapped until it is closed.

    :param path: a ``.safetensors`` file, or a folder whose ``.safetensors`` files are its shards.
    :raises ConfigError: nothing there, a file that is not safetensors, a name in two shards.

    Any thread; one reader must not be shared by threads at the same time.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._files: list[Any] = []
        self._where: dict[str, Any] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in _files(self.path):
            try:
                handle = safe_open(str(file), framework='pt', device='cpu')
            except (SafetensorError, OSError) as error:
                raise ConfigError(
                    f'weights {file} cannot be read as safetensors: {error}'
                ) from error
            self._files.append(handle)
            for name in handle.keys():
                if name in self._where:
                    raise ConfigError(
                        f'weights {self.path} hold {name!r} twice, again in {file.name}'
                    )
                self._where[name] = handle
                self.shapes[name] = tuple(handle.get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        """Return one tensor on the CPU in the file's dtype."""
        tensor: Tensor = self._where[name].get_tensor(name)
        return tensor

    def close(self) -> None:
        """Drop the mapped files."""
        self._files.clear()
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


def _files(path: Path) -> list[Path]:
    try:
        if path.is_dir():
            found = sorted(path.glob('*.safetensors'))
            if not found:
                raise ConfigError(f'weights folder {path} holds no .safetensors file')
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
