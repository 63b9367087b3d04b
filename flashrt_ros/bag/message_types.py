"""Message types of recordings: this package's interfaces registered with rosbags."""

from collections.abc import Iterable
from importlib import import_module
import re
from typing import Any

from rosbags.typesys import get_types_from_msg
from rosbags.typesys import get_typestore
from rosbags.typesys import Stores
from rosbags.typesys.store import Typestore

from flashrt_core.errors import ConfigError

RECORDED = ('ActionChunk', 'Event', 'ExecutorStatus', 'Heartbeat', 'PlannerStatus', 'Subgoal',
            'SubgoalOutcome', 'TickInput')
_PACKAGE = 'flashrt_ros'
_NAMES = {'float': 'float32', 'double': 'float64', 'boolean': 'bool', 'octet': 'byte'}
_SEQUENCE = re.compile(r'sequence<([^,<>]+)(?:, (\d+))?>')


def writing_typestore() -> Typestore:
    """Return Jazzy's types and this package's, as the installed Python classes have them."""
    store = get_typestore(Stores.ROS2_JAZZY)
    for name in ('ObservationStamp', *RECORDED):
        message = message_class(f'{_PACKAGE}/msg/{name}')
        store.register(get_types_from_msg(definition(message), f'{_PACKAGE}/msg/{name}'))
    return store


def reading_typestore(connections: Iterable[Any]) -> Typestore:
    """Return Jazzy's types and those that a recording itself defines; needs no ROS."""
    store = get_typestore(Stores.ROS2_JAZZY)
    for connection in connections:
        if connection.msgtype not in store.types:
            store.register(get_types_from_msg(connection.msgdef.data, connection.msgtype))
    return store


def message_class(name: str) -> Any:
    """Return the Python class of ``package/msg/Name``.

    :raises ConfigError: when the package or the message is not installed.
    """
    package, _, message = name.split('/')
    try:
        return getattr(import_module(f'{package}.msg'), message)
    except (ImportError, AttributeError) as reason:
        raise ConfigError(
            f'message type {name} is not installed ({reason}); build flashrt_ros or install its '
            'package'
        ) from reason


def definition(message: Any) -> str:
    """Return the .msg text of a generated class, without comments, defaults and constants."""
    lines = []
    for name, kind in message.get_fields_and_field_types().items():
        match = _SEQUENCE.fullmatch(kind)
        element, suffix = kind, ''
        if match:
            element, suffix = match[1], f'[<={match[2]}]' if match[2] else '[]'
        elif kind.endswith(']'):
            element, _, size = kind.partition('[')
            suffix = f'[{size}'
        lines.append(f'{_NAMES.get(element, element)}{suffix} {name}')
    return '\n'.join(lines) + '\n'
