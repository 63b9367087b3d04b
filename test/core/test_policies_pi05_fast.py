"""Pi0.5's expert through kernels: equal to the plain layers, selected by its checks."""
from __future__ import annotations

from dataclasses import replace
import os
from pathlib import Path
import subprocess
import sys

import pytest
import torch

import flashrt_core
from flashrt_core.kernels import _triton
from flashrt_core.kernels import modulated
from flashrt_core.policies.pi0 import fast
from flashrt_core.policies.pi0 import pi05
from flashrt_core.policies.pi0 import pi05_fast
from flashrt_core.policies.pi0.config import PI05
from flashrt_core.policies.pi0.graphs import forward_of
from flashrt_core.policies.pi0.modulation import condition
from flashrt_core.policies.pi0.modulation import modulate
from flashrt_core.policies.pi0.modulation import modulated_norms
from flashrt_core.policies.pi0.modulation import MODULATION
from flashrt_core.policies.pi0.modulation import source_specs
from flashrt_core.policies.pi0.weights import tables
from flashrt_core.policies.pi0.weights import weight_specs


def test_the_fast_expert_equals_the_plain_layers_in_tritons_interpreter():
    triton = pytest.importorskip('triton')
    if tuple(int(part) for part in triton.__version__.split('.')[:2]) < (3, 7):
        pytest.skip('older interpreters fail on numpy >= 2.4')
    child = subprocess.run(
        [sys.executable, str(Path(__file__).with_name('_interpret_pi05.py'))],
        capture_output=True, text=True, timeout=300, check=False,
        env=os.environ | {'PYTHONPATH': str(Path(flashrt_core.__path__[0]).parent)})
    assert child.returncode == 0, child.stderr
    assert child.stdout.count('passed') == 3


def test_the_published_size_fits_the_kernels_and_the_cpu_runs_the_plain_layers():
    assert fast.fits(PI05)
    assert not fast.fits(replace(PI05, dtype='float32'))
    assert forward_of(PI05, torch.device('cpu')) is pi05


@pytest.mark.gpu
def test_the_kernels_pass_their_check_on_cuda_and_are_selected():
    device = torch.device('cuda', 0)
    assert modulated.selected(device), _triton.choices()
    assert forward_of(PI05, device) is pi05_fast


@pytest.mark.gpu
@pytest.mark.slow
@torch.no_grad()
def test_the_expert_at_real_size_points_where_float32_does():
    c = replace(PI05, views=('a', 'b'), vocab=1000)
    generator = torch.Generator('cuda').manual_seed(0)
    full = {}
    for name, spec in (weight_specs(c) | source_specs(c)).items():
        if name.startswith(('expert', 'action', 'time')):
            value = torch.randn(spec.shape, device='cuda', generator=generator)
            full[name] = (value * (spec.scale or 0.1) + spec.offset).to(spec.dtype).float()
    full |= {name: t.cuda() for name, t in tables(c).items()}
    given = condition(full['table.time'], full.__getitem__)
    rows = [modulate(norm, given, full.__getitem__) for norm in modulated_norms(c)]
    full[MODULATION] = torch.stack(rows, dim=1)
    w = {n: t.to(weight_specs(c)[n].dtype) if n in weight_specs(c) else t for n, t in full.items()}

    mask = torch.ones(c.prefix_tokens, dtype=torch.bool, device='cuda')
    mask[-9:] = False
    kv = torch.randn((c.prefix.layers, c.prefix_tokens, 2, 1, 256), device='cuda')
    noise, state = torch.randn(2, 50, 32, device='cuda'), torch.zeros(32, device='cuda')
    exact = replace(c, dtype='float32')
    expected = pi05.denoise(noise, state, kv, mask, full, exact)
    actions = pi05_fast.denoise(noise, state, kv.bfloat16(), mask, w, c)
    a, b = (actions - noise).double().flatten(), (expected - noise).double().flatten()
    assert float(a @ b / a.norm() / b.norm()) > 0.999
    assert torch.equal(actions[:1], pi05_fast.denoise(noise[:1], state, kv.bfloat16(), mask, w, c))
