"""Executor and planner on one device: each alone, then together, then interrupts (flashrt_ros)."""

from __future__ import annotations

import argparse

from flashrt_core.bench._report import Report
from flashrt_core.bench.tick import add_rig_arguments
from flashrt_core.bench.tick import run_over_ros
from flashrt_core.command_line import number
from flashrt_core.command_line import whole_number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument('--seconds', type=number(0, above=True), default=60.0,
                        help='of both together (default 60)')
    parser.add_argument('--solo-seconds', type=number(0, above=True), default=30.0,
                        help='of each alone (default 30)')
    parser.add_argument('--interrupts', type=whole_number(1), default=200,
                        help='at random moments')
    parser.add_argument('--planner', default='qwen3_5')
    parser.add_argument('--planner-config', default='planner_bytes/planner.yaml',
                        help='named size, or a YAML file')
    parser.add_argument('--prompt', default='put the red block in the blue zone')
    add_rig_arguments(parser)
    parser.set_defaults(tick_period_steps=4)


def run(arguments: argparse.Namespace) -> Report:
    """Measure and return the report."""
    return run_over_ros('bringup', arguments)
