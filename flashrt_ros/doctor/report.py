"""Run the checks in order and write them, as lines or as JSON."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
import json
import sys
import textwrap
from typing import TextIO

from flashrt_ros.doctor import checks_gpu
from flashrt_ros.doctor import checks_ros
from flashrt_ros.doctor import checks_system
from flashrt_ros.doctor.findings import Finding
from flashrt_ros.doctor.findings import Level
from flashrt_ros.doctor.findings import Needs
from flashrt_ros.doctor.findings import Patient
from flashrt_ros.doctor.findings import warn
from flashrt_ros.doctor.machine import Machine

Check = Callable[[Patient], Finding]
CHECKS: tuple[tuple[str, Check], ...] = (
    ('board and release', checks_system.board),
    ('interpreter', checks_system.interpreter),
    ('torch build', checks_gpu.torch_build),
    ('GPU code', checks_gpu.gpu_code),
    ('one CUDA', checks_gpu.one_cuda),
    ('Triton', checks_gpu.triton),
    ('graphs', checks_gpu.graphs),
    ('clocks and power', checks_system.clocks),
    ('memory', checks_system.memory),
    ('copies and tiers', checks_gpu.copies),
    ('number formats', checks_gpu.formats),
    ('container', checks_system.container),
    ('ROS and numpy', checks_ros.ros),
    ('DDS for images', checks_ros.dds),
    ('real time', checks_system.real_time),
    ('weights and disk', checks_system.disk),
    ('GPU neighbours', checks_gpu.neighbours),
    ('network', checks_ros.domain),
    ('optional packages', checks_system.packages),
)
_COLOURS = {Level.OK: '32', Level.WARN: '33', Level.FAIL: '1;31'}


def examine(machine: Machine, needs: Needs) -> Iterator[tuple[int, str, Finding]]:
    """Yield number, title and finding as each check ends; a check that raises is a warn."""
    patient = Patient(machine, needs)
    for number, (title, check) in enumerate(CHECKS, start=1):
        try:
            finding = check(patient)
        except Exception as err:
            finding = warn(
                f'the check itself failed: {type(err).__name__}: {err}',
                'python -m flashrt_ros.doctor --record doctor.json   # and send it with a report',
            )
        yield number, title, finding


def versions_line(machine: Machine) -> str:
    """Versions by metadata, printed before anything can crash."""
    found = dict(sorted(machine.probe('versions', 10.0).items()))
    found.pop('error', None)
    python = '.'.join(map(str, machine.interpreter.version))
    items = [
        f'python {python} {machine.interpreter.machine}',
        *(f'{k} {v}' for k, v in found.items()),
    ]
    return ', '.join(items)


def write_text(machine: Machine, needs: Needs, out: TextIO | None = None) -> int:
    """Print the report line by line; return the number of FAILs."""
    out = out or sys.stdout
    colour = out.isatty()
    print(textwrap.fill(versions_line(machine), 99, subsequent_indent='  '), file=out, flush=True)
    counts = {level: 0 for level in Level}
    for number, title, finding in examine(machine, needs):
        counts[finding.level] += 1
        word = f'{finding.level.value:<4}'
        if colour:
            word = f'\x1b[{_COLOURS[finding.level]}m{word}\x1b[0m'
        print(f'{word} {number:>2} {title:<18} {finding.found}', file=out, flush=True)
        if finding.remedy:
            print(f'        -> {finding.remedy}', file=out, flush=True)
    print(
        f'{counts[Level.OK]} ok, {counts[Level.WARN]} warnings, {counts[Level.FAIL]} failures',
        file=out,
    )
    return counts[Level.FAIL]


def write_json(machine: Machine, needs: Needs, out: TextIO | None = None) -> int:
    """Print the report as one JSON object; return the number of FAILs."""
    out = out or sys.stdout
    checks = [
        {'number': n, 'title': t, 'level': f.level.value, 'found': f.found, 'remedy': f.remedy}
        for n, t, f in examine(machine, needs)
    ]
    failures = sum(check['level'] == Level.FAIL.value for check in checks)
    json.dump(
        {'versions': versions_line(machine), 'failures': failures, 'checks': checks}, out, indent=1
    )
    print(file=out)
    return failures
