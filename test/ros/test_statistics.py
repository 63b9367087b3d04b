"""Tests of flashrt_ros.statistics."""

import threading
import tracemalloc

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from flashrt_core.errors import ConfigError
from flashrt_ros.statistics import Counters
from flashrt_ros.statistics import Histogram
from flashrt_ros.statistics import Ring

_floats = st.floats(-1e6, 1e6)


def test_an_empty_ring_sums_up_to_zeros():
    summary = Ring(4).summary()
    assert (summary.count, summary.p50, summary.p99, summary.maximum) == (0, 0.0, 0.0, 0.0)


@given(st.lists(_floats, min_size=1, max_size=50), st.integers(1, 20))
def test_percentiles_are_those_of_the_last_samples(values, capacity):
    ring = Ring(capacity)
    for value in values:
        ring.record(value)
    held = np.array(values[-capacity:])
    summary = ring.summary()
    assert summary.count == len(values)
    assert summary.last == values[-1]
    assert summary.maximum == held.max()
    for percent, got in ((50, summary.p50), (99, summary.p99)):
        assert got == np.percentile(held, percent, method='inverted_cdf')


def test_warm_up_samples_are_left_out():
    ring = Ring(8, warm_up=2)
    for value in (1000.0, 900.0, 1.0, 2.0):
        ring.record(value)
    assert ring.summary().maximum == 2.0
    ring.clear()
    ring.record(1000.0)
    assert ring.count == 0


def test_recording_allocates_no_memory_that_stays():
    ring, histogram = Ring(64), Histogram((1.0, 2.0))
    tracemalloc.start()
    try:
        for _ in range(100):
            ring.record(1.5)
            histogram.record(1.5)
        before = tracemalloc.take_snapshot()
        for _ in range(10_000):
            ring.record(1.5)
            histogram.record(1.5)
        grown = tracemalloc.take_snapshot().compare_to(before, 'filename')
    finally:
        tracemalloc.stop()
    assert sum(entry.size_diff for entry in grown if 'statistics' in str(entry.traceback)) < 1024


@pytest.mark.parametrize('edges', [(), (1.0, 1.0), (2.0, 1.0)])
def test_edges_that_do_not_increase_are_refused(edges):
    with pytest.raises(ConfigError, match='strictly increasing'):
        Histogram(edges)


def test_a_value_on_an_edge_belongs_to_the_bucket_above():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 99.0):
        histogram.record(value)
    assert histogram.counts == (1, 2, 2)


def test_counters_of_many_threads_lose_no_count():
    counters = Counters(('a',))
    workers = [
        threading.Thread(target=lambda: [counters.add('a') for _ in range(500)]) for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert counters['a'] == 2000


def test_an_undeclared_counter_is_an_error():
    with pytest.raises(KeyError):
        Counters(('holds',)).add('hodls')


def test_declaring_again_keeps_the_count():
    counters = Counters(('a',))
    counters.add('a', 3)
    counters.declare(('a', 'b'))
    assert counters.snapshot() == {'a': 3, 'b': 0}


@pytest.mark.parametrize('arguments', [{'capacity': 0}, {'warm_up': -1}])
def test_a_ring_of_no_use_is_refused(arguments):
    with pytest.raises(ConfigError):
        Ring(**arguments)
