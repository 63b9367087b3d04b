"""Random weights of Qwen3.5: the same everywhere, and a state that neither dies nor explodes."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
import hashlib

from _qwen35 import config
from _qwen35 import fresh
from _qwen35 import SHAPES
from _qwen35 import take
from _qwen35 import weights
import pytest
import torch

from flashrt_core.nn import delta
from flashrt_core.planners.qwen3_5 import model
from flashrt_core.planners.qwen3_5 import NAMED
from flashrt_core.planners.qwen3_5.weights import random_tensor
from flashrt_core.planners.qwen3_5.weights import ROPE
from flashrt_core.planners.qwen3_5.weights import rope_table
from flashrt_core.planners.qwen3_5.weights import tensor_specs
from flashrt_core.planners.qwen3_5.weights import weight_specs
from flashrt_core.runtime import Role

# Of four weights of the tiny size.
DIGEST = '5198dba292f8e2155a4c9d3b19a82ece07ec06925c9abced80e124a20efee54e'


@pytest.fixture(autouse=True)
def plain_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize('layers, dtype', [(4, 'float32'), (64, 'float32'), (64, 'bfloat16')])
def test_states_stay_of_one_size_over_a_thousand_tokens_and_many_layers(
        layers: int, dtype: str) -> None:
    c = config(layers=layers, context=1024, dtype=dtype)
    state = fresh(c)
    b = {**weights(c), **state}
    tokens = torch.randint(0, c.vocab, (1024,), dtype=torch.int32,
                           generator=torch.Generator().manual_seed(1))

    def sizes() -> torch.Tensor:
        return torch.stack([state[n].pow(2).mean().sqrt() for n in state if 'recurrent' in n])

    seen = []
    for at in range(0, 1024, 256):
        hidden = model.chunk(c, b, tokens[at:at + 256], torch.tensor(at), torch.tensor(256), 1024)
        seen.append(sizes())
    early, late = seen[0], seen[-1]
    assert bool((late < 2 * early).all()) and bool((late > 0.5 * early).all())
    assert 0.05 < float(late.min()) and float(late.max()) < 2.0
    logits = model.head(c, b, hidden)
    assert bool(logits.isfinite().all()) and 0.5 < float(logits.std()) < 2.0


def test_decays_span_from_forgetting_at_once_to_remembering_for_long() -> None:
    c = replace(NAMED['27b'][0], layers=4)
    names = ('layers.0.a_log', 'layers.0.dt_bias')
    a_log, dt_bias = (random_tensor(c, n, tensor_specs(c)[n]) for n in names)
    a = torch.randn(512, c.value_heads, generator=torch.Generator().manual_seed(1))
    decay = delta.gates(a, a, a_log, dt_bias)[0].exp()
    low, high = decay.quantile(torch.tensor([0.05, 0.95])).tolist()
    assert 0.2 < low < 0.8 and 0.99 < high < 1.0


def test_a_weight_has_the_same_bits_on_every_machine_whatever_else_is_made() -> None:
    c = config()
    found = hashlib.sha256()
    for name in ('layers.0.mix', 'layers.0.a_log', 'mtp.fc', 'head'):
        alone = random_tensor(c, name, tensor_specs(c)[name])
        assert torch.equal(alone, weights(c)[name])
        found.update(alone.numpy().tobytes())
    assert found.hexdigest() == DIGEST
    other = replace(c, weight_seed=1)
    assert not torch.equal(weights(c)['head'], weights(other)['head'])
    assert not torch.equal(weights(c)['layers.0.mix'], weights(c)['layers.1.mix'])


@pytest.mark.parametrize('name', SHAPES)
def test_constants_are_declared_with_the_shapes_and_dtypes_that_they_have(name: str) -> None:
    c = config(name, dtype='bfloat16')
    declared = {spec.name: spec for spec in weight_specs(c)}
    found = weights(c)
    assert declared.keys() == found.keys()
    for key, tensor in found.items():
        spec = declared[key]
        assert spec.role is Role.CONSTANT and not spec.rows
        assert (spec.dtype, spec.shape) == (tensor.dtype, tuple(tensor.shape))
        kept = 'norm' in key or key.endswith(('a_log', 'dt_bias')) or key == ROPE
        assert tensor.dtype == (torch.float32 if kept else torch.bfloat16), key


def test_the_rotary_table_has_the_published_frequencies() -> None:
    table = rope_table(NAMED['27b'][0])
    expected = 1e7 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    assert table.shape == (32,)
    torch.testing.assert_close(table.double(), expected, rtol=1e-6, atol=0)


def test_only_the_rotary_part_of_a_key_turns_with_the_position() -> None:
    c = config(layers=1, full_every=1)  # equal tokens have equal inputs
    b = {**weights(c), **fresh(c)}
    take(c, b, [5] * 10, [10])
    keys = b['kv.0'][:, 0]
    torch.testing.assert_close(keys[0, :, c.rotary:], keys[9, :, c.rotary:])
    assert not keys[0, :, :c.rotary].allclose(keys[9, :, :c.rotary], rtol=0.1, atol=0.1)
