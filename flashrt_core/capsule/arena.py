"""The memory tiers: one arena of fixed pages each, allocated once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..errors import ConfigError
from ..runtime import Backend
from .pages import PagePool

MIN_PAGE_BYTES = 1 << 16
READ_BYTES = 16 << 20


@dataclass(frozen=True)
class Place:
    """Where a capsule lies in an arena: runs of (first page, pages)."""

    tier: str
    runs: tuple[tuple[int, int], ...]
    nbytes: int

    @property
    def pages(self) -> int:
        """Pages held."""
        return sum(pages for _, pages in self.runs)


class Arena:
    """One tier of pages; the store's lock guards `take` and `give`.

    :param host: host memory, pinned on cuda; only such an arena can be read and written by files.
    :raises ConfigError: a page size that is no multiple of 64 KiB, or a negative budget.
    :raises OutOfMemory: the budget does not fit; says asked, free and who holds the rest.
    """

    def __init__(
        self, backend: Backend, tier: str, budget_bytes: int, page_bytes: int, host: bool
    ) -> None:
        whole = isinstance(page_bytes, int) and isinstance(budget_bytes, int)
        if not whole or page_bytes < MIN_PAGE_BYTES or page_bytes % MIN_PAGE_BYTES or (
            budget_bytes < 0
        ):
            raise ConfigError(
                f'{tier} tier: page_bytes {page_bytes!r}, budget {budget_bytes!r} refused: '
                f'pages are multiples of {MIN_PAGE_BYTES} bytes and a budget is a whole number of '
                'bytes, not negative'
            )
        self.name = f'capsules ({tier} tier)'
        self.tier = tier
        self.host = host
        self.page_bytes = page_bytes
        count = budget_bytes // page_bytes
        self.nbytes = count * page_bytes
        self.pool = PagePool(count, page_bytes)
        self._memory = backend.empty((self.nbytes,), torch.uint8, host=host)
        self._flat = self._memory.numpy() if host or backend.name == 'cpu' else None
        self._base = self._memory.data_ptr() if count else 0
        backend.register(self)

    def take(self, nbytes: int) -> Place | None:
        """Pages for `nbytes`, or None where too few are free."""
        runs = self.pool.take(self.pool.pages_for(nbytes))
        return None if runs is None else Place(self.tier, tuple(runs), nbytes)

    def give(self, place: Place) -> None:
        """Return a place's pages."""
        self.pool.give(list(place.runs))

    def segments(self, place: Place) -> list[tuple[int, int, int]]:
        """(packed position, address, bytes) of a place, in packed order."""
        found, at = [], 0
        for start, pages in place.runs:
            size = pages * self.page_bytes
            found.append((at, self._base + start * self.page_bytes, size))
            at += size
        return found

    def views(self, place: Place) -> list[memoryview]:
        """Host memory of a place, `place.nbytes` in all; only for a host arena."""
        assert self._flat is not None
        whole = self._flat.data
        found, left = [], place.nbytes
        for start, pages in place.runs:
            begin = start * self.page_bytes
            size = min(pages * self.page_bytes, left)
            found.append(whole[begin : begin + size])
            left -= size
        return found

    def read(self, place: Place, begin: int, end: int) -> Iterator[memoryview]:
        """Bytes [begin, end) of a place's packed form, copied to the host in pieces of 16 MiB."""
        at = 0
        for start, pages in place.runs:
            size = pages * self.page_bytes
            low, high = max(begin - at, 0), min(end - at, size)
            for here in range(low, high, READ_BYTES):
                first = start * self.page_bytes + here
                piece = self._memory[first : first + min(READ_BYTES, high - here)]
                yield piece.cpu().numpy().data
            at += size
