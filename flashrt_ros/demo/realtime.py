"""The real-time episode, each node under its own clock: one plan, then interrupts in motion."""

from __future__ import annotations

import json
import time

import cv2
from diagnostic_msgs.msg import DiagnosticArray
import numpy as np
from numpy.typing import NDArray
from trajectory_msgs.msg import JointTrajectory

from flashrt_core.tabletop import encode_png
from flashrt_core.tabletop import format_task
from flashrt_core.tabletop import Goal
from flashrt_core.tabletop import World
from flashrt_core.tabletop.instructions import describe
from flashrt_ros.conductor import Conductor
from flashrt_ros.conductor import to_ns
from flashrt_ros.demo.lockstep import BLOCKS
from flashrt_ros.demo.lockstep import STRIP_FRAMES
from flashrt_ros.demo.lockstep import STRIP_SIZE_PX
from flashrt_ros.demo.record import Episode
from flashrt_ros.demo.record import Interrupt
from flashrt_ros.demo.record import PlanMade
from flashrt_ros.demo.record import RealTime
from flashrt_ros.demo.record import Run
from flashrt_ros.demo.record import Subgoal
from flashrt_ros.demo.record import VerbCall
from flashrt_ros.demo.terminal import Terminal
from flashrt_ros.msg import ActionChunk
from flashrt_ros.msg import Event
from flashrt_ros.msg import Subgoal as SubgoalMessage
from flashrt_ros.msg import TickInput

PERIOD_MS = 20.0
PLANNED_SHARE = 0.45  # of the time that the plan has for itself before the interrupts
INTERRUPT_GAP_S = 0.6
# Name in the report, key in the executor's diagnostics.
WANTED = (
    ('step late by, median, ms', 'lateness_p50_ms'),
    ('step late by, p99, ms', 'lateness_p99_ms'),
    ('steps late', 'late'),
    ('steps missed', 'missed'),
    ('inference, median, µs', 'inference_p50_us'),
    ('inference, p99, µs', 'inference_p99_us'),
    ('interrupt to tick, median, µs', 'interrupt_to_tick_p50_us'),
    ('interrupt to chunk, median, µs', 'interrupt_to_chunk_p50_us'),
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


class RealTimeEpisode:
    """Conducts the episode and keeps its samples. Main thread only."""

    def __init__(self, conductor: Conductor, run: Run, terminal: Terminal, seconds: float) -> None:
        assert conductor.planner is not None
        self._conductor, self._run, self._terminal = conductor, run, terminal
        self._planner = conductor.planner
        self._seconds = seconds
        self._arrivals: list[int] = []  # of commands, steady
        self._frames: list[tuple[int, NDArray[np.uint8]]] = []  # with their stamps, ns
        self._samples = RealTime(PERIOD_MS)
        self._diagnostics = Diagnostics(conductor)
        self._episode: Episode
        self._began, self._began_ns = 0.0, 0  # by the steady clock, and by that of the stamps

    def play(self, seed: int) -> None:
        """Reset mind and world, give an instruction, interrupt what comes of it."""
        conductor, terminal = self._conductor, self._terminal
        terminal.stage('Real time, 50 Hz')
        answer = conductor.robot('reset_world', seed=seed, blocks=BLOCKS, task='')
        world = World(seed, BLOCKS, answer.reply.task)
        self._episode = Episode('Real time, 50 Hz', 'policy', seed, answer.reply.task)
        self._episode.began_s = terminal.seconds
        self._run.episodes.append(self._episode)
        epoch = self._reset(seed)
        conductor.on_command = self._arrive
        self._began = time.monotonic()
        self._began_ns = conductor.node.get_clock().now().nanoseconds
        goals = (*world.goals, Goal('home'))
        self._episode.task = format_task(goals)
        self._episode.marks.append((0.0, f'“{self._episode.task}”'))
        scene = str(describe(world.snapshot()))
        call = self._planner.plan(self._episode.task, scene=scene)
        made = PlanMade(len(self._run.episodes), self._episode.task, scene, 0.0)
        self._run.plans.append(made)
        self._watch_until(PLANNED_SHARE * self._seconds)
        texts = (f'pick up the {world.snapshot().block_names[0]} block', 'go home')
        while time.monotonic() - self._began < self._seconds - INTERRUPT_GAP_S:
            self._interrupt(texts[len(self._samples.interrupts) % 2])
            self._watch_until(time.monotonic() - self._began + INTERRUPT_GAP_S)
        self._watch_until(self._seconds)
        conductor.on_command = None
        self._planner.cancel(call)
        made.take(call.result)
        self._end(epoch)

    def _reset(self, seed: int) -> int:
        conductor, heard = self._conductor, self._conductor.heard
        reset = conductor.executor('reset', set_seed=True, seed=seed)
        epoch = int(reset.reply.epoch)
        self._run.verbs.append(VerbCall(
            verb='reset', capsule='c0', episode=len(self._run.episodes), epoch=epoch,
            at_s=self._terminal.seconds, round_trip_us=reset.round_trip_us,
            service_us=float(reset.reply.duration_us),
            restore_us=float(reset.reply.restore_us)))
        conductor.wait(
            lambda: any(c.epoch == epoch for c in heard.chunks), 10.0, 'the first chunk')
        conductor.clear_heard()
        return epoch

    def _arrive(self, message: JointTrajectory, now_ns: int) -> None:
        self._arrivals.append(now_ns)

    def _watch_until(self, end_s: float) -> None:
        """Let time pass; keep a picture now and then."""
        while (elapsed := time.monotonic() - self._began) < end_s:
            due = self._seconds * len(self._frames) / (STRIP_FRAMES - 1)
            if elapsed >= due:
                self._keep_picture()
            self._conductor.wait_a_moment(min(0.05, end_s - elapsed))
            self._terminal.progress(int(elapsed * 10), int(self._seconds * 10),
                                    f'{len(self._arrivals)} commands')

    def _keep_picture(self) -> None:
        image = self._conductor.image('top')
        if image is not None and image[0] >= self._began_ns:
            self._frames.append(image)

    def _interrupt(self, text: str) -> None:
        """Give a subgoal priority; wait for its first chunk and the first command after that."""
        conductor, heard = self._conductor, self._conductor.heard
        asked_ns = time.monotonic_ns()
        reply = conductor.executor(
            'set_subgoal', subgoal=SubgoalMessage(text=text, priority=1)).reply
        replied_ns, sequence = time.monotonic_ns(), int(reply.sequence)
        conductor.wait(lambda: any(c.subgoal_sequence == sequence for c in heard.chunks), 5.0,
                       f'a chunk of subgoal {sequence}')
        chunk_ns = time.monotonic_ns()
        conductor.wait(lambda: self._arrivals and self._arrivals[-1] > chunk_ns, 5.0, 'a command')
        command_ns = next(at for at in self._arrivals if at > chunk_ns)
        self._samples.interrupts.append(Interrupt(
            sequence, text, (replied_ns - asked_ns) / 1e6, (command_ns - asked_ns) / 1e6))

    def _end(self, epoch: int) -> None:
        conductor, samples, episode = self._conductor, self._samples, self._episode
        heard = conductor.heard
        self._keep_picture()
        samples.seconds = time.monotonic() - self._began
        samples.arrival_gap_ms = gaps_ms(self._arrivals)
        chunks, events = list(heard.chunks), list(heard.events)
        samples.latency_ms = pair_latencies_ms(chunks, list(heard.inputs))
        episode.subgoals = subgoals_of(events, chunks, self._began_ns, samples.seconds)
        samples.latch_ms = [(item.latched - item.written) * 1e3 for item in episode.subgoals
                            if item.latched is not None]
        for name, key in WANTED:
            value = self._diagnostics.number('executor', key)
            if value is not None:
                samples.counters[name] = value
        self._run.real_time = samples
        episode.ticks, episode.steps = len(chunks), len(self._arrivals)
        episode.epochs, episode.ended_s = [epoch], self._terminal.seconds
        if self._frames:
            episode.strip_png = encode_png(camera_strip([image for _, image in self._frames]))
            episode.frame_times_s = [(at - self._began_ns) / 1e9 for at, _ in self._frames]
        planned = [item.outcome for item in episode.subgoals if not item.interrupt]
        self._terminal.done(
            f'{planned.count("done")} of {len(planned)} planned subgoals done, '
            f'{len(samples.interrupts)} interrupts; {len(self._arrivals)} commands, '
            f'{len(chunks)} chunks')
        if not self._arrivals:
            self._run.failures.append('real-time episode: no command was published')


def subgoals_of(events: list[Event], chunks: list[ActionChunk], start: int, seconds: float
                ) -> list[Subgoal]:
    """Return when each subgoal was written and latched, in seconds of an episode.

    :param start: of the episode, ns by the clock of the stamps; ``seconds``: how long it was.
    """
    told = [(event, json.loads(event.detail)) for event in events if event.kind == 'subgoal']
    if not told:
        return []
    found = []
    for event, detail in told:
        item = Subgoal(int(detail['sequence']), detail['text'],
                       'conductor' if detail['interrupt'] else 'planner',
                       (to_ns(event.header.stamp) - start) / 1e9, bool(detail['interrupt']))
        first = next((c for c in chunks if c.subgoal_sequence == item.sequence), None)
        if first is not None:
            item.latched = (to_ns(first.header.stamp) - start) / 1e9
        if found:
            found[-1].ended = item.written
            found[-1].outcome = 'superseded'
        found.append(item)
    found[-1].ended = max(seconds, found[-1].written)
    done = {int(event.name) for event in events if event.kind == 'subgoal_done'}
    for item in found:
        if item.sequence in done:
            item.outcome = 'done'
    return found


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
