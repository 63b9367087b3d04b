"""``bringup`` with fake models: an obedient planner, and a policy that soon says done."""

from pathlib import Path
import sys

sys.path.insert(0, str(Path(__file__).parent))

from _fake_planner import FakePlanner
from _fake_policy import FakeConfig
from _fake_policy import FakePolicy

from flashrt_ros import bringup
from flashrt_ros import executor_node
from flashrt_ros import planner_node

policy = FakePolicy(FakeConfig(
    joints=5, action_units='rad rad rad 1 probability'))
policy.switches.done = 1.0
planner = FakePlanner()
executor_node.make_policy = lambda name: policy
planner_node.make_planner = lambda name: planner

if __name__ == '__main__':
    sys.exit(bringup.main())
