"""What LeRobot or openpi wrote beside a Pi0 or Pi0.5 checkpoint and no weight tells."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from typing import TYPE_CHECKING

from flashrt_core.checkpoints.pi0_statistics import LEROBOT
from flashrt_core.checkpoints.pi0_statistics import processor_step
from flashrt_core.config_files import read_json
from flashrt_core.errors import ConfigError

if TYPE_CHECKING:
    from flashrt_core.policies.pi0.config import Pi0Config

RELATIVE = 'relative_actions_processor'
# Theirs -> ours; action_horizon is written by openpi's conversion to PyTorch.
HELD = {'chunk_size': 'horizon', 'action_horizon': 'horizon', 'min_period': 'min_period',
        'max_period': 'max_period'}  # fmt: skip
# With these, early LeRobot moved joints and gripper into another space around the model.
ADAPTED = ('adapt_to_pi_aloha', 'use_delta_joint_actions_aloha')


def pi0_check_settings(c: Pi0Config) -> None:
    """Verify the config against ``config.json`` and ``policy_preprocessor.json``, where they are.

    Neither the length of a chunk nor which actions are relative shows in any tensor, so a wrong
    setting would only show in how the robot moves.

    :raises ConfigError: family, horizon, periods or relative actions are not those of the
        checkpoint, or its actions are in another space.
    """
    if not c.weights:
        return
    weights = Path(c.weights)
    folder = weights if weights.is_dir() else weights.parent
    if (folder / 'config.json').is_file():
        _check_config(c, folder / 'config.json')
    if (folder / LEROBOT).is_file():
        _check_relative(c, folder / LEROBOT)


def _check_config(c: Pi0Config, path: Path) -> None:
    record = read_json(path)
    family = record.get('type')
    if family in ('pi0', 'pi05') and family != c.family:
        raise ConfigError(
            f'{path} is of {family!r}, the config is of {c.family!r}; give base: {family}'
        )
    for name, ours in HELD.items():
        value, own = record.get(name), getattr(c, ours)
        if isinstance(value, int | float) and value != own:
            raise ConfigError(f'{path} has {name} {value}, {ours} is {own}; set {ours} to {value}')
    for name in ADAPTED:
        if record.get(name):
            raise ConfigError(
                f'{path} has {name}: the model gives actions in another space of joints, which is '
                'not converted here; give a checkpoint that was trained without it'
            )


def _check_relative(c: Pi0Config, path: Path) -> None:
    settings = processor_step(path, RELATIVE)['config']
    if not settings.get('enabled'):
        return
    for name in ('exclude_joints', 'action_names'):
        if not isinstance(settings.get(name) or [], list):
            raise ConfigError(
                f'{path} has {name} {settings[name]!r:.80}; give a list of names, as LeRobot does'
            )
    relative = _relative_actions(settings, c.action_dim)
    if sorted(c.relative) != relative:
        raise ConfigError(
            f'{path} makes the actions {relative} relative to the state, the config has '
            f'{list(c.relative)}; set relative to {relative}'
        )


def _relative_actions(settings: dict[str, Any], size: int) -> list[int]:
    """Return the indexes of relative actions; an excluded name may be part of an action's name."""
    excluded = [str(name).lower() for name in settings.get('exclude_joints') or [] if name]
    names = [str(name).lower() for name in settings.get('action_names') or []][:size]
    kept = {i for i, name in enumerate(names) if any(word in name for word in excluded)}
    return [i for i in range(size) if i not in kept]
