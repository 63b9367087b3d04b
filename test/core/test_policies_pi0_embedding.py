"""A subgoal given as rows of an embedding: read in its tokens' place, latched, in the boundary."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
import threading
from typing import Any

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
from flashrt_core.errors import IdentityMismatch
from flashrt_core.policies import Embedding
from flashrt_core.policies import Modality
from flashrt_core.policies import SubgoalWrite
from flashrt_core.policies.pi0 import fast
from flashrt_core.policies.pi0 import Pi0Config
from flashrt_core.policies.pi0 import Pi0Policy
from flashrt_core.policies.pi0 import Pi0Session
from flashrt_core.policies.pi0 import pi05_fast
from flashrt_core.policies.pi0.config import NAMED
from flashrt_core.policies.pi0.config import PI05_TINY
from flashrt_core.policies.pi0.graphs import forward_of
from flashrt_core.policies.pi0.layout import EMBEDDING
from flashrt_core.policies.pi0.session import reset_state
from flashrt_core.runtime import Backend
from flashrt_core.runtime import cuda_backend

ROWS = 4
SMALL_05 = replace(PI05_TINY, vision=SMALL.vision, horizon=8, flow_steps=4, blend_steps=3)
CONFIGS = {
    'pi0': SMALL, 'pi05': SMALL_05,
    'pi0 bf16': replace(SMALL, dtype='bfloat16'), 'guided': replace(SMALL, guidance=True)}
PROMPT, TOKENS = (3, 1, 4, 1, 5), (9, 2, 6)


@pytest.fixture
def session(backend: Backend) -> Iterator[Pi0Session]:
    with bound(backend, subgoal_embedding_tokens=ROWS, best_of_keys=(4,)) as made:
        yield made


@pytest.fixture
def store(backend: Backend) -> Iterator[CapsuleStore]:
    made = CapsuleStore(backend, 1 << 23, 1 << 23)
    yield made
    made.close()


def rows_of(session: Pi0Session, tokens: tuple[int, ...]) -> torch.Tensor:
    """Give what the policy looks up for these tokens, where its table lies."""
    table = session.buffers['prefix.embed'].tensor
    return table[torch.tensor(tokens, device=table.device)].float()


def fresh(session: Pi0Session) -> None:
    """Give every row the state of a fresh session."""
    session.lane.call(lambda: reset_state(session.buffers, session.config)).result()


def drawn(session: Pi0Session, count: int = 3, draw: int = 5) -> np.ndarray:
    """Give rows that no token has."""
    shape = (count, session.config.prefix.width)
    return np.random.default_rng(draw).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize('form', CONFIGS)
def test_rows_equal_to_those_of_tokens_give_the_very_actions_of_the_tokens(backend, form):
    with bound(backend, CONFIGS[form], subgoal_embedding_tokens=ROWS) as session:
        strength = 2.0 if session.config.guidance else None
        seen = observation(session.config, prompt=PROMPT, guidance=strength)
        rows = rows_of(session, TOKENS)
        given = {'of tokens': SubgoalWrite(1, TOKENS), 'of rows': SubgoalWrite(
            2, (), Embedding(rows)), 'of host rows': SubgoalWrite(
            3, (7,), Embedding(rows.cpu().numpy())), 'none': None, 'others': SubgoalWrite(
            5, (), Embedding(drawn(session)))}
        found = {}
        for name, subgoal in given.items():
            fresh(session)
            found[name] = session.tick(replace(seen, subgoal=subgoal))
    expected = found['of tokens'].actions
    assert same_bits(found['of rows'].actions, expected)
    assert same_bits(found['of host rows'].actions, expected)
    assert found['of host rows'].subgoal_sequence == 3
    for other in ('none', 'others'):
        assert not np.allclose(found[other].actions, expected, atol=1e-4), other


def test_without_the_slot_a_session_has_no_buffer_port_or_byte_more(backend, session):
    def need(c: Pi0Config) -> int:
        found = Pi0Policy().memory(c)
        return found.buffers + found.pinned

    with bound(backend, best_of_keys=(4,)) as free:
        assert not [b.name for b in free.buffers if 'embedding' in b.name]
        assert not [p for p in free.ports if p.modality is Modality.SUBGOAL_EMBEDDING]
        seen = observation(prompt=PROMPT, subgoal=SubgoalWrite(1, TOKENS))
        assert same_bits(session.tick(seen).actions, free.tick(seen).actions)
        one = ROWS * SMALL.prefix.width * 4 + 8  # of rows and their number
        # Bound on the host and on the device, kept for the next segment and in each row's state.
        assert need(session.config) - need(free.config) == (3 + SMALL.rows) * one
    (port,) = [p for p in session.ports if p.modality is Modality.SUBGOAL_EMBEDDING]
    assert (port.name, port.dtype, port.shape) == (
        'subgoal_embedding', 'float32', (ROWS, SMALL.prefix.width))


def test_it_is_latched_like_tokens_and_cleared_by_the_next_subgoal_without_one(session):
    rows, lengths, latched = drawn(session), [], []
    for subgoal in (None, SubgoalWrite(1, (8,), Embedding(rows)), None,
                    SubgoalWrite(2, (), Embedding(rows[:1])), None, SubgoalWrite(3, TOKENS), None):
        session.tick(observation(subgoal=subgoal))
        state = state_of(session)
        lengths.append(int(state['subgoal_embedding_length']))
        latched.append(state['subgoal_embedding'].numpy())
    assert lengths == [0, 3, 3, 1, 1, 0, 0]
    for at, length in enumerate(lengths):
        assert np.array_equal(latched[at][:length], rows[:length])
        assert not latched[at][length:].any()
    assert session.lane.sealed


def test_an_empty_prompt_and_no_tokens_leave_the_rows_alone_as_the_task(session):
    a = session.tick(observation(subgoal=SubgoalWrite(1, (), Embedding(drawn(session)))))
    b = session.tick(observation(steps_executed=SMALL.horizon, subgoal=SubgoalWrite(2, ())))
    assert not np.allclose(a.actions, b.actions, atol=1e-4)


def test_what_the_giver_writes_afterwards_changes_nothing(session):
    rows = drawn(session)
    expected = session.tick(observation(subgoal=SubgoalWrite(1, (), Embedding(rows)))).actions
    for made in (rows.copy(), torch.from_numpy(rows.copy()),
                 torch.from_numpy(rows.copy()).to(session.lane.backend.device)):
        fresh(session)
        embedding = Embedding(made)
        made[:] = float('nan')
        seen = observation(subgoal=SubgoalWrite(1, (), embedding))
        assert same_bits(session.tick(seen).actions, expected)
        assert np.array_equal(embedding.values, rows) and not embedding.values.flags.writeable


def test_every_row_and_every_candidate_reads_it(session):
    seen = observation(prompt=PROMPT, rows=4)
    rows = Embedding(rows_of(session, TOKENS))
    found = []
    for subgoal in (SubgoalWrite(1, TOKENS), SubgoalWrite(1, (), rows)):
        ticks = []
        for changes in ({'rows': 4}, {'best_of': 4, 'rows': 1}):
            fresh(session)
            ticks.append(session.tick(replace(seen, subgoal=subgoal, **changes)))
        found.append(ticks)
    for a, b in zip(*found):
        assert same_bits(a.actions, b.actions)
    assert same_bits(found[0][1].candidates.actions, found[1][1].candidates.actions)
    session.set_branches((2,), (5,)).result()
    assert torch.equal(state_of(session, 2)['subgoal_embedding'][:3], rows.rows.cpu())


def test_a_tick_that_is_dropped_latches_nothing_and_the_same_write_serves_the_next(session):
    write = SubgoalWrite(1, (), Embedding(drawn(session)))
    before, entered, cut = state_of(session), threading.Event(), threading.Event()

    def wait() -> None:
        entered.set()
        assert cut.wait(10)

    session.lane.call(wait)
    assert entered.wait(10)
    doomed = session.submit(observation(subgoal=write))
    verb = session.lane.at_segment_end(lambda: None)
    cut.set()
    verb.result(10)
    assert doomed.exception(10) is not None and equal_states(before, state_of(session))
    assert session.tick(observation(subgoal=write)).subgoal_sequence == 1
    assert np.array_equal(
        state_of(session)['subgoal_embedding'][:3].numpy(), write.embedding.values)


@pytest.mark.parametrize('left_out', ['', *EMBEDDING])
def test_a_restore_gives_the_same_tick_and_without_either_buffer_it_does_not(
    session, store, left_out
):
    lived_in(session)
    session.tick(observation(draw=3, subgoal=SubgoalWrite(8, (1,), Embedding(drawn(session)))))
    boundary = session.boundary
    if left_out:
        boundary = boundary._without_for_tests(left_out)
    session.lane.at_boundary(lambda: store.snapshot(boundary, 'c')).result()
    state, seen = state_of(session), observation(draw=4, steps_executed=1)
    following = session.tick(seen).actions
    session.tick(observation(subgoal=SubgoalWrite(9, TOKENS)))
    poison(session, keep=[store])
    session.lane.at_boundary(lambda: store.restore(boundary, 'c')).result()
    if not left_out:
        assert equal_states(state, state_of(session))
    assert same_bits(session.tick(seen).actions, following) == (not left_out)


def test_a_rollback_to_a_mark_and_a_restore_into_other_rows_bring_it_back(session, store):
    session.tick(observation(subgoal=SubgoalWrite(1, (), Embedding(drawn(session)))))
    mark = session.lane.at_boundary(lambda: store.mark(session.boundary)).result()
    session.lane.at_boundary(lambda: store.snapshot(session.boundary, 'c')).result()
    state = state_of(session)
    session.tick(observation(subgoal=SubgoalWrite(2, (), Embedding(drawn(session, 4, 8)))))
    assert not equal_states(state, state_of(session))
    session.lane.at_boundary(lambda: store.rollback(session.boundary, mark)).result()
    assert equal_states(state, state_of(session))
    session.lane.at_boundary(lambda: store.restore(session.boundary, 'c', rows=(1, 3))).result()
    assert all(equal_states(state, state_of(session, row)) for row in (1, 3))
    assert not equal_states(state, state_of(session, 2))


def test_the_state_is_the_same_whatever_was_written_before(backend, session):
    """What a longer write left in the input does not get into the state of a shorter one."""
    with bound(backend, subgoal_embedding_tokens=ROWS, best_of_keys=(4,)) as other:
        other.tick(observation(subgoal=SubgoalWrite(1, (), Embedding(drawn(session, ROWS, 8)))))
        for s in (session, other):
            fresh(s)
            s.tick(observation(subgoal=SubgoalWrite(2, (), Embedding(drawn(session, 2)))))
        assert equal_states(state_of(session), state_of(other))


def test_a_capsule_of_a_session_without_the_slot_is_refused(backend, session, store):
    with bound(backend) as free:
        free.lane.at_boundary(lambda: store.snapshot(free.boundary, 'c')).result()
    with pytest.raises(IdentityMismatch, match='subgoal_embedding'):
        session.lane.at_boundary(lambda: store.restore(session.boundary, 'c')).result()


WIDTH = SMALL.prefix.width
REFUSED: list[tuple[Any, str]] = [
    (np.zeros((2, WIDTH), np.float16), 'float16.*float32'),
    (torch.zeros((2, WIDTH), dtype=torch.bfloat16), 'bfloat16.*float32'),
    (np.zeros(WIDTH, np.float32), rf'\[{WIDTH}\]; give a row a token'),
    (np.zeros((0, WIDTH), np.float32), r'\[0, 48\]'),
    ([[0.0] * WIDTH], 'list'),
    (np.ma.masked_array(np.zeros((2, WIDTH), np.float32)), 'float32'),
    (np.full((2, WIDTH), np.nan, np.float32), r'nan at \[0, 0\]'),
    (torch.full((2, WIDTH), torch.inf), 'inf at'),
]


@pytest.mark.parametrize('rows, message', REFUSED)
def test_rows_that_are_none_are_refused_when_they_are_handed_over(rows, message):
    with pytest.raises(ConfigError, match=message):
        Embedding(rows)


def test_an_embedding_that_does_not_fit_the_policy_is_refused_by_number(session):
    before = state_of(session)
    for given, message in (
            (Embedding(drawn(session, ROWS + 1)), '5 rows; this policy takes at most 4'),
            (Embedding(drawn(session)[:, :-1]), rf'\[3, {WIDTH - 1}\].*rows of {WIDTH}'),
            (drawn(session), 'float32.*give an Embedding')):
        with pytest.raises(ConfigError, match=message):
            session.submit(observation(subgoal=SubgoalWrite(1, (), given)))
    assert session.lane.idle and equal_states(before, state_of(session))


def test_a_policy_without_the_slot_refuses_one_and_says_what_to_set(backend, session):
    with bound(backend) as free, pytest.raises(
            ConfigError, match=r'3 rows.*subgoal_embedding_tokens in its config'):
        free.submit(observation(subgoal=SubgoalWrite(1, (), Embedding(drawn(session)))))


@pytest.mark.parametrize('rows', [-1, SMALL.subgoal_tokens + 1])
def test_more_rows_than_the_subgoal_has_places_are_refused(rows):
    with pytest.raises(ConfigError, match=f'subgoal_embedding_tokens is {rows}; give 0 to'):
        replace(SMALL, subgoal_embedding_tokens=rows)


@pytest.mark.gpu
def test_rows_made_in_another_stream_are_waited_for_and_copied_on_the_device():
    """The giver's stream is kept busy, so its rows come late; then it overwrites them."""
    with bound(cuda_backend(), subgoal_embedding_tokens=ROWS) as session:
        expected = session.tick(observation(subgoal=SubgoalWrite(1, TOKENS))).actions
        fresh(session)
        rows, stream = rows_of(session, TOKENS), torch.cuda.Stream()
        late = torch.full_like(rows, float('nan'))
        staged = session.buffers['host.subgoal_embedding'].tensor
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            late.copy_(rows)
            embedding = Embedding(late)
            late.fill_(float('nan'))
        assert embedding.rows.is_cuda
        seen = observation(subgoal=SubgoalWrite(1, (), embedding))
        assert same_bits(session.tick(seen).actions, expected) and not staged.any()


@pytest.mark.gpu
@pytest.mark.parametrize('family, forward', [('pi0', fast), ('pi05', pi05_fast)])
def test_the_kernels_read_rows_as_they_read_tokens_at_real_width(family, forward):
    size = NAMED[family]
    c = replace(
        size, views=('a',), vocab=1000, subgoal_embedding_tokens=size.subgoal_tokens,
        vision=replace(size.vision, layers=1), prefix=replace(size.prefix, layers=2),
        expert=replace(size.expert, layers=2), state_dim=4, action_dim=4)
    with bound(cuda_backend(), c) as session:
        assert forward_of(c, session.lane.backend.device) is forward
        seen, found = observation(c, prompt=PROMPT), []
        for subgoal in (SubgoalWrite(1, TOKENS),
                        SubgoalWrite(1, (), Embedding(rows_of(session, TOKENS))),
                        SubgoalWrite(1, (), Embedding(drawn(session)))):
            fresh(session)
            found.append(session.tick(replace(seen, subgoal=subgoal)).actions)
        assert same_bits(found[0], found[1]) and not same_bits(found[0], found[2])
