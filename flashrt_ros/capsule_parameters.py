"""Parameters that executor and planner have in common: those of their capsules, and a heading."""

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

from flashrt_core.capsule.store import PAGE_BYTES
from flashrt_core.errors import ConfigError
from flashrt_core.runtime import Backend
from flashrt_core.runtime.backend import host_memory
from flashrt_ros.parameters import ParameterSpec
from flashrt_ros.parameters import ParameterTable

_GIB = 1 << 30
OF_MODEL = -1    # a budget that follows from the model
FULL = 4         # capsules of a full context that it then holds: the pinned one and a few more
SHARE = 4        # of the free memory, it takes one part at most

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


# Of a planner, whose capsules grow with model and context.
PLANNER_CAPSULES = tuple(
    replace(spec, default=OF_MODEL, minimum=OF_MODEL,
            description=f'{spec.description}; -1: {FULL} capsules of a full context, at least '
            f'{_GIB >> 30} GiB, at most a quarter of the free memory')
    if spec.name in ('capsule_gpu_bytes', 'capsule_host_bytes') else spec
    for spec in CAPSULES
)


@dataclass(frozen=True)
class Budgets:
    """Bytes for capsules in device and host memory, and those of one of a full context."""

    gpu: int
    host: int
    full: int

    @property
    def text(self) -> str:
        """What there is room for, in words."""
        held = ' and '.join(
            f'{nbytes // self.full} in {tier} memory ({nbytes / 1e9:.2f} GB)'
            for tier, nbytes in (('gpu', self.gpu), ('host', self.host)))
        return f'room for capsules of a full context ({self.full / 1e6:.1f} MB each): {held}'


def budgets_of(values: Any, memory: Mapping[str, int], context: int, backend: Backend) -> Budgets:
    """Return the budgets that the parameters ask for, or that follow from a planner's model.

    :param values: of the parameters by name. :param memory: of the session, in bytes by purpose.
    :param context: tokens of a full one.
    """
    nbytes = memory['capsule_fixed'] + context * memory['capsule_per_token']
    full = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
    found = {}
    for tier, free in (('gpu', backend.memory().free), ('host', host_memory()[1])):
        asked = values[f'capsule_{tier}_bytes']
        found[tier] = min(max(_GIB, FULL * full), free // SHARE) if asked == OF_MODEL else asked
    return Budgets(found['gpu'], found['host'], full)


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
