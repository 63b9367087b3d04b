"""The capsule file: a safetensors container whose header is trusted in nothing.

``[u64 header bytes][JSON header, padded with spaces to 4 KiB][data]``. Data is the packed state:
one tensor per buffer, gaps named ``_gap.N``, so any safetensors reader opens it. ``__metadata__``
holds format version, identity, lineage, one digest per 16 MiB of data and a root digest over the
canonical header and those digests. Nothing is allocated by a size that was not checked here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
from datetime import datetime
import hashlib
import json
import math
from typing import Any

import torch

from ..errors import CapsuleCorrupt
from ..errors import CapsuleIdInvalid
from ..errors import ConfigError
from .hashing import DIGEST_BYTES
from .hashing import groups_of
from .identity import Identity
from .identity import identity_to_text
from .records import CapsuleInfo
from .records import check_id
from .records import check_label

FORMAT = 'flashrt.capsule'
VERSION = '1'
ALIGN = 4096
HEADER_LIMIT = 1 << 20
TENSOR_LIMIT = 16384
SIZE_LIMIT = 1 << 46
GAP = '_gap.'
DTYPES: dict[str, torch.dtype] = {
    'BOOL': torch.bool,
    'U8': torch.uint8,
    'I8': torch.int8,
    'F8_E4M3': torch.float8_e4m3fn,
    'F8_E5M2': torch.float8_e5m2,
    'I16': torch.int16,
    'F16': torch.float16,
    'BF16': torch.bfloat16,
    'I32': torch.int32,
    'F32': torch.float32,
    'I64': torch.int64,
    'F64': torch.float64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
TEXT_KEYS = ('format', 'version', 'id', 'label', 'session', 'parent', 'created')
KEYS = {*TEXT_KEYS, 'position', 'extents', 'bit_exact', 'identity', 'digests', 'root'}


@dataclass(frozen=True)
class TensorRow:
    """One tensor of the container: bytes [begin, end) of the data, in row-major order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """A checked header. `data_offset` is the data's position in the file, a multiple of 4 KiB."""

    info: CapsuleInfo
    tensors: tuple[TensorRow, ...]
    data_bytes: int
    digests: tuple[bytes, ...] = ()
    data_offset: int = 0

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return self.data_offset + self.data_bytes


def header_for(info: CapsuleInfo, tensors: Sequence[TensorRow], data_bytes: int) -> Header:
    """A header whose digests are still unknown; its encoded size is already final.

    :raises ConfigError: the header would pass 1 MiB (too many buffers or identity fields).
    """
    blank = (bytes(DIGEST_BYTES),) * groups_of(data_bytes)
    header = Header(info, tuple(tensors), data_bytes, blank)
    return replace(header, data_offset=len(encode(header)))


def encode(header: Header) -> bytes:
    """The bytes in front of the data: length, JSON with digests and root, padding."""
    body = _body(header)
    body['__metadata__']['digests'] = b''.join(header.digests).hex()
    body['__metadata__']['root'] = root_digest(header)
    text = _canonical(body)
    padded = math.ceil((8 + len(text)) / ALIGN) * ALIGN - 8
    if padded > HEADER_LIMIT:
        raise ConfigError(
            f'capsule {header.info.id!r} needs a header of {padded} bytes, limit {HEADER_LIMIT}: '
            'bind fewer buffers or shorten the identity'
        )
    return padded.to_bytes(8, 'little') + text.ljust(padded)


def root_digest(header: Header) -> str:
    """SHA-256 over the canonical header without digests, then the digests; hex."""
    state = hashlib.sha256(_canonical(_body(header)))
    for digest in header.digests:
        state.update(digest)
    return state.hexdigest()


def _body(header: Header) -> dict[str, Any]:
    info = header.info
    body: dict[str, Any] = {
        row.name: {
            'dtype': row.dtype,
            'shape': list(row.shape),
            'data_offsets': [row.begin, row.end],
        }
        for row in header.tensors
    }
    body['__metadata__'] = {
        'format': FORMAT,
        'version': VERSION,
        'id': info.id,
        'label': info.label,
        'session': info.session,
        'parent': info.parent,
        'created': info.created,
        'position': str(info.position),
        'extents': _canonical(dict(info.extents)).decode(),
        'bit_exact': str(info.bit_exact).lower(),
        'identity': identity_to_text(info.identity),
    }
    return body


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(',', ':'), ensure_ascii=True).encode()


def header_size(prefix: bytes, file_bytes: int) -> int:
    """Bytes in front of the data, from the file's first eight bytes; bounds checked.

    :raises CapsuleCorrupt: too short, longer than 1 MiB, not aligned, or past the file's end.
    """
    if len(prefix) < 8:
        raise CapsuleCorrupt(f'capsule file of {file_bytes} bytes is cut short: no header length')
    size = int.from_bytes(prefix[:8], 'little')
    if size > HEADER_LIMIT:
        raise CapsuleCorrupt(f'capsule header says {size} bytes, limit {HEADER_LIMIT}')
    if (8 + size) % ALIGN:
        raise CapsuleCorrupt(f'capsule header of {size} bytes does not end on {ALIGN} bytes')
    if 8 + size > file_bytes:
        raise CapsuleCorrupt(
            f'capsule header says {size} bytes but the file has {file_bytes}: it is cut short'
        )
    return 8 + size


def parse(raw: bytes, file_bytes: int) -> Header:
    """Check and decode the bytes in front of the data.

    :param raw: exactly `header_size(...)` bytes.
    :raises CapsuleCorrupt: with the field and value that is wrong.
    """
    try:
        body = json.loads(raw[8:].decode('utf-8'), **_STRICT)
    except (ValueError, RecursionError) as error:
        raise CapsuleCorrupt(f'capsule header is not valid JSON: {str(error)[:120]}') from None
    if not isinstance(body, dict) or not isinstance(body.get('__metadata__'), dict):
        raise CapsuleCorrupt('capsule header is not a map with __metadata__')
    texts = body.pop('__metadata__')
    if set(texts) != KEYS or not all(isinstance(value, str) for value in texts.values()):
        odd = sorted(str(key)[:40] for key in set(texts) ^ KEYS)[:8]
        raise CapsuleCorrupt(f'capsule metadata fields are missing, unknown or not text: {odd}')
    if (texts['format'], texts['version']) != (FORMAT, VERSION):
        raise CapsuleCorrupt(
            f'capsule format {texts["format"][:40]!r} version {texts["version"][:20]!r} is not '
            f'{FORMAT!r} version {VERSION!r}: write it again with this release'
        )
    data_bytes = file_bytes - len(raw)
    tensors = _parse_tensors(body, data_bytes)
    digests = _parse_digests(texts['digests'], data_bytes)
    info = _parse_info(texts, tensors)
    header = Header(info, tensors, data_bytes, digests, len(raw))
    if root_digest(header) != texts['root']:
        raise CapsuleCorrupt(
            f'capsule {info.id!r}: header and digests do not match the root digest; '
            'the file was changed after it was written'
        )
    try:
        canonical = encode(header)
    except ConfigError:  # it would pass the limit
        canonical = b''
    if canonical != raw:
        raise CapsuleCorrupt(f'capsule {info.id!r}: the header is not in its one canonical form')
    return header


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError('a key is repeated')
    return found


def _refuse_number(text: str) -> Any:
    raise ValueError(f'number {text[:20]} is not an integer')


_STRICT: dict[str, Any] = {
    'object_pairs_hook': _no_duplicates,
    'parse_constant': _refuse_number,
    'parse_float': _refuse_number,
}


def _count(value: object) -> bool:
    return type(value) is int and 0 <= value <= SIZE_LIMIT


def _parse_tensors(body: dict[str, Any], data_bytes: int) -> tuple[TensorRow, ...]:
    if len(body) > TENSOR_LIMIT:
        raise CapsuleCorrupt(f'capsule holds {len(body)} tensors, limit {TENSOR_LIMIT}')
    rows = sorted((_parse_row(*item) for item in body.items()), key=lambda r: (r.begin, r.end))
    at = 0
    for row in rows:
        if row.begin != at:
            raise CapsuleCorrupt(
                f'capsule tensor {row.name!r} begins at byte {row.begin}, expected {at}: '
                'holes and overlaps are refused'
            )
        at = row.end
    if at != data_bytes:
        raise CapsuleCorrupt(
            f'capsule tensors cover {at} bytes but the file holds {data_bytes} bytes of data'
        )
    return tuple(rows)


def _parse_row(name: str, spec: object) -> TensorRow:
    shown = repr(name[:80])
    if not name or len(name) > 256 or not name.isprintable():
        raise CapsuleCorrupt(f'capsule tensor name {shown} is refused')
    if not isinstance(spec, dict) or set(spec) != {'dtype', 'shape', 'data_offsets'}:
        raise CapsuleCorrupt(f'capsule tensor {shown} needs dtype, shape and data_offsets only')
    dtype, shape, offsets = spec['dtype'], spec['shape'], spec['data_offsets']
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CapsuleCorrupt(f'capsule tensor {shown} has dtype {str(dtype)[:20]!r}, not allowed')
    if not isinstance(shape, list) or len(shape) > 8 or not all(map(_count, shape)):
        raise CapsuleCorrupt(f'capsule tensor {shown} has shape {str(shape)[:60]}, not allowed')
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_count, offsets)):
        raise CapsuleCorrupt(f'capsule tensor {shown} has offsets {str(offsets)[:60]}')
    size = math.prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != size:
        raise CapsuleCorrupt(
            f'capsule tensor {shown} of {dtype} {shape} needs {size} bytes but spans '
            f'{offsets[1] - offsets[0]}'
        )
    return TensorRow(name, dtype, tuple(shape), offsets[0], offsets[1])


def _parse_digests(text: str, data_bytes: int) -> tuple[bytes, ...]:
    step = 2 * DIGEST_BYTES
    if len(text) != groups_of(data_bytes) * step:
        raise CapsuleCorrupt(
            f'capsule has {len(text) // step} digests, {groups_of(data_bytes)} needed for '
            f'{data_bytes} bytes'
        )
    try:
        raw = bytes.fromhex(text)
    except ValueError:
        raise CapsuleCorrupt('capsule digests are not hexadecimal') from None
    if raw.hex() != text:
        raise CapsuleCorrupt('capsule digests are not lower-case hexadecimal')
    return tuple(raw[at : at + DIGEST_BYTES] for at in range(0, len(raw), DIGEST_BYTES))


def _parse_info(texts: dict[str, str], tensors: Sequence[TensorRow]) -> CapsuleInfo:
    try:
        levels = json.loads(texts['identity'], **_STRICT)
        extents = json.loads(texts['extents'], **_STRICT)
        if not isinstance(levels, dict) or set(levels) != {'layout', 'numerics'}:
            raise ValueError('identity needs layout and numerics')
        identity = Identity(levels['layout'], levels['numerics'])
        if not isinstance(extents, dict) or not all(map(_count, extents.values())):
            raise ValueError('extents must be counts by buffer name')
        if not texts['position'].isascii() or not texts['position'].isdigit():
            raise ValueError(f'position {texts["position"][:20]!r} is not a count')
        if len(texts['position']) > 18 or texts['bit_exact'] not in ('true', 'false'):
            raise ValueError('position or bit_exact is out of range')
        datetime.fromisoformat(texts['created'])
        for key in ('session', 'parent'):
            if texts[key]:
                check_id(texts[key], key)
        check_id(texts['id'])
        check_label(texts['label'])
    except (ValueError, RecursionError, ConfigError, CapsuleIdInvalid) as error:
        raise CapsuleCorrupt(f'capsule metadata is refused: {str(error)[:160]}') from None
    return CapsuleInfo(
        id=texts['id'],
        label=texts['label'],
        tier='disk',
        session=texts['session'],
        identity=identity,
        parent=texts['parent'],
        position=int(texts['position']),
        extents=extents,
        size_bytes=sum(row.end - row.begin for row in tensors if not row.name.startswith(GAP)),
        created=texts['created'],
        bit_exact=texts['bit_exact'] == 'true',
        on_disk=True,
    )
