"""Where the two trained small models lie: resource/models, in the source tree or as installed."""

import os
from pathlib import Path
import sys

from flashrt_core.errors import ConfigError

FILES = {
    'policy': ('policy.yaml', 'policy.safetensors'),
    'planner': ('planner.yaml', 'planner.safetensors', 'tokenizer.json'),
}
HOW = {'policy': 'python -m flashrt_core.tabletop.train_policy all --out {0}',
       'planner': 'python -m flashrt_core.tabletop.train_planner train --out {0}'}


def trained(name: str) -> Path | None:
    """Return the config of the trained 'policy' or 'planner', None where it is not shipped.

    :raises ConfigError: another name, or some of its files are there and others are not.
    """
    if name not in FILES:
        raise ConfigError(f'there is no trained {name!r}; there are {", ".join(FILES)}')
    for folder in _folders(name):
        missing = [file for file in FILES[name] if not (folder / file).is_file()]
        if not missing:
            return folder / FILES[name][0]
        if len(missing) < len(FILES[name]):
            raise ConfigError(f'{folder} lacks {", ".join(missing)}; install the package again, '
                              'or remove the folder')
    return None


def needed(name: str) -> Path:
    """Return the config of the trained 'policy' or 'planner'.

    :raises ConfigError: it is not shipped; says how to train it.
    """
    found = trained(name)
    if found is None:
        places = [str(folder) for folder in _folders(name)]
        raise ConfigError(f'no trained {name} in {", ".join(places)}; train one: '
                          f'{HOW[name].format(places[0])}')
    return found


def config_of(path: Path | None, name: str) -> Path:
    """Return a config given as such or by its folder; without one that of the shipped model.

    :raises ConfigError: a folder without all files of the model.
    """
    if path is None:
        return needed(name)
    if not path.is_dir():
        return path
    missing = [file for file in FILES[name] if not (path / file).is_file()]
    if missing:
        raise ConfigError(f'{path} lacks {", ".join(missing)}; give the folder of a whole {name}, '
                          f'or train one there: {HOW[name].format(path)}')
    return path / FILES[name][0]


def _folders(name: str) -> list[Path]:
    folders = [Path(__file__).resolve().parents[2] / 'resource']
    for prefix in [*os.environ.get('AMENT_PREFIX_PATH', '').split(os.pathsep), sys.prefix]:
        if prefix:
            folders.append(Path(prefix) / 'share' / 'flashrt_ros' / 'resource')
    return list(dict.fromkeys(folder / 'models' / name for folder in folders))
