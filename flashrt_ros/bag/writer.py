"""A rosbag2 folder written by a thread of its own, so that no callback waits for the disk."""

from concurrent.futures import Future
from pathlib import Path
import queue
import threading
from typing import Any

from rosbags.rosbag2 import StoragePlugin
from rosbags.rosbag2 import Writer
from rosbags.rosbag2 import WriterError

from flashrt_core.errors import ConfigError
from flashrt_ros.bag.message_types import writing_typestore

STORAGE = {'mcap': StoragePlugin.MCAP, 'sqlite3': StoragePlugin.SQLITE3}


class BagWriter:
    """Takes serialised messages from any thread; they are in the folder after :meth:`close`."""

    def __init__(self, path: Path, storage: str) -> None:
        """Make the folder.

        :param storage: mcap or sqlite3.
        :raises ConfigError: when the folder exists, cannot be made, the storage is unknown, or
            the messages of this package are not installed.
        """
        if storage not in STORAGE:
            raise ConfigError(f'storage is {storage!r}; give one of {", ".join(STORAGE)}')
        self._path, self._storage = path, STORAGE[storage]
        self._entries: queue.SimpleQueue[tuple[str, str, int, bytes] | None] = queue.SimpleQueue()
        self._custom: dict[str, str] = {}
        self._closed = self._ended = False
        self._opened: Future[None] = Future()
        self._error: Exception | None = None
        self._typestore = writing_typestore()
        # SQLite objects belong to the thread that made them: it opens, writes and closes.
        self._thread = threading.Thread(target=self._run, name='bag', daemon=True)
        self._thread.start()
        self._opened.result()

    @property
    def failed(self) -> bool:
        """Whether the disk refused something, so that nothing is taken any more."""
        return self._error is not None

    def knows(self, kind: str) -> bool:
        """Whether messages of ``package/msg/Name`` can be written."""
        return kind in self._typestore.types

    def write(self, topic: str, kind: str, received_ns: int, data: bytes) -> None:
        """Queue one message; dropped after close. Any thread.

        :param kind: ``package/msg/Name``; data: CDR bytes.
        """
        if not self._closed:
            self._entries.put((topic, kind, received_ns, data))

    def set_custom_data(self, key: str, value: str) -> None:
        """Keep a text that goes into the folder's metadata at close. Any thread."""
        self._custom[key] = value

    def close(self) -> None:
        """Write what is queued and the index.

        :raises ConfigError: when the disk refused something; what was written before is kept.
        """
        if self._ended:
            return
        self._closed = self._ended = True
        self._entries.put(None)
        self._thread.join()
        if self._error is not None:
            raise ConfigError(
                f'recording {self._path} is not complete ({self._error}); make room or record '
                'elsewhere'
            )

    def _run(self) -> None:
        try:
            writer = Writer(self._path, version=9, storage_plugin=self._storage)
            writer.open()
        except (WriterError, OSError) as reason:
            self._opened.set_exception(
                ConfigError(
                    f'recording {self._path} cannot be made ({reason}); give a folder that does '
                    'not exist'
                )
            )
            return
        self._opened.set_result(None)
        connections: dict[str, Any] = {}
        try:
            while (entry := self._entries.get()) is not None:
                topic, kind, received_ns, data = entry
                if topic not in connections:
                    connections[topic] = writer.add_connection(
                        topic, kind, typestore=self._typestore)
                writer.write(connections[topic], received_ns, data)
        except Exception as error:
            self._error = error
            self._closed = True
        for key, value in self._custom.items():
            writer.set_custom_data(key, value)
        try:
            writer.close()
        except Exception as error:
            self._error = self._error or error
