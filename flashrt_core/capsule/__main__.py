"""Entry of ``python -m flashrt_core.capsule``."""

import sys

from .cli import main

if __name__ == '__main__':
    sys.exit(main())
