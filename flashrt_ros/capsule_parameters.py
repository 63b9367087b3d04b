"""Parameters that executor and planner have in common: those of their capsules, and a heading."""

from typing import Any

from flashrt_core.errors import ConfigError
from flashrt_ros.parameters import ParameterSpec
from flashrt_ros.parameters import ParameterTable

_GIB = 1 << 30

CAPSULES = (
    ParameterSpec('capsule_gpu_bytes', _GIB, 'budget of the gpu tier', 0, 1 << 46,
                  read_only=True),
    ParameterSpec('capsule_host_bytes', _GIB, 'budget of the host tier', 0, 1 << 46,
                  read_only=True),
    ParameterSpec('capsule_disk_bytes', 0, 'budget of the disk tier', 0, 1 << 50,
                  read_only=True),
    ParameterSpec('capsule_directory', '', 'folder of the disk tier', read_only=True),
    ParameterSpec('allow_disk_capsules', False, 'allow saving to disk at all', read_only=True),
    ParameterSpec('capsule_proof', 'off', 'digest: hash the device state after each restore',
                  choices=('off', 'digest')),
)


def check_capsules(values: Any) -> None:
    """Check the capsules' parameters before anything is loaded.

    :param values: by name.
    :raises ConfigError: naming parameter, value and remedy.
    """
    if values['allow_disk_capsules'] and not values['capsule_directory']:
        raise ConfigError('allow_disk_capsules is true and capsule_directory is empty; '
                          'give a folder, or set allow_disk_capsules to false')


def table_text(title: str, table: ParameterTable) -> str:
    """Return the text of a document about a node's parameters, up to the end of its table."""
    return (f'# {title}\n\n'
            'Times are in seconds, sizes in bytes. *fixed*: set at start, a change needs a new '
            'configure of the process.\nEvery topic also has '
            '`qos_overrides.<topic>.<publisher|subscription>.{history,depth,reliability}`.\n\n'
            + table.markdown())
