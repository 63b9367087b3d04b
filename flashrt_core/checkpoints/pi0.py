"""Key map of Pi0 and Pi0.5: the names of openpi and LeRobot, and those of transformers."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Iterator
import re
from typing import TYPE_CHECKING

from flashrt_core.checkpoints.keymap import Source
from flashrt_core.checkpoints.keymap import Target
from flashrt_core.errors import ConfigError

if TYPE_CHECKING:
    from flashrt_core.nn import GemmaDims
    from flashrt_core.nn import SiglipDims
    from flashrt_core.policies.pi0.config import Pi0Config

HEADS = (
    'state_proj|action_in_proj|action_out_proj|action_time_mlp_in|action_time_mlp_out'
    '|time_mlp_in|time_mlp_out'
)
# What only one of the two has, of which a single key tells them apart.
SIGNS = {
    'pi0': re.compile(r'^(state_proj|action_time_mlp_in|action_time_mlp_out)\.'),
    'pi05': re.compile(r'^(time_mlp_in|time_mlp_out)\.|^dit\..*norm\.dense\.'),
}
TITLES = {
    'pi0': 'Pi0 (the state as a token)',
    'pi05': 'Pi0.5 (the state in the prompt, norms modulated by time)',
}

# Applied in order; the canonical names are transformers' without their optional levels.
RULES = [
    (re.compile(r'^(model\.)?paligemma_with_expert\.paligemma\.(model\.)?'), 'vlm.'),
    (re.compile(r'^(model\.)?paligemma_with_expert\.gemma_expert\.(model\.)?'), 'dit.'),
    (re.compile(r'^model\.(vlm|dit)\.'), r'\1.'),
    (re.compile(rf'^(model\.)?(embed_action_time\.)?({HEADS})\.'), r'\3.'),
    (re.compile(r'^vlm\.vision_tower\.vision_model\.'), 'vlm.vision_tower.'),
    (re.compile(r'^vlm\.language_model\.lm_head\.'), 'vlm.lm_head.'),
    (re.compile(r'^vlm\.language_model\.model\.'), 'vlm.language_model.'),
]

IGNORED = re.compile(
    r'^vlm\.lm_head\.weight$'
    r'|^vlm\.language_model\.norm\.weight$'
    r'|^dit\.(embed_tokens|lm_head)\.weight$'
    r'|^vlm\.vision_tower\.head\.'
    r'|^(un)?normalize_(inputs|outputs|targets)\.'  # statistics of early LeRobot
    r'|\.rotary_emb\.inv_freq$|\.position_ids$|\.sinusoid_freq$'
)


def pi0_canonical(name: str) -> str:
    """Return the canonical name of a stored tensor, whichever code base wrote it."""
    for pattern, replacement in RULES:
        name = pattern.sub(replacement, name)
    return name


def pi0_check_family(c: Pi0Config, names: Iterable[str], where: str) -> None:
    """Verify that stored tensors of these names are of the config's family.

    :raises ConfigError: they are of the other one; the sentence says which.
    """
    keys = [pi0_canonical(name) for name in names]
    found = {family for family, sign in SIGNS.items() if any(map(sign.search, keys))}
    if found and c.family not in found:
        other = found.pop()
        raise ConfigError(
            f'weights {where} are of {TITLES[other]}, the config is of {TITLES[c.family]}; '
            f'give base: {other}, or a checkpoint of {c.family}'
        )


def pi0_ignored(c: Pi0Config, key: str) -> bool:
    """Whether a canonical key is part of Pi0 checkpoints but of no use in inference.

    These are tied or unused heads, and the prefix' last layer behind its keys and values.
    """
    last = re.escape(f'vlm.language_model.layers.{c.prefix.layers - 1}.')
    behind = rf'^{last}(self_attn\.[qo]_proj|post_attention_layernorm|mlp\.\w+)\.weight$'
    return bool(IGNORED.search(key) or re.search(behind, key))


def pi0_targets(c: Pi0Config) -> list[Target]:
    """Return the sources of every weight of ``policies.pi0.weights.weight_specs``.

    In Pi0.5 also those of ``policies.pi0.modulation.source_specs``.
    """
    W, P = c.expert.width, c.prefix.width
    embed = Source(
        'vlm.language_model.embed_tokens.weight', (c.vocab, P), otherwise='vlm.lm_head.weight'
    )
    targets = [
        *_vision(c.vision),
        *_linear('projector', 'vlm.multi_modal_projector.linear', P, c.vision.width),
        Target('prefix.embed', (embed,)),
    ]
    last = c.prefix.layers - 1
    for i in range(last):
        targets += _gemma(f'prefix.layers.{i}', f'vlm.language_model.layers.{i}', c.prefix)
    layer = f'vlm.language_model.layers.{last}'
    kv = tuple(
        Source(f'{layer}.self_attn.{n}_proj.weight', (c.prefix.kv_dim, P)) for n in ('k', 'v')
    )
    targets += [
        Target(f'prefix.layers.{last}.norm1', (Source(f'{layer}.input_layernorm.weight', (P,)),)),
        Target(f'prefix.layers.{last}.kv', kv),
    ]
    for i in range(c.expert.layers):
        ours, theirs = f'expert.layers.{i}', f'dit.layers.{i}'
        targets += _gemma(ours, theirs, c.expert, not c.modulated)
        if c.modulated:
            targets += _linear(f'{ours}.norm1', f'{theirs}.input_layernorm.dense', 3 * W, W)
            second = f'{theirs}.post_attention_layernorm.dense'
            targets += _linear(f'{ours}.norm2', second, 3 * W, W)
    if c.modulated:
        targets += [
            *_linear('expert.norm', 'dit.norm.dense', 3 * W, W),
            *_linear('time_mlp_in', 'time_mlp_in', W, W),
            *_linear('time_mlp_out', 'time_mlp_out', W, W),
        ]
    else:
        targets += [
            Target('expert.norm', (Source('dit.norm.weight', (W,)),)),
            *_linear('state_in', 'state_proj', W, c.state_width),
            *_linear('time_mlp_in', 'action_time_mlp_in', W, 2 * W),
            *_linear('time_mlp_out', 'action_time_mlp_out', W, W),
        ]
    return [
        *targets,
        *_linear('action_in', 'action_in_proj', W, c.action_width),
        *_linear('action_out', 'action_out_proj', c.action_width, W),
    ]


def _linear(name: str, key: str, out: int, inp: int) -> Iterator[Target]:
    yield Target(f'{name}.weight', (Source(f'{key}.weight', (out, inp)),))
    yield Target(f'{name}.bias', (Source(f'{key}.bias', (out,)),))


def _norm(name: str, key: str, width: int) -> Iterator[Target]:
    yield Target(f'{name}.weight', (Source(f'{key}.weight', (width,)),))
    yield Target(f'{name}.bias', (Source(f'{key}.bias', (width,)),))


def _vision(d: SiglipDims) -> Iterator[Target]:
    root, p, W = 'vlm.vision_tower', d.patch_size, d.width
    patch = f'{root}.embeddings.patch_embedding'
    # Convolution [out, channel, y, x] becomes a matrix over our patches' (y, x, channel).
    weight = Source(f'{patch}.weight', (W, 3, p, p), permute=(0, 2, 3, 1))
    yield Target('vision.patch.weight', (weight,))
    yield Target('vision.patch.bias', (Source(f'{patch}.bias', (W,)),))
    position = Source(f'{root}.embeddings.position_embedding.weight', (d.tokens, W))
    yield Target('vision.position', (position,))
    for i in range(d.layers):
        ours, theirs = f'vision.layers.{i}', f'{root}.encoder.layers.{i}'
        yield from _norm(f'{ours}.norm1', f'{theirs}.layer_norm1', W)
        for kind, shape in (('weight', (W, W)), ('bias', (W,))):
            parts = (Source(f'{theirs}.self_attn.{n}_proj.{kind}', shape) for n in 'qkv')
            yield Target(f'{ours}.qkv.{kind}', tuple(parts))
        yield from _linear(f'{ours}.out', f'{theirs}.self_attn.out_proj', W, W)
        yield from _norm(f'{ours}.norm2', f'{theirs}.layer_norm2', W)
        yield from _linear(f'{ours}.fc1', f'{theirs}.mlp.fc1', d.mlp, W)
        yield from _linear(f'{ours}.fc2', f'{theirs}.mlp.fc2', W, d.mlp)
    yield from _norm('vision.norm', f'{root}.post_layernorm', W)


def _gemma(ours: str, theirs: str, d: GemmaDims, norms: bool = True) -> Iterator[Target]:
    def target(name: str, *sources: tuple[str, tuple[int, ...]]) -> Target:
        return Target(
            f'{ours}.{name}', tuple(Source(f'{theirs}.{key}.weight', s) for key, s in sources)
        )

    if norms:
        yield target('norm1', ('input_layernorm', (d.width,)))
        yield target('norm2', ('post_attention_layernorm', (d.width,)))
    yield target(
        'qkv',
        ('self_attn.q_proj', (d.q_dim, d.width)),
        ('self_attn.k_proj', (d.kv_dim, d.width)),
        ('self_attn.v_proj', (d.kv_dim, d.width)),
    )
    yield target('out', ('self_attn.o_proj', (d.width, d.q_dim)))
    yield target('gate_up', ('mlp.gate_proj', (d.mlp, d.width)), ('mlp.up_proj', (d.mlp, d.width)))
    yield target('down', ('mlp.down_proj', (d.width, d.mlp)))
