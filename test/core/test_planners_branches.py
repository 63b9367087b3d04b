"""Branches share a prefix they cannot change, and each is what a single session would be."""
from __future__ import annotations

from collections.abc import Iterator

from _planner import bound
from _planner import DRAWN
from _planner import GREEDY
from _planner import lived_in
from _planner import MIB
from _planner import PROMPT
from _planner import restore
from _planner import run
from _planner import shared
from _planner import snapshot
from _planner import state_of
from _planner import SUFFIX
from _planner import unequal
import pytest
import torch

from flashrt_core.capsule import CapsuleStore
from flashrt_core.errors import BranchesEnded
from flashrt_core.errors import BranchesLive
from flashrt_core.errors import ConfigError
from flashrt_core.errors import PromptEmpty
from flashrt_core.errors import PromptTooLong
from flashrt_core.planners import Options
from flashrt_core.planners.qwen3_5 import model
from flashrt_core.planners.session import PlannerSession
from flashrt_core.runtime import Backend
from flashrt_core.runtime import cpu_backend
from flashrt_core.runtime import Role


@pytest.fixture
def session(backend: Backend) -> PlannerSession:
    return shared(backend)


@pytest.fixture
def store(backend: Backend) -> Iterator[CapsuleStore]:
    made = CapsuleStore(backend, 8 * MIB, 8 * MIB, page_bytes=MIB // 16)
    yield made
    made.close()


def seeded(seed: int) -> Options:
    return Options(temperature=1.3, top_k=30, top_p=0.95, seed=seed, presence=0.4, frequency=0.2,
                   repetition=1.1)


def alone(session: PlannerSession, store: CapsuleStore, seed: int, steps: int) -> list[int]:
    """Decode from the capsule in the session itself."""
    restore(session, store)
    return run(session, steps, seeded(seed))


@pytest.mark.parametrize('pending', [True, False], ids=['pending', 'nothing pending'])
@pytest.mark.parametrize('count', [1, 2, 3])
def test_every_branch_gives_the_tokens_of_a_single_session(session, store, count, pending):
    lived_in(session) if pending else session.prefill(PROMPT).result(20)
    snapshot(session, store)
    seeds = [11, 12, 11][:count]
    expected = [alone(session, store, seed, 8) for seed in seeds]
    restore(session, store)
    branches = session.fork(seeds)
    steps = [branches.step(DRAWN).result(20) for _ in range(8)]
    assert [list(row) for row in zip(*(s.tokens for s in steps))] == expected
    assert branches.position == steps[-1].position == session.position + 8 - (not pending)
    branches.drop()


@pytest.mark.parametrize('row', [0, 1, 2])
def test_a_committed_branch_has_every_bit_of_a_single_session(session, store, row):
    lived_in(session)
    snapshot(session, store)
    seeds = [11, 12, 13]
    alone(session, store, seeds[row], 7)
    expected = state_of(session)
    after = run(session, 6, seeded(seeds[row]))
    restore(session, store)
    branches = session.fork(seeds)
    for _ in range(7):
        branches.step(DRAWN).result(20)
    assert branches.commit(row).result(20) == session.position
    assert unequal(state_of(session), expected) == []
    assert run(session, 6, seeded(seeds[row])) == after


def test_equal_seeds_part_by_their_branch_numbers(session):
    session.prefill(PROMPT).result(20)
    branches = session.fork([5, 5, 5], [0, 1, 0])
    rows = list(zip(*(branches.step(DRAWN).result(20).tokens for _ in range(8))))
    assert rows[0] == rows[2] != rows[1]
    branches.drop()


def test_the_trunk_does_not_change_while_branches_step(session):
    lived_in(session)
    before = state_of(session)
    branches = session.fork([1, 2])
    for _ in range(5):
        branches.step(DRAWN).result(20)
    assert unequal(state_of(session), before) == []
    branches.drop()
    assert len(run(session, 3)) == 3


def test_a_branch_without_a_step_commits_the_trunk_with_its_seed(session):
    lived_in(session)
    before = state_of(session)
    branches = session.fork([99, 2])
    branches.commit(0).result(20)
    after = state_of(session)
    assert unequal(after, before) == ['seed'] and int(after['seed']) == 99


def test_speculation_goes_on_from_a_committed_branch(session, store):
    lived_in(session)
    snapshot(session, store)
    expected = alone(session, store, 3, 5) + run(session, 10, seeded(3))
    restore(session, store)
    branches = session.fork([3])
    tokens = [branches.step(DRAWN).result(20).tokens[0] for _ in range(5)]
    branches.commit(0).result(20)
    drafting = Options(**{**vars(seeded(3)), 'draft_tokens': 3})
    assert tokens + run(session, 10, drafting) == expected


def test_the_trunk_is_refused_while_branches_live_and_free_after(session):
    session.prefill(PROMPT).result(20)
    branches = session.fork([1, 2])
    for refused in (lambda: session.append(SUFFIX), lambda: session.decode(GREEDY),
                    lambda: session.prefill(PROMPT), lambda: session.fork([1])):
        with pytest.raises(BranchesLive, match='2 branches'):
            refused()
    branches.drop()
    session.append(SUFFIX).result(20)
    with pytest.raises(BranchesEnded, match='dropped'):
        branches.step(GREEDY)


def test_a_snapshot_of_the_trunk_is_taken_while_branches_live(session, store):
    lived_in(session)
    before = state_of(session)
    branches = session.fork([1, 2])
    branches.step(DRAWN).result(20)
    snapshot(session, store)
    branches.step(DRAWN).result(20)
    branches.commit(1).result(20)
    restore(session, store)
    assert unequal(state_of(session), before) == []


@pytest.mark.parametrize('verb', ['restore', 'reset'])
def test_branches_end_with_a_restore_or_reset_of_their_trunk(session, store, verb):
    session.prefill(PROMPT).result(20)
    snapshot(session, store)
    branches = session.fork([1, 2])
    branches.step(GREEDY).result(20)
    restore(session, store) if verb == 'restore' else session.reset().result(20)
    for ended in (lambda: branches.step(GREEDY), lambda: branches.commit(0)):
        with pytest.raises(BranchesEnded, match='restored or reset'):
            ended()
    session.prefill(PROMPT).result(20)


def test_full_tails_and_a_full_context_are_refused_with_the_numbers(session):
    session.prefill(PROMPT).result(20)
    branches = session.fork([1])
    for _ in range(13):                              # the first one needs no room
        branches.step(GREEDY).result(20)
    with pytest.raises(PromptTooLong, match='12 tokens are full'):
        branches.step(GREEDY)
    assert branches.commit(0).result(20) == 11 + 12
    session.prefill([1] * 94).result(20)
    branches = session.fork([1])
    branches.step(GREEDY).result(20)
    branches.step(GREEDY).result(20)
    with pytest.raises(PromptTooLong, match='context'):
        branches.step(GREEDY)
    branches.drop()


def test_bad_forks_and_commits_are_refused(backend, session):
    with pytest.raises(PromptEmpty):
        session.fork([1])
    session.prefill(PROMPT).result(20)
    for seeds, numbers in (([], None), ([1] * 4, None), ([1.5], None), (['a'], None),
                           ([1, 2], [0]), ([2**64], None), ([True], None)):
        with pytest.raises(ConfigError):
            session.fork(seeds, numbers)
    branches = session.fork([1, 2])
    for row in (2, -1, 1.0):
        with pytest.raises(ConfigError, match='branches 0 to 1'):
            branches.commit(row)
    branches.drop()
    with bound(backend, branches=0) as none:
        none.prefill(PROMPT).result(20)
        with pytest.raises(ConfigError, match='bind with branches'):
            none.fork([1])


def test_rows_that_pad_a_fork_do_not_show(session, store):
    """Two branches run in a graph of two rows, three in one of three: rows have their own bits."""
    lived_in(session)
    found = []
    for seeds in ([4], [4, 5], [4, 5, 6]):
        branches = session.fork(seeds)
        found.append([branches.step(DRAWN).result(20).tokens[0] for _ in range(5)])
        branches.drop()
    assert found[0] == found[1] == found[2]


def test_a_failed_step_ends_the_branches_and_leaves_the_trunk(monkeypatch):
    session = shared(cpu_backend())
    lived_in(session)
    before = state_of(session)
    branches = session.fork([1, 2])
    branches.step(DRAWN).result(20)
    with monkeypatch.context() as patched:
        patched.setattr(model, 'head', lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            branches.step(DRAWN).result(20)
    with pytest.raises(BranchesEnded, match='a step failed'):
        branches.step(DRAWN)
    assert session.lane.committed and unequal(state_of(session), before) == []
    session.append(SUFFIX).result(20)


def test_what_branches_write_is_no_part_of_the_boundary(session):
    """Between forks the rows hold no state: rubbish in them changes nothing."""
    lived_in(session)
    room = session._room.buffers
    first = session.fork([1, 2])
    expected = [first.step(DRAWN).result(20).tokens for _ in range(4)]
    first.drop()

    def spoil() -> None:
        for buffer in room:
            if buffer.role in (Role.STATE, Role.SCRATCH):
                buffer.tensor.copy_(torch.full_like(buffer.tensor, -1))

    session.lane.call(spoil).result(20)
    second = session.fork([1, 2])
    assert [second.step(DRAWN).result(20).tokens for _ in range(4)] == expected
    second.drop()
