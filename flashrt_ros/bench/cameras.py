"""A robot of the bench: cameras of noise and a resting arm, stamped just before publishing."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence
import sys
import threading
import time

import numpy as np
from rclpy.node import Node
from sensor_msgs.msg import Image
from sensor_msgs.msg import JointState

from flashrt_core.tabletop import HOME
from flashrt_core.tabletop import JOINT_NAMES
from flashrt_ros import qos
from flashrt_ros.main import run_node
from flashrt_ros.main import StopRequest

VIEWS = ['top', 'wrist']
FRAMES = 8


class Cameras(Node):
    """Publishes from two threads at absolute steady deadlines."""

    def __init__(self) -> None:
        super().__init__('cameras')
        camera_hz = float(self.declare_parameter('camera_hz', 30.0).value)
        joint_hz = float(self.declare_parameter('joint_hz', 50.0).value)
        views = self.declare_parameter('views', VIEWS).value
        size = int(self.declare_parameter('image_size_px', 224).value)
        self._stopping = threading.Event()
        noise = np.random.default_rng(0)
        self._messages = []
        for _ in range(FRAMES):
            data = array('B')
            data.frombytes(noise.integers(0, 256, 3 * size * size, dtype=np.uint8).tobytes())
            self._messages.append(
                Image(height=size, width=size, encoding='rgb8', step=3 * size, data=data)
            )
        self._images = [
            self.create_publisher(Image, f'images/{view}', qos.sensor()) for view in views
        ]
        self._joints = self.create_publisher(JointState, 'joint_states', qos.sensor())
        self._pose = JointState(name=list(JOINT_NAMES), position=array('d', HOME))
        self._threads = [
            threading.Thread(target=self._loop, args=(1.0 / camera_hz, self._show), daemon=True),
            threading.Thread(target=self._loop, args=(1.0 / joint_hz, self._tell), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def stop(self, timeout_s: float) -> bool:
        """End both threads."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _loop(self, period_s: float, publish: Callable[[int], None]) -> None:
        due = time.monotonic()
        count = 0
        while not self._stopping.wait(max(0.0, due - time.monotonic())):
            publish(count)
            count += 1
            due = max(due + period_s, time.monotonic() - period_s)

    def _show(self, count: int) -> None:
        message = self._messages[count % FRAMES]
        for publisher in self._images:
            message.header.stamp = self.get_clock().now().to_msg()
            publisher.publish(message)

    def _tell(self, count: int) -> None:
        self._pose.header.stamp = self.get_clock().now().to_msg()
        self._joints.publish(self._pose)


def main(argv: Sequence[str] | None = None) -> int:
    """Run until SIGINT or SIGTERM."""

    def make(stop: StopRequest) -> Node:
        return Cameras()

    return run_node(make, argv)


if __name__ == '__main__':
    sys.exit(main())
