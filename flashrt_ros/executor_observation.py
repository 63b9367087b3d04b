"""The newest observation of each stream, decoded on arrival, taken together by a tick."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
import threading
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashrt_core.errors import ObservationMissing
from flashrt_ros.clocks import RosReading
from flashrt_ros.conversions import digest
from flashrt_ros.conversions import JointReader
from flashrt_ros.conversions import stamp_to_ns
from flashrt_ros.embodiment import Embodiment
from flashrt_ros.images import decode_compressed
from flashrt_ros.images import decode_image
from flashrt_ros.images import fit_view
from flashrt_ros.observations import ObservationWatch

JOINTS = 'joint_states'


def image_stream(view: str) -> str:
    """Return the stream name of a view."""
    return f'images/{view}'


@dataclass(frozen=True)
class Sample:
    """One decoded message; the array is never written again."""

    stamp_ns: int  # header stamp, ROS time
    received_ns: int  # steady time
    array: NDArray[Any]  # joints: float64 [n] robot units; image: uint8 [H, W, 3], port's size

    @cached_property
    def digest(self) -> int:
        """Of the array, computed when first asked for; any thread."""
        return digest(self.array)


@dataclass(frozen=True)
class Observation:
    """The newest sample of every stream at one moment; absent streams are not in it."""

    samples: Mapping[str, Sample]

    @property
    def stamps_ns(self) -> dict[str, int | None]:
        """Header stamp per stream."""
        return {name: sample.stamp_ns for name, sample in self.samples.items()}

    @property
    def oldest_received_ns(self) -> int:
        """Steady time at which the oldest of the samples arrived; 0 when there is none."""
        return min((sample.received_ns for sample in self.samples.values()), default=0)

    @property
    def newest_stamp_ns(self) -> int:
        """Newest header stamp; 0 when there is none."""
        return max((sample.stamp_ns for sample in self.samples.values()), default=0)

    @property
    def joints(self) -> NDArray[np.float64]:
        """Joint positions, robot units, embodiment order."""
        return self.samples[JOINTS].array

    def image(self, view: str) -> NDArray[np.uint8] | None:
        """Return a view's image, or None when it is not mapped."""
        sample = self.samples.get(image_stream(view))
        return None if sample is None else sample.array

    def digests(self) -> dict[str, int]:
        """Return the digest of each array, for TickInput."""
        return {name: sample.digest for name, sample in self.samples.items()}

    def frames(self, views: Iterable[str]) -> dict[str, Sample]:
        """Return stamp and digest of each view that has an image, for TickInput."""
        found = {view: self.samples.get(image_stream(view)) for view in views}
        return {view: sample for view, sample in found.items() if sample is not None}


class ObservationBuffer:
    """Keeps one sample per stream.

    ``on_joints`` and ``on_image`` run on the executor thread and raise what the caller counts;
    ``newest`` and ``wait_for`` run on the tick side.
    """

    def __init__(
        self,
        embodiment: Embodiment,
        sizes: Mapping[str, tuple[int, int]],
        watch: ObservationWatch,
        *,
        resize: str,
        lock_step: bool,
        notify: Callable[[], None],
    ) -> None:
        """Start empty.

        :param sizes: (height, width) of each mapped view, as the policy's port wants it.
        :param resize: letterbox or refuse, for images of another size.
        :param lock_step: stamps are the caller's business, the order and age checks are left out.
        :param notify: called after each accepted message.
        """
        self.streams = (JOINTS, *(image_stream(view) for view in sizes))
        self._reader = JointReader(embodiment)
        self._sizes = dict(sizes)
        self._watch = watch
        self._resize = resize
        self._lock_step = lock_step
        self._notify = notify
        self._condition = threading.Condition()
        self._samples: dict[str, Sample] = {}

    def on_joints(self, message: Any, now: RosReading) -> None:
        """Take a sensor_msgs/JointState.

        :raises ObservationError: the message is refused, the newest good one stays.
        """
        received = time.monotonic_ns()
        stamp = stamp_to_ns(message.header.stamp)
        positions = self._reader.read(message)
        self._accept(JOINTS, stamp, now)
        self._keep(JOINTS, Sample(stamp, received, positions))

    def on_image(self, view: str, message: Any, now: RosReading, compressed: bool) -> None:
        """Take a sensor_msgs/Image or CompressedImage of one view; raises like ``on_joints``."""
        received = time.monotonic_ns()
        stream = image_stream(view)
        stamp = stamp_to_ns(message.header.stamp)
        decode = decode_compressed if compressed else decode_image
        height, width = self._sizes[view]
        image = fit_view(decode(message, stream=stream), height, width,
                         resize=self._resize, stream=stream)
        self._accept(stream, stamp, now)
        self._keep(stream, Sample(stamp, received, image))

    def newest(self) -> Observation:
        """Return what is held now."""
        with self._condition:
            return Observation(dict(self._samples))

    def measured(self) -> NDArray[np.float64] | None:
        """Return the newest joint positions, or None before the first."""
        sample = self._samples.get(JOINTS)
        return None if sample is None else sample.array

    def wait_for(self, stamp_ns: int, timeout_s: float) -> Observation:
        """Wait until every stream has a sample not older than ``stamp_ns``.

        :raises ObservationMissing: naming the first stream that has none in time.
        """
        def lacking() -> list[str]:
            return [name for name in self.streams
                    if name not in self._samples or self._samples[name].stamp_ns < stamp_ns]

        with self._condition:
            if self._condition.wait_for(lambda: not lacking(), timeout_s):
                return Observation(dict(self._samples))
            name = lacking()[0]
            held = self._samples.get(name)
            newest = 'nothing' if held is None else f'{held.stamp_ns / 1e9:.3f} s'
            raise ObservationMissing(
                f'{name} sent nothing stamped {stamp_ns / 1e9:.3f} s or later within '
                f'{timeout_s:g} s, the newest is {newest}; check the robot and that stamp')

    def clear(self) -> None:
        """Forget everything, after ROS time has jumped back."""
        with self._condition:
            self._samples.clear()
        self._watch.clear()

    def _accept(self, stream: str, stamp_ns: int, now: RosReading) -> None:
        if not self._lock_step:
            self._watch.accept(stream, stamp_ns, now)

    def _keep(self, stream: str, sample: Sample) -> None:
        with self._condition:
            self._samples[stream] = sample
            self._condition.notify_all()
        self._notify()
