"""flashrt_core: resettable policies and planners; tensors and time, never ROS."""
from __future__ import annotations

import importlib
from typing import Any

__all__ = [
    'Backend', 'Boundary', 'Buffer', 'BufferSet', 'BufferSpec', 'Capsule', 'CapsuleStore', 'Chunk',
    'Event', 'FlashrtError', 'Graph', 'Identity', 'Kind', 'Lane', 'LaneResult', 'Mark',
    'MemoryInfo', 'Options', 'Plan', 'PortSpec', 'Role', 'ShapeKey', 'SubgoalWrite', 'TickInput',
    'cpu_backend', 'cuda_backend', 'make_planner', 'make_policy', 'pick_backend',
]

_ROOM_OF = {
    'FlashrtError': 'errors',
    **dict.fromkeys(('Boundary', 'Capsule', 'CapsuleStore', 'Identity', 'Mark'), 'capsule'),
    **dict.fromkeys(('Chunk', 'PortSpec', 'SubgoalWrite', 'TickInput', 'make_policy'), 'policies'),
    **dict.fromkeys(('Options', 'make_planner'), 'planners'),
}


def __getattr__(name: str) -> Any:
    """Import the room of a public name on its first use: a user of one room pays for one."""
    if name not in __all__:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    room = importlib.import_module(f'{__name__}.{_ROOM_OF.get(name, "runtime")}')
    return getattr(room, name)


def __dir__() -> list[str]:
    return __all__
