"""Key map of Llama: Hugging Face's names, with or without ``model.``; GGUF's are mapped."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from flashrt_core.checkpoints.keymap import Source
from flashrt_core.checkpoints.keymap import Target

if TYPE_CHECKING:
    from flashrt_core.planners.llama.config import LlamaConfig

IGNORED = re.compile(r'\.rotary_emb\.inv_freq$')


def llama_canonical(name: str) -> str:
    """Return the canonical name of a stored tensor."""
    return name.removeprefix('model.')


def llama_ignored(c: LlamaConfig, key: str) -> bool:
    """Whether a canonical key is known and not needed: tables, and a head that is tied."""
    return bool(IGNORED.search(key)) or (c.tied and key == 'lm_head.weight')


def llama_targets(c: LlamaConfig) -> list[Target]:
    """Return the sources of every weight of ``planners.llama.weights.weights_of``."""
    W = c.width
    targets = [
        Target('embed', (Source('embed_tokens.weight', (c.vocab, W), otherwise='lm_head.weight'),))
    ]
    for i in range(c.layers):
        targets += _layer(c, i)
    targets.append(Target('norm', (Source('norm.weight', (W,)),)))
    if not c.tied:
        targets.append(Target('head', (Source('lm_head.weight', (c.vocab, W)),)))
    return targets


def _layer(c: LlamaConfig, i: int) -> list[Target]:
    W = c.width

    def target(name: str, *sources: tuple[str, tuple[int, ...]]) -> Target:
        return Target(
            f'layers.{i}.{name}',
            tuple(Source(f'layers.{i}.{key}.weight', shape) for key, shape in sources),
        )

    return [
        target('norm1', ('input_layernorm', (W,))),
        target(
            'qkv',
            ('self_attn.q_proj', (c.q_dim, W)),
            ('self_attn.k_proj', (c.kv_dim, W)),
            ('self_attn.v_proj', (c.kv_dim, W)),
        ),
        target('out', ('self_attn.o_proj', (W, c.q_dim))),
        target('norm2', ('post_attention_layernorm', (W,))),
        target('gate_up', ('mlp.gate_proj', (c.mlp, W)), ('mlp.up_proj', (c.mlp, W))),
        target('down', ('mlp.down_proj', (W, c.mlp))),
    ]
