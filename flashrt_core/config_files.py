"""Settings from YAML files and mappings, checked against the frozen dataclass that they fill.

Beside them what all readers of a user's files share.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Mapping
from dataclasses import fields
from dataclasses import is_dataclass
from dataclasses import replace
import json
import os
from pathlib import Path
import re
import sys
from typing import Any
from typing import get_type_hints
from typing import TypeVar

from flashrt_core.errors import ConfigError

T = TypeVar('T')

LFS_POINTER = b'version https://git-lfs.github.com/'  # how such a file begins
LIMIT_BYTES = 16 << 20  # of a JSON file
SUFFIXES = ('.safetensors', '.json', '.model')  # of files that a config names


def read_yaml(
    path: Path, what: str, named: Iterable[str] = (), beside: Iterable[str] = ()
) -> dict[str, Any]:
    """Return the mapping that a YAML file holds.

    :param what: names the file in messages. :param named: names that could stand in its place.
    :param beside: keys whose values may be files that lie beside this one, or below ``~``.
    :raises ConfigError: no such file, unreadable, no YAML, or no mapping.
    """
    import yaml  # only this reader needs it

    try:
        if not path.is_file():
            inside = sorted(p.name for p in path.glob('*.y*ml')) if path.is_dir() else []
            raise ConfigError(
                f'{what} {str(path)!r:.200} is neither a file nor one of {sorted(named)}'
                + (f'; that folder holds {", ".join(inside)}' if inside else '')
                + shipped_files(what)
            )
        record = yaml.safe_load(path.read_text(encoding='utf-8'))
    except OSError as error:
        raise ConfigError(
            f'{what} {str(path)!r:.200} cannot be read: {error.strerror}'
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        reason = ' '.join(str(error).split())
        raise ConfigError(f'{path} is not valid YAML: {reason:.400}') from error
    if not isinstance(record, dict):
        raise ConfigError(
            f'{path} holds {type(record).__name__}; give a mapping of names to values'
        )
    for key in beside:
        value = record.get(key)
        if value and isinstance(value, str):
            value = os.path.expanduser(value)
            record[key] = str(path.parent / value) if _lies_beside(value, path.parent) else value
    return record


def shipped_files(what: str) -> str:
    """Return in words, to end a refusal with, which configs lie below config/.

    :param what: its first word is the key that such a file has at its top level.
    """
    key = re.compile(rf'^{what.split()[0]}: ', re.MULTILINE)
    found = sorted({
        str(path.relative_to(folder)) for folder in config_folders()
        for path in folder.glob('**/*.yaml')
        if key.search(path.read_text(encoding='utf-8', errors='replace'))
    })
    return f'; shipped below config/ are {", ".join(found)}' if found else ''


def config_folders() -> list[Path]:
    """Return where config/ may lie: in the source tree and as installed."""
    folders = [Path(__file__).resolve().parent.parent / 'config']
    for prefix in [*os.environ.get('AMENT_PREFIX_PATH', '').split(os.pathsep), sys.prefix]:
        if prefix:
            folders.append(Path(prefix) / 'share' / 'flashrt_ros' / 'config')
    return folders


def read_json(path: Path) -> dict[str, Any]:
    """Return the mapping in a small JSON file; raises ConfigError."""
    data = b''
    try:
        if path.stat().st_size > LIMIT_BYTES:
            raise ConfigError(f'{path} is larger than {LIMIT_BYTES} bytes; copy it again')
        data = path.read_bytes()
        record = json.loads(data)
    except OSError as error:
        raise ConfigError(f'{path} cannot be read: {error.strerror}; check the path') from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f'{path} is not valid JSON: {lfs_remedy(data) or f"{error}; copy it again"}'
        ) from error
    if not isinstance(record, dict):
        raise ConfigError(f'{path} holds a {type(record).__name__}; copy it again')
    return record


def lfs_remedy(data: bytes) -> str:
    """Return what to do about a file that begins so and is a Git LFS pointer, else nothing."""
    if not data.startswith(LFS_POINTER):
        return ''
    return "it is a Git LFS pointer; run 'git lfs pull' where it was cloned, or download the file"


def _lies_beside(value: str, folder: Path) -> bool:
    """Whether a file is there; or should be, as the name of a file that is nowhere."""
    if os.path.exists(folder / value):
        return True
    return Path(value).suffix in SUFFIXES and not os.path.exists(value)


def override(base: T, record: Mapping[str, Any], where: str = '') -> T:
    """Return the dataclass ``base`` with the record's values, each checked against its type.

    :param where: stands before a field's name in messages.
    :raises ConfigError: an unknown name, a value of another type; or what ``base`` itself raises.
    """
    hints = get_type_hints(type(base))
    known = {f.name for f in fields(base)}  # type: ignore[arg-type]
    changes: dict[str, Any] = {}
    for name, value in record.items():
        path = f'{where}{name}'
        if name not in known:
            raise ConfigError(f'{path:.80} is no setting; known: {", ".join(sorted(known))}')
        old = getattr(base, name)
        if is_dataclass(old):
            if not isinstance(value, Mapping):
                raise ConfigError(f'{path} is {value!r}; give a mapping')
            changes[name] = override(old, value, f'{path}.')
        else:
            changes[name] = _typed(path, value, str(hints[name]))
    return replace(base, **changes)  # type: ignore[type-var]


def _typed(path: str, value: Any, hint: str) -> Any:
    if hint.startswith('tuple['):
        if isinstance(value, str) or not hasattr(value, '__iter__'):
            raise ConfigError(f'{path} is {value!r}; give a list')
        kind = f"<class '{hint[6:].split(',')[0]}'>"
        return tuple(_typed(f'{path}[{i}]', v, kind) for i, v in enumerate(value))
    if hint == "<class 'float'>" and type(value) in (int, float):
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(f'{path} is an integer that no float holds') from None
    if hint == f"<class '{type(value).__name__}'>":
        return value
    raise ConfigError(f'{path} is {value!r}; give a value of type {hint[8:-2]}')
