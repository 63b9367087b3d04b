"""Attention against torch's own, and the cases padding makes."""
from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from flashrt_core.nn import attend
from flashrt_core.nn import attend_shared_prefix


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None):
    y = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask, enable_gqa=True)
    return y.transpose(1, 2).flatten(2)


@pytest.mark.parametrize('heads, kv_heads', [(4, 4), (4, 2), (4, 1)])
def test_grouped_attention_equals_torch(heads, kv_heads):
    q = draw(2, 5, heads, 8)
    k, v = draw(2, 7, kv_heads, 8, seed=1), draw(2, 7, kv_heads, 8, seed=2)
    mask = torch.tensor([1, 1, 0, 1, 0, 0, 1], dtype=torch.bool)
    torch.testing.assert_close(attend(q, k, v), reference(q, k, v, None))
    torch.testing.assert_close(attend(q, k, v, mask), reference(q, k, v, mask.expand(5, 7)))


@pytest.mark.parametrize('heads, kv_heads', [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize('rows', [1, 3])
def test_a_shared_prefix_equals_one_repeated_for_every_row(heads, kv_heads, rows):
    q, k, v = (draw(rows, 5, n, 8, seed=i) for i, n in enumerate((heads, kv_heads, kv_heads)))
    pk, pv = draw(6, kv_heads, 8, seed=5), draw(6, kv_heads, 8, seed=6)
    prefix_mask = torch.tensor([1, 1, 0, 1, 1, 0], dtype=torch.bool)
    suffix_mask = torch.ones(5, 5, dtype=torch.bool).tril()
    y = attend_shared_prefix(q, k, v, pk, pv, prefix_mask, suffix_mask)
    every = torch.cat([prefix_mask.expand(5, 6), suffix_mask], dim=1)
    expected = reference(
        q, torch.cat([pk.expand(rows, -1, -1, -1), k], 1),
        torch.cat([pv.expand(rows, -1, -1, -1), v], 1), every)
    torch.testing.assert_close(y, expected)


def test_masked_keys_have_no_influence_whatever_they_hold():
    q, k, v = draw(1, 3, 2, 8), draw(1, 4, 2, 8, seed=1), draw(1, 4, 2, 8, seed=2)
    mask = torch.tensor([1, 1, 0, 0], dtype=torch.bool)
    before = attend(q, k, v, mask)
    k[:, 2:], v[:, 2:] = 1e4, -1e4
    assert torch.equal(before, attend(q, k, v, mask))


def test_queries_without_any_valid_key_stay_finite():
    q, k, v = draw(1, 3, 2, 8), draw(1, 4, 2, 8, seed=1), draw(1, 4, 2, 8, seed=2)
    assert attend(q, k, v, torch.zeros(4, dtype=torch.bool)).isfinite().all()
