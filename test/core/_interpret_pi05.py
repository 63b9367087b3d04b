"""Run Pi0.5's fast expert in Triton's interpreter on host memory; a child of the tests."""
import os

os.environ['TRITON_INTERPRET'] = '1'

from dataclasses import replace

from _interpret_fp8 import quantised
import torch

from flashrt_core.kernels import modulated
from flashrt_core.kernels._launch import close
from flashrt_core.nn import GemmaDims
from flashrt_core.policies.pi0 import fast
from flashrt_core.policies.pi0 import pi05
from flashrt_core.policies.pi0 import pi05_fast
from flashrt_core.policies.pi0.config import PI05_TINY
from flashrt_core.policies.pi0.modulation import condition
from flashrt_core.policies.pi0.modulation import modulate
from flashrt_core.policies.pi0.modulation import modulated_norms
from flashrt_core.policies.pi0.modulation import MODULATION
from flashrt_core.policies.pi0.modulation import source_specs
from flashrt_core.policies.pi0.weights import products
from flashrt_core.policies.pi0.weights import tables
from flashrt_core.policies.pi0.weights import weight_specs

CONFIG = replace(
    PI05_TINY,
    prefix=GemmaDims(width=64, layers=2, heads=4, kv_heads=2, head_dim=32, mlp=96),
    expert=GemmaDims(width=128, layers=2, heads=4, kv_heads=2, head_dim=32, mlp=256),
    vocab=64, horizon=4, flow_steps=2)
EXACT = 1e-5     # float32 in another order


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    made = {name: torch.randn(s.shape) * (s.scale or 0.1) + s.offset
            for name, s in (weight_specs(CONFIG) | source_specs(CONFIG)).items()}
    given = condition(tables(CONFIG)['table.time'], made.__getitem__)
    rows = [modulate(norm, given, made.__getitem__) for norm in modulated_norms(CONFIG)]
    return made | tables(CONFIG) | {MODULATION: torch.stack(rows, dim=1)}


def check_kernels() -> None:
    """The self-check that selects the kernels passes in the interpreter."""
    assert modulated._check(torch.device('cpu'))


def check_denoise() -> None:
    """The expert equals the plain layers, for two rows and with a guide; rows do not mix."""
    c, w = replace(CONFIG, horizon=3, blend_steps=1), weights()
    mask = torch.ones(c.prefix_tokens, dtype=torch.bool)
    mask[4:8] = False
    mask[-5:] = False
    kv = torch.randn(2, c.prefix_tokens, 2, 2, 32)
    noise, state = torch.randn(2, c.horizon, c.action_width), torch.zeros(c.state_width)
    expected = pi05.denoise(noise, state, kv, mask, w, c)
    assert not close(expected, noise, 0.1), 'the comparison would say nothing'
    mine = pi05_fast.denoise(noise, state, kv, mask, w, c)
    assert close(mine, expected, EXACT)
    assert torch.equal(pi05_fast.denoise(noise[1:], state, kv, mask, w, c), mine[1:])

    def guide(at: int, x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return v + (0.5 + at) * (x - 0.3)

    guided = pi05.denoise(noise, state, kv, mask, w, c, guide)
    assert not close(guided, expected, 0.1), 'the comparison would say nothing'
    assert close(pi05_fast.denoise(noise, state, kv, mask, w, c, guide), guided, EXACT)

    free = (torch.randn_like(kv), mask & (torch.arange(len(mask)) < 12))
    noise = noise[[0, 1, 0, 1]]
    expected = pi05.denoise(noise, state, kv, mask, w, c, guide, free)
    assert not close(expected[:2], expected[2:], 0.1), 'the comparison would say nothing'
    assert close(pi05_fast.denoise(noise, state, kv, mask, w, c, guide, free), expected, EXACT)


def check_fp8() -> None:
    """With the prefix in FP8 the expert is as without."""
    plain, c = weights(), replace(CONFIG, precision='fp8', scales='none')
    mask = torch.ones(c.prefix_tokens, dtype=torch.bool)
    mask[-5:] = False
    kv = torch.randn(2, c.prefix_tokens, 2, 2, 32)
    noise, state = torch.randn(2, c.horizon, c.action_width), torch.zeros(c.state_width)
    w = quantised(plain, dict.fromkeys(products(c), 1.0))
    assert torch.equal(pi05_fast.denoise(noise, state, kv, mask, w, c),
                       pi05_fast.denoise(noise, state, kv, mask, plain, CONFIG))


if __name__ == '__main__':
    fast.SPLITS = 1
    for check in (check_kernels, check_denoise, check_fp8):
        check()
        print(check.__name__, 'passed')
