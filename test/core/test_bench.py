"""The bench harness: percentiles are samples, the table and the JSON say the same."""
from __future__ import annotations

import json
import os
from pathlib import Path
import re
import subprocess

import pytest

from flashrt_core.bench import percentiles
from flashrt_core.bench import Report
from flashrt_core.bench.__main__ import main
from flashrt_core.bench.__main__ import names
from flashrt_core.bench.__main__ import parse


def test_percentiles_are_samples_not_interpolated():
    found = percentiles([4.0, 1.0, 3.0, 2.0])
    assert (found['n'], found['min'], found['max'], found['mean']) == (4, 1.0, 4.0, 2.5)
    assert found['p50'] == 3.0 and found['p99'] == 4.0
    assert percentiles(range(1, 1001))['p99_9'] == 1000


def test_percentiles_of_nothing_are_refused():
    with pytest.raises(ValueError, match='at least one'):
        percentiles([])


def test_a_table_has_every_row_and_the_json_the_same(tmp_path):
    report = Report('made up', machine={'gpu': None, 'processor': 'p', 'cores': 2, 'packages': {}})
    report.add(what='first', p50_us=12.345678)
    report.add(what='second', p50_us=None, extra=True)
    report.notes.append('A note.')
    text = report.table()
    assert '12.35' in text and 'second' in text and 'extra' in text and text.endswith('A note.')
    report.write(tmp_path / 'deep' / 'made.json', ['python', '-m', 'x'])
    content = json.loads((tmp_path / 'deep' / 'made.json').read_text())
    assert content['rows'] == [{'what': 'first', 'p50_us': 12.345678},
                               {'what': 'second', 'p50_us': None, 'extra': True}]
    assert content['command'] == 'python -m x' and content['date'] == report.date


def test_the_runtime_bench_runs_and_names_its_machine(tmp_path, capsys):
    assert 'runtime' in names()
    assert main(['runtime', '--device', 'cpu', '--runs', '5', '--copy-mib', '1',
                 '--out', str(tmp_path)]) == 0
    (path,) = tmp_path.iterdir()
    content = json.loads(path.read_text())
    assert content['machine']['processor'] and content['machine']['packages']['torch']
    assert {row['what'] for row in content['rows']} >= {'call', 'run, 3 segments', 'copy table'}
    assert 'run, 3 segments' in capsys.readouterr().out


def test_an_unknown_bench_is_a_usage_error_that_lists_the_known(capsys):
    with pytest.raises(SystemExit) as caught:
        main(['nothing'])
    assert caught.value.code == 2
    assert 'runtime' in capsys.readouterr().err


@pytest.mark.parametrize(('argv', 'status'), [([], 2), (['--help'], 0)])
def test_without_a_name_the_benches_are_listed(capsys, argv, status):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    told = ''.join(capsys.readouterr())
    assert caught.value.code == status and all(name in told for name in names())


def test_a_refusal_is_one_line_not_a_traceback(tmp_path, capsys, monkeypatch):
    from flashrt_core.bench import runtime
    from flashrt_core.errors import ConfigError

    def refuse(_):
        raise ConfigError('no device here')

    monkeypatch.setattr(runtime, 'run', refuse)
    assert main(['runtime', '--out', str(tmp_path)]) == 1
    assert 'no device here [config_invalid]' in capsys.readouterr().err


def test_the_script_of_all_measurements_gives_commands_that_the_benches_and_pytest_take(tmp_path):
    told, python = tmp_path / 'told', tmp_path / 'python'
    python.write_text(f'#!/bin/sh\necho "$@" >> {told}\n')
    python.chmod(0o755)
    root = Path(__file__).resolve().parents[2]
    script = root / 'scripts/measure_on_gpu.sh'
    stages = re.findall(r'^    (\w+)\)', script.read_text(), re.MULTILINE)
    assert len(stages) > 8 and all(f'#   {stage} ' in script.read_text() for stage in stages)
    arguments = [word for stage in stages for word in (stage, str(tmp_path / 'out'))]
    subprocess.run(['sh', script, *arguments], check=True, env=os.environ | {'PYTHON': python})
    commands = [line.split() for line in told.read_text().splitlines()]
    for _, module, *words in commands:
        if module == 'flashrt_core.bench':
            assert parse(words).name == words[0]
        else:
            assert all((root / word).exists() for word in words if word.startswith('test/'))
    assert {words[2] for words in commands if 'flashrt_core.bench' in words} == {
        'capsule', 'tick', 'reset', 'vla', 'llm', 'bringup'}
    wrong = subprocess.run(['sh', script, 'nonsense', tmp_path], capture_output=True, text=True,
                           check=False)
    assert wrong.returncode == 2 and 'unknown stage nonsense' in wrong.stderr
