"""Reports of benches: rows and notes, as a table and as JSON."""
from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from datetime import datetime
from datetime import UTC
import json
from pathlib import Path

import numpy as np

from flashrt_core.bench._machine import describe
from flashrt_core.bench._machine import one_line

PERCENTS = {'p50': 50.0, 'p90': 90.0, 'p99': 99.0, 'p99_9': 99.9}
TABLE = 'table'  # the column that names a row's table
Cell = str | int | float | bool | None


def percentiles(values: Iterable[float]) -> dict[str, float]:
    """
    Return n, min, p50, p90, p99, p99_9, max and mean of ``values``, in their unit.

    No value is interpolated: each percentile is a sample (the next higher one).

    :raises ValueError: no values.
    """
    samples = np.sort(np.fromiter(values, np.float64))
    if not len(samples):
        raise ValueError('percentiles of no values; measure at least one')
    chosen = np.percentile(samples, list(PERCENTS.values()), method='higher')
    return {'n': len(samples), 'min': float(samples[0]),
            **dict(zip(PERCENTS, chosen.tolist())),
            'max': float(samples[-1]), 'mean': float(samples.mean())}


@dataclass
class Report:
    """
    The result of a bench.

    ``rows`` are mappings with the same keys in the order of the table's columns; a column's name
    ends in its unit (``restore_p50_us``). Rows that name a ``table`` are printed under that name,
    with columns of their own. ``notes`` are sentences below; ``details`` goes into the JSON only
    (raw samples, parameters).
    """

    name: str
    rows: list[Mapping[str, Cell]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    details: dict[str, object] = field(default_factory=dict)
    machine: dict[str, object] = field(default_factory=describe)
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat('T', 'seconds'))

    def add(self, **row: Cell) -> None:
        """Append a row."""
        self.rows.append(row)

    def table(self) -> str:
        """Return the report for a terminal."""
        lines = [f'{self.name}  {self.date}  {one_line(self.machine)}']
        for name in dict.fromkeys(row.get(TABLE) for row in self.rows):
            lines += ['', *([] if name is None else [f'[{name}]']), *self.lines(name)]
        return '\n'.join([*lines, *([''] if self.notes else []), *self.notes])

    def lines(self, table: Cell = None) -> list[str]:
        """Return the rows of one table, aligned, below their column names."""
        rows = [row for row in self.rows if row.get(TABLE) == table]
        columns = [name for name in dict.fromkeys(n for row in rows for n in row) if name != TABLE]
        cells = [columns] + [[_text(row.get(c)) for c in columns] for row in rows]
        widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
        aligned = ['  '.join(cell.rjust(w) for cell, w in zip(row, widths)).rstrip()
                   for row in cells]
        return [aligned[0], '  '.join('-' * w for w in widths), *aligned[1:]]

    def write(self, path: Path, command: Sequence[str]) -> None:
        """Write the JSON file, with the command that made it."""
        content = {
            'bench': self.name, 'date': self.date, 'command': ' '.join(command),
            'machine': self.machine, 'rows': [dict(row) for row in self.rows],
            'notes': self.notes, 'details': self.details,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2) + '\n', encoding='utf-8')


def _text(cell: Cell) -> str:
    if cell is None:
        return '-'
    if isinstance(cell, float):
        return f'{cell:.4g}' if abs(cell) < 1000 else f'{cell:.0f}'
    return str(cell)
