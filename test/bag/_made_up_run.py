"""A made-up executor that writes what the real one publishes, straight into a recording."""

from contextlib import contextmanager
import json
from typing import NamedTuple

import numpy as np
from rosbags.rosbag2 import StoragePlugin
from rosbags.rosbag2 import Writer

from flashrt_core.capsule import CapsuleStore
from flashrt_core.policies import make_policy
from flashrt_core.policies import SubgoalWrite
from flashrt_core.policies import TickInput
from flashrt_core.runtime import cpu_backend
from flashrt_ros.bag.message_types import writing_typestore
from flashrt_ros.bag.recording import EXECUTOR_KEY
from flashrt_ros.bag.recording import PARAMETERS_KEY
from flashrt_ros.bag.replay import Replayer
from flashrt_ros.conversions import digest
from flashrt_ros.conversions import JointReader
from flashrt_ros.embodiment import parse_embodiment
from flashrt_ros.executor_tick import graph_keys
from flashrt_ros.images import decode_image
from flashrt_ros.images import fit_view
from flashrt_ros.subgoals import Subgoal

ROBOT_YAML = """
format: 1
name: made_up
control_rate_hz: 50
pose_gap: 1.0
joints:
  - {name: a, unit: rad, sign: -1, offset: 0.1, position: {min: -3, max: 3}, max_velocity: 9}
  - {name: b, unit: rad, scale: 2.0, position: {min: -3, max: 3}, max_velocity: 9}
  - {name: c, unit: rad, position: {min: -3, max: 3}, max_velocity: 9}
  - {name: g, unit: m, gripper: {closed: 0.0, open: 0.08}, position: {min: 0, max: 0.08},
     max_velocity: 9}
views: {top: overhead, wrist: wrist}
"""
ROBOT = parse_embodiment(ROBOT_YAML)
EXECUTOR = '/arm1/executor'
SIZE = 84


@contextmanager
def fresh_session(config='tiny'):
    """A tiny Pi0 and a store; the same weights every time."""
    backend = cpu_backend()
    session = make_policy('pi0').bind(backend, config)
    store = CapsuleStore(backend, 1 << 24, 1 << 24)
    try:
        yield session, store
    finally:
        session.close()
        store.close()


class Frame(NamedTuple):
    stamp_ns: int
    digest: int


class MadeUpRun:
    """Ticks a session and records it; methods mirror what happens to a live executor."""

    def __init__(self, path, session, store, *, storage=StoragePlugin.MCAP, parameters=None):
        self.types = writing_typestore()
        self.writer = Writer(path, version=9, storage_plugin=storage)
        self.writer.open()
        self.writer.set_custom_data(EXECUTOR_KEY, EXECUTOR)
        self.writer.set_custom_data(PARAMETERS_KEY, json.dumps(parameters or {}))
        self.connections = {}
        self.session, self.store = session, store
        self.random = np.random.default_rng(7)
        self.joints = JointReader(ROBOT)
        self.epoch = self.episode = self.tick = self.at = 0
        self.latched = self.requested = self.seed = 0
        self.lose = set()  # streams whose next message is not recorded
        self.pending_subgoal = self.pending_prompt = self.pending_seed = None
        self.pending_guidance = None
        self.still = set()  # views whose camera sends nothing new
        self.frames, self.reused = {}, []  # stamp and digest by stream; of each tick
        store.prepare(session.boundary, 17)
        self.lane(lambda: store.snapshot(session.boundary, 'c0', pin=True))
        self.lane(lambda: store.mark(session.boundary))

    def lane(self, work):
        return self.session.lane.at_boundary(work).result(60)

    def type(self, name):
        return self.types.types[name]

    def stamp(self, at=None):
        at = self.at if at is None else at
        return self.type('builtin_interfaces/msg/Time')(at // 10**9, at % 10**9)

    def header(self):
        return self.type('std_msgs/msg/Header')(self.stamp(), '')

    def write(self, topic, kind, message):
        stream = topic.removeprefix('/arm1/')
        if stream in self.lose:
            self.lose.remove(stream)
            return
        if topic not in self.connections:
            self.connections[topic] = self.writer.add_connection(
                topic, kind, typestore=self.types)
        data = self.types.serialize_cdr(message, kind)
        self.writer.write(self.connections[topic], self.at, data)

    def event(self, kind, name, **detail):
        message = self.type('flashrt_ros/msg/Event')(
            self.header(), self.epoch, self.episode, self.tick, 0, kind, name,
            json.dumps(detail))
        self.write(f'{EXECUTOR}/events', 'flashrt_ros/msg/Event', message)

    def observe(self):
        """Publish joints in another order and padded bgr8 images of another size."""
        self.at += 20_000_000
        order = self.random.permutation(4)
        names, values = np.array(ROBOT.names), self.random.uniform(0, 0.08, 4)
        joints = self.type('sensor_msgs/msg/JointState')(
            self.header(), names[order].tolist(), values[order], np.zeros(0), np.zeros(0))
        self.write('/arm1/joint_states', 'sensor_msgs/msg/JointState', joints)
        seen = {'joint_states': self.joints.read(joints)}
        self.frames['joint_states'] = Frame(self.at, digest(seen['joint_states']))
        for view, suffix in ROBOT.views.items():
            if view in self.still:
                seen[f'images/{view}'] = self.images[f'images/{view}']
                continue
            data = self.random.integers(0, 256, (60, 3 * 100 + 7), dtype=np.uint8)
            image = self.type('sensor_msgs/msg/Image')(
                self.header(), 60, 100, 'bgr8', 0, 307, data.ravel())
            self.write(f'/arm1/images/{suffix}', 'sensor_msgs/msg/Image', image)
            seen[f'images/{view}'] = fit_view(
                decode_image(image, stream=view), SIZE, SIZE, stream=view)
            self.frames[f'images/{view}'] = Frame(self.at, digest(seen[f'images/{view}']))
        self.images = seen
        return seen

    def ticks(self, count=1, *, steps=4, best_of=1):
        """Observe and tick; publish tick_input and chunk."""
        for _ in range(count):
            seen = self.observe()
            state = np.zeros(4, dtype=np.float32)
            ROBOT.fill_state(seen['joint_states'], state)
            if self.pending_seed is not None:
                self.seed = self.pending_seed
            chunk = self.session.tick(TickInput(
                images={view: seen[f'images/{view}'] for view in ROBOT.views}, state=state,
                steps_executed=steps, delay_steps=1, subgoal=self.pending_subgoal,
                prompt=self.pending_prompt, seed=self.pending_seed,
                guidance=self.pending_guidance, best_of=best_of,
                frames={view: self.frames[f'images/{view}'] for view in ROBOT.views}))
            self.reused.append(chunk.reused_views)
            self.selected = chunk.candidates.selected if chunk.candidates else 0
            self.lane(lambda: self.store.mark(self.session.boundary))
            self.pending_subgoal = self.pending_prompt = self.pending_seed = None
            self.pending_guidance = None
            self.tick = chunk.tick
            stamp = self.type('flashrt_ros/msg/ObservationStamp')
            given = self.type('flashrt_ros/msg/TickInput')(
                self.header(), self.epoch, self.episode, chunk.tick,
                [stamp(s, self.stamp(self.frames[s].stamp_ns), self.frames[s].digest, 0.0, 'ok')
                 for s in seen],
                steps, 1, self.requested, self.seed, graph_keys(chunk), digest(chunk.actions[0]))
            self.write(f'{EXECUTOR}/tick_input', 'flashrt_ros/msg/TickInput', given)
            actions = ROBOT.to_robot(chunk.actions[0]).astype(np.float32)
            played = self.type('flashrt_ros/msg/ActionChunk')(
                self.header(), self.epoch, self.episode, chunk.tick, chunk.subgoal_sequence, 0,
                list(ROBOT.names), len(actions), 0.02, 1, actions.ravel(), True)
            self.write(f'{EXECUTOR}/chunk', 'flashrt_ros/msg/ActionChunk', played)

    def reset(self, capsule='c0', seed=None, prompt=None, guidance=None):
        report = self.lane(lambda: self.store.restore(self.session.boundary, capsule))
        self.epoch, self.episode = self.epoch + 1, self.episode + 1
        self.pending_prompt, self.pending_seed, self.pending_subgoal = prompt, seed, None
        self.pending_guidance = guidance
        detail = {'position': report.position}
        detail.update({} if seed is None else {'seed': seed})
        detail.update({} if prompt is None else {'prompt': prompt})
        detail.update({} if guidance is None else {'guidance': guidance})
        self.event('reset', capsule, **detail)

    def snapshot(self, name):
        info = self.lane(lambda: self.store.snapshot(self.session.boundary, name))
        self.event('snapshot', name, position=info.position)

    def restore(self, name):
        report = self.lane(lambda: self.store.restore(self.session.boundary, name))
        self.epoch += 1
        self.event('restore', name, position=report.position)

    def rollback(self, boundaries):
        report = self.lane(
            lambda: self.store.rollback(self.session.boundary, boundaries=boundaries))
        self.epoch += 1
        self.event('rollback', f'{boundaries} boundaries', position=report.position)

    def subgoal(self, tokens, embedding=None):
        self.requested += 1
        self.pending_subgoal = SubgoalWrite(self.requested, tokens, embedding)
        accepted = Subgoal(self.requested, 0, '', tokens, False, 0, 0.0, embedding)
        self.event('subgoal', str(self.requested), **accepted.record())

    def prompt(self, tokens):
        self.pending_prompt = tokens
        self.event('prompt', 'text', tokens=tokens)

    def guidance(self, old, new):
        self.pending_guidance = new
        self.event('parameter', 'guidance', old=old, new=new)

    def close(self):
        self.writer.close()


def replay(recording, *, config='tiny', resize='letterbox'):
    """Replay into a fresh session."""
    backend = cpu_backend()
    session = make_policy('pi0').bind(backend, config)
    store = CapsuleStore(backend, 1 << 24, 1 << 24)
    try:
        return Replayer(recording, session, store, ROBOT, resize=resize).run()
    finally:
        session.close()
        store.close()
