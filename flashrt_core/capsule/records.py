"""What the capsule verbs hand back, and the names that capsules may have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from datetime import datetime
from datetime import UTC
import re
from typing import Any
from typing import Literal

from ..errors import CapsuleIdInvalid
from ..errors import ConfigError
from .identity import Identity

Tier = Literal['gpu', 'host', 'disk']
TIERS: tuple[Tier, ...] = ('gpu', 'host', 'disk')
LABEL_LIMIT = 256
ID_PATTERN = re.compile(r'[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}', re.ASCII)


def check_id(value: object, what: str = 'capsule id') -> str:
    """Return `value` if it may name a capsule or a session, else raise CapsuleIdInvalid.

    Ids become file names, so the alphabet holds no separator and no leading dot: an id can
    never leave the capsule directory.
    """
    if isinstance(value, str) and ID_PATTERN.fullmatch(value):
        return value
    shown = repr(value)
    if len(shown) > 80:
        shown = f'{shown[:77]}...'
    raise CapsuleIdInvalid(
        f'{what} {shown} is refused: use 1 to 64 of the characters A-Z a-z 0-9 . _ - '
        'with no leading dot'
    )


def check_label(value: object) -> str:
    """Return `value` if it may be a label: one printable line, 256 characters at most."""
    if isinstance(value, str) and len(value) <= LABEL_LIMIT and (not value or value.isprintable()):
        return value
    raise ConfigError(
        f'capsule label {value!r:.80} is refused: use one printable line of at most '
        f'{LABEL_LIMIT} characters'
    )


def plain(text: str) -> str:
    """Text of a foreign file as one printable line: control characters and lone bytes escaped."""
    return ''.join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def utc_now() -> str:
    """Wall clock as ISO 8601 UTC; a label for people, never used for ordering or deadlines."""
    return datetime.now(UTC).isoformat(timespec='microseconds')


@dataclass(frozen=True)
class CapsuleInfo:
    """A capsule as listed: what it is, where it lies, what it came from.

    :param extents: valid tokens of each KV buffer at the boundary.
    :param size_bytes: bytes of state, without page rounding.
    :param on_disk: a durable file of it exists (also while `tier` is gpu or host).
    :param bit_exact: False once numerics other than its own took part in its history.
    """

    id: str
    label: str
    tier: Tier
    session: str
    identity: Identity
    parent: str
    position: int
    extents: Mapping[str, int]
    size_bytes: int
    created: str
    pinned: bool = False
    bit_exact: bool = True
    on_disk: bool = False

    @property
    def layout_digest(self) -> str:
        """Digest of the layout level of the identity."""
        return self.identity.layout_digest

    @property
    def numerics_digest(self) -> str:
        """Digest of the numerics level of the identity."""
        return self.identity.numerics_digest


@dataclass(frozen=True)
class RestoreReport:
    """What a restore or rollback did.

    :param bytes: bytes written to live memory.
    :param us: microseconds of the whole verb, lookup to completion.
    :param copy_us: of these, submission to completion of the copies.
    :param bit_exact: whether the next tick is promised bit for bit.
    :param source: the tier the bytes came from, or 'mark'.
    :param overlapped: the copies ran beside the session's next plan; `us` ends with the last one.
    """

    id: str
    bytes: int
    us: float
    bit_exact: bool
    copy_us: float = 0.0
    source: str = 'gpu'
    position: int = 0
    rows: tuple[int, ...] = (0,)
    overlapped: bool = False


@dataclass(frozen=True)
class TierUsage:
    """One tier's budget, in bytes; pages count as a whole where the tier has pages."""

    budget_bytes: int
    used_bytes: int
    pinned_bytes: int
    capsules: int


@dataclass(frozen=True)
class StoreEvent:
    """One eviction, promotion, miss or refusal, with its reason in words."""

    kind: str
    id: str
    reason: str
    fields: Mapping[str, Any] = field(default_factory=dict)
