"""Sizes of the Qwen3.5/3.6 text models, and how a session of one runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import fields
import math
from pathlib import Path
from typing import Any

import torch

from flashrt_core.capsule import config_fields
from flashrt_core.config_files import override
from flashrt_core.config_files import read_yaml
from flashrt_core.errors import ConfigError
from flashrt_core.nn import int4
from flashrt_core.nn import nvfp4
from flashrt_core.nn.delta import TAPS
from flashrt_core.nn.fp8 import E4M3
from flashrt_core.planners.protocol import Settings

DTYPES = {'float32': torch.float32, 'bfloat16': torch.bfloat16}
PRECISIONS = ('bf16', 'fp8', 'int4', 'nvfp4')
KV_PRECISIONS = ('bf16', 'fp8')
GROUPS = {'int4': int4.GROUP, 'nvfp4': nvfp4.GROUP}  # columns of a weight that share a scale
NOT_LAYOUT = ('weights', 'weight_seed', 'tokenizer', 'context')


@dataclass(frozen=True)
class Qwen35Config:
    """A hybrid text model: of every ``full_every`` layers the last attends, the others recur.

    ``heads``, ``kv_heads``, ``head_dim``: of the gated full attention; the first ``rotary`` of a
    head's dims are rotated. ``key_heads``, ``value_heads``, ``key_dim``, ``value_dim``: of the
    gated delta rule. ``tied``: the head is the embedding. ``mtp``: has the multi-token head.
    ``context``: tokens that the KV buffers hold.
    ``precision``: how the weights of the products are stored: 'bf16' as they are, in ``dtype``;
    'fp8', 'int4' and 'nvfp4' quantised while they are loaded, see precision.py.
    ``kv_precision``: of the KV buffers: 'bf16' is ``dtype``, 'fp8' E4M3 without a scale, half the
    bytes of a capsule's KV.
    ``weights``: a safetensors file or folder, plain or quantised (checkpoints/quantised.py);
    empty = random from ``weight_seed``.
    ``tokenizer``: see planners/vocabularies.py.

    :raises ConfigError: sizes that do not fit together.
    """

    width: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    vocab: int
    context: int
    rotary: int
    full_every: int = 4
    rope_theta: float = 1e7
    eps: float = 1e-6
    tied: bool = False
    mtp: bool = True
    dtype: str = 'bfloat16'
    precision: str = 'bf16'
    kv_precision: str = 'bf16'
    weights: str = ''
    weight_seed: int = 0
    tokenizer: str = ''

    def __post_init__(self) -> None:
        _check(self)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def kv_dtype(self) -> torch.dtype:
        """Of keys and values."""
        return E4M3 if self.kv_precision == 'fp8' else self.torch_dtype

    @property
    def channels(self) -> int:
        """Channels of the convolution: query, key and value of the delta rule."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def q_dim(self) -> int:
        return self.heads * self.head_dim

    @property
    def v_dim(self) -> int:
        """Columns of what the delta rule reads out."""
        return self.value_heads * self.value_dim

    @property
    def kv_dim(self) -> int:
        return self.kv_heads * self.head_dim

    def is_full(self, layer: int) -> bool:
        """Say whether a layer attends; the others carry a recurrent state."""
        return (layer + 1) % self.full_every == 0

    def layout(self) -> dict[str, str]:
        """Return what decides how a state is read, as fields of an identity.

        The context counts through the shapes of the KV buffers.
        """
        record = {f.name: getattr(self, f.name) for f in fields(self)}
        return config_fields({k: v for k, v in record.items() if k not in NOT_LAYOUT})


def _check(c: Qwen35Config) -> None:
    for name in (
        'width mlp layers heads kv_heads head_dim key_heads value_heads key_dim value_dim vocab '
        'context rotary full_every'
    ).split():
        if getattr(c, name) < 1:
            raise ConfigError(f'{name} is {getattr(c, name)}; give at least 1')
    rules = [
        (c.heads % c.kv_heads == 0, f'heads {c.heads} is no multiple of kv_heads {c.kv_heads}'),
        (
            c.value_heads % c.key_heads == 0,
            f'value_heads {c.value_heads} is no multiple of key_heads {c.key_heads}',
        ),
        (
            c.rotary % 2 == 0 and c.rotary <= c.head_dim,
            f'rotary is {c.rotary}; give an even number up to head_dim {c.head_dim}',
        ),
        (
            c.layers >= c.full_every,
            f'{c.layers} layers hold no full attention at full_every {c.full_every}',
        ),
        (c.dtype in DTYPES, f'dtype {c.dtype!r} is unknown; choose from {sorted(DTYPES)}'),
        (
            c.precision in PRECISIONS,
            f'precision {c.precision!r} is unknown; choose from {list(PRECISIONS)}',
        ),
        (
            c.kv_precision in KV_PRECISIONS,
            f'kv_precision {c.kv_precision!r} is unknown; choose from {list(KV_PRECISIONS)}',
        ),
        (0 < c.eps < 1, f'eps is {c.eps}; give a number between 0 and 1'),
        (
            0 < c.rope_theta < math.inf,
            f'rope_theta is {c.rope_theta}; give a finite number above 0',
        ),
        (0 <= c.weight_seed < 2**63, f'weight_seed is {c.weight_seed}; give 0 to 2**63 - 1'),
        (
            c.context > TAPS,
            f'context is {c.context}; give more than {TAPS} tokens',
        ),
    ]
    if group := GROUPS.get(c.precision):
        for name in ('width', 'mlp', 'q_dim', 'v_dim'):
            fits = getattr(c, name) % group == 0
            rules.append((fits, f'{name} {getattr(c, name)} is no multiple of {group}, as '
                          f'precision {c.precision} needs it; choose fp8 or bf16'))  # fmt: skip
    for holds, message in rules:
        if not holds:
            raise ConfigError(message)


def _qwen(width: int, mlp: int, layers: int, heads: int, kv_heads: int, value_heads: int,
          **more: Any) -> Qwen35Config:
    return Qwen35Config(
        width=width, mlp=mlp, layers=layers, heads=heads, kv_heads=kv_heads, head_dim=256,
        key_heads=16, value_heads=value_heads, key_dim=128, value_dim=128, vocab=248320,
        context=16384, rotary=64, tokenizer='qwen', **more,
    )  # fmt: skip


TINY = Qwen35Config(
    width=64, mlp=160, layers=4, heads=4, kv_heads=2, head_dim=32, key_heads=2, value_heads=4,
    key_dim=16, value_dim=16, vocab=512, context=256, rotary=8, dtype='float32',
)  # fmt: skip

NAMED: dict[str, tuple[Qwen35Config, Settings]] = {
    'tiny': (
        TINY,
        Settings(prefill_keys=(16, 64), ridge=16, smallest_span=64, draft_tokens=4, branches=4,
                 tail_tokens=32, cpu_threads=1),
    ),
    '0.8b': (_qwen(1024, 3584, 24, 8, 2, 16, tied=True), Settings()),
    '2b': (_qwen(2048, 6144, 24, 8, 2, 16, tied=True), Settings()),
    '4b': (_qwen(2560, 9216, 32, 16, 4, 32, tied=True), Settings()),
    '9b': (_qwen(4096, 12288, 32, 16, 4, 32), Settings()),
    '27b': (_qwen(5120, 17408, 64, 24, 4, 48), Settings()),
}  # fmt: skip


def load_config(
    source: str | Path | Mapping[str, Any] | tuple[Qwen35Config, Settings] | Qwen35Config,
) -> tuple[Qwen35Config, Settings]:
    """Return config and settings from a name, a YAML file or a mapping.

    A file or mapping names its ``base`` (one of NAMED) and overrides single values of both. In a
    file ``weights`` and ``tokenizer`` may be files that lie beside it.

    :raises ConfigError: an unknown name or key, a wrong type, a value out of range.
    """
    if isinstance(source, Qwen35Config):
        return source, Settings()
    if isinstance(source, tuple):
        return source
    if isinstance(source, Mapping):
        record = dict(source)
    elif not isinstance(source, str | Path):
        raise ConfigError(f'planner config is {source!r:.80}; give a name, a file or a mapping')
    elif str(source) in NAMED:
        return NAMED[str(source)]
    else:
        record = read_yaml(Path(source), 'planner config', NAMED, ('weights', 'tokenizer'))
    base = record.pop('base', 'tiny')
    planner = record.pop('planner', 'qwen3_5')
    if planner != 'qwen3_5':
        raise ConfigError(f"planner is {planner!r}, this config is read by 'qwen3_5'")
    if not isinstance(base, str) or base not in NAMED:
        raise ConfigError(f'base {base!r:.200} is unknown; choose from {sorted(NAMED)}')
    c, s = NAMED[base]
    running = {f.name for f in fields(Settings)}
    return (
        override(c, {k: v for k, v in record.items() if k not in running}),
        override(s, {k: v for k, v in record.items() if k in running}),
    )
