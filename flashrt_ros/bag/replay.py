"""Exact replay: recorded observations through the executor's own code into a session, bit for bit.

No clock and no ROS: each tick takes the observations that its TickInput names by stamp and digest,
the state comes from C0 and the recorded resets, snapshots, restores and rollbacks, and the digest
of the policy's actions decides. What cannot be replayed is named, never skipped in silence.
"""

from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashrt_core.capsule import CapsuleStore
from flashrt_core.errors import FlashrtError
from flashrt_core.policies import Embedding
from flashrt_core.policies.protocol import Chunk
from flashrt_core.policies.protocol import Modality
from flashrt_core.policies.protocol import Session
from flashrt_core.policies.protocol import SubgoalWrite
from flashrt_core.policies.protocol import TickInput
from flashrt_ros.bag.recording import Epoch
from flashrt_ros.bag.recording import Recording
from flashrt_ros.bag.recording import Tick
from flashrt_ros.conversions import digest
from flashrt_ros.conversions import JointReader
from flashrt_ros.conversions import rows_of_record
from flashrt_ros.conversions import stamp_to_ns
from flashrt_ros.embodiment import Embodiment
from flashrt_ros.executor_tick import key_texts
from flashrt_ros.images import decode_compressed
from flashrt_ros.images import decode_image
from flashrt_ros.images import fit_view

C0 = 'c0'
WRITES = ('prompt', 'guidance')  # in the event of a reset: what it hands to the policy
_BOUNDARIES = re.compile(r'(\d+) boundaries')
_TIMEOUT_S = 600.0


def _write_of(event: Any) -> dict[str, Any] | None:
    """Return what an event has the next tick take over, or None."""
    if event.kind == 'prompt':
        return {'prompt': event.detail['tokens']}
    if (event.kind, event.name) == ('parameter', 'guidance'):
        return {'guidance': event.detail['new']}
    return None


class ReplayGap(FlashrtError):
    """A tick cannot be replayed from what the recording holds."""

    code = 'replay_gap'


@dataclass
class ReplayReport:
    """What a replay showed."""

    equal: int = 0
    different: list[str] = field(default_factory=list)  # epoch and tick, recorded and replayed
    gaps: list[str] = field(default_factory=list)  # why an epoch, or the rest of it, was left out
    skipped: int = 0  # ticks in those gaps
    chunks: list[tuple[int, int, NDArray[np.float64]]] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        """Whether at least one tick was replayed, and every one bit for bit."""
        return self.equal > 0 and not self.different and not self.gaps


class Replayer:
    """Feeds one recording into one session; one thread."""

    def __init__(
        self,
        recording: Recording,
        session: Session,
        store: CapsuleStore,
        embodiment: Embodiment,
        *,
        resize: str = 'letterbox',
        marks: int = 17,
    ) -> None:
        """Bind, and snapshot the fresh session as C0.

        :param session: fresh, of the policy and config that was recorded.
        :param resize: the executor's parameter image_resize.
        :param marks: boundaries that a rollback may go back, rollback_ticks + 1.
        """
        self._recording, self._session, self._store = recording, session, store
        self._robot = embodiment
        self._resize = resize
        self._joints = JointReader(embodiment)
        self._sizes = {
            port.name: port.shape[:2] for port in session.ports if port.modality == Modality.IMAGE
        }
        state = next(port for port in session.ports if port.modality == Modality.STATE)
        self._state_dim = state.shape[0]
        self._latched = 0
        self._seed: int | None = None
        self._writes: list[dict[str, Any]] = []  # into latched state, waiting for a tick, in order
        self._new_seed: int | None = None
        self._subgoals: dict[int, dict[str, Any]] = {}  # by sequence, as its event tells it
        boundary = session.boundary
        store.prepare(boundary, marks)
        self._on_lane(lambda: store.snapshot(boundary, C0, pin=True))
        self._on_lane(lambda: store.mark(boundary))

    def run(self) -> ReplayReport:
        """Replay every epoch whose beginning is recorded."""
        report = ReplayReport()
        for number in sorted(self._recording.epochs):
            epoch = self._recording.epochs[number]
            self._learn_subgoals(epoch)
            done = 0
            try:
                self._enter(epoch)
                for tick in self._ticks(epoch):
                    self._replay(tick, report)
                    done += 1
                self._take_snapshots(epoch)
            except FlashrtError as gap:
                report.gaps.append(f'epoch {number}, after {done} ticks: [{gap.code}] {gap}')
                report.skipped += len(epoch.ticks) - done
        return report

    def _ticks(self, epoch: Epoch) -> Iterator[Tick]:
        writes = [(e.tick, w) for e in epoch.events if (w := _write_of(e)) is not None]
        commits = [
            e for e in epoch.events if e.kind == 'fork' and int(e.detail.get('committed', -1)) >= 0
        ]
        for tick in epoch.ticks:
            self._take_snapshots(epoch)
            if commits and commits[0].tick < tick.given.tick:
                raise ReplayGap('a branch of a fork was committed here, which is not replayed')
            # An event tells the last committed tick, before the first one the position restored.
            first = tick is epoch.ticks[0]
            while writes and writes[0][0] < tick.given.tick + first:
                self._writes.append(writes.pop(0)[1])
            yield tick

    def _enter(self, epoch: Epoch) -> None:
        event = epoch.began_by
        if event is None:
            if epoch.ticks:
                raise ReplayGap('the recording began later than this epoch; record from a reset')
            return
        boundary = self._session.boundary
        back = _BOUNDARIES.fullmatch(event.name) if event.kind == 'rollback' else None
        report = self._on_lane(
            lambda: (
                self._store.rollback(boundary, boundaries=int(back[1]))
                if back
                else self._store.restore(boundary, event.name)
            )
        )
        if report.position != event.detail['position']:
            raise ReplayGap(
                f'{event.kind} {event.name} led to tick {report.position}, recorded is '
                f'{event.detail["position"]}; an earlier tick is missing'
            )
        given = {name: event.detail[name] for name in WRITES if name in event.detail}
        self._writes = [given] if given else []
        self._new_seed = event.detail.get('seed')

    def _replay(self, tick: Tick, report: ReplayReport) -> None:
        given = tick.given
        here = int(self._session.boundary.position())
        if given.tick != here:
            raise ReplayGap(f'tick {here} is not recorded, the next one is {given.tick}')
        joints, images = self._observations(given)
        # What was accepted while a tick was in flight belongs to that tick or to the next.
        for taken in range(len(self._writes), -1, -1):
            chunk = self._submit(given, tick, joints, images, self._writes[:taken])
            if not taken or digest(chunk.actions[0]) == given.actions_digest:
                break
            self._on_lane(lambda: self._store.rollback(self._session.boundary, boundaries=1))
        self._writes = self._writes[taken:]
        actions = self._robot.to_robot(chunk.actions[0], joints)
        report.chunks.append((int(given.epoch), int(given.tick), actions))
        replayed = digest(chunk.actions[0])
        if replayed == given.actions_digest:
            report.equal += 1
        else:
            report.different.append(
                f'epoch {given.epoch} tick {given.tick}: recorded {given.actions_digest:016x}, '
                f'replayed {replayed:016x}'
            )
        self._new_seed, self._seed = None, int(given.seed)
        self._latched = max(self._latched, chunk.subgoal_sequence)

    def _submit(self, given: Any, tick: Tick, joints: Any, images: Any,
                writes: list[dict[str, Any]]) -> Chunk:
        state = np.zeros(self._state_dim, dtype=np.float32)
        self._robot.fill_state(joints, state)
        seed = self._new_seed
        if seed is None and self._seed is not None and given.seed != self._seed:
            seed = int(given.seed)
        taken = {name: value for write in writes for name, value in write.items()}
        chunk = self._session.submit(
            TickInput(
                images=images,
                state=state,
                steps_executed=int(given.steps_executed),
                delay_steps=int(given.delay_steps),
                subgoal=self._subgoal(tick),
                prompt=taken.get('prompt'),
                guidance=taken.get('guidance'),
                seed=seed,
                best_of=self._best_of(given),
            )
        ).result(_TIMEOUT_S)
        self._on_lane(lambda: self._store.mark(self._session.boundary))
        return chunk

    def _best_of(self, given: Any) -> int:
        """Return how many candidates the recorded plan had; its last segment says so."""
        last = list(given.graph_keys)[-1:]
        return next((n for n, keys in self._session.best_of_keys.items()
                     if key_texts(keys)[-1:] == last), 1)

    def _subgoal(self, tick: Tick) -> SubgoalWrite | None:
        sequence = int(tick.given.subgoal_sequence)
        latched = sequence if tick.chunk is None else int(tick.chunk.subgoal_sequence)
        if sequence <= self._latched or latched != sequence:
            return None
        if sequence not in self._subgoals:
            raise ReplayGap(f'subgoal {sequence} was latched, its event is not recorded')
        told = self._subgoals[sequence]
        rows = rows_of_record(told['embedding']) if 'embedding' in told else None
        return SubgoalWrite(
            sequence, tuple(told['tokens']), None if rows is None else Embedding(rows))

    def _observations(self, given: Any) -> tuple[Any, dict[str, Any]]:
        joints, images = None, {}
        for used in given.observations:
            stream, stamp = used.stream, stamp_to_ns(used.stamp)
            view = stream.removeprefix('images/')
            decode: Callable[[Any, bool], NDArray[Any]]
            if stream == 'joint_states':
                topics, decode = [stream], lambda message, _: self._joints.read(message)
            else:
                topic = f'images/{self._robot.views[view]}'
                topics = [topic, f'{topic}/compressed']
                decode = self._image_decoder(view)
            array = self._find(topics, stream, stamp, int(used.digest), decode)
            if stream == 'joint_states':
                joints = array
            else:
                images[view] = array
        if joints is None:
            raise ReplayGap(f'tick {given.tick} names no joint_states')
        return joints, images

    def _image_decoder(self, view: str) -> Callable[[Any, bool], NDArray[Any]]:
        height, width = self._sizes[view]
        stream = f'images/{view}'

        def decode(message: Any, compressed: bool) -> NDArray[Any]:
            image = (decode_compressed if compressed else decode_image)(message, stream=stream)
            return fit_view(image, height, width, stream=stream, resize=self._resize)

        return decode

    def _find(
        self,
        topics: list[str],
        stream: str,
        stamp_ns: int,
        wanted: int,
        decode: Callable[[Any, bool], NDArray[Any]],
    ) -> NDArray[Any]:
        seen = 0
        for topic in topics:
            for message, compressed in self._recording.messages(
                self._recording.topic(topic), stamp_ns
            ):
                seen += 1
                array = decode(message, compressed)
                if digest(array) == wanted:
                    return array
        what = (
            f'{seen} messages of that stamp, none with its digest' if seen else 'no such message'
        )
        raise ReplayGap(
            f'{stream} stamped {stamp_ns} ns is not in the recording ({what}); use the same '
            "embodiment and image_resize, and record on the executor's machine"
        )

    def _learn_subgoals(self, epoch: Epoch) -> None:
        for event in epoch.events:
            if event.kind == 'subgoal':
                self._subgoals[int(event.detail['sequence'])] = event.detail

    def _take_snapshots(self, epoch: Epoch) -> None:
        boundary = self._session.boundary
        here = int(boundary.position())
        for event in [e for e in epoch.events if e.kind == 'snapshot']:
            if event.detail['position'] == here:
                epoch.events.remove(event)
                self._snapshot(event.name)

    def _snapshot(self, name: str) -> None:
        self._on_lane(lambda: self._store.snapshot(self._session.boundary, name))

    def _on_lane(self, work: Callable[[], Any]) -> Any:
        return self._session.lane.at_boundary(work).result(_TIMEOUT_S)
