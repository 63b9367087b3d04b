"""What a Pi0 session does with inputs, state, rows and segments; weights are random."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
import threading
from typing import Any

from _pi0 import bound
from _pi0 import equal_states
from _pi0 import lived_in
from _pi0 import observation
from _pi0 import same_bits
from _pi0 import SMALL
from _pi0 import state_of
import numpy as np
import pytest
import torch

from flashrt_core import errors
from flashrt_core.policies import make_policy
from flashrt_core.policies import Modality
from flashrt_core.policies import SubgoalWrite
from flashrt_core.policies.pi0 import model
from flashrt_core.policies.pi0 import Pi0Session
from flashrt_core.policies.pi0.inputs import write_input
from flashrt_core.runtime import Backend
from flashrt_core.runtime import cpu_backend
from flashrt_core.runtime import philox
from flashrt_core.runtime import Role


@pytest.fixture
def session(backend: Backend) -> Iterator[Pi0Session]:
    with bound(backend) as made:
        yield made


@pytest.fixture
def other(backend: Backend) -> Iterator[Pi0Session]:
    with bound(backend) as made:
        yield made


# -- a tick is a function of state and input ----------------------------------------------------


def test_two_sessions_give_the_same_bits_tick_after_tick(session, other):
    for at in range(4):
        seen = observation(draw=at, steps_executed=2 if at else 0, delay_steps=at % 2)
        assert same_bits(session.tick(seen).actions, other.tick(seen).actions)
    assert equal_states(state_of(session), state_of(other))


def test_a_fresh_session_starts_from_the_configured_seed(session):
    state = state_of(session)
    assert {n: int(state[n]) for n in ('seed', 'branch', 'tick', 'queue_index')} == {
        'seed': SMALL.seed, 'branch': 0, 'tick': 0, 'queue_index': 0}
    assert not state['previous_chunk'].any() and not state['prompt_length'].any()


def test_successive_ticks_draw_different_noise(backend):
    with bound(backend, blend_steps=0) as session:
        first, second = (session.tick(observation()).actions for _ in range(2))
    assert not np.allclose(first, second, atol=1e-3)


def test_the_noise_is_philox_of_seed_branch_and_tick(session, other):
    shape = (1, SMALL.horizon, SMALL.action_width)
    noise = philox.normal(SMALL.seed, 0, 0, shape[1] * shape[2]).reshape(shape)
    drawn = session.tick(observation()).actions
    assert same_bits(drawn, other.tick(observation(noise=noise)).actions)


def test_different_seeds_differ_and_a_seed_written_by_a_tick_stays(session):
    default = session.tick(observation())
    assert int(state_of(session)['seed']) == SMALL.seed
    seeded = session.tick(observation(seed=77, steps_executed=SMALL.horizon))
    assert not np.allclose(default.actions, seeded.actions, atol=1e-3)
    assert int(state_of(session)['seed']) == 77


def test_the_state_and_the_images_matter(session, other):
    seen = observation()
    moved = replace(seen, state=seen.state + np.float32(0.5))
    assert not np.allclose(session.tick(seen).actions, other.tick(moved).actions, atol=1e-4)
    masked = {**seen.images, 'top': None}
    second = replace(seen, steps_executed=SMALL.horizon)
    a = session.tick(second).actions
    b = other.tick(replace(second, images=masked)).actions
    assert not np.allclose(a, b, atol=1e-4)


def test_a_masked_view_is_the_same_whether_absent_or_none(session, other):
    seen = observation()
    none = replace(seen, images={**seen.images, 'wrist': None})
    absent = replace(seen, images={'top': seen.images['top']})
    assert same_bits(session.tick(none).actions, other.tick(absent).actions)


def test_relative_actions_move_with_the_state_and_absolute_ones_do_not(backend):
    seen = observation()
    noise = np.zeros((1, SMALL.horizon, SMALL.action_width), np.float32)
    seen = replace(seen, noise=noise)
    with bound(backend) as absolute, bound(backend, relative=(0, 2)) as relative:
        a, b = absolute.tick(seen).actions, relative.tick(seen).actions
    offset = np.float32([seen.state[0], 0.0, seen.state[2]])
    np.testing.assert_allclose(b - a, np.broadcast_to(offset, a.shape), atol=1e-6)


def test_the_chunk_is_a_copy(session):
    chunk = session.tick(observation())
    kept = chunk.actions.copy()
    session.tick(observation(draw=3))
    assert same_bits(chunk.actions, kept)
    before = state_of(session)
    chunk.actions[:] = 0.0
    assert equal_states(before, state_of(session))


def test_the_chunk_says_tick_keys_and_times(session):
    chunks = [session.tick(observation()) for _ in range(2)]
    assert [chunk.tick for chunk in chunks] == [0, 1]
    assert chunks[0].graph_keys == {'vision': (2,), 'prefix': (2,), 'denoise': (2, 1)}
    assert set(chunks[0].segments_us) == {'vision', 'prefix', 'denoise'}
    assert session.lane.call(session.boundary.position).result() == 2


# -- text ---------------------------------------------------------------------------------------


def test_prompt_and_subgoal_are_latched_and_stay(session, other):
    told = observation(prompt=(1, 2, 3), subgoal=SubgoalWrite(4, (7, 8)))
    first = session.tick(told)
    again = session.tick(observation(draw=1))
    assert (first.subgoal_sequence, again.subgoal_sequence) == (4, 4)
    state = state_of(session)
    assert state['prompt_tokens'].tolist() == [1, 2, 3, 0, 0, 0]
    assert state['subgoal_tokens'].tolist() == [7, 8, 0, 0, 0]
    assert (int(state['prompt_length']), int(state['subgoal_length'])) == (3, 2)
    other.tick(told)
    told_again = other.tick(observation(draw=1, prompt=(1, 2, 3), subgoal=SubgoalWrite(4, (7, 8))))
    assert same_bits(again.actions, told_again.actions)


def test_a_new_subgoal_changes_the_next_chunk_and_leaves_the_prompt(session, other):
    start = observation(prompt=(1, 2, 3), subgoal=SubgoalWrite(1, (7, 8)))
    session.tick(start)
    other.tick(start)
    same = session.tick(observation(draw=1))
    changed = other.tick(observation(draw=1, subgoal=SubgoalWrite(2, (9,))))
    assert not np.allclose(same.actions, changed.actions, atol=1e-5)
    assert changed.subgoal_sequence == 2
    assert state_of(other)['prompt_tokens'].tolist() == [1, 2, 3, 0, 0, 0]


def test_text_of_length_zero_clears_what_was_latched(session):
    session.tick(observation(prompt=(1, 2), subgoal=SubgoalWrite(1, (7,))))
    session.tick(observation(prompt=(), subgoal=SubgoalWrite(2, ())))
    state = state_of(session)
    assert int(state['prompt_length']) == int(state['subgoal_length']) == 0


def test_a_prompt_change_captures_nothing_and_replays_the_same_keys(session, monkeypatch):
    captures = []
    capture = type(session.lane.backend).capture

    def counted(*args: Any, **options: Any) -> Any:
        captures.append(args)
        return capture(*args, **options)

    monkeypatch.setattr(type(session.lane.backend), 'capture', counted)
    first = session.tick(observation(prompt=(1, 2, 3)))
    again = session.tick(observation(prompt=(4, 5), steps_executed=SMALL.horizon))
    assert not captures and session.lane.sealed
    assert again.graph_keys == first.graph_keys
    assert state_of(session)['prompt_tokens'].tolist() == [4, 5, 0, 0, 0, 0]


# -- the seam between chunks --------------------------------------------------------------------


def expected_splice(
    old: np.ndarray, new: np.ndarray, start: int, delay: int, blend: int
) -> np.ndarray:
    out = new.copy()
    for i in range(len(new)):
        if not 0 <= start + i < len(old):
            continue
        w = 1.0 if i < delay else max(0.0, 1.0 - (i - delay + 1) / (blend + 1))
        out[i] = w * old[start + i] + (1.0 - w) * new[i]
    return out


@pytest.mark.parametrize('first_delay, executed, delay', [
    (0, 2, 0), (2, 3, 2), (2, -1, 1), (0, SMALL.horizon, 0), (0, SMALL.horizon - 2, 3),
    (3, -4, 0)])
def test_a_new_chunk_takes_over_from_the_left_over_of_the_old(
    backend, session, first_delay, executed, delay
):
    quiet = np.random.default_rng(4).standard_normal(
        (1, SMALL.horizon, SMALL.action_width)).astype(np.float32)
    first = session.tick(observation(delay_steps=first_delay))
    second = session.tick(observation(
        draw=1, steps_executed=executed, delay_steps=delay, noise=quiet))
    with bound(backend) as fresh:
        alone = fresh.tick(observation(draw=1, noise=quiet))
    expected = expected_splice(
        first.actions[0], alone.actions[0], first_delay + executed, delay, SMALL.blend_steps)
    np.testing.assert_allclose(second.actions[0], expected, atol=1e-6)
    state = state_of(session)
    assert int(state['queue_index']) == delay
    np.testing.assert_array_equal(state['previous_chunk'].numpy(), second.actions[0])


def test_the_first_chunk_is_not_blended_with_nothing(session, other):
    plain = session.tick(observation())
    delayed = other.tick(observation(delay_steps=3))
    assert same_bits(plain.actions, delayed.actions)


def test_without_blending_only_delayed_steps_come_from_the_old_chunk(backend):
    with bound(backend, blend_steps=0) as session:
        first = session.tick(observation()).actions[0]
        second = session.tick(observation(draw=1, steps_executed=3, delay_steps=2)).actions[0]
    np.testing.assert_allclose(second[:2], first[3:5], atol=1e-6)
    assert not np.allclose(second[2:5], first[5:8], atol=1e-3)


def test_a_left_over_that_is_not_finite_is_not_blended_in(session):
    session.tick(observation())
    session.lane.call(
        lambda: session.buffers['previous_chunk'].row(0)[2].fill_(float('nan'))).result()
    assert np.isfinite(session.tick(observation(draw=1)).actions).all()


# -- rows ---------------------------------------------------------------------------------------


def test_branches_with_different_seeds_diverge_and_equal_seeds_agree(session):
    lived_in(session)
    session.set_branches((1, 2, 3), (5, 6, 5)).result()
    chunk = session.tick(observation(rows=4))
    assert chunk.actions.shape == (4, SMALL.horizon, SMALL.action_dim) and chunk.rows == 4
    np.testing.assert_allclose(chunk.actions[1], chunk.actions[3], atol=1e-6)
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert not np.allclose(chunk.actions[a], chunk.actions[b], atol=1e-3)


def test_branch_numbers_alone_make_branches_diverge(session):
    session.set_branches((0, 1), (5, 5), (0, 1)).result()
    chunk = session.tick(observation(rows=2))
    assert not np.allclose(chunk.actions[0], chunk.actions[1], atol=1e-3)


def test_rows_together_equal_single_ticks_and_repeat_bit_for_bit(session, other):
    for s in (session, other):
        lived_in(s)
        s.set_branches((1, 2, 3), (5, 6, 7)).result()
    seen = observation(draw=6, steps_executed=2, delay_steps=1, prompt=(4, 4))
    together, again = session.tick(replace(seen, rows=4)), other.tick(replace(seen, rows=4))
    assert same_bits(together.actions, again.actions)
    for row, seed in ((1, 5), (2, 6), (3, 7)):
        with bound(session.lane.backend) as single:
            lived_in(single)
            alone = single.tick(replace(seen, seed=seed))
        # float32 sums are cut differently for another row count: 1e-5, not the same bits.
        np.testing.assert_allclose(together.actions[row], alone.actions[0], atol=1e-5)


def test_a_tick_of_one_row_leaves_the_others_alone(session):
    session.set_branches((1, 2, 3), (5, 6, 7)).result()
    before = [state_of(session, row) for row in (1, 2, 3)]
    session.tick(observation(prompt=(1,)))
    assert all(equal_states(b, state_of(session, r)) for b, r in zip(before, (1, 2, 3)))


def test_a_committed_branch_goes_on_as_row_zero(session, other):
    for s in (session, other):
        lived_in(s)
    session.set_branches((1, 2, 3), (5, 6, 7)).result()
    session.tick(observation(rows=4))
    branch = state_of(session, 2)
    session.commit_branch(2).result()
    assert equal_states(branch, state_of(session, 0))
    assert int(state_of(session)['seed']) == 6
    other.tick(observation(seed=6))
    following = observation(draw=8, steps_executed=1)
    np.testing.assert_allclose(
        session.tick(following).actions, other.tick(following).actions, atol=1e-4)


# -- only the last segment commits --------------------------------------------------------------


def test_earlier_segments_leave_the_state_as_it_was(session):
    lived_in(session)
    before = state_of(session)
    seen = observation(prompt=(9,), seed=3)
    session.lane.call(lambda: write_input(seen, 1, session.buffers, session.config)).result()
    vision, prefix, denoise = session._plans[(1,)].segments
    for segment in (vision, prefix):
        session.lane.call(partial(segment.graph.replay, segment.key, session.lane)).result()
        assert equal_states(before, state_of(session)), segment.label
    session.lane.call(partial(denoise.graph.replay, denoise.key, session.lane)).result()
    after = state_of(session)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {
        'seed', 'tick', 'prompt_tokens', 'prompt_length', 'previous_chunk', 'queue_index'}


@pytest.mark.parametrize('stage, done', [('encode_views', 1), ('encode_prefix', 2)])
def test_a_tick_dropped_between_segments_leaves_state_and_next_tick_as_they_were(
    monkeypatch, stage, done
):
    with bound(cpu_backend()) as session, bound(cpu_backend()) as other:
        for s in (session, other):
            lived_in(s)
        before = state_of(session)
        entered, cut = threading.Event(), threading.Event()
        body = getattr(model, stage)

        def slow(*args: Any) -> Any:
            entered.set()
            assert cut.wait(10)
            return body(*args)

        monkeypatch.setattr(model, stage, slow)
        doomed = session.submit(observation(draw=9, prompt=(9, 9), seed=3))
        assert entered.wait(10)
        verb = session.lane.at_segment_end(lambda: None)
        cut.set()
        with pytest.raises(errors.TickDropped, match=f'after {done} of 3 segments'):
            doomed.result(10)
        verb.result(10)
        monkeypatch.undo()
        assert equal_states(before, state_of(session))
        following = observation(draw=4)
        assert same_bits(session.tick(following).actions, other.tick(following).actions)


def test_addresses_and_constants_never_change(session):
    addresses = session.buffers.addresses()
    constants = {b.name: b.tensor.cpu().clone() for b in session.buffers.by_role(Role.CONSTANT)}
    lived_in(session)
    session.set_branches((1,), (9,)).result()
    session.tick(observation(rows=2))
    session.buffers.check_addresses()
    assert addresses == session.buffers.addresses()
    assert constants
    for name, value in constants.items():
        assert torch.equal(value, session.buffers[name].tensor.cpu()), name


# -- bind ---------------------------------------------------------------------------------------


def test_the_ports_say_what_a_node_must_bring(session):
    ports = {port.name: port for port in session.ports}
    assert (ports['top'].modality, ports['top'].shape) == (Modality.IMAGE, (28, 28, 3))
    assert (ports['state'].shape, ports['action'].shape) == ((4,), (8, 3))
    assert [p.name for p in session.ports if p.modality is Modality.IMAGE] == ['top', 'wrist']


def test_bind_tells_its_progress_in_order(backend):
    told: list[tuple[str, float]] = []
    make_policy('pi0').bind(backend, SMALL, lambda s, f: told.append((s, f))).close()
    stages = list(dict.fromkeys(stage for stage, _ in told))
    assert stages == ['load', 'bind', 'capture', 'warm up']
    assert all(0.0 <= fraction <= 1.0 for _, fraction in told)
    assert told[-1] == ('warm up', 1.0)


def test_an_unknown_policy_is_named():
    with pytest.raises(errors.ConfigError, match=r"'pi9'.*pi0"):
        make_policy('pi9')


def test_identity_follows_config_and_weights_and_not_rows_or_seed(backend):
    def identity(**changes: Any) -> str:
        with bound(backend, **changes) as session:
            return session.boundary.identity.layout_digest

    same = identity()
    assert same == identity() == identity(rows=2, row_keys=(1,), seed=99)
    assert same != identity(weight_seed=1)
    assert same != identity(blend_steps=2)
