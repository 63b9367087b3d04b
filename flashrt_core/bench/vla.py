"""A policy at real size: from new pixels to actions on the host, beside its floor."""
from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
import time
from typing import Any

import numpy as np
import torch

from flashrt_core.bench._progress import Clock
from flashrt_core.bench._report import percentiles
from flashrt_core.bench._report import Report
from flashrt_core.bench._report import TABLE
from flashrt_core.bench._vla_peer import Reference
from flashrt_core.bench._vla_precision import Actions
from flashrt_core.bench._vla_precision import compared
from flashrt_core.bench._vla_precision import eager_actions
from flashrt_core.bench._vla_precision import in_precision
from flashrt_core.bench._vla_precision import make_scales
from flashrt_core.bench._vla_state import state_rows
from flashrt_core.bench._vla_state import with_branches
from flashrt_core.bench._vla_variants import variant_rows
from flashrt_core.command_line import whole_number
from flashrt_core.kernels import _triton
from flashrt_core.nn import fp8
from flashrt_core.policies import TickInput
from flashrt_core.policies.normalise import Statistics
from flashrt_core.policies.pi0 import Pi0Policy
from flashrt_core.policies.pi0 import Pi0Session
from flashrt_core.policies.pi0.config import load_config
from flashrt_core.policies.pi0.config import Pi0Config
from flashrt_core.policies.pi0.graphs import forward_of
from flashrt_core.runtime import pick_backend
from flashrt_core.runtime import Role

WARM_UP = 20
STATE_REPEATS = 200  # of each verb and each kind of tick in the tables of state
CHECKED = 8        # ticks whose actions are compared afterwards
MATMUL = 8192      # size of the product that gives the arithmetic ceiling
COPY_BYTES = 1 << 30


@dataclass(frozen=True)
class Work:
    """What one tick must do: operations of each segment, bytes that the expert must read."""

    vision: float
    prefix: float
    denoise: float
    expert_bytes: float


@dataclass(frozen=True)
class Ceilings:
    """Measured rates of the device: dense product FLOP/s, copied bytes/s (read plus written)."""

    flops: float
    bytes: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument('--device', choices=('auto', 'cpu', 'cuda'), default='auto')
    parser.add_argument('--config', default='pi0', help='name or file (default: %(default)s)')
    parser.add_argument('--views', type=whole_number(1), nargs='+', default=[1, 2, 3])
    parser.add_argument('--repeats', type=whole_number(1), default=500,
                        help='ticks (default 500)')
    parser.add_argument('--prompt', type=whole_number(0), default=0,
                        help='language tokens in all (default 48; of Pi0.5, with its state, 200)')
    parser.add_argument('--precision', choices=('bf16', 'fp8'), nargs='+', default=[''],
                        help="rows for each (default: the config's own)")
    parser.add_argument('--reference', choices=('eager', 'compiled'), nargs='+', default=[],
                        help="time transformers' PI0, too")
    parser.add_argument('--variants', action='store_true',
                        help='bind again to time guided ticks and ticks that keep a camera')


def run(arguments: argparse.Namespace) -> Report:
    """Measure and return the report."""
    report = Report('vla', details={'repeats': arguments.repeats})
    clock = Clock('vla')
    backend = pick_backend(arguments.device)
    base = base_of(load_config(arguments.config), arguments.prompt)
    ceilings = measure_ceilings(backend.device, base.torch_dtype)
    rate8 = ceilings.flops
    if 'fp8' in arguments.precision and backend.name == 'cuda':
        rate8 = fp8_rate(backend.device)
    report.details['ceilings'] = {**vars(ceilings), 'fp8_flops': rate8}
    peers = {f'transformers_{how}_ms': Reference(base, backend.device, how == 'compiled')
             for how in arguments.reference}
    with TemporaryDirectory() as folder:
        scales = Path(folder) / 'scales.json'
        if 'fp8' in arguments.precision:
            most = _with_views(base, max(arguments.views))
            make_scales(backend, in_precision(most, 'bf16', scales), scales)
        for views in arguments.views:
            known: dict[str, Actions] = {}
            peer_ms = {name: device_seconds(peer.call(views), backend.device, 5) * 1e3
                       for name, peer in peers.items()}
            for precision in sorted(arguments.precision):
                c = in_precision(with_branches(_with_views(base, views)), precision, scales)
                what = f'{views} views, {precision or c.dtype}'
                clock.say(f'{what}: bind')
                begin = time.perf_counter()
                session = Pi0Policy().bind(backend, c)
                bound_s = time.perf_counter() - begin
                try:
                    clock.say(f'{what}: {arguments.repeats} ticks')
                    row = _measure(session, ceilings, rate8 if c.quantised else ceilings.flops,
                                   arguments.repeats, report, known)
                    clock.say(f'{what}: {row["tick_p50_ms"]:.2f} ms a tick; verbs of its state')
                    state = state_rows(session, _inputs(c, min(arguments.repeats, STATE_REPEATS)))
                    if views == arguments.views[-1] and precision == max(arguments.precision):
                        row['kernels'] = _kernels(session)  # it slows every launch after it
                finally:
                    session.close()
                del session
                if arguments.variants:
                    clock.say(f'{what}: guided ticks, ticks that keep a camera')
                    plain = in_precision(_with_views(base, views), precision, scales)
                    state += variant_rows(
                        backend, plain, _inputs(c, min(arguments.repeats, STATE_REPEATS)))
                report.add(**row, **peer_ms, bind_s=bound_s)
                report.rows += [{TABLE: r[TABLE], 'precision': row['precision'], **r}
                                for r in state]
    report.details['kernels'] = _triton.choices()
    report.notes += [
        'tick: submit to result in the calling thread, new pixels and noise each time; vision, '
        'prefix, denoise: device time of the segments, medians.',
        f'floor: operations over {ceilings.flops / 1e12:.3g} TFLOP/s, expert bytes over '
        f'{ceilings.bytes / 1e12:.3g} TB/s, both measured in this run; mfu and expert_tb_s '
        'against the same counts.',
        'cosine: actions against the plain torch layers run eagerly on the same inputs, worst of '
        f'{CHECKED}; cosine_bf16 and _float32: against those in bfloat16 and, from the same '
        'weights, in float32; error_of_bf16: mean error against float32 over that of bfloat16.',
    ]
    if 'fp8' in arguments.precision:
        report.notes.append(
            'fp8: scales from random textured frames, none of them measured; floor and mfu of the '
            f'prefix as if all were products in FP8, {rate8 / 1e12:.3g} TFLOP/s; vision and the '
            'expert are in bf16.')
    return report


def _with_views(c: Pi0Config, count: int) -> Pi0Config:
    return replace(c, views=tuple(f'view{i}' for i in range(count)))


def base_of(c: Pi0Config, language: int) -> Pi0Config:
    """Return ``c`` reading ``language`` tokens (0 = as published), in the model's own units."""
    language = language or (200 if c.modulated else 48)
    prompt = language - (c.state_tokens if c.modulated else 1)
    return replace(c, prompt_tokens=prompt, subgoal_tokens=1, statistics=Statistics(), units=(),
                   relative=())


def count(c: Pi0Config) -> Work:
    """Count operations and bytes of one tick with one row; multiply-adds count twice."""
    v, p, e = c.vision, c.prefix, c.expert
    V, T, P, S = len(c.views), v.tokens, c.prefix_tokens, c.suffix_tokens
    encoder = v.layers * (4 * v.width**2 + 2 * v.width * v.mlp)
    vision = 2 * V * T * (encoder + v.patch_dim * v.width + v.width * p.width)
    vision += v.layers * V * 4 * T * T * v.width

    def layer(d: Any) -> int:
        return int(d.width * d.qkv_dim + d.q_dim * d.width + 3 * d.width * d.mlp)

    prefix = 2 * P * ((p.layers - 1) * layer(p) + 2 * p.width * p.kv_dim)
    prefix += (p.layers - 1) * 4 * P * P * p.q_dim
    weights = e.layers * layer(e)
    denoise = c.flow_steps * (2 * S * weights + e.layers * 4 * S * (P + S) * e.q_dim)
    kv = e.layers * P * 2 * e.kv_dim
    expert_bytes = c.flow_steps * (weights + kv) * c.torch_dtype.itemsize
    return Work(vision, prefix, denoise, expert_bytes)


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measure a large product of random data and a large copy; on cpu small ones."""
    small = device.type == 'cpu'
    n = 512 if small else MATMUL
    a, b = torch.randn((2, n, n), device=device).to(dtype)
    source = torch.empty(COPY_BYTES // (64 if small else 1), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    out = torch.empty_like(a)
    product_s = device_seconds(lambda: torch.matmul(a, b, out=out), device)
    copy_s = device_seconds(lambda: target.copy_(source), device)
    return Ceilings(2 * n**3 / product_s, 2 * source.numel() / copy_s)


def fp8_rate(device: torch.device) -> float:
    """Return the FLOP/s of a large product of E4M3 rows and channels with scales of their own."""
    n = MATMUL
    data, scale = fp8.quantise_rows(torch.randn((n, n), device=device))
    weight = fp8.ChannelWeight(data, scale)
    seconds = device_seconds(lambda: fp8.multiply(data, scale, weight), device)
    return 2 * n**3 / seconds


def device_seconds(action: Callable[[], object], device: torch.device, runs: int = 10) -> float:
    """Return the median seconds of an action on an idle device."""
    def wait() -> None:
        if device.type == 'cuda':
            torch.cuda.synchronize(device)

    samples = []
    for _ in range(runs):
        wait()
        begin = time.perf_counter()
        action()
        wait()
        samples.append(time.perf_counter() - begin)
    return float(np.median(samples))


def _measure(session: Pi0Session, ceilings: Ceilings, large: float, repeats: int, report: Report,
             known: dict[str, Actions]) -> dict[str, Any]:
    """Measure ticks; ``large``: FLOP/s of the prefix' products, maybe in FP8."""
    c = session.config
    inputs = _inputs(c, repeats + WARM_UP)
    wall_ms, segments, kept = [], [], []
    for i, tick_input in enumerate(inputs):
        begin = time.perf_counter()
        chunk = session.tick(tick_input)
        wall_ms.append((time.perf_counter() - begin) * 1e3)
        segments.append(chunk.segments_us)
        if i % max(1, len(inputs) // CHECKED) == 0:
            kept.append((tick_input, chunk.actions))
    wall_ms, segments = wall_ms[WARM_UP:], segments[WARM_UP:]
    found = percentiles(wall_ms)
    ms = {name: float(np.median([s[name] for s in segments])) / 1e3 for name in segments[0]}
    work = count(c)
    expert_s = max(work.expert_bytes / ceilings.bytes, work.denoise / ceilings.flops)
    floor_ms = (work.vision / ceilings.flops + work.prefix / large + expert_s) * 1e3
    checked, found_actions = [pair[0] for pair in kept], [pair[1] for pair in kept]
    if not c.quantised:
        known['float32'] = eager_actions(session, checked, exact=True)
        if c.dtype == 'bfloat16':
            known['bf16'] = found_actions
    known['plain'] = eager_actions(session, checked, exact=False)
    precision = c.precision or c.dtype
    report.details[f'{len(c.views)} views, {precision}, ms'] = wall_ms
    forward = forward_of(c, session.buffers['prefix_kv'].tensor.device)
    return {
        'views': len(c.views), 'precision': precision, 'tick_p50_ms': found['p50'],
        'tick_p99_ms': found['p99'], 'floor_ms': floor_ms,
        **{f'{name}_ms': value for name, value in ms.items()},
        'vision_mfu': work.vision / ceilings.flops / ms['vision'] * 1e3,
        'prefix_mfu': work.prefix / large / ms['prefix'] * 1e3,
        'expert_tb_s': work.expert_bytes / ms['denoise'] / 1e9,
        'forward': forward.__name__.rsplit('.', 1)[-1], **compared(found_actions, known),
        'weights_gb': sum(b.nbytes for b in session.buffers.by_role(Role.CONSTANT)) / 1e9,
    }


def _inputs(c: Pi0Config, number: int) -> list[TickInput]:
    """Draw observations that differ in every pixel; nothing of the chunk before is blended in."""
    random = np.random.default_rng(0)
    side = c.vision.image_size
    made = []
    for i in range(number):
        images = {v: random.integers(0, 256, (side, side, 3), dtype=np.uint8) for v in c.views}
        state = random.standard_normal(c.state_dim).astype(np.float32)
        noise = random.standard_normal((1, c.horizon, c.action_width)).astype(np.float32)
        tokens = tuple(random.integers(0, c.vocab, c.prompt_tokens).tolist())
        made.append(TickInput(images, state, steps_executed=c.horizon, noise=noise,
                              prompt=tokens if i == 0 else None))
    return made


def _kernels(session: Pi0Session) -> int | None:
    """Count the kernels of one tick; None without CUDA or its profiler."""
    if session.buffers['prefix_kv'].tensor.device.type != 'cuda':
        return None
    tick_input = _inputs(session.config, 1)[0]
    from torch.profiler import profile
    from torch.profiler import ProfilerActivity
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        session.tick(tick_input)
        torch.cuda.synchronize()
    names = [event.name for event in profiler.events() or ()]
    return sum(not name.startswith(('Memcpy', 'Memset', 'cuda')) for name in names)
