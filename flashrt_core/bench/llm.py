"""A hybrid planner at real size: cold against capsule, decode, fork, memory."""
from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

from flashrt_core.bench import _llm_decode
from flashrt_core.bench import _llm_reuse
from flashrt_core.bench._llm_precision import collect
from flashrt_core.bench._llm_precision import compare
from flashrt_core.bench._llm_precision import Logits
from flashrt_core.bench._llm_setup import Bench
from flashrt_core.bench._llm_setup import bound
from flashrt_core.bench._llm_setup import configure
from flashrt_core.bench._llm_setup import NOT_RUN
from flashrt_core.bench._llm_setup import OTHERS
from flashrt_core.bench._llm_setup import Rig
from flashrt_core.bench._llm_work import measure
from flashrt_core.bench._progress import Clock
from flashrt_core.bench._report import Report
from flashrt_core.command_line import number
from flashrt_core.errors import ConfigError
from flashrt_core.kernels import _triton
from flashrt_core.planners.qwen3_5.config import PRECISIONS
from flashrt_core.runtime import pick_backend

# In this order; what the limit cuts off is at the end.
TABLES: dict[str, Callable[[Bench], None]] = {
    'ttft': _llm_reuse.ttft,
    'decode': _llm_decode.decode,
    'fork': _llm_decode.fork,
    'cost': _llm_reuse.cost,
    'working_set': _llm_reuse.working_set,
    'memory': _llm_decode.memory,
    'sizes': _llm_reuse.sizes,
    'ablation': _llm_reuse.ablation,
    'disk': _llm_reuse.disk,
}
WITHOUT_MTP = 'mtp_tail'  # binds a second time
PRECISION = 'precision'   # binds once more, unquantised
PLAIN = 'bf16'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    tables = [*TABLES, WITHOUT_MTP, PRECISION]
    parser.add_argument('--device', choices=('auto', 'cpu', 'cuda'), default='auto')
    parser.add_argument('--config', default='qwen3_5_27b',
                        help='name or file of a Qwen3.5 (default: %(default)s)')
    parser.add_argument('--precision', choices=('', *PRECISIONS), default='',
                        help='of the stored weights (default: as the config says)')
    parser.add_argument('--tables', nargs='+', choices=tables, default=tables)
    parser.add_argument('--lengths', type=int, nargs='+', default=[2048, 4096, 8192, 16384])
    parser.add_argument('--repeats', type=int, default=20)
    parser.add_argument('--suffix', type=int, default=64, help='tokens appended (default 64)')
    parser.add_argument('--contexts', type=int, nargs='+', default=[2, 8, 20],
                        help='revisited in turn (default 2 8 20)')
    parser.add_argument('--decode-tokens', type=int, default=64,
                        help='decoded by decode, fork and ablation (default 64)')
    parser.add_argument('--branches', type=int, default=8, help='of a fork, 0: none (default 8)')
    parser.add_argument('--drafts', type=int, nargs='*', default=[1, 2, 3, 4],
                        help='tokens drafted a step (default 1 2 3 4)')
    parser.add_argument('--disk', type=Path, default=None,
                        help='directory on the disk to measure (default: a temporary one)')
    parser.add_argument('--limit-s', type=number(0), default=float('inf'),
                        help='what has not begun by then is listed as not run')


def run(arguments: argparse.Namespace) -> Report:
    """
    Measure and return the report; a table that fails leaves a row with its error.

    :raises ConfigError: options or model that cannot be measured.
    :raises OutOfMemory: the model does not fit.
    """
    clock = Clock('llm', arguments.limit_s)
    check(arguments)
    backend = pick_backend(arguments.device)
    c, s = configure(arguments)
    report = Report('llm', details={'config': dict(vars(c)), 'settings': vars(s)})
    clock.say('ceilings')
    rig = Rig(arguments, report, clock, backend, measure(backend, c))
    report.details['ceilings'] = vars(rig.ceilings)
    logits: Logits = {}
    chosen = set(arguments.tables)
    if chosen - {WITHOUT_MTP}:
        _keeping(rig, 'session', partial(_as_bound, rig, logits))
    if WITHOUT_MTP in chosen and c.mtp:
        _keeping(rig, WITHOUT_MTP, partial(
            _again, rig, WITHOUT_MTP, '', partial(_without_mtp, -(-arguments.repeats // 4))))
    if logits:
        _keeping(rig, PRECISION, partial(
            _again, rig, PRECISION, PLAIN, partial(compare, c.precision, logits)))
    report.details['kernels'] = _triton.choices()
    report.details['elapsed_s'] = clock.elapsed_s
    report.notes += _notes(rig)
    if WITHOUT_MTP in chosen and not c.mtp:
        report.notes.append(f'{WITHOUT_MTP}: the model has no multi-token head.')
    if PRECISION in chosen and c.precision == PLAIN:
        report.notes.append(f'{PRECISION}: the weights are stored plain, nothing to compare.')
    return report


def check(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for options that measure nothing."""
    for name in ('repeats', 'suffix', 'decode_tokens'):
        if getattr(arguments, name) < 1:
            raise ConfigError(f'{name} is {getattr(arguments, name)}; give at least 1')
    for name, least in (('lengths', 2), ('contexts', 1), ('drafts', 1)):
        if any(value < least for value in getattr(arguments, name)):
            raise ConfigError(f'{name} are {getattr(arguments, name)}; give at least {least} each')
    if arguments.disk is not None and not arguments.disk.is_dir():
        raise ConfigError(f'disk is {arguments.disk}; give a directory that exists')
    arguments.lengths = sorted(set(arguments.lengths))


def take(bench: Bench, name: str, table: Callable[[Bench], None]) -> None:
    """Measure one table and print it at once; what it cannot do stands in its rows."""
    known = len(bench.report.rows)
    try:
        table(bench)
    except Exception as error:  # of what lies between its rows
        bench.report.add(table=name, error=f'{type(error).__name__}: {error}'[:200])
    if len(bench.report.rows) > known:
        tables = dict.fromkeys(row['table'] for row in bench.report.rows[known:])
        for each in tables:
            bench.clock.say('\n'.join([f'[{each}]', *bench.report.lines(each)]))


def _keeping(rig: Rig, name: str, action: Callable[[], None]) -> None:
    """Act; once something was measured, a failure becomes a row, so that the rest is kept."""
    try:
        action()
    except Exception as error:
        if not rig.report.rows:
            raise
        rig.clock.say(f'{name}: {error!r}')
        rig.report.add(table=name, error=f'{type(error).__name__}: {error}'[:200])


def _as_bound(rig: Rig, logits: Logits) -> None:
    """Bind the model as it is and take the tables; a function, so that nothing of it is held."""
    begin = rig.clock.elapsed_s
    with bound(rig) as bench:
        rig.report.details['forward'] = bench.session.boundary.identity.numerics['forward']
        rig.report.details['bind_s'] = rig.clock.elapsed_s - begin
        for name in TABLES:
            if name in rig.arguments.tables:
                take(bench, name, TABLES[name])
        if PRECISION in rig.arguments.tables and bench.c.precision != PLAIN:
            bench.attempt(PRECISION, {'precision': bench.c.precision},
                          partial(collect, logits, bench))


def _again(rig: Rig, name: str, precision: str, table: Callable[[Bench], None]) -> None:
    """Bind once more, without MTP, for one table."""
    if rig.clock.over:
        rig.report.add(table=name, error=NOT_RUN)
        return
    with bound(rig, mtp=False, precision=precision) as bench:
        take(bench, name, table)


def _without_mtp(repeats: int, bench: Bench) -> None:
    """The same visits and sizes as with the multi-token head."""
    _llm_reuse.ttft(bench, ('cold', 'gpu'), repeats)
    _llm_reuse.sizes(bench)


def _notes(rig: Rig) -> list[str]:
    asked, ceilings = {row['table'] for row in rig.report.rows}, rig.ceilings
    notes = {
        'ttft': 'ttft: wall time from host token ids to the first token id on the host, after '
        f'{OTHERS} other contexts ran. cold: prefill and one sample. gpu, host: restore from '
        f'there, append of {rig.arguments.suffix} tokens and one sample; restore, append and '
        'token are medians of the parts (of cold, append is the prefill). host: no page of the '
        'device is free, so nothing is promoted; the copies run beside the append, layer by '
        'layer, so append is only what is left of it when they have ended, and the floor is that '
        f'of the longer one. {_llm_reuse.IN_TURN}: the append begins when the restore has ended. '
        'speedup: of cold of the same length over it; cold_mfu: of that cold path, against the '
        'measured dense rate.',
        'disk': 'disk: as ttft from a file that is not in the page cache; raw_read: the same '
        'file read just before, out of the page cache, too, by one or more threads, whichever '
        'is faster; over_raw: the time over raw read, append and token.',
        'sizes': 'sizes: what a capsule carries; arithmetic from the sizes of the model. mtp: '
        "with the multi-token head, its keys in the capsule and noted by every append ('MTP "
        "tail'), or bound without it.",
        'cost': 'cost: on the lane thread; copy_p50 of a verb from its submission to its end '
        '(host launch included), of an append the device time of its chunks. rollback: to a mark '
        'a few tokens back; small state only. Every restore of this bench also takes a '
        'mark of what it restored.',
        'working_set': 'working_set: contexts restored from the device in turn, each extended '
        'and asked for one token; ratio to one context.',
        'ablation': 'ablation: everything is restored, then buffers are overwritten behind the '
        "API's back, which itself restores all or nothing; greedy tokens and logits after the "
        'appended suffix against those without a restore. The weights are random unless given.',
        'decode': 'decode: one step a call, greedy. given: the right drafts are given, so all '
        'are accepted: the best case of a verification. MTP drafts of random weights are '
        'accepted by chance only. Of the first token, sampled before, nothing is counted.',
        'precision': 'precision: logits of the same weights and tokens, quantised against '
        'not: after a prefill, an append, and a token fed by a decode step.',
        'fork': 'fork: branches 0 is the session itself; over_one against it. All branches '
        'share the KV and have a state and a tail of their own.',
        'memory': 'memory: of the device since before the bind; the driver also counts its '
        'context, code and the pools of the graphs.',
    }
    return [text for name, text in notes.items() if name in asked] + [
        f'floors: products over {ceilings.products / 1e12:.3g} TFLOP/s as their weights are '
        f'stored, other operations over {ceilings.flops / 1e12:.3g} TFLOP/s, bytes over '
        f'{ceilings.bytes / 1e12:.3g} TB/s (a copy, read plus written), host memory over '
        f'{ceilings.host / 1e9:.3g} GB/s, all measured in this run.']
