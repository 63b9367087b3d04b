"""The planner's ways to an executor hand over rows in the place of a subgoal's words."""

from pathlib import Path

from _fake_policy import FakeConfig
from _fake_policy import FakePolicy
from _planner_rig import planner_rig
from _ros_fixtures import wait_until
import numpy as np
import pytest
import torch

from flashrt_core.errors import SubgoalRefused

pytestmark = pytest.mark.ros
ROWS = np.float32([[0.1, -2, 3, 1e-30], [5, 6, 7, 8]])


@pytest.mark.parametrize('link', ['bound', 'service', 'topic'])
def test_rows_get_into_the_executors_slot_and_unfit_ones_are_refused(
        tmp_path: Path, link: str) -> None:
    policy = FakePolicy(FakeConfig(embedding=(3, 4)))
    with planner_rig(tmp_path, link=link, policy=policy) as (planner, robot):
        robot.run()
        way, base = planner.node.link, planner.node.link.base()
        rows = torch.from_numpy(ROWS.copy())
        way.write('the cup', 1, base.episode, 0, 0.0, rows)
        rows.fill_(-1.0)
        wait_until(lambda: robot.executor.engine.slot.latched == 1, 'the tick to latch it')
        (given,) = {id(t.subgoal.embedding): t.subgoal for t in policy.switches.inputs
                    if t.subgoal is not None}.values()
        assert np.array_equal(given.embedding.values, ROWS)
        assert (given.sequence, given.tokens) == (1, ())
        with pytest.raises(SubgoalRefused, match=r'at most \[3, 4\]'):
            way.write('the cup', 2, base.episode, 0, 0.0, torch.zeros(4, 4))
        assert robot.executor.engine.slot.requested == 1
        assert robot.executor.report.counters['subgoals_invalid'] == 1
