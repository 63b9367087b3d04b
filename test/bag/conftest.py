"""The executor rig of test/ros serves here too."""

from pathlib import Path
import sys

sys.path.insert(0, str(Path(__file__).parent.parent / 'ros'))
