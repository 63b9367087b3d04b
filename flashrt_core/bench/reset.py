"""1,000 resets over real ROS while inference runs and steps go on (needs flashrt_ros)."""

from __future__ import annotations

import argparse

from flashrt_core.bench._report import Report
from flashrt_core.bench.tick import add_rig_arguments
from flashrt_core.bench.tick import run_over_ros
from flashrt_core.command_line import whole_number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument('--count', type=whole_number(1), default=1000,
                        help='of resets (default 1000)')
    add_rig_arguments(parser)


def run(arguments: argparse.Namespace) -> Report:
    """Measure and return the report."""
    return run_over_ros('reset', arguments)
