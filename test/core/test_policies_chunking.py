"""The chunk modes as pure functions, against plain loops written from their formulas."""
from __future__ import annotations

import math
from pathlib import Path
import sys

import numpy as np
import pytest
import torch

from flashrt_core.policies import chunking

sys.path.insert(0, str(Path(__file__).parents[1] / 'goldens'))

import rtc_recipe

H, A = 12, 3


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def where(start: int, valid: bool = True, rows: int = 1) -> chunking.Overlap:
    return chunking.overlap(torch.full((rows,), start), torch.tensor([valid] * rows), H)


# -- blend ----------------------------------------------------------------------------------------


@pytest.mark.parametrize('start', [-3, 0, 4, H - 1, H, 40])
def test_an_overlap_holds_exactly_the_steps_that_the_previous_chunk_has(start):
    found = where(start)
    assert found.held[0].tolist() == [0 <= start + i < H for i in range(H)]
    assert not where(start, valid=False).held.any()
    taken = found.take(draw(1, H, A))
    for i in range(H):
        if 0 <= start + i < H:
            assert torch.equal(taken[0, i], draw(1, H, A)[0, start + i])


# -- ensemble -------------------------------------------------------------------------------------


def test_the_ensemble_is_the_weighted_mean_over_all_chunks_that_cover_a_step():
    random, decay = np.random.default_rng(3), 0.3
    mean, counts = torch.zeros(1, H, A), torch.zeros(1, H, dtype=torch.int64)
    chunks: list[tuple[int, np.ndarray]] = []
    at, moved = 0, 0
    for tick in range(8):
        moved = int(random.integers(1, 5)) if tick else 0
        at += moved
        fresh = draw(1, H, A, seed=tick)
        chunks.append((at, fresh[0].double().numpy()))
        mean, counts = chunking.ensemble(fresh, mean, counts, where(moved, tick > 0), decay)
        for i in range(H):
            cover = [c[at + i - s] for s, c in chunks if 0 <= at + i - s < H]
            weights = np.exp(-decay * np.arange(len(cover)))
            expected = (np.stack(cover) * weights[:, None]).sum(0) / weights.sum()
            np.testing.assert_allclose(mean[0, i].numpy(), expected, atol=1e-6)
            assert int(counts[0, i]) == len(cover)


@pytest.mark.parametrize('decay', [0.0, 0.01, -0.2, 1e-320])
def test_the_ensemble_of_equal_chunks_is_that_chunk(decay):
    chunk = draw(1, H, A)[:, :1].expand(1, H, A).contiguous()
    mean, counts = torch.zeros(1, H, A), torch.zeros(1, H, dtype=torch.int64)
    for tick in range(40):
        mean, counts = chunking.ensemble(chunk, mean, counts, where(1 if tick else 0, tick > 0),
                                         decay)
    torch.testing.assert_close(mean, chunk, atol=1e-6, rtol=0)
    assert int(counts.max()) == H


def test_a_mean_that_is_not_finite_is_left_behind():
    mean = draw(1, H, A)
    mean[0, 3, 1] = float('nan')
    out, counts = chunking.ensemble(draw(1, H, A, seed=1), mean, torch.ones(1, H).long(),
                                    where(0), 0.01)
    assert out.isfinite().all() and int(counts[0, 3]) == 1 and int(counts[0, 2]) == 2


# -- real-time chunking ---------------------------------------------------------------------------


def schedule_by_loop(schedule: str, delay: int, end: int) -> list[float]:
    """As the paper writes it, step by step."""
    start, found = min(delay, end), []
    for i in range(H):
        if i >= end:
            found.append(0.0)
        elif i < start:
            found.append(1.0)
        else:
            c = (end - i) / (end - start + 1)
            found.append({'zeros': 0.0, 'ones': 1.0, 'linear': c,
                          'exp': c * (math.exp(c) - 1) / (math.e - 1)}[schedule])
    return found


@pytest.mark.parametrize('schedule', chunking.SCHEDULES)
@pytest.mark.parametrize('delay, end', [(0, 5), (3, 8), (5, 5), (7, 4), (0, 0), (2, H), (H, H)])
def test_prefix_weights_follow_their_schedule_for_every_delay_and_end(schedule, delay, end):
    found = chunking.prefix_weights(schedule, torch.tensor([delay]), torch.tensor([end]), H)
    np.testing.assert_allclose(found[0].numpy(), schedule_by_loop(schedule, delay, end), atol=1e-6)


def test_the_guidance_weight_is_that_of_the_paper_clipped():
    for step in range(1, 10):
        tau = step / 10
        paper = (1 - tau) / tau * ((1 - tau) ** 2 + tau**2) / (1 - tau) ** 2
        assert chunking.guidance_weight(step, 10, 1e9) == pytest.approx(paper, rel=1e-12)
        assert chunking.guidance_weight(step, 10, 2.0) == pytest.approx(min(2.0, paper), rel=1e-12)
    assert chunking.guidance_weight(0, 10, 7.0) == 7.0


def test_guiding_a_flow_equals_the_formula_in_float64():
    x, v, left = (draw(2, H, A, seed=s).double().numpy() for s in (1, 2, 3))
    prefix = np.array(schedule_by_loop('linear', 2, 9))[None, :, None]
    expected = v - 1.7 * prefix * (left - (x - 0.6 * v))
    found = chunking.guided(*(torch.from_numpy(a).float() for a in (v, x)), 0.6, 1.7,
                            torch.from_numpy(prefix).float(), torch.from_numpy(left).float())
    np.testing.assert_allclose(found.numpy(), expected, atol=2e-6)
    assert np.array_equal(found.numpy()[:, 9:], v.astype(np.float32)[:, 9:])


def test_a_strong_guide_ends_the_flow_at_the_left_over():
    x, left = draw(1, H, A, seed=4), draw(1, H, A, seed=5)
    prefix = torch.tensor(schedule_by_loop('zeros', 4, 8))[None, :, None]
    for step in range(10):
        v = 0.3 * x  # any flow
        weight = chunking.guidance_weight(step, 10, 10.0)
        x = x - chunking.guided(v, x, 1 - step / 10, weight, prefix, left) / 10
    assert (x - left).abs()[0, :4].max() < 0.1 < (x - left).abs()[0, 4:].max()


@pytest.mark.parametrize('case', rtc_recipe.CASES, ids=lambda case: case.name)
def test_a_guided_flow_ends_where_lerobots_does(case):
    left = torch.zeros(1, rtc_recipe.HORIZON, rtc_recipe.WIDTH)
    left[0, :case.left] = rtc_recipe.left_over(case)
    prefix = chunking.prefix_weights(
        case.schedule, torch.tensor([case.delay]), torch.tensor([min(case.steps, case.left)]),
        rtc_recipe.HORIZON)[..., None]
    x, steps = rtc_recipe.noise()[None], rtc_recipe.FLOW_STEPS
    for step in range(steps):
        weight = chunking.guidance_weight(step, steps, case.limit)
        v = rtc_recipe.velocity(x)
        x = x - chunking.guided(v, x, 1 - step / steps, weight, prefix, left) / steps
    with np.load(rtc_recipe.ARRAYS) as arrays:
        np.testing.assert_allclose(x[0].numpy(), arrays[case.name], atol=1e-5)


def test_reanchored_actions_are_the_same_targets_seen_from_other_joints():
    raw, then, now = draw(1, H, A + 2), draw(1, A, seed=1), draw(A, seed=2)
    relative, std = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0.5, 2.0, 0.1])
    moved = chunking.reanchored(raw, then, now, relative, std)
    target = raw[..., :A] * std + relative * then
    again = moved[..., :A] * std + relative * now
    torch.testing.assert_close(again, target, atol=1e-5, rtol=0)
    assert torch.equal(moved[..., A:], raw[..., A:])
    assert torch.equal(chunking.reanchored(raw, then, then[0], relative, std), raw)
