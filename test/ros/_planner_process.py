"""A planner process with the fake model, or both nodes as ``bringup`` (first argument).

``STEP_S`` in the environment: of each decode step; ``STUCK_AFTER``: from that token on it stands.
"""

import os
from pathlib import Path
import sys
import threading

sys.path.insert(0, str(Path(__file__).parent))

from _fake_planner import FakePlanner
from _fake_planner import obedient

from flashrt_ros import bringup
from flashrt_ros import planner_node

model = FakePlanner(step_s=float(os.environ.get('STEP_S', '0')))
planner_node.make_planner = lambda name: model


def stand_after(count: int) -> None:
    """Let no decode step end once a plan has given out ``count`` tokens."""
    tokens = []

    def script(prompt: str) -> str:
        tokens.append(1)
        if len(tokens) > count:
            model.switches.gate = threading.Event()
        return obedient(prompt)

    model.switches.script = script


if __name__ == '__main__':
    if 'STUCK_AFTER' in os.environ:
        stand_after(int(os.environ['STUCK_AFTER']))
    both = sys.argv[1:2] == ['bringup']
    if both:
        del sys.argv[1]
    sys.exit(bringup.main() if both else planner_node.main())
