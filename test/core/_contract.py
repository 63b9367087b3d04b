"""A tiny session over the execution contract, shared by the runtime tests."""
from __future__ import annotations

from collections.abc import Callable
import threading

import torch

from flashrt_core.runtime import Backend
from flashrt_core.runtime import BufferSet
from flashrt_core.runtime import BufferSpec
from flashrt_core.runtime import Graph
from flashrt_core.runtime import Kind
from flashrt_core.runtime import Lane
from flashrt_core.runtime import Plan
from flashrt_core.runtime import Role


class Counter:
    """
    Three segments: scratch = count + step; scratch += step; count = scratch.

    ``gates`` block a segment's body on cpu until they are set, so that a test decides when a
    segment ends.
    """

    def __init__(self, backend: Backend, lane: Lane) -> None:
        self.lane = lane
        self.buffers = BufferSet(backend, [
            BufferSpec('step', Role.INPUT, torch.int64, ()),
            BufferSpec('count', Role.STATE, torch.int64, (), kind=Kind.META),
            BufferSpec('next', Role.SCRATCH, torch.int64, ()),
        ], name='counter')
        self.gates: dict[int, threading.Event] = {}
        self.entered: dict[int, threading.Event] = {i: threading.Event() for i in range(3)}
        self.failing: set[int] = set()
        self.gated = backend.name == 'cpu'
        bodies: list[Callable] = [
            lambda p: p['next'].copy_(p['count'] + p['step']),
            lambda p: p['next'].add_(p['step']),
            lambda p: p['count'].copy_(p['next']),
        ]
        self.plan = Plan('count')
        self.graphs = []
        for index, body in enumerate(bodies):
            graph = Graph(f'segment{index}', self._wrapped(index, body),
                          ['step', 'count', 'next'])
            for port in graph.ports:
                graph.bind(port, self.buffers[port])
            graph.capture((1,), lane)
            self.graphs.append(graph)
            self.plan.add(graph, (1,), after=[index - 1] if index else [])
        lane.call(lambda: self.set(0)).result()

    def _wrapped(self, index: int, body: Callable) -> Callable:
        def run(ports, key):
            if self.gated:
                self.entered[index].set()
                gate = self.gates.get(index)
                if gate is not None:
                    assert gate.wait(20.0), 'nobody opened the gate'
                if index in self.failing:
                    raise ValueError(f'segment {index} fails')
            body(ports)
        return run

    def hold(self, index: int) -> threading.Event:
        """Make segment ``index`` wait (cpu); returns the event that lets it go on."""
        self.entered[index].clear()
        gate = self.gates[index] = threading.Event()
        return gate

    def set(self, count: int) -> None:
        self.buffers['count'].tensor.fill_(count)

    @property
    def count(self) -> int:
        return int(self.buffers['count'].tensor.item())

    def tick(self, step: int = 1, **options):
        return self.lane.run(
            self.plan, before=lambda: self.buffers['step'].tensor.fill_(step),
            after=lambda: self.count, **options)
