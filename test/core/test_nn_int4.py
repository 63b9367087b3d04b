"""Weights of 4 bits: layout, error, refusals."""
from __future__ import annotations

import pytest
import torch

from flashrt_core.errors import ConfigError
from flashrt_core.nn import int4


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_byte_holds_two_values_that_lie_64_apart() -> None:
    whole = torch.arange(128) % 16 - 8
    whole[64:] = -whole[:64].clamp(-7, 8)
    weight = torch.cat([whole, 3.0 * whole])[None].float()
    w = int4.quantise(weight)
    assert w.data.shape == (1, 128) and w.scale.tolist() == [[1.0], [3.0]]
    assert torch.equal(w.data[0, :64] & 15, (whole[:64] + 8).to(torch.uint8))
    assert torch.equal(w.data[0, :64] >> 4, (whole[64:] + 8).to(torch.uint8))
    assert torch.equal(w.data[0, :64], w.data[0, 64:]) and torch.equal(w.values(), weight)


def test_each_group_is_within_half_a_step_and_its_largest_value_exact() -> None:
    weight = normal(5, 384) * torch.tensor([1e-3, 1.0, 30.0, -5.0, 1e4])[:, None]
    weight[1, 128:256] = 0.0
    w = int4.quantise(weight)
    groups, found = (t.unflatten(1, (3, 128)) for t in (weight, w.values()))
    step = w.scale.t().abs()[:, :, None]
    # The value opposite the largest one has one step less: it is cut there.
    assert bool(((found - groups).abs() <= torch.where(
        groups / w.scale.t()[:, :, None] > 7.0, 1.0, 0.5001) * step).all())
    at = groups.abs().argmax(2, keepdim=True)
    torch.testing.assert_close(found.gather(2, at), groups.gather(2, at), rtol=1e-6, atol=0)
    assert w.scale[1, 1] == 1.0 and not found[1, 1].any()


def test_some_channels_of_a_weight_are_a_view_of_it() -> None:
    w = int4.quantise(normal(6, 256))
    few = w.rows(slice(2, 5))
    assert few.data.data_ptr() == w.data[2:].data_ptr()
    assert torch.equal(few.values(), w.values()[2:5])


def test_what_cannot_be_quantised_is_refused() -> None:
    with pytest.raises(ConfigError, match='100 columns has no whole groups of 128'):
        int4.quantise(normal(4, 100))
    for bad in (float('nan'), float('inf')):
        weight = normal(4, 128)
        weight[2, 3] = bad
        with pytest.raises(ConfigError, match='NaN or infinity'):
            int4.quantise(weight)
