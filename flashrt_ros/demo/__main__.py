"""Entry point of ``python -m flashrt_ros.demo``."""

import sys

from flashrt_ros.commands import demo

sys.exit(demo())
