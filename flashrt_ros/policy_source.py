"""Which policy to bind: its config, checkpoint and tokenizer, and whether they fit the robot.

Decided from parameters, names and small files before anything is loaded; free of ROS. The names
'policy' and 'random' stand for "as the policy's config says" and for random weights.
"""

from collections.abc import Mapping
import os
from pathlib import Path
from typing import Any

from flashrt_core.checkpoints.published import how_to_get
from flashrt_core.errors import ConfigError
from flashrt_core.errors import OutOfMemory
from flashrt_core.policies import MemoryNeed
from flashrt_core.policies import Policy
from flashrt_core.runtime import Backend
from flashrt_ros.config_files import expanded
from flashrt_ros.config_files import here_or_below_config
from flashrt_ros.embodiment import Embodiment
from flashrt_ros.executor_tick import Ports

AS_CONFIGURED, RANDOM = 'policy', 'random'
TOKENIZER_FILES = ('tokenizer.model', 'paligemma_tokenizer.model')
# What a recording made before these parameters existed was run with.
DEFAULTS = {'chunk_mode': AS_CONFIGURED, 'checkpoint': AS_CONFIGURED, 'tokenizer': AS_CONFIGURED,
            'fit_to_robot': False}  # fmt: skip


def policy_config(
    values: Mapping[str, Any], policy: Policy, robot: Embodiment
) -> str | dict[str, Any]:
    """Return what the policy is bound with: ``policy_config``, and over it what is set besides.

    :param values: of the executor's parameters.
    :raises ConfigError: no checkpoint is given, or none is there; says where to get one.
    """
    source = str(values['policy_config']) or f'{values["policy"]}.yaml'
    if Path(source).suffix in ('.yaml', '.yml'):
        source = here_or_below_config(source)
    changes: dict[str, Any] = {}
    if values['chunk_mode'] != AS_CONFIGURED:
        changes['chunk_mode'] = str(values['chunk_mode'])
    changes |= _checkpoint(values)
    base = {'base': source, **changes} if changes else source
    if not values['fit_to_robot']:
        return base
    return {'base': source, **changes, **_robots_own(policy, base, robot)}


def _checkpoint(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings that the parameters ``checkpoint`` and ``tokenizer`` stand for."""
    named, tokenizer = str(values['checkpoint']), str(values['tokenizer'])
    found: dict[str, str] = {}
    if tokenizer != AS_CONFIGURED:
        found['tokenizer'] = str(expanded(tokenizer)) if tokenizer else ''
    if named == AS_CONFIGURED:
        return found
    if named == RANDOM:
        return {'weights': '', **found}
    path = expanded(named)
    if not named or not os.path.exists(path):
        raise ConfigError(
            f'checkpoint is {named!r:.200}, '
            + ('so there are no weights to run' if not named else 'which does not exist here')
            + f'. To get one for {values["policy"]!r}:\n{how_to_get(str(values["policy"]))}\n'
            '  Then start again with checkpoint:=<folder or .safetensors file>.\n'
            '  To measure without one: checkpoint:=random; random weights never on a robot.')
    folder = path if path.is_dir() else path.parent
    beside = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if beside and tokenizer == AS_CONFIGURED:
        found['tokenizer'] = str(beside[0])
    return {'weights': str(path), **found}


def _robots_own(policy: Policy, config: Any, robot: Embodiment) -> dict[str, Any]:
    """Return sizes and views of the robot in the place of the config's own."""
    views = Ports.of(policy.ports(config)).views
    robot.check_views(tuple(views))
    joints = len(robot.joints)
    return {'state_dim': joints, 'action_dim': joints,
            **({'views': [v for v in views if v in robot.views]} if robot.views else {})}


def check_fit(policy: Policy, config: Any, robot: Embodiment) -> None:
    """Verify before anything is loaded that policy and robot fit.

    :raises ConfigError: too few elements for the joints, or a view that the policy has not.
    """
    ports = Ports.of(policy.ports(config))
    robot.check_dims(ports.state_dim, ports.action_dim)
    robot.check_views(tuple(ports.views))


def check_memory(need: MemoryNeed, capsule_bytes: int, backend: Backend) -> str:
    """Return in a sentence what will be allocated and what is free, before anything is.

    :param capsule_bytes: budget of the tiers that lie in the device's memory.
    :raises OutOfMemory: it cannot fit; the same sentence and the remedy.
    """
    free = backend.memory()
    total = need.constants + need.buffers + (need.pinned if free.integrated else 0)
    # On the CPU a capsule's pages take memory only when it is made.
    total += capsule_bytes if backend.name == 'cuda' else 0
    sentence = (
        f'memory: {_size(need.constants)} of weights and tables, {_size(need.buffers)} of '
        f'buffers, {_size(need.pinned)} pinned, {_size(capsule_bytes)} of capsules on '
        f'{backend.device}, where {_size(free.free)} of {_size(free.total)} are free; graphs and '
        'workspaces come on top')
    if total > free.free:
        raise OutOfMemory(
            f'{sentence}: {_size(total)} do not fit, nothing was loaded; free memory on the '
            'device, or give smaller capsule budgets, fewer rows in the policy config or a '
            'smaller policy')
    return sentence


def _size(count: int) -> str:
    return f'{count / 2**30:.2f} GiB' if count >= 2**30 else f'{count / 2**20:.1f} MiB'
