"""The capsule bench runs and reports every tier."""
from __future__ import annotations

import json
from pathlib import Path

import pytest

from flashrt_core.bench.__main__ import main


@pytest.mark.slow
def test_the_quick_bench_reports_every_tier_beside_its_floor(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    disk = tmp_path / 'disk'
    disk.mkdir()
    assert main(['capsule', '--quick', '--device', 'cpu', '--disk', str(disk),
                 '--out', str(tmp_path)]) == 0
    assert 'restore gpu' in capsys.readouterr().out
    (path,) = tmp_path.glob('capsule-*.json')
    report = json.loads(path.read_text())
    rows = {row['what']: row for row in report['rows']}
    assert set(rows) == {'snapshot gpu', 'restore gpu', 'reset gpu', 'snapshot host',
                         'restore host', 'save disk', 'load disk warm', 'load disk cold'}
    assert all(row['floor_us'] > 0 and row['p50_us'] > 0 for row in rows.values())
    assert 'allocator statistics unchanged' in ' '.join(report['notes'])
    assert list(disk.iterdir()) == []
