"""The small trained models that the package brings along: a policy and a planner."""

import os
from pathlib import Path
import sys

NAMES = ('policy', 'planner')


def trained(name: str) -> Path | None:
    """Return the config file of a shipped trained model, in the source tree or as installed.

    :param name: one of NAMES; its folder holds ``<name>.yaml`` and what that names.
    :return: None where it is not shipped.
    """
    for folder in _folders():
        config = folder / name / f'{name}.yaml'
        if config.is_file():
            return config
    return None


def _folders() -> list[Path]:
    prefixes = [*os.environ.get('AMENT_PREFIX_PATH', '').split(os.pathsep), sys.prefix]
    return [Path(__file__).resolve().parents[2] / 'resource' / 'models',
            *(Path(prefix) / 'share' / 'flashrt_ros' / 'resource' / 'models'
              for prefix in prefixes if prefix)]
