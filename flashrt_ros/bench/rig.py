"""Robot, executor and conductor of a bench, each a process of its own on a free domain.

The robot is a resting arm with cameras of noise, as many as the policy wants, or the built-in one,
whose two cameras are the policy's first two views; further ones stay absent.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
from dataclasses import dataclass
from dataclasses import field
import json
from pathlib import Path
import tempfile
from typing import Any

import yaml

from flashrt_core.errors import ConfigError
from flashrt_core.policies import make_policy
from flashrt_core.policies.protocol import Modality
from flashrt_ros.bench.cameras import VIEWS
from flashrt_ros.conductor import Conductor
from flashrt_ros.config_files import find_embodiment
from flashrt_ros.config_files import here_or_below_config
from flashrt_ros.processes import Process
from flashrt_ros.processes import ProcessGroup
from flashrt_ros.qos import use_large_message_profile

NAMESPACE = 'bench'
ROBOT = 'embodiments/tabletop_untrained.yaml'
IMAGE_PX = 224
START_TIMEOUT_S = 300.0


@dataclass
class Rig:
    """What runs, and after it has ended, what the executor has stamped."""

    conductor: Conductor
    group: ProcessGroup
    executor: Process
    device: str
    cameras: str  # in words
    samples: dict[str, Any] = field(default_factory=dict)


@contextlib.contextmanager
def rig(arguments: argparse.Namespace, *, output_mode: str) -> Iterator[Rig]:
    """Start everything, reset once, give the rig; on the way out collect the samples.

    :raises ProcessDied: with the log of what died.
    """
    if arguments.camera_hz <= 0:
        raise ConfigError(f'--camera-hz is {arguments.camera_hz}; give a positive rate')
    use_large_message_profile()
    with tempfile.TemporaryDirectory(prefix='flashrt_bench_') as folder:
        path = Path(folder) / 'samples.json'
        with ProcessGroup(Path(folder) / 'log', stop_timeout_s=20.0) as group:
            robot = Path(folder) / 'robot.yaml'
            built_in = arguments.robot == 'tabletop'
            views, step_s = write_robot(arguments, robot, VIEWS if built_in else None)
            every = max(1, round(1.0 / (step_s * arguments.camera_hz)))
            if built_in:
                group.start('tabletop', namespace=NAMESPACE, params={
                    'image_size_px': IMAGE_PX, 'camera_period_steps': every})
            else:
                group.start('flashrt_ros.bench.cameras', namespace=NAMESPACE, params={
                    'camera_hz': float(arguments.camera_hz), 'image_size_px': IMAGE_PX,
                    'views': views})
            executor = group.start(
                'flashrt_ros.bench.executor',
                namespace=NAMESPACE,
                params={
                    'policy': arguments.policy,
                    'policy_config': arguments.policy_config,
                    'embodiment': str(robot),
                    'device': arguments.device,
                    'output_mode': output_mode,
                    'tick_period_steps': arguments.tick_period_steps,
                    'fifo_priority': arguments.fifo_priority,
                    # Late is a tick that ends after the next one is due.
                    'tick_deadline_s': arguments.tick_period_steps * step_s,
                    'tick_misses_to_hold': 1000,
                },
                env={'FLASHRT_BENCH_SAMPLES': str(path)},
            )
            conductor = Conductor(group, namespace=NAMESPACE, reliable=False, keep_images=False)
            try:
                conductor.wait_for_services(START_TIMEOUT_S, robot=False)
                status = conductor.wait_until_active(START_TIMEOUT_S)
                cameras = (
                    f'the built-in robot, two cameras at {1.0 / (step_s * every):g} Hz' if built_in
                    else f'{len(views)} cameras at {arguments.camera_hz:g} Hz, an arm at rest')
                made = Rig(conductor, group, executor, status.device, cameras)
                yield made
            finally:
                conductor.close()
            group.stop()
        if path.is_file():
            made.samples.update(json.loads(path.read_text()))


def write_robot(
    arguments: argparse.Namespace, path: Path, cameras: Sequence[str] | None = None
) -> tuple[list[str], float]:
    """Write an embodiment with the policy's views; returns these and the step's period.

    :param cameras: what the views are read from, first to first; their own names if not given.
    """
    config = here_or_below_config(arguments.policy_config)
    views = [port.name for port in make_policy(arguments.policy).ports(config)
             if port.modality == Modality.IMAGE]
    robot = yaml.safe_load(find_embodiment(ROBOT).read_text(encoding='utf-8'))
    mapped = dict(zip(views, cameras or views, strict=False))
    path.write_text(yaml.safe_dump({**robot, 'views': mapped}), encoding='utf-8')
    return views, 1.0 / float(robot['control_rate_hz'])


def resident_mib(process: Process) -> float:
    """Resident memory of a child, MiB."""
    for line in Path(f'/proc/{process.pid}/status').read_text().splitlines():
        if line.startswith('VmRSS:'):
            return int(line.split()[1]) / 1024
    return float('nan')
