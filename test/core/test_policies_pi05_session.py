"""A Pi0.5 session: bound by config, its state in the boundary, refused before a load."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

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
from flashrt_core.errors import BadJoints
from flashrt_core.errors import ConfigError
from flashrt_core.errors import ObservationNonFinite
from flashrt_core.policies import make_policy
from flashrt_core.policies import SubgoalWrite
from flashrt_core.policies.normalise import Statistics
from flashrt_core.policies.pi0 import load_config
from flashrt_core.policies.pi0 import Pi0Session
from flashrt_core.policies.pi0.config import Pi0Config
from flashrt_core.policies.pi0.layout import STATE
from flashrt_core.policies.pi0.modulation import MODULATION
from flashrt_core.runtime import Backend
from flashrt_core.runtime import cpu_backend

SMALL05 = replace(
    SMALL, family='pi05', vocab=512, state_tokens=26, prompt_tokens=24, subgoal_tokens=20,
    tokenizer='words', statistics=Statistics(
        state_q01=(-1.0, -2.0, 0.0, -3.0), state_q99=(1.0, 2.0, 1.0, 3.0),
        action_q01=(-1.0,) * 3, action_q99=(2.0,) * 3))
NEXT = observation(SMALL05, draw=3, steps_executed=1, delay_steps=1)


@pytest.fixture
def session(backend: Backend) -> Iterator[Pi0Session]:
    with bound(backend, SMALL05) as made:
        yield made


def test_the_named_config_binds_by_its_policy_and_ticks(backend):
    made = make_policy('pi05').bind(backend, 'pi05_tiny')
    try:
        c = load_config('pi05_tiny')
        prompt = made.tokenizer.encode('put the red block in the blue zone', c.prompt_tokens)
        chunk = made.tick(observation(c, prompt=prompt))
        assert chunk.actions.shape == (1, 32, 4) and np.isfinite(chunk.actions).all()
    finally:
        made.close()


def test_a_restore_after_poison_gives_the_same_tick_with_the_state_in_its_prompt(
    backend, session
):
    lived_in(session)
    assert all(bool((value != 0).any()) for value in state_of(session).values())
    store = CapsuleStore(backend, 8 << 20, 8 << 20)
    session.lane.at_boundary(lambda: store.snapshot(session.boundary, 'c0')).result()
    following = session.tick(NEXT)
    poisoned = poison(session, keep=[store])
    session.lane.at_segment_end(lambda: store.restore(session.boundary, 'c0')).result()
    assert same_bits(session.tick(NEXT).actions, following.actions)
    poisoned.check_constants()
    store.close()


def test_rows_of_one_observation_equal_each_alone(session):
    noise = np.random.default_rng(1).standard_normal((2, 8, 5)).astype(np.float32)
    both = session.tick(observation(SMALL05, noise=noise, rows=2)).actions
    for row in range(2):
        session.lane.call(lambda: [b.tensor.zero_() for b in session.buffers.state()]).result()
        alone = session.tick(observation(SMALL05, noise=noise[row:row + 1])).actions
        np.testing.assert_allclose(both[row], alone[0], atol=1e-5)


def test_a_new_prompt_is_one_write_into_its_buffer(session):
    first = session.tick(observation(SMALL05, prompt=session.tokenizer.encode('go home', 24)))
    keys, addresses = dict(first.graph_keys), session.buffers.addresses()
    host = {b.name: b.tensor.clone() for b in session.buffers if b.name.startswith('host.')}
    other = session.tokenizer.encode('stop', 24)
    second = session.tick(observation(SMALL05, prompt=other, steps_executed=8))
    changed = {name for name, value in host.items()
               if not value.equal(session.buffers[name].tensor)}
    assert changed <= {'host.prompt', 'host.control', 'host.actions', 'host.report'}
    assert dict(second.graph_keys) == keys and session.buffers.addresses() == addresses
    assert not np.array_equal(first.actions, second.actions)


def test_a_dropped_subgoal_leaves_the_prompt_as_it_was(session):
    prompt = session.tokenizer.encode('go home', 24)
    session.tick(observation(SMALL05, prompt=prompt))
    before = state_of(session)
    session.tick(observation(SMALL05, subgoal=SubgoalWrite(1, (259, 260)), steps_executed=8))
    session.tick(observation(SMALL05, subgoal=SubgoalWrite(2, ()), steps_executed=8))
    after = state_of(session)
    for name in ('prompt_tokens', 'prompt_length'):
        assert before[name].equal(after[name])


@pytest.mark.parametrize('state, error', [
    (np.float32([np.nan, 0, 0, 0]), ObservationNonFinite), (np.zeros(3, np.float32), BadJoints)])
def test_a_state_that_no_text_can_tell_is_refused_and_changes_nothing(session, state, error):
    before = state_of(session)
    with pytest.raises(error):
        session.submit(replace(NEXT, state=state))
    assert equal_states(before, state_of(session))


def test_a_state_far_outside_of_training_still_fits_its_slot(session):
    for value in (-3e38, 3e38, 0.0):
        session.tick(replace(NEXT, state=np.full(4, value, np.float32)))


@pytest.mark.parametrize('changes, message', [
    ({'tokenizer': ''}, 'needs a tokenizer.*tokenizer.model'),
    ({'tokenizer': 'sp'}, "'sp' is unknown"),
    ({'tokenizer': '/none/tokenizer.model'}, 'sentencepiece|cannot be read'),
    ({'vocab': 100}, 'the model 100'),
    ({'state_tokens': 25}, 'takes up to 26 tokens: give 26'),
])
def test_a_tokenizer_or_slot_that_does_not_serve_is_refused_before_anything_is_allocated(
    changes, message, monkeypatch
):
    def never(*given: object, **more: object) -> None:
        raise AssertionError('buffers were made')

    monkeypatch.setattr('flashrt_core.policies.pi0.bind.BufferSet', never)
    with pytest.raises(ConfigError, match=message):
        with bound(cpu_backend(), SMALL05, **changes):
            pass


def test_the_identity_tells_family_tokenizer_and_modulation(session):
    identity = session.boundary.identity
    assert identity.layout['family'] == 'pi05' and identity.layout['tokenizer'] == 'words'
    assert len(identity.numerics['modulation']) == 64
    with bound(cpu_backend(), SMALL) as plain:
        other = plain.boundary.identity
        assert other.layout['family'] == 'pi0' and 'tokenizer' not in other.layout
        assert 'modulation' not in other.numerics and MODULATION not in plain.buffers
    assert [entry.name for entry in session.boundary.entries] == list(STATE)


def test_statistics_of_32_joints_fit_into_an_identity():
    numbers = tuple(-1.2345678901234567 - i for i in range(32))
    above = tuple(3.3333333333333333 + i for i in range(32))
    known = Statistics(numbers, above, numbers, above, numbers, above, numbers, above)
    c: Pi0Config = replace(load_config('pi05'), statistics=known)
    assert max(map(len, c.layout().values())) < 4096
