"""Selectors of one chunk among several: what they choose, by loops and by hand."""
from __future__ import annotations

import numpy as np
import pytest
import torch

from flashrt_core.errors import ConfigError
from flashrt_core.policies import selectors


def draw(n: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((n, 6, 3)))


@pytest.mark.parametrize('n', [2, 3, 8, 16])
def test_the_medoid_has_the_least_mean_distance_to_the_others(n):
    chunks = draw(n).numpy()
    distance = np.array([[np.sqrt(np.mean((a - b) ** 2)) for b in chunks] for a in chunks])
    found = selectors.select(torch.from_numpy(chunks))
    mean = distance.sum(1) / (n - 1)
    np.testing.assert_allclose(found.scores.numpy(), -mean, atol=1e-12)
    assert int(found.selected) == int(mean.argmin())
    pairs = distance[np.triu_indices(n, 1)]
    assert float(found.spread) == pytest.approx(pairs.mean(), rel=1e-12)


def test_an_outlier_moves_the_mean_and_not_the_medoid():
    chunks = torch.tensor([0.0, 1.0, 2.0, 3.0, 40.0]).view(5, 1, 1)
    assert int(selectors.select(chunks, 'medoid').selected) == 2
    assert int(selectors.select(chunks, 'mean_nearest').selected) == 3
    assert int(selectors.select(chunks, 'first').selected) == 0


@pytest.mark.parametrize('name', selectors.SELECTORS)
def test_one_chunk_is_chosen_without_spread_and_the_first_of_equals(name):
    alone = selectors.select(draw(1), name)
    assert (int(alone.selected), float(alone.spread)) == (0, 0.0)
    equal = selectors.select(draw(1).expand(4, 6, 3), name)
    assert (int(equal.selected), float(equal.spread)) == (0, 0.0)


@pytest.mark.parametrize('name', selectors.SELECTORS)
def test_a_chunk_that_is_not_finite_is_not_chosen(name):
    chunks = draw(3)
    chunks[0, 2, 1] = float('nan')
    found = selectors.select(chunks, name)
    assert int(found.selected) != 0 and bool(found.spread.isfinite())
    assert found.scores[0] == -np.inf


@pytest.mark.parametrize('name', selectors.SELECTORS)
def test_a_chunk_that_is_not_finite_counts_for_none_of_the_others(name):
    chunks = draw(7) + 50.0
    alone = selectors.select(chunks, name)
    lost = torch.full_like(chunks[:1], float('nan'))
    found = selectors.select(torch.cat([chunks, lost]), name)
    assert int(found.selected) == int(alone.selected)
    assert 0.5 < float(found.spread / alone.spread) <= 1.0


def test_the_spread_has_the_unit_of_the_actions():
    chunks = draw(5)
    assert float(selectors.spread(chunks * 7)) == pytest.approx(7 * float(
        selectors.spread(chunks)), rel=1e-12)


def test_an_unknown_selector_is_named():
    with pytest.raises(ConfigError, match=r"'best'.*medoid"):
        selectors.select(draw(2), 'best')
