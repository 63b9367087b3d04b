"""Files below config/, in the source tree or as installed, and parameter files for a node."""

from collections.abc import Iterator
from collections.abc import Sequence
import difflib
import itertools
import os
from pathlib import Path
import re
from typing import Any

import yaml

from flashrt_core.config_files import config_folders
from flashrt_core.errors import ConfigError


def config_path(name: str) -> Path:
    """Return the path of ``config/<name>``.

    :raises ConfigError: when it is in neither place; says which files there are.
    """
    candidates = [folder / name for folder in config_folders()]
    for candidate in candidates:
        if os.path.isfile(candidate):  # a name that is too long for a path is no file either
            return candidate
    folders = list(dict.fromkeys(str(c.parent) for c in candidates))
    shipped = sorted({file.name for c in candidates for file in c.parent.glob('*.yaml')})
    raise ConfigError(
        f'config file {name} is in none of {folders}; '
        + (f'give the path of a file, or one of {", ".join(shipped)} there' if shipped
           else 'give the path of a file, or source the setup file of the package'))


def expanded(name: str) -> Path:
    """Return a path with ``~`` as the home it stands for; of an unknown user it stays."""
    return Path(os.path.expanduser(name))


def here_or_below_config(name: str) -> str:
    """Return the path of a file that is named as such or below config/, else the name itself."""
    path = expanded(name)
    candidates = [path, *(folder / name for folder in config_folders() if not path.is_absolute())]
    return next((str(file) for file in candidates if os.path.isfile(file)), name)


def find_embodiment(name: str) -> Path:
    """Return the file that the parameter ``embodiment`` names: a path, or a file below config/.

    :raises ConfigError: there is none; says which are shipped.
    """
    path = expanded(name)
    if os.path.isfile(path):
        return path
    if name and not path.is_absolute():
        for folder in config_folders():
            if os.path.isfile(folder / name):
                return folder / name
    shipped = sorted({file.name for folder in config_folders()
                      for file in folder.glob('embodiments/*.yaml')})
    close = difflib.get_close_matches(path.name, shipped, n=1)
    raise ConfigError(
        f'embodiment is {name!r:.200}, which is no file here nor below config/; give a path, or '
        f'embodiments/{close[0] if close else "<file>"}; shipped are {", ".join(shipped)}')


def parameter_files_for_others(argv: Sequence[str], *node_names: str) -> list[str]:
    """Return a sentence for each ``--params-file`` that has nothing for any of these nodes.

    rcl passes over such a file silently, e.g. when the node's name in it is misspelt.

    :param node_names: of one process, fully qualified.
    """
    sentences = []
    for path in [value for flag, value in itertools.pairwise(argv)
                 if flag == '--params-file']:
        try:
            sections = list(_sections(yaml.safe_load(Path(path).read_text()), ''))
        except (OSError, UnicodeDecodeError, yaml.YAMLError):
            continue  # rcl has said more about it
        if not any(_pattern(section).fullmatch(name)
                   for section in sections for name in node_names):
            name = node_names[0].rsplit('/', 1)[-1]
            sentences.append(
                f'parameter file {path} has {", ".join(sections)[:200] or "no section"}, nothing '
                f'for {" or ".join(node_names)}; write /**/{name}:, below it ros__parameters:')
    return sentences


def parameters_in_any_namespace(argv: Sequence[str], *node_names: str) -> list[str]:
    """Return arguments in which ``-p NODE:NAME:=VALUE`` holds below a namespace too.

    rcl takes NODE for ``/NODE`` there and silently passes over a node of that name in a namespace;
    so those of the named nodes become a parameter file, kept in memory while this process lives.

    :param argv: as in sys.argv. :param node_names: of the process, without namespace.
    """
    kept: list[str] = []
    found: dict[str, list[str]] = {}
    pending = False
    for argument in argv:
        node, _, rule = argument.partition(':')
        name, is_rule, value = rule.partition(':=')
        if pending and node in node_names and is_rule:
            kept.pop()
            found.setdefault(node, []).append(f'    "{name}": {value}\n')
        else:
            kept.append(argument)
        pending = argument in ('-p', '--param')
    if not found:
        return kept
    file = os.memfd_create('parameters')
    os.write(file, ''.join(
        f'/**/{node}:\n  ros__parameters:\n{"".join(lines)}' for node, lines in found.items()
    ).encode())
    return [*kept, '--ros-args', '--params-file', f'/proc/{os.getpid()}/fd/{file}']


def _sections(document: Any, place: str) -> Iterator[str]:
    if isinstance(document, dict):
        for key, value in document.items():
            if key == 'ros__parameters':
                yield place
            else:
                yield from _sections(value, f'{place}/{str(key).strip("/")}')


def _pattern(section: str) -> re.Pattern[str]:
    parts = {'**': '(?:/[^/]+)*', '*': '/[^/]+'}
    return re.compile(''.join(
        parts.get(part, f'/{re.escape(part)}') for part in section.strip('/').split('/')))
