"""``ros2 run flashrt_ros doctor``: what this machine has and lacks, each with its remedy."""

from __future__ import annotations

import argparse
import sys

from flashrt_ros.doctor.findings import Needs
from flashrt_ros.doctor.machine import LiveMachine
from flashrt_ros.doctor.machine import Recorder
from flashrt_ros.doctor.machine import Recording
from flashrt_ros.doctor.report import write_json
from flashrt_ros.doctor.report import write_text

__all__ = ['main']


def main(argv: list[str] | None = None) -> int:
    """Examine this machine; the exit code is the number of FAILs (100 at most)."""
    parser = argparse.ArgumentParser(prog='doctor', description=__doc__)
    parser.add_argument('--json', action='store_true', help='one JSON object, for bug reports')
    parser.add_argument('--memory-gb', type=float, default=1.0, help='planned models and capsules')
    parser.add_argument('--disk-gb', type=float, default=5.0, help='planned files')
    parser.add_argument('--record', metavar='FILE', help='also keep all answers of the machine')
    parser.add_argument('--replay', metavar='FILE', help='report on a recorded machine')
    args, _ = parser.parse_known_args(argv)
    needs = Needs(args.memory_gb, args.disk_gb)
    write = write_json if args.json else write_text
    if args.replay:
        return min(100, write(Recording.load(args.replay), needs))
    machine = LiveMachine()
    if not args.record:
        return min(100, write(machine, needs))
    recorder = Recorder(machine)
    failures = write(recorder, needs)
    recorder.recording.save(args.record)
    print(f'recorded: {args.record}', file=sys.stderr)
    return min(100, failures)
