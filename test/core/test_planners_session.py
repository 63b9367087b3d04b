"""A planner session: operations one at a time, boundaries between chunks, nothing half done."""
from __future__ import annotations

from concurrent.futures import wait
import threading

from _planner import bound
from _planner import DRAWN
from _planner import GREEDY
from _planner import lived_in
from _planner import PROMPT
from _planner import run
from _planner import SETTINGS
from _planner import shared
from _planner import SMALL
from _planner import state_of
from _planner import SUFFIX
from _planner import unequal
import numpy as np
import pytest
import torch

from flashrt_core.errors import ConfigError
from flashrt_core.errors import ContractError
from flashrt_core.errors import LaneBusy
from flashrt_core.errors import LaneClosed
from flashrt_core.errors import LaneError
from flashrt_core.errors import PromptEmpty
from flashrt_core.errors import PromptTooLong
from flashrt_core.errors import TickDropped
from flashrt_core.errors import TokenUnknown
from flashrt_core.planners import layout
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
def eager() -> PlannerSession:
    """A session whose bodies run anew each time, so that a patched function fails inside them."""
    return shared(cpu_backend())


class Hold:
    """Keeps the lane busy until it is let go, so that what is submitted meanwhile waits."""

    def __init__(self, session: PlannerSession) -> None:
        self._gate = threading.Event()
        self._future = session.lane.call(lambda: self._gate.wait(20))

    def __enter__(self) -> None: ...

    def __exit__(self, *exc: object) -> None:
        self._gate.set()
        wait([self._future], 20)


def fail_after(monkeypatch: pytest.MonkeyPatch, name: str, calls: int) -> None:
    """Let ``model.name`` do its work ``calls`` times, then raise when all of it is written."""
    real, left = getattr(model, name), [calls]

    def failing(*arguments: object) -> object:
        value = real(*arguments)
        if left[0] == 0:
            raise RuntimeError('planted')
        left[0] -= 1
        return value

    monkeypatch.setattr(model, name, failing)


# -- what it does -------------------------------------------------------------------------------


def test_prefill_takes_all_tokens_in_by_the_chunk_plan(session):
    done = session.prefill(PROMPT).result(20)
    assert done.position == session.position == session.boundary.position() == len(PROMPT)
    assert [(c.tokens, c.length) for c in done.chunks] == [(4, 4), (4, 4), (4, 3)]
    assert len(done.chunks_us) == 3 and all(us > 0 for us in done.chunks_us)
    assert session.pending is None
    assert session.boundary.extents() == {'kv.1': 11, 'mtp.kv': 10}


def test_prefill_starts_from_the_empty_state_whatever_was_there(session):
    session.prefill(PROMPT).result(20)
    first = state_of(session)
    lived_in(session)
    session.prefill(PROMPT).result(20)
    assert unequal(state_of(session), first) == []


def test_the_first_step_samples_and_later_ones_feed_what_was_given_out(session):
    session.prefill(PROMPT).result(20)
    step = session.decode(GREEDY).result(20)
    assert (step.position, session.position) == (11, 11)
    assert step.tokens == (session.pending,)
    again = session.decode(GREEDY).result(20)
    assert (again.position, session.pending) == (12, again.tokens[0])


def test_append_feeds_the_pending_token_first(session):
    session.prefill(PROMPT).result(20)
    given = run(session, 3)
    done = session.append(SUFFIX).result(20)
    assert done.position == 11 + 3 + len(SUFFIX) and session.pending is None
    other = state_of(session)
    session.prefill(PROMPT).result(20)
    run(session, 3)
    session.lane.call(lambda: session.buffers['pending'].tensor.fill_(-1)).result(20)
    session.mirror.pending = None
    session.append((given[-1], *SUFFIX)).result(20)
    assert unequal(state_of(session), other) == []


def test_equal_cuts_are_bit_equal_and_one_by_one_is_close(session):
    session.prefill(PROMPT).result(20)
    session.append(SUFFIX).result(20)
    state = state_of(session)
    session.prefill(PROMPT).result(20)
    session.append(SUFFIX).result(20)
    assert unequal(state_of(session), state) == []
    session.prefill(PROMPT[:1]).result(20)
    for token in (*PROMPT[1:], *SUFFIX):
        session.append([token]).result(20)
    for name, value in state_of(session).items():
        torch.testing.assert_close(value, state[name], atol=2e-5, rtol=1e-4, msg=name)


def test_the_length_of_a_padded_chunk_is_device_data_and_padding_changes_nothing(session):
    session.prefill(PROMPT[:2]).result(20)
    state = state_of(session)
    tokens = session.buffers['host.tokens'].tensor
    session.lane.call(lambda: tokens.fill_(SMALL.vocab + 7)).result(20)
    session.prefill(PROMPT[:2]).result(20)
    assert unequal(state_of(session), state) == []


def test_options_that_are_not_given_leave_parameters_and_seed_as_they_are(session):
    session.prefill(PROMPT).result(20)
    tokens = run(session, 12, DRAWN)
    session.prefill(PROMPT).result(20)
    assert run(session, 1, DRAWN) + run(session, 11, None) == tokens


def test_a_seed_decides_what_is_drawn(session):
    found = []
    for seed in (7, 8, 7):
        session.prefill(PROMPT).result(20)
        found.append(run(session, 12, Options(temperature=1.3, seed=seed)))
    assert found[0] == found[2] != found[1]


def test_a_mask_leaves_only_what_it_allows(session):
    session.prefill(PROMPT).result(20)
    mask = torch.tensor([0, 1 << (45 - 32)], dtype=torch.int32)
    assert session.decode(GREEDY, mask=mask).result(20).tokens == (45,)
    assert session.decode(GREEDY).result(20).tokens != (45,)


def test_reset_makes_the_state_of_a_fresh_session(session):
    fresh = state_of(session)
    lived_in(session)
    session.reset().result(20)
    assert session.position == 0 and session.pending is None
    assert unequal(state_of(session), fresh) == []


def test_no_address_changes_and_no_constant_is_written(session):
    addresses = session.buffers.addresses()
    constants = {b.name: b.tensor.clone() for b in session.buffers.by_role(Role.CONSTANT)}
    lived_in(session)
    run(session, 5, Options(draft_tokens=2))
    assert session.buffers.addresses() == addresses
    assert all(torch.equal(b.tensor, constants[b.name])
               for b in session.buffers.by_role(Role.CONSTANT))


def test_the_memory_report_adds_up_to_the_printed_arithmetic(session):
    report, c, s = session.memory(), SMALL, SETTINGS
    token = 2 * c.kv_heads * c.head_dim * 4
    assert report['capsule_per_token'] == 2 * token                    # one layer and MTP
    recurrent = c.value_heads * c.key_dim * c.value_dim * 4
    conv, hidden, counts = 3 * c.channels * 4, c.width * 4, c.vocab * 4
    followed, history = 9 * 8, (c.context + 1) * 4
    small = [recurrent, conv, hidden, counts, 8, 8, 8, 24, 8, 8, followed, history]
    assert report['capsule_fixed'] == sum(-(-n // 256) * 256 for n in small)
    assert report['state'] == report['capsule_fixed'] + c.context * 2 * token
    assert report['undo'] == report['capsule_fixed']
    tails = s.tail_tokens * (token + hidden + 4) + 4
    assert report['branches'] == s.branches * (report['capsule_fixed'] + tails)
    assert report['total'] == sum(report[k] for k in (
        'weights', 'state', 'other_buffers', 'undo', 'branches'))


# -- what it refuses ----------------------------------------------------------------------------


def test_a_prompt_beyond_the_context_is_refused_before_anything_runs(session):
    session.prefill(PROMPT).result(20)
    state = state_of(session)
    with pytest.raises(PromptTooLong, match='96'):
        session.append([1] * 86)
    with pytest.raises(PromptTooLong, match='at most 96'):
        session.prefill([1] * 97)
    assert unequal(state_of(session), state) == []
    session.append([1] * 85).result(20)
    with pytest.raises(PromptTooLong, match='full'):
        session.decode(GREEDY)


def test_decoding_ends_exactly_where_the_context_does(session):
    session.prefill([1] * 92).result(20)
    tokens = run(session, 4)
    assert session.position == 95 and len(tokens) == 4
    with pytest.raises(PromptTooLong, match='full'):
        session.decode(GREEDY)
    session.prefill([1] * 92).result(20)
    assert run(session, 4, Options(draft_tokens=4)) == tokens
    with pytest.raises(PromptTooLong, match='full'):
        session.decode(Options(draft_tokens=4))


def test_an_empty_append_is_refused_with_the_remedy(session):
    session.prefill(PROMPT).result(20)
    with pytest.raises(PromptEmpty, match='decode'):
        session.append([])
    session.reset().result(20)
    with pytest.raises(PromptEmpty, match='prefill'):
        session.decode(GREEDY)


@pytest.mark.parametrize('tokens', [[48], [-1], [1.5], 'abc', [[1, 2]], [None],
                                    np.array([2**40])])
def test_what_is_no_token_is_refused_by_name(session, tokens):
    with pytest.raises(TokenUnknown, match='token'):
        session.prefill(tokens)


def test_drafts_beyond_those_captured_or_without_a_head_are_refused(backend, session):
    session.prefill(PROMPT).result(20)
    with pytest.raises(ConfigError, match='draft_tokens 4'):
        session.decode(Options(draft_tokens=5))
    with bound(backend, mtp=False, draft_tokens=2) as plain:
        plain.prefill(PROMPT).result(20)
        with pytest.raises(ConfigError, match='no MTP'):
            plain.decode(Options(draft_tokens=2))
        plain.decode(GREEDY).result(20)
        plain.decode(GREEDY, drafts=[1, 2]).result(20)


def test_a_mask_that_allows_nothing_is_refused(session):
    session.prefill(PROMPT).result(20)
    with pytest.raises(ConfigError, match='mask'):
        session.decode(GREEDY, mask=torch.zeros(2, dtype=torch.int32))


def test_one_operation_at_a_time_the_second_is_told_which_runs(session):
    with Hold(session):
        first = session.prefill(PROMPT)
        with pytest.raises(LaneBusy, match='prefill'):
            session.append(SUFFIX)
        with pytest.raises(LaneBusy, match='prefill'):
            session.fork([1])
    first.result(20)
    session.append(SUFFIX).result(20)


def test_waiting_on_the_lane_thread_is_refused_instead_of_hanging(session):
    session.prefill(PROMPT).result(20)
    with pytest.raises(LaneError, match='itself'):
        session.lane.call(lambda: session.fork([1]) and None).result(20)


def test_a_closed_session_says_so(backend):
    with bound(backend) as session:
        pass
    with pytest.raises(LaneClosed):
        session.prefill(PROMPT)
    assert session.busy == ''


@pytest.mark.parametrize('changes', [
    {'draft_tokens': -1}, {'branches': 1.5}, {'tail_tokens': 0}, {'stop_ids': (48,)},
    {'stop_ids': tuple(range(17))}, {'prefill_keys': (128,)}, {'known_tokens': -2}])
def test_settings_out_of_range_are_refused_before_anything_is_allocated(backend, changes):
    with pytest.raises(ConfigError):
        with bound(backend, **changes):
            pass


# -- what does not end well ---------------------------------------------------------------------


def test_an_operation_cancelled_before_it_began_changes_nothing(session):
    session.prefill(PROMPT).result(20)
    state = state_of(session)
    with Hold(session):
        waiting = session.append(SUFFIX)
        assert waiting.cancel()
    with pytest.raises(TickDropped, match='after 0 of 2 plans'):
        waiting.result(20)
    assert session.busy == '' and unequal(state_of(session), state) == []


def test_a_cancelled_append_leaves_whole_chunks(eager, monkeypatch):
    eager.prefill(PROMPT[:4]).result(20)
    eager.append(PROMPT[4:8]).result(20)
    two = state_of(eager)
    real = model.chunk
    operation = []

    def cancelling(*arguments: object) -> object:
        if int(arguments[3]) == 4:  # within the second chunk
            assert operation[0].cancel()
        return real(*arguments)

    with Hold(eager):
        operation.append(eager.prefill(PROMPT))
        monkeypatch.setattr(model, 'chunk', cancelling)
    with pytest.raises(TickDropped, match='after 2 of 3 plans'):
        operation[0].result(20)
    assert eager.position == 8
    assert unequal(state_of(eager), two) == []
    assert not operation[0].cancel()


def test_an_exception_in_the_middle_of_a_prefill_keeps_the_last_chunk(eager, monkeypatch):
    eager.prefill(PROMPT[:4]).result(20)
    one = state_of(eager)
    with monkeypatch.context() as patched:
        fail_after(patched, 'chunk', 1)
        with pytest.raises(RuntimeError, match='planted'):
            eager.prefill(PROMPT).result(20)
    assert eager.position == 4 and eager.lane.committed
    assert unequal(state_of(eager), one) == []
    eager.append(PROMPT[4:8]).result(20)
    eager.append(PROMPT[8:]).result(20)
    whole = state_of(eager)
    eager.prefill(PROMPT).result(20)
    assert unequal(state_of(eager), whole) == []


@pytest.mark.parametrize(('name', 'options'), [
    ('rows', GREEDY), ('head', DRAWN), ('mtp_note', DRAWN),
    ('rows', Options(draft_tokens=3)), ('head', Options(draft_tokens=3)),
    ('mtp_draft', Options(draft_tokens=2))])
def test_an_exception_in_the_middle_of_a_step_leaves_the_boundary_before_it(
    eager, monkeypatch, name, options
):
    lived_in(eager)
    before, position, pending = state_of(eager), eager.position, eager.pending
    with monkeypatch.context() as patched:
        fail_after(patched, name, 0)
        with pytest.raises(RuntimeError, match='planted'):
            eager.decode(options).result(20)
    assert (eager.position, eager.pending) == (position, pending)
    assert eager.lane.committed and unequal(state_of(eager), before) == []
    tokens = run(eager, 6, options)
    lived_in(eager)
    assert run(eager, 6, options) == tokens


def test_logits_without_a_number_give_no_token_and_say_where(eager, monkeypatch):
    eager.prefill(PROMPT).result(20)
    real = model.head
    with monkeypatch.context() as patched:
        patched.setattr(model, 'head', lambda *a: real(*a) * float('nan'))
        with pytest.raises(ContractError, match='position 11'):
            eager.decode(GREEDY).result(20)
    assert eager.pending is None
    eager.decode(GREEDY).result(20)


def test_a_reset_drops_what_waits_and_ends_what_was_begun(session):
    session.prefill(PROMPT).result(20)
    with Hold(session):
        waiting = session.append(SUFFIX)
        reset = session.reset()
    reset.result(20)
    with pytest.raises(TickDropped):
        waiting.result(20)
    assert session.position == 0
    session.prefill(PROMPT).result(20)


def test_a_device_at_another_position_than_the_host_is_told_at_once(session):
    session.prefill(PROMPT).result(20)
    session.mirror.position += 1        # a stale mirror, planted
    with pytest.raises(ContractError, match='device is at position'):
        session.append(SUFFIX).result(20)
    session.prefill(PROMPT).result(20)


def test_closing_in_the_middle_of_a_prefill_ends_its_future(backend):
    with bound(backend) as session, Hold(session):
        waiting = session.prefill(PROMPT)
        closing = threading.Thread(target=session.close)
        closing.start()
    with pytest.raises(LaneClosed):
        waiting.result(20)
    closing.join(20)
    assert session.busy == ''


def test_what_speculation_stores_ahead_lies_beyond_every_extent(session):
    session.prefill(PROMPT).result(20)
    run(session, 3)
    before = state_of(session)
    control = session.buffers['host.control'].tensor
    plan = session._plans['draft', 3, True].segments[0]
    session.lane.call(lambda: (control.__setitem__(layout.LIMIT, 1),
                               plan.graph.replay(plan.key, session.lane))).result(20)
    assert unequal(state_of(session), before) == []
