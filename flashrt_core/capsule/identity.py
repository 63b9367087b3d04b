"""Who a state belongs to: two levels of identity, their digests and their differences.

*layout* says how bytes are to be read (config, weights, dtypes, buffer layout); a mismatch is
never restored. *numerics* says what computes on them (kernels, chunk plan, GPU, libraries); a
mismatch is restored only when asked for, and is then no longer bit-exact.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from functools import cached_property
import hashlib
from importlib import metadata
import json
import platform
import re
from types import MappingProxyType

import torch

from ..errors import ConfigError

MAX_FIELDS = 16384
MAX_TEXT = 4096


@dataclass(frozen=True, eq=False)
class Identity:
    """Two ordered maps of text fields; equal when both digests are.

    :raises ConfigError: a key or value that is not text, too long, or too many of them.
    """

    layout: Mapping[str, str]
    numerics: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for level in ('layout', 'numerics'):
            fields = getattr(self, level)
            if not isinstance(fields, Mapping) or len(fields) > MAX_FIELDS:
                raise ConfigError(
                    f'identity {level} must be a map of at most {MAX_FIELDS} text fields'
                )
            for key, value in fields.items():
                if not _is_text(key) or not _is_text(value):
                    raise ConfigError(
                        f'identity {level} field {key!r:.80} must be text of at most '
                        f'{MAX_TEXT} characters; convert its value with str()'
                    )
            object.__setattr__(self, level, MappingProxyType(dict(sorted(fields.items()))))

    @cached_property
    def layout_digest(self) -> str:
        """SHA-256 of the layout level, as 64 hex digits."""
        return _digest(self.layout)

    @cached_property
    def numerics_digest(self) -> str:
        """SHA-256 of the numerics level, as 64 hex digits."""
        return _digest(self.numerics)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Identity):
            return NotImplemented
        return (self.layout_digest, self.numerics_digest) == (
            other.layout_digest,
            other.numerics_digest,
        )

    def __hash__(self) -> int:
        return hash((self.layout_digest, self.numerics_digest))

    def diff(self, other: Identity) -> list[tuple[str, str, str, str]]:
        """Fields that differ as (level, field, mine, theirs); a missing one shows as '-'."""
        found = []
        for level in ('layout', 'numerics'):
            mine, theirs = getattr(self, level), getattr(other, level)
            # The config first: buffers that differ follow from it, and a message is short.
            for key in sorted({*mine, *theirs}, key=lambda key: (key.startswith('buffer.'), key)):
                a, b = mine.get(key, '-'), theirs.get(key, '-')
                if a != b:
                    found.append((level, key, a, b))
        return found

    def with_layout(self, extra: Mapping[str, str]) -> Identity:
        """This identity with more layout fields; a clash of values is a ConfigError."""
        for key, value in extra.items():
            if self.layout.get(key, value) != value:
                raise ConfigError(
                    f'identity layout field {key!r} is reserved: it is set to {value!r} by the '
                    f'boundary and cannot be {self.layout[key]!r}'
                )
        return Identity({**self.layout, **extra}, self.numerics)


def describe_diff(found: Iterable[tuple[str, str, str, str]], limit: int = 12) -> str:
    """One line for an error message: the first `limit` fields of a diff, live value first."""
    items = list(found)
    shown = [
        f'{level}.{key}: here {_short(mine)}, capsule {_short(theirs)}'
        for level, key, mine, theirs in items[:limit]
    ]
    if len(items) > limit:
        shown.append(f'and {len(items) - limit} more')
    return '; '.join(shown)


def numerics_of(device: torch.device | str, extra: Mapping[str, str] | None = None) -> dict:
    """Numerics fields that this machine decides; add kernels and chunk plan through `extra`.

    :param device: where the session computes; names the GPU architecture or the CPU's.
    """
    device = torch.device(device)
    fields = {
        'flashrt': _version('flashrt-core', _version('flashrt_ros', 'source')),
        'torch': str(torch.__version__),
        'triton': _version('triton', 'none'),
        'backend': device.type,
    }
    if device.type == 'cuda':
        major, minor = torch.cuda.get_device_capability(device)
        fields['arch'] = f'sm_{major}{minor}'
        fields['gpu'] = torch.cuda.get_device_name(device)
        fields['cuda'] = str(torch.version.cuda)
        fields['cudnn'] = str(torch.backends.cudnn.version())
    else:
        fields['arch'] = platform.machine()
        fields['cpu_capability'] = torch.backends.cpu.get_cpu_capability()
        fields['threads'] = str(torch.get_num_threads())
    fields.update(extra or {})
    return fields


def config_fields(config: object, prefix: str = 'config') -> dict[str, str]:
    """A frozen dataclass or mapping as layout fields `config.name: text`, one level deep."""
    items = dict(config) if isinstance(config, Mapping) else dict(vars(config))
    return {f'{prefix}.{key}': repr(value) for key, value in items.items()}


def identity_to_text(identity: Identity) -> str:
    """Canonical JSON of both levels, as files hold it."""
    return _canonical({'layout': dict(identity.layout), 'numerics': dict(identity.numerics)})


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= MAX_TEXT


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(',', ':'), ensure_ascii=True)


def _digest(fields: Mapping[str, str]) -> str:
    return hashlib.sha256(_canonical(dict(fields)).encode()).hexdigest()


def _short(text: str) -> str:
    text = re.sub(r'\s+', ' ', text)
    return repr(text if len(text) <= 64 else f'{text[:61]}...')


def _version(name: str, fallback: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return fallback
