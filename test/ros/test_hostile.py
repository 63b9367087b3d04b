"""Hostile surroundings: stalls, standing clocks, twins, raising policies; nothing may jump."""

from collections.abc import Callable
from pathlib import Path
import time

from _executor_rig import rig
from _ros_fixtures import wait_until
import numpy as np
import pytest

pytestmark = pytest.mark.ros
FULL_STEP = 4.0 / 50.0  # max_velocity over control_rate_hz of the rig


def test_after_a_stall_of_the_step_thread_commands_start_from_the_measured_pose(
        tmp_path: Path) -> None:
    with rig(tmp_path) as r:
        r.run()
        control, arm = r.executor.control, r.arm
        arm.obey = False
        with control.publish_lock:  # as if the process stood still
            arm.position = arm.position + np.array([0.25, 0.0, 0.0, 0.0])
            observed = r.executor.engine.observations.measured
            wait_until(lambda: np.allclose(observed(), arm.position), 'the displaced pose')
            wait_until(_after(0.3), 'a stall of 0.3 s')
            count = len(arm.commands)
        r.until_event('hold', 'stalled')
        wait_until(lambda: len(arm.commands) > count, 'commands after the stall')
        first = arm.commands[count][1]
        assert abs(first[0] - arm.position[0]) <= FULL_STEP
        r.until_phase('ticking')


def _after(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end
