"""FP8 products: quantisation, static scales, calibration."""
from __future__ import annotations

import pytest
import torch

from flashrt_core.errors import ConfigError
from flashrt_core.nn import fp8


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def quantised(weight: torch.Tensor, largest: float) -> fp8.Fp8Weight:
    return fp8.Fp8Weight(*fp8.quantise(weight), torch.tensor(fp8.input_scale(largest)))


def test_each_channel_ends_at_one_of_the_tops_and_its_error_is_half_a_step() -> None:
    weight = normal(5, 64) * torch.tensor([1e-3, 1.0, 30.0, 0.0, 1e4])[:, None]
    data, scale = fp8.quantise(weight)
    top = data.float().abs().amax(dim=1)
    assert set(top.tolist()) <= {0.0, *fp8.TOPS} and top[3] == 0.0 and scale[3] == 1.0
    error = (fp8.Fp8Weight(data, scale, torch.tensor(1.0)).values() - weight).abs()
    assert bool((error <= weight.abs() / 16 + scale[:, None] * 2.0**-9).all())  # half a step


def squared_error(x: torch.Tensor, data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (data.float() * scale[:, None] - x).double().square().sum(dim=1)


@pytest.mark.parametrize('weight, most', [
    (normal(64, 1024), 0.97),
    (torch.rand(64, 1024, generator=torch.Generator().manual_seed(0)) - 0.5, 0.9),
], ids=['gaussian', 'uniform'])
def test_a_channels_scale_leaves_the_least_squared_error_of_those_tried(
        weight: torch.Tensor, most: float) -> None:
    found = squared_error(weight, *fp8.quantise(weight))
    full = squared_error(weight, *fp8.quantise_rows(weight))  # each up to 448
    assert bool((found <= full * (1 + 1e-6)).all())
    assert float(found.sum()) < most * float(full.sum())


def test_what_lies_on_e4m3_over_a_channels_scale_comes_back_as_it_is() -> None:
    data = normal(8, 64).mul(200).clamp(-448, 448).to(fp8.E4M3).float()
    data[:, 0] = 448.0
    weight = data * torch.logspace(-3, 3, 8)[:, None]
    back = fp8.ChannelWeight(*fp8.quantise(weight)).values()
    torch.testing.assert_close(back, weight, rtol=1e-6, atol=0.0)


def test_the_product_is_that_of_the_values_it_stands_for() -> None:
    x, weight, bias = normal(2, 7, 64).bfloat16(), normal(48, 64, seed=1), normal(48, seed=2)
    w = quantised(weight, float(x.abs().max()))
    seen = (x.float() / w.input_scale).to(fp8.E4M3).float() * w.input_scale
    expected = seen @ w.values().t() + bias
    found = fp8.linear(x, w, bias)
    assert found.shape == (2, 7, 48) and found.dtype == x.dtype
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)
    exact = x.float() @ weight.t() + bias
    cosine = torch.cosine_similarity(found.flatten().float(), exact.flatten(), 0)
    assert cosine > 0.998


def test_inputs_beyond_the_static_scale_saturate_and_stay_finite() -> None:
    w = quantised(torch.eye(16), 1.0)
    x = torch.tensor([1e6, -1e6, 0.5] + [0.0] * 13, dtype=torch.bfloat16)[None]
    found = fp8.linear(x, w)[0].float()
    top = 448.0 * float(w.input_scale)
    assert found[:2].tolist() == pytest.approx([top, -top], rel=1e-2)
    assert found[2] == pytest.approx(0.5, rel=0.07) and bool(found.isfinite().all())


def test_a_plain_weight_gives_the_plain_product() -> None:
    x, weight, bias = normal(3, 8), normal(4, 8, seed=1), normal(4, seed=2)
    assert torch.equal(fp8.linear(x, weight, bias), torch.nn.functional.linear(x, weight, bias))


def test_calibration_notes_the_largest_input_and_changes_no_result() -> None:
    tensors = {'a': normal(4, 8), 'b': normal(4, 8, seed=1), 'norm': normal(8, seed=2)}
    watched = fp8.Observing(tensors, ('a', 'b'))
    assert watched['norm'] is tensors['norm'] and list(watched) == list(tensors)
    for top in (0.5, -3.0, 1.0):
        x = torch.full((2, 8), top)
        assert torch.equal(fp8.linear(x, watched['a']), x @ tensors['a'].t())
    with pytest.raises(ConfigError, match=r"1 products saw no finite input.*'b'"):
        watched.largest()
    fp8.linear(torch.full((2, 8), 7.0), watched['b'])
    assert watched.largest() == {'a': 3.0, 'b': 7.0}


def test_quantised_weights_come_with_their_scales() -> None:
    data, scale = fp8.quantise(normal(4, 16))
    tensors = {'a': data, 'a.scale': scale, 'a.input_scale': torch.tensor(0.5), 'n': normal(4)}
    weights = fp8.Fp8Weights(tensors)
    found = weights['a']
    assert isinstance(found, fp8.Fp8Weight) and found.scale is scale
    assert weights['n'] is tensors['n'] and len(weights) == 4


@pytest.mark.parametrize('bad', [float('nan'), float('inf')])
def test_values_that_are_not_finite_are_refused(bad: float) -> None:
    weight = normal(4, 8)
    weight[2, 3] = bad
    with pytest.raises(ConfigError, match='NaN or infinity'):
        fp8.quantise(weight)
    with pytest.raises(ConfigError, match='calibrate on real inputs'):
        fp8.input_scale(bad)
    with pytest.raises(ConfigError, match='calibrate on real inputs'):
        fp8.input_scale(0.0)


def test_rows_scaled_as_they_come_use_the_whole_range_whatever_their_size() -> None:
    x = normal(4, 64) * torch.tensor([1e-4, 1.0, 1e5, 0.0])[:, None]
    q, scale = fp8.quantise_rows(x)
    assert q.float().abs().amax(1).tolist() == [448.0, 448.0, 448.0, 0.0] and scale[3] == 1.0
    weight = fp8.ChannelWeight(*fp8.quantise(normal(48, 64, seed=1)))
    expected = (q.float() * scale[:, None]) @ weight.values().t()
    found = fp8.multiply_reference(q, scale, weight)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    cosine = torch.cosine_similarity(found[:3], x[:3] @ normal(48, 64, seed=1).t())
    assert bool((cosine > 0.998).all())


def test_some_channels_of_a_weight_are_a_view_and_single_ones_are_looked_up() -> None:
    weight = fp8.ChannelWeight(*fp8.quantise(normal(6, 16)))
    few = weight.rows(slice(2, 5))
    assert few.data.data_ptr() == weight.data[2:].data_ptr()
    assert torch.equal(few.values(), weight.values()[2:5])
    assert torch.equal(weight.look_up(torch.tensor([5, 0, 5])), weight.values()[[5, 0, 5]])


def test_rows_that_are_not_finite_stay_so() -> None:
    x = normal(3, 16)
    x[1, 4] = float('nan')
    q, scale = fp8.quantise_rows(x)
    weight = fp8.ChannelWeight(*fp8.quantise(torch.eye(16)))
    assert fp8.multiply_reference(q, scale, weight).isfinite().all(1).tolist() == [
        True, False, True]


def test_this_device_passes_the_check() -> None:
    assert fp8.selected(torch.device('cpu')) and fp8.rows_selected(torch.device('cpu'))


@pytest.mark.gpu
def test_the_gpu_multiplies_rows_scaled_as_they_come() -> None:
    assert fp8.rows_selected(torch.device('cuda', 0))
