"""Steps and ticks over real ROS: jitter, and all that is not inference (needs flashrt_ros)."""

from __future__ import annotations

import argparse
import importlib

from flashrt_core.bench._report import Report
from flashrt_core.command_line import number
from flashrt_core.command_line import whole_number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument('--seconds', type=number(0, above=True), default=60.0,
                        help='to measure (default 60)')
    parser.add_argument('--output-mode', choices=('chunk', 'stream'), default='chunk',
                        help='a trajectory per tick, or a point per step (default chunk)')
    add_rig_arguments(parser)


def add_rig_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the benches over ROS share."""
    parser.add_argument('--device', choices=('auto', 'cpu', 'cuda'), default='auto')
    parser.add_argument('--policy', default='pi0')
    parser.add_argument('--policy-config', default='tiny', help='named size, or a YAML file')
    parser.add_argument('--robot', choices=('cameras', 'tabletop'), default='cameras',
                        help='noise for every view of the policy and an arm that rests, or the '
                        'built-in robot, which moves (default cameras)')
    parser.add_argument('--camera-hz', type=number(0, above=True), default=30.0)
    parser.add_argument('--tick-period-steps', type=whole_number(1), default=1)
    parser.add_argument('--fifo-priority', type=whole_number(0), default=40,
                        help='0: do not ask for it')


def run(arguments: argparse.Namespace) -> Report:
    """Measure and return the report."""
    return run_over_ros('tick', arguments)


def run_over_ros(name: str, arguments: argparse.Namespace) -> Report:
    """Run the bench of that name of the ROS side, which this side never imports by itself.

    :raises RosMissing: ROS 2 is not installed for this interpreter.
    """
    importlib.import_module('flashrt_ros.ros_environment').require_ros()
    report: Report = importlib.import_module(f'flashrt_ros.bench.{name}').run(arguments)
    return report
