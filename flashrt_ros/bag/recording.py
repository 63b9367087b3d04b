"""Reads a recording: ticks and events by epoch, observations by topic and stamp."""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
import json
from pathlib import Path
from typing import Any

from rosbags.rosbag2 import Reader
import yaml

from flashrt_core.errors import ConfigError
from flashrt_core.errors import FlashrtError
from flashrt_ros.bag.message_types import reading_typestore
from flashrt_ros.conversions import stamp_to_ns

EXECUTOR_KEY = 'flashrt.executor'
PARAMETERS_KEY = 'flashrt.executor_parameters'


@dataclass(frozen=True)
class RecordedEvent:
    """One message of ``~/events``; ``detail`` is the decoded JSON object."""

    epoch: int
    episode: int
    tick: int
    kind: str
    name: str
    detail: Mapping[str, Any]


@dataclass(frozen=True)
class Tick:
    """One committed tick: its input and, when its chunk was played, that chunk."""

    given: Any  # flashrt_ros/msg/TickInput
    chunk: Any | None  # flashrt_ros/msg/ActionChunk


@dataclass
class Epoch:
    """What happened between two changes of the session's state, in order."""

    number: int
    began_by: RecordedEvent | None = None  # reset, restore or rollback; None: before the recording
    ticks: list[Tick] = field(default_factory=list)
    events: list[RecordedEvent] = field(default_factory=list)


class Recording:
    """A recorded run in memory; images are kept as serialised bytes until they are asked for."""

    def __init__(self, path: str | Path) -> None:
        """Read a rosbag2 folder that :mod:`flashrt_ros.bag.record` or ``ros2 bag`` has written.

        :raises ConfigError: when it cannot be read or holds no executor.
        """
        self.path = Path(path)
        self.executor = ''
        self.parameters: dict[str, Any] = {}
        self.epochs: dict[int, Epoch] = {}
        self._stamped: dict[tuple[str, int], list[tuple[bytes, str]]] = {}
        try:
            with Reader(self.path) as reader:
                self._read(reader)
        except FlashrtError:
            raise
        except Exception as reason:  # whatever damaged bytes lead the parsers to
            raise ConfigError(
                f'recording {path} cannot be read ({str(reason) or type(reason).__name__}); '
                'give a whole rosbag2 folder'
            ) from reason

    @property
    def ticks(self) -> Iterator[Tick]:
        """All ticks, in order."""
        for number in sorted(self.epochs):
            yield from self.epochs[number].ticks

    def messages(self, topic: str, stamp_ns: int) -> Iterator[tuple[Any, bool]]:
        """Yield the messages of a topic with that header stamp, and whether each is compressed."""
        for data, kind in self._stamped.get((topic, stamp_ns), ()):
            yield self._typestore.deserialize_cdr(data, kind), kind.endswith('CompressedImage')

    def topic(self, name: str) -> str:
        """Return the full name of a topic beside the executor."""
        return f'{self.executor.rpartition("/")[0]}/{name}'

    def _read(self, reader: Reader) -> None:
        self._typestore = reading_typestore(reader.connections)
        custom = _custom_data(self.path)
        self.executor = custom.get(EXECUTOR_KEY) or _find_executor(reader.topics)
        self.parameters = dict(json.loads(custom.get(PARAMETERS_KEY, '{}')))
        inputs: list[Any] = []
        chunks: dict[tuple[int, int], Any] = {}
        decode: Callable[[bytes, str], Any] = self._typestore.deserialize_cdr
        for connection, _, data in reader.messages():
            topic, kind = connection.topic, connection.msgtype
            if topic.startswith(self.topic('images/')) or topic == self.topic('joint_states'):
                stamp = stamp_to_ns(decode(data, kind).header.stamp)
                self._stamped.setdefault((topic, stamp), []).append((bytes(data), kind))
            elif topic == f'{self.executor}/tick_input':
                inputs.append(decode(data, kind))
            elif topic == f'{self.executor}/chunk':
                chunk = decode(data, kind)
                chunks[chunk.epoch, chunk.tick] = chunk
            elif topic == f'{self.executor}/events':
                self._add_event(decode(data, kind))
        for given in inputs:
            self._epoch(given.epoch).ticks.append(
                Tick(given, chunks.get((given.epoch, given.tick)))
            )

    def _add_event(self, message: Any) -> None:
        event = RecordedEvent(
            int(message.epoch),
            int(message.episode),
            int(message.tick),
            message.kind,
            message.name,
            json.loads(message.detail or '{}'),
        )
        epoch = self._epoch(event.epoch)
        if event.kind in ('reset', 'restore', 'rollback'):
            epoch.began_by = event
        else:
            epoch.events.append(event)

    def _epoch(self, number: int) -> Epoch:
        return self.epochs.setdefault(int(number), Epoch(int(number)))


def _custom_data(path: Path) -> dict[str, str]:
    document = yaml.safe_load((path / 'metadata.yaml').read_text(encoding='utf-8'))
    return document['rosbag2_bagfile_information'].get('custom_data') or {}


def _find_executor(topics: Any) -> str:
    found = sorted(t.removesuffix('/tick_input') for t in topics if t.endswith('/tick_input'))
    if len(found) != 1:
        raise ConfigError(
            f'the recording holds {len(found)} executors ({", ".join(found)}); it must hold one'
        )
    return found[0]
