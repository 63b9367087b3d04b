"""Episodes that the policy drives and the expert labels (DAgger), in processes of their own."""

from collections.abc import Callable
from pathlib import Path

from flashrt_core.tabletop.dataset import episode
from flashrt_core.tabletop.dataset import join
from flashrt_core.tabletop.dataset import Samples
from flashrt_core.tabletop.driver import Driver
from flashrt_core.tabletop.driver import one_thread
from flashrt_core.tabletop.workers import pool

_driver: Driver | None = None


def roll_out(config: Path, first: int, episodes: int, workers: int,
             done: Callable[[int], None]) -> Samples:
    """Record ``episodes`` from seed ``first`` on, on the CPU, one policy a process."""
    parts = []
    with pool(workers, _bind, config) as processes:
        seeds = range(first, first + episodes)
        for count, part in enumerate(processes.map(_episode, seeds), start=1):
            parts.append(part)
            done(count)
    return join(parts)


def _bind(config: Path) -> None:
    global _driver
    one_thread()
    _driver = Driver(config)


def _episode(seed: int) -> Samples:
    assert _driver is not None
    _driver.reset(seed)
    return episode(seed, _driver.act)
