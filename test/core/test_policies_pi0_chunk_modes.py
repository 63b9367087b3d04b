"""The chunk modes of a Pi0 session: what they give, and that their state is in the boundary."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from _pi0 import bound
from _pi0 import equal_states
from _pi0 import lived_in
from _pi0 import observation
from _pi0 import same_bits
from _pi0 import SMALL
from _pi0 import state_of
from _poison import poison
import numpy as np
import pytest
import torch

from flashrt_core.capsule import CapsuleStore
from flashrt_core.errors import ConfigError
from flashrt_core.errors import FlashrtError
from flashrt_core.errors import IdentityMismatch
from flashrt_core.policies.pi0 import model
from flashrt_core.policies.pi0 import Pi0Session
from flashrt_core.policies.pi0.config import check
from flashrt_core.policies.pi0.layout import state_names
from flashrt_core.runtime import Backend
from flashrt_core.runtime import cpu_backend

MIB = 1 << 20
CONFIGS = {
    'sync': replace(SMALL, chunk_mode='sync'),
    'ensemble': replace(SMALL, chunk_mode='ensemble', ensemble_decay=0.5),
    'rtc': replace(SMALL, chunk_mode='rtc', rtc_steps=6, rtc_max_guidance=3.0),
    'rtc relative': replace(SMALL, chunk_mode='rtc', rtc_steps=6, relative=(0, 2)),
}
BUFFERS = [(name, buffer) for name, c in CONFIGS.items() for buffer in state_names(c)]
NEXT = observation(draw=3, steps_executed=1, delay_steps=1)


@pytest.fixture
def store(backend: Backend) -> Iterator[CapsuleStore]:
    made = CapsuleStore(backend, 8 * MIB, 8 * MIB)
    yield made
    made.close()


def noise(draw: int = 4) -> np.ndarray:
    shape = (1, SMALL.horizon, SMALL.action_width)
    return np.random.default_rng(draw).standard_normal(shape).astype(np.float32)


# -- state ----------------------------------------------------------------------------------------


@pytest.mark.parametrize('mode', CONFIGS)
def test_a_snapshot_in_the_middle_of_a_mode_goes_on_with_the_same_bits(backend, store, mode):
    with bound(backend, CONFIGS[mode]) as session:
        lived_in(session)
        session.lane.at_boundary(lambda: store.snapshot(session.boundary, 'mid')).result()
        inputs = [NEXT, observation(draw=4, steps_executed=2), observation(draw=5, delay_steps=2)]
        first = [session.tick(seen).actions for seen in inputs]
        poison(session, keep=[store])
        session.lane.at_boundary(lambda: store.restore(session.boundary, 'mid')).result()
        assert all(same_bits(session.tick(s).actions, a) for s, a in zip(inputs, first))


@pytest.mark.parametrize('mode, name', BUFFERS)
def test_a_boundary_without_any_one_buffer_of_a_mode_does_not_go_on(backend, store, mode, name):
    with bound(backend, CONFIGS[mode]) as session:
        lived_in(session)
        short = session.boundary._without_for_tests(name)
        session.lane.at_boundary(lambda: store.snapshot(short, 'mid')).result()
        following = session.tick(NEXT)
        poison(session, keep=[store])
        session.lane.at_boundary(lambda: store.restore(short, 'mid')).result()
        try:
            again = session.tick(NEXT)
        except FlashrtError:
            return
        assert not (same_bits(again.actions, following.actions)
                    and (again.tick, again.subgoal_sequence)
                    == (following.tick, following.subgoal_sequence))


def test_a_capsule_of_another_mode_is_refused(backend, store):
    with bound(backend) as session:
        session.lane.at_boundary(lambda: store.snapshot(session.boundary, 'mid')).result()
    with bound(backend, CONFIGS['rtc']) as other, pytest.raises(IdentityMismatch, match='chunk_m'):
        other.lane.at_boundary(lambda: store.restore(other.boundary, 'mid')).result()


# -- what each mode gives -------------------------------------------------------------------------


@pytest.mark.parametrize('mode', CONFIGS)
def test_the_first_chunk_is_the_models_own_in_every_mode(backend, mode):
    seen = observation(delay_steps=2, steps_executed=1)
    with bound(backend, CONFIGS[mode]) as session, bound(
            backend, relative=CONFIGS[mode].relative) as plain:
        np.testing.assert_allclose(session.tick(seen).actions, plain.tick(seen).actions, atol=1e-6)


def test_sync_joins_nothing(backend):
    with bound(backend, CONFIGS['sync']) as session, bound(backend) as fresh:
        session.tick(observation(delay_steps=1))
        seen = observation(draw=1, noise=noise(), steps_executed=2, delay_steps=2)
        np.testing.assert_allclose(session.tick(seen).actions, fresh.tick(seen).actions, atol=1e-6)


def test_the_ensemble_is_the_weighted_mean_of_the_chunks_alone(backend):
    seen = [observation(draw=i, noise=noise(i), steps_executed=2 if i else 0) for i in range(4)]
    alone = []
    for s in seen:
        with bound(backend) as fresh:
            alone.append(fresh.tick(s).actions[0])
    with bound(backend, CONFIGS['ensemble']) as session:
        together = [session.tick(s).actions[0] for s in seen]
    for tick, chunk in enumerate(together):
        for i in range(SMALL.horizon):
            cover = [a[2 * (tick - j) + i] for j, a in enumerate(alone[:tick + 1])
                     if 2 * (tick - j) + i < SMALL.horizon]
            weights = np.exp(-0.5 * np.arange(len(cover)))
            expected = (np.stack(cover) * weights[:, None]).sum(0) / weights.sum()
            np.testing.assert_allclose(chunk[i], expected, atol=1e-5)


def rtc_reference(session: Pi0Session, first: np.ndarray, start: int, delay: int,
                  shift: np.ndarray, monkeypatch: pytest.MonkeyPatch
                  ) -> tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray, np.ndarray]:
    """Return a list that takes up x and velocity of each step, the left-over, its weights."""
    c, found = session.config, []
    plain = model.velocity

    def recorded(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        v = plain(x, *rest)
        found.append((x.double().numpy()[0], v.double().numpy()[0]))
        return v

    monkeypatch.setattr(model, 'velocity', recorded)
    left = np.zeros((c.horizon, c.action_width))
    weights = np.zeros(c.horizon)
    end = min(max(c.rtc_steps, delay), c.horizon - start)  # what is skipped is always guided
    for i in range(c.horizon - start):
        left[i] = first[start + i]
        left[i, :c.action_dim] += shift
        weights[i] = 0.0 if i >= end else 1.0 if i < delay else (end - i) / (end - delay + 1)
    return found, left, weights


@pytest.mark.parametrize('mode', ['rtc', 'rtc relative'])
@pytest.mark.parametrize('executed, delay', [(0, 0), (2, 0), (2, 2), (3, 4), (6, 1), (1, 7)])
def test_every_flow_step_of_rtc_follows_the_formula(monkeypatch, mode, executed, delay):
    with bound(cpu_backend(), CONFIGS[mode]) as session:
        c = session.config
        one, two = observation(draw=1), observation(
            draw=2, steps_executed=executed, delay_steps=delay, noise=noise())
        played = session.tick(one).actions[0]
        raw = state_of(session)['raw_chunk'].double().numpy()
        relative = np.isin(np.arange(c.action_dim), c.relative)
        std = np.float64(c.statistics.action_std)
        shift = relative * (one.state - two.state)[:c.action_dim] / std
        seen, left, weights = rtc_reference(session, raw, executed, delay, shift, monkeypatch)
        chunk = session.tick(two).actions[0]
        new = state_of(session)['raw_chunk'].double().numpy()
    steps, x = c.flow_steps, noise()[0].astype(np.float64)
    assert len(seen) == steps
    for step, (at, v) in enumerate(seen):
        np.testing.assert_allclose(at, x, atol=1e-5)
        tau, t = step / steps, 1 - step / steps
        limit = c.rtc_max_guidance
        g = limit if not step else min(limit, (1 - tau) / tau * ((1 - tau)**2 + tau**2)
                                       / (1 - tau)**2)
        x = at - (v - g * weights[:, None] * (left - (at - t * v))) / steps
    np.testing.assert_allclose(new, x, atol=1e-5)
    np.testing.assert_array_equal(chunk[:delay], played[executed:executed + delay][:delay])
    free = new[:, :c.action_dim] * std + np.float64(c.statistics.action_mean)
    free += relative * two.state[:c.action_dim]
    still = max(delay if executed + delay <= c.horizon else c.horizon - executed, 0)
    np.testing.assert_allclose(chunk[still:], free[still:], atol=1e-5)


def test_one_graph_serves_every_delay(backend):
    with bound(backend, CONFIGS['rtc']) as session:
        keys = {tuple(session.tick(observation(draw=d, delay_steps=d, steps_executed=1))
                      .graph_keys.items()) for d in range(SMALL.horizon)}
        assert len(keys) == 1 and session.lane.sealed


def test_a_left_over_that_is_not_finite_guides_nothing(backend):
    with bound(backend, CONFIGS['rtc']) as session:
        session.tick(observation())
        session.lane.call(partial(
            session.buffers['raw_chunk'].row(0)[2].fill_, float('nan'))).result()
        assert np.isfinite(session.tick(observation(draw=1)).actions).all()


def test_rows_of_a_mode_keep_their_own_chunks(backend):
    for config in CONFIGS.values():
        with bound(backend, config) as session:
            session.set_branches((1,), (5,)).result()
            session.tick(observation(rows=2))
            a, b = state_of(session, 0), state_of(session, 1)
            assert not equal_states(a, b)
            session.commit_branch(1).result()
            assert equal_states(state_of(session, 0), b)


@pytest.mark.parametrize('changes, told', [
    ({'chunk_mode': 'best'}, "chunk_mode 'best'.*blend"),
    ({'rtc_steps': 0}, 'rtc_steps is 0'),
    ({'rtc_schedule': 'cubic'}, "rtc_schedule 'cubic'.*linear"),
    ({'rtc_max_guidance': 0.0}, 'rtc_max_guidance is 0'),
    ({'chunk_mode': 'ensemble', 'ensemble_decay': -20.0}, 'ensemble_decay is -20'),
])
def test_a_setting_out_of_range_is_named(changes, told):
    with pytest.raises(ConfigError, match=told):
        check(replace(SMALL, **changes))
