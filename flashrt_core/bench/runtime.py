"""What the runtime itself costs: hand-over to the lane, a replay, verbs, copies, noise."""
from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
import time

import numpy as np
import torch

from flashrt_core.bench._report import percentiles
from flashrt_core.bench._report import Report
from flashrt_core.command_line import whole_number
from flashrt_core.kernels import _triton
from flashrt_core.kernels.copy import CopyTable
from flashrt_core.kernels.copy import PIECE
from flashrt_core.kernels.digest import DigestTable
from flashrt_core.runtime import Backend
from flashrt_core.runtime import BufferSet
from flashrt_core.runtime import BufferSpec
from flashrt_core.runtime import Graph
from flashrt_core.runtime import Kind
from flashrt_core.runtime import Lane
from flashrt_core.runtime import pick_backend
from flashrt_core.runtime import Plan
from flashrt_core.runtime import Role
from flashrt_core.runtime.philox import normal_torch

MIB = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument('--device', choices=('auto', 'cpu', 'cuda'), default='auto')
    parser.add_argument('--runs', type=whole_number(1), default=1000,
                        help='of each call (default 1000)')
    parser.add_argument('--copy-mib', type=whole_number(1), nargs='+', default=[1, 16, 300],
                        help='sizes for copy and digest, MiB')


def run(arguments: argparse.Namespace) -> Report:
    """Measure and return the report."""
    report = Report('runtime', details={'runs': arguments.runs})
    backend = pick_backend(arguments.device)
    with Lane(backend, 'bench') as lane:
        _lane_rows(report, backend, lane, arguments.runs)
        for mib in arguments.copy_mib:
            _copy_rows(report, backend, lane, mib, max(20, arguments.runs // 20))
    report.details['kernels'] = _triton.choices()
    report.notes.append(
        "call, run and verbs are measured by the submitting thread, up to its future's result; "
        'tables from fill to completion on the lane thread.')
    return report


def _lane_rows(report: Report, backend: Backend, lane: Lane, runs: int) -> None:
    buffers = BufferSet(backend, [
        *(BufferSpec(n, Role.STATE, torch.int64, (), kind=Kind.RNG)
          for n in ('seed', 'branch', 'tick')),
        BufferSpec('noise', Role.OUTPUT, torch.float32, (50, 32)),
    ], name='bench')
    graph = Graph('noise', lambda p, key: normal_torch(
        p['seed'], p['branch'], p['tick'], p['noise']), ['seed', 'branch', 'tick', 'noise'])
    graph.bind_all({port: buffers[port] for port in graph.ports})
    graph.capture((), lane)
    one, three = Plan('one segment'), Plan('three segments')
    one.add(graph, ())
    for _ in range(3):
        three.add(graph, ())
    cases: dict[str, Callable[[], object]] = {
        'call': lambda: lane.call(int).result(),
        'run, 1 segment': lambda: lane.run(one).result(),
        'run, 3 segments': lambda: lane.run(three).result(),
        'at_segment_end, idle': lambda: lane.at_segment_end(int).result(),
        'at_boundary, idle': lambda: lane.at_boundary(int).result(),
    }
    for name, action in cases.items():
        _row(report, name, 0, _timed(action, runs))
    device_us = [lane.run(one).result().segments_us['noise'] for _ in range(runs)]
    _row(report, 'noise 50x32, device', 0, device_us)


def _copy_rows(report: Report, backend: Backend, lane: Lane, mib: int, runs: int) -> None:
    source = backend.empty((mib * MIB,), torch.uint8).zero_()
    target = torch.empty_like(source)
    pieces = mib * MIB // PIECE + 1
    copies, digests = CopyTable(backend, pieces), DigestTable(backend, pieces)
    ranges = np.array([(source.data_ptr(), target.data_ptr(), mib * MIB)], np.int64)
    event = backend.event()

    def finished(submit: Callable[[], None]) -> None:
        submit()
        event.record(lane.stream)
        event.wait(30.0)

    def table_copy() -> None:
        copies.fill(ranges)
        copies.submit(lane.stream)

    def plain_copy() -> None:
        target.copy_(source)

    def digest() -> None:
        digests.fill(ranges[:, [0, 2]])
        digests.submit(lane.stream)

    for name, action in (('copy table', table_copy), ('torch copy_', plain_copy),
                         ('digest table', digest)):
        samples = lane.call(partial(_timed, partial(finished, action), runs)).result()
        _row(report, name, mib, samples)


def _timed(action: Callable[[], object], runs: int) -> list[float]:
    """Return the microseconds of each call, after a tenth as many to warm up."""
    for _ in range(max(3, runs // 10)):
        action()
    samples = []
    for _ in range(runs):
        begin = time.perf_counter()
        action()
        samples.append((time.perf_counter() - begin) * 1e6)
    return samples


def _row(report: Report, name: str, mib: int, samples_us: list[float]) -> None:
    found = percentiles(samples_us)
    traffic = 2 if 'copy' in name else 1
    rate = traffic * mib * MIB / (found['p50'] * 1e-6) / 1e9 if mib else None
    report.add(what=name, mib=mib or None, n=int(found['n']), p50_us=found['p50'],
               p99_us=found['p99'], max_us=found['max'], memory_traffic_gb_s=rate)
