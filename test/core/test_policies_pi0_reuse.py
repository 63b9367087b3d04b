"""A camera's vision result is reused while its frame is the same, and never changes a bit."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
import threading
from typing import Any
from typing import NamedTuple

from _pi0 import bound
from _pi0 import equal_states
from _pi0 import lived_in
from _pi0 import observation
from _pi0 import same_bits
from _pi0 import SMALL
from _pi0 import state_of
from _poison import poison
import pytest

from flashrt_core.capsule import CapsuleStore
from flashrt_core.errors import ConfigError
from flashrt_core.errors import TickDropped
from flashrt_core.policies import TickInput
from flashrt_core.policies.pi0 import model
from flashrt_core.policies.pi0 import Pi0Session
from flashrt_core.policies.pi0.config import PI05_TINY
from flashrt_core.runtime import Backend
from flashrt_core.runtime import cpu_backend


class Shot(NamedTuple):
    stamp_ns: int
    digest: int


@pytest.fixture
def session(backend: Backend) -> Iterator[Pi0Session]:
    with bound(backend, reuse_vision=True) as made:
        yield made


@pytest.fixture
def other(backend: Backend) -> Iterator[Pi0Session]:
    """Give a session that encodes every frame, by the same graphs: its ticks name none."""
    with bound(backend, reuse_vision=True) as made:
        yield made


def shot(top: int, wrist: int, named: bool = True, **changes: Any) -> TickInput:
    """Give an input that shows frame ``top`` and frame ``wrist``."""
    images = {'top': observation(draw=top).images['top'],
              'wrist': observation(draw=wrist).images['wrist']}
    frames = {'top': Shot(top, 100 + top), 'wrist': Shot(wrist, 200 + wrist)} if named else {}
    return observation(draw=top + 7, images=images, frames=frames, **changes)


SEQUENCE = [(1, 1), (1, 1), (2, 1), (2, 3), (2, 3), (1, 3), (4, 4), (4, 4)]
REUSED = [(), ('top', 'wrist'), ('wrist',), ('top',), ('top', 'wrist'), ('wrist',), (),
          ('top', 'wrist')]


def test_ticks_with_reuse_equal_those_without_bit_for_bit_and_say_what_was_reused(session, other):
    for (top, wrist), reused in zip(SEQUENCE, REUSED):
        chunk = session.tick(shot(top, wrist, steps_executed=1))
        plain = other.tick(shot(top, wrist, named=False, steps_executed=1))
        assert same_bits(chunk.actions, plain.actions)
        assert (chunk.reused_views, plain.reused_views) == (reused, ())
        ran = [f'vision.{v}' for v in SMALL.views if v not in reused] + ['prefix', 'denoise']
        assert list(chunk.segments_us) == list(chunk.graph_keys) == ran
    assert equal_states(state_of(session), state_of(other))


def test_what_is_reused_is_what_was_encoded_and_not_the_image_given(session):
    first = session.tick(shot(1, 1))
    lie = replace(shot(1, 1), images=shot(2, 2).images)
    with bound(session.lane.backend, reuse_vision=True) as honest:
        honest.tick(shot(1, 1))
        assert same_bits(session.tick(lie).actions, honest.tick(shot(1, 1)).actions)
    assert first.reused_views == ()


@pytest.mark.parametrize('frame', [Shot(1, 999), Shot(2, 101), None])
def test_another_stamp_another_digest_or_no_frame_is_encoded(session, other, frame):
    for s in (session, other):
        s.tick(shot(1, 1))
    seen = shot(1, 1, steps_executed=1)
    seen = replace(seen, images=shot(2, 1).images,
                   frames={'wrist': Shot(1, 201)} | ({} if frame is None else {'top': frame}))
    chunk = session.tick(seen)
    assert chunk.reused_views == ('wrist',)
    assert same_bits(chunk.actions, other.tick(replace(seen, frames={})).actions)


def test_a_digest_is_not_read_where_the_stamps_differ(session):
    class Unread:
        stamp_ns = 5

        @property
        def digest(self) -> int:
            raise AssertionError('read')

    session.tick(shot(1, 1))
    same = Unread()
    for _ in range(2):
        session.tick(replace(shot(1, 1), frames={'top': same}))  # itself is the same frame
    assert session.tick(replace(shot(1, 1), frames={'top': same})).reused_views == ('top',)


def test_a_view_without_an_image_is_encoded_once_and_never_taken_for_a_frame(session, other):
    seen = [shot(1, 1), shot(1, 1), shot(1, 1), shot(1, 1)]
    for i in (1, 2):
        seen[i] = replace(seen[i], images={'top': seen[i].images['top']},
                          frames={'top': seen[i].frames['top']})
    told = []
    for s in seen:
        chunk = session.tick(s)
        told.append(chunk.reused_views)
        assert same_bits(chunk.actions, other.tick(replace(s, frames={})).actions)
    assert told == [(), ('top',), ('top', 'wrist'), ('top',)]


def test_after_a_restore_every_frame_is_encoded_anew_with_the_same_bits(backend, session):
    lived_in(session)
    store = CapsuleStore(backend, 1 << 23, 1 << 23)
    try:
        session.tick(shot(1, 2))
        session.lane.at_boundary(lambda: store.snapshot(session.boundary, 'c')).result()
        following = [session.tick(shot(1, 2, steps_executed=1)), session.tick(shot(1, 3))]
        assert [c.reused_views for c in following] == [('top', 'wrist'), ('top',)]
        poison(session, keep=[store])
        session.lane.at_boundary(lambda: store.restore(session.boundary, 'c')).result()
        again = [session.tick(shot(1, 2, steps_executed=1)), session.tick(shot(1, 3))]
        assert [c.reused_views for c in again] == [(), ('top',)]
        assert all(same_bits(a.actions, b.actions) for a, b in zip(again, following))
    finally:
        store.close()


def test_a_rollback_forgets_them_too(backend, session):
    store = CapsuleStore(backend, 1 << 23, 1 << 23)
    try:
        store.prepare(session.boundary, 4)
        for _ in range(2):
            session.lane.at_boundary(lambda: store.mark(session.boundary)).result()
            last = session.tick(shot(1, 1))
        assert last.reused_views == ('top', 'wrist')
        session.lane.at_boundary(
            lambda: store.rollback(session.boundary, session.boundary.ring.marks[-1])).result()
        again = session.tick(shot(1, 1))
        assert again.reused_views == () and same_bits(again.actions, last.actions)
    finally:
        store.close()


@pytest.mark.parametrize('at', [1, 2])
def test_a_tick_dropped_within_vision_leaves_no_half_result_to_reuse(monkeypatch, at):
    with bound(cpu_backend(), reuse_vision=True) as session, bound(
            cpu_backend(), reuse_vision=True) as other:
        for s in (session, other):
            s.tick(shot(1, 1))
        entered, cut, calls = threading.Event(), threading.Event(), []
        encode = model.encode_views

        def slow(*args: Any) -> Any:
            calls.append(args)
            if len(calls) == at:
                entered.set()
                assert cut.wait(10)
            return encode(*args)

        monkeypatch.setattr(model, 'encode_views', slow)
        doomed = session.submit(shot(2, 2))
        assert entered.wait(10)
        verb = session.lane.at_segment_end(lambda: None)
        cut.set()
        with pytest.raises(TickDropped, match=f'after {at} of 4'):
            doomed.result(10)
        verb.result(10)
        monkeypatch.undo()
        for seen in (shot(1, 2), shot(1, 2, steps_executed=1)):
            chunk = session.tick(seen)
            assert same_bits(chunk.actions, other.tick(replace(seen, frames={})).actions)
        assert chunk.reused_views == ('top', 'wrist')


def test_branches_and_the_best_of_reuse_as_a_single_tick_does(backend):
    made = partial(bound, backend, reuse_vision=True, best_of_keys=(4,))
    with made() as session, made() as other:
        for s in (session, other):
            s.tick(shot(1, 1))
        for changes in ({'best_of': 4}, {'rows': 4}):
            chunk = session.tick(shot(1, 1, **changes))
            plain = other.tick(shot(1, 1, named=False, **changes))
            assert chunk.reused_views == ('top', 'wrist')
            assert same_bits(chunk.actions, plain.actions)


def test_pi05_reuses_likewise(backend):
    made = partial(bound, backend, replace(PI05_TINY, vision=SMALL.vision, reuse_vision=True))
    with made() as session, made() as other:
        for (top, wrist), reused in zip(SEQUENCE[:4], REUSED):
            seen = shot(top, wrist)
            chunk, plain = session.tick(seen), other.tick(replace(seen, frames={}))
            assert chunk.reused_views == reused
            assert same_bits(chunk.actions, plain.actions)


def test_without_the_setting_one_segment_encodes_all_views_whatever_frames_say(backend):
    with bound(backend) as session:
        for _ in range(2):
            chunk = session.tick(shot(1, 1))
            assert chunk.reused_views == () and 'vision' in chunk.segments_us
        plain = session.boundary.identity
    with bound(backend, reuse_vision=True) as session:
        mine = session.boundary.identity
    assert mine.layout_digest == plain.layout_digest  # the state is the same
    assert mine.numerics_digest != plain.numerics_digest  # its bits may not be


def test_frames_of_views_without_an_image_are_refused(session):
    with pytest.raises(ConfigError, match='frames'):
        session.submit(replace(shot(1, 1), frames={'side': Shot(1, 1)}))
    with pytest.raises(ConfigError, match='frames'):
        session.submit(replace(shot(1, 1), images={'top': shot(1, 1).images['top']}))
    with pytest.raises(ConfigError, match='frames'):
        session.submit(replace(shot(1, 1), frames=3))
