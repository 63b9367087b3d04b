"""Gumbel noise: the same bits everywhere, exact where draws are decided, its moments."""

from __future__ import annotations

import hashlib
import math
import os
from pathlib import Path
import subprocess
import sys

import numpy as np
import pytest
import torch

from flashrt_core.errors import ContractError
from flashrt_core.runtime import gumbel
from flashrt_core.runtime import philox


def test_noise_has_the_same_bits_in_numpy_and_torch_and_follows_every_key():
    seeds, branches = torch.tensor([5, -1, 2**62]), torch.tensor([0, 1, 2**32 - 1])
    positions = torch.tensor([0, 7, 2**32 + 3])
    one = gumbel.gumbel_reference(seeds, branches, positions, 1003)
    two = gumbel.gumbel_torch(seeds, branches, positions, 1003)
    assert torch.equal(one, two)
    base = gumbel.gumbel(5, 0, 0, 1003)
    for other in (gumbel.gumbel(6, 0, 0, 1003), gumbel.gumbel(5, 1, 0, 1003),
                  gumbel.gumbel(5, 0, 1, 1003)):
        assert not np.isclose(base, other).any()


def test_the_sampler_and_the_policy_read_different_streams():
    sampler = philox.uint32(1, 2, 3, 64, philox.SAMPLER)
    assert not (sampler == philox.uint32(1, 2, 3, 64, philox.ACTION_NOISE)).any()
    seen = gumbel.gumbel(1, 2, 3, 64)
    expected = -np.log(-np.log1p(-sampler.astype(np.float64) / 2.0**32))
    # Knots are dense where v is small; towards v = 1, among draws that lose, cells grow coarse.
    upper = expected > -1.0
    np.testing.assert_allclose(seen[upper], expected[upper], atol=2e-6)
    np.testing.assert_allclose(seen, expected, atol=1e-3)


def test_noise_is_exact_at_the_ends_of_its_range(monkeypatch):
    words = np.array([0, 1, 2, 3, 2**20, 2**31, 2**32 - 2**21, 2**32 - 2, 2**32 - 1], np.uint32)
    monkeypatch.setattr(philox, 'uint32', lambda *a: words)
    found = gumbel.gumbel(0, 0, 0, len(words))
    v = np.clip(words.astype(np.float64), 0.5, 2**32 - 0.5) / 2.0**32
    exact = -np.log(-np.log1p(-v))
    # The last cell is interpolated over a whole unit; only losing draws come from it.
    np.testing.assert_allclose(found[:6], exact[:6], atol=2e-7)
    assert np.isfinite(found).all() and (np.diff(found) < 0).sum() >= len(words) - 3


def test_noise_has_the_moments_of_a_gumbel_variable():
    noise = gumbel.gumbel(7, 0, 0, 400_000).astype(np.float64)
    assert abs(noise.mean() - np.euler_gamma) < 4 * 1.2825 / math.sqrt(len(noise))
    assert abs(noise.std() - math.pi / math.sqrt(6)) < 0.01
    for quantile in (0.01, 0.25, 0.5, 0.9, 0.999):
        point = -math.log(-math.log(quantile))
        share = (noise < point).mean()
        assert abs(share - quantile) < 4.5 * math.sqrt(quantile * (1 - quantile) / len(noise))


def test_a_table_of_other_bits_is_refused(monkeypatch):
    monkeypatch.setattr(gumbel, 'TABLE_SHA256', hashlib.sha256(b'').hexdigest())
    with pytest.raises(ContractError, match='Gumbel table has SHA-256'):
        gumbel.table.__wrapped__()


CHILD = """
import os
os.environ['TRITON_INTERPRET'] = '1'
import torch
from flashrt_core.kernels import gumbel
assert gumbel._check(torch.device('cpu'))
print('passed')
"""


def test_the_kernel_gives_the_bits_of_the_reference_in_tritons_interpreter():
    triton = pytest.importorskip('triton')
    if tuple(int(part) for part in triton.__version__.split('.')[:2]) < (3, 7):
        pytest.skip('older interpreters fail on numpy >= 2.4')
    root = str(Path(gumbel.__file__).parents[2])
    child = subprocess.run([sys.executable, '-c', CHILD], capture_output=True, text=True,
                           timeout=200, check=False, env=os.environ | {'PYTHONPATH': root})
    assert child.returncode == 0 and 'passed' in child.stdout, child.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='no CUDA device')
def test_the_kernel_is_selected_on_the_device_and_gives_the_bits_of_the_host():
    from flashrt_core.kernels import _triton
    keys = [torch.tensor(values) for values in ([5, -1], [0, 3], [7, 2**40])]
    there = gumbel.gumbel_torch(*(key.cuda() for key in keys), 248_320)
    assert torch.equal(there.cpu(), gumbel.gumbel_torch(*keys, 248_320))
    assert [v for k, v in _triton.choices().items() if k.startswith('gumbel_')] == ['triton']
