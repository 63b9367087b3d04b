"""The best of N: candidates of row 0 in one replay, one of which goes on in row 0."""
from __future__ import annotations

from collections.abc import Iterator

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

from flashrt_core.capsule import CapsuleStore
from flashrt_core.errors import ConfigError
from flashrt_core.errors import MissingKey
from flashrt_core.policies.pi0 import Pi0Session
from flashrt_core.runtime import Backend
from flashrt_core.runtime import philox

N = 4
CHANGES = {'best_of_keys': (2, N), 'relative': (0,)}


@pytest.fixture(params=['blend', 'ensemble', 'rtc', 'sync'])
def session(request: pytest.FixtureRequest, backend: Backend) -> Iterator[Pi0Session]:
    with bound(backend, chunk_mode=request.param, **CHANGES) as made:
        lived_in(made)
        yield made


def seen(draw: int = 3, **changes: object) -> object:
    return observation(draw=draw, steps_executed=1, delay_steps=1, **changes)


def test_one_candidate_is_kept_and_the_first_is_that_of_a_tick_without_choice(session):
    mode = session.config.chunk_mode
    with bound(session.lane.backend, chunk_mode=mode, **CHANGES) as other:
        lived_in(other)
        alone = other.tick(seen())
    chunk = session.tick(seen(best_of=N))
    found = chunk.candidates
    assert found.actions.shape == (N, SMALL.horizon, SMALL.action_dim) and chunk.rows == 1
    assert same_bits(chunk.actions[0], found.actions[found.selected])
    assert chunk.tick == alone.tick
    # float32 sums are cut differently for another row count: 1e-5, not the same bits.
    np.testing.assert_allclose(found.actions[0], alone.actions[0], atol=1e-5)
    assert len({a.tobytes() for a in found.actions}) == N


def test_scores_and_spread_are_those_of_the_medoid_in_standard_deviations(session):
    found = session.tick(seen(best_of=N)).candidates
    actions = found.actions.astype(np.float64) / np.float64(SMALL.statistics.action_std)
    distance = np.array([[np.sqrt(np.mean((a - b) ** 2)) for b in actions] for a in actions])
    np.testing.assert_allclose(found.scores, -distance.sum(1) / (N - 1), atol=1e-5)
    assert found.spread == pytest.approx(distance.sum() / (N * (N - 1)), abs=1e-5)
    assert found.selected == int(distance.sum(1).argmin()) and found.spread > 0


def test_the_kept_candidate_goes_on_in_row_zero_whose_seed_and_branch_stay(session):
    before, others = state_of(session), [state_of(session, r) for r in range(1, SMALL.rows)]
    chunk = session.tick(seen(best_of=N))
    after = state_of(session)
    assert int(after['tick']) == int(before['tick']) + 1
    assert all(int(after[n]) == int(before[n]) for n in ('seed', 'branch'))
    if 'previous_chunk' in after:
        np.testing.assert_array_equal(after['previous_chunk'].numpy(), chunk.actions[0])
    assert all(equal_states(state_of(session, r), o) for r, o in enumerate(others, start=1))


def test_candidates_draw_the_noise_of_consecutive_branches(backend):
    with bound(backend, chunk_mode='sync', **CHANGES) as session, bound(
            backend, chunk_mode='sync', **CHANGES) as other:
        shape = (SMALL.horizon, SMALL.action_width)
        drawn = np.stack([philox.normal(SMALL.seed, r, 0, shape[0] * shape[1]).reshape(shape)
                          for r in range(N)])
        a = session.tick(observation(best_of=N))
        b = other.tick(observation(best_of=N, noise=drawn))
        assert same_bits(a.candidates.actions, b.candidates.actions)


def test_a_capsule_between_choices_goes_on_with_the_same_bits(backend, session):
    store = CapsuleStore(backend, 1 << 23, 1 << 23)
    try:
        session.tick(seen(best_of=N))
        session.lane.at_boundary(lambda: store.snapshot(session.boundary, 'mid')).result()
        inputs = [seen(4, best_of=N), seen(5), seen(6, best_of=2), seen(7, best_of=N)]
        first = [session.tick(s) for s in inputs]
        poison(session, keep=[store])
        session.lane.at_boundary(lambda: store.restore(session.boundary, 'mid')).result()
        for s, chunk in zip(inputs, first):
            again = session.tick(s)
            assert same_bits(again.actions, chunk.actions)
            if chunk.candidates is not None:
                assert again.candidates.selected == chunk.candidates.selected
    finally:
        store.close()


def test_a_choice_replays_a_key_of_its_own_and_captures_nothing(session):
    keys = [dict(session.tick(seen(i, best_of=n)).graph_keys) for i, n in enumerate((1, N, 2, N))]
    assert [k['denoise'] for k in keys] == [(2, 1), (2, N, 'best'), (2, 2, 'best'), (2, N, 'best')]
    assert session.lane.sealed and keys[1] == session.best_of_keys[N]


def test_counts_that_were_not_captured_or_do_not_fit_are_refused(session):
    with pytest.raises(MissingKey, match=r'best of 3.*\[2, 4\].*best_of_keys'):
        session.submit(seen(best_of=3))
    with pytest.raises(ConfigError, match='best_of is 9'):
        session.submit(seen(best_of=9))
    with pytest.raises(ConfigError, match='rows 2'):
        session.submit(seen(best_of=N), rows=2)


@pytest.mark.parametrize('changes, told', [
    ({'best_of_keys': (5,)}, 'best_of_keys'), ({'best_of_keys': (1,)}, 'best_of_keys'),
    ({'selector': 'best'}, "selector 'best'.*medoid")])
def test_a_setting_out_of_range_is_named(backend, changes, told):
    with pytest.raises(ConfigError, match=told), bound(backend, **changes):
        pass
