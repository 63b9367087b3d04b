"""``ros2 run flashrt_ros doctor``: what this machine has and lacks, each with its remedy."""

from __future__ import annotations

import argparse
from pathlib import Path
import sys

from flashrt_core.command_line import check_output
from flashrt_core.command_line import number
from flashrt_core.command_line import run
from flashrt_ros.doctor.findings import Needs
from flashrt_ros.doctor.machine import LiveMachine
from flashrt_ros.doctor.machine import Recorder
from flashrt_ros.doctor.machine import Recording
from flashrt_ros.doctor.report import write_json
from flashrt_ros.doctor.report import write_text

__all__ = ['main']


def main(argv: list[str] | None = None) -> int:
    """Examine this machine; the exit code is the number of FAILs (100 at most).

    A mistake at the call is told in one line on the error stream, before anything is examined.
    """
    parser = argparse.ArgumentParser(prog='doctor', description=__doc__)
    parser.add_argument('--json', action='store_true', help='one JSON object, for bug reports')
    parser.add_argument('--memory-gb', type=number(0), default=1.0,
                        help='planned models and capsules')
    parser.add_argument('--disk-gb', type=number(0), default=5.0, help='planned files')
    parser.add_argument('--record', type=Path, metavar='FILE',
                        help='also keep all answers of the machine')
    parser.add_argument('--replay', type=Path, metavar='FILE', help='report on a recorded machine')
    args, rest = parser.parse_known_args(argv)
    if rest and rest[0] != '--ros-args':
        parser.error(f'unrecognized arguments: {" ".join(rest)}')
    return run('doctor', lambda: min(100, _examine(args)))


def _examine(args: argparse.Namespace) -> int:
    needs = Needs(args.memory_gb, args.disk_gb)
    write = write_json if args.json else write_text
    if args.record:
        check_output(args.record, 'recording')
    if args.replay:
        return write(Recording.load(args.replay), needs)
    machine = LiveMachine()
    if not args.record:
        return write(machine, needs)
    recorder = Recorder(machine)
    failures = write(recorder, needs)
    recorder.recording.save(args.record)
    print(f'recorded: {args.record}', file=sys.stderr)
    return failures
