"""Normalising: both ways are exact at their marks, refuse what they lack, and clip nothing."""
from __future__ import annotations

from hypothesis import given
from hypothesis import strategies
import numpy as np
import pytest

from flashrt_core.errors import ConfigError
from flashrt_core.policies.normalise import affine
from flashrt_core.policies.normalise import check_statistics
from flashrt_core.policies.normalise import state_bins
from flashrt_core.policies.normalise import Statistics

KNOWN = Statistics(
    state_mean=(0.1, -2.0), state_std=(0.5, 3.0), state_q01=(-0.7, 0.1), state_q99=(0.3, 0.9))


def test_mean_and_deviation_go_to_zero_and_one():
    scale = affine(KNOWN, 'state', 'mean_std', 2)
    values = np.float32([[0.1, -2.0], [0.6, 1.0]])
    np.testing.assert_allclose(scale.normalise(values), [[0, 0], [1, 1]], atol=1e-6)


def test_quantiles_go_to_minus_one_and_one_exactly_so_a_resting_joint_keeps_its_bin():
    scale = affine(KNOWN, 'state', 'quantiles', 2)
    at_edges = np.float32([KNOWN.state_q01, KNOWN.state_q99])
    np.testing.assert_array_equal(scale.normalise(at_edges), [[-1, -1], [1, 1]])
    assert [state_bins(row) for row in scale.normalise(at_edges)] == [[0, 0], [255, 255]]


def test_a_joint_that_never_moved_rests_at_minus_one_however_small_its_span_is():
    low = (1.45, 100.0, -3.0, 0.0)
    known = Statistics(state_q01=low, state_q99=tuple(v + 1e-8 for v in low))
    scale = affine(known, 'state', 'quantiles', 4)
    rest = np.float32(low)
    assert scale.normalise(rest).tolist() == [-1.0] * 4 and state_bins(scale.normalise(rest))
    shift, by = np.float32(scale.shift), np.float32(scale.scale)  # as a policy's tables hold them
    assert ((rest - shift) / by).tolist() == [-1.0] * 4
    np.testing.assert_array_equal(-by + shift, rest)


def test_what_lies_beyond_the_quantiles_is_not_clipped():
    scale = affine(KNOWN, 'state', 'quantiles', 2)
    np.testing.assert_allclose(scale.normalise(np.float32([1.3, -0.7])), [3.0, -3.0], atol=1e-5)
    np.testing.assert_allclose(scale.restore(np.float32([3.0, -3.0])), [1.3, -0.7], atol=1e-5)


@pytest.mark.parametrize('way', ['mean_std', 'quantiles', 'identity'])
@given(strategies.lists(strategies.floats(-100, 100, width=32), min_size=2, max_size=2))
def test_restoring_undoes_normalising(way, values):
    scale = affine(KNOWN, 'state', way, 2)
    back = scale.restore(scale.normalise(np.float32(values)))
    np.testing.assert_allclose(back, values, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize('way', ['mean_std', 'quantiles', 'identity'])
def test_unknown_statistics_are_the_identity(way):
    scale = affine(Statistics(), 'action', way, 3)
    values = np.float32([1.5, -2.0, 7.0])
    np.testing.assert_array_equal(scale.normalise(values), values)


def test_bins_are_those_of_openpi():
    values = np.array([-1.0001, -1.0, -0.9922, -0.9921, 0.0, 0.9921, 0.9922, 1.0, 8.0])
    assert state_bins(values) == [-1, 0, 0, 1, 128, 254, 255, 255, 255]
    assert not Statistics().given and KNOWN.given


@pytest.mark.parametrize('changes, way, message', [
    ({'state_std': (1.0,)}, 'mean_std', r'state_std has 1 values; give 2'),
    ({'state_std': (1.0, 0.0)}, 'mean_std', 'above 0'),
    ({'state_mean': (0.0, float('nan'))}, 'mean_std', 'finite'),
    ({'state_q01': (0.0, 1.0), 'state_q99': (1.0, 1.0)}, 'quantiles', 'above that of state_q01'),
    ({'state_q01': (0.0, 1.0)}, 'quantiles', 'give both'),
    ({'state_mean': (0.0, 1.0)}, 'quantiles', "no state_q01.*'quantiles'"),
    ({}, 'minmax', "'minmax' is unknown"),
    ({'state_std': (1.0, 1e-50)}, 'mean_std', 'above 0'),
    ({'state_std': (1.0, 1e39)}, 'mean_std', 'finite'),
    ({'state_q01': (0.0, 0.0), 'state_q99': (1.0, 1e-50)}, 'quantiles', 'above that of state_q01'),
    ({'state_mean': (0.0, 1.0)}, 'mean_std', "no state_std, which normalisation 'mean_std' needs"),
])
def test_statistics_that_do_not_serve_are_refused_by_name(changes, way, message):
    with pytest.raises(ConfigError, match=message):
        check_statistics(Statistics(**changes), {'state': 2}, way)
