"""Loading by several threads, given up as soon as somebody asks for it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

LOADERS = 4


def in_parallel(
    names: Sequence[str], work: Callable[[str], object], told: Callable[[int], None]
) -> None:
    """Do ``work`` for each name by a few threads; what it or ``told`` raises ends the rest.

    :param told: is told how many of the names, in their order, are done; on this thread. By
        raising, it gives up: work that has begun is waited for, the rest is not begun.
    """
    with ThreadPoolExecutor(LOADERS, thread_name_prefix='load') as pool:
        # Leaving the loop closes the iterator of map, which cancels what has not begun.
        for done, _ in enumerate(pool.map(work, names), start=1):
            told(done)
