"""What a bench tells while it works."""

import math
import sys
import time


class Clock:
    """A bench's progress on stderr, and its soft limit."""

    def __init__(self, bench: str, limit_s: float = math.inf) -> None:
        self._bench, self._limit_s = bench, limit_s
        self._begin = time.perf_counter()

    @property
    def over(self) -> bool:
        """Whether the limit has passed."""
        return self.elapsed_s > self._limit_s

    @property
    def elapsed_s(self) -> float:
        """Seconds since the bench began."""
        return time.perf_counter() - self._begin

    def say(self, text: str) -> None:
        """Print a line with the seconds since the bench began."""
        print(f'{self._bench} {self.elapsed_s:6.1f} s  {text}', file=sys.stderr, flush=True)
