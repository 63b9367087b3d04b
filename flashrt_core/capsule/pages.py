"""Fixed pages of one arena: any mix of capsules fits while pages are free."""

from __future__ import annotations

import bisect


class PagePool:
    """Which pages of an arena are free, as runs; not thread-safe, the store holds its lock.

    Adjacent pages come first: one run per capsule where possible, so that a copy is one range.
    """

    def __init__(self, count: int, page_bytes: int) -> None:
        self.count = count
        self.page_bytes = page_bytes
        self.free = count
        self._runs: list[tuple[int, int]] = [(0, count)] if count else []

    def pages_for(self, nbytes: int) -> int:
        """Pages that `nbytes` take; at least one."""
        return max(1, -(-nbytes // self.page_bytes))

    def take(self, pages: int) -> list[tuple[int, int]] | None:
        """Runs (first page, pages) that sum up to `pages`, or None where too few are free."""
        if pages > self.free:
            return None
        best: tuple[int, int] | None = None
        for run in self._runs:
            if run[1] >= pages and (best is None or run[1] < best[1]):
                best = run
        if best is not None:
            chosen = [(best[0], pages)]
            self._cut(best, pages)
        else:
            chosen = []
            left = pages
            for run in sorted(self._runs, key=lambda run: -run[1]):
                part = min(run[1], left)
                self._cut(run, part)
                chosen.append((run[0], part))
                left -= part
                if not left:
                    break
        self.free -= pages
        return chosen

    def give(self, runs: list[tuple[int, int]]) -> None:
        """Return runs; neighbours are merged."""
        for run in runs:
            at = bisect.bisect(self._runs, run)
            self._runs.insert(at, run)
            self.free += run[1]
            self._merge(at)
            if at:
                self._merge(at - 1)

    def _cut(self, run: tuple[int, int], pages: int) -> None:
        at = self._runs.index(run)
        start, length = run
        if pages == length:
            del self._runs[at]
        else:
            self._runs[at] = (start + pages, length - pages)

    def _merge(self, at: int) -> None:
        if at + 1 < len(self._runs):
            (start, length), (other, more) = self._runs[at], self._runs[at + 1]
            if start + length == other:
                self._runs[at : at + 2] = [(start, length + more)]
