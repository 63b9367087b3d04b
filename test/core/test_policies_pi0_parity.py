"""Pi0 through its session (buffers, plan, tick) against transformers, float32, to 1e-5."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
import math
from pathlib import Path

from _pi0 import bound
from _pi0 import observation
from _pi0 import SMALL
from _pi0_reference import reference_actions
from _pi0_reference import reference_model
import numpy as np
import pytest
from safetensors.torch import save_file
import torch

from flashrt_core.policies import SubgoalWrite
from flashrt_core.policies.pi0 import Pi0Session
from flashrt_core.runtime import Backend

TOLERANCE = 1e-5
CONFIG = replace(SMALL, flow_steps=10, time_dtype='float32', row_keys=(1, 2))
VIEWS = ('base', 'left_wrist', 'right_wrist')


@pytest.fixture(scope='module')
def reference() -> torch.nn.Module:
    return reference_model(CONFIG)


@pytest.fixture(scope='module')
def weights(reference: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp('pi0') / 'model.safetensors'
    save_file({k: v.contiguous() for k, v in reference.state_dict().items()}, path)
    return path


@pytest.fixture
def session(
    request: pytest.FixtureRequest, backend: Backend, weights: Path
) -> Iterator[Pi0Session]:
    with bound(backend, CONFIG, views=VIEWS[:request.param], weights=str(weights)) as made:
        yield made


def normalised(session: Pi0Session, state: np.ndarray) -> np.ndarray:
    c = session.config
    s = (state - np.float32(c.statistics.state_mean)) / np.float32(c.statistics.state_std)
    return np.pad(s, (0, c.state_width - c.state_dim))


def physical(session: Pi0Session, actions: np.ndarray) -> np.ndarray:
    c = session.config
    std, mean = np.float32(c.statistics.action_std), np.float32(c.statistics.action_mean)
    return actions[..., :c.action_dim] * std + mean


def draw_noise(session: Pi0Session, rows: int) -> np.ndarray:
    c = session.config
    shape = (rows, c.horizon, c.action_width)
    return np.random.default_rng(9).standard_normal(shape).astype(np.float32)


def compare(session: Pi0Session, reference: torch.nn.Module, masked: tuple[str, ...] = (),
            prompt: tuple[int, ...] = (3, 1, 4), subgoal: tuple[int, ...] = (15, 9),
            rows: int = 1) -> None:
    seen = observation(session.config)
    images = {v: None if v in masked else seen.images[v] for v in session.config.views}
    noise = draw_noise(session, rows)
    chunk = session.tick(replace(
        seen, images=images, prompt=prompt, subgoal=SubgoalWrite(1, subgoal), noise=noise,
        rows=rows))
    expected = physical(session, reference_actions(
        reference, session.config, list(images.values()), prompt + subgoal,
        normalised(session, seen.state), noise))
    assert np.abs(expected).max() > 0.5, 'the comparison would say nothing'
    np.testing.assert_allclose(chunk.actions, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize('session', [1, 2, 3], indirect=True)
def test_actions_equal_transformers_for_one_two_and_three_cameras(session, reference):
    compare(session, reference)


@pytest.mark.parametrize('session', [3], indirect=True)
@pytest.mark.parametrize('masked', [VIEWS[:1], VIEWS[1:2], VIEWS[2:], VIEWS[:2], VIEWS[1:]])
def test_actions_equal_transformers_with_masked_cameras(session, reference, masked):
    compare(session, reference, masked)


@pytest.mark.parametrize('session', [2], indirect=True)
@pytest.mark.parametrize('prompt, subgoal', [
    ((), ()), ((7,), ()), ((), (8, 9)), ((1, 2, 3, 4, 5, 6), (7, 8, 9, 10, 11)), ((39,), (38,))])
def test_actions_equal_transformers_with_padded_prompts(session, reference, prompt, subgoal):
    compare(session, reference, prompt=prompt, subgoal=subgoal)


@pytest.mark.parametrize('session', [2], indirect=True)
def test_rows_evaluated_together_equal_transformers(session, reference):
    compare(session, reference, rows=2)


@pytest.mark.parametrize('session', [2], indirect=True)
def test_a_later_tick_equals_transformers_with_the_latched_text(session, reference):
    compare(session, reference)
    seen = observation(session.config, 5)
    noise = draw_noise(session, 1)
    held = session.config.horizon  # executed to its end: nothing of the first chunk is left
    chunk = session.tick(replace(seen, noise=noise, steps_executed=held))
    expected = reference_actions(
        reference, session.config, list(seen.images.values()), (3, 1, 4, 15, 9),
        normalised(session, seen.state), noise)
    np.testing.assert_allclose(chunk.actions, physical(session, expected), rtol=0, atol=TOLERANCE)


def test_float64_time_equals_transformers_computing_time_in_float64(backend, weights, monkeypatch):
    reference = reference_model(CONFIG)
    embed = reference.embed_action_time.sinusoid_embeds
    fraction = torch.linspace(0, 1, CONFIG.expert.width // 2, dtype=torch.float64)
    period = CONFIG.min_period * (CONFIG.max_period / CONFIG.min_period) ** fraction

    def forward(time: torch.Tensor) -> torch.Tensor:
        exact = torch.round(time.double() * CONFIG.flow_steps) / CONFIG.flow_steps
        angle = 2 * math.pi * exact[:, None] / period
        return torch.cat([angle.sin(), angle.cos()], dim=1).float()

    monkeypatch.setattr(embed, 'forward', forward)
    with bound(backend, CONFIG, time_dtype='float64', weights=str(weights)) as session:
        compare(session, reference)


def test_bfloat16_points_the_same_way_as_float32(backend, weights):
    chunks = []
    for dtype in ('float32', 'bfloat16'):
        with bound(backend, CONFIG, dtype=dtype, weights=str(weights)) as session:
            seen = observation(session.config, prompt=(3, 1, 4))
            chunk = session.tick(replace(seen, noise=draw_noise(session, 1)))
            chunks.append(chunk.actions.ravel())
    a, b = chunks
    assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > 0.999
    assert not np.array_equal(a, b)
