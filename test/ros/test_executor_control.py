"""Tests of flashrt_ros.executor_control: runs of steps, stalls, splices, without ROS."""

from pathlib import Path
import threading
from types import SimpleNamespace
from typing import Any
from unittest import mock

from _executor_rig import EMBODIMENT
import numpy as np
import pytest

from flashrt_ros import executor_control
from flashrt_ros.embodiment import load_embodiment
from flashrt_ros.executor_control import Control
from flashrt_ros.executor_control import Progress
from flashrt_ros.hold import Cause
from flashrt_ros.hold import Phase
from flashrt_ros.statistics import Counters

S = 1_000_000_000
PARAMETERS = {'lock_step': False, 'output_mode': 'stream', 'limits': 'clamp',
              'require_reset': False, 'delay_window_chunks': 8, 'exhausted_hold_s': 60.0,
              'resync_speed_ratio': 1.0}


class Outputs:
    """Notes what is sent."""

    def __init__(self) -> None:
        self.trajectories: list[int] = []  # first rows
        self.commands: list[np.ndarray] = []
        self.events: list[tuple[str, str]] = []

    def trajectory(self, actions: Any, first_step: int, commanded: Any) -> None:
        self.trajectories.append(first_step)

    def command(self, position: Any) -> None:
        self.commands.append(np.array(position))

    def event(self, kind: str, name: str, detail: Any) -> None:
        self.events.append((kind, name))

    def status(self) -> None:
        return None


def control_of(folder: Path, rate_hz: float = 50.0, **changed: Any) -> Control:
    path = folder / 'robot.yaml'
    path.write_text(EMBODIMENT.replace('control_rate_hz: 50.0', f'control_rate_hz: {rate_hz}'))
    control = Control(load_embodiment(path), Outputs(), Counters(), PARAMETERS | changed,
                      Progress())
    control.measured = lambda: np.zeros(4)
    return control


def play(control: Control, at_step: int | None = None) -> Any:
    """Put a chunk of zeros into play, as if made from an observation of now or of ``at_step``."""
    start = control.player.begin_tick()
    if at_step is not None:
        start = SimpleNamespace(epoch=start.epoch, at_step=at_step)
    observation = SimpleNamespace(oldest_received_ns=2**62)
    return control.put_into_play(
        np.zeros((16, 4)), SimpleNamespace(start=start, observation=observation),
        control.holds.phase is Phase.RUN)


def test_a_run_holds_after_its_last_step_and_counts_them(tmp_path: Path) -> None:
    control = control_of(tmp_path)
    play(control)
    for limit in (1, 3):
        run = control.begin_run(limit, 'end')
        if control.holds.holding:
            play(control)
        for _ in range(5):
            control.step()
        assert control.holds.causes == ('end',) and control.count(run).steps == limit
        assert control.end_run(run, hold=True).steps == limit


def test_no_step_comes_between_the_begin_of_a_run_and_the_end_of_the_last_ones_hold(
        tmp_path: Path) -> None:
    control = control_of(tmp_path)
    play(control)
    stepper = threading.Thread(target=control.step)
    clear = control.holds.clear

    def clear_while_stepping(cause: str, now_ns: int) -> Any:
        stepper.start()
        stepper.join(0.05)  # where it can step, it does within that time
        return clear(cause, now_ns)

    control.holds.clear = clear_while_stepping
    run = control.begin_run(1, 'end')
    stepper.join()
    assert control.holds.causes == ('end',), 'its own end is not taken for that of the last one'
    control.holds.clear = clear
    assert control.end_run(run, hold=True).steps == 1


def test_what_follows_a_reset_is_not_counted_nor_limited(tmp_path: Path) -> None:
    control = control_of(tmp_path)
    play(control)
    run = control.begin_run(3, 'end')
    control.step()
    control.begin_change(hold=True)
    control.end_change(True, reset=True)
    play(control)
    for _ in range(6):
        control.step()
    count = control.end_run(run, hold=True)
    assert (count.steps, count.over, control.holds.causes) == (1, True, ())
    assert control.progress.step == 7 and control.holds.phase is Phase.RUN


def test_a_slow_robot_has_not_stalled_between_two_steps(tmp_path: Path) -> None:
    control = control_of(tmp_path, rate_hz=2.0)
    with mock.patch.object(executor_control.time, 'monotonic_ns') as now:
        now.return_value = S
        play(control)
        for now.return_value in (S, S + S // 2, S + S):
            control.step()
        assert not control.holds.holding and control.progress.step == 3
        now.return_value += 2 * S
        control.step()
    assert control.holds.causes == (Cause.STALLED,) and control.progress.step == 3


def test_a_step_thread_that_begins_late_has_not_stalled(tmp_path: Path) -> None:
    control = control_of(tmp_path)
    with mock.patch.object(executor_control.time, 'monotonic_ns') as now:
        now.return_value = S
        play(control)
        control.step(0)
        now.return_value = 9 * S
        control.begin_steps()  # activated anew; its first slots are missed
        control.step(3)
    assert not control.holds.holding and control.progress.step == 2


@pytest.mark.parametrize('mode', ['stream', 'chunk'])
def test_a_step_that_is_played_while_a_chunk_is_checked_belongs_to_the_old_one(
        tmp_path: Path, mode: str) -> None:
    control = control_of(tmp_path, output_mode=mode)
    play(control)
    control.step()
    swap = control.player.swap

    def swap_after_a_step(*given: Any) -> Any:
        control.step()
        return swap(*given)

    control.player.swap = swap_after_a_step
    played = play(control)
    assert played.first_step == 1 and control.player.left_steps == 15
    assert control.outputs.trajectories[1:] == ([1] if mode == 'chunk' else [])


def test_a_chunk_that_comes_too_late_is_not_counted_as_played(tmp_path: Path) -> None:
    control = control_of(tmp_path)
    play(control)
    for _ in range(16):
        control.step()
    assert play(control, at_step=0) is None
    assert control.ticks_played == 1 and control._counters['chunks_too_late'] == 1


def test_a_restore_that_did_not_hold_before_stops_a_controller(tmp_path: Path) -> None:
    control = control_of(tmp_path, output_mode='chunk')
    play(control)
    assert len(control.outputs.trajectories) == 1
    control.begin_change(hold=False)
    assert not control.outputs.commands
    control.end_change(True)
    assert len(control.outputs.commands) == 1, 'a command to stay replaces the trajectory'
