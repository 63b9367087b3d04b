"""``python -m flashrt_core.capsule``: look at, compare, check and carry capsule files."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from contextlib import contextmanager
from contextlib import suppress
import json
import os
from pathlib import Path
import sys
from typing import Any

import numpy as np

from ..errors import CapsuleCorrupt
from ..errors import CapsuleExists
from ..errors import CapsuleNotFound
from ..errors import ConfigError
from ..errors import FlashrtError
from ..starting import begun
from ..starting import STOPPED
from . import files
from .format import GAP
from .format import Header
from .format import TensorRow
from .records import check_id
from .records import plain

SAME, DIFFERENT, REFUSED = 0, 1, 2
Answer = tuple[int, Any, list[str]]
"""(exit code, value for --json, lines for people)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 fine, 1 different or damaged, 2 refused or used wrongly, 130 Ctrl-C."""
    try:
        options = _parser().parse_args(argv)
    except SystemExit as stop:
        return int(stop.code or 0)
    command: Callable[[argparse.Namespace], Answer] = options.command
    try:
        begun()
        code, value, lines = command(options)
    except FlashrtError as error:
        return _fail(error.code, str(error), options.json)
    except OSError as error:
        return _fail('system', f'{error.filename or "file"}: {error.strerror}', options.json)
    except KeyboardInterrupt:
        print('capsule: stopped', file=sys.stderr)
        return STOPPED
    try:
        _print(json.dumps(value, indent=2) if options.json else '\n'.join(map(plain, lines)))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _fail(code: str, message: str, as_json: bool) -> int:
    if as_json:
        _print(json.dumps({'error': code, 'message': message}))
    print(plain(f'error [{code}]: {message}'), file=sys.stderr)
    return REFUSED


def _print(text: str) -> None:
    """Write to the screen, whatever it can show: a label's letters never end a command."""
    encoding = sys.stdout.encoding or 'utf-8'
    print(text.encode(encoding, 'backslashreplace').decode(encoding), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser('capsule', description=__doc__)
    commands = parser.add_subparsers(required=True, metavar='COMMAND')

    def command(name: str, run: Callable[[argparse.Namespace], Answer], text: str,
                *names: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument('--json', action='store_true', help='machine readable output')
        sub.set_defaults(command=run)
        for each in names:
            sub.add_argument(each.lower(), metavar=each, type=Path)
        return sub

    command('ls', _ls, 'list the capsules of a directory', 'DIRECTORY')
    command('show', _show, 'show one file: lineage, identity, buffers', 'FILE')
    command('diff', _diff, 'name the fields and buffers that differ, with bytes', 'FILE', 'OTHER')
    verify = command('verify', _verify, 'check every digest of files: that they hold what was '
                     'written, not that it is good; a session compares its identity at restore')
    verify.add_argument('files', metavar='FILE', type=Path, nargs='+')
    export = command('export', _export, 'copy a capsule out of a directory, checked', 'DIRECTORY')
    export.add_argument('id', metavar='ID', help='as ls prints it, with SESSION@ if it has one')
    export.add_argument('target', metavar='FILE', type=Path)
    export.add_argument('--session', default='', help='the session whose capsule it is')
    bring = command('import', _import, 'check a file and put it into a directory', 'FILE',
                    'DIRECTORY')
    for sub in (export, bring):
        sub.add_argument('--force', action='store_true', help='overwrite what is there')
    return parser


@contextmanager
def _open(path: Path) -> Iterator[tuple[int, Header]]:
    """Descriptor and checked header of a file.

    :raises ConfigError: a directory. :raises CapsuleCorrupt: damaged, or no capsule at all.
    """
    with suppress(OSError):  # opening it says why
        if path.is_dir():
            raise ConfigError(
                f'{path} is a directory: name a file in it, or list it with `ls {path}`')
    directory = files.open_directory(path.parent)
    try:
        with files.opened(path.name, directory) as (fd, size):
            try:
                header = files.read_header(fd, size)
            except CapsuleCorrupt as error:
                text = f'{path} is no capsule file, or a damaged one: {error}'
                raise CapsuleCorrupt(text) from None
            yield fd, header
    finally:
        os.close(directory)


def _summary(header: Header) -> dict[str, Any]:
    info = header.info
    return {
        'id': info.id,
        'session': info.session,
        'label': info.label,
        'parent': info.parent,
        'position': info.position,
        'created': info.created,
        'bit_exact': info.bit_exact,
        'size_bytes': info.size_bytes,
        'file_bytes': header.file_bytes,
        'layout_digest': info.layout_digest,
        'numerics_digest': info.numerics_digest,
    }


def _sizes(header: Header) -> str:
    """Return both sizes in words; the file has padding to whole pages and a header besides."""
    return f'{header.info.size_bytes:,} bytes of state, {header.file_bytes:,} in the file'


def _ls(options: argparse.Namespace) -> Answer:
    found, bad, lines = [], [], []
    if options.directory.is_file():
        raise ConfigError(
            f'{options.directory} is a file: look at it with `show {options.directory}`')
    os.close(files.open_directory(options.directory))
    names = sorted(path for path in options.directory.iterdir() if path.suffix == files.SUFFIX)
    for path in names:
        try:
            with _open(path) as (_, header):
                item = _summary(header)
        except FlashrtError as error:
            bad.append({'file': path.name, 'error': error.code, 'message': str(error)})
            lines.append(f'{path.name}: refused: {error}')
            continue
        found.append(item)
        name = files.file_name(item['session'], item['id'])[: -len(files.SUFFIX)]
        lines.append(
            f'{name:<32} {_sizes(header):<50}  at {item["position"]:<8} '
            f'{item["created"][:19]}  layout {item["layout_digest"][:12]}  {item["label"]}'
        )
    return (DIFFERENT if bad else SAME), {'capsules': found, 'refused': bad}, lines or ['empty']


def _show(options: argparse.Namespace) -> Answer:
    with _open(options.file) as (_, header):
        value = _summary(header)
        value['extents'] = dict(header.info.extents)
        value['layout'] = dict(header.info.identity.layout)
        value['numerics'] = dict(header.info.identity.numerics)
        value['buffers'] = [
            {'name': t.name, 'dtype': t.dtype, 'shape': list(t.shape), 'bytes': t.end - t.begin}
            for t in _buffers(header).values()
        ]
    lines = [f'{key}: {item}' for key, item in value.items() if not isinstance(item, dict | list)]
    for level in ('layout', 'numerics'):
        lines += [f'{level}.{key}: {text}' for key, text in value[level].items()]
    lines += [
        f'{b["name"]:<32} {b["dtype"]:<8} {b["shape"]!s:<24} {b["bytes"]:>14,} bytes'
        for b in value['buffers']
    ]
    return SAME, value, lines


def _diff(options: argparse.Namespace) -> Answer:
    with _open(options.file) as (left_fd, left), _open(options.other) as (right_fd, right):
        fields = left.info.identity.diff(right.info.identity)
        mine, theirs = _buffers(left), _buffers(right)
        buffers: list[dict[str, Any]] = []
        for name in dict.fromkeys([*mine, *theirs]):
            a, b = mine.get(name), theirs.get(name)
            if a is None or b is None:
                buffers.append({'name': name, 'only_in': 'second' if a is None else 'first'})
            elif (a.dtype, a.shape[1:]) != (b.dtype, b.shape[1:]) or len(a.shape) != len(b.shape):
                buffers.append({
                    'name': name,
                    'shapes': [[a.dtype, list(a.shape)], [b.dtype, list(b.shape)]],
                })
            else:
                common = min(a.end - a.begin, b.end - b.begin)
                count = _differing((left_fd, left, a), (right_fd, right, b), common)
                if count or a.shape != b.shape:
                    entry: dict[str, Any] = {'name': name}
                    entry |= {'differing_bytes': count, 'compared_bytes': common}
                    if a.shape != b.shape:
                        entry['shapes'] = [[a.dtype, list(a.shape)], [b.dtype, list(b.shape)]]
                    buffers.append(entry)
    lines = [f'{level}.{key}: {one!r} | {two!r}' for level, key, one, two in fields]
    for item in buffers:
        parts: list[str] = []
        if 'only_in' in item:
            parts.append(f'only in the {item["only_in"]} file')
        if 'differing_bytes' in item:
            parts.append(f'{item["differing_bytes"]:,} of {item["compared_bytes"]:,} bytes differ')
        if 'shapes' in item:
            parts.append(' | '.join(f'{dtype} {shape}' for dtype, shape in item['shapes']))
        lines.append(f'{item["name"]}: {", ".join(parts)}')
    value = {
        'identity': [dict(zip(('level', 'field', 'first', 'second'), f)) for f in fields],
        'buffers': buffers,
    }
    same = not fields and not buffers
    return (SAME if same else DIFFERENT), value, lines or ['no differences']


def _buffers(header: Header) -> dict[str, TensorRow]:
    return {row.name: row for row in header.tensors if not row.name.startswith(GAP)}


def _differing(one: tuple[int, Header, TensorRow], two: tuple[int, Header, TensorRow],
               size: int) -> int:
    total = 0
    for at in range(0, size, files.PIECE_BYTES):
        count = min(files.PIECE_BYTES, size - at)
        a, b = (
            np.frombuffer(os.pread(fd, count, header.data_offset + row.begin + at), np.uint8)
            for fd, header, row in (one, two)
        )
        if len(a) != len(b):
            raise CapsuleCorrupt('a file was cut short while it was read; run diff again')
        total += int(np.count_nonzero(a != b))
    return total


def _verify(options: argparse.Namespace) -> Answer:
    results, lines = [], []
    for path in options.files:
        try:
            with _open(path) as (fd, header):
                count = sum(len(data) for _, data in files.stream(fd, header))
            results.append({
                'file': str(path), 'ok': True, 'bytes': count,
                'size_bytes': header.info.size_bytes, 'file_bytes': header.file_bytes,
            })
            lines.append(f'{path}: ok, {_sizes(header)}, {len(header.digests)} groups checked')
        except FlashrtError as error:
            results.append({
                'file': str(path), 'ok': False, 'error': error.code, 'message': str(error)
            })
            what = 'not there' if isinstance(error, CapsuleNotFound) else 'damaged'
            lines.append(f'{path}: {what}: {error}')
    good = all(result['ok'] for result in results)
    return (SAME if good else DIFFERENT), {'files': results}, lines


def _export(options: argparse.Namespace) -> Answer:
    session, _, id = options.id.rpartition('@')  # as `ls` prints it
    if session and options.session not in ('', session):
        raise ConfigError(f'{options.id} is of session {session!r} and --session says '
                          f'{options.session!r}: give one of the two')
    session = options.session or session
    session = check_id(session, 'session name') if session else ''
    if options.target.is_dir():
        raise ConfigError(f'{options.target} is a directory: name a file in it')
    source = options.directory / files.file_name(session, check_id(id))
    os.close(files.open_directory(options.directory))
    if not source.exists():
        held = sorted(path.stem for path in options.directory.glob(f'*{files.SUFFIX}'))[:16]
        raise CapsuleNotFound(
            f'no capsule {options.id!r} in {str(options.directory)!r}; held are '
            f'{", ".join(held) or "none"}'
        )
    return _carry(source, options.target.parent, options.target.name, options.force)


def _import(options: argparse.Namespace) -> Answer:
    return _carry(options.file, options.directory, None, options.force)


def _carry(source: Path, directory: Path, name: str | None, force: bool) -> Answer:
    """Copy a file, every digest checked; the name inside decides where None is given."""
    with _open(source) as (fd, header):
        target = name or files.file_name(header.info.session, header.info.id)
        into = files.open_directory(directory)
        try:
            try:
                files.copy(fd, header, into, target, force)
            except CapsuleExists as error:
                text = f'{directory / target} exists: {error}, or use --force'
                raise CapsuleExists(text) from None
        finally:
            os.close(into)
    value = {**_summary(header), 'file': str(directory / target)}
    return SAME, value, [f'{directory / target}: {_sizes(header)}, all digests checked']
