"""Qwen3.5 through kernels: equal to the plain layers, chosen where it fits, equal at real size."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
import os
from pathlib import Path
import subprocess
import sys
from typing import Any

import pytest
import torch

import flashrt_core
from flashrt_core.planners.memory import Branched
from flashrt_core.planners.memory import Live
from flashrt_core.planners.memory import Verify
from flashrt_core.planners.qwen3_5 import fast
from flashrt_core.planners.qwen3_5 import model
from flashrt_core.planners.qwen3_5 import NAMED
from flashrt_core.planners.qwen3_5 import QWEN3_5
from flashrt_core.planners.qwen3_5 import Qwen35Config
from flashrt_core.planners.qwen3_5.config import PRECISIONS
from flashrt_core.planners.qwen3_5.precision import linear
from flashrt_core.planners.qwen3_5.precision import quantise
from flashrt_core.planners.qwen3_5.weights import damped
from flashrt_core.planners.qwen3_5.weights import ROPE
from flashrt_core.planners.qwen3_5.weights import rope_table
from flashrt_core.planners.qwen3_5.weights import tensor_specs

LARGE = NAMED['27b'][0]
START, TOKENS = 1990, [5, 9, 1301, 44, 7]
# An FP8 chunk rounds activations to E4M3, and the last bit of bfloat16 decides to which of two
# neighbours, up to an eighth apart. So kernels and plain layers, a cosine of 0.9986 apart in some
# states, are each compared with float32: neither is further from it than the other, but for this.
ROUNDED = 1.05


@pytest.mark.parametrize('precision', PRECISIONS)
def test_the_fast_forward_equals_the_plain_layers_in_tritons_interpreter(precision):
    triton = pytest.importorskip('triton')
    if tuple(int(part) for part in triton.__version__.split('.')[:2]) < (3, 7):
        pytest.skip('older interpreters fail on numpy >= 2.4')
    child = subprocess.run(
        [sys.executable, str(Path(__file__).with_name('_interpret_qwen35.py')), precision],
        capture_output=True, text=True, timeout=300, check=False,
        env=os.environ | {'PYTHONPATH': str(Path(flashrt_core.__path__[0]).parent)})
    assert child.returncode == 0, child.stderr
    assert child.stdout.count('passed') == 3


@pytest.mark.parametrize('precision', PRECISIONS)
@pytest.mark.parametrize('name', ['0.8b', '2b', '4b', '9b', '27b'])
def test_every_published_size_fits_the_kernels(name, precision):
    assert fast.fits(replace(NAMED[name][0], precision=precision))


@pytest.mark.parametrize('change', [
    {'dtype': 'float32'}, {'mlp': 17000}, {'width': 5000}, {'head_dim': 96}, {'key_dim': 96}])
def test_sizes_that_the_tiles_do_not_divide_are_left_to_the_plain_layers(change):
    assert not fast.fits(replace(LARGE, **change))


def test_the_cpu_runs_the_plain_layers():
    assert QWEN3_5.forward_of(LARGE, torch.device('cpu')) is model


def real_weights(c: Qwen35Config) -> dict[str, torch.Tensor]:
    """Draw the weights on the device, stored as the precision of ``c`` says."""
    device, generator = torch.device('cuda'), torch.Generator('cuda').manual_seed(0)
    b = {ROPE: rope_table(c).to(device)}
    for name, spec in tensor_specs(c).items():
        spec = damped(c, name, spec)
        value = torch.randn(spec.shape, device=device, generator=generator)
        drawn = (value * (spec.scale or 0.1) + spec.offset).bfloat16()
        b |= quantise(c, name, drawn.to(spec.dtype))
    return b


@pytest.fixture(scope='module', ids='-'.join, params=[
    ('bf16', 'bf16'), ('fp8', 'bf16'), ('int4', 'bf16'), ('nvfp4', 'bf16'), ('fp8', 'fp8')])
def real(request) -> tuple[Qwen35Config, dict[str, torch.Tensor], torch.Tensor]:
    """Four layers of the 27B with a short vocabulary behind START tokens, and their hidden."""
    precision, kv = request.param
    c = replace(LARGE, layers=4, vocab=2048, context=4096, precision=precision, kv_precision=kv)
    b, device = real_weights(c), torch.device('cuda')
    assert fast.selected(c, device)
    for spec in model.state_specs(c):
        fill = torch.nan if 'kv' in spec.name else 0.0
        b[spec.name] = torch.full(spec.shape, fill, device=device, dtype=spec.dtype)
    tokens = some_tokens(c)
    plain = copied(c, b)
    at, length = torch.tensor([0, START], device=device).unbind(0)
    with torch.no_grad():
        hidden = fast.chunk(c, b, tokens, at, length, c.context)[:START]
        expected = model.chunk(c, plain, tokens, at, length, c.context)[:START]
    if c.precision != 'fp8':
        assert cosine(hidden, expected) > 0.999
        for name, mine, others in states(c, b, plain):
            assert cosine(mine, others) > 0.999, name
        return c, b, hidden
    full, true = exactly(c)
    with torch.no_grad():
        wanted = model.chunk(full, true, tokens, at, length, c.context)[:START]
    assert error(hidden, wanted) < ROUNDED * error(expected, wanted)
    exact = {name: value for name, value, _ in states(c, true, true)}
    for name, mine, others in states(c, b, plain):
        assert error(mine, exact[name]) < ROUNDED * error(others, exact[name]), name
    return c, b, hidden


def exactly(c: Qwen35Config) -> tuple[Qwen35Config, dict[str, torch.Tensor]]:
    """Return ``c`` in float32, and its weights before they are quantised, with fresh state."""
    full = replace(c, dtype='float32', precision='bf16', kv_precision='bf16')
    b = real_weights(full)
    for spec in model.state_specs(full):
        b[spec.name] = torch.zeros(spec.shape, device='cuda', dtype=spec.dtype)
    return full, b


def states(c: Qwen35Config, *held: dict[str, torch.Tensor]) -> Iterator[tuple[Any, ...]]:
    """Yield the name of every state that a chunk writes, and what each of ``held`` has of it."""
    for name in (spec.name for spec in model.state_specs(c) if spec.name != 'mtp.kv'):
        yield name, *(b[name][:START if 'kv' in name else None] for b in held)


def error(mine: torch.Tensor, exact: torch.Tensor) -> float:
    return float((mine.double() - exact.double()).norm() / exact.double().norm())


def some_tokens(c: Qwen35Config) -> torch.Tensor:
    generator = torch.Generator('cuda').manual_seed(1)
    return torch.randint(0, c.vocab, (2048,), device='cuda', generator=generator,
                         dtype=torch.int32)


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double().flatten(), b.double().flatten()
    return float(a @ b / a.norm() / b.norm())


def copied(c: Qwen35Config, b: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**b, **{spec.name: b[spec.name].clone() for spec in model.state_specs(c)}}


@pytest.mark.gpu
@pytest.mark.slow
@torch.no_grad()
def test_logits_at_real_size_point_where_those_of_float32_do(real):
    c, b, hidden = real
    least = {'bf16': 0.999, 'fp8': 0.995, 'int4': 0.98, 'nvfp4': 0.98}[c.precision]
    exact, plain = exactly(c)
    tokens = some_tokens(c)
    at, length = torch.tensor([0, START], device='cuda').unbind(0)
    expected = model.chunk(exact, plain, tokens, at, length, c.context)[:START]
    found, wanted = fast.head(c, b, hidden), model.head(exact, plain, expected)
    assert float(torch.cosine_similarity(found, wanted).min()) > least
    live = copied(c, b)
    row = fast.rows(c, live, tokens[:1], length[None], Live(c, live, length))
    other = model.rows(exact, plain, tokens[:1], length[None], Live(exact, plain, length))
    assert cosine(fast.head(c, b, row), model.head(exact, plain, other)) > least


@pytest.mark.gpu
@pytest.mark.slow
@torch.no_grad()
def test_rows_at_real_size_have_the_same_bits_fed_verified_and_branched(real):
    c, b, _ = real
    device = b['norm'].device
    tokens = torch.tensor(TOKENS, device=device, dtype=torch.int32)
    start = torch.tensor(START, device=device)
    live, plain, hidden, states = copied(c, b), copied(c, b), [], []
    for t in range(len(TOKENS)):
        at = start + t
        hidden.append(fast.rows(c, live, tokens[t:t + 1], at[None], Live(c, live, at))[0])
        other = model.rows(c, plain, tokens[t:t + 1], at[None], Live(c, plain, at))[0]
        assert cosine(hidden[-1], other) > 0.999
        states.append(copied(c, live))
    for count in range(1, len(TOKENS) + 1):
        verified = copied(c, b)
        memory = Verify(c, verified, start)
        found = fast.rows(c, verified, tokens, start + torch.arange(len(TOKENS), device=device),
                          memory)
        assert torch.equal(found, torch.stack(hidden))
        assert torch.equal(fast.head(c, b, found)[:1], fast.head(c, b, hidden[0][None]))
        memory.accept(c, verified, torch.tensor(count, device=device))
        for spec in model.state_specs(c):
            if 'kv' not in spec.name:
                assert torch.equal(verified[spec.name], states[count - 1][spec.name]), spec.name

    own = {spec.name: torch.stack([b[spec.name]] * 8) for spec in model.state_specs(c)
           if 'kv' not in spec.name}
    own['position'] = start.repeat(8)
    own['tail.kv.3'] = b['kv.3'].new_full((8, 16, *b['kv.3'].shape[1:]), torch.nan)
    for t in range(len(TOKENS)):
        given = torch.randint(0, c.vocab, (8,), device=device, dtype=torch.int32)
        given[5] = tokens[t]
        found = fast.rows(c, b, given, own['position'].clone(), Branched(c, b, own, start))
        own['position'] += 1
        assert torch.equal(found[5], hidden[t])


@pytest.mark.gpu
@pytest.mark.slow
@torch.no_grad()
def test_drafts_at_real_size_point_where_the_plain_layers_do(real, monkeypatch):
    c, b, hidden = real
    device = b['norm'].device
    tokens = torch.randint(0, c.vocab, (START,), device=device, dtype=torch.int32)
    positions, count = torch.arange(START, device=device), torch.tensor(START, device=device)
    mine, plain = copied(c, b), copied(c, b)
    fast.mtp_note(c, mine, tokens, hidden, positions, count)
    with monkeypatch.context() as patch:
        if c.precision == 'fp8':  # of so many pairs the kernels round the activations, too
            patch.setattr(model, 'rows_linear', linear)
        model.mtp_note(c, plain, tokens, hidden, positions, count)
    assert cosine(mine['mtp.kv'][:START], plain['mtp.kv'][:START]) > 0.999
    token, at = tokens[0], count - 1
    logits, state = fast.mtp_draft(c, mine, token, hidden[-1], at)
    expected, other = model.mtp_draft(c, plain, token, hidden[-1], at)
    assert cosine(logits, expected) > 0.999 and cosine(state, other) > 0.999
