"""Statistics of a Pi0 or Pi0.5 checkpoint from its own files, as openpi or LeRobot writes them.

openpi: ``assets/<robot>/norm_stats.json``. LeRobot: ``policy_preprocessor.json``, which names its
normaliser's safetensors and the way of normalising; early versions keep mean and deviation among
the weights. The small number that each adds against a division by zero is added here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
import re
from typing import Any
from typing import TYPE_CHECKING

from flashrt_core.checkpoints.reader import SafetensorsReader
from flashrt_core.config_files import read_json
from flashrt_core.errors import ConfigError
from flashrt_core.policies.normalise import NEEDS
from flashrt_core.policies.normalise import Statistics

if TYPE_CHECKING:
    from flashrt_core.policies.pi0.config import Pi0Config

OPENPI, LEROBOT = 'norm_stats.json', 'policy_preprocessor.json'
OPENPI_EPSILON, LEROBOT_EPSILON = 1e-6, 1e-8
NAMES = ('mean', 'std', 'q01', 'q99')
# LeRobot's ways; MIN_MAX is the same map as QUANTILES, between other numbers.
WAYS = {'MEAN_STD': 'mean_std', 'QUANTILES': 'quantiles', 'MIN_MAX': 'quantiles',
        'IDENTITY': 'identity'}  # fmt: skip
EARLY = re.compile(r'^(?:model\.)?(?:normalize_inputs|unnormalize_outputs)\.buffer_(\w+)\.(\w+)$')
Numbers = dict[str, dict[str, list[float]]]  # 'state' | 'action' -> name -> values


def pi0_statistics(c: Pi0Config) -> Pi0Config:
    """Return ``c`` with statistics and way of normalising resolved; reads small files only.

    Nothing is looked for where the config gives statistics, where it normalises by 'identity', or
    where the weights are random and no ``statistics_file`` is given.

    :raises ConfigError: none or several are found, they are not readable, of another size, another
        way than the config's, or lack what the way needs.
    """
    if c.statistics.given or c.normalisation == 'identity':
        return c
    if not c.weights and not c.statistics_file:
        return c
    source = Path(c.statistics_file or c.weights)
    if not c.statistics_file or source.is_dir():
        source = _beside(source, c)
    if source.name == LEROBOT:
        numbers, way = _lerobot(source, c)
    elif source.suffix == '.json':
        numbers, way = _openpi(source), ''
    else:
        numbers, way = _early(source)
    if way and c.normalisation and way != c.normalisation:
        raise ConfigError(
            f'{source} normalises by {way}, the config says {c.normalisation}; leave '
            'normalisation empty to take over what the checkpoint was trained with'
        )
    way = way or c.normalised_by
    sizes = {'state': (c.state_dim, c.state_width), 'action': (c.action_dim, c.action_width)}
    values = {
        f'{part}_{name}': _sized(numbers, part, name, sizes[part], source)
        for part in sizes
        for name in NEEDS[way]
    }
    return replace(c, statistics=Statistics(**values), normalisation=way)


def _beside(weights: Path, c: Pi0Config) -> Path:
    """Return the file of statistics in a checkpoint's folder, or the weights that hold them."""
    folder = weights if weights.is_dir() else weights.parent
    found = [path for path in (folder / LEROBOT, folder / OPENPI) if path.is_file()]
    found += sorted(folder.glob(f'assets/**/{OPENPI}'))
    if not found and c.weights and weights == Path(c.weights) and _early(weights)[0]:
        return weights
    if len(found) == 1:
        return found[0]
    need = ', '.join(f'{part}_{n}' for part in ('state', 'action') for n in NEEDS[c.normalised_by])
    if found:
        raise ConfigError(
            f'{folder} holds statistics of several robots: {[str(p) for p in found[:9]]}; give '
            'one of them as statistics_file'
        )
    raise ConfigError(
        f'{folder} holds no statistics (assets/*/{OPENPI} of openpi, {LEROBOT} of LeRobot); '
        f'give statistics_file, or statistics with {need}, or normalisation: identity'
    )


def _openpi(path: Path) -> Numbers:
    record = read_json(path)
    groups = record.get('norm_stats', record)
    if not isinstance(groups, dict):
        raise ConfigError(f'{path} holds no norm_stats; give a norm_stats.json of openpi')
    names = {'state': 'state', 'action': 'actions'}
    numbers = {
        part: {n: groups[key][n] for n in NAMES if groups[key].get(n) is not None}
        for part, key in names.items()
        if isinstance(groups.get(key), dict)
    }
    for values in numbers.values():
        for name, raised in (('std', values.get('std')), ('q99', values.get('q99'))):
            if isinstance(raised, list):
                values[name] = [_number(v, path) + OPENPI_EPSILON for v in raised]
    return numbers


def _lerobot(path: Path, c: Pi0Config) -> tuple[Numbers, str]:
    step = processor_step(path, 'normalizer_processor')
    if not isinstance(step.get('state_file'), str):
        raise ConfigError(
            f'{path} names no normalizer_processor with a state_file; give statistics_file or '
            'statistics'
        )
    ways = step['config'].get('norm_map')
    ways = ways if isinstance(ways, dict) else {}
    kinds = {part: str(ways.get(part.upper(), 'IDENTITY')) for part in ('state', 'action')}
    if len({WAYS.get(kind, kind) for kind in kinds.values()}) != 1 or not set(kinds.values()) <= (
        set(WAYS)
    ):
        raise ConfigError(
            f'{path} normalises by {kinds}; one way for both of {sorted(WAYS)} is known: give '
            'statistics in the config'
        )
    return _named(path.parent / step['state_file'], kinds), WAYS[kinds['state']]


def _named(path: Path, kinds: Mapping[str, str]) -> Numbers:
    """Read LeRobot's ``observation.state.mean`` and the like."""
    keys = {'state': 'observation.state', 'action': 'action'}
    numbers: Numbers = {}
    with SafetensorsReader(path) as reader:
        for part, key in keys.items():
            low, high = ('min', 'max') if kinds[part] == 'MIN_MAX' else ('q01', 'q99')
            stored = {'mean': 'mean', 'std': 'std', 'q01': low, 'q99': high}
            numbers[part] = {
                name: reader.read(f'{key}.{theirs}').double().flatten().tolist()
                for name, theirs in stored.items()
                if f'{key}.{theirs}' in reader.shapes
            }
    for values in numbers.values():
        _widen(values)
    return numbers


def _early(path: Path) -> tuple[Numbers, str]:
    """Read the statistics that LeRobot kept among the weights; none gives an empty mapping."""
    parts = {'observation_state': 'state', 'action': 'action'}
    numbers: Numbers = {}
    with SafetensorsReader(path) as reader:
        for name in reader.shapes:
            match = EARLY.match(name)
            if match and match[1] in parts and match[2] in NAMES:
                values = reader.read(name).double().flatten().tolist()
                numbers.setdefault(parts[match[1]], {})[match[2]] = values
    for group in numbers.values():
        _widen(group)
    return numbers, 'mean_std' if numbers else ''


def _widen(values: dict[str, list[float]]) -> None:
    """Keep divisors above zero, as LeRobot does."""
    if 'std' in values:
        values['std'] = [v + LEROBOT_EPSILON for v in values['std']]
    if 'q01' in values and 'q99' in values and len(values['q01']) == len(values['q99']):
        values['q99'] = [
            b if b != a else a + LEROBOT_EPSILON for a, b in zip(values['q01'], values['q99'])
        ]


def _sized(
    numbers: Numbers, part: str, name: str, sizes: tuple[int, int], source: Path
) -> tuple[float, ...]:
    """Return one vector of the robot's size; openpi may have padded it to the model's width."""
    values = numbers.get(part, {}).get(name)
    if not isinstance(values, list) or not values:
        have = sorted(numbers.get(part, {}))
        raise ConfigError(
            f'{source} has no {name} of the {part}s (it has {have}); give statistics_file of the '
            'right file, or statistics in the config'
        )
    if len(values) not in sizes:
        raise ConfigError(
            f'{source} has {len(values)} values of {part} {name}, the robot has {sizes[0]}; set '
            f'{part}_dim to the robot that the checkpoint is for, or give its statistics'
        )
    return tuple(_number(v, source) for v in values[: sizes[0]])


def _number(value: Any, source: Path) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f'{source} holds {value!r:.40} among its statistics; give numbers')
    try:
        return float(value)
    except OverflowError:
        raise ConfigError(
            f'{source} holds a number that no float holds among its statistics; copy it again'
        ) from None


def processor_step(path: Path, name: str) -> dict[str, Any]:
    """Return a step of LeRobot's processor by its registered name, 'config' always a mapping."""
    steps = read_json(path).get('steps')
    for step in steps if isinstance(steps, list) else []:
        if isinstance(step, dict) and step.get('registry_name') == name:
            config = step.get('config')
            return {**step, 'config': config if isinstance(config, dict) else {}}
    return {'config': {}}
