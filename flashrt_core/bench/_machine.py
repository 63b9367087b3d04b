"""What a figure was measured on: processor, memory, GPU, versions, revision."""
from __future__ import annotations

from importlib import metadata
import os
from pathlib import Path
import platform
import subprocess

import torch

from flashrt_core.runtime.backend import host_memory

PACKAGES = ('torch', 'triton', 'numpy', 'cuda-bindings', 'safetensors', 'transformers', 'rclpy')


def describe() -> dict[str, object]:
    """Return the machine and the software, ready for JSON; takes well under a second."""
    return {
        'processor': _processor(),
        'cores': len(os.sched_getaffinity(0)),
        'memory_bytes': host_memory()[0],
        'system': platform.platform(),
        'python': platform.python_version(),
        'packages': _versions(),
        'gpu': _gpu(),
        'revision': _revision(),
    }


def one_line(machine: dict[str, object]) -> str:
    """Return the machine in a line for the head of a table."""
    gpu = machine['gpu']
    where = gpu['name'] if isinstance(gpu, dict) else 'no GPU'
    packages = machine['packages']
    torch_version = packages.get('torch', '?') if isinstance(packages, dict) else '?'
    return f'{where}; {machine["processor"]}, {machine["cores"]} cores; torch {torch_version}'


def _processor() -> str:
    try:
        text = Path('/proc/cpuinfo').read_text(encoding='utf-8', errors='replace')
    except OSError:
        return platform.processor() or 'unknown'
    for line in text.splitlines():
        if line.startswith(('model name', 'Model')):
            return line.split(':', 1)[1].strip()
    return platform.machine()


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _gpu() -> dict[str, object] | None:
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    drivers = _output(['nvidia-smi', '--query-gpu=driver_version', '--format=csv,noheader'])
    return {
        'name': properties.name,
        'capability': f'{properties.major}.{properties.minor}',
        'memory_bytes': properties.total_memory,
        'multiprocessors': properties.multi_processor_count,
        'cuda': torch.version.cuda,
        'driver': drivers and drivers.splitlines()[0],  # a line for each GPU
    }


def _revision() -> str | None:
    here = str(Path(__file__).parent)
    revision = _output(['git', '-C', here, 'rev-parse', '--short', 'HEAD'])
    changed = _output(['git', '-C', here, 'status', '--porcelain', '--untracked-files=no'])
    return f'{revision}+changes' if revision and changed else revision


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
