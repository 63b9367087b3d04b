"""Fixtures of the whole suite: backends, the stress factor, waiting for a condition."""
from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
import os
from pathlib import Path
import signal
import sys
import time

from hypothesis import settings
import pytest
import torch

from flashrt_core.runtime import Backend
from flashrt_core.runtime import cpu_backend
from flashrt_core.runtime import cuda_backend
from flashrt_core.runtime import Lane

settings.register_profile('suite', deadline=None, derandomize=True)
settings.load_profile('suite')
sys.path.insert(0, str(Path(__file__).parent / 'core'))  # helpers: _poison
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A run in a shell's background ignores Ctrl-C, and what it starts inherits that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

MOST_WORKERS = 12  # each holds torch and its models: 1 to 2 GB


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--stress N``: the factor on full stress counts."""
    parser.addoption('--stress', type=float, default=0.1,
                     help='factor on the full stress counts (default 0.1, 1 = full)')


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Answer ``-n auto``: one more than cores, as ROS tests mostly wait; none for one file."""
    if len(config.args) == 1 and '.py' in config.args[0]:
        return 0
    return min(len(os.sched_getaffinity(0)) + 1, MOST_WORKERS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take long; skip what needs a CUDA device where there is none."""
    long = {item.path for item in items if item.get_closest_marker('slow')}
    items.sort(key=lambda item: item.path not in long)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason='no CUDA device')
    for item in items:
        if item.get_closest_marker('gpu'):
            item.add_marker(skip)


@pytest.fixture(params=['cpu', pytest.param('cuda', marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> Backend:
    """Give each backend in turn; cuda is skipped without a device."""
    return cpu_backend() if request.param == 'cpu' else cuda_backend()


@pytest.fixture
def lane(backend: Backend) -> Iterator[Lane]:
    """Give a running lane, closed after the test."""
    with Lane(backend, 'test') as running:
        yield running


@pytest.fixture
def stress(request: pytest.FixtureRequest) -> Callable[[int], int]:
    """Give a function from the full count of a stress test to the count of this run."""
    factor = float(request.config.getoption('--stress'))
    return lambda full: max(1, round(full * factor))


@pytest.fixture
def wait_until() -> Callable[..., None]:
    """Give a function that waits for a condition, failing after a deadline (20 s)."""
    def wait(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, 'the condition did not come true in time'
            time.sleep(0.001)
    return wait
