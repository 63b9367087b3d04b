"""Cameras, executor and conductor of a bench, each a process of its own on a free domain."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
import contextlib
from dataclasses import dataclass
from dataclasses import field
import json
from pathlib import Path
import tempfile
from typing import Any

from flashrt_core.errors import ConfigError
from flashrt_ros.conductor import Conductor
from flashrt_ros.processes import Process
from flashrt_ros.processes import ProcessGroup
from flashrt_ros.qos import use_large_message_profile

NAMESPACE = 'bench'
START_TIMEOUT_S = 300.0


@dataclass
class Rig:
    """What runs, and after it has ended, what the executor has stamped."""

    conductor: Conductor
    group: ProcessGroup
    executor: Process
    device: str
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
            group.start(
                'flashrt_ros.bench.cameras',
                namespace=NAMESPACE,
                params={'camera_hz': float(arguments.camera_hz), 'image_size_px': 224},
            )
            executor = group.start(
                'flashrt_ros.bench.executor',
                namespace=NAMESPACE,
                params={
                    'policy': arguments.policy,
                    'policy_config': arguments.policy_config,
                    'embodiment': 'embodiments/tabletop_untrained.yaml',
                    'device': arguments.device,
                    'output_mode': output_mode,
                    'tick_period_steps': arguments.tick_period_steps,
                    'fifo_priority': arguments.fifo_priority,
                },
                env={'FLASHRT_BENCH_SAMPLES': str(path)},
            )
            conductor = Conductor(group, namespace=NAMESPACE, reliable=False, keep_images=False)
            try:
                conductor.wait_for_services(START_TIMEOUT_S, robot=False)
                status = conductor.wait_until_active(START_TIMEOUT_S)
                made = Rig(conductor, group, executor, status.device)
                yield made
            finally:
                conductor.close()
            group.stop()
        if path.is_file():
            made.samples.update(json.loads(path.read_text()))


def resident_mib(process: Process) -> float:
    """Resident memory of a child, MiB."""
    for line in Path(f'/proc/{process.pid}/status').read_text().splitlines():
        if line.startswith('VmRSS:'):
            return int(line.split()[1]) / 1024
    return float('nan')
