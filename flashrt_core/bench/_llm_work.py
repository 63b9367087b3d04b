"""What a planner's work costs at least: operations and bytes of each step, from its sizes."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
import math

import torch

from flashrt_core.bench.vla import fp8_rate
from flashrt_core.bench.vla import measure_ceilings
from flashrt_core.nn.delta import CHUNK
from flashrt_core.planners import Settings
from flashrt_core.planners.layout import MTP_KV
from flashrt_core.planners.layout import state_specs
from flashrt_core.planners.qwen3_5 import model
from flashrt_core.planners.qwen3_5 import Qwen35Config
from flashrt_core.planners.qwen3_5.weights import tensor_specs
from flashrt_core.runtime import Backend
from flashrt_core.runtime import BufferSpec
from flashrt_core.runtime import Kind

HOST_COPY_BYTES = 256 << 20


@dataclass(frozen=True)
class Ceilings:
    """Measured rates: dense product FLOP/s, device copy bytes/s (read plus written), host link.

    ``products``: FLOP/s of the products as their weights are stored, ``flops`` of all else.
    ``host``: bytes/s of one large copy from pinned host memory to the device.
    """

    products: float
    flops: float
    bytes: float
    host: float


def measure(backend: Backend, c: Qwen35Config) -> Ceilings:
    """Measure the rates; on the CPU small products and copies."""
    found = measure_ceilings(backend.device, c.torch_dtype)
    eighths = c.precision == 'fp8' and backend.name == 'cuda'  # 4 bits are widened
    products = fp8_rate(backend.device) if eighths else found.flops
    size = HOST_COPY_BYTES // (64 if backend.name == 'cpu' else 1)
    source = backend.empty((size,), torch.uint8, host=True).fill_(1)
    target = backend.empty((size,), torch.uint8)
    stream = backend.stream(0)
    samples = []
    with backend.use(stream):
        for _ in range(5):
            begin, end = backend.event(), backend.event()
            begin.record(stream)
            target.copy_(source, non_blocking=True)
            end.record(stream)
            end.wait(60.0)
            samples.append(begin.elapsed_us(end) * 1e-6)
    host = size / sorted(samples)[len(samples) // 2]
    return Ceilings(products, found.flops, found.bytes, host)


@dataclass(frozen=True)
class Work:
    """Operations of the products and all others (multiply-adds count twice), bytes moved."""

    products: float
    flops: float
    bytes: float

    def computing(self, ceilings: Ceilings) -> float:
        """Return the least seconds of the operations."""
        return self.products / ceilings.products + self.flops / ceilings.flops

    def seconds(self, ceilings: Ceilings) -> float:
        """Return the least time: of operations or bytes, whichever takes longer."""
        return max(self.computing(ceilings), self.bytes / ceilings.bytes)


class Sizes:
    """The sizes of one model as this bench counts them; ``weights`` are its CONSTANT buffers.

    Matrices of the layers are read once by each chunk or step, one row of the embedding a token.
    """

    def __init__(self, c: Qwen35Config, weights: Iterable[BufferSpec]) -> None:
        self.c = c
        stored = {spec.name: spec.row_nbytes for spec in weights}
        self.weights = sum(stored.values())
        self.layers = sum(n for name, n in stored.items() if name.startswith('layers.'))
        self.mtp = sum(n for name, n in stored.items() if name.startswith('mtp.'))
        tied = 'head' not in {name.split('.')[0] for name in stored}
        self.head = sum(n for name, n in stored.items()
                        if name.split('.')[0] == ('embed' if tied else 'head'))
        shapes = {name: spec.shape for name, spec in tensor_specs(c).items()}
        self.products = sum(
            math.prod(shape) for name, shape in shapes.items()
            if name.startswith('layers.') and len(shape) == 2 and not name.endswith('.conv'))
        memory = model.state_specs(c)
        self._full = sum(c.is_full(i) for i in range(c.layers))
        kv = [spec for spec in memory if spec.kind is Kind.KV]
        self.mtp_token = sum(s.row_nbytes // c.context for s in kv if s.name == MTP_KV)
        self.kv_token = sum(s.row_nbytes // c.context for s in kv) - self.mtp_token
        self.recurrent = sum(s.row_nbytes for s in memory if s.kind is Kind.RECURRENT)
        self.conv = sum(s.row_nbytes for s in memory if s.kind is Kind.CONV)
        self.small = sum(
            _aligned(spec.row_nbytes)
            for spec in state_specs(memory, c.width, c.vocab, c.context, c.torch_dtype)
            if spec.in_arena)

    def capsule(self, tokens: int) -> int:
        """Return the bytes of a capsule of so many tokens."""
        return self.small + tokens * self.kv_token + max(0, tokens - 1) * self.mtp_token

    def state(self) -> int:
        """Return the bytes of the live state."""
        return self.small + self.c.context * (self.kv_token + self.mtp_token)

    def branches(self, s: Settings) -> int:
        """Return the bytes of the branches: state and KV tail of each."""
        tail = self.kv_token + (self.c.width * self.c.torch_dtype.itemsize + 4) * self.c.mtp
        return s.branches * (self.small + s.tail_tokens * tail)

    def tokens(self, start: int, count: int) -> Work:
        """Return the work of ``count`` tokens after ``start``, without the head.

        Counts the products, causal attention, the chunked delta rule and MTP's keys.
        """
        c = self.c
        products = 2.0 * self.products * count
        flops = self._full * 4.0 * c.q_dim * count * (start + (count + 1) / 2)
        rule = 6 * c.key_dim * c.value_dim + 6 * CHUNK * c.key_dim
        flops += (c.layers - self._full) * c.value_heads * rule * count
        if c.mtp:
            products += 2.0 * count * c.width * (2 * c.width + 2 * c.kv_dim)
        nbytes = self.layers + (start + count) * self.kv_token + 2 * self.recurrent
        return Work(products, flops, nbytes)

    def first_token(self, start: int, count: int) -> Work:
        """Return the work from ``count`` tokens after ``start`` to one sampled token."""
        found, c = self.tokens(start, count), self.c
        return Work(found.products, found.flops + 2.0 * c.vocab * c.width,
                    found.bytes + self.head)

    def step(self, position: int, rows: int = 1, private: int = 1) -> Work:
        """Return the work of one step of ``rows`` tokens that read one KV.

        :param private: recurrent states read and written.
        """
        c = self.c
        products = 2.0 * rows * (self.products + c.vocab * c.width)
        flops = rows * self._full * 4.0 * c.q_dim * position
        nbytes = (self.layers + self.head + position * self.kv_token
                  + 2 * private * (self.recurrent + self.conv))
        return Work(products, flops, nbytes)

    def drafts(self, position: int, K: int) -> Work:
        """Return the work of ``K`` drafts, one after the other: MTP's layer and the head."""
        one = self.mtp + self.head + position * self.mtp_token
        return Work(0.0, 0.0, K * one)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 256) * 256
