"""``bringup`` with fake models: an obedient planner, and a policy that soon says done.

``TAUGHT`` in the environment: the policy never says so and its commands are not heard, because
somebody else moves the arm; the planner knows one more phrase.
"""

import os
from pathlib import Path
import re
import sys

sys.path.insert(0, str(Path(__file__).parent))

from _fake_planner import FakePlanner
from _fake_planner import obedient
from _fake_policy import FakeConfig
from _fake_policy import FakePolicy

from flashrt_ros import bringup
from flashrt_ros import executor_node
from flashrt_ros import planner_node

TAUGHT = 'TAUGHT' in os.environ


def understanding(prompt: str) -> str:
    """Obey "move the C block to the C zone" too."""
    return obedient(re.sub(r'move the (\w+) block to the (\w+) zone',
                           r'put the \1 block in the \2 zone', prompt))


policy = FakePolicy(FakeConfig(joints=5, action_units='rad rad rad 1 probability'))
policy.switches.done = 0.0 if TAUGHT else 1.0
planner = FakePlanner(script=understanding if TAUGHT else obedient)
executor_node.make_policy = lambda name: policy
planner_node.make_planner = lambda name: planner

if __name__ == '__main__':
    unheard = ['--ros-args', '-r', 'joint_trajectory:=unheard'] if TAUGHT else []
    sys.exit(bringup.main([*sys.argv, *unheard]))
