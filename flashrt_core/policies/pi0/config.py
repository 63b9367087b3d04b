"""Sizes and behaviour of Pi0 and Pi0.5 as one frozen record; named sizes such as 'pi0'."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
import json
import math
from pathlib import Path
import re
from typing import Any

import torch

from flashrt_core.config_files import override
from flashrt_core.config_files import read_yaml
from flashrt_core.config_files import shipped_files
from flashrt_core.errors import ConfigError
from flashrt_core.nn import GemmaDims
from flashrt_core.nn import SiglipDims
from flashrt_core.policies import chunking
from flashrt_core.policies.normalise import check_statistics
from flashrt_core.policies.normalise import Statistics
from flashrt_core.policies.selectors import SELECTORS

FAMILIES = ('pi0', 'pi05')
RESERVED = {'state', 'prompt', 'subgoal', 'subgoal_embedding', 'noise', 'action', 'guidance'}
FLOW_STEPS_LIMIT = 1000
FILES = ('weights', 'tokenizer', 'statistics_file', 'scales')  # may lie beside a config's file
CONFIG_SUFFIXES = ('.yaml', '.yml')
DTYPES = {'float32': torch.float32, 'bfloat16': torch.bfloat16}
PRECISIONS = ('', 'bf16', 'fp8')
FP8_UNIT = 16  # divides both sizes of an FP8 product


@dataclass(frozen=True)
class Pi0Config:
    """Everything that decides the buffers, the graphs and the numbers of a Pi0 or Pi0.5 session.

    ``family``: 'pi0' gives the state to the expert as a token; 'pi05' writes it into the prompt
    (``state_tokens`` of it) and lets the flow's time modulate the expert's norms (adaRMS).
    ``state_dim`` and ``action_dim`` are the robot's, the widths those of the model (zero-padded).
    ``subgoal_embedding_tokens``: rows that a subgoal may give in place of its tokens, at most
    ``subgoal_tokens``; 0 binds no such input.
    ``relative``: action indexes that the model gives relative to the state of the same index.
    ``rows``: branches allocated. ``row_keys``: branch counts captured.
    ``chunk_mode``: how a new chunk joins the one being played, see policies/chunking.py.
    ``blend_steps``: length of the blend with the previous chunk, of the mode 'blend'.
    ``ensemble_decay``: how much more an older chunk weighs, of the mode 'ensemble'.
    ``rtc_steps``: first steps of a chunk that are guided (those of a longer delay all are), with
    weights by ``rtc_schedule`` and at most ``rtc_max_guidance``, of the mode 'rtc'.
    ``best_of_keys``: numbers of candidates captured, of which ``selector`` keeps one a tick, see
    policies/selectors.py; at most ``rows``.
    ``guidance``: classifier-free guidance is bound: a second prefix without the task and twice the
    rows in the expert, ``TickInput.guidance`` says how strong.
    ``reuse_vision``: encode each camera by a segment of its own, left out where the tick names the
    same frame again (``TickInput.frames``); slower where all frames are new.
    ``weights``: a safetensors file or folder; empty = random from ``weight_seed``.
    ``statistics_file``: of openpi or LeRobot; empty = found beside the weights. Not looked for
    where ``statistics`` are given or the weights are random.
    ``normalisation``: see policies/normalise.py; empty = the checkpoint's, else the family's.
    ``precision`` of the prefix' products: 'fp8' stores their weights as E4M3 and
    needs ``scales``, the file that ``python -m flashrt_core.policies.calibrate`` makes; empty =
    that of ``dtype``, in which the expert always is.
    ``time_dtype``: 'float64' embeds flow time as openpi does, 'float32' as transformers does.
    ``cpu_threads``: of torch on the cpu backend, 0 leaves torch's own choice.
    ``seed``: of a fresh session. ``units``: of each action. ``tokenizer``: 'words' or the path of
    a SentencePiece ``tokenizer.model``; Pi0.5 needs one, Pi0 then takes text, else token ids.
    """

    views: tuple[str, ...]
    vision: SiglipDims
    prefix: GemmaDims
    expert: GemmaDims
    vocab: int
    prompt_tokens: int
    subgoal_tokens: int
    horizon: int
    state_dim: int
    action_dim: int
    state_width: int
    action_width: int
    family: str = 'pi0'
    state_tokens: int = 0
    subgoal_embedding_tokens: int = 0
    flow_steps: int = 10
    min_period: float = 4e-3
    max_period: float = 4.0
    time_dtype: str = 'float64'
    chunk_mode: str = 'blend'
    blend_steps: int = 4
    ensemble_decay: float = 0.01
    rtc_steps: int = 10
    rtc_schedule: str = 'linear'
    rtc_max_guidance: float = 10.0
    relative: tuple[int, ...] = ()
    units: tuple[str, ...] = ()
    statistics: Statistics = field(default_factory=Statistics)
    statistics_file: str = ''
    normalisation: str = ''
    dtype: str = 'float32'
    precision: str = ''
    scales: str = ''
    rows: int = 1
    row_keys: tuple[int, ...] = (1,)
    best_of_keys: tuple[int, ...] = ()
    selector: str = 'medoid'
    guidance: bool = False
    reuse_vision: bool = False
    seed: int = 0
    weights: str = ''
    weight_seed: int = 0
    tokenizer: str = ''
    cpu_threads: int = 0

    def __post_init__(self) -> None:
        check(self)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def quantised(self) -> bool:
        """Whether the prefix' products are in FP8."""
        return self.precision == 'fp8'

    @property
    def image_tokens(self) -> int:
        return len(self.views) * self.vision.tokens

    @property
    def modulated(self) -> bool:
        """Whether time modulates the expert's norms."""
        return self.family == 'pi05'

    @property
    def text_tokens(self) -> int:
        """Language tokens of a tick: prompt and subgoal; Pi0.5: one of the two, and the state."""
        if self.modulated:
            return max(self.prompt_tokens, self.subgoal_tokens) + self.state_tokens
        return self.prompt_tokens + self.subgoal_tokens

    @property
    def prefix_tokens(self) -> int:
        return self.image_tokens + self.text_tokens

    @property
    def suffix_tokens(self) -> int:
        """Tokens of the expert: the actions, in Pi0 behind one of the state."""
        return self.horizon if self.modulated else self.horizon + 1

    @property
    def normalised_by(self) -> str:
        """The way of normalising: as said, else as the family was trained."""
        return self.normalisation or ('quantiles' if self.modulated else 'mean_std')

    def layout(self) -> dict[str, str]:
        """Return what decides how a state is read: all but paths, rows and first values."""
        skipped = (
            'weights weight_seed rows row_keys best_of_keys selector seed tokenizer cpu_threads '
            'guidance reuse_vision statistics_file statistics normalisation precision scales '
            'subgoal_embedding_tokens'
        ).split()
        record = {k: v for k, v in asdict(self).items() if k not in skipped}
        if self.quantised:
            record['precision'] = self.precision
        record |= {f'statistics.{k}': v for k, v in vars(self.statistics).items()}
        record['normalisation'] = self.normalised_by
        return {f'config.{k}': json.dumps(v, sort_keys=True) for k, v in record.items()}


def check(c: Pi0Config) -> None:
    """Raise ConfigError for sizes that do not fit together."""
    positive = {
        name: getattr(c, name)
        for name in (
            'vocab prompt_tokens subgoal_tokens horizon state_dim action_dim state_width '
            'action_width flow_steps rows'
        ).split()
    }
    for name, value in positive.items():
        if value < 1:
            raise ConfigError(f'{name} is {value}; give at least 1')
    for part in ('vision', 'prefix', 'expert'):
        for name, number in vars(getattr(c, part)).items():
            if not (number >= 1 if isinstance(number, int) else 0 < number < math.inf):
                raise ConfigError(f'{part}.{name} is {number}; give a number above 0')
    rules = [
        (c.family in FAMILIES, f'family {c.family!r} is unknown; choose from {list(FAMILIES)}'),
        (
            c.state_tokens >= 1 if c.family == 'pi05' else c.state_tokens == 0,
            f'state_tokens is {c.state_tokens}; Pi0.5 writes the state into its prompt and needs '
            'some, about 4 a joint and 10 more; Pi0 has none: give 0',
        ),
        (
            0 <= c.subgoal_embedding_tokens <= c.subgoal_tokens,
            f'subgoal_embedding_tokens is {c.subgoal_embedding_tokens}; give 0 to subgoal_tokens '
            f'{c.subgoal_tokens}, whose places the rows take',
        ),
        (
            bool(c.views) and len(set(c.views)) == len(c.views),
            f'views {c.views}: name each camera once',
        ),
        (
            all(re.fullmatch(r'[A-Za-z0-9_.-]+', view) for view in c.views),
            f'views {c.views}: use the characters A-Z a-z 0-9 _ . - in names of cameras',
        ),
        (
            c.flow_steps <= FLOW_STEPS_LIMIT,
            f'flow_steps is {c.flow_steps}; give at most {FLOW_STEPS_LIMIT}',
        ),
        (
            0 < c.min_period < c.max_period < math.inf,
            f'min_period {c.min_period} and max_period {c.max_period} must be finite, above 0 and '
            'in this order',
        ),
        (
            c.vision.image_size % c.vision.patch_size == 0,
            f'vision.image_size {c.vision.image_size} is no multiple of vision.patch_size',
        ),
        (
            c.vision.width % c.vision.heads == 0,
            f'vision.width {c.vision.width} does not divide into {c.vision.heads} heads',
        ),
        (
            all(
                getattr(c.prefix, n) == getattr(c.expert, n)
                for n in ('layers', 'heads', 'kv_heads', 'head_dim', 'rope_theta')
            ),
            'prefix and expert differ in layers, heads, kv_heads, head_dim or rope_theta; '
            'the expert attends the prefix layer by layer, so they must be equal',
        ),
        (
            c.prefix.heads % c.prefix.kv_heads == 0 and c.prefix.head_dim % 2 == 0,
            f'heads {c.prefix.heads} must be a multiple of kv_heads, head_dim must be even',
        ),
        (c.expert.width % 2 == 0, f'expert.width {c.expert.width} must be even (time embedding)'),
        (
            c.state_dim <= c.state_width and c.action_dim <= c.action_width,
            f'state_dim {c.state_dim} and action_dim {c.action_dim} exceed the widths '
            f'{c.state_width} and {c.action_width}',
        ),
        (
            0 <= c.blend_steps <= c.horizon,
            f'blend_steps is {c.blend_steps}; give 0 to horizon {c.horizon}',
        ),
        (
            c.chunk_mode in chunking.MODES,
            f'chunk_mode {c.chunk_mode!r} is unknown; choose from {list(chunking.MODES)}',
        ),
        (
            c.chunk_mode != 'ensemble' or abs(c.ensemble_decay) * c.horizon <= 50,
            f'ensemble_decay is {c.ensemble_decay}; give a number whose product with horizon '
            f'{c.horizon} lies in [-50, 50]',
        ),
        (
            c.rtc_steps >= 1,
            f'rtc_steps is {c.rtc_steps}; give at least 1 (steps beyond the left-over count none)',
        ),
        (
            c.rtc_schedule in chunking.SCHEDULES,
            f'rtc_schedule {c.rtc_schedule!r} is unknown; choose from {list(chunking.SCHEDULES)}',
        ),
        (
            0 < c.rtc_max_guidance < math.inf,
            f'rtc_max_guidance is {c.rtc_max_guidance}; give a number above 0',
        ),
        (
            all(0 <= i < min(c.state_dim, c.action_dim) for i in c.relative),
            f'relative {c.relative} names an action without a state of the same index',
        ),
        (
            not set(c.views) & RESERVED,
            f'views {c.views} hold the name of another port; avoid {sorted(RESERVED)}',
        ),
        (c.dtype in DTYPES, f'dtype {c.dtype!r} is unknown; choose from {sorted(DTYPES)}'),
        (
            c.precision in PRECISIONS,
            f'precision {c.precision!r} is unknown; choose from {list(PRECISIONS)}',
        ),
        (
            c.precision != 'bf16' or c.dtype == 'bfloat16',
            f"precision is 'bf16' and dtype {c.dtype!r}; set dtype: bfloat16, or leave precision "
            'empty',
        ),
        (
            bool(c.scales) or not c.quantised,
            "precision 'fp8' needs scales; make the file with python -m "
            'flashrt_core.policies.calibrate, or set precision: bf16',
        ),
        (
            not c.quantised or all(size % FP8_UNIT == 0 for size in product_sizes(c)),
            f"precision 'fp8' needs sizes of products that {FP8_UNIT} divides, these are "
            f'{sorted(product_sizes(c))}; set precision: bf16',
        ),
        (
            c.time_dtype in ('float32', 'float64'),
            f'time_dtype {c.time_dtype!r} is unknown; choose float32 or float64',
        ),
        (
            bool(c.row_keys) and all(1 <= k <= c.rows for k in c.row_keys) and 1 in c.row_keys,
            f'row_keys {c.row_keys} must hold 1 and stay within rows {c.rows}',
        ),
        (
            all(2 <= n <= c.rows for n in c.best_of_keys),
            f'best_of_keys {c.best_of_keys} must lie between 2 and rows {c.rows}',
        ),
        (
            c.selector in SELECTORS,
            f'selector {c.selector!r} is unknown; choose from {sorted(SELECTORS)}',
        ),
        (
            0 <= c.seed < 2**63 and 0 <= c.weight_seed < 2**63,
            f'seed {c.seed} and weight_seed {c.weight_seed} must lie in [0, 2**63)',
        ),
    ]
    for holds, message in rules:
        if not holds:
            raise ConfigError(message)
    sizes = {'state': c.state_dim, 'action': c.action_dim}
    check_statistics(c.statistics, sizes, c.normalised_by)
    if not 0 <= c.cpu_threads <= 1024:
        raise ConfigError(f'cpu_threads is {c.cpu_threads}; give 0 to 1024')
    if c.units and len(c.units) != c.action_dim:
        raise ConfigError(f'units has {len(c.units)} names; give {c.action_dim}, one an action')
    for unit in c.units:  # a port has them as one text
        if unit.split() != [unit]:
            raise ConfigError(f'units holds {unit!r}; give names without spaces, 1 for none')


def product_sizes(c: Pi0Config) -> set[int]:
    """Return the numbers of inputs and outputs of the products that FP8 takes."""
    v, p = c.vision, c.prefix
    return {v.width, v.mlp, p.width, p.q_dim, p.qkv_dim, p.mlp, 2 * p.kv_dim}


PI0 = Pi0Config(
    views=('base', 'left_wrist', 'right_wrist'),
    vision=SiglipDims(image_size=224, patch_size=14, width=1152, layers=27, heads=16, mlp=4304),
    prefix=GemmaDims(width=2048, layers=18, heads=8, kv_heads=1, head_dim=256, mlp=16384),
    expert=GemmaDims(width=1024, layers=18, heads=8, kv_heads=1, head_dim=256, mlp=4096),
    vocab=257152,
    prompt_tokens=48,
    subgoal_tokens=48,
    horizon=50,
    state_dim=32,
    action_dim=32,
    state_width=32,
    action_width=32,
    dtype='bfloat16',
)

TINY = Pi0Config(
    views=('top', 'wrist'),
    vision=SiglipDims(image_size=84, patch_size=14, width=96, layers=3, heads=4, mlp=256),
    prefix=GemmaDims(width=128, layers=3, heads=4, kv_heads=1, head_dim=32, mlp=256),
    expert=GemmaDims(width=96, layers=3, heads=4, kv_heads=1, head_dim=32, mlp=192),
    vocab=512,
    prompt_tokens=24,
    subgoal_tokens=24,
    horizon=32,
    state_dim=4,
    action_dim=4,
    state_width=4,
    action_width=4,
    units=('rad', 'rad', 'rad', '1'),
    relative=(0, 1, 2),
    statistics=Statistics(
        state_mean=(0.0, 1.45, -0.4, 0.5),
        state_std=(1.1, 0.7, 1.0, 0.5),
        action_mean=(0.0, 0.0, 0.0, 0.5),
        action_std=(0.1, 0.1, 0.1, 0.25),
    ),
    rows=4,
    row_keys=(1, 2, 3, 4),
    tokenizer='words',
    cpu_threads=1,
)

PI05 = replace(
    PI0,
    family='pi05',
    prompt_tokens=62,
    subgoal_tokens=62,
    state_tokens=138,
    tokenizer='words',
)

PI05_TINY = replace(
    TINY,
    family='pi05',
    prompt_tokens=32,
    subgoal_tokens=32,
    state_tokens=32,
    statistics=Statistics(
        state_q01=(-2.5, -0.2, -2.7, 0.0),
        state_q99=(2.5, 3.0, 2.0, 1.0),
        action_q01=(-0.25, -0.25, -0.25, 0.0),
        action_q99=(0.25, 0.25, 0.25, 1.0),
    ),
)

NAMED = {'pi0': PI0, 'tiny': TINY, 'pi05': PI05, 'pi05_tiny': PI05_TINY}


def load_config(source: str | Path | Mapping[str, Any] | Pi0Config) -> Pi0Config:
    """Return a config from a name, a YAML file or a mapping.

    A file or mapping names its ``base`` (one of NAMED; a mapping may also name a file) and
    overrides single values; a ``policy`` in it must be the family. Raises ConfigError naming an
    unknown key, a wrong type or a value out of range.
    """
    if isinstance(source, Pi0Config):
        return source
    if isinstance(source, Mapping):
        record = dict(source)
    elif not isinstance(source, str | Path):
        raise ConfigError(f'policy config is {source!r:.80}; give a name, a file or a mapping')
    elif str(source) in NAMED:
        return NAMED[str(source)]
    else:
        record = read_yaml(Path(source), 'policy config', NAMED, FILES)
    base = record.pop('base', 'tiny')
    policy = record.pop('policy', None)
    if isinstance(source, Mapping) and isinstance(base, str) and base.endswith(CONFIG_SUFFIXES):
        start = load_config(base)
    elif isinstance(base, str) and base in NAMED:
        start = NAMED[base]
    else:
        raise ConfigError(f'policy config or base {base!r:.200} is unknown; choose from '
                          f'{sorted(NAMED)}{shipped_files("policy")}')
    config: Pi0Config = override(start, record)
    if policy not in (None, config.family):
        raise ConfigError(
            f'policy {policy!r} does not go with base {base!r}, which is {config.family!r}; give '
            f'one of {[name for name, c in NAMED.items() if c.family == policy] or list(NAMED)}'
        )
    return config
