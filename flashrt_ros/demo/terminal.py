"""Progress in the terminal: a live line and a panel per stage on a tty, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
import re
import shutil
import sys
import time
from typing import TextIO

_COLOUR = re.compile(r'(\x1b\[[0-9;]*m)')
_CLEAR = '\r\x1b[J'  # to the end of the screen, so a panel below goes too


def _no_panel() -> Sequence[str]:
    return ()


def cut(line: str, columns: int) -> str:
    """Return what of a line fits, its colours kept, so that it never wraps."""
    kept, room = [], columns
    for part in _COLOUR.split(line):
        is_colour = part.startswith('\x1b')
        kept.append(part if is_colour else part[:room])
        room -= 0 if is_colour else len(kept[-1])
    return ''.join(kept)


class Terminal:
    """Writes stages as they begin, move and end. Main thread only."""

    def __init__(self, out: TextIO | None = None, *, live: bool | None = None) -> None:
        """Write to ``out`` (standard output); ``live`` redraws the line and colours it."""
        self._out = out or sys.stdout
        self._live = self._out.isatty() if live is None else live
        self._stage = ''
        self._stage_began = self._began = time.monotonic()
        self._drawn = 0.0

    def _style(self, code: str, text: str) -> str:
        return f'\x1b[{code}m{text}\x1b[0m' if self._live else text

    def line(self, text: str = '') -> None:
        """Write one line that stays."""
        print(text, file=self._out, flush=True)

    def title(self, text: str) -> None:
        """Write a heading."""
        self.line(self._style('1', text))

    def note(self, text: str) -> None:
        """Write a remark that must not be overlooked."""
        self.line(self._style('33', text))

    def stage(self, name: str) -> None:
        """Begin a stage."""
        self._stage, self._stage_began, self._drawn = name, time.monotonic(), 0.0
        if self._live:
            self._out.write(f'{_CLEAR}  {self._style("36", "...")} {name}')
            self._out.flush()

    def progress(self, done: int, total: int, text: str = '',
                 panel: Callable[[], Sequence[str]] = _no_panel) -> None:
        """Move the bar of the stage; drawn at most 12 times a second, on a tty only.

        :param panel: gives the lines below the bar; asked when they are drawn.
        """
        now = time.monotonic()
        if not self._live or (now - self._drawn < 0.08 and done < total):
            return
        self._drawn = now
        width = 24
        filled = width * done // max(1, total)
        bar = '█' * filled + '░' * (width - filled)
        body = f'  {self._style("36", "...")} {self._stage:<30} {bar} {done}/{total} {text}'
        columns, rows = shutil.get_terminal_size()
        lines = list(panel())[: max(0, rows - 2)] if columns >= 80 else []
        below = ''.join(f'\n{cut(line, columns)}' for line in lines)
        back = f'\x1b[{len(lines)}A' if lines else ''
        self._out.write(_CLEAR + body[: columns + 9] + below + back)
        self._out.flush()

    def done(self, text: str = '', *, good: bool = True) -> None:
        """End the stage with what came of it."""
        seconds = time.monotonic() - self._stage_began
        mark = self._style('32', 'ok ') if good else self._style('1;31', 'BAD')
        begin = _CLEAR if self._live else ''
        self._out.write(f'{begin}  {mark} {self._stage:<30} {text}  ({seconds:.1f} s)\n')
        self._out.flush()
        self._stage = ''

    def error(self, text: str) -> None:
        """End whatever runs with an error."""
        begin = _CLEAR if self._live and self._stage else ''
        self._out.write(begin + self._style('1;31', 'error: ') + text + '\n')
        self._out.flush()
        self._stage = ''

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._began
