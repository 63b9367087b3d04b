"""``bench bringup``: what executor and planner cost each other in one process on one device.

Phases: the executor ticks alone, the planner decodes alone while the robot holds, both together,
then interrupts at random moments while both work. Plans are dry runs of free text, one after the
other, so that the planner always has a token to decode.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
import contextlib
from pathlib import Path
import random
import tempfile
import threading
import time
from typing import Any

from rclpy.executors import ExternalShutdownException
from rclpy.executors import SingleThreadedExecutor
from rclpy.parameter import Parameter

from flashrt_core.bench import Report
from flashrt_core.errors import ConfigError
from flashrt_core.errors import LaneBusy
from flashrt_core.errors import WrongState
from flashrt_ros.bench.rig import NAMESPACE
from flashrt_ros.bench.rig import START_TIMEOUT_S
from flashrt_ros.bringup import bring_up
from flashrt_ros.bringup import start_together
from flashrt_ros.executor_node import ExecutorNode
from flashrt_ros.hold import Phase
from flashrt_ros.msg import Subgoal
from flashrt_ros.planner_node import PlannerNode
from flashrt_ros.planner_plan import PlanRequest
from flashrt_ros.processes import ProcessGroup
from flashrt_ros.qos import use_large_message_profile

WARM_UP_S = 1.0


def run(arguments: argparse.Namespace) -> Report:
    """Run the phases and return one row for each."""
    if arguments.seconds <= 0 or arguments.interrupts < 1:
        raise ConfigError(f'--seconds is {arguments.seconds} and --interrupts '
                          f'{arguments.interrupts}; give positive numbers')
    report = Report('bringup')
    with _nodes(arguments) as (group, executor, planner):
        _until_ticking(group, executor)
        phases: dict[str, dict[str, Any]] = {}
        for name, ticks, plans in (('executor alone', True, False), ('planner alone', False, True),
                                   ('together', True, True)):
            phases[name] = _phase(group, executor, planner, arguments, ticks, plans)
            report.add(phase=name, **phases[name])
        alone = phases['planner alone']['tokens_per_s']
        if alone:
            report.notes.append('together the planner keeps '
                                f'{phases["together"]["tokens_per_s"] / alone:.0%} of its tokens')
        report.notes += _interrupts(group, executor, planner, arguments)
        report.notes.append(f'segments p99 in us: {planner.admission.p99_us()}')
        report.details['counters'] = {
            **executor.report.counters.snapshot(), **planner.report.counters.snapshot()}
        report.details['arguments'] = {k: str(v) for k, v in vars(arguments).items()}
    return report


@contextlib.contextmanager
def _nodes(arguments: argparse.Namespace
           ) -> Iterator[tuple[ProcessGroup, ExecutorNode, PlannerNode]]:
    """Cameras in a process of their own, both nodes in this one, active and spun."""
    use_large_message_profile()
    with tempfile.TemporaryDirectory(prefix='flashrt_bench_') as folder, ProcessGroup(
            Path(folder) / 'log') as group:
        group.start('flashrt_ros.bench.cameras', namespace=NAMESPACE,
                    params={'camera_hz': float(arguments.camera_hz), 'image_size_px': 224})
        context = group.context()
        executor, planner = bring_up(
            context=context, namespace=NAMESPACE,
            executor_overrides=_parameters(
                policy=arguments.policy, policy_config=arguments.policy_config,
                embodiment='embodiments/tabletop_untrained.yaml', device=arguments.device,
                output_mode='stream', tick_period_steps=arguments.tick_period_steps,
                fifo_priority=arguments.fifo_priority),
            planner_overrides=_parameters(
                planner=arguments.planner, planner_config=arguments.planner_config,
                device=arguments.device, grammar='none', subgoal_deadline_s=0.0))
        spun = [SingleThreadedExecutor(context=context) for _ in range(2)]
        for spin, node in zip(spun, (executor, planner), strict=True):
            spin.add_node(node)
            threading.Thread(target=_spin, args=(spin,), daemon=True).start()
        try:
            if not start_together(executor, planner):
                raise WrongState(executor.last_transition_error or planner.last_transition_error)
            yield group, executor, planner
        finally:
            planner.stop(10.0)
            executor.stop(10.0)
            for spin in spun:
                spin.shutdown(timeout_sec=1.0)
            context.try_shutdown()


def _phase(group: ProcessGroup, executor: ExecutorNode, planner: PlannerNode,
           arguments: argparse.Namespace, ticks: bool, plans: bool) -> dict[str, Any]:
    assert executor.control is not None and executor.engine is not None
    ending = threading.Event()
    worker = threading.Thread(target=_plan_on, args=(planner, arguments.prompt, ending))
    if not ticks:
        executor.control.hold('bench')
    if plans:
        worker.start()
    threading.Event().wait(WARM_UP_S)
    # The rings belong to their threads: a sample that is being written may survive the clear.
    rings = [executor.engine.times.rings['inference'], executor.engine.times.rings['tick'],
             planner.engine.rings['token']]
    for ring in rings:
        ring.clear()
    before = _counts(executor, planner)
    begun = time.monotonic()
    while time.monotonic() - begun < arguments.seconds:
        threading.Event().wait(min(0.5, arguments.seconds))
        group.check()
    took = time.monotonic() - begun
    after = _counts(executor, planner)
    inference, tick, token = [ring.summary() for ring in rings]
    ending.set()
    if plans:
        worker.join(30.0)
    if not ticks:
        executor.control.clear('bench')
        _until_ticking(group, executor)
    delta = {name: after[name] - before[name] for name in after}
    return {
        'ticks': delta['ticks'], 'inference_p50_us': inference.p50,
        'inference_p99_us': inference.p99, 'tick_p50_us': tick.p50, 'tick_p99_us': tick.p99,
        'missed_tick_deadlines': delta['tick_deadline_missed'],
        'exhausted': delta['exhausted'], 'missed_steps': delta['missed'],
        'tokens_per_s': delta['tokens'] / took, 'token_p50_us': token.p50,
        'token_p99_us': token.p99, 'segments_waited': delta['segments_waited'],
        'segments_oversize': delta['segments_oversize'],
    }


def _counts(executor: ExecutorNode, planner: PlannerNode) -> dict[str, int]:
    assert executor.step_thread is not None
    counts = {**executor.report.counters.snapshot(), **planner.report.counters.snapshot()}
    names = ('ticks', 'tick_deadline_missed', 'exhausted', 'tokens', 'segments_waited',
             'segments_oversize')
    return {'missed': executor.step_thread.report().missed, **{n: counts[n] for n in names}}


def _interrupts(group: ProcessGroup, executor: ExecutorNode, planner: PlannerNode,
                arguments: argparse.Namespace) -> list[str]:
    """Interrupt at random moments while both work; sentences with the parts of the latency."""
    engine, chance, ending = executor.engine, random.Random(0), threading.Event()
    assert engine is not None
    for name, ring in engine.times.rings.items():
        if name.startswith('interrupt'):
            ring.clear()
    worker = threading.Thread(target=_plan_on, args=(planner, arguments.prompt, ending))
    worker.start()
    for _ in range(arguments.interrupts):
        threading.Event().wait(chance.random() * 0.2)
        sequence = executor.services_made.subgoal(Subgoal(
            text=arguments.prompt, priority=Subgoal.PRIORITY_INTERRUPT))
        group.wait_for(lambda s=sequence: engine.slot.latched >= s and not engine.interrupted,
                       30.0, f'subgoal {sequence} to be answered', poll_s=0.001)
    ending.set()
    worker.join(30.0)
    parts = {name: ring.summary() for name, ring in engine.times.rings.items()
             if name.startswith('interrupt')}
    return [f'{name}: p50 {s.p50:.0f} us, p99 {s.p99:.0f} us of {s.count}'
            for name, s in parts.items()] + [
                'to the first command add at most one step '
                f'({engine.embodiment.step_period_s * 1e3:g} ms)']


def _plan_on(planner: PlannerNode, prompt: str, ending: threading.Event) -> None:
    assert planner.engine is not None
    while not ending.is_set():
        try:
            plan = planner.engine.start(PlanRequest(prompt, dry_run=True), lambda told: None)
        except LaneBusy:
            continue
        plan.ended.result()


def _until_ticking(group: ProcessGroup, executor: ExecutorNode) -> None:
    assert executor.control is not None and executor.verbs is not None
    control = executor.control
    if control.holds.phase is Phase.NEEDS_RESET:
        executor.verbs.reset('', None)
    group.wait_for(lambda: control.holds.phase is Phase.RUN, START_TIMEOUT_S, 'the robot to run')


def _parameters(**values: Any) -> list[Parameter]:
    return [Parameter(name, value=value) for name, value in values.items()]


def _spin(executor: SingleThreadedExecutor) -> None:
    try:
        executor.spin()
    except ExternalShutdownException:
        pass
