"""The planner's kernels one by one at the sizes of a model, each beside its floor; CUDA only."""
from __future__ import annotations

import argparse
from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import replace
from functools import partial
from itertools import product as combinations
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from flashrt_core.bench._report import percentiles
from flashrt_core.bench._report import Report
from flashrt_core.bench.vla import Ceilings
from flashrt_core.bench.vla import measure_ceilings
from flashrt_core.errors import ConfigError
from flashrt_core.kernels import _triton
from flashrt_core.kernels import decode_attention
from flashrt_core.kernels import delta_chunk
from flashrt_core.kernels import delta_step
from flashrt_core.kernels import prefill_attention
from flashrt_core.kernels import row_products
from flashrt_core.kernels._launch import draw
from flashrt_core.kernels._launch import overlaps
from flashrt_core.planners.memory import Live
from flashrt_core.planners.memory import Verify
from flashrt_core.planners.qwen3_5 import fast
from flashrt_core.planners.qwen3_5.config import load_config
from flashrt_core.planners.qwen3_5.config import Qwen35Config
from flashrt_core.planners.qwen3_5.weights import ROPE
from flashrt_core.planners.qwen3_5.weights import rope_table
from flashrt_core.planners.qwen3_5.weights import tensor_specs
from flashrt_core.runtime import pick_backend

ROTATED = 256 << 20   # bytes; inputs are rotated until they exceed the L2 cache this far
LAYERS = 4            # of the model whose whole forward pass is timed


@dataclass(frozen=True)
class Case:
    """One thing to time: ``launch(i)`` uses the inputs of set i; its operations and bytes."""

    name: str
    sets: int
    launch: Callable[[int], object]
    bytes: float
    flops: float = 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument('--config', default='27b', help='name or file (default: %(default)s)')
    parser.add_argument('--rows', type=int, nargs='+', default=[1, 5, 16])
    parser.add_argument('--lengths', type=int, nargs='+', default=[2048, 16384])
    parser.add_argument('--tokens', type=int, default=2048, help='of a prefill chunk')
    parser.add_argument('--only', default='', help='cases whose name contains this')
    parser.add_argument('--repeats', type=int, default=30)
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
    groups: list[tuple[ModuleType, dict[str, list[Any]], Callable[[], Iterator[Case]]]] = [
        (row_products, {'WIDE_TILE': [(32, 128, 4, 5), (64, 128, 4, 4), (32, 256, 4, 3),
                                      (64, 64, 4, 6), (128, 64, 8, 4)],
                        'EARLY': [0, 256, 1024]},
         lambda: products(c, device, arguments.rows, split=False)),
        (row_products, {'SPLIT_TILE': [(32, 128, 4, 5), (64, 256, 8, 3), (128, 64, 8, 4)],
                        'SPLITS': [2, 8]},
         lambda: products(c, device, arguments.rows, split=True)),
        (row_products, {'GATED_TILE': [(32, 128, 4, 4), (64, 64, 4, 4), (32, 64, 4, 5),
                                       (64, 128, 8, 3)], 'EARLY': [0, 256]},
         lambda: gated(c, device, arguments.rows)),
        (delta_step, {'BV': [16, 64], 'STEP_WARPS': [2, 8]},
         lambda: steps(c, device, arguments.rows)),
        (decode_attention, {'SPLITS': [16, 64], 'SPLIT_WARPS': [2, 8]},
         lambda: decoding(c, device, arguments.rows, arguments.lengths)),
        (delta_chunk, {'SCAN_COLUMNS': [32, 128], 'SCAN_WARPS': [4, 8], 'SCAN_STAGES': [1, 3],
                       'SOLVE_WARPS': [8], 'TOKENS': [16, 64]},
         lambda: chunks(c, device, arguments.tokens)),
        (prefill_attention, {}, lambda: prefill(c, device, arguments.tokens, arguments.lengths)),
        (fast, {}, lambda: layers(c, device, arguments.rows, arguments.lengths,
                                  arguments.tokens)),
    ]
    for module, options, cases in groups:
        measure(report, ceilings, cases(), arguments, '')
        for name, values in options.items() if arguments.sweep else ():
            before = getattr(module, name)
            for value in values:
                setattr(module, name, value)
                try:
                    measure(report, ceilings, cases(), arguments, f'{name} {value}')
                except Exception as error:  # a tile that does not fit this GPU is a result
                    report.add(what='refused', tile=f'{name} {value}: {type(error).__name__}')
                finally:
                    setattr(module, name, before)
    report.details['kernels'] = _triton.choices()
    report.notes += [
        'p50_us: a captured graph of the launches over, between them rotated inputs of more than '
        f'{ROTATED >> 20} MiB; parts: the kernels alone by the profiler, microseconds.',
        f'floor: the larger of bytes over {ceilings.bytes / 1e12:.2f} TB/s and operations over '
        f'{ceilings.flops / 1e12:.0f} TFLOP/s, both measured in this run.']
    return report


def measure(report: Report, ceilings: Ceilings, cases: Iterator[Case],
            arguments: argparse.Namespace, tile: str) -> None:
    """Add one row for each case."""
    for case in cases:
        if arguments.only not in case.name:
            continue
        found = percentiles(timed(case, arguments.repeats))
        floor = max(case.bytes / ceilings.bytes, case.flops / ceilings.flops) * 1e6
        report.add(what=case.name, tile=tile or '-', p50_us=found['p50'], p99_us=found['p99'],
                   floor_us=floor, of_floor=floor / found['p50'],
                   parts='' if tile else parts(case))


@torch.no_grad()
def timed(case: Case, repeats: int) -> list[float]:
    """Return microseconds of one launch, from replays of a graph that takes every set once."""
    stream = torch.cuda.Stream()
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


def rotated(nbytes: float) -> int:
    """Return how many sets of inputs exceed the cache."""
    return max(1, min(64, -(-ROTATED // int(nbytes))))


def products(c: Qwen35Config, device: torch.device, rows: list[int],
             split: bool) -> Iterator[Case]:
    """Yield the products of a layer and the head; with ``split`` those that leave sums."""
    V, dtype, pdl = c.value_heads * c.value_dim, c.torch_dtype, overlaps(device)
    wide = {'mix': (c.channels + V + 2 * c.value_heads, c.width),
            'qkv': (2 * c.q_dim + 2 * c.kv_dim, c.width), 'head': (c.vocab, c.width)}
    narrow = {'out': (c.width, c.q_dim), 'down': (c.width, c.mlp)}
    for name, (N, K) in (narrow if split else wide).items():
        sets = rotated(2 * N * K)
        weights = [random(device, dtype, N, K) for _ in range(sets)]
        for M in rows:
            a = draw(device, dtype, M, K)
            shape = (row_products.SPLITS, M, N) if split else (M, N)
            out = torch.empty(shape, device=device, dtype=torch.float32 if split else dtype)
            launch = partial(_multiply, row_products.product, a, weights, out, pdl)
            yield Case(f'{name}, M={M}', sets, launch, 2 * N * K, 2 * M * N * K)


def gated(c: Qwen35Config, device: torch.device, rows: list[int]) -> Iterator[Case]:
    """Yield the gated product of the MLP."""
    N, K, pdl = c.mlp, c.width, overlaps(device)
    sets = rotated(4 * N * K)
    weights = [random(device, c.torch_dtype, 2 * N, K) for _ in range(sets)]
    for M in rows:
        a = draw(device, c.torch_dtype, M, K)
        out = torch.empty((M, N), device=device, dtype=c.torch_dtype)
        launch = partial(_multiply, row_products.gated, a, weights, out, pdl)
        yield Case(f'gate_up, M={M}', sets, launch, 4 * N * K, 4 * M * N * K)


def _multiply(product: Callable[..., None], a: Tensor, weights: list[Tensor], out: Tensor,
              pdl: bool, i: int) -> None:
    product(a, weights[i], out, pdl)


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
        nbytes = 4 * length * c.kv_dim
        kv = [random(device, c.torch_dtype, length, 2, c.kv_heads, D)
              for _ in range(rotated(nbytes))]
        for M in rows:
            attend = decode_attention.DecodeAttention(M, c.heads, c.kv_heads, D, device, pdl)
            q = draw(device, c.torch_dtype, M, c.heads, D)
            at = torch.arange(length - M, length, device=device)
            yield Case(f'decode attention {length}, M={M}', len(kv),
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
        kv = random(device, c.torch_dtype, end, 2, c.kv_heads, c.head_dim)
        at, count = torch.tensor([end - T, T], device=device).unbind(0)
        launch = partial(prefill_attention.attention, q, kv, gate, out, at, count)
        yield Case(f'prefill attention {T} at {end}', 1, partial(_once, launch),
                   4 * end * c.kv_dim + 6 * T * c.q_dim, 4 * T * (end - T / 2) * c.q_dim)


def _once(launch: Callable[[], object], i: int) -> None:
    launch()


def layers(c: Qwen35Config, device: torch.device, rows: list[int], lengths: list[int],
           T: int) -> Iterator[Case]:
    """Yield whole passes of ``fast`` through four layers: rows live or verified, and a chunk."""
    c = replace(c, layers=LAYERS, vocab=2048, mtp=False, context=max(lengths) + max(rows) + T)
    if not fast.selected(c, device):
        return
    b = {ROPE: rope_table(c).to(device)}
    for name, spec in tensor_specs(c).items():
        value = random(device, torch.float32, *spec.shape) * (spec.scale or 0.1)
        b[name] = (value + spec.offset).to(spec.dtype)
    for buffer in fast.state_specs(c):
        b[buffer.name] = torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)
    weights = sum(t.numel() for n, t in b.items() if n.startswith('layers.') and t.dim() == 2)
    tokens = torch.randint(0, c.vocab, (max(T, *rows),), device=device, dtype=torch.int32)
    for length, M in combinations(lengths, rows):
        at = torch.full((), length, device=device)
        launch = partial(_rows, c, b, tokens[:M], at)
        yield Case(f'{LAYERS} layers at {length}, M={M}', 1, launch,
                   2 * weights + 4 * length * c.kv_dim, 2 * M * weights)
    start, count = torch.tensor([0, T], device=device).unbind(0)
    chunk = partial(fast.chunk, c, b, tokens[:T], start, count, c.context)
    yield Case(f'{LAYERS} layers, chunk {T}', 1, partial(_once, chunk), 2 * weights,
               2 * T * weights)


def _rows(c: Qwen35Config, b: dict[str, Tensor], tokens: Tensor, at: Tensor, i: int) -> None:
    """Take one live token, or verify several and accept the first."""
    memory = Live(c, b, at) if len(tokens) == 1 else Verify(c, b, at)
    fast.rows(c, b, tokens, at + torch.arange(len(tokens), device=at.device), memory)
    if isinstance(memory, Verify):
        memory.accept(c, b, torch.ones_like(at))


def random(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    """Return normals drawn on the device, for what is too large to draw on the host."""
    return torch.randn(shape, device=device).to(dtype)
