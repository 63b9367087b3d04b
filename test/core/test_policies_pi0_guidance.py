"""Classifier-free guidance: two prefixes in one replay, its strength read from a buffer."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
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
from flashrt_core.policies import Modality
from flashrt_core.policies import SubgoalWrite
from flashrt_core.policies import TickInput
from flashrt_core.policies.pi0 import fast
from flashrt_core.policies.pi0 import model
from flashrt_core.policies.pi0 import Pi0Config
from flashrt_core.policies.pi0 import Pi0Session
from flashrt_core.policies.pi0 import pi05
from flashrt_core.policies.pi0 import pi05_fast
from flashrt_core.policies.pi0.config import NAMED
from flashrt_core.policies.pi0.config import PI05_TINY
from flashrt_core.policies.pi0.graphs import forward_of
from flashrt_core.policies.pi0.modulation import MODULATION
from flashrt_core.runtime import Backend
from flashrt_core.runtime import cuda_backend
from flashrt_core.runtime import Role

SMALL_05 = replace(PI05_TINY, vision=SMALL.vision, horizon=8, flow_steps=4, blend_steps=3)
CONFIGS = {'pi0': SMALL, 'pi05': SMALL_05}
TOLD = {'prompt': (3, 1, 4, 1, 5), 'subgoal': SubgoalWrite(7, (9, 2, 6))}


@pytest.fixture
def session(backend: Backend) -> Iterator[Pi0Session]:
    with bound(backend, guidance=True, best_of_keys=(4,)) as made:
        yield made


def quiet(c: Pi0Config, rows: int = 1) -> np.ndarray:
    shape = (rows, c.horizon, c.action_width)
    return np.random.default_rng(5).standard_normal(shape).astype(np.float32)


def plain(session: Pi0Session, seen: TickInput, strength: float) -> np.ndarray:
    """Two float32 passes in plain torch at each flow step, one of them without the task."""
    c = replace(session.config, dtype='float32')
    w = {b.name: b.tensor.cpu().float() if b.dtype.is_floating_point else b.tensor.cpu()
         for b in session.buffers.by_role(Role.CONSTANT)}
    images = torch.from_numpy(np.stack([seen.images[v] for v in c.views]))
    tokens = model.encode_views(images, w, c)
    prompt, subgoal = list(seen.prompt), list(seen.subgoal.tokens)
    if c.modulated:
        state = session.state_text.tokens(seen.state)
        room = c.text_tokens - c.state_tokens
        parts = [(subgoal, room, True), (state, c.state_tokens, False)]
    else:
        parts = [(prompt, c.prompt_tokens, True), (subgoal, c.subgoal_tokens, True)]
    text, said, free = [], [], []
    for ids, size, task in parts:
        gap = size - len(ids)
        text += ids + [0] * gap
        said += [True] * len(ids) + [False] * gap
        free += [not task] * len(ids) + [False] * gap
    kvs = []
    for valid in (said, free):
        mask = torch.tensor([True] * c.image_tokens + valid)
        kv = torch.zeros(c.prefix.layers, c.prefix_tokens, 2, c.prefix.kv_heads, c.prefix.head_dim)
        model.encode_prefix(tokens, torch.tensor(text), mask, kv, w, c)
        kvs.append((kv, mask))
    state = (torch.from_numpy(seen.state) - w['table.state_mean']) / w['table.state_std']
    state = torch.nn.functional.pad(state, (0, c.state_width - c.state_dim))
    x = torch.from_numpy(seen.noise)
    for step in range(c.flow_steps):
        task, other = (_velocity(c, w, x, step, state, *kv) for kv in kvs)
        x = x - (other + strength * (task - other)) / c.flow_steps
    actions = x[..., :c.action_dim] * w['table.action_std'] + w['table.action_mean']
    own = torch.from_numpy(np.pad(seen.state, (0, max(0, c.action_dim - c.state_dim))))
    return (actions + own[:c.action_dim] * w['table.relative']).numpy()


def _velocity(c: Pi0Config, w: Any, x: torch.Tensor, step: int, state: torch.Tensor,
              kv: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    S = c.suffix_tokens
    cos, sin = model.rope_tables(mask.sum() + torch.arange(S), w['table.rope'])
    sees = torch.ones(S, S, dtype=torch.bool)
    if c.modulated:
        return pi05.velocity(x, w[MODULATION][step], kv, mask, sees, cos, sin, w, c)
    sees[0, 1:] = False
    token = torch.nn.functional.linear(state, w['state_in.weight'], w['state_in.bias'])
    token = token.expand(len(x), 1, -1)
    return model.velocity(x, w['table.time'][step], token, kv, mask, sees, cos, sin, w, c)


def tolerance(strength):
    """g and |1 - g| times the errors of the two velocities come into the guided one."""
    return 1e-5 * (strength + abs(1.0 - strength))


@pytest.mark.parametrize('family', CONFIGS)
@pytest.mark.parametrize('strength', [0.0, 0.5, 1.0, 2.5])
def test_guided_actions_are_those_of_two_plain_forward_passes(backend, family, strength):
    c = CONFIGS[family]
    with bound(backend, c, guidance=True) as session:
        seen = observation(c, noise=quiet(c), guidance=strength, **TOLD)
        actions = session.tick(seen).actions
        expected = plain(session, seen, strength)
        np.testing.assert_allclose(actions, expected, atol=tolerance(strength))
        if strength != 1.0:
            assert not np.allclose(expected, plain(session, seen, 1.0), atol=1e-4)


@pytest.mark.parametrize('mode', ['blend', 'ensemble', 'rtc', 'sync'])
def test_at_one_the_actions_are_those_of_a_session_without_guidance(backend, mode):
    changes = {'chunk_mode': mode, 'relative': (0,)}
    with bound(backend, guidance=True, **changes) as guided, bound(backend, **changes) as free:
        for at in range(3):
            seen = observation(draw=at, steps_executed=1, delay_steps=1, **(TOLD if at else {}))
            a = guided.tick(replace(seen, guidance=1.0 if at else None)).actions
            b = free.tick(seen).actions
            if backend.name == 'cpu':
                assert same_bits(a, b)
            else:  # the products have twice the rows there: another order of float32 sums
                np.testing.assert_allclose(a, b, atol=1e-5)


def test_real_time_chunking_corrects_the_guided_velocity(backend):
    """Fully held to the left-over, the steps are its own whatever the guidance."""
    changes = {'chunk_mode': 'rtc', 'rtc_schedule': 'ones', 'rtc_steps': SMALL.horizon,
               'flow_steps': 10, 'guidance': True}
    with bound(backend, **changes) as session:
        first = session.tick(observation(guidance=4.0, **TOLD)).actions[0]
        second = session.tick(observation(draw=1, steps_executed=2)).actions[0]
        free = session.tick(observation(draw=1, steps_executed=SMALL.horizon)).actions[0]
    held = SMALL.horizon - 2
    near = np.abs(second[:held] - first[2:]).max()
    assert near < 0.2 * np.abs(free[:held] - first[2:]).max()


def test_the_strength_is_latched_like_a_prompt_and_captures_nothing(session):
    values = [float(state_of(session)['guidance'])]
    for given in (None, 2.0, None, 0.0, None):
        chunk = session.tick(observation(guidance=given))
        values.append(float(state_of(session)['guidance']))
    assert values == [1.0, 1.0, 2.0, 2.0, 0.0, 0.0]
    assert session.lane.sealed and list(chunk.segments_us) == ['vision', 'prefix', 'denoise']


def test_it_is_in_the_boundary(backend, session):
    lived_in(session)
    store = CapsuleStore(backend, 1 << 23, 1 << 23)
    try:
        session.tick(observation(draw=3, guidance=3.0, **TOLD))
        session.lane.at_boundary(lambda: store.snapshot(session.boundary, 'c')).result()
        short = session.boundary._without_for_tests('guidance')
        session.lane.at_boundary(lambda: store.snapshot(short, 'short')).result()
        following = session.tick(observation(draw=4, steps_executed=1)).actions
        for name, boundary, same in (('c', session.boundary, True), ('short', short, False)):
            poison(session, keep=[store])
            session.lane.at_boundary(lambda b=boundary, n=name: store.restore(b, n)).result()
            again = session.tick(observation(draw=4, steps_executed=1)).actions
            assert same_bits(again, following) == same, name
    finally:
        store.close()


def test_every_row_and_every_candidate_is_guided(session):
    noise = quiet(SMALL, 4)
    seen = observation(noise=noise, guidance=2.5, **TOLD)
    rows = session.tick(replace(seen, rows=4)).actions
    expected = np.concatenate([plain(session, replace(seen, noise=n[None]), 2.5) for n in noise])
    np.testing.assert_allclose(rows, expected, atol=tolerance(2.5))
    chosen = session.tick(replace(seen, best_of=4, steps_executed=SMALL.horizon))
    np.testing.assert_allclose(chosen.candidates.actions, expected, atol=tolerance(2.5))


def test_without_a_task_there_is_nothing_to_strengthen(session):
    seen = observation(noise=quiet(SMALL))
    a = session.tick(replace(seen, guidance=5.0)).actions
    b = session.tick(replace(seen, guidance=1.0, steps_executed=SMALL.horizon)).actions
    np.testing.assert_allclose(a, b, atol=1e-6)


def test_reuse_of_vision_serves_both_prefixes(backend):
    from test_policies_pi0_reuse import shot

    with bound(backend, guidance=True, reuse_vision=True) as session, bound(
            backend, guidance=True, reuse_vision=True) as other:
        for top in (1, 1, 2):
            seen = shot(top, 1, guidance=2.0, **TOLD)
            assert same_bits(
                session.tick(seen).actions, other.tick(replace(seen, frames={})).actions)
        assert equal_states(state_of(session), state_of(other))


def test_a_session_bound_without_it_has_no_port_and_refuses_it(backend, session):
    with bound(backend) as free:
        assert not [p for p in free.ports if p.modality is Modality.GUIDANCE]
        with pytest.raises(ConfigError, match=r'guidance is 2\.0.*guidance: true'):
            free.submit(observation(guidance=2.0))
    (port,) = [p for p in session.ports if p.modality is Modality.GUIDANCE]
    assert (port.name, port.shape, port.dtype) == ('guidance', (), 'float32')


@pytest.mark.parametrize('value', [-0.5, 101.0, float('nan'), float('inf'), '2', True])
def test_a_strength_out_of_range_is_refused_by_value(session, value):
    before = state_of(session)
    with pytest.raises(ConfigError, match='guidance is'):
        session.submit(observation(guidance=value))
    assert equal_states(before, state_of(session))


def check_at_real_width(backend: Backend, family: str) -> ModuleType:
    """Two layers of the published widths in bfloat16; return the forward pass that ran."""
    size = NAMED[family]
    c = replace(
        size, views=('a',), vocab=1000, rows=1, guidance=True, blend_steps=0,
        vision=replace(size.vision, layers=1), prefix=replace(size.prefix, layers=2),
        expert=replace(size.expert, layers=2), state_dim=4, action_dim=4)
    with bound(backend, c) as session:
        seen = observation(c, noise=quiet(c), **TOLD)
        # An error of a velocity comes out up to 3 times as large at 2, its square 9 times.
        for strength, least in ((1.0, 0.999), (2.0, 0.991)):
            given = replace(seen, guidance=strength, steps_executed=c.horizon)
            a, b = session.tick(given).actions, plain(session, given, strength)
            a, b = ((x - seen.noise[..., :4]).astype(np.float64).ravel() for x in (a, b))
            assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > least
        return forward_of(c, backend.device)


@pytest.mark.gpu
@pytest.mark.parametrize('family, forward', [('pi0', fast), ('pi05', pi05_fast)])
def test_the_kernels_serve_two_prefixes_at_real_width(family, forward):
    assert check_at_real_width(cuda_backend(), family) is forward
