"""What a cold boot tells the log: its stages as they go on, how long each took, the self-check.

Free of ROS; one boot a log. Compiled kernels are kept by Triton on disk, so that a second boot
compiles nothing: ``kernel_cache`` says where.
"""

from collections.abc import Callable
import time

from flashrt_core.kernels import _triton

PERIOD_S = 5.0  # between two lines about one stage


class BootLog:
    """Takes a session's progress and puts it into sentences; any thread, one at a time."""

    def __init__(
        self, say: Callable[[str], None], now_s: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin.

        :param say: writes a line. :param now_s: steady time.
        """
        self._say, self._now_s = say, now_s
        self._stage = ''
        self._begun = self._stage_begun = self._said = now_s()
        self._took: dict[str, float] = {}
        self._checked = dict(_triton.check_seconds())
        _triton.watchers.add(self)

    def told(self, stage: str, fraction: float) -> None:
        """Note how far a stage is; the first word about one ends the one before.

        :param stage: in words, 'loading'. :param fraction: of it that is done, 0 to 1.
        """
        now = self._now_s()
        if stage != self._stage:
            self._end_stage(now)
            self._stage, self._stage_begun, self._said = stage, now, now
        else:
            self._at_times(f'{fraction:.0%}')

    def kernel_checked(self, name: str) -> None:
        """Take the name of a kernel that was compiled and checked during a stage."""
        if self._stage:
            count = len(_triton.check_seconds().keys() - self._checked.keys())
            self._at_times(f'{count} kernels compiled and checked, {name} the last,')

    def _at_times(self, how_far: str) -> None:
        now = self._now_s()
        if now - self._said >= PERIOD_S:
            self._said = now
            self._say(f'{self._stage}: {how_far} after {now - self._stage_begun:.0f} s')

    def ended(self) -> str:
        """Return how long each stage took, the last one ending now, and what the kernels said."""
        now = self._now_s()
        self._end_stage(now)
        self._stage = ''
        parts = [f'{stage} {took:.1f} s' for stage, took in self._took.items()]
        rest = now - self._begun - sum(self._took.values())
        return ', '.join([*parts, f'the rest {max(rest, 0.0):.1f} s']) + self._kernels()

    def _end_stage(self, now: float) -> None:
        if self._stage:
            took = now - self._stage_begun
            self._took[self._stage] = self._took.get(self._stage, 0.0) + took
            self._say(f'{self._stage} took {took:.1f} s')

    def _kernels(self) -> str:
        checked = {name: took for name, took in _triton.check_seconds().items()
                   if name not in self._checked}
        if not checked:
            return ''
        choices = _triton.choices()
        plain = [f'{name} ({choices[name]})' for name in checked if choices[name] != 'triton']
        return (
            f'; among it the self-check of {len(checked)} kernels, {sum(checked.values()):.1f} s '
            f'with their compilation, kept in {_triton.kernel_cache()}'
            + (f'; not used: {", ".join(plain)}' if plain else ''))
