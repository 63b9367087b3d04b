"""The differentiable batch equals the policy that runs; a checkpoint made of it loads again."""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from safetensors.torch import save_file
import torch
from torch import Tensor

from flashrt_core.checkpoints import pi0_targets
from flashrt_core.checkpoints.keymap import split_sources
from flashrt_core.nn import rope_tables
from flashrt_core.policies.pi0 import model
from flashrt_core.policies.pi0.batched import velocities
from flashrt_core.policies.pi0.config import TINY
from flashrt_core.policies.pi0.layout import buffer_specs
from flashrt_core.policies.pi0.load import load_constants
from flashrt_core.policies.pi0.weights import random_weight
from flashrt_core.policies.pi0.weights import tables
from flashrt_core.policies.pi0.weights import weight_specs
from flashrt_core.runtime import BufferSet
from flashrt_core.runtime import cpu_backend
from flashrt_core.runtime import Role

C = replace(TINY, horizon=5)


def weights() -> dict[str, Tensor]:
    return {**{n: random_weight(n, s, 3) for n, s in weight_specs(C).items()}, **tables(C)}


def test_every_sample_has_the_velocity_of_the_policy_that_runs() -> None:
    w, B, side = weights(), 3, C.vision.image_size
    g = torch.Generator().manual_seed(4)
    images = torch.randint(0, 256, (B, 2, side, side, 3), generator=g, dtype=torch.uint8)
    text = torch.randint(0, C.vocab, (B, C.subgoal_tokens), generator=g)
    length, step = torch.tensor([3, 24, 1]), torch.tensor([0, 4, 9])
    state = torch.randn(B, C.state_width, generator=g)
    x = torch.randn(B, C.horizon, C.action_width, generator=g)
    with torch.no_grad():
        found = velocities(C, w, images, text, length, state, x, step)
        for i in range(B):
            tokens = model.encode_views(images[i], w, C)
            mask = torch.cat([
                torch.ones(len(tokens), dtype=torch.bool),
                torch.zeros(C.prompt_tokens, dtype=torch.bool),
                torch.arange(C.subgoal_tokens) < length[i]])
            d = C.prefix
            kv = torch.zeros(d.layers, len(mask), 2, d.kv_heads, d.head_dim)
            prompt = torch.zeros(C.prompt_tokens, dtype=torch.long)
            model.encode_prefix(tokens, torch.cat([prompt, text[i]]), mask, kv, w, C)
            S = C.horizon + 1
            cos, sin = rope_tables(mask.sum() + torch.arange(S), w['table.rope'])
            query = torch.arange(S)
            sees = (query[None, :] == 0) | (query[:, None] > 0)
            token = torch.nn.functional.linear(
                state[i], w['state_in.weight'], w['state_in.bias']).expand(1, 1, -1)
            expected = model.velocity(x[i:i + 1], w['table.time'][step[i]], token, kv, mask, sees,
                                      cos, sin, w, C)[0]
            torch.testing.assert_close(found[i], expected, rtol=0, atol=1e-5)


def test_weights_cut_into_a_checkpoint_come_back_as_they_were(tmp_path: Path) -> None:
    w = weights()
    stored: dict[str, Tensor] = {}
    for target in pi0_targets(C):
        stored |= split_sources(target, w[target.name])
    save_file(stored, tmp_path / 'model.safetensors')
    c = replace(C, weights=str(tmp_path / 'model.safetensors'))
    buffers = BufferSet(cpu_backend(), buffer_specs(c), name='test')
    load_constants(c, buffers, lambda fraction: None)
    for buffer in buffers.by_role(Role.CONSTANT):
        assert torch.equal(buffer.tensor, w[buffer.name]), buffer.name
