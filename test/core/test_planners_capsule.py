"""A planner's capsule holds all that the next token depends on, at any committed token."""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
import random

from _planner import bound
from _planner import DRAWN
from _planner import GREEDY
from _planner import lived_in
from _planner import MIB
from _planner import PROMPT
from _planner import restore
from _planner import run
from _planner import run_under
from _planner import shared
from _planner import SMALL
from _planner import snapshot
from _planner import state_of
from _planner import SUFFIX
from _planner import unequal
from _poison import poison
import pytest
import torch

from flashrt_core.capsule import CapsuleStore
from flashrt_core.errors import CapsuleCorrupt
from flashrt_core.errors import FlashrtError
from flashrt_core.errors import IdentityMismatch
from flashrt_core.errors import MarkDead
from flashrt_core.errors import NotAtBoundary
from flashrt_core.errors import SessionPoisoned
from flashrt_core.errors import TickDropped
from flashrt_core.planners import appending
from flashrt_core.planners import Options
from flashrt_core.planners.chunks import plan_chunks
from flashrt_core.planners.session import PlannerSession
from flashrt_core.runtime import Backend

STATE = ('recurrent.0', 'conv.0', 'kv.1', 'mtp.kv', 'hidden', 'position', 'pending', 'sampled',
         'counts', 'parameters', 'seed', 'branch', 'followed', 'history')
SPECULATIVE = Options(temperature=1.3, top_k=30, top_p=0.95, seed=7, presence=0.4, frequency=0.2,
                      repetition=1.1, draft_tokens=3)


@pytest.fixture
def session(backend: Backend) -> PlannerSession:
    return shared(backend)


@pytest.fixture
def store(backend: Backend) -> Iterator[CapsuleStore]:
    made = CapsuleStore(backend, 8 * MIB, 8 * MIB, page_bytes=MIB // 16)
    yield made
    made.close()


def everything_after(session: PlannerSession) -> tuple[object, ...]:
    """What a boundary decides: tokens and drafts of steps, then the state after an append.

    The first steps keep the state's parameters and seed, and its grammar; drafts show what MTP
    knew.
    """
    text = run_under(session, 3, None)
    steps = [session.decode(None).result(20) for _ in range(4)]
    steps += [session.decode(SPECULATIVE).result(20) for _ in range(3)]
    drafts = session.lane.call(lambda: session.buffers['drafts'].tensor[:3].tolist()).result(20)
    session.append(SUFFIX).result(20)
    state = state_of(session)
    return (text, [(s.tokens, s.position, s.accepted) for s in steps], drafts,
            {n: t.numpy().tobytes() for n, t in state.items()})


def test_the_boundary_lists_these_buffers_and_each_one_matters_before_the_poison(session):
    assert tuple(b.name for b in session.buffers.state()) == STATE
    lived_in(session)
    state = state_of(session)
    assert all(bool((state[name] != 0).any()) for name in STATE), state


def test_after_poisoning_all_but_constants_a_restore_gives_the_same_tokens(backend, store):
    with bound(backend) as session:
        lived_in(session)
        snapshot(session, store)
        expected = everything_after(session)
        poisoned = poison(session, keep=[store])
        for buffer in session.buffers:
            assert poisoned.covers(buffer.tensor) == (buffer.role.value != 'constant'), buffer.name
        session._mask_is_open = False      # the host's own copy was poisoned too
        session._open.fill_(-1)
        restore(session, store)
        assert everything_after(session) == expected
        poisoned.check_constants()


@pytest.mark.parametrize('name', STATE)
def test_a_boundary_without_any_one_buffer_does_not_pass_that_test(session, store, name):
    lived_in(session)
    short = session.boundary._without_for_tests(name)
    snapshot(session, store, boundary=short)
    expected = everything_after(session)
    for buffer in session.buffers.state():
        session.lane.call(lambda buffer=buffer: buffer.tensor.fill_(1)).result(20)
    try:
        restore(session, store, boundary=short)
        found = everything_after(session)
    except FlashrtError:
        assert name in ('position', 'followed', 'history')
        session.reset().result(20)
        return
    assert found != expected


@pytest.mark.parametrize('options', [GREEDY, DRAWN, SPECULATIVE],
                         ids=['greedy', 'drawn', 'speculative'])
def test_a_snapshot_at_every_token_continues_as_if_nothing_had_happened(session, store, options):
    session.prefill(PROMPT).result(20)
    ids, tokens = [], []
    while len(tokens) < 14:
        ids.append((len(tokens), f'at{session.position}-{len(tokens)}'))
        snapshot(session, store, ids[-1][1])
        tokens += session.decode(options).result(20).tokens
    for given, id in reversed(ids):
        restore(session, store, id)
        again: list[int] = []
        while len(again) < len(tokens) - given:
            again += session.decode(options).result(20).tokens
        assert again == tokens[given:], id


@pytest.mark.parametrize('tier', ['gpu', 'host', 'disk'])
def test_a_restore_is_byte_exact_from_every_tier_and_only_the_suffix_is_appended(
    backend, session, tmp_path: Path, tier
):
    store = CapsuleStore(backend, 8 * MIB, 8 * MIB, 8 * MIB, tmp_path, allow_disk=True)
    lived_in(session)
    snapshot(session, store, tier=tier)
    before = state_of(session)
    done = session.append(SUFFIX).result(20)
    tokens, after = run(session, 5, DRAWN), state_of(session)
    session.prefill(SUFFIX).result(20)
    report = restore(session, store, proof='digest')
    assert report.bit_exact and report.position == session.position
    assert unequal(state_of(session), before) == []
    again = session.append(SUFFIX).result(20)
    assert again.chunks == done.chunks and sum(c.length for c in again.chunks) == 6
    assert run(session, 5, DRAWN) == tokens
    assert unequal(state_of(session), after) == []
    store.close()


def test_a_restore_needs_no_suffix_to_decode_on(session, store):
    session.prefill(PROMPT).result(20)
    snapshot(session, store)
    tokens = run(session, 5)
    restore(session, store)
    assert run(session, 5) == tokens


def test_kv_alone_diverges_at_once_so_no_verb_offers_it(session, store):
    session.prefill(PROMPT).result(20)
    snapshot(session, store)
    expected = state_of(session)
    step = session.decode(GREEDY).result(20), session.decode(GREEDY).result(20)
    after = state_of(session)['hidden']
    short = session.boundary
    for name in STATE:
        if name.startswith(('recurrent', 'conv')):
            short = short._without_for_tests(name)
    session.prefill(SUFFIX).result(20)
    restore(session, store)
    session.prefill(SUFFIX).result(20)
    snapshot(session, store, 'partial', boundary=short)
    restore(session, store)
    assert unequal(state_of(session), expected) == []
    with pytest.raises(CapsuleCorrupt, match='tensors differ'):
        restore(session, store, 'partial')
    with pytest.raises(CapsuleCorrupt, match='tensors differ'):
        restore(session, store, boundary=short)
    assert [session.decode(GREEDY).result(20).tokens for _ in step] == [s.tokens for s in step]
    assert torch.equal(state_of(session)['hidden'], after)


def test_another_model_precision_or_layout_is_refused_and_the_session_goes_on(
    backend, session, store
):
    lived_in(session)
    snapshot(session, store)
    for changes, field in (({'weight_seed': 1}, 'weights'), ({'dtype': 'bfloat16'}, 'dtype'),
                           ({'mtp': False, 'draft_tokens': 0}, 'mtp'), ({'context': 64}, 'kv')):
        with bound(backend, **changes) as other:
            other.prefill(PROMPT).result(20)
            before = state_of(other)
            with pytest.raises(IdentityMismatch, match=field):
                restore(other, store)
            assert unequal(state_of(other), before) == []
            other.append(SUFFIX).result(20)


def test_another_chunk_plan_is_another_numerics_and_more_branches_or_drafts_are_not(
    backend, session, store
):
    lived_in(session)
    snapshot(session, store)
    expected = run(session, 6, DRAWN)
    with bound(backend, prefill_keys=(4, 8)) as other:
        with pytest.raises(IdentityMismatch, match='prefill_keys'):
            restore(other, store)
        assert not restore(other, store, numerics='any').bit_exact
    with bound(backend, branches=0, draft_tokens=0, stop_ids=(1,)) as narrow:
        restore(narrow, store)
        assert run(narrow, 6, DRAWN) == expected


def test_a_mark_takes_the_state_back_and_leaves_kv_where_it_is(session, store):
    session.prefill(PROMPT).result(20)
    session.lane.call(lambda: store.prepare(session.boundary, 4)).result(20)
    marks, tokens = [], []
    for _ in range(4):
        marks.append(session.lane.at_boundary(lambda: store.mark(session.boundary)).result(20))
        tokens += run(session, 2, DRAWN)
    whole = state_of(session)
    report = session.lane.at_boundary(
        lambda: store.rollback(session.boundary, marks[1], proof='digest')).result(20)
    small = session.memory()['capsule_fixed']
    assert report.bytes == small and report.source == 'mark'
    assert (session.position, session.pending) == (marks[1].position, tokens[1])
    assert run(session, 6, DRAWN) == tokens[2:]
    assert unequal(state_of(session), whole) == []
    with pytest.raises(MarkDead, match='undid'):
        session.lane.at_boundary(lambda: store.rollback(session.boundary, marks[2])).result(20)


def test_after_a_rollback_the_host_knows_of_the_state_what_the_device_says(session, store):
    lived_in(session)
    mark = session.lane.at_boundary(lambda: store.mark(session.boundary)).result(20)
    known = (session.position, session.pending, session.mirror.followed)
    assert known[1] is not None and known[2].count == 3
    run(session, 2, DRAWN)
    assert session.mirror.followed.count == 0
    session.lane.at_boundary(lambda: store.rollback(session.boundary, mark)).result(20)
    for read in (lambda: None, session.read_mirror):
        session.lane.call(read).result(20)
        assert (session.position, session.pending, session.mirror.followed) == known


def test_a_mark_dies_when_a_prefill_rewrites_the_kv_below_it(session, store):
    session.prefill(PROMPT).result(20)
    mark = session.lane.at_boundary(lambda: store.mark(session.boundary)).result(20)
    session.prefill(SUFFIX).result(20)
    with pytest.raises(MarkDead, match='rewritten'):
        session.lane.at_boundary(lambda: store.rollback(session.boundary, mark)).result(20)


def test_a_restore_in_the_middle_of_a_prefill_ends_the_rest_of_it(session, store):
    session.prefill(SUFFIX).result(20)
    snapshot(session, store)
    before = state_of(session)
    with_prefill = session.lane.call(lambda: None)
    waiting = session.prefill(PROMPT)
    restore(session, store)
    with_prefill.result(20)
    try:
        waiting.result(20)
    except TickDropped:
        pass
    assert unequal(state_of(session), before) == [] and session.busy == ''
    assert session.position == len(SUFFIX)


def test_a_snapshot_between_two_segments_is_refused(session, store, monkeypatch):
    session.prefill(PROMPT).result(20)
    run(session, 1)
    plan = session._plans['given', 2, True]
    refused = []
    real = plan.segments[1].graph.replay

    def asking(*arguments: object) -> None:
        with pytest.raises(NotAtBoundary, match='segments'):
            store.snapshot(session.boundary, 'inside')
        refused.append(True)
        real(*arguments)

    monkeypatch.setattr(plan.segments[1].graph, 'replay', asking)
    session.decode(GREEDY, drafts=[1, 2]).result(20)
    assert refused == [True] and store.list() == []


def test_snapshots_between_the_chunks_of_a_prefill_are_boundaries_of_their_own(session, store):
    session.prefill(PROMPT[:4]).result(20)
    expected = state_of(session)
    session.prefill(PROMPT).result(20)
    whole = state_of(session)
    done = session.prefill(PROMPT)
    snapshot(session, store)
    done.result(20)
    restore(session, store)
    at = session.position
    assert at in (0, 4, 8, 11) or at == len(PROMPT)
    if at == 4:
        assert unequal(state_of(session), expected) == []
    if at < len(PROMPT):
        session.append(PROMPT[at:]).result(20)
    assert unequal(state_of(session), whole) == []


def test_a_state_under_another_position_than_its_capsule_says_is_refused(session, store):
    session.prefill(PROMPT).result(20)
    session.mirror.position -= 1            # what tags the capsule is stale, planted
    snapshot(session, store)
    with pytest.raises(SessionPoisoned, match='position 11, its capsule 10'):
        restore(session, store)
    with pytest.raises(SessionPoisoned):
        session.decode(GREEDY)
    session.reset().result(20)
    session.prefill(PROMPT).result(20)


def test_a_capsule_is_unchanged_by_what_follows_and_many_restores_change_no_address(
    session, store, stress
):
    lived_in(session)
    snapshot(session, store)
    digest, addresses = store.digest('c0', 'qwen3_5'), session.buffers.addresses()
    expected = run(session, 4, DRAWN)
    for _ in range(stress(200)):
        restore(session, store)
        session.decode(DRAWN).result(20)
    restore(session, store)
    assert run(session, 4, DRAWN) == expected
    assert store.digest('c0', 'qwen3_5') == digest
    assert session.buffers.addresses() == addresses
    session.buffers.check_addresses()


def test_the_size_of_a_capsule_is_the_reported_arithmetic(session, store):
    report = session.memory()
    for prompt in (PROMPT, PROMPT + SUFFIX):
        session.prefill(prompt).result(20)
        snapshot(session, store, f'n{len(prompt)}')
        size = store.get(f'n{len(prompt)}', 'qwen3_5').size_bytes
        mtp_pair = report['capsule_per_token'] // 2
        assert size == report['capsule_fixed'] + len(prompt) * report[
            'capsule_per_token'] - mtp_pair


def test_the_small_config_is_what_the_tests_say(session):
    assert (SMALL.context, session.context, session.vocab) == (96, 96, 48)


def test_a_restore_that_lands_while_an_append_is_being_made_drops_it(session, store, monkeypatch):
    session.prefill(SUFFIX).result(20)
    snapshot(session, store)
    before = state_of(session)
    session.append(PROMPT).result(20)
    run(session, 1)

    def racing(*arguments: object, **more: object) -> object:
        restore(session, store)
        return plan_chunks(*arguments, **more)

    with monkeypatch.context() as patched:
        patched.setattr(appending, 'plan_chunks', racing)
        late = session.append(PROMPT)
    with pytest.raises(TickDropped, match='restored or reset'):
        late.result(20)
    assert unequal(state_of(session), before) == []


def test_any_way_to_a_state_leads_to_the_bits_of_the_straight_one(session, store, stress):
    """Appends, steps with and without drafts, forks, marks, capsules at random; then the same
    tokens again without any of it."""
    draw = random.Random(5)
    boundary = session.boundary
    for _ in range(stress(60)):
        session.prefill(PROMPT).result(20)
        log: list[tuple[str, object]] = []
        held: list[tuple[object, list[tuple[str, object]]]] = []
        session.lane.call(lambda: store.prepare(boundary, 4)).result(20)
        for at in range(12):
            verb = draw.choice(['append', 'decode', 'decode', 'fork', 'mark', 'snapshot', 'back'])
            if session.position > 60:
                break
            if verb == 'append':
                tokens = [draw.randrange(48) for _ in range(draw.randrange(1, 9))]
                session.append(tokens).result(20)
                log.append(('append', tokens))
            elif verb == 'decode':
                step = session.decode(SPECULATIVE if draw.random() < 0.5 else DRAWN).result(20)
                log += [('decode', 7)] * len(step.tokens)
            elif verb == 'fork':
                seeds = [draw.randrange(9) for _ in range(draw.randrange(1, 4))]
                row, steps = draw.randrange(len(seeds)), draw.randrange(1, 4)
                branches = session.fork(seeds)
                for _ in range(steps):
                    branches.step(DRAWN).result(20)
                branches.commit(row).result(20)
                log += [('decode', seeds[row])] * steps
            elif verb == 'mark':
                held.append((session.lane.at_boundary(
                    lambda: store.mark(boundary)).result(20), list(log)))
            elif verb == 'snapshot':
                snapshot(session, store, f'at{at}')
                held.append((f'at{at}', list(log)))
            elif held:
                to, then = draw.choice(held)
                try:
                    session.lane.at_boundary(
                        lambda to=to: store.rollback(boundary, to)).result(20)
                except MarkDead:
                    continue
                log = list(then)
        state = state_of(session)
        session.prefill(PROMPT).result(20)
        for verb, value in log:
            if verb == 'append':
                session.append(value).result(20)
            else:
                options = Options(**{**vars(DRAWN), 'seed': value})
                session.decode(options).result(20)
        assert unequal(state_of(session), state) == [], log
        for info in store.list():
            store.drop(info.id, info.session)
