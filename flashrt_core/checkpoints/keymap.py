"""Key maps: which stored tensors make up each of ours; nothing may be missing or left over."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol
from typing import TypeVar

import torch
from torch import Tensor

from flashrt_core.errors import ConfigError
from flashrt_core.nn.nvfp4 import Nvfp4Weight

SHOWN = 12
STORED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Source:
    """A tensor of the checkpoint under its canonical name.

    ``permute``: axes to reorder before it is flattened to a matrix (a patch convolution).
    ``otherwise``: canonical name that may stand in for it (a tied embedding stored once).
    ``groups``: its rows come in equal groups (one per head, say), each of these parts in turn:
    (rows in a group, row of the target at which that part of all groups begins).
    """

    key: str
    shape: tuple[int, ...]
    permute: tuple[int, ...] = ()
    otherwise: str = ''
    groups: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Target:
    """One of our tensors: its sources one below the other along axis 0."""

    name: str
    sources: tuple[Source, ...]


def check_keys(
    targets: Iterable[Target],
    stored: Mapping[str, tuple[int, ...]],
    canonical: Callable[[str], str],
    ignored: Callable[[str], bool],
    where: str,
) -> dict[str, str]:
    """Return canonical key -> stored name for every source of ``targets``.

    :param stored: shape of every tensor in the checkpoint by its stored name.
    :param canonical: stored name -> canonical name; two stored names must not fall together.
    :param ignored: whether a canonical name is known and not needed.
    :raises ConfigError: naming every missing, left-over or misshapen key (the first few of many).
    """
    by_key: dict[str, str] = {}
    problems: list[str] = []
    for name in stored:
        key = canonical(name)
        if key in by_key:
            problems.append(f'{name!r} and {by_key[key]!r} are the same weight')
        by_key[key] = name
    used: dict[str, str] = {}
    for source in (s for t in targets for s in t.sources):
        key = source.key if source.key in by_key else source.otherwise
        if key not in by_key:
            problems.append(f'{source.key!r} is missing')
            continue
        used[source.key] = by_key[key]
        if stored[by_key[key]] != source.shape:
            problems.append(
                f'{by_key[key]!r} has shape {list(stored[by_key[key]])}, need {list(source.shape)}'
            )
    known = set(used.values())
    problems += [
        f'{name!r} is not part of this model'
        for key, name in by_key.items()
        if name not in known and not ignored(key)
    ]
    if problems:
        more = f'; and {len(problems) - SHOWN} more' if len(problems) > SHOWN else ''
        raise ConfigError(
            f'weights {where} do not fit the config: {"; ".join(problems[:SHOWN])}{more}; '
            'give a checkpoint of this family and these sizes'
        )
    return used


Rows = TypeVar('Rows', bound=Tensor | Nvfp4Weight, covariant=True)


class PieceReader(Protocol[Rows]):
    """What gives a stored tensor piece by piece: (first row, rows), in order."""

    def pieces(self, name: str) -> Iterator[tuple[int, Rows]]: ...


def read_rows(
    target: Target, names: Mapping[str, str], reader: PieceReader[Rows], dtype: torch.dtype
) -> Iterator[tuple[slice | Tensor, Tensor | Rows]]:
    """Give (where, rows) of one target piece by piece: a slice or int64 indices of its rows.

    The sources' rows lie one below the other, as ``dtype`` on the CPU; one piece is held. Rows in
    NVFP4 are given as they are.

    :raises ConfigError: a tensor that is not floating point (quantised, say), or not finite.
    """
    top = 0
    for source in target.sources:
        name = names[source.key]
        for row, stored in reader.pieces(name):
            part: Tensor | Rows = stored
            if isinstance(stored, Tensor):
                part = _checked(stored, name, dtype)
                if source.permute:
                    part = part.permute(source.permute).flatten(1)
            end = row + (part if isinstance(part, Tensor) else part.data).shape[0]
            if source.groups:
                yield _places(source)[row:end], part
            else:
                yield slice(top + row, top + end), part
        top += source.shape[0]


def read_into(
    target: Target, names: Mapping[str, str], reader: PieceReader[Tensor], into: Tensor
) -> None:
    """Read one target into ``into`` (any device), see ``read_rows``. Any thread."""
    for at, part in read_rows(target, names, reader, into.dtype):
        if isinstance(at, slice):
            into[at].copy_(part)
        else:
            into.index_copy_(0, at.to(into.device), part.to(into.device))


def _places(source: Source) -> Tensor:
    """Return the target's row of each row of a source that comes in groups, int64."""
    count = source.shape[0] // sum(rows for rows, _ in source.groups)
    parts = [
        first + torch.arange(count * rows).view(count, rows) for rows, first in source.groups
    ]
    return torch.cat(parts, 1).flatten()


def _checked(stored: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    if stored.dtype not in STORED:
        raise ConfigError(
            f'weights {name!r} are {stored.dtype}; give a checkpoint in one of '
            f'{[str(dtype) for dtype in STORED]}'
        )
    part = stored.to(dtype)
    if not all(map(torch.isfinite, part.aminmax())):
        raise ConfigError(
            f'weights {name!r} hold NaN or infinity as {dtype}; the checkpoint is damaged or its '
            'training diverged: give another'
        )
    return part


def split_sources(target: Target, tensor: Tensor) -> dict[str, Tensor]:
    """Return a target's tensor cut into its sources by key: the inverse of ``read_into``."""
    found: dict[str, Tensor] = {}
    top = 0
    for source in target.sources:
        rows = source.shape[source.permute[0]] if source.permute else source.shape[0]
        part = tensor[_places(source)] if source.groups else tensor[top : top + rows]
        if source.permute:
            order = source.permute
            part = part.reshape([source.shape[axis] for axis in order])
            part = part.permute([order.index(axis) for axis in range(len(order))])
        found[source.key] = part.reshape(source.shape).contiguous().clone()
        top += rows
    return found
