"""Samples made by other processes while a training goes on: the expert's, or the policy's own.

What the pool gets done depends on how fast it is, so a training that takes from it is not the same
twice; it says how much it took.
"""

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED
from concurrent.futures import Future
from concurrent.futures import wait
import itertools
from pathlib import Path
import threading

import numpy as np
from numpy.typing import NDArray

from flashrt_core.tabletop import dataset
from flashrt_core.tabletop.driver import Driver
from flashrt_core.tabletop.driver import one_thread
from flashrt_core.tabletop.workers import make_pool

OWN_SEEDS = 2**30    # first seed of the episodes that the policy itself drives
EXPERT_AMONG = 4     # once the policy drives, one episode of so many stays the expert's

Piece = tuple[dataset.Samples, NDArray[np.uint8]]  # samples and their frames

_driver: tuple[Path, Driver] | None = None


class Producer:
    """Records episodes without end until closed. Any thread.

    :param size: width and height of the frames. :param workers: processes.
    ``episodes``: finished ones so far, of the expert and of the policy.
    """

    def __init__(self, workers: int, size: int) -> None:
        self._size, self._policy = size, ''
        self._pool = make_pool(workers, one_thread)
        self._ready: list[Piece] = []
        self._lock = threading.Lock()
        self._closed = False
        self._expert, self._own = itertools.count(0), itertools.count(OWN_SEEDS)
        self.episodes = {'expert': 0, 'own': 0}
        self._thread = threading.Thread(target=self._work, args=(2 * workers,), daemon=True)
        self._thread.start()

    def drive(self, config: Path) -> None:
        """Have the policy of that config drive most of the episodes begun from now on."""
        self._policy = str(config)

    def take(self) -> list[Piece]:
        """Return what was finished since the last call."""
        with self._lock:
            ready, self._ready = self._ready, []
        return ready

    def close(self) -> None:
        """Stop; episodes that run are thrown away."""
        self._closed = True
        self._thread.join()
        self._pool.shutdown(cancel_futures=True)

    def _work(self, ahead: int) -> None:
        running: dict[Future[Piece], str] = {}
        kinds = self._kinds()
        try:
            while not self._closed:
                while len(running) < ahead:
                    kind = next(kinds)
                    seed = next(self._own if kind == 'own' else self._expert)
                    policy = self._policy if kind == 'own' else ''
                    running[self._pool.submit(produce, seed, self._size, policy)] = kind
                for future in wait(running, 0.2, FIRST_COMPLETED).done:
                    self.episodes[running.pop(future)] += 1
                    with self._lock:
                        self._ready.append(future.result())
        except Exception as error:
            # What was made before serves on; the training is worth more than the pool.
            print(f'no more samples are made: {error!r:.300}', flush=True)
        for future in running:
            future.cancel()

    def _kinds(self) -> Iterator[str]:
        for number in itertools.count():
            yield 'own' if self._policy and number % EXPERT_AMONG else 'expert'


def produce(seed: int, size: int, policy: str = '') -> Piece:
    """Record one episode and draw it; ``policy`` is the config of who drives, '' the expert."""
    global _driver
    if not policy:
        samples = dataset.episode(seed)
    else:
        if _driver is None or _driver[0] != Path(policy):
            if _driver is not None:
                _driver[1].close()
            _driver = Path(policy), Driver(Path(policy))
        _driver[1].reset(seed)
        samples = dataset.episode(seed, _driver[1].act)
    return samples, dataset.draw_frames(samples.states, size)
