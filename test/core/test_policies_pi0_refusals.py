"""What a Pi0 session refuses, and that a refusal changes nothing."""
from __future__ import annotations

from collections.abc import Iterator
import threading
from typing import Any

from _pi0 import bound
from _pi0 import equal_states
from _pi0 import observation
from _pi0 import state_of
import numpy as np
import pytest

from flashrt_core import errors
from flashrt_core.policies import SubgoalWrite
from flashrt_core.policies.pi0 import Pi0Session
from flashrt_core.runtime import Backend
from flashrt_core.runtime import cpu_backend


@pytest.fixture
def session(backend: Backend) -> Iterator[Pi0Session]:
    with bound(backend) as made:
        yield made


def image(size: int = 28, dtype: Any = np.uint8) -> np.ndarray:
    return np.zeros((size, size, 3), dtype)


REFUSED: list[tuple[dict[str, Any], type[errors.FlashrtError], str]] = [
    ({'state': np.float32([0, 0, np.nan, 0])}, errors.ObservationNonFinite, 'finite'),
    ({'state': np.float32([0, 0, np.inf, 0])}, errors.ObservationNonFinite, 'finite'),
    ({'state': np.zeros(4)}, errors.BadJoints, 'float64'),
    ({'state': np.zeros(3, np.float32)}, errors.BadJoints, r'\[3\]'),
    ({'images': {'top': image(30)}}, errors.BadSize, 'letterbox'),
    ({'images': {'top': image(dtype=np.float32)}}, errors.BadEncoding, 'float32'),
    ({'images': {'top': image()[..., 0]}}, errors.BadSize, 'top'),
    ({'images': {'side': image()}}, errors.ConfigError, 'side.*top'),
    ({'images': {}}, errors.ObservationMissing, 'no view'),
    ({'images': {'top': None, 'wrist': None}}, errors.ObservationMissing, 'no view'),
    ({'prompt': (1,) * 7}, errors.ConfigError, '7 tokens.*at most 6'),
    ({'prompt': (40,)}, errors.ConfigError, '40.*0 to 39'),
    ({'prompt': (-1,)}, errors.ConfigError, '-1'),
    ({'prompt': (1.5,)}, errors.ConfigError, 'integer'),
    ({'subgoal': SubgoalWrite(1, (1,) * 6)}, errors.ConfigError, '6 tokens.*at most 5'),
    ({'subgoal': SubgoalWrite(-1, (1,))}, errors.ConfigError, 'sequence'),
    ({'seed': -1}, errors.ConfigError, 'seed'),
    ({'seed': 2**63}, errors.ConfigError, 'seed'),
    ({'delay_steps': 9}, errors.ConfigError, 'delay_steps is 9'),
    ({'steps_executed': -9}, errors.ConfigError, 'steps_executed is -9'),
    ({'rows': 0}, errors.ConfigError, 'rows is 0'),
    ({'rows': 5}, errors.ConfigError, 'rows is 5.*1 to 4'),
    ({'rows': 3}, errors.MissingKey, r'3.*\[1, 2, 4\]'),
    ({'noise': np.zeros((1, 8, 5))}, errors.ConfigError, 'float64'),
    ({'noise': np.zeros((2, 8, 5), np.float32)}, errors.ConfigError, r'\[1, 8, 5\]'),
    ({'images': None}, errors.ConfigError, 'NoneType'),
    ({'images': [image()]}, errors.ConfigError, 'a list'),
    ({'images': {'top': image().tolist()}}, errors.BadEncoding, 'a list'),
    ({'images': {'top': np.ma.masked_array(image())}}, errors.BadEncoding, 'MaskedArray'),
    ({'images': {5: image(), 'side': image()}}, errors.ConfigError, '5.*side'),
    ({'state': [0.0] * 4}, errors.BadJoints, 'a list'),
    ({'state': np.zeros(4, '>f4')}, errors.BadJoints, '>f4|float32'),
    ({'state': np.ma.masked_array(np.zeros(4, np.float32), mask=[1, 0, 0, 0])},
     errors.BadJoints, 'MaskedArray'),
    ({'noise': [[0.0]]}, errors.ConfigError, 'a list'),
    ({'prompt': 'pick'}, errors.ConfigError, 'a str'),
    ({'prompt': b'\x01'}, errors.ConfigError, 'a bytes'),
    ({'prompt': 5}, errors.ConfigError, 'a int'),
    ({'prompt': range(10**12)}, errors.ConfigError, 'at most 6'),
    ({'prompt': np.zeros((2, 2), int)}, errors.ConfigError, 'integer'),
    ({'prompt': np.array(5)}, errors.ConfigError, r'int64 \[\]; give a sequence'),
    ({'subgoal': (1, (2,))}, errors.ConfigError, 'SubgoalWrite'),
    ({'noise': np.full((1, 8, 5), np.nan, np.float32)}, errors.ConfigError, 'NaN'),
]


@pytest.fixture(scope='module')
def refusing() -> Iterator[Pi0Session]:
    with bound(cpu_backend()) as made:
        yield made


@pytest.mark.parametrize('changes, error, message', REFUSED)
def test_a_bad_input_is_refused_by_name_before_anything_runs(refusing, changes, error, message):
    before = state_of(refusing)
    with pytest.raises(error, match=message):
        refusing.submit(observation(**changes))
    assert refusing.lane.idle and equal_states(before, state_of(refusing))


@pytest.mark.parametrize('rows, seeds, branches, message', [
    ((4,), (1,), None, 'row 4.*0 to 3'), ((1, 1), (1, 2), None, 'distinct'),
    ((1, 2), (1,), None, 'one seed'), ((1,), (-1,), None, 'seed is -1'),
    ((1,), (1,), (1, 2), 'branches'), ((1.5,), (1,), None, 'row 1.5'),
    (('x',), (1,), None, "row 'x'"), ((True,), (1,), None, 'row True'),
    ((1,), (1.5,), None, 'seed is 1.5'), ((1,), ('a',), None, "seed is 'a'"),
    (1, (1,), None, 'rows is 1'), ((1,), 1, None, 'seeds is 1'),
    (np.array(1), (1,), None, 'rows is array'), ((1,), np.array(1), None, 'seeds is array'),
    ((1, 2), (1, 2), np.array([1, -2]), 'branch is -2')])
def test_bad_branches_are_refused(refusing, rows, seeds, branches, message):
    with pytest.raises(errors.ConfigError, match=message):
        refusing.set_branches(rows, seeds, branches)


def test_branches_may_be_given_as_arrays(session):
    session.set_branches(np.array([1, 2]), np.array([5, 6]), np.array([7, 8])).result(10)
    rows = [state_of(session, row) for row in (1, 2)]
    assert [int(row['seed']) for row in rows] == [5, 6]
    assert [int(row['branch']) for row in rows] == [7, 8]


@pytest.mark.parametrize('row', [-1, 4, 'x', 1.0, None])
def test_a_branch_that_does_not_exist_is_not_committed(refusing, row):
    with pytest.raises(errors.ConfigError, match=f'row {row!r} does not exist'):
        refusing.commit_branch(row)


@pytest.mark.parametrize('view', [
    lambda a: np.asfortranarray(a), lambda a: a[::-1, ::-1][::-1, ::-1],
    lambda a: np.pad(a, ((0, 0), (0, 4), (0, 0)))[:, :-4], lambda a: a.view(np.recarray)])
def test_an_image_counts_by_its_values_not_by_its_memory(refusing, view):
    plain = observation()
    strided = observation(images={name: view(a) for name, a in plain.images.items()})
    found = []
    for given in (plain, strided):
        refusing.lane.call(lambda: [b.tensor.zero_() for b in refusing.buffers.state()]).result()
        found.append(refusing.tick(given).actions)
    assert np.array_equal(*found)


def test_a_poisoned_session_refuses_ticks_also_those_already_queued(session):
    session.boundary.poisoned = 'a restore failed half-way'
    with pytest.raises(errors.SessionPoisoned, match='half-way'):
        session.submit(observation())
    session.boundary.poisoned = None
    before = state_of(session)
    submitted = threading.Event()

    def poison_once_submitted() -> None:
        assert submitted.wait(10)
        session.boundary.poisoned = 'just now'

    session.lane.call(poison_once_submitted)
    queued = session.submit(observation())
    submitted.set()
    with pytest.raises(errors.SessionPoisoned, match='just now'):
        queued.result(10)
    session.boundary.poisoned = None
    assert equal_states(before, state_of(session))


def test_tick_on_the_lane_thread_is_refused_instead_of_hanging(session):
    with pytest.raises(errors.LaneError, match='submit'):
        session.lane.call(lambda: session.tick(observation())).result(10)


def test_a_closed_session_refuses_ticks(session):
    session.close()
    session.close()
    with pytest.raises(errors.LaneClosed):
        session.tick(observation())
