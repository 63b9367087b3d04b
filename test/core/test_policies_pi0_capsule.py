"""A Pi0 session's boundary holds all that the next tick depends on: poison the rest and see."""
from __future__ import annotations

from collections.abc import Iterator

from _pi0 import bound
from _pi0 import lived_in
from _pi0 import observation
from _pi0 import same_bits
from _pi0 import SMALL
from _pi0 import state_of
from _poison import poison
import numpy as np
import pytest
import torch

from flashrt_core.capsule import Boundary
from flashrt_core.capsule import CapsuleStore
from flashrt_core.errors import FlashrtError
from flashrt_core.errors import IdentityMismatch
from flashrt_core.policies import Chunk
from flashrt_core.policies import SubgoalWrite
from flashrt_core.policies.pi0 import Pi0Session
from flashrt_core.policies.pi0.layout import STATE
from flashrt_core.runtime import Backend

MIB = 1 << 20


@pytest.fixture
def session(backend: Backend) -> Iterator[Pi0Session]:
    with bound(backend) as made:
        lived_in(made)
        yield made


@pytest.fixture
def store(backend: Backend) -> Iterator[CapsuleStore]:
    made = CapsuleStore(backend, 8 * MIB, 8 * MIB)
    yield made
    made.close()


def snapshot(session: Pi0Session, store: CapsuleStore, id: str = 'c0',
             boundary: Boundary | None = None) -> None:
    chosen = boundary or session.boundary
    session.lane.at_boundary(lambda: store.snapshot(chosen, id)).result()


def restore(session: Pi0Session, store: CapsuleStore, id: str = 'c0',
            boundary: Boundary | None = None, **options: object) -> None:
    chosen = boundary or session.boundary
    session.lane.at_segment_end(lambda: store.restore(chosen, id, **options)).result()


def same_chunk(a: Chunk, b: Chunk) -> bool:
    return same_bits(a.actions, b.actions) and (
        a.tick, a.subgoal_sequence) == (b.tick, b.subgoal_sequence)


NEXT = observation(draw=3, steps_executed=1, delay_steps=1)


def test_every_state_buffer_is_told_to_matter_before_the_poison_tests(session):
    state = state_of(session)
    assert all(bool((state[name] != 0).any()) for name in STATE), state


def test_after_poisoning_all_but_constants_a_restore_gives_the_same_tick(session, store):
    snapshot(session, store)
    following = session.tick(NEXT)
    poisoned = poison(session, keep=[store])
    for buffer in session.buffers:
        assert poisoned.covers(buffer.tensor) == (buffer.role.value != 'constant'), buffer.name
    restore(session, store)
    assert same_chunk(session.tick(NEXT), following)
    poisoned.check_constants()


def test_and_so_do_the_ticks_after_it(session, store):
    snapshot(session, store)
    inputs = [NEXT, observation(draw=4, prompt=(2,), steps_executed=1),
              observation(draw=5, subgoal=SubgoalWrite(8, (1,)), steps_executed=2)]
    first = [session.tick(seen) for seen in inputs]
    poison(session, keep=[store])
    restore(session, store)
    assert all(same_chunk(session.tick(seen), chunk) for seen, chunk in zip(inputs, first))


@pytest.mark.parametrize('name', STATE)
def test_a_boundary_without_any_one_buffer_does_not_pass_that_test(session, store, name):
    short = session.boundary._without_for_tests(name)
    snapshot(session, store, boundary=short)
    following = session.tick(NEXT)
    poison(session, keep=[store])
    restore(session, store, boundary=short)
    try:
        again = session.tick(NEXT)
    except FlashrtError:
        return
    assert not same_chunk(again, following)


def test_branches_of_one_capsule_diverge_from_each_other_and_never_from_it(session, store):
    snapshot(session, store)
    alone = session.tick(NEXT)
    digest = store.digest('c0', 'pi0')
    seen = observation(draw=3, steps_executed=1, delay_steps=1, rows=4)
    forks = []
    for _ in range(2):
        restore(session, store, rows=(0, 1, 2, 3), overrides={'seed': [23, 5, 6, 5]})
        forks.append(session.tick(seen))
    assert same_chunk(*forks)
    actions = forks[0].actions
    np.testing.assert_allclose(actions[0], alone.actions[0], atol=1e-5)
    np.testing.assert_allclose(actions[1], actions[3], atol=1e-6)
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert not np.allclose(actions[a], actions[b], atol=1e-3)
    assert store.digest('c0', 'pi0') == digest
    restore(session, store)
    assert same_chunk(session.tick(NEXT), alone)


def test_a_capsule_is_unchanged_by_the_ticks_after_it(session, store, stress):
    snapshot(session, store)
    digest, state = store.digest('c0', 'pi0'), state_of(session)
    for at in range(stress(100)):
        session.tick(observation(draw=at, steps_executed=1))
    assert store.digest('c0', 'pi0') == digest
    restore(session, store)
    assert all(torch.equal(state[name], value) for name, value in state_of(session).items())


def test_many_restores_leave_every_address_and_the_next_tick_unchanged(session, store, stress):
    snapshot(session, store)
    following, addresses = session.tick(NEXT), session.buffers.addresses()
    for _ in range(stress(1000)):
        restore(session, store)
    assert session.buffers.addresses() == addresses
    session.buffers.check_addresses()
    assert same_chunk(session.tick(NEXT), following)


def test_a_capsule_of_other_weights_or_sizes_is_refused_and_one_of_fewer_rows_is_not(
    backend, session, store
):
    snapshot(session, store)
    following, before = session.tick(NEXT), None
    for changes in ({'weight_seed': 1}, {'blend_steps': 2}):
        with bound(backend, **changes) as other:
            before = state_of(other)
            with pytest.raises(IdentityMismatch, match=r'weights|blend_steps'):
                restore(other, store)
            assert all(torch.equal(before[n], v) for n, v in state_of(other).items())
    with bound(backend, rows=1, row_keys=(1,), seed=SMALL.seed + 1) as narrow:
        restore(narrow, store)
        assert same_chunk(narrow.tick(NEXT), following)
