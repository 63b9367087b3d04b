"""The VLA bench runs on the CPU and reports every segment beside its floor."""
from __future__ import annotations

from dataclasses import replace
import json
from pathlib import Path

import pytest

from flashrt_core.bench.__main__ import main
from flashrt_core.bench.vla import base_of
from flashrt_core.bench.vla import count
from flashrt_core.policies.pi0.config import PI0
from flashrt_core.policies.pi0.config import PI05


def test_the_bench_reports_segments_floor_and_cosine_for_each_number_of_views(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(['vla', '--config', 'tiny', '--device', 'cpu', '--views', '1', '2', '--repeats',
                 '3', '--prompt', '8', '--reference', 'eager', '--variants', '--out',
                 str(tmp_path)]) == 0
    shown, progress = capsys.readouterr()
    assert all(f'2 views, float32: {part}' in progress for part in ('bind', '3 ticks', 'guided'))
    assert 'denoise_ms' in shown and 'over 0 T' not in shown  # a CPU has its ceilings, too
    (path,) = tmp_path.glob('vla-*.json')
    every = json.loads(path.read_text())['rows']
    rows = [row for row in every if 'table' not in row]
    assert [row['views'] for row in rows] == [1, 2]
    assert {row['table'] for row in every if 'table' in row} == {
        f'{table}, {n} views' for table in ('ticks', 'state', 'variants') for n in (1, 2)}
    assert all(row['exact'] for row in every if 'exact' in row)
    assert sum('exact' in row for row in every) == 16
    for row in rows:
        assert row['cosine'] > 0.999999 and row['forward'] == 'model'
        assert all(row[f'{name}_ms'] > 0 for name in (
            'vision', 'prefix', 'denoise', 'floor', 'transformers_eager'))


def test_the_bench_runs_pi05_whose_state_is_part_of_its_language(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(['vla', '--config', 'pi05_tiny', '--device', 'cpu', '--views', '1', '--repeats',
                 '2', '--prompt', '40', '--out', str(tmp_path)]) == 0
    capsys.readouterr()
    (path,) = tmp_path.glob('vla-*.json')
    row = json.loads(path.read_text())['rows'][0]
    assert row['cosine'] > 0.999999 and row['forward'] == 'pi05'


def test_precisions_are_compared_on_the_same_weights_and_inputs(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(['vla', '--config', 'tiny', '--device', 'cpu', '--views', '1', '--repeats', '2',
                 '--prompt', '8', '--precision', 'fp8', 'bf16', '--out', str(tmp_path)]) == 0
    capsys.readouterr()
    (path,) = tmp_path.glob('vla-*.json')
    plain, packed = [row for row in json.loads(path.read_text())['rows'] if 'table' not in row]
    assert [plain['precision'], packed['precision']] == ['bf16', 'fp8']
    assert plain['cosine_bf16'] == pytest.approx(1) and plain['error_of_bf16'] == 1
    assert 0.995 < packed['cosine_float32'] < plain['cosine_float32'] and packed['cosine'] > 0.9999
    assert packed['error_of_bf16'] > 2 and packed['weights_gb'] < plain['weights_gb']


def test_the_published_prompts_are_the_default():
    assert base_of(PI0, 0).text_tokens == 48 and base_of(PI05, 0).text_tokens == 200


def test_the_work_of_one_tick_is_what_the_sizes_say():
    three = count(replace(PI0, prompt_tokens=47, subgoal_tokens=1))
    assert three.vision == pytest.approx(0.66e12, rel=0.03)
    assert three.prefix == pytest.approx(3.15e12, rel=0.03)
    assert three.denoise == pytest.approx(0.38e12, rel=0.03)
    assert three.expert_bytes == pytest.approx(6.23e9 + 10 * 15e6, rel=0.01)


def test_fp8_leaves_the_bytes_of_the_expert_as_they_are():
    assert count(replace(PI0, precision='fp8', scales='x')) == count(PI0)
