"""Entry point of ``python -m flashrt_ros.doctor``."""

import sys

from flashrt_ros.commands import doctor

sys.exit(doctor())
