"""The capsule: execution state at a committed boundary, frozen, restored, forked, rolled back."""

from .arrival import Arrival
from .boundary import Boundary
from .hashing import weights_digest
from .identity import config_fields
from .identity import Identity
from .identity import numerics_of
from .ledger import Capsule
from .live import Continuation
from .marks import Mark
from .records import CapsuleInfo
from .records import check_id
from .records import RestoreReport
from .records import StoreEvent
from .records import TierUsage
from .stages import Stages
from .store import CapsuleStore

__all__ = [
    'Arrival',
    'Boundary',
    'Capsule',
    'CapsuleInfo',
    'CapsuleStore',
    'Continuation',
    'Identity',
    'Mark',
    'RestoreReport',
    'Stages',
    'StoreEvent',
    'TierUsage',
    'check_id',
    'config_fields',
    'numerics_of',
    'weights_digest',
]
