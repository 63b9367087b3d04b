"""Entry point of ``python -m flashrt_ros.doctor``."""

import sys

from flashrt_ros.doctor import main

sys.exit(main())
