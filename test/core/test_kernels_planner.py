"""The planner's kernels: equal to their references, and a row's bits are its own."""
from __future__ import annotations

import os
from pathlib import Path
import subprocess
import sys

import pytest
import torch

import flashrt_core
from flashrt_core.kernels import _triton
from flashrt_core.kernels import decode_attention
from flashrt_core.kernels import delta_chunk
from flashrt_core.kernels import delta_step
from flashrt_core.kernels import fp8_rows
from flashrt_core.kernels import prefill_attention
from flashrt_core.kernels import row_int4
from flashrt_core.kernels import row_nvfp4
from flashrt_core.kernels import row_products
from flashrt_core.kernels import token_rows

KERNELS = [
    row_products, fp8_rows, row_int4, row_nvfp4, decode_attention, delta_step, delta_chunk,
    prefill_attention, token_rows]


def name(kernel: object) -> str:
    return kernel.__name__.rsplit('.', 1)[1]


def test_the_kernels_equal_their_references_in_tritons_interpreter():
    triton = pytest.importorskip('triton')
    if tuple(int(part) for part in triton.__version__.split('.')[:2]) < (3, 7):
        pytest.skip('older interpreters fail on numpy >= 2.4')
    child = subprocess.run(
        [sys.executable, str(Path(__file__).with_name('_interpret_planner.py'))],
        capture_output=True, text=True, timeout=300, check=False,
        env=os.environ | {'PYTHONPATH': str(Path(flashrt_core.__path__[0]).parent)})
    assert child.returncode == 0, child.stderr
    assert child.stdout.count('passed') == len(KERNELS)


@pytest.mark.gpu
@pytest.mark.parametrize('kernel', KERNELS, ids=name)
def test_the_kernel_passes_its_check_on_cuda(kernel):
    assert kernel.selected(torch.device('cuda', 0)), _triton.choices()


@pytest.mark.gpu
@pytest.mark.parametrize(
    'kernel', [row_products, decode_attention, prefill_attention, token_rows], ids=name)
def test_the_kernel_passes_its_check_with_weights_or_keys_in_fp8_on_cuda(kernel):
    assert kernel.fp8_selected(torch.device('cuda', 0)), _triton.choices()


@pytest.mark.gpu
def test_rows_of_real_size_agree_and_have_bits_of_their_own():
    device, dtype = torch.device('cuda', 0), torch.bfloat16
    assert row_products.check(device, dtype, 16480, 5120, 1e-2)
    assert row_products.check(device, dtype, 5120, 17408, 1e-2)
    for N, K in ((16480, 5120), (5120, 17408)):
        assert row_products.check(device, dtype, N, K, 1e-2, narrow=True)
        assert row_int4.check(device, dtype, N, K, 1e-2)
        assert row_nvfp4.check(device, dtype, N, K, 1e-2)
        assert fp8_rows.check(device, dtype, 70, K, 1e-2)
    assert delta_step.check(device, dtype, 48, 16, 128, 128, 1e-2)
    lengths = (2046, 2047, 2048, 2049, 9000, 16000, 16001, 16383)
    assert decode_attention.check(device, dtype, 24, 4, 256, lengths, 1e-2)
    for T, length in ((2048, 2048), (2048, 1999)):
        assert delta_chunk.check(device, dtype, (T, length), 48, 16, 128, 1e-2)
        assert prefill_attention.check(device, dtype, 24, 4, 256, T, length, 3000, 1e-2)
    assert token_rows.check(device, dtype, 2048, 24, 4, 256, 64, 1e-2)
