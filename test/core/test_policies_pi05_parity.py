"""Pi0.5 through its session against arrays made once from LeRobot 0.6.1, float32, to 1e-5."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from _pi05 import bound05
from _pi05 import Case
from _pi05 import CONFIG
from _pi05 import golden
from _pi05 import lerobot_tensors
from _pi05 import save
from _pi05 import tick_input
import numpy as np
import pytest
from recipe import CASES
from recipe import VIEWS

from flashrt_core.policies import make_tokenizer
from flashrt_core.policies import SubgoalWrite
from flashrt_core.policies.normalise import affine
from flashrt_core.policies.pi0 import Pi0Session
from flashrt_core.runtime import Backend

TOLERANCE = 1e-5
GOLDEN = golden()


@pytest.fixture(scope='module')
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(lerobot_tensors(), tmp_path_factory.mktemp('pi05'))


@pytest.fixture
def session(
    request: pytest.FixtureRequest, backend: Backend, weights: Path
) -> Iterator[Pi0Session]:
    with bound05(backend, weights, views=VIEWS[:request.param]) as made:
        yield made


def compare(session: Pi0Session, name: str, **changes: object) -> None:
    chunk = session.tick(tick_input(session, CASES[name], **changes))
    scale = affine(CONFIG.statistics, 'action', 'quantiles', CONFIG.action_dim).scale
    expected = GOLDEN[f'{name}/physical']
    assert np.abs(GOLDEN[f'{name}/actions']).max() > 0.5, 'the comparison would say nothing'
    # The tolerance is on the model's actions, in [-1, 1]; these are in physical units.
    np.testing.assert_array_less(np.abs(chunk.actions - expected) / scale, TOLERANCE)


def named(views: int) -> list[tuple[int, str]]:
    return [(views, name) for name, case in CASES.items() if case.views == views]


@pytest.mark.parametrize('session, name', [*named(1), *named(2), *named(3)], indirect=['session'])
def test_actions_equal_lerobot_for_every_mask_and_prompt(session, name):
    compare(session, name)


@pytest.mark.parametrize('session', [2], indirect=True)
def test_what_the_model_reads_is_the_text_that_lerobot_made(session):
    for name, case in CASES.items():
        head = session.tokenizer.encode(case.task, 40)
        state = session.state_text.tokens(np.float32(case.state))
        text = str(GOLDEN[f'{name}/text'])
        assert head + state == make_tokenizer('words').encode(text, 200), name


@pytest.mark.parametrize('session', [2], indirect=True)
def test_a_subgoal_takes_the_place_of_the_prompt_and_gives_it_back(session):
    case = CASES['two']
    other = session.tokenizer.encode('go home', 40)
    subgoal = SubgoalWrite(1, session.tokenizer.encode(case.task, 44))
    compare(session, 'two', prompt=other, subgoal=subgoal)
    held = CONFIG.horizon  # executed to its end: nothing of the first chunk is left
    compare(session, 'two', prompt=None, steps_executed=held)
    none = SubgoalWrite(2, ())
    prompt = session.tokenizer.encode(case.task, 40)
    compare(session, 'two', prompt=prompt, subgoal=none, steps_executed=held)


@pytest.mark.parametrize('session', [2], indirect=True)
def test_the_state_of_each_tick_is_in_its_prompt_and_nowhere_else(session):
    def tick(case: Case) -> np.ndarray:
        return session.tick(tick_input(session, case, steps_executed=CONFIG.horizon)).actions

    case = CASES['two']
    first = tick(case)
    near = tick(replace(case, state=(0.3001, 1.1001, -0.4001, 0.7001)))  # the same bins
    other = tick(replace(case, state=(0.5, 1.1, -0.4, 0.7)))
    np.testing.assert_array_equal(near, first)
    assert np.abs(other - first).max() > 1e-2


def test_bfloat16_points_the_same_way_as_float32(backend, weights):
    chunks = []
    for dtype in ('float32', 'bfloat16'):
        with bound05(backend, weights, dtype=dtype) as session:
            given = tick_input(session, CASES['three'])
            chunks.append(session.tick(given).actions.ravel())
    a, b = chunks
    assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > 0.999
    assert not np.array_equal(a, b)
