"""An executor process with the fake policy: its device is lost after a second of running, or
its configure never ends (``SLOW_CONFIGURE`` in the environment) or breaks (``BROKEN_CONFIGURE``).
"""

import os
from pathlib import Path
import sys
import threading

sys.path.insert(0, str(Path(__file__).parent))

from _fake_policy import FakePolicy

from flashrt_ros import executor_node

policy = FakePolicy()
executor_node.make_policy = lambda name: policy


def lose_after_some_ticks() -> None:
    """Wait for ticks, then let the device go."""
    pause = threading.Event()
    while len(policy.switches.inputs) < 10:
        pause.wait(0.01)
    policy.switches.lost = True


def break_down(*arguments: object, **options: object) -> None:
    """Fail as nobody foresaw."""
    raise RuntimeError('the bind broke')


if __name__ == '__main__':
    if 'BROKEN_CONFIGURE' in os.environ:
        policy.bind = break_down
    if 'SLOW_CONFIGURE' in os.environ:
        policy.switches.bind_gate = threading.Event()
    threading.Thread(target=lose_after_some_ticks, daemon=True).start()
    sys.exit(executor_node.main())
