"""Entry point of ``python -m flashrt_ros.demo``."""

import sys

from flashrt_ros.demo import main

sys.exit(main())
