"""A capsule restored while the tokens behind it are already taken in: the state of one by one."""
from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
import random
import threading
from typing import Any

from _planner import bound
from _planner import DRAWN
from _planner import GREEDY
from _planner import lived_in
from _planner import MIB
from _planner import PROMPT
from _planner import restore
from _planner import run
from _planner import snapshot
from _planner import state_of
from _planner import SUFFIX
from _planner import unequal
from _planner_faults import spoil
import pytest
import torch

from flashrt_core.capsule import Boundary
from flashrt_core.capsule import CapsuleStore
from flashrt_core.capsule import Stages
from flashrt_core.errors import BoundaryIncomplete
from flashrt_core.errors import BranchesEnded
from flashrt_core.errors import CapsuleCorrupt
from flashrt_core.errors import CapsuleError
from flashrt_core.errors import CapsuleNotFound
from flashrt_core.errors import PromptEmpty
from flashrt_core.errors import PromptTooLong
from flashrt_core.errors import SessionPoisoned
from flashrt_core.errors import TickDropped
from flashrt_core.errors import TokenUnknown
from flashrt_core.planners import layout
from flashrt_core.planners.llama import LlamaConfig
from flashrt_core.planners.llama import model as llama
from flashrt_core.planners.qwen3_5 import model as qwen3_5
from flashrt_core.planners.qwen3_5 import NAMED
from flashrt_core.planners.session import PlannerSession
from flashrt_core.runtime import Backend

LONG = tuple(range(20))  # with a token that is pending two chunks
ID = 'c0'
LLAMA = LlamaConfig(width=32, layers=2, heads=2, kv_heads=1, mlp=48, vocab=48, context=96,
                    tied=False)


@pytest.fixture(scope='module', params=['cpu', pytest.param('cuda', marks=pytest.mark.gpu)])
def session(request: pytest.FixtureRequest) -> Iterator[PlannerSession]:
    """Two layers that recur, two that attend."""
    from flashrt_core.runtime import pick_backend
    with bound(pick_backend(request.param), layers=4) as made:
        yield made


@pytest.fixture
def store(session: PlannerSession, tmp_path: Any) -> Iterator[CapsuleStore]:
    """No gpu pages: nothing is promoted."""
    made = CapsuleStore(session.lane.backend, 0, 8 * MIB, 8 * MIB, tmp_path, True,
                        page_bytes=MIB // 16)
    session.reset().result(20)
    yield made
    session.lane.gate = None
    session.reset().result(20)
    assert all(c.leases == 0 for c in made._ledger.all())
    made.close()


class Late:
    """On the cpu: what a restore copies arrives when a body waits for it, and not before."""

    def __init__(self, stages: Stages, monkeypatch: pytest.MonkeyPatch, lost: int = -1) -> None:
        self.stages, self.lost, self.left = stages, lost, []
        monkeypatch.setattr(stages, 'submit', self.submit)
        monkeypatch.setattr(stages, 'wait', self.wait)

    def submit(self, copy: Callable[[int, Any], None], after: Any) -> None:
        self.stages.begun.record(None)
        copy(0, None)
        self.copy, self.left = copy, list(range(1, len(self.stages)))

    def wait(self, stage: int) -> None:
        while stage != self.lost and self.left and self.left[0] <= stage:
            self.copy(self.left.pop(0), None)


def kept(session: PlannerSession, store: CapsuleStore, tier: str = 'host') -> None:
    """Freeze a state where every buffer matters; leave another one behind."""
    lived_in(session)
    snapshot(session, store, ID, tier=tier)
    spoil(session)


def one_by_one(session: PlannerSession, store: CapsuleStore,
               tokens: Any = LONG) -> dict[str, torch.Tensor]:
    """The state after a restore and an append."""
    restore(session, store, ID)
    session.append(tokens).result(20)
    state = state_of(session)
    spoil(session)
    return state


def test_state_arrives_layer_by_layer_with_what_the_host_reads_first():
    for c, model, count in ((NAMED['27b'][0], qwen3_5, 19), (LLAMA, llama, 3)):
        memory = model.state_specs(c)
        state = layout.state_specs(memory, c.width, c.vocab, c.context, c.torch_dtype)
        stages, waits = layout.arrival_order(memory, state)
        names = [name for stage in stages for name in stage]
        assert len(stages) == count and sorted(names) == sorted(spec.name for spec in state)
        assert {'position', 'pending', 'followed', 'hidden'} <= set(stages[0])
        for layer in range(c.layers):
            waited = [stage for at, stage in waits.items() if at <= layer]
            mine = [i for i, stage in enumerate(stages) if stage[-1:] and any(
                name.endswith(f'.{layer}') for name in stage)]
            assert mine == [max(waited)], layer
        largest = max(len(stage) for stage in stages[1:])
        assert largest <= 7  # keys of one layer, states of the three after it


def test_the_stages_of_a_boundary_hold_every_byte_once_and_every_buffer(session):
    session.prefill(PROMPT).result(20)
    boundary = session.boundary
    extents = boundary.extents()
    staged = sorted((p.packed, p.address, p.nbytes) for s in boundary.staged(extents) for p in s)
    whole = [(p.packed, p.address, p.nbytes) for p in boundary.packing(extents).pieces]
    joined: list[tuple[int, int, int]] = []
    for packed, address, nbytes in staged:
        last = joined[-1] if joined else (-1, -1, 0)
        if (last[0] + last[2], last[1] + last[2]) == (packed, address):
            joined[-1] = (last[0], last[1], last[2] + nbytes)
        else:
            joined.append((packed, address, nbytes))
    assert joined == whole
    with pytest.raises(BoundaryIncomplete, match='not listed'):
        Boundary(session.buffers, boundary.identity,
                 stages=Stages(session.lane.backend, boundary.stages.names[1:]))


@pytest.mark.parametrize('tier', ['gpu', 'host', 'disk'])
def test_from_each_tier_the_state_is_that_of_restore_then_append(session, tmp_path, tier):
    backend = session.lane.backend
    store = CapsuleStore(backend, 8 * MIB, 8 * MIB, 8 * MIB, tmp_path, True, page_bytes=MIB // 16)
    kept(session, store, tier)
    if tier == 'disk':
        store.saved(ID, 'qwen3_5').result(20)
    digest = store.digest(ID, 'qwen3_5')
    if tier == 'disk':
        store.move(ID, 'disk', 'qwen3_5')
    first = 'gpu' if tier == 'gpu' else 'host'  # a file is read into host memory by the caller
    for source in (first, 'gpu'):  # it moves up: gpu pages are free
        done = session.restore_and_append(store, ID, LONG).result(20)
        found = state_of(session)
        assert done.restored.source == source
        assert done.restored.overlapped == (source != 'gpu')
        assert done.position == session.position == done.restored.position + 1 + len(LONG)
        assert done.restored.us >= done.restored.copy_us > 0
        assert store.get(ID, 'qwen3_5').tier == 'gpu'
        assert store.digest(ID, 'qwen3_5') == digest
        assert unequal(found, one_by_one(session, store)) == []
    assert store.counters['promoted'] == (tier != 'gpu')
    store.close()


def test_the_tokens_that_follow_are_those_of_restore_then_append(session, store):
    kept(session, store)
    restore(session, store, ID)
    session.append(SUFFIX).result(20)
    expected = run(session, 6, DRAWN)
    spoil(session)
    session.restore_and_append(store, ID, SUFFIX).result(20)
    assert run(session, 6, DRAWN) == expected


def test_each_layer_waits_for_its_own_state_only(session, store, monkeypatch):
    if session.lane.backend.name != 'cpu':
        pytest.skip('a captured graph does not see what is patched later')
    kept(session, store)
    expected = one_by_one(session, store)
    stages = session.boundary.stages
    assert len(stages) == 5
    for lost in range(-1, len(stages)):
        with monkeypatch.context() as patched:
            late = Late(stages, patched, lost)
            session.restore_and_append(store, ID, LONG).result(20)
            different = unequal(state_of(session), expected)
            spoil(session)
        # Without the wait of any one stage another state comes out: the first comes at once.
        assert bool(different) == (lost > 0), (lost, different)
        assert late.left == ([len(stages) - 1] if lost == len(stages) - 1 else [])


@pytest.mark.gpu
def test_a_captured_chunk_waits_for_copies_that_are_late(monkeypatch):
    from flashrt_core.runtime import cuda_backend
    with bound(cuda_backend(), layers=4) as session:
        store = CapsuleStore(session.lane.backend, 0, 8 * MIB, page_bytes=MIB // 16)
        kept(session, store)
        expected = one_by_one(session, store)
        start = store._tiers.mover.start

        def late(ranges: Any, stream: Any) -> None:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(4_000_000)  # 2 ms a stage
            start(ranges, stream)

        monkeypatch.setattr(store._tiers.mover, 'start', late)
        for _ in range(10):
            done = session.restore_and_append(store, ID, LONG).result(20)
            assert unequal(state_of(session), expected) == []
            assert done.restored.copy_us > 5000.0 and done.chunks_us[0] > done.chunks_us[1]
            spoil(session)
        monkeypatch.undo()
        session.restore_and_append(store, ID, LONG).result(20)
        session.append(SUFFIX).result(20)  # waits for nothing: all of long ago
        store.close()


def test_a_llama_waits_layer_by_layer_too(backend: Backend, monkeypatch):
    with bound(backend, LLAMA, family='llama') as session:
        store = CapsuleStore(backend, 0, 8 * MIB, page_bytes=MIB // 16)
        session.prefill(PROMPT).result(20)
        snapshot(session, store, ID, tier='host')
        expected = one_by_one(session, store)
        if backend.name == 'cpu':
            Late(session.boundary.stages, monkeypatch)
        assert session.restore_and_append(store, ID, LONG).result(20).restored.overlapped
        assert unequal(state_of(session), expected) == []
        store.close()


def test_the_restored_state_is_a_mark_of_its_own(session, store):
    boundary = session.boundary
    session.lane.call(lambda: store.prepare(boundary, 2)).result(20)
    kept(session, store)
    restore(session, store, ID)
    expected = state_of(session)
    spoil(session)
    for _ in range(3):  # the ring is reused
        session.restore_and_append(store, ID, LONG).result(20)
        session.lane.at_boundary(lambda: store.mark(boundary)).result(20)
        run(session, 2)
        session.lane.at_boundary(lambda: store.rollback(boundary, boundaries=2)).result(20)
        assert unequal(state_of(session), expected) == []
        assert boundary.parent == ID and session.pending is not None
    boundary.ring = None


def test_what_cannot_be_done_is_refused_before_anything_is_touched(session, store):
    kept(session, store)
    session.prefill(PROMPT).result(20)
    before = state_of(session)
    for error, id, tokens in (
        (CapsuleNotFound, 'other', LONG), (PromptEmpty, ID, ()), (TokenUnknown, ID, (48,)),
        (PromptTooLong, ID, range(1, 48)), (TokenUnknown, ID, (0.5,)),
    ):
        given = tuple(tokens) * (3 if error is PromptTooLong else 1)
        with pytest.raises(error):
            session.restore_and_append(store, id, given)
    assert session.busy == '' and unequal(state_of(session), before) == []
    assert session.boundary.poisoned is None


def behind_a_held_lane(session, store):
    """Give the state, the event that frees the lane, and a restore with append that waits."""
    kept(session, store)
    session.prefill(PROMPT).result(20)
    before, held = state_of(session), threading.Event()
    session.lane.call(held.wait)
    return before, held, session.restore_and_append(store, ID, LONG)


def test_a_capsule_that_goes_before_the_lane_comes_to_it_leaves_the_state(session, store):
    before, held, late = behind_a_held_lane(session, store)
    store.drop(ID, 'qwen3_5')
    held.set()
    with pytest.raises(CapsuleNotFound, match='dropped'):
        late.result(20)
    assert unequal(state_of(session), before) == [] and session.boundary.poisoned is None
    run(session, 1)


def test_a_capsule_that_changes_before_the_lane_comes_to_it_is_restored_without_the_tokens(
    session, store
):
    kept(session, store)
    held = threading.Event()
    session.lane.call(held.wait)
    late = session.restore_and_append(store, ID, LONG)
    store.drop(ID, 'qwen3_5')
    other = session.lane.call(lambda: None)  # not before: the lane is held
    boundary = session.boundary

    def replace() -> None:
        session.make_empty()
        store.snapshot(boundary, ID, tier='host')

    session.lane.at_boundary(replace)
    held.set()
    other.result(20)
    with pytest.raises(CapsuleCorrupt, match='another one'):
        late.result(20)
    assert boundary.poisoned is None and session.position == 0 and session.pending is None
    session.prefill(PROMPT).result(20)


@pytest.mark.parametrize('stage', range(5))
def test_a_copy_that_fails_poisons_the_session_until_a_restore(session, store, stage, monkeypatch):
    kept(session, store)
    expected = one_by_one(session, store)
    start, calls = store._tiers.mover.start, []

    def failing(ranges: Any, stream: Any) -> None:
        calls.append(ranges)
        if len(calls) > stage:
            raise CapsuleError('the driver refused a copy (planted)')
        start(ranges, stream)

    with monkeypatch.context() as patched:
        patched.setattr(store._tiers.mover, 'start', failing)
        late = session.restore_and_append(store, ID, LONG)
        with pytest.raises(SessionPoisoned, match='planted'):
            late.result(20)
    with pytest.raises(SessionPoisoned):
        session.append(SUFFIX)
    with pytest.raises(SessionPoisoned):
        snapshot(session, store, 'x')
    session.restore_and_append(store, ID, LONG).result(20)
    assert unequal(state_of(session), expected) == []


class Held:
    """A lane's gate that keeps the first segment until it is told."""

    def __init__(self) -> None:
        self.reached, self.go = threading.Event(), threading.Event()

    def admit(self, segment: Any) -> None:
        self.reached.set()
        assert self.go.wait(20)

    def done(self, segment: Any) -> None:
        pass


def test_until_all_has_arrived_verbs_wait_and_operations_are_refused(session, store):
    kept(session, store)
    expected = one_by_one(session, store)
    session.lane.gate = held = Held()
    running = session.restore_and_append(store, ID, LONG)
    assert held.reached.wait(20)
    assert 'has not arrived' in session.boundary.poisoned
    assert store._ledger.find('qwen3_5', ID).leases == 1
    with pytest.raises(SessionPoisoned, match='has not arrived'):
        session.append(SUFFIX)
    marked = session.lane.at_boundary(lambda: store.snapshot(session.boundary, 'x', tier='host'))
    store.drop(ID, 'qwen3_5')  # its pages stay until the copies end
    assert store.usage()['host'].used_bytes > 0 and not marked.done()
    held.go.set()
    running.result(20)
    assert session.boundary.poisoned is None
    assert unequal(state_of(session), expected) == []
    assert marked.result(20).position == len(LONG) + 14  # the boundary after the first chunk
    restore(session, store, 'x')
    session.append(LONG[15:]).result(20)
    assert unequal(state_of(session), expected) == []


@pytest.mark.parametrize('verb', ['reset', 'restore', 'cancel'])
def test_what_ends_it_before_its_plan_leaves_a_usable_session(session, store, verb):
    kept(session, store)
    restore(session, store, ID)
    restored = state_of(session)
    spoil(session)
    session.lane.gate = held = Held()
    running = session.restore_and_append(store, ID, LONG)
    assert held.reached.wait(20)
    ending: Any = None
    if verb == 'reset':
        ending = session.reset()
    elif verb == 'restore':
        ending = session.lane.at_segment_end(lambda: store.restore(session.boundary, ID))
    else:
        assert running.cancel()
    held.go.set()
    with pytest.raises(TickDropped):
        running.result(20)
    if ending is not None:
        ending.result(20)
    assert session.boundary.poisoned is None and session.busy == ''
    if verb == 'reset':
        assert session.position == 0
    elif verb == 'restore':
        assert unequal(state_of(session), restored) == []
    else:  # the running plan ended first
        kept_so_far = state_of(session)
        restore(session, store, ID)
        session.append(LONG[:15]).result(20)
        assert unequal(state_of(session), kept_so_far) == []


def test_a_cancel_before_it_starts_leaves_the_state_as_it_was(session, store):
    before, held, waiting = behind_a_held_lane(session, store)
    assert waiting.cancel()
    held.set()
    with pytest.raises(TickDropped, match='cancelled'):
        waiting.result(20)
    assert unequal(state_of(session), before) == []


def test_a_plan_that_fails_leaves_the_restored_state(session, store, monkeypatch):
    if session.lane.backend.name != 'cpu':
        pytest.skip('a captured replay cannot fail half-way without losing its device')
    kept(session, store)
    restore(session, store, ID)
    restored = state_of(session)
    spoil(session)
    with monkeypatch.context() as patched:
        patched.setattr(session.boundary.stages, 'wait', lambda stage: 1 // (stage != 3))
        with pytest.raises(ZeroDivisionError):
            session.restore_and_append(store, ID, LONG).result(20)
    assert session.boundary.poisoned is None
    assert unequal(state_of(session), restored) == []


def test_it_lifts_poison_and_ends_branches(session, store, monkeypatch):
    kept(session, store)
    expected = one_by_one(session, store)
    restore(session, store, ID)
    branches = session.fork([1, 2])
    session.restore_and_append(store, ID, LONG).result(20)
    with pytest.raises(BranchesEnded, match='restored'):
        branches.step(GREEDY)
    assert unequal(state_of(session), expected) == []
    session.boundary.poisoned = 'planted'
    session.restore_and_append(store, ID, LONG).result(20)
    assert unequal(state_of(session), expected) == []


def test_other_threads_of_the_store_never_change_what_comes_out(session, tmp_path, stress):
    """They move, pin, read and drop what is restored and appended to."""
    store = CapsuleStore(session.lane.backend, MIB // 2, MIB // 2, 8 * MIB, tmp_path, True,
                         page_bytes=MIB // 16)
    boundary, name = session.boundary, session.boundary.session
    expected = []
    for i in range(4):
        session.prefill(PROMPT[i:]).result(20)
        session.append(SUFFIX).result(20)
        expected.append(state_of(session))
    stop, failures = threading.Event(), []
    verbs: list[Callable[[str], Any]] = [
        lambda id: store.move(id, 'gpu', name), lambda id: store.move(id, 'host', name),
        lambda id: store.move(id, 'disk', name), lambda id: store.pin(id, True, name),
        lambda id: store.pin(id, False, name), lambda id: store.digest(id, name),
        lambda id: store.drop(id, name)]

    def other(seed: int) -> None:
        draw = random.Random(seed)
        while not stop.is_set():
            try:
                draw.choice(verbs)(f'n{draw.randrange(4)}')
            except CapsuleError:
                pass
            except BaseException as error:
                failures.append(error)
                return

    threads = [threading.Thread(target=other, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    draw, overlapped = random.Random(3), 0
    try:
        for _ in range(stress(150)):
            i = draw.randrange(4)
            try:
                if f'n{i}' not in {info.id for info in store.list()}:
                    session.prefill(PROMPT[i:]).result(20)
                    snapshot(session, store, f'n{i}', tier=draw.choice(['gpu', 'host']))
                done = session.restore_and_append(store, f'n{i}', SUFFIX).result(20)
            except CapsuleError:
                assert boundary.poisoned is None
                continue
            overlapped += done.restored.overlapped
            assert unequal(state_of(session), expected[i]) == [] and not failures
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
    assert not failures and overlapped > 0
    for info in store.list():
        store.pin(info.id, False, name)
        store.drop(info.id, name)
    store.close()
    assert all(store.usage()[tier].used_bytes == 0 for tier in ('gpu', 'host'))
