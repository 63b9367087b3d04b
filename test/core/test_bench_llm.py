"""The LLM bench: every table on the CPU, what the limit cuts off, what a failure leaves."""
from __future__ import annotations

from argparse import ArgumentParser
from argparse import Namespace
import gc
import json
from pathlib import Path
from typing import Any
import weakref

import pytest

from flashrt_core.bench import _llm_reuse
from flashrt_core.bench import llm
from flashrt_core.bench import Report
from flashrt_core.bench.__main__ import main
from flashrt_core.bench._llm_setup import bound
from flashrt_core.bench._llm_setup import budgets
from flashrt_core.bench._llm_setup import configure
from flashrt_core.bench._llm_setup import Rig
from flashrt_core.bench._llm_work import Ceilings
from flashrt_core.bench._llm_work import Sizes
from flashrt_core.bench._progress import Clock
from flashrt_core.errors import OutOfMemory
from flashrt_core.planners import bind
from flashrt_core.planners.qwen3_5 import model
from flashrt_core.planners.qwen3_5 import NAMED
from flashrt_core.planners.session import PlannerSession
from flashrt_core.runtime import cpu_backend
from flashrt_core.runtime import Kind

TINY = ['--config', 'qwen3_5_tiny', '--device', 'cpu', '--lengths', '24', '40', '--repeats', '2',
        '--branches', '2', '--drafts', '2', '--contexts', '2', '--suffix', '8',
        '--decode-tokens', '6']
CEILINGS = Ceilings(1e12, 1e12, 1e12, 1e12)


def measured(tmp_path: Path, *more: str) -> list[dict[str, Any]]:
    assert main(['llm', *TINY, *more, '--out', str(tmp_path)]) == 0
    (path,) = tmp_path.glob('llm-*.json')
    rows: list[dict[str, Any]] = json.loads(path.read_text())['rows']
    path.unlink()
    return rows


def arguments(*more: str) -> Namespace:
    parser = ArgumentParser()
    llm.add_arguments(parser)
    found = parser.parse_args([*TINY, *more])
    llm.check(found)
    return found


@pytest.fixture(scope='module')
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return measured(tmp_path_factory.mktemp('llm'))


def of(rows: list[dict[str, Any]], table: str) -> list[dict[str, Any]]:
    return [row for row in rows if row['table'] == table]


def test_every_table_has_its_rows_and_none_an_error(rows):
    assert [row for row in rows if 'error' in row] == []
    assert {row['table'] for row in rows} == set(llm.TABLES)


def test_cold_and_each_tier_stand_beside_their_floor_with_and_without_mtp(rows):
    found = of(rows, 'ttft')
    assert [(r['mtp'], r['length'], r['path']) for r in found] == [
        *((True, n, path) for n in (24, 40) for path in ('cold', 'gpu', 'host', 'host, in turn')),
        *((False, n, path) for n in (24, 40) for path in ('cold', 'gpu'))]
    for row in found:
        assert 0 < row['floor_ms'] and row['p50_ms'] <= row['p99_ms']
        cold = next(r for r in found if (r['mtp'], r['length']) == (row['mtp'], row['length']))
        assert row['cold_mfu'] == cold['cold_mfu'] > 0
        assert row['speedup'] == cold['p50_ms'] / row['p50_ms']


def test_the_disk_stands_beside_its_raw_read(rows):
    assert [row['length'] for row in of(rows, 'disk')] == [24, 40]
    for row in of(rows, 'disk'):
        best = row['raw_read_ms'] + row['append_ms'] + row['token_ms']
        assert row['raw_gb_s'] > 0 and row['over_raw'] == pytest.approx(row['p50_ms'] / best)


def test_the_sizes_are_the_arithmetic_and_mtp_is_a_part_of_its_own(rows):
    with_mtp, without = of(rows, 'sizes')[:2], of(rows, 'sizes')[2:]
    for row in (*with_mtp, *without):
        assert row['ratio'] == 1.0
        parts = ('kv_mb', 'mtp_kv_mb', 'recurrent_mb', 'conv_mb', 'rest_mb')
        assert sum(row[part] for part in parts) == pytest.approx(row['capsule_mb'])
    for a, b in zip(with_mtp, without, strict=True):
        # A grammar's history has 4 bytes a token of the context, which drafts lengthen by 64.
        longer = a['rest_mb'] - b['rest_mb']
        assert longer in (0.0, pytest.approx(64 * 4 / 1e6))
        assert a['capsule_mb'] - b['capsule_mb'] - longer == pytest.approx(a['mtp_kv_mb'])
        assert b['mtp_kv_mb'] == 0.0


def test_a_complete_restore_changes_nothing_and_each_part_left_out_does(rows):
    everything, *parts = of(rows, 'ablation')
    assert everything['diverging'] == 0 and everything['logit_max_difference'] == 0.0
    assert everything['first_divergence'] is None
    assert len(parts) == 4
    for row in parts:
        assert row['diverging'] > 0 and row['logit_max_difference'] > 0.01, row['restored']


def test_given_drafts_are_all_accepted_and_no_draft_changes_a_token(rows):
    found = of(rows, 'decode')
    assert [(r['drafts'], r['K']) for r in found] == [('none', 0), ('MTP', 2), ('given', 2)]
    assert all(row['same_tokens'] for row in found)
    assert found[2]['acceptance'] == 1.0 and found[2]['tokens_per_step'] == 3.0


def test_working_set_and_fork_stand_beside_one(rows):
    assert [r['contexts'] for r in of(rows, 'working_set')] == [1, 2]
    assert of(rows, 'working_set')[0]['ratio'] == 1.0
    assert [(r['length'], r['branches']) for r in of(rows, 'fork')] == [
        (n, b) for n in (24, 40) for b in (0, 1, 2)]


def test_the_memory_of_every_part_is_the_arithmetic(rows):
    measured = [row for row in of(rows, 'memory') if row['ratio'] is not None]
    assert len(measured) == 5
    assert all(0.95 <= row['ratio'] <= 1.05 for row in measured)


def test_the_logits_of_a_precision_stand_beside_those_of_none(tmp_path):
    rows = measured(tmp_path, '--precision', 'fp8', '--tables', 'precision', 'memory')
    found = of(rows, 'precision')
    assert [(r['precision'], r['against'], r['path']) for r in found] == [
        ('fp8', 'bf16', path) for path in ('prefill', 'append', 'decode')]
    assert all(0.5 < r['cosine_worst'] <= r['cosine_median'] < 1.0 for r in found)
    assert of(rows, 'memory')[0]['ratio'] == 1.0 and of(rows, 'memory')[0]['measured_mb'] < 0.6


def test_what_the_limit_cuts_off_is_listed(tmp_path):
    rows = measured(tmp_path, '--limit-s', '0', '--tables', 'sizes', 'decode', 'mtp_tail')
    assert {(r['table'], r['error']) for r in rows} == {
        (table, 'not run: past --limit-s') for table in ('sizes', 'decode', 'mtp_tail')}
    assert [r['length'] for r in of(rows, 'sizes')] == [24, 40]


def test_a_failure_leaves_its_error_and_the_other_tables(tmp_path, monkeypatch):
    def broken(*given: object) -> None:
        raise RuntimeError('the disk is gone')

    monkeypatch.setattr(_llm_reuse, '_from_disk', broken)
    monkeypatch.setitem(llm.TABLES, 'fork', broken)
    rows = measured(tmp_path, '--tables', 'ttft', 'fork', 'sizes', 'disk', '--lengths', '24')
    errors = [row for row in rows if 'error' in row]
    assert [(r['table'], r.get('path')) for r in errors] == [('fork', None), ('disk', 'disk')]
    assert all('the disk is gone' in row['error'] for row in errors)
    assert [r['path'] for r in of(rows, 'ttft')] == ['cold', 'gpu', 'host', 'host, in turn']
    assert len(of(rows, 'sizes')) == 1


def test_a_device_lost_at_the_end_leaves_what_was_measured(tmp_path, monkeypatch):
    close = PlannerSession.close

    def lost(self: PlannerSession) -> None:
        close(self)
        raise RuntimeError('the device is lost')

    monkeypatch.setattr(PlannerSession, 'close', lost)
    rows = measured(tmp_path, '--tables', 'sizes')
    assert [(r['table'], r.get('error')) for r in rows] == [
        ('sizes', None), ('sizes', None), ('session', 'RuntimeError: the device is lost')]


def test_a_model_that_does_not_fit_is_refused_before_anything_is_measured(
        tmp_path, capsys, monkeypatch):
    def refuse(*given: object, **named: object) -> None:
        raise OutOfMemory('too large')

    monkeypatch.setattr(bind, 'BufferSet', refuse)
    assert main(['llm', *TINY, '--out', str(tmp_path)]) == 1
    assert 'too large' in capsys.readouterr().err


@pytest.mark.parametrize('given, said', [
    (['--repeats', '0'], 'repeats is 0'), (['--lengths', '1'], 'lengths are'),
    (['--drafts', '0'], 'drafts are'), (['--config', 'nowhere'], 'nowhere')])
def test_options_that_measure_nothing_are_refused(given, said, tmp_path, capsys):
    assert main(['llm', *TINY, *given, '--out', str(tmp_path)]) == 1
    assert said in capsys.readouterr().err


def test_nothing_of_a_session_is_held_when_the_next_one_is_bound():
    rig = Rig(arguments(), Report('llm'), Clock('llm', 60.0), cpu_backend(), CEILINGS)
    with bound(rig) as bench:
        held = weakref.ref(bench.session), weakref.ref(bench.gpu)
    del bench
    gc.collect()
    assert [reference() for reference in held] == [None, None]


def test_the_floors_at_27b_are_those_of_the_published_sizes():
    c, _ = configure(llm_arguments('27b'))
    sizes = Sizes(c, model.weight_specs(c))
    short, long = sizes.tokens(0, 2048), sizes.first_token(0, 16384)
    assert short.products == pytest.approx(99.7e12, rel=0.01)
    assert short.flops == pytest.approx(0.8e12 + 0.7e12, rel=0.03)
    assert long.products == pytest.approx(798e12, rel=0.01)
    assert long.flops == pytest.approx(52.8e12 + 5.6e12, rel=0.03)
    assert sizes.step(2048).bytes == pytest.approx(51.24e9 + 0.44e9, rel=0.01)
    assert sizes.kv_token == 65536 and sizes.mtp_token == 4096
    assert sizes.recurrent == pytest.approx(151.0e6, rel=0.001)
    assert sizes.capsule(2048) == pytest.approx(297e6, rel=0.005)
    assert sizes.weights == pytest.approx(54.6e9, rel=0.01)


def test_the_27b_at_16k_and_all_that_is_kept_of_it_fits_one_gpu_of_140_gb():
    given = llm_arguments('27b')
    c, s = configure(given)
    sizes = Sizes(c, model.weight_specs(c))
    held, host = budgets(given, sizes)
    total = sizes.weights + sizes.state() + 3 * sizes.small + sizes.branches(s) + held
    assert total < 75e9 and host < 2e9
    longest = [sizes.capsule(n) for n in given.lengths]
    assert held > sum(longest) + 20 * longest[0]


def llm_arguments(config: str) -> Namespace:
    parser = ArgumentParser()
    llm.add_arguments(parser)
    found = parser.parse_args(['--config', config])
    llm.check(found)
    return found


def test_a_session_is_bound_with_room_for_what_the_tables_do():
    c, s = configure(llm_arguments('qwen3_5_27b'))
    assert c.vocab == NAMED['27b'][0].vocab and c.tokenizer == ''
    assert c.context >= 16384 + 64 + 64 and s.tail_tokens >= 65 and s.draft_tokens == 4
    without, _ = configure(llm_arguments('27b'), mtp=False)
    assert not any(spec.name == 'mtp.kv' for spec in model.state_specs(without))
    assert any(spec.kind is Kind.KV for spec in model.state_specs(without))


@pytest.mark.gpu
def test_the_tables_run_at_real_layer_sizes_on_the_gpu(tmp_path):
    assert main(['llm', '--config', '0.8b', '--lengths', '512', '1024', '--repeats', '3',
                 '--contexts', '2', '--out', str(tmp_path)]) == 0
    (path,) = tmp_path.glob('llm-*.json')
    rows = json.loads(path.read_text())['rows']
    assert [row for row in rows if 'error' in row] == []
    assert of(rows, 'ablation')[0]['diverging'] == 0
    assert all(row['same_tokens'] for row in of(rows, 'decode'))
