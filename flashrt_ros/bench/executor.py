"""The executor with a stop-watch: the same node, its stages stamped and written out at its end.

``FLASHRT_BENCH_SAMPLES`` names the JSON file. All times are nanoseconds of the steady clock except
``stamp`` and ``entry_ros``, which are ROS time.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
import json
import os
from pathlib import Path
import sys
import threading
import time
from typing import Any

from rclpy.node import Node

from flashrt_ros.executor_node import ExecutorNode
from flashrt_ros.main import run_node
from flashrt_ros.main import StopRequest

VARIABLE = 'FLASHRT_BENCH_SAMPLES'


class StopWatch:
    """What was stamped; each list is appended to by one thread at a time."""

    def __init__(self) -> None:
        self.entries: dict[tuple[str, int], tuple[int, int, int]] = {}
        self.ticks: list[dict[str, int]] = []
        self.orders: list[tuple[int, str, int]] = []  # (when, change|chunk|command, epoch)
        self.begun = self.submitted = self.inferred = self.commanded = 0
        self.prepared: Any = None  # the tick under way; ticks run one after the other
        self._lock = threading.Lock()

    def fit(self, node: ExecutorNode) -> None:
        """Put the stamps around the stages of a configured node."""
        engine, control, outputs = node.engine, node.control, node.outputs
        assert engine is not None and control is not None
        observations, session = engine.observations, engine.session
        take_image, submit, judge = observations.on_image, session.submit, engine.ages.judge
        publish_chunk, trajectory, prepare = outputs.chunk, outputs.trajectory, engine.book.prepare
        command, end_change = outputs.command, control.end_change

        def on_image(view: str, message: Any, now: Any, compressed: bool) -> None:
            entry = time.monotonic_ns()
            stamp = message.header.stamp.sec * 1_000_000_000 + message.header.stamp.nanosec
            take_image(view, message, now, compressed)
            with self._lock:
                self.entries[(f'images/{view}', stamp)] = (entry, now.now_ns, time.monotonic_ns())
                if len(self.entries) > 4096:
                    self.entries.pop(next(iter(self.entries)))

        def on_judge(*args: Any) -> Any:
            self.begun = time.monotonic_ns()
            return judge(*args)

        def on_submit(*args: Any, **kwargs: Any) -> Any:
            future = submit(*args, **kwargs)
            self.submitted = time.monotonic_ns()
            future.add_done_callback(self._mark_inferred)
            return future

        def on_trajectory(*args: Any) -> None:
            trajectory(*args)
            self.commanded = time.monotonic_ns()

        def on_prepare(*args: Any) -> Any:
            self.prepared = prepare(*args)
            return self.prepared

        def on_chunk(*args: Any) -> None:
            prepared = self.prepared
            self.orders.append((time.monotonic_ns(), 'chunk', prepared.start.epoch))
            publish_chunk(*args)
            self._note_tick(prepared, time.monotonic_ns(), control.stream)

        def on_command(*args: Any) -> None:
            self.orders.append((time.monotonic_ns(), 'command', control.progress.epoch))
            command(*args)

        def on_end_change(*args: Any, **kwargs: Any) -> None:
            end_change(*args, **kwargs)
            self.orders.append((time.monotonic_ns(), 'change', control.progress.epoch))

        for owner, name, wrapped in (
            (observations, 'on_image', on_image),
            (engine.ages, 'judge', on_judge),
            (session, 'submit', on_submit),
            (outputs, 'trajectory', on_trajectory),
            (outputs, 'chunk', on_chunk),
            (engine.book, 'prepare', on_prepare),
            (outputs, 'command', on_command),
            (control, 'end_change', on_end_change),
        ):
            replace(owner, name, wrapped)

    def _mark_inferred(self, _: object) -> None:
        self.inferred = time.monotonic_ns()

    def _note_tick(self, prepared: Any, published: int, stream: bool) -> None:
        samples = prepared.observation.samples
        with self._lock:
            seen = [
                (self.entries[key], sample.stamp_ns)
                for name, sample in samples.items()
                if (key := (name, sample.stamp_ns)) in self.entries
            ]
        if not seen:
            return
        (entry, entry_ros, decoded), stamp = max(seen)
        self.ticks.append(
            {
                'stamp': stamp,
                'entry': entry,
                'entry_ros': entry_ros,
                'decoded': decoded,
                'begun': self.begun,
                'submitted': self.submitted,
                'inferred': self.inferred,
                'published': published if stream else self.commanded,
                'resync': int(prepared.resync),
            }
        )


def replace(owner: object, name: str, wrapped: Callable[..., Any]) -> None:
    """Put ``wrapped`` in the place of a bound method."""
    getattr(owner, name)
    setattr(owner, name, wrapped)


class BenchExecutor(ExecutorNode):
    """The executor, its stages stamped from configure on."""

    def __init__(self, stop: StopRequest) -> None:
        self.watch = StopWatch()
        super().__init__(stop)

    def configure(self) -> None:
        """Configure, then put the stop-watch on."""
        super().configure()
        self.watch.fit(self)

    def stop(self, timeout_s: float) -> bool:
        """Write the samples, then end."""
        thread = self.step_thread
        steps = vars(thread.report()) if thread is not None else {}
        sample_file = os.environ.get(VARIABLE)
        if sample_file:
            content = {
                'ticks': list(self.watch.ticks),
                'orders': list(self.watch.orders),
                'steps': steps,
                'counters': self.report.counters.snapshot(),
                'timing': {} if self.control is None else self.control.player.timing.figures(),
            }
            Path(sample_file).write_text(json.dumps(content))
        return super().stop(timeout_s)


def main(argv: Sequence[str] | None = None) -> int:
    """Run until SIGINT, SIGTERM or a lost device."""

    def make(stop: StopRequest) -> Node:
        node = BenchExecutor(stop)
        node.autostart()
        return node

    return run_node(make, argv)


if __name__ == '__main__':
    sys.exit(main())
