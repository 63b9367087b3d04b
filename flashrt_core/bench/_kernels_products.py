"""The products of a planner's layers as cases of bench kernels, in each precision."""
from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from flashrt_core.kernels import row_products
from flashrt_core.kernels._launch import draw
from flashrt_core.kernels._launch import overlaps
from flashrt_core.planners.qwen3_5 import products as precise
from flashrt_core.planners.qwen3_5.config import Qwen35Config
from flashrt_core.planners.qwen3_5.precision import quantise
from flashrt_core.planners.qwen3_5.precision import Weight
from flashrt_core.planners.qwen3_5.precision import weight

ROTATED = 256 << 20   # bytes; inputs are rotated until they exceed the L2 cache this far


@dataclass(frozen=True)
class Case:
    """One thing to time: ``launch(i)`` uses the inputs of set i; its operations and bytes.

    ``flops8``: operations of products of E4M3, which have a rate of their own.
    """

    name: str
    sets: int
    launch: Callable[[int], object]
    bytes: float
    flops: float = 0.0
    flops8: float = 0.0


def rotated(nbytes: float) -> int:
    """Return how many sets of inputs exceed the cache."""
    return max(1, min(64, -(-ROTATED // int(nbytes))))


def random(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    """Return normals drawn on the device, for what is too large to draw on the host."""
    return torch.randn(shape, device=device).to(dtype)


def sizes(c: Qwen35Config) -> dict[str, tuple[int, int]]:
    """Return the columns and the K of each product."""
    return {'mix': (c.channels + c.v_dim + 2 * c.value_heads, c.width),
            'qkv': (2 * c.q_dim + 2 * c.kv_dim, c.width), 'head': (c.vocab, c.width),
            'out': (c.width, c.q_dim), 'down': (c.width, c.mlp), 'gate_up': (2 * c.mlp, c.width)}


def stored(c: Qwen35Config, device: torch.device, N: int, K: int) -> tuple[list[Weight], int]:
    """Return enough weights [N, K] in the precision of ``c``, and the bytes of one."""
    found: list[Weight] = []
    while True:
        b = quantise(c, 'head', random(device, c.torch_dtype, N, K))
        nbytes = sum(t.numel() * t.element_size() for t in b.values())
        found.append(weight(b, 'head'))
        if len(found) == rotated(nbytes):
            return found, nbytes


def label(c: Qwen35Config, name: str) -> str:
    """Return the name of a case; bf16 is not said."""
    return name if c.precision == 'bf16' else f'{name} {c.precision}'


def products(c: Qwen35Config, device: torch.device, rows: list[int], split: bool,
             alone: bool = True) -> Iterator[Case]:
    """Yield the products of a layer and the head; with ``split`` those that leave sums.

    ``alone``: of rows with bits of their own, else of a chunk's.
    """
    pdl = overlaps(device)
    for name in ('out', 'down') if split else ('mix', 'qkv', *(('head',) if alone else ())):
        N, K = sizes(c)[name]
        weights, nbytes = stored(c, device, N, K)
        for M in rows:
            a = draw(device, c.torch_dtype, M, K)
            shape = (row_products.SPLITS, M, N) if split else (M, N)
            out = torch.empty(shape, device=device,
                              dtype=torch.float32 if split else c.torch_dtype)
            launch = partial(_multiply, precise.row_product, a, weights, out, pdl, alone)
            yield Case(f'{_of(c, name, alone)}, M={M}', len(weights), launch, nbytes,
                       2 * M * N * K)


def gated(c: Qwen35Config, device: torch.device, rows: list[int],
          alone: bool = True) -> Iterator[Case]:
    """Yield the gated product of the MLP; ``alone`` as in ``products``."""
    N, K = sizes(c)['gate_up']
    weights, nbytes = stored(c, device, N, K)
    for M in rows:
        a = draw(device, c.torch_dtype, M, K)
        out = torch.empty((M, N // 2), device=device, dtype=c.torch_dtype)
        launch = partial(_multiply, precise.row_gated, a, weights, out, overlaps(device), alone)
        yield Case(f'{_of(c, "gate_up", alone)}, M={M}', len(weights), launch, nbytes,
                   2 * M * N * K)


def _of(c: Qwen35Config, name: str, alone: bool) -> str:
    return label(c, name if alone else f'chunk {name}')


def _multiply(product: Callable[..., None], a: Tensor, weights: list[Weight], out: Tensor,
              pdl: bool, alone: bool, i: int) -> None:
    product(a, weights[i], out, pdl, alone)


def few_products(c: Qwen35Config, device: torch.device, T: int) -> Iterator[Case]:
    """Yield the products of a chunk of few tokens."""
    if not precise.is_few(c, T):
        yield from chunk_products(c, device, T)
        return
    yield from products(c, device, [T], False, alone=False)
    yield from products(c, device, [T], True, alone=False)
    yield from gated(c, device, [T], alone=False)


def chunk_products(c: Qwen35Config, device: torch.device, T: int) -> Iterator[Case]:
    """Yield the products of a chunk, of rows that are already as they read them."""
    for name in ('mix', 'out', 'gate_up', 'down'):
        N, K = sizes(c)[name]
        weights, nbytes = stored(c, device, N, K)
        plain = random(device, c.torch_dtype, T, K)
        x = precise.scaled(plain) if c.precision == 'fp8' else plain
        work = {'flops8' if c.precision == 'fp8' else 'flops': 2.0 * T * N * K}
        yield Case(f'{label(c, "chunk " + name)} {T}', len(weights),
                   partial(_chunk_product, x, weights), nbytes + 2 * T * N, **work)


def _chunk_product(x: Tensor | precise.Scaled, weights: list[Weight], i: int) -> None:
    precise.chunk_product(x, weights[i])


def chunk_rows(c: Qwen35Config, device: torch.device, T: int) -> Iterator[Case]:
    """Yield what lies between the products of a chunk: norm, gate, and FP8's scaling alone."""
    dtype = c.torch_dtype
    multiply = precise.ChunkProducts(
        c, {'norm': draw(device, torch.float32, c.width)}, random(device, dtype, T, c.width))
    x, delta = random(device, dtype, 2, T, c.width).unbind(0)
    gate_up = random(device, dtype, T, 2 * c.mlp)
    size = 1 if c.precision == 'fp8' else 2
    yield Case(f'{label(c, "chunk norm")} {T}', 1, lambda i: multiply.norm(x, delta, 'norm'),
               T * c.width * (6 + size))
    yield Case(f'{label(c, "chunk gate")} {T}', 1, lambda i: multiply.gate(gate_up),
               T * c.mlp * (4 + size))
    if c.precision == 'fp8':
        mixed = random(device, dtype, T, c.v_dim)
        yield Case(f'chunk scaling {T}', 1, lambda i: precise.scaled(mixed), 3 * T * c.v_dim)
