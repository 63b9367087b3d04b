"""The planner's kernels one by one at the sizes of a model, each beside its floor; CUDA only.

Products in each precision: of few rows by our kernels, of a chunk with what quantises their rows.
"""
from __future__ import annotations

import argparse
from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product as combinations
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from flashrt_core.bench._kernels_products import Case
from flashrt_core.bench._kernels_products import chunk_products
from flashrt_core.bench._kernels_products import chunk_rows
from flashrt_core.bench._kernels_products import few_products
from flashrt_core.bench._kernels_products import gated
from flashrt_core.bench._kernels_products import label
from flashrt_core.bench._kernels_products import products
from flashrt_core.bench._kernels_products import random
from flashrt_core.bench._kernels_products import ROTATED
from flashrt_core.bench._kernels_products import rotated
from flashrt_core.bench._llm_work import fp8_rate
from flashrt_core.bench._report import percentiles
from flashrt_core.bench._report import Report
from flashrt_core.bench.vla import Ceilings
from flashrt_core.bench.vla import measure_ceilings
from flashrt_core.command_line import whole_number
from flashrt_core.errors import ConfigError
from flashrt_core.kernels import _triton
from flashrt_core.kernels import decode_attention
from flashrt_core.kernels import delta_chunk
from flashrt_core.kernels import delta_step
from flashrt_core.kernels import prefill_attention
from flashrt_core.kernels import row_int4
from flashrt_core.kernels import row_nvfp4
from flashrt_core.kernels import row_products
from flashrt_core.kernels._launch import draw
from flashrt_core.kernels._launch import overlaps
from flashrt_core.kernels.row_products import Tile
from flashrt_core.nn import fp8
from flashrt_core.planners.memory import Live
from flashrt_core.planners.memory import Verify
from flashrt_core.planners.qwen3_5 import fast
from flashrt_core.planners.qwen3_5.config import KV_PRECISIONS
from flashrt_core.planners.qwen3_5.config import load_config
from flashrt_core.planners.qwen3_5.config import PRECISIONS
from flashrt_core.planners.qwen3_5.config import Qwen35Config
from flashrt_core.planners.qwen3_5.precision import quantise
from flashrt_core.planners.qwen3_5.weights import damped
from flashrt_core.planners.qwen3_5.weights import ROPE
from flashrt_core.planners.qwen3_5.weights import rope_table
from flashrt_core.planners.qwen3_5.weights import tensor_specs
from flashrt_core.runtime import pick_backend

LAYERS = 4            # of the model whose whole forward pass is timed
Sweep = dict[str, dict[str, list[Any]]]
TILES: dict[str, tuple[Sweep, ModuleType]] = {  # what a sweep tries
    'bf16': ({
        'wide': {'wide': [Tile(64, 128, 4, 4, 512, True), Tile(64, 128, 4, 4, 0, True, False),
                          Tile(32, 256, 4, 3), Tile(32, 128, 4, 4),
                          Tile(128, 128, 8, 4, swapped=True)]},
        'split': {'split': [Tile(64, 128, 4, 3, 512), Tile(64, 128, 4, 3, overlaps=False),
                            Tile(64, 128, 4, 4), Tile(32, 256, 4, 4)], 'SPLITS': [2, 8]},
        'gated': {'gated': [Tile(32, 128, 4, 2), Tile(32, 128, 4, 3, overlaps=False),
                            Tile(64, 64, 4, 3, overlaps=False),
                            Tile(64, 128, 4, 3, 0, True, False)]},
        'chunk': {'chunk wide': [Tile(64, 128, 4, 3), Tile(128, 128, 8, 4, overlaps=False),
                                 Tile(64, 64, 4, 5, overlaps=False)],
                  'chunk split': [Tile(64, 64, 4, 4), Tile(64, 128, 4, 3, overlaps=False),
                                  Tile(64, 64, 4, 3, overlaps=False)],
                  'chunk gated': [Tile(64, 64, 4, 3), Tile(32, 64, 4, 4, overlaps=False)]}},
        row_products),
    'fp8': ({
        'wide': {'fp8 wide': [Tile(32, 256, 4, 4), Tile(32, 256, 4, 4, overlaps=False),
                              Tile(32, 256, 4, 3), Tile(32, 128, 4, 5), Tile(64, 256, 4, 3)]},
        'split': {'fp8 split': [Tile(32, 256, 4, 3), Tile(32, 256, 4, 4, 512),
                                Tile(64, 256, 4, 3, overlaps=False)], 'SPLITS': [2, 8]},
        'gated': {'fp8 gated': [Tile(32, 128, 4, 4), Tile(32, 256, 4, 2, overlaps=False),
                                Tile(32, 256, 4, 3, overlaps=False)]}}, row_products),
    'int4': ({
        'wide': {'WIDE_TILE': [(32, 4, 4), (64, 4, 5), (64, 4, 7), (128, 8, 4)]},
        'split': {'WIDE_TILE': [(32, 4, 4), (64, 4, 6), (128, 8, 4)]},
        'gated': {'GATED_TILE': [(32, 4, 3), (32, 4, 6), (64, 4, 4)]}}, row_int4),
    'nvfp4': ({
        'wide': {'WIDE_TILE': [(32, 128, 4, 6), (32, 256, 4, 3), (64, 128, 4, 4),
                               (64, 128, 4, 6)]},
        'split': {'WIDE_TILE': [(32, 128, 4, 6), (32, 256, 4, 3), (64, 128, 4, 4)]},
        'gated': {'GATED_TILE': [(16, 256, 4, 3), (32, 128, 4, 3), (32, 256, 4, 3)]}},
        row_nvfp4),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument('--config', default='27b', help='name or file (default: %(default)s)')
    parser.add_argument('--rows', type=whole_number(1), nargs='+', default=[1, 5, 16])
    parser.add_argument('--lengths', type=whole_number(1), nargs='+', default=[2048, 16384])
    parser.add_argument('--tokens', type=whole_number(1), default=2048, help='of a prefill chunk')
    parser.add_argument('--precisions', nargs='+', default=list(PRECISIONS), choices=PRECISIONS,
                        help='of the products (default: all that the GPU has)')
    parser.add_argument('--only', default='', help='cases whose name contains this')
    parser.add_argument('--repeats', type=whole_number(1), default=30)
    parser.add_argument('--sweep', action='store_true', help='try other tiles, too')


def run(arguments: argparse.Namespace) -> Report:
    """
    Measure and return the report.

    :raises ConfigError: no CUDA device.
    """
    if not torch.cuda.is_available():
        raise ConfigError('bench kernels times Triton kernels and finds no CUDA device; run it '
                          'on a machine with an NVIDIA GPU')
    device = pick_backend('cuda').device
    c, _ = load_config(arguments.config)
    report = Report('kernels', details={'config': arguments.config})
    ceilings = measure_ceilings(device, c.torch_dtype)
    report.details['ceilings'] = vars(ceilings)
    groups: list[tuple[ModuleType, dict[str, list[Any]], Callable[[], Iterator[Case]]]] = []
    precisions = [p for p in arguments.precisions if p != 'fp8' or fp8.multiplies(device)]
    for p in (replace(c, precision=precision) for precision in precisions):
        tile, module = TILES[p.precision]
        groups += [
            (module, tile.get('wide', {}), partial(products, p, device, arguments.rows, False)),
            (module, tile.get('split', {}), partial(products, p, device, arguments.rows, True)),
            (module, tile.get('gated', {}), partial(gated, p, device, arguments.rows)),
            (fast, {}, partial(chunk_rows, p, device, arguments.tokens)),
            (module, tile.get('chunk', {}), partial(few_products, p, device, 64)),
            (fast, {}, partial(chunk_products, p, device, arguments.tokens)),
            (fast, {}, partial(layers, p, device, arguments.rows, arguments.lengths,
                               arguments.tokens)),
        ]
    keys = [replace(c, kv_precision=p) for p in precisions if p in KV_PRECISIONS]
    groups += [
        (delta_step, {'BV': [16, 64], 'STEP_WARPS': [2, 8]},
         lambda: steps(c, device, arguments.rows)),
        *((decode_attention, {'SPLITS': [16, 64], 'SPLIT_WARPS': [2, 8]},
           partial(decoding, kv, device, arguments.rows, arguments.lengths)) for kv in keys),
        (delta_chunk, {'SCAN_COLUMNS': [32, 128], 'SCAN_WARPS': [4, 8], 'SCAN_STAGES': [1, 3],
                       'SOLVE_WARPS': [8], 'TOKENS': [16, 64]},
         lambda: chunks(c, device, arguments.tokens)),
        *((prefill_attention, {}, partial(prefill, kv, device, arguments.tokens,
                                          arguments.lengths)) for kv in keys),
    ]
    rate8 = fp8_rate(device) if 'fp8' in precisions else 0.0
    attempt = partial(measure, report, ceilings, rate8, arguments)
    for module, options, cases in groups:
        attempt(cases, '')
        for name, values in options.items() if arguments.sweep else ():
            table = vars(module) if hasattr(module, name) else module.TILES
            before = table[name]
            for value in values:
                table[name] = value
                attempt(cases, f'{name} {value}')
            table[name] = before
    report.details['kernels'] = _triton.choices()
    report.notes += [
        'p50_us: a captured graph of the launches over, between them rotated inputs of more than '
        f'{ROTATED >> 20} MiB; parts: the kernels alone by the profiler, microseconds.',
        f'floor: the larger of bytes over {ceilings.bytes / 1e12:.2f} TB/s and operations over '
        f'{ceilings.flops / 1e12:.0f} TFLOP/s ({rate8 / 1e12:.0f} of E4M3), all measured in this '
        'run.']
    return report


def measure(report: Report, ceilings: Ceilings, rate8: float, arguments: argparse.Namespace,
            cases: Callable[[], Iterator[Case]], tile: str) -> None:
    """Add one row for each case; a tile that does not fit this GPU is a result, too."""
    try:
        for case in cases():
            if arguments.only in case.name:
                _measure(report, ceilings, rate8, arguments, case, tile)
    except Exception as error:
        why = f'{type(error).__name__}: {error}'[:200]
        report.add(what='refused', tile=tile or '-', parts=why)


def _measure(report: Report, ceilings: Ceilings, rate8: float, arguments: argparse.Namespace,
             case: Case, tile: str) -> None:
    found = percentiles(timed(case, arguments.repeats))
    computing = case.flops / ceilings.flops + (case.flops8 / rate8 if case.flops8 else 0.0)
    floor = max(case.bytes / ceilings.bytes, computing) * 1e6
    report.add(what=case.name, tile=tile or '-', p50_us=found['p50'], p99_us=found['p99'],
               floor_us=floor, of_floor=floor / found['p50'], parts='' if tile else parts(case))


@torch.no_grad()
def timed(case: Case, repeats: int) -> list[float]:
    """Return microseconds of one launch, from replays of a graph that takes every set once."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which still makes tokens and positions
    with torch.cuda.stream(stream):
        for i in range(case.sets):
            case.launch(i)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    rounds = max(1, 20 // case.sets)
    with torch.cuda.graph(graph, stream=stream):
        for i in range(case.sets * rounds):
            case.launch(i % case.sets)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    samples = []
    for _ in range(repeats + 3):
        events[0].record()
        graph.replay()
        events[1].record()
        events[1].synchronize()
        samples.append(events[0].elapsed_time(events[1]) * 1e3 / case.sets / rounds)
    return samples[3:]


@torch.no_grad()
def parts(case: Case) -> str:
    """Return the kernels of one launch with their time, largest first, six at most."""
    from torch.profiler import profile
    from torch.profiler import ProfilerActivity
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for i in range(case.sets):
            case.launch(i)
        torch.cuda.synchronize()
    spent: dict[str, float] = {}
    for event in profiler.events() or ():
        if not event.name.startswith('cuda'):
            name = event.name.split('<')[0].split('(')[0][-24:]
            spent[name] = spent.get(name, 0.0) + event.time_range.elapsed_us() / case.sets
    largest = sorted(spent.items(), key=lambda item: -item[1])[:6]
    return ', '.join(f'{name} {us:.1f}' for name, us in largest)


def steps(c: Qwen35Config, device: torch.device, rows: list[int]) -> Iterator[Case]:
    """Yield a decode step of one delta-rule layer, and its verification."""
    dtype, pdl, C = c.torch_dtype, overlaps(device), c.channels
    HV, DK, DV = c.value_heads, c.key_dim, c.value_dim
    conv, weight = draw(device, dtype, C, 4), draw(device, dtype, DV)
    a_log, bias = draw(device, torch.float32, 2, HV).unbind(0)
    state = random(device, torch.float32, 64, 1, HV, DK, DV)
    columns = random(device, dtype, 64, 1, 3, C)
    one = torch.ones((), dtype=torch.int64, device=device)
    for M in rows:
        given = draw(device, dtype, M, C + HV * DV + 2 * HV)
        channels, z, a, b = given.split([C, HV * DV, HV, HV], dim=1)
        o = torch.empty((M, HV, DV), device=device)
        take = partial(delta_step.step, channels, a, b, conv, a_log, bias)
        norm = partial(delta_step.norm, o, z.unflatten(1, (HV, DV)), weight,
                       torch.empty_like(o, dtype=dtype), one * M, 1e-6, channels)
        launch = partial(_step, take, norm, columns, state, o, one * M, one * (M == 1), pdl)
        yield Case(f'delta step, M={M}', 64, launch, (2 if M == 1 else 1) * 4 * HV * DK * DV,
                   6 * M * HV * DK * DV)


def _step(take: Callable[..., None], norm: Callable[..., None], columns: Tensor, state: Tensor,
          o: Tensor, count: Tensor, write: Tensor, pdl: bool, i: int) -> None:
    """Take one live token, or verify several: the columns are carried on by the live one."""
    take(columns[i], state[i], o, count, write, pdl)
    norm(columns[i] if len(o) == 1 else None, count, pdl)


def decoding(c: Qwen35Config, device: torch.device, rows: list[int],
             lengths: list[int]) -> Iterator[Case]:
    """Yield attention of few rows."""
    pdl, D = overlaps(device), c.head_dim
    for length in lengths:
        nbytes = 2 * c.kv_dtype.itemsize * length * c.kv_dim
        kv = [random(device, c.kv_dtype, length, 2, c.kv_heads, D)
              for _ in range(rotated(nbytes))]
        for M in rows:
            attend = decode_attention.DecodeAttention(M, c.heads, c.kv_heads, D, device, pdl)
            q = draw(device, c.torch_dtype, M, c.heads, D)
            at = torch.arange(length - M, length, device=device)
            yield Case(f'decode attention {length}{_keys(c)}, M={M}', len(kv),
                       partial(_attend, attend, q, kv, at, torch.empty_like(q)), nbytes,
                       4 * M * length * c.q_dim)


def _attend(attend: decode_attention.DecodeAttention, q: Tensor, kv: list[Tensor], at: Tensor,
            out: Tensor, i: int) -> None:
    attend(q, kv[i], at, out, q)


def chunks(c: Qwen35Config, device: torch.device, T: int) -> Iterator[Case]:
    """Yield the delta rule of one layer over a chunk."""
    HV, HK, D, C, dtype = c.value_heads, c.key_heads, c.key_dim, c.channels, c.torch_dtype
    rule = delta_chunk.DeltaChunk(T, HV, HK, D, c.value_dim, dtype, device)
    given = [random(device, dtype, T, C + 2 * HV) for _ in range(rotated(2 * T * C))]
    conv, state = draw(device, dtype, C, 4), draw(device, torch.float32, HV, D, c.value_dim)
    a_log, bias = draw(device, torch.float32, 2, HV).unbind(0)
    columns, length = draw(device, dtype, 3, C), torch.full((), T, device=device)

    def launch(i: int) -> None:
        channels, a, b = given[i].split([C, HV, HV], dim=1)
        rule(channels, a, b, conv, a_log, bias, columns, state, length)
    yield Case(f'delta chunk {T}', len(given), launch, 2 * T * (C + HV * c.value_dim),
               T * HV * (6 * D * c.value_dim + 6 * delta_chunk.CHUNK * D))


def prefill(c: Qwen35Config, device: torch.device, T: int,
            lengths: list[int]) -> Iterator[Case]:
    """Yield attention of a chunk that ends at each length."""
    q, gate = random(device, c.torch_dtype, 2, T, c.heads, c.head_dim).unbind(0)
    out = torch.empty_like(q)
    for end in (end for end in lengths if end >= T):
        kv = random(device, c.kv_dtype, end, 2, c.kv_heads, c.head_dim)
        at, count = torch.tensor([end - T, T], device=device).unbind(0)
        attend = prefill_attention.PrefillAttention(T, c.heads, c.kv_heads, c.head_dim, device)
        launch = partial(attend, q, kv, gate, out, at, count)
        yield Case(f'prefill attention {T} at {end}{_keys(c)}', 1, partial(_once, launch),
                   2 * c.kv_dtype.itemsize * end * c.kv_dim + 6 * T * c.q_dim,
                   4 * T * (end - T / 2) * c.q_dim)


def _keys(c: Qwen35Config) -> str:
    return ' fp8 keys' if c.kv_precision == 'fp8' else ''


def _once(launch: Callable[[], object], i: int) -> None:
    launch()


def layers(c: Qwen35Config, device: torch.device, rows: list[int], lengths: list[int],
           T: int) -> Iterator[Case]:
    """Yield whole passes of ``fast`` through four layers: rows live or verified, and a chunk."""
    c = replace(c, layers=LAYERS, vocab=2048, mtp=False, context=max(lengths) + max(rows) + T)
    if not fast.selected(c, device):
        return
    b, count, nbytes = {ROPE: rope_table(c).to(device)}, 0, 0
    for name, spec in tensor_specs(c).items():
        spec = damped(c, name, spec)
        value = random(device, torch.float32, *spec.shape) * (spec.scale or 0.1)
        kept = quantise(c, name, (value + spec.offset).to(spec.dtype))
        if name.startswith('layers.') and len(spec.shape) == 2:
            count += value.numel()
            nbytes += sum(t.numel() * t.element_size() for t in kept.values())
        b |= kept
    for buffer in fast.state_specs(c):
        b[buffer.name] = torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)
    tokens = torch.randint(0, c.vocab, (max(T, *rows),), device=device, dtype=torch.int32)
    for length, M in combinations(lengths, rows):
        at = torch.full((), length, device=device)
        launch = partial(_rows, c, b, tokens[:M], at)
        yield Case(label(c, f'{LAYERS} layers at {length}') + f', M={M}', 1, launch,
                   nbytes + 4 * length * c.kv_dim, 2 * M * count)
    start, valid = torch.tensor([0, T], device=device).unbind(0)
    chunk = partial(fast.chunk, c, b, tokens[:T], start, valid, c.context)
    work = {'flops8' if c.precision == 'fp8' else 'flops': 2.0 * T * count}
    yield Case(label(c, f'{LAYERS} layers, chunk {T}'), 1, partial(_once, chunk), nbytes, **work)


def _rows(c: Qwen35Config, b: dict[str, Tensor], tokens: Tensor, at: Tensor, i: int) -> None:
    """Take one live token, or verify several and accept the first."""
    memory = Live(c, b, at) if len(tokens) == 1 else Verify(c, b, at)
    fast.rows(c, b, tokens, at + torch.arange(len(tokens), device=at.device), memory)
    if isinstance(memory, Verify):
        memory.accept(c, b, torch.ones_like(at))
