"""Norms, rotary embedding, time table and patches against their formulas."""
from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from flashrt_core.nn import layer_norm
from flashrt_core.nn import rms_norm
from flashrt_core.nn import rope_frequencies
from flashrt_core.nn import rope_tables
from flashrt_core.nn import rotate
from flashrt_core.nn import SiglipDims
from flashrt_core.nn import time_table
from flashrt_core.nn.siglip import patchify


def test_rms_norm_multiplies_by_one_plus_its_weight():
    x, w = torch.randn(3, 8), torch.randn(8)
    expected = F.rms_norm(x, (8,), eps=1e-6) * (1 + w)
    torch.testing.assert_close(rms_norm(x, w, 1e-6), expected)


def test_norms_keep_the_dtype_of_the_stream():
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    assert rms_norm(x, torch.zeros(8), 1e-6).dtype is torch.bfloat16
    assert layer_norm(x, torch.ones(8), torch.zeros(8), 1e-6).dtype is torch.bfloat16


def test_rotated_products_depend_on_the_distance_of_positions_alone():
    frequencies = rope_frequencies(16, 10000.0)
    q, k = torch.randn(1, 1, 16), torch.randn(1, 1, 16)

    def product(at_q: int, at_k: int) -> torch.Tensor:
        cos, sin = rope_tables(torch.tensor([at_q, at_k]), frequencies)
        return (rotate(q, cos[:1], sin[:1]) * rotate(k, cos[1:], sin[1:])).sum()

    torch.testing.assert_close(product(7, 3), product(104, 100), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(product(7, 3), product(7, 4), atol=1e-3)


def test_position_zero_is_not_rotated():
    cos, sin = rope_tables(torch.tensor([0]), rope_frequencies(16, 10000.0))
    x = torch.randn(1, 2, 16)
    assert torch.equal(rotate(x, cos, sin), x)


def test_the_time_table_starts_at_noise_and_follows_the_formula():
    table = time_table(10, 8, 4e-3, 4.0)
    assert table.shape == (10, 8) and table.dtype is torch.float32
    for step in (0, 3, 9):
        for i in range(4):
            period = 4e-3 * (4.0 / 4e-3) ** (i / 3)
            angle = 2 * math.pi * (1 - step / 10) / period
            assert math.isclose(table[step, i], math.sin(angle), abs_tol=1e-6)
            assert math.isclose(table[step, 4 + i], math.cos(angle), abs_tol=1e-6)


def test_patches_are_rows_of_pixels_in_reading_order():
    dims = SiglipDims(image_size=4, patch_size=2, width=1, layers=1, heads=1, mlp=1)
    image = torch.arange(48, dtype=torch.uint8).view(1, 4, 4, 3)
    patches = patchify(image, dims)
    assert patches.shape == (1, 4, 12)
    assert torch.equal(patches[0, 1], image[0, :2, 2:].reshape(-1))
    assert torch.equal(patches[0, 2], image[0, 2:, :2].reshape(-1))
