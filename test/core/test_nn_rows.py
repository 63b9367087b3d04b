"""Rows whose bits depend on that row alone; causal attention and stores by device data."""
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from flashrt_core.nn.attention import attend_causal
from flashrt_core.nn.attention import store_rows
from flashrt_core.nn.norms import rms_norm
from flashrt_core.nn.rows import attend_row
from flashrt_core.nn.rows import key_span
from flashrt_core.nn.rows import row_by_row
from flashrt_core.nn.rows import rows_linear
from flashrt_core.nn.rows import rows_norm


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=['cpu', pytest.param('cuda', marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_a_row_of_a_product_has_the_bits_it_has_alone(dtype: torch.dtype, device: str) -> None:
    x, weight = (t.to(device, dtype) for t in (normal(19, 96), normal(80, 96, seed=1)))
    together = rows_linear(x, weight)
    for m in range(19):
        assert torch.equal(rows_linear(x[m:m + 1], weight)[0], together[m])
    assert torch.equal(rows_linear(x[3:8], weight), together[3:8])
    torch.testing.assert_close(together.float(), x.float() @ weight.float().t(),
                               rtol=1e-2 if dtype == torch.bfloat16 else 1e-5,
                               atol=1e-1 if dtype == torch.bfloat16 else 1e-4)


@pytest.mark.parametrize('fn', [torch.sigmoid, torch.exp, torch.cos, F.silu, F.softplus])
def test_a_row_of_a_function_has_the_bits_it_has_alone(
        fn: Callable[[Tensor], Tensor], device: str) -> None:
    x = normal(19, 11).to(device)
    together = row_by_row(fn, x)
    assert all(torch.equal(row_by_row(fn, x[m:m + 1])[0], together[m]) for m in range(19))
    torch.testing.assert_close(together, fn(x))


@pytest.mark.parametrize('shape', [(64,), (1000,), (5120,), (4, 32), (24, 256)])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_a_row_of_a_norm_has_the_bits_it_has_alone(
        shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    wide = normal(19, *shape[:-1], 2, shape[-1]).to(device, dtype)
    weight = normal(shape[-1], seed=1).to(device)
    x = wide.select(-2, 0)  # heads lie apart, as in a merged projection
    together = rows_norm(x, weight, 1e-6)
    for rows in (1, 2, 5, 16):
        for m in range(0, 19 - rows, 3):
            part = wide[m:m + rows].clone().select(-2, 0)
            assert torch.equal(rows_norm(part, weight, 1e-6), together[m:m + rows])
    torch.testing.assert_close(together, rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize('position', [0, 1, 37, 99])
def test_a_query_sees_the_keys_up_to_its_own_and_nothing_of_the_rest(position: int) -> None:
    q, kv = normal(6, 16), normal(100, 2, 2, 16, seed=1)
    k, v = kv[:position + 1].repeat_interleave(3, 2).permute(1, 2, 0, 3)  # [6, t, 16] each
    expected = F.scaled_dot_product_attention(q[:, None], k, v)[:, 0]
    kv[position + 1:] = torch.nan
    found = attend_row(q, kv, torch.tensor(position))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    kv[position + 1:] = 1e30
    assert torch.equal(attend_row(q, kv, torch.tensor(position)), found)


def test_the_keys_looked_at_grow_in_steps_up_to_all() -> None:
    spans = [key_span(torch.tensor(p), 700) for p in (0, 255, 256, 600, 699)]
    assert spans == [256, 256, 512, 700, 700]


@pytest.mark.parametrize('position, length', [(0, 1), (0, 8), (5, 3), (40, 8)])
def test_causal_attention_of_a_chunk_is_that_of_its_queries_alone(
        position: int, length: int) -> None:
    q, kv = normal(8, 6, 16), normal(64, 2, 2, 16, seed=1)
    kv[position + length:] = torch.nan
    found = attend_causal(q, kv, torch.tensor(position), torch.tensor(length))
    assert bool(found.isfinite().all())
    for t in range(length):
        alone = attend_row(q[t], kv, torch.tensor(position + t))
        torch.testing.assert_close(found[t], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('position, count', [(0, 4), (3, 2), (7, 0), (9, 1), (6, 4)])
def test_a_store_writes_the_counted_rows_and_nothing_else(position: int, count: int) -> None:
    kv, new = torch.full((10, 2, 1, 4), torch.nan), normal(4, 2, 1, 4)
    store_rows(kv, new, torch.tensor(position), torch.tensor(count))
    assert torch.equal(kv[position:position + count], new[:count])
    rest = torch.cat([kv[:position], kv[position + count:]])
    assert len(rest) == 10 - count and bool(rest.isnan().all())
