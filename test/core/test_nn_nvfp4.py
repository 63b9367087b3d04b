"""Weights in NVFP4: layout, values and scales of its definition, refusals."""
from __future__ import annotations

import numpy as np
import pytest
import torch

from flashrt_core.errors import ConfigError
from flashrt_core.nn import int4
from flashrt_core.nn import nvfp4
from flashrt_core.nn.nvfp4 import Nvfp4Weight

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # OCP Microscaling Formats, table of FP4
# E4M3: 7 - 8 of exponent's bias, subnormals below 2**-6, no infinity; up to 448.
E4M3 = np.array([(m if e == 0 else 8 + m) * 2.0 ** (max(e, 1) - 10)
                 for e in range(16) for m in range(8)][:-1], np.float32)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def nearest(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Index of the nearest entry of an ascending table, of two the even one."""
    above = np.clip(np.searchsorted(table, values), 1, len(table) - 1)
    low, high = values - table[above - 1], table[above] - values
    return np.where((low < high) | ((low == high) & (above % 2 == 1)), above - 1, above)


def defined(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """Codes [N, K], scales [N, K / 16] and the scale of all of one tensor."""
    blocks = weight.reshape(len(weight), -1, 16)
    whole = np.abs(weight).max() / np.float32(6 * 448)
    scale = E4M3[nearest(np.abs(blocks).max(2) / np.float32(6) / whole, E4M3)]
    with np.errstate(invalid='ignore', divide='ignore'):
        sizes = np.abs(blocks) / (scale * whole)[:, :, None]
    codes = nearest(np.nan_to_num(sizes, posinf=0.0), np.array(E2M1, np.float32))
    return (codes + 8 * (blocks < 0)).reshape(weight.shape).astype(np.uint8), scale, whole


def codes_of(w: Nvfp4Weight) -> np.ndarray:
    """Codes [N, K]: of each 8 bytes the low halves, then the high ones."""
    blocks = w.data.numpy().reshape(len(w.data), -1, 8)
    return np.concatenate([blocks & 15, blocks >> 4], 2).reshape(len(w.data), -1)


def test_a_byte_holds_two_values_of_a_block_that_lie_8_apart() -> None:
    block = torch.tensor([*E2M1, *(-value for value in reversed(E2M1))])
    w = nvfp4.quantise(torch.cat([block, 2 * block])[None] * 224)
    assert w.data.shape == (1, 16) and w.whole.tolist() == [1.0]
    assert w.scale.float().tolist() == [[224.0], [448.0]]
    assert (w.data[0, :8] & 15).tolist() == list(range(8))
    assert (w.data[0, :8] >> 4).tolist() == [15, 14, 13, 12, 11, 10, 9, 0]
    assert torch.equal(w.data[0, :8], w.data[0, 8:])
    assert torch.equal(w.values(), torch.cat([block, 2 * block])[None] * 224)


def test_codes_and_scales_are_those_of_the_definition_each_row_a_tensor_of_its_own() -> None:
    weight = normal(6, 272) * torch.tensor([1e-3, 1.0, 30.0, -5.0, 1e4, 1.0])[:, None]
    weight[1, 16:32] = 0.0
    weight[2, :16] *= 1e-5  # the scale is a subnormal
    weight[3, :16] *= 1e-7  # and here 0
    weight[5] = 0.0
    w = nvfp4.quantise(weight)
    for row in range(5):
        codes, scale, whole = defined(weight[row:row + 1].numpy())
        assert w.whole[row].item() == whole
        assert np.array_equal(w.scale.float().numpy()[:, row], scale[0])
        assert np.array_equal(codes_of(w)[row], codes[0])
        expected = np.array(E2M1)[codes & 7] * np.where(codes > 7, -1, 1)
        expected = expected * np.repeat(scale, 16, 1) * np.float64(whole)
        np.testing.assert_allclose(w.values()[row:row + 1].numpy(), expected, rtol=1e-7, atol=0)
    assert 0 < w.scale.float()[0, 2] < 2.0**-6 and w.scale.float()[0, 3] == 0
    assert w.whole[5] == 1.0 and not w.values()[5].any()


def test_a_value_between_two_goes_to_the_even_one() -> None:
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    w = nvfp4.quantise(torch.cat([middles, -middles])[None] * 448)
    assert w.scale.float().tolist() == [[448.0]] and w.whole.tolist() == [1.0]
    assert (w.values()[0] / 448).tolist() == [
        0, 1, 1, 2, 2, 4, 4, 6, 0, -1, -1, -2, -2, -4, -4, -6]


def test_of_normals_the_error_is_below_int4s_and_of_even_values_half_as_large_again() -> None:
    def error(weight: torch.Tensor, found: torch.Tensor) -> float:
        return float((found - weight).norm() / weight.norm())

    weight = normal(64, 1280)
    mine, other = (error(weight, kind.quantise(weight).values()) for kind in (nvfp4, int4))
    assert 0.09 < mine < 0.1 and mine < other
    weight = 2 * torch.rand(64, 1280, generator=torch.Generator().manual_seed(0)) - 1
    mine, other = (error(weight, kind.quantise(weight).values()) for kind in (nvfp4, int4))
    assert mine == pytest.approx(1.5 * other, rel=0.05)


def test_rows_as_checkpoints_store_them_keep_every_bit() -> None:
    codes, scale, whole = defined(normal(5, 64).numpy())
    stored = torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << 4)
    scales = torch.from_numpy(scale).to(torch.float8_e4m3fn)
    w = nvfp4.from_pairs(stored, scales, torch.tensor([whole]))
    assert np.array_equal(codes_of(w), codes)
    assert torch.equal(w.scale.t().view(torch.uint8), scales.view(torch.uint8))
    assert w.whole.tolist() == [float(whole)] * 5


def test_some_channels_of_a_weight_are_a_view_of_it() -> None:
    w = nvfp4.quantise(normal(6, 256))
    few = w.rows(slice(2, 5))
    assert few.data.data_ptr() == w.data[2:].data_ptr()
    assert torch.equal(few.values(), w.values()[2:5])


def test_what_cannot_be_quantised_is_refused() -> None:
    with pytest.raises(ConfigError, match='100 columns has no whole groups of 16'):
        nvfp4.quantise(normal(4, 100))
    for bad in (float('nan'), float('inf')):
        weight = normal(4, 128)
        weight[2, 3] = bad
        with pytest.raises(ConfigError, match='NaN or infinity'):
            nvfp4.quantise(weight)
