"""Executor and planner of a bench, both in this process, active and spun; cameras in another one.

The robot's cameras are those that the policy wants. Random weights of a Qwen3.5 are drawn on the
device: 9 billion of them take the host minutes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from collections.abc import Iterator
import contextlib
from dataclasses import dataclass
from dataclasses import replace
from functools import partial
from pathlib import Path
import sys
import tempfile
import threading
import time
from typing import Any

from rclpy.executors import ExternalShutdownException
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.parameter import Parameter
import torch

from flashrt_core.bench._llm_setup import drawn
from flashrt_core.errors import WrongState
from flashrt_core.planners import make_planner
from flashrt_core.planners import Planner
from flashrt_core.planners import Settings
from flashrt_core.planners.qwen3_5 import fast
from flashrt_core.planners.qwen3_5 import load_config
from flashrt_core.planners.qwen3_5 import NAMED
from flashrt_core.planners.qwen3_5 import QWEN3_5
from flashrt_core.planners.qwen3_5 import Qwen35Config
from flashrt_core.planners.qwen3_5.load import load_constants
from flashrt_core.runtime import pick_backend
from flashrt_ros.bench.rig import NAMESPACE
from flashrt_ros.bench.rig import START_TIMEOUT_S
from flashrt_ros.bench.rig import write_robot
from flashrt_ros.bringup import bring_up
from flashrt_ros.bringup import start_together
from flashrt_ros.executor_node import ExecutorNode
from flashrt_ros.hold import Phase
from flashrt_ros.planner_node import PlannerNode
from flashrt_ros.processes import ProcessGroup
from flashrt_ros.qos import use_large_message_profile

PREFIX = 'qwen3_5_'  # of the names of the config files, which stand for named sizes here
CONTEXT = 2048  # tokens: far more than a plan of the bench
PREFILL_KEYS = (16, 64, 256)
STOP_S = 10.0


@dataclass(frozen=True)
class Pair:
    """What runs; ``period_s`` lies between the begins of two ticks."""

    group: ProcessGroup
    executor: ExecutorNode
    planner: PlannerNode
    caller: Node  # spun, to call services from
    period_s: float
    say: Callable[[str], None]

    def wait(self, seconds: float) -> None:
        """Let them run; raises ProcessDied when the cameras have ended."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            threading.Event().wait(min(0.5, left))
            self.group.check()

    def until_ticking(self) -> None:
        """Reset the robot if it wants that and wait until it runs."""
        control, verbs = self.executor.control, self.executor.verbs
        assert control is not None and verbs is not None
        if control.holds.phase is Phase.NEEDS_RESET:
            verbs.reset('', None)
        self.group.wait_for(lambda: control.holds.phase is Phase.RUN, START_TIMEOUT_S,
                            'the robot to run')


@contextlib.contextmanager
def pair(arguments: argparse.Namespace) -> Iterator[Pair]:
    """Start everything and give it once the robot ticks.

    :raises WrongState: a node could not be configured; its reason.
    """
    use_large_message_profile()
    begun = time.monotonic()

    def say(text: str) -> None:
        print(f'bringup {time.monotonic() - begun:6.1f} s  {text}', file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix='flashrt_bench_') as folder, ProcessGroup(
            Path(folder) / 'log') as group:
        robot = Path(folder) / 'robot.yaml'
        views, step_s = write_robot(arguments, robot)
        period_s = arguments.tick_period_steps * step_s
        group.start('flashrt_ros.bench.cameras', namespace=NAMESPACE,
                    params={'camera_hz': float(arguments.camera_hz), 'image_size_px': 224,
                            'views': views})
        context = group.context()
        executor, planner = bring_up(
            context=context, namespace=NAMESPACE,
            executor_overrides=_parameters(
                policy=arguments.policy, policy_config=arguments.policy_config,
                embodiment=str(robot), device=arguments.device,
                output_mode='stream', tick_period_steps=arguments.tick_period_steps,
                tick_deadline_s=period_s, tick_misses_to_hold=1000,
                fifo_priority=arguments.fifo_priority),
            planner_overrides=_parameters(
                planner=arguments.planner, planner_config=arguments.planner_config,
                device=arguments.device, grammar='none', subgoal_deadline_s=0.0))
        planner.make_planner = partial(_family, arguments.device)
        caller = Node('bench_caller', context=context, namespace=NAMESPACE)
        spun = [SingleThreadedExecutor(context=context) for _ in range(3)]
        for spin, node in zip(spun, (executor, planner, caller), strict=True):
            spin.add_node(node)
            threading.Thread(target=_spin, args=(spin,), daemon=True).start()
        made = Pair(group, executor, planner, caller, period_s, say)
        try:
            say(f'configure: {arguments.policy_config}, then {arguments.planner_config}')
            if not start_together(executor, planner):
                raise WrongState(executor.last_transition_error or planner.last_transition_error)
            made.until_ticking()
            say(f'both active; the executor was ready after {executor.ready_after_s:.1f} s, the '
                f'planner after {planner.ready_after_s:.1f} s')
            yield made
        finally:
            planner.stop(STOP_S)
            executor.stop(STOP_S)
            for spin in spun:
                spin.shutdown(timeout_sec=1.0)
            context.try_shutdown()


def _family(device: str, name: str) -> Planner:
    """Return the planner's family; that of a Qwen3.5 is as short as plans of the bench are."""
    if name != QWEN3_5.name:
        return make_planner(name)
    on = pick_backend(device).device
    return replace(QWEN3_5, load_config=partial(short, on), load_constants=partial(
        load_constants, draw=partial(drawn, on, False)))


def short(device: torch.device, source: str) -> tuple[Qwen35Config, Settings]:
    """Return a config by name or file, with room for plans of the bench and no more.

    :raises ConfigError: there is none of that name.
    """
    size = source.removeprefix(PREFIX)
    c, s = load_config(size if size in NAMED else source)
    c = replace(c, context=min(c.context, CONTEXT))
    s = replace(s, branches=0, draft_tokens=0, prefill_keys=tuple(
        key for key in s.prefill_keys if key <= max(PREFILL_KEYS)))
    if device.type == 'cuda' and fast.selected(c, device):
        s = replace(s, smallest_span=c.context)  # fast reads keys by length: one graph a key does
    return c, s


def _parameters(**values: Any) -> list[Parameter]:
    return [Parameter(name, value=value) for name, value in values.items()]


def _spin(executor: SingleThreadedExecutor) -> None:
    try:
        executor.spin()
    except ExternalShutdownException:
        pass
