"""Key map of Qwen3.5 and Qwen3.6: text checkpoints, and the text part of multimodal ones.

Qwen3-Next without experts is the same model; it packs the projections of the delta rule.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Iterator
import re
from typing import TYPE_CHECKING

from flashrt_core.checkpoints.keymap import Source
from flashrt_core.checkpoints.keymap import Target
from flashrt_core.nn.delta import TAPS

if TYPE_CHECKING:
    from flashrt_core.planners.qwen3_5.config import Qwen35Config

RULES = [
    (re.compile(r'^model\.language_model\.'), 'model.'),
    (re.compile(r'^model\.(mtp\.|lm_head\.)'), r'\1'),
]
VISION = re.compile(r'^(model\.)?visual\.|\.rotary_emb\.inv_freq$')


def qwen3_5_canonical(name: str) -> str:
    """Return the canonical name of a stored tensor: that of transformers' text model."""
    for pattern, replacement in RULES:
        name = pattern.sub(replacement, name)
    return name


def qwen3_5_ignored(c: Qwen35Config, key: str) -> bool:
    """Whether a canonical key is known and of no use: vision, a tied head, an unused MTP head."""
    return bool(
        VISION.search(key)
        or (c.tied and key == 'lm_head.weight')
        or (not c.mtp and key.startswith('mtp.'))
    )


def qwen3_5_packed(names: Iterable[str]) -> bool:
    """Whether stored names are those of Qwen3-Next."""
    return any(name.endswith('.linear_attn.in_proj_qkvz.weight') for name in names)


def qwen3_5_targets(c: Qwen35Config, packed: bool = False) -> list[Target]:
    """Return the sources of every tensor of ``planners.qwen3_5.weights.tensor_specs``.

    :param packed: the checkpoint is of Qwen3-Next, see ``qwen3_5_packed``.
    """
    W = c.width
    targets = [_one('embed', 'model.embed_tokens.weight', c.vocab, W)]
    for i in range(c.layers):
        targets += _layer(c, f'layers.{i}', f'model.layers.{i}', c.is_full(i), packed)
    targets.append(_one('norm', 'model.norm.weight', W))
    if not c.tied:
        targets.append(_one('head', 'lm_head.weight', c.vocab, W))
    if c.mtp:
        targets += [
            _one('mtp.norm_embed', 'mtp.pre_fc_norm_embedding.weight', W),
            _one('mtp.norm_hidden', 'mtp.pre_fc_norm_hidden.weight', W),
            _one('mtp.fc', 'mtp.fc.weight', W, 2 * W),
            *_layer(c, 'mtp.layer', 'mtp.layers.0', True),
            _one('mtp.norm', 'mtp.norm.weight', W),
        ]
    return targets


def _one(name: str, key: str, *shape: int) -> Target:
    return Target(name, (Source(key, shape),))


def _layer(
    c: Qwen35Config, ours: str, theirs: str, full: bool, packed: bool = False
) -> Iterator[Target]:
    W, V = c.width, c.value_heads * c.value_dim

    def stack(name: str, *sources: tuple[str, int]) -> Target:
        return Target(
            f'{ours}.{name}', tuple(Source(f'{theirs}.{key}.weight', (n, W)) for key, n in sources)
        )

    yield _one(f'{ours}.norm1', f'{theirs}.input_layernorm.weight', W)
    if full:
        at = f'{theirs}.self_attn'
        yield stack(
            'qkv',
            ('self_attn.q_proj', 2 * c.q_dim),
            ('self_attn.k_proj', c.kv_dim),
            ('self_attn.v_proj', c.kv_dim),
        )
        yield _one(f'{ours}.q_norm', f'{at}.q_norm.weight', c.head_dim)
        yield _one(f'{ours}.k_norm', f'{at}.k_norm.weight', c.head_dim)
        yield _one(f'{ours}.out', f'{at}.o_proj.weight', W, c.q_dim)
    else:
        at = f'{theirs}.linear_attn'
        if packed:
            yield Target(f'{ours}.mix', _packed_mix(c, at))
        else:
            yield stack(
                'mix',
                ('linear_attn.in_proj_qkv', c.channels),
                ('linear_attn.in_proj_z', V),
                ('linear_attn.in_proj_a', c.value_heads),
                ('linear_attn.in_proj_b', c.value_heads),
            )
        conv = Source(f'{at}.conv1d.weight', (c.channels, 1, TAPS), permute=(0, 1, 2))
        yield Target(f'{ours}.conv', (conv,))
        yield _one(f'{ours}.a_log', f'{at}.A_log', c.value_heads)
        yield _one(f'{ours}.dt_bias', f'{at}.dt_bias', c.value_heads)
        yield _one(f'{ours}.gate_norm', f'{at}.norm.weight', c.value_dim)
        yield _one(f'{ours}.out', f'{at}.out_proj.weight', W, V)
    yield _one(f'{ours}.norm2', f'{theirs}.post_attention_layernorm.weight', W)
    yield stack('gate_up', ('mlp.gate_proj', c.mlp), ('mlp.up_proj', c.mlp))
    yield _one(f'{ours}.down', f'{theirs}.mlp.down_proj.weight', W, c.mlp)


def _packed_mix(c: Qwen35Config, at: str) -> tuple[Source, ...]:
    """Return Qwen3-Next's two projections: per key head q, k, its v and z; then its b and a."""
    keys, V = c.key_heads * c.key_dim, c.value_heads * c.value_dim
    per_head = c.value_heads // c.key_heads
    values = per_head * c.value_dim
    a = c.channels + V
    return (
        Source(
            f'{at}.in_proj_qkvz.weight',
            (c.channels + V, c.width),
            groups=((c.key_dim, 0), (c.key_dim, keys), (values, 2 * keys), (values, c.channels)),
        ),
        Source(
            f'{at}.in_proj_ba.weight',
            (2 * c.value_heads, c.width),
            groups=((per_head, a + c.value_heads), (per_head, a)),
        ),
    )
