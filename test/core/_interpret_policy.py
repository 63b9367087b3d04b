"""Run Pi0's fast forward pass in Triton's interpreter on host memory; a child of the tests."""
import os

os.environ['TRITON_INTERPRET'] = '1'

from dataclasses import replace

from _interpret_fp8 import FLIPS
from _interpret_fp8 import quantised
from _interpret_fp8 import round_to_nearest
import torch

from flashrt_core.kernels import _fp8
from flashrt_core.kernels import expert
from flashrt_core.kernels import skinny
from flashrt_core.kernels._launch import close
from flashrt_core.nn import fp8
from flashrt_core.nn import GemmaDims
from flashrt_core.nn import rotate
from flashrt_core.nn import SiglipDims
from flashrt_core.policies.pi0 import fast
from flashrt_core.policies.pi0 import model
from flashrt_core.policies.pi0.config import TINY
from flashrt_core.policies.pi0.weights import products
from flashrt_core.policies.pi0.weights import tables
from flashrt_core.policies.pi0.weights import weight_specs

CONFIG = replace(
    TINY,
    vision=SiglipDims(image_size=28, patch_size=14, width=96, layers=1, heads=4, mlp=128),
    prefix=GemmaDims(width=64, layers=2, heads=4, kv_heads=2, head_dim=32, mlp=96),
    expert=GemmaDims(width=128, layers=2, heads=4, kv_heads=2, head_dim=32, mlp=256),
    prompt_tokens=10, subgoal_tokens=10, vocab=64, horizon=6, flow_steps=2)
EXACT = 1e-5     # float32 in another order
CPU = torch.device('cpu')
GELU = 1e-3      # torch's product with GELU is the exact one on the CPU, by tanh on CUDA


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    made = {name: torch.randn(s.shape) * (s.scale or 0.1) + s.offset
            for name, s in weight_specs(CONFIG).items()}
    return made | tables(CONFIG)


def check_products() -> None:
    """Splits over K add up, for rows that do not fill a tile, with one tile a split and more."""
    a, w = torch.randn(70, 512), torch.randn(128, 512)
    for splits, tile in ((2, (64, 256, 4, 1)), (2, (64, 128, 4, 2)), (4, (32, 64, 4, 2))):
        partial = torch.full((splits, 70, 128), torch.nan)
        skinny.split_product(a, w, partial, tile)
        assert close(partial.sum(0), a @ w.T, EXACT)


def check_heads() -> None:
    """Both halves of a head are projected and rotated in each of its column tiles."""
    R, S, D = 2, 9, 64
    angle = torch.randn(S, D // 2)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    for K in (64, 256):  # one tile of K, and two
        y, w = torch.randn(R * S, K), torch.randn(4 * D, K)
        q = torch.full((R * S, 2, D), torch.nan)
        kv = torch.full((R * S, 2, 1, D), torch.nan)
        expert.project(y, w, angle.cos(), angle.sin(), q, kv, S)
        full = (y @ w.T).view(R, S, 4, D)
        assert close(q.view(R, S, 2, D), rotate(full[:, :, :2], cos, sin), EXACT)
        assert close(kv.view(R, S, 2, D)[:, :, :1], rotate(full[:, :, 2:3], cos, sin), EXACT)
        assert close(kv.view(R, S, 2, D)[:, :, 1:], full[:, :, 3:], EXACT)


def check_forward() -> None:
    """Vision, prefix and denoise equal the plain layers, with masked views and text, two rows."""
    c, w = replace(CONFIG, horizon=2, blend_steps=1), weights()
    images = torch.randint(0, 256, (2, 28, 28, 3), dtype=torch.uint8)
    tokens = model.encode_views(images, w, c)
    assert close(fast.encode_views(images, w, c), tokens, GELU)

    text = torch.randint(0, c.vocab, (c.prompt_tokens + c.subgoal_tokens,))
    mask = torch.ones(c.prefix_tokens, dtype=torch.bool)
    mask[4:8] = False
    mask[-5:] = False
    kv = torch.full((2, c.prefix_tokens, 2, 2, 32), torch.nan)
    mine = kv.clone()
    model.encode_prefix(tokens, text, mask, kv, w, c)
    fast.encode_prefix(tokens, text, mask, mine, w, c)
    assert close(mine, kv, EXACT)

    noise, state = torch.randn(2, c.horizon, c.action_width), torch.randn(c.state_width)
    expected = model.denoise(noise, state, kv, mask, w, c)
    assert not close(expected, noise, 0.1), 'the comparison would say nothing'
    found = fast.denoise(noise, state, kv, mask, w, c)
    assert close(found, expected, EXACT)
    assert torch.equal(fast.denoise(noise[1:], state, kv, mask, w, c), found[1:])

    def guide(at: int, x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return v + (0.5 + at) * (x - 0.3)

    guided = model.denoise(noise, state, kv, mask, w, c, guide)
    assert not close(guided, expected, 0.1), 'the comparison would say nothing'
    assert close(fast.denoise(noise, state, kv, mask, w, c, guide), guided, EXACT)

    free = (torch.randn_like(kv), mask & (torch.arange(len(mask)) < 12))
    noise = noise[[0, 1, 0, 1]]
    expected = model.denoise(noise, state, kv, mask, w, c, guide, free)
    assert not close(expected[:2], expected[2:], 0.1), 'the comparison would say nothing'
    assert close(fast.denoise(noise, state, kv, mask, w, c, guide, free), expected, EXACT)


def check_fp8() -> None:
    """In FP8 the prefix equals the plain layers on the same quantised weights but for flips.

    Vision and the expert are as without FP8. The stream is float32, for the interpreter has no
    products of bfloat16.
    """
    round_to_nearest()
    assert _fp8._check_rows(CPU)
    fast.product = lambda *given: fp8.product(*given).float()
    plain, c = weights(), replace(CONFIG, precision='fp8', scales='none')
    images = torch.randint(0, 256, (2, 28, 28, 3), dtype=torch.uint8)
    text = torch.randint(0, c.vocab, (c.prompt_tokens + c.subgoal_tokens,))
    mask = torch.ones(c.prefix_tokens, dtype=torch.bool)
    mask[-5:] = False
    noise, state = torch.randn(2, c.horizon, c.action_width), torch.randn(c.state_width)
    kv = torch.full((2, c.prefix_tokens, 2, 2, 32), torch.nan)
    mine = kv.clone()

    watched = fp8.Observing(plain, products(CONFIG))
    tokens = model.encode_views(images, watched, CONFIG)
    model.encode_prefix(tokens, text, mask, kv, watched, CONFIG)
    exact, w = kv.clone(), quantised(plain, watched.largest())

    assert torch.equal(fast.encode_views(images, w, c), fast.encode_views(images, plain, CONFIG))
    fast.encode_prefix(tokens, text, mask, mine, w, c)
    model.encode_prefix(tokens, text, mask, kv, w, c)
    assert close(mine, kv, FLIPS) and not close(kv, exact, FLIPS)
    assert torch.equal(fast.denoise(noise, state, kv, mask, w, c),
                       fast.denoise(noise, state, kv, mask, plain, CONFIG))


if __name__ == '__main__':
    fast.SPLITS = fast.TIME_SPLITS = 1
    for check in (check_products, check_heads, check_forward, check_fp8):
        check()
        print(check.__name__, 'passed')
