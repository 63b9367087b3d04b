"""The policy kernels: equal to the plain layers, selected by their checks, equal at real size."""
from __future__ import annotations

from dataclasses import replace
import os
from pathlib import Path
import subprocess
import sys

import pytest
import torch

import flashrt_core
from flashrt_core.kernels import _fp8
from flashrt_core.kernels import _triton
from flashrt_core.kernels import attention
from flashrt_core.kernels import expert
from flashrt_core.kernels import rows
from flashrt_core.kernels import skinny
from flashrt_core.kernels._launch import close
from flashrt_core.policies.pi0 import fast
from flashrt_core.policies.pi0 import model
from flashrt_core.policies.pi0.config import PI0
from flashrt_core.policies.pi0.config import Pi0Config
from flashrt_core.policies.pi0.config import TINY
from flashrt_core.policies.pi0.graphs import forward_of
from flashrt_core.policies.pi0.weights import tables
from flashrt_core.policies.pi0.weights import weight_specs

CPU = torch.device('cpu')


def test_the_fast_forward_equals_the_plain_layers_in_tritons_interpreter():
    triton = pytest.importorskip('triton')
    if tuple(int(part) for part in triton.__version__.split('.')[:2]) < (3, 7):
        pytest.skip('older interpreters fail on numpy >= 2.4')
    child = subprocess.run(
        [sys.executable, str(Path(__file__).with_name('_interpret_policy.py'))],
        capture_output=True, text=True, timeout=300, check=False,
        env=os.environ | {'PYTHONPATH': str(Path(flashrt_core.__path__[0]).parent)})
    assert child.returncode == 0, child.stderr
    assert child.stdout.count('passed') == 4


def test_the_cpu_runs_the_plain_layers():
    assert forward_of(PI0, CPU) is model
    assert forward_of(TINY, CPU) is model


@pytest.mark.parametrize('change', [
    {'dtype': 'float32'}, {'horizon': attention.SPAN}, {'action_width': 48, 'action_dim': 32},
    {'expert': replace(PI0.expert, width=768)}, {'expert': replace(PI0.expert, mlp=3000)},
    {part: replace(getattr(PI0, part), layers=1) for part in ('prefix', 'expert')}])
def test_sizes_that_the_tiles_do_not_divide_are_left_to_the_plain_layers(change):
    assert fast.fits(PI0)
    assert not fast.fits(replace(PI0, **change))


def test_other_numbers_and_nan_are_not_close():
    a = torch.ones(100)
    assert close(a * 1.005, a) and not close(a * 1.02, a)
    assert not close(torch.full_like(a, torch.nan), a)


@pytest.mark.gpu
@pytest.mark.parametrize('kernel', [skinny, attention, expert, rows, _fp8])
def test_each_check_passes_on_cuda(kernel):
    assert kernel.selected(torch.device('cuda', 0)), _triton.choices()


@pytest.fixture(scope='module')
def real() -> tuple[Pi0Config, dict[str, torch.Tensor]]:
    """Pi0 at real size with a short vocabulary; norms are random, not zero."""
    c = replace(PI0, views=('a', 'b'), vocab=1000)
    generator = torch.Generator('cuda').manual_seed(0)
    made = {}
    for name, spec in weight_specs(c).items():
        value = torch.randn(spec.shape, device='cuda', generator=generator)
        made[name] = (value * (spec.scale or 0.1) + spec.offset).to(spec.dtype)
    return c, made | {name: t.cuda() for name, t in tables(c).items()}


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double().flatten(), b.double().flatten()
    return float(a @ b / a.norm() / b.norm())


@pytest.mark.gpu
@pytest.mark.slow
@torch.no_grad()
def test_every_stage_at_real_size_points_where_float32_does(real):
    c, w = real
    exact, full = replace(c, dtype='float32'), {name: t.float() for name, t in w.items()}
    images = torch.randint(0, 256, (2, 224, 224, 3), dtype=torch.uint8, device='cuda')
    tokens = model.encode_views(images, full, exact)
    assert cosine(fast.encode_views(images, w, c), tokens) > 0.999

    text = torch.randint(0, c.vocab, (c.prompt_tokens + c.subgoal_tokens,), device='cuda')
    mask = torch.ones(c.prefix_tokens, dtype=torch.bool, device='cuda')
    mask[-9:] = False
    kv = torch.zeros((c.prefix.layers, c.prefix_tokens, 2, 1, 256), device='cuda')
    mine = torch.full_like(kv, torch.nan, dtype=torch.bfloat16)
    model.encode_prefix(tokens, text, mask, kv, full, exact)
    fast.encode_prefix(tokens.bfloat16(), text, mask, mine, w, c)
    for layer in range(c.prefix.layers):
        assert cosine(mine[layer][mask], kv[layer][mask]) > 0.999, layer

    noise, state = torch.randn(2, 50, 32, device='cuda'), torch.randn(32, device='cuda')
    expected = model.denoise(noise, state, kv, mask, full, exact)
    actions = fast.denoise(noise, state, kv.bfloat16(), mask, w, c)
    assert cosine(actions - noise, expected - noise) > 0.999
    assert torch.equal(actions[:1], fast.denoise(noise[:1], state, kv.bfloat16(), mask, w, c))
