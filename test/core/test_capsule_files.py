"""Capsule files as an attacker or a bad disk leaves them: refused, bounded, state untouched."""
from __future__ import annotations

from collections.abc import Callable
import hashlib
import json
import os
from pathlib import Path
import random
import resource
from typing import Any

from _capsules import MIB
from _capsules import Session
from _capsules import small_store
from _capsules import SPECS
import pytest

from flashrt_core.capsule import CapsuleStore
from flashrt_core.capsule import files
from flashrt_core.capsule import format as container
from flashrt_core.capsule.hashing import fold
from flashrt_core.capsule.hashing import GROUP_BYTES
from flashrt_core.capsule.hashing import LEAF_BYTES
from flashrt_core.capsule.hashing import leaves
from flashrt_core.errors import CapsuleCorrupt
from flashrt_core.errors import CapsuleError
from flashrt_core.errors import ConfigError
from flashrt_core.errors import IdentityMismatch
from flashrt_core.runtime import BufferSpec
from flashrt_core.runtime import cpu_backend
from flashrt_core.runtime import Kind
from flashrt_core.runtime import Role

Mutation = Callable[[bytes, random.Random], bytes]
TEXTS = ('dtype', 'shape', 'data_offsets')
ODD = (-1, 0, 1, 2**31, 2**46, 2**63, 2**64, 10**400, 1.5, True, None, '8', [], {}, [[]],
       'x' * 400)


def new_store(path: Path) -> CapsuleStore:
    return small_store(cpu_backend(), gpu=0, host=MIB, disk_bytes=64 * MIB, directory=path,
                       allow_disk=True)


@pytest.fixture
def session() -> Session:
    session = Session(cpu_backend())
    session.length = 3
    session.fill(1)
    return session


@pytest.fixture
def good(session: Session, tmp_path: Path) -> bytes:
    store = new_store(tmp_path / 'good')
    store.snapshot(session.boundary, 'C0', tier='host')
    store.move('C0', 'disk')
    store.close()
    return (tmp_path / 'good' / 'C0.capsule').read_bytes()


def split(raw: bytes) -> tuple[dict[str, Any], bytes]:
    size = int.from_bytes(raw[:8], 'little')
    return json.loads(raw[8:8 + size]), raw[8 + size:]


def sealed(body: dict[str, Any], data: bytes) -> bytes:
    """A file that an attacker made consistent: digests and root are right for what it says."""
    body = json.loads(json.dumps(body))
    texts = body['__metadata__']
    groups = [fold(leaves(memoryview(data[at:at + GROUP_BYTES])))[0]
              for at in range(0, len(data), GROUP_BYTES)]
    bare = {**body, '__metadata__': {k: v for k, v in texts.items() if k not in (
        'digests', 'root')}}
    compact = dict(sort_keys=True, separators=(',', ':'))
    texts['digests'] = b''.join(groups).hex()
    texts['root'] = hashlib.sha256(
        json.dumps(bare, **compact).encode() + b''.join(groups)).hexdigest()
    return framed(json.dumps(body, **compact).encode(), data)


def framed(text: bytes, data: bytes) -> bytes:
    padded = -(-(8 + len(text)) // 4096) * 4096 - 8
    return padded.to_bytes(8, 'little') + text.ljust(padded) + data


def flip_bits(raw: bytes, rng: random.Random) -> bytes:
    found = bytearray(raw)
    where = rng.randrange(len(found)) if rng.random() < .5 else rng.randrange(4096)
    for _ in range(rng.choice((1, 1, 1, 8))):
        found[(where + rng.randrange(64)) % len(found)] ^= 1 << rng.randrange(8)
    return bytes(found)


def change_length(raw: bytes, rng: random.Random) -> bytes:
    if rng.random() < .6:
        return raw[:rng.randrange(len(raw))]
    return raw + rng.randbytes(rng.choice((1, 7, 4096, 70_000)))


def lie_about_header(raw: bytes, rng: random.Random) -> bytes:
    value = rng.choice((0, 1, 4088, 8184, 2**20, 2**20 - 8, 2**32, 2**63, 2**64 - 1,
                        rng.randrange(2**16), len(raw)))
    return value.to_bytes(8, 'little') + raw[8:]


def edit_tensor(raw: bytes, rng: random.Random) -> bytes:
    body, data = split(raw)
    name = rng.choice([key for key in body if key != '__metadata__'])
    spec, kind = body[name], rng.randrange(7)
    if kind == 0:
        spec['dtype'] = rng.choice(('F128', 'I64', 'U8', '', 5, None, 'bfloat16', ['U8']))
    elif kind == 1:
        spec['shape'] = rng.choice(([rng.choice(ODD)], [2] * 9, [2**23, 2**23], rng.choice(ODD)))
    elif kind == 2:
        spec['data_offsets'] = rng.choice((
            [rng.choice(ODD), rng.choice(ODD)], [0, 2**60], [8, 0], [0], rng.choice(ODD)))
    elif kind == 3:
        body[rng.choice(('', 'x' * 300, '../../etc/passwd', 'a\x00b', 'tick2'))] = body.pop(name)
    elif kind == 4:
        del spec[rng.choice(TEXTS)]
    elif kind == 5:
        del body[name]
    else:
        body[f'extra{rng.randrange(9)}'] = rng.choice((
            {**spec}, 5, None, {'dtype': 'U8', 'shape': [0], 'data_offsets': [len(data)] * 2}))
    return sealed(body, data)


def edit_texts(raw: bytes, rng: random.Random) -> bytes:
    body, data = split(raw)
    texts, kind = body['__metadata__'], rng.randrange(8)
    if kind == 0:
        texts['format'] = rng.choice(('pt', '', 'flashrt.capsule2'))
    elif kind == 1:
        texts['version'] = rng.choice(('0', '2', '1.0', ''))
    elif kind == 2:
        texts['extents'] = json.dumps(rng.choice((
            {'kv.0': 97, 'kv.1': 3}, {'kv.0': 3}, {'kv.0': -1, 'kv.1': 3}, [], 7, {'kv.0': 2**60},
            {'kv.0': 4, 'kv.1': 4}, {'kv.0': 3.0, 'kv.1': 3})))
    elif kind == 3:
        texts['id'] = rng.choice(('../x', '', 'a/b', 'C1', 'x' * 99, '.a'))
    elif kind == 4:
        levels = json.loads(texts['identity'])
        rng.choice((lambda: levels['layout'].update(config='other'),
                    lambda: levels['numerics'].update(arch='other'),
                    lambda: levels.pop('layout'), lambda: levels.update(more={}),
                    lambda: levels['layout'].update(config=7),
                    lambda: levels['layout'].pop('weights')))()
        texts['identity'] = json.dumps(levels, sort_keys=True, separators=(',', ':'))
    elif kind == 5:
        texts[rng.choice(('position', 'created', 'bit_exact'))] = rng.choice((
            '-1', 'yes', '1e9', '9' * 50, 'NaN', '١'))
    elif kind == 6:
        texts.pop(rng.choice(sorted(texts)))
    else:
        texts[rng.choice(('session', 'parent', 'label', 'more'))] = rng.choice((
            '../x\n', 'a\nb', 'y' * 500, '\x1b[2J'))
    if 'digests' not in texts or 'root' not in texts:
        return framed(json.dumps(body, sort_keys=True, separators=(',', ':')).encode(), data)
    return sealed(body, data)


def bomb(raw: bytes, rng: random.Random) -> bytes:
    body, data = split(raw)
    text = json.dumps(body).encode()
    return framed(rng.choice((
        b'[' * 1_000_000, b'{"a":' * 180_000, b'[' * 900 + b']' * 900, b'[[],' * 200_000,
        b'"' + b'x' * 1_000_000, b'1' * 1_000_000, b'{' + b'"a":1,' * 150_000 + b'"b":1}',
        text[:-1] + b',"tick":' + text[1:] + b'}', text + text, text.replace(b'"I64"', b'NaN'),
        b'\xff\xfe' + text, b'null', b'[]', b'{}', b'{"__metadata__":{}}', b'\x00' * 4000,
        b'{"__metadata__":' + b'{"a":' * 5000 + b'1' + b'}' * 5001,
    )), data)


def respell(raw: bytes, rng: random.Random) -> bytes:
    """The same content in another spelling; there is one canonical header only."""
    body, data = split(raw)
    text = json.dumps(body, sort_keys=True, separators=(',', ':')).encode()
    return rng.choice((
        lambda: framed(json.dumps(body, indent=1).encode(), data),
        lambda: framed(b' ' + text, data),
        lambda: framed(text.replace(b'"id"', b'"\\u0069d"'), data),
        lambda: framed(text + b' ' * 4096, data),
        lambda: framed(text + b'\n', data),
        lambda: framed(json.dumps(dict(reversed(body.items())), separators=(',', ':')).encode(),
                       data)))()


def shuffle_data(raw: bytes, rng: random.Random) -> bytes:
    _, data = split(raw)
    at, size = rng.randrange(len(data)), rng.randrange(1, 300)
    changed = bytearray(data)
    changed[at:at + size] = rng.randbytes(len(changed[at:at + size]))
    return raw[:len(raw) - len(data)] + bytes(changed)


MUTATIONS: tuple[Mutation, ...] = (
    flip_bits, flip_bits, change_length, lie_about_header, edit_tensor, edit_tensor, edit_texts,
    respell, shuffle_data)


def check_refused(path: Path, raw: bytes, session: Session) -> str:
    """Meet the file as a store does: skipped at the start, or refused by restore. The reason."""
    (path / 'C0.capsule').write_bytes(raw)
    store = new_store(path)
    try:
        listed = store.list()
        if not listed:
            return next(event.reason for event in store.events if event.kind == 'skipped')
        for info in listed:
            with pytest.raises(CapsuleError) as refused:
                store.restore(session.boundary, info.id)
            return str(refused.value)
        return ''
    finally:
        store.close()


@pytest.mark.slow
def test_every_mutated_file_is_refused_with_a_reason_in_bounded_memory(
        good: bytes, session: Session, tmp_path: Path, stress: Callable[[int], int]) -> None:
    path = tmp_path / 'mutated'
    path.mkdir()
    rng = random.Random(20)
    session.fill(2)
    before = session.image()
    for kind in (*MUTATIONS, bomb):
        check_refused(path, kind(good, rng), session)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for turn in range(stress(10_000)):
        mutate = bomb if turn % 25 == 0 else MUTATIONS[turn % len(MUTATIONS)]
        raw = mutate(good, rng)
        if raw == good:
            continue
        reason = check_refused(path, raw, session)
        assert 10 < len(reason) < 2500, (mutate.__name__, turn)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024
    assert grown < 128 * MIB
    assert session.image() == before
    assert session.boundary.poisoned is None and session.boundary.parent == ''


def test_the_unchanged_file_passes_the_same_checks(
        good: bytes, session: Session, tmp_path: Path) -> None:
    body, data = split(good)
    assert sealed(body, data) == good
    before = session.image()
    session.fill(2)
    (tmp_path / 'C0.capsule').write_bytes(good)
    store = new_store(tmp_path)
    store.restore(session.boundary, 'C0')
    assert session.image() == before
    store.close()


def test_a_huge_sparse_file_is_refused_without_reading_it(
        session: Session, tmp_path: Path) -> None:
    tokens = 1 << 27
    big = Session(cpu_backend(), specs=(
        BufferSpec('kv.0', Role.STATE, SPECS[5].dtype, (2, 2, 4, 64), kind=Kind.KV),))
    big.length = 2
    info = small_store(cpu_backend()).snapshot(big.boundary, 'C0')
    size = tokens * 1024
    row = container.TensorRow('kv.0', 'BF16', (tokens, 2, 4, 64), 0, size)
    header = container.header_for(info, [row], size)
    path = tmp_path / 'C0.capsule'
    path.write_bytes(container.encode(header))
    os.truncate(path, header.file_bytes)
    store = new_store(tmp_path)
    assert [item.size_bytes for item in store.list()] == [size]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CapsuleError, match='differ from the session'):
        store.restore(big.boundary, 'C0')
    with pytest.raises(IdentityMismatch):
        store.restore(session.boundary, 'C0')
    with pytest.raises(CapsuleError, match='budget'):
        store.prefetch('C0')
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 32 * 1024
    store.close()


def test_a_file_cut_while_it_is_read_is_refused(
        good: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / 'C0.capsule'
    path.write_bytes(good)
    directory = files.open_directory(tmp_path)
    with files.opened('C0.capsule', directory) as (fd, size):
        header = files.read_header(fd, size)
        os.truncate(path, len(good) - 10)
        with pytest.raises(CapsuleCorrupt, match='cut short'):
            files.read_data(fd, header, [memoryview(bytearray(header.data_bytes))])
    os.close(directory)


@pytest.mark.parametrize('size', [0, 1, LEAF_BYTES - 1, LEAF_BYTES, LEAF_BYTES + 1,
                                  GROUP_BYTES, GROUP_BYTES + 1, 3 * GROUP_BYTES + 77])
@pytest.mark.parametrize('cut', [1 << 16, 3 << 20, 1 << 30])
def test_any_size_in_any_pieces_of_memory_round_trips(
        good: bytes, tmp_path: Path, size: int, cut: int) -> None:
    data = random.Random(size).randbytes(size)
    info = container.parse(good[:int.from_bytes(good[:8], 'little') + 8], len(good)).info
    header = container.header_for(info, [container.TensorRow('x', 'U8', (size,), 0, size)], size)
    directory = files.open_directory(tmp_path)
    views = [memoryview(data)[at:at + cut] for at in range(0, size, cut)]
    done = files.save(directory, 'x.capsule', header, views)
    groups = (memoryview(data[at:at + GROUP_BYTES]) for at in range(0, size, GROUP_BYTES))
    assert done.digests == tuple(fold(leaves(group))[0] for group in groups)
    back = bytearray(size)
    with files.opened('x.capsule', directory) as (fd, file_bytes):
        again = files.read_header(fd, file_bytes)
        step = max(1, cut // 2)
        files.read_data(fd, again, [memoryview(back)[at:at + step] for at in range(0, size, step)])
        assert b''.join(bytes(part) for _, part in files.stream(fd, again)) == data
    assert bytes(back) == data and again.digests == done.digests
    os.close(directory)


def test_a_header_over_the_limit_is_refused_when_it_is_made(session: Session) -> None:
    info = small_store(cpu_backend()).snapshot(session.boundary, 'C0')
    rows = [container.TensorRow(f'{"n" * 200}{i}', 'U8', (0,), 0, 0) for i in range(6000)]
    with pytest.raises(ConfigError, match='limit'):
        container.header_for(info, rows, 0)


def test_a_header_whose_canonical_form_would_pass_the_limit_is_refused(
        good: bytes, session: Session, tmp_path: Path) -> None:
    body, data = split(good)
    levels = json.loads(body['__metadata__']['identity'])
    levels['layout'] |= {f'field{at}': '\u00e9' * 4000 for at in range(120)}
    body['__metadata__']['identity'] = json.dumps(levels, sort_keys=True, separators=(',', ':'))
    spelled_short = split(sealed(body, data))[0]
    spelled_short['__metadata__']['identity'] = json.dumps(levels, ensure_ascii=False)
    raw = framed(json.dumps(spelled_short, ensure_ascii=False).encode(), data)
    assert len(raw) - len(data) < MIB
    assert 'canonical' in check_refused(tmp_path, raw, session)
