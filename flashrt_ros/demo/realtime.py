"""The real-time episode: both nodes under their own clocks, the conductor only watches."""

from __future__ import annotations

import time

import cv2
from diagnostic_msgs.msg import DiagnosticArray
import numpy as np
from numpy.typing import NDArray
from trajectory_msgs.msg import JointTrajectory

from flashrt_core.tabletop import encode_png
from flashrt_ros.conductor import Conductor
from flashrt_ros.conductor import to_ns
from flashrt_ros.demo.lockstep import STRIP_FRAMES
from flashrt_ros.demo.lockstep import STRIP_SIZE_PX
from flashrt_ros.demo.record import Episode
from flashrt_ros.demo.record import RealTime
from flashrt_ros.demo.record import Run
from flashrt_ros.demo.record import VerbCall
from flashrt_ros.demo.terminal import Terminal
from flashrt_ros.msg import ActionChunk
from flashrt_ros.msg import TickInput

PERIOD_MS = 20.0
# Name in the report, key in the executor's diagnostics.
WANTED = (
    ('step late by p50, ms', 'lateness_p50_ms'),
    ('step late by p99, ms', 'lateness_p99_ms'),
    ('steps late', 'late'),
    ('steps missed', 'missed'),
    ('inference p50, us', 'inference_p50_us'),
    ('inference p99, us', 'inference_p99_us'),
)


class Diagnostics:
    """The newest values of each component on ``/diagnostics``."""

    def __init__(self, conductor: Conductor) -> None:
        self.values: dict[str, dict[str, str]] = {}
        conductor.node.create_subscription(DiagnosticArray, '/diagnostics', self._take, 10)

    def _take(self, message: DiagnosticArray) -> None:
        for status in message.status:
            self.values[status.name] = {pair.key: pair.value for pair in status.values}

    def number(self, node: str, key: str) -> float | None:
        """First value of ``key`` in any component of ``node``."""
        for name, values in self.values.items():
            if node in name and key in values:
                try:
                    return float(values[key])
                except ValueError:
                    return None
        return None


def pair_latencies_ms(chunks: list[ActionChunk], inputs: list[TickInput]) -> list[float]:
    """Time from the oldest image stamp of each tick to its chunk, both ROS time."""
    stamps = {}
    for tick in inputs:
        images = [to_ns(o.stamp) for o in tick.observations if o.stream.startswith('images/')]
        if images and min(images) > 0:
            stamps[(tick.epoch, tick.tick)] = min(images)
    return [
        (to_ns(chunk.header.stamp) - stamps[key]) / 1e6
        for chunk in chunks
        if (key := (chunk.epoch, chunk.tick)) in stamps
    ]


def gaps_ms(arrivals_ns: list[int]) -> list[float]:
    """Distances between successive arrivals."""
    return [float(gap) / 1e6 for gap in np.diff(np.asarray(arrivals_ns, dtype=np.int64))]


def real_time_episode(
    conductor: Conductor, run: Run, terminal: Terminal, *, seed: int, seconds: float
) -> None:
    """Reset mind and world, let them run for ``seconds``, keep the samples."""
    terminal.stage('Real time, 50 Hz')
    diagnostics = Diagnostics(conductor)
    arrivals: list[int] = []
    answer = conductor.robot('reset_world', seed=seed, blocks=1, task='')
    episode = Episode('Real time, 50 Hz', 'policy', seed, answer.reply.task)
    episode.began_s = terminal.seconds
    run.episodes.append(episode)
    reset = conductor.executor('reset', set_seed=True, seed=seed)
    run.verbs.append(
        VerbCall(
            verb='reset',
            capsule='c0',
            episode=len(run.episodes),
            epoch=int(reset.reply.epoch),
            at_s=terminal.seconds,
            round_trip_us=reset.round_trip_us,
            service_us=float(reset.reply.duration_us),
            restore_us=float(reset.reply.restore_us),
        )
    )
    heard = conductor.heard
    conductor.wait(
        lambda: any(c.epoch == reset.reply.epoch for c in heard.chunks), 10.0, 'the first chunk'
    )
    conductor.clear_heard()

    def arrive(message: JointTrajectory, now_ns: int) -> None:
        arrivals.append(now_ns)

    conductor.on_command = arrive
    frames: list[NDArray[np.uint8]] = []
    began = time.monotonic()
    while (elapsed := time.monotonic() - began) < seconds:
        due = seconds * len(frames) / (STRIP_FRAMES - 1)
        if elapsed >= due and (image := conductor.image('top')) is not None:
            frames.append(image)
        conductor.wait_a_moment(0.05)
        terminal.progress(int(elapsed * 10), int(seconds * 10), f'{len(arrivals)} commands')
    conductor.on_command = None
    if (image := conductor.image('top')) is not None:
        frames.append(image)
    samples = RealTime(PERIOD_MS, seconds=time.monotonic() - began)
    samples.arrival_gap_ms = gaps_ms(arrivals)
    samples.latency_ms = pair_latencies_ms(list(heard.chunks), list(heard.inputs))
    for name, key in WANTED:
        value = diagnostics.number('executor', key)
        if value is not None:
            samples.counters[name] = value
    run.real_time = samples
    episode.ticks, episode.steps = len(heard.chunks), len(arrivals)
    episode.epochs = [int(reset.reply.epoch)]
    episode.ended_s = terminal.seconds
    if frames:
        episode.strip_png = encode_png(camera_strip(frames))
    terminal.done(f'{len(arrivals)} commands, {len(heard.chunks)} chunks')
    if not arrivals:
        run.failures.append('real-time episode: no command was published')


def camera_strip(frames: list[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """Frames as received, side by side."""
    gap = 6
    size = STRIP_SIZE_PX
    strip = np.full((size + 2 * gap, len(frames) * (size + gap) + gap, 3), 255, np.uint8)
    for column, frame in enumerate(frames):
        left = gap + column * (size + gap)
        small = cv2.resize(frame, (size, size), interpolation=cv2.INTER_AREA)
        strip[gap : gap + size, left : left + size] = small
    return strip
