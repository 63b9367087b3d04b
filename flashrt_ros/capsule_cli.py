"""``ros2 run flashrt_ros capsule``: the capsule command, which needs no ROS."""

import sys

from flashrt_core.capsule.__main__ import main as capsule_main


def main() -> int:
    """Run the capsule command with this process's arguments."""
    return int(capsule_main(sys.argv[1:]) or 0)


if __name__ == '__main__':
    sys.exit(main())
