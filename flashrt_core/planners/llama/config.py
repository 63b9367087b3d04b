"""Sizes of a Llama as one frozen record, from a name, a YAML file, a GGUF file or a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import fields
from dataclasses import replace
import json
import math
import os
from pathlib import Path
from typing import Any

import torch

from flashrt_core.capsule import config_fields
from flashrt_core.config_files import override
from flashrt_core.config_files import read_yaml
from flashrt_core.config_files import shipped_files
from flashrt_core.errors import ConfigError
from flashrt_core.planners.llama.gguf import GgufReader
from flashrt_core.planners.llama.gguf import open_gguf
from flashrt_core.planners.llama.gguf import SMOLLM2
from flashrt_core.planners.protocol import Settings
from flashrt_core.planners.text import check_vocabulary
from flashrt_core.planners.vocabularies import make_tokenizer

DTYPES = {'float32': torch.float32, 'bfloat16': torch.bfloat16}
NOT_LAYOUT = ('weights', 'weight_seed', 'tokenizer', 'context')


@dataclass(frozen=True)
class LlamaConfig:
    """Everything that decides buffers and numbers of a Llama (arXiv 2302.13971, 2307.09288).

    ``context``: tokens that the state holds. ``tied``: the head is the embedding.
    ``weights``: a .gguf file, a safetensors file or folder, or 'smollm2'; empty = random from
    ``weight_seed``. ``tokenizer``: see planners/vocabularies.py; empty = none.
    ``head_dim`` 0: ``width / heads``.

    :raises ConfigError: sizes that do not fit together.
    """

    width: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 0
    mlp: int = 128
    vocab: int = 512
    context: int = 256
    eps: float = 1e-5
    rope_theta: float = 10000.0
    tied: bool = True
    dtype: str = 'float32'
    weights: str = ''
    weight_seed: int = 0
    tokenizer: str = ''

    def __post_init__(self) -> None:
        if not self.head_dim and self.heads > 0:
            object.__setattr__(self, 'head_dim', self.width // self.heads)
        for name, value in vars(self).items():
            least = 0 if name == 'weight_seed' else 1
            if type(value) is int and value < least:
                raise ConfigError(f'{name} is {value}; give at least {least}')
            if type(value) is float and not 0 < value < math.inf:
                raise ConfigError(f'{name} is {value}; give a finite number above 0')
        if self.heads % self.kv_heads or self.head_dim % 2:
            raise ConfigError(
                f'heads {self.heads} must be a multiple of kv_heads {self.kv_heads}, and head_dim '
                f'{self.head_dim} even'
            )
        if self.dtype not in DTYPES:
            raise ConfigError(f'dtype {self.dtype!r} is unknown; choose from {sorted(DTYPES)}')

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def q_dim(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.kv_heads * self.head_dim

    def layout(self) -> dict[str, str]:
        """Return what decides how a state is read, as fields of an identity.

        The context counts through the shapes of the KV buffers.
        """
        kept = {k: v for k, v in vars(self).items() if k not in NOT_LAYOUT}
        return config_fields(kept)


NAMED = ('tiny', SMOLLM2)
TINY = LlamaConfig()
# Of a file, unless asked for more: what a CPU runs through at bind in seconds.
SETTINGS = Settings(prefill_keys=(16, 64, 256))
CONTEXT = 2048
TINY_SETTINGS = Settings(
    prefill_keys=(16, 64), ridge=16, smallest_span=64, draft_tokens=4, branches=4, tail_tokens=32,
    cpu_threads=1,
)  # fmt: skip


def load_config(
    source: str | Path | Mapping[str, Any] | tuple[LlamaConfig, Settings] | LlamaConfig,
) -> tuple[LlamaConfig, Settings]:
    """Return config and settings from a name, a file or a mapping.

    A YAML file or mapping names its ``base`` and overrides single values of both. A base is
    'tiny', 'smollm2', a .gguf file, or the folder of a checkpoint with its ``config.json``; sizes,
    weights, tokenizer and stop ids are taken from there, the context up to CONTEXT.

    :raises ConfigError: an unknown name or key, a wrong type, a value out of range.
    """
    if isinstance(source, LlamaConfig):
        return source, Settings()
    if isinstance(source, tuple):
        return source
    if isinstance(source, Mapping):
        record = dict(source)
    elif not isinstance(source, str | Path):
        raise ConfigError(f'planner config is {source!r:.80}; give a name, a file or a mapping')
    elif str(source).endswith(('.yaml', '.yml')):
        record = read_yaml(Path(source), 'planner config', NAMED)
    else:
        record = {'base': str(source)}
    planner, base = record.pop('planner', 'llama'), record.pop('base', 'tiny')
    if planner != 'llama':
        raise ConfigError(f"planner is {planner!r}, this config is read by 'llama'")
    c, s = _base(base)
    running = {f.name for f in fields(Settings)}
    c = override(c, {k: v for k, v in record.items() if k not in running})
    fitting = tuple(key for key in s.prefill_keys if key <= c.context) or (c.context,)
    s = replace(s, prefill_keys=fitting)
    return c, override(s, {k: v for k, v in record.items() if k in running})


def _base(name: Any) -> tuple[LlamaConfig, Settings]:
    if name == 'tiny':
        return TINY, TINY_SETTINGS
    text = str(name)
    folder = Path(text)
    if text == SMOLLM2 or text.endswith('.gguf'):
        with open_gguf(text) as reader:
            c = replace(gguf_config(reader), tokenizer=text)
    elif isinstance(name, str) and os.path.isfile(folder / 'config.json'):
        c, vocabulary = json_config(folder / 'config.json'), folder / 'tokenizer.json'
        if vocabulary.is_file():
            c = replace(c, tokenizer=str(vocabulary))
    else:
        raise ConfigError(
            f'planner {text!r:.200} is none of {", ".join(NAMED)}, no .gguf file and no folder '
            f'with a config.json; give one of these, or a YAML file{shipped_files("planner")}'
        )
    c = replace(c, weights=text, context=min(c.context, CONTEXT))
    if not c.tokenizer:
        return c, SETTINGS
    tokenizer = make_tokenizer(c.tokenizer)
    check_vocabulary(tokenizer, c.vocab)
    return c, replace(SETTINGS, stop_ids=tokenizer.ends)


def gguf_config(reader: GgufReader) -> LlamaConfig:
    """Return the sizes that a GGUF file states, with the longest context of the model.

    :raises ConfigError: another architecture, a size that is missing, scaled rope.
    """
    stated, where = reader.fields, str(reader.path)
    kind = stated.get('general.architecture')
    if kind != 'llama':
        raise ConfigError(f"{where} is of the architecture {kind!r}; this family reads 'llama'")
    if stated.get('llama.rope.scaling.type', 'none') != 'none':
        raise ConfigError(
            f'{where} scales its rope by {stated["llama.rope.scaling.type"]!r}, which is not '
            'known here; give a model without it'
        )
    heads = _size(stated, 'llama.attention.head_count', where)
    width = _size(stated, 'llama.embedding_length', where)
    return LlamaConfig(
        width=width,
        layers=_size(stated, 'llama.block_count', where),
        heads=heads,
        kv_heads=int(stated.get('llama.attention.head_count_kv', heads)),
        head_dim=int(stated.get('llama.attention.key_length', width // heads)),
        mlp=_size(stated, 'llama.feed_forward_length', where),
        vocab=reader.shapes.get('embed_tokens.weight', (0,))[0],
        context=_size(stated, 'llama.context_length', where),
        eps=float(stated.get('llama.attention.layer_norm_rms_epsilon', 1e-5)),
        rope_theta=float(stated.get('llama.rope.freq_base', 10000.0)),
        tied='lm_head.weight' not in reader.shapes,
    )


def json_config(path: Path) -> LlamaConfig:
    """Return the sizes of a Hugging Face ``config.json`` of a Llama.

    :raises ConfigError: no such file, another model type, a size that is missing, scaled rope.
    """
    try:
        record = json.loads(path.read_text(encoding='utf-8'))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f'{path} cannot be read as JSON: {error}') from error
    kind = record.get('model_type') if isinstance(record, dict) else None
    if kind != 'llama':
        raise ConfigError(f"{path} is of the model type {kind!r}; this family reads 'llama'")
    rope = {**(record.get('rope_scaling') or {}), **(record.get('rope_parameters') or {})}
    scaled = rope.get('rope_type', rope.get('type', 'default'))
    unknown = [k for k in ('attention_bias', 'mlp_bias') if record.get(k)]
    if scaled != 'default' or unknown or record.get('hidden_act', 'silu') != 'silu':
        raise ConfigError(
            f'{path} asks for {unknown or [scaled, record.get("hidden_act")]}, which is not known '
            'here; give a Llama with plain rope, silu and no biases'
        )
    heads = _size(record, 'num_attention_heads', str(path))
    width = _size(record, 'hidden_size', str(path))
    return LlamaConfig(
        width=width,
        layers=_size(record, 'num_hidden_layers', str(path)),
        heads=heads,
        kv_heads=int(record.get('num_key_value_heads') or heads),
        head_dim=int(record.get('head_dim') or width // heads),
        mlp=_size(record, 'intermediate_size', str(path)),
        vocab=_size(record, 'vocab_size', str(path)),
        context=_size(record, 'max_position_embeddings', str(path)),
        eps=float(record.get('rms_norm_eps', 1e-6)),
        rope_theta=float(rope.get('rope_theta', record.get('rope_theta', 10000.0))),
        tied=bool(record.get('tie_word_embeddings', False)),
    )


def _size(record: Mapping[str, Any], key: str, where: str) -> int:
    value = record.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f'{where} says {key} is {value!r}; it must state a whole number above 0')
    return value


