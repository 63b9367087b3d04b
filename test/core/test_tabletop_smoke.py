"""The shipped models, ten episodes end to end: an instruction, a plan, the arm."""
from __future__ import annotations

import pytest

from flashrt_core.tabletop.driver import Driver
from flashrt_core.tabletop.evaluate import whole
from flashrt_core.tabletop.models import trained
from flashrt_core.tabletop.plan_writer import PlanWriter

EPISODES, GATE = 10, 6


def test_ten_episodes_mostly_succeed() -> None:
    policy, planner = trained('policy'), trained('planner')
    if policy is None or planner is None:
        pytest.skip('resource/models holds no trained policy and planner yet')
    driver, writer = Driver(policy), PlanWriter(planner)
    try:
        episodes = [whole(driver, number, writer) for number in range(EPISODES)]
    finally:
        driver.close()
        writer.close()
    assert sum(episode.solved for episode in episodes) >= GATE, episodes
