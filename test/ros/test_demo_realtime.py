"""The real-time episode's places in time."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from std_msgs.msg import Header

from flashrt_ros.conductor import to_stamp
from flashrt_ros.demo.realtime import RealTimeEpisode
from flashrt_ros.demo.realtime import subgoals_of
from flashrt_ros.msg import ActionChunk
from flashrt_ros.msg import Event

pytestmark = pytest.mark.ros
BEGAN_S = 1_000


def stamp_ns(seconds: float) -> int:
    return int((BEGAN_S + seconds) * 1e9)


def header(seconds: float) -> Header:
    return Header(stamp=to_stamp(stamp_ns(seconds)))


def test_a_subgoal_stands_where_it_was_written_and_latched_since_the_episode_began() -> None:
    def event(at: float, **detail: object) -> Event:
        return Event(header=header(at), kind='subgoal', detail=json.dumps(detail))

    found = subgoals_of(
        [event(0.25, sequence=3, text='go', interrupt=False),
         event(1.5, sequence=4, text='stop', interrupt=True)],
        [ActionChunk(header=header(0.5), subgoal_sequence=3)], stamp_ns(0), 2.0)
    assert [(i.written, i.latched, i.ended, i.outcome) for i in found] == [
        (0.25, 0.5, 1.5, 'superseded'), (1.5, None, 2.0, 'open')]


def test_a_picture_of_before_the_episode_is_no_frame_of_its_strip() -> None:
    newest = [None, (stamp_ns(-0.1), np.zeros((4, 4, 3), np.uint8)),
              (stamp_ns(0.02), np.ones((4, 4, 3), np.uint8))]
    episode = RealTimeEpisode.__new__(RealTimeEpisode)
    episode._frames, episode._began_ns = [], stamp_ns(0)
    episode._conductor = SimpleNamespace(image=lambda view: newest.pop(0))
    for _ in range(3):
        episode._keep_picture()
    assert [at for at, _ in episode._frames] == [stamp_ns(0.02)]
