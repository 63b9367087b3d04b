"""A node's process ends in order when it is told to."""

import os
import signal
import subprocess
import sys
import time

import pytest

from flashrt_ros.ros_environment import DomainLease
from flashrt_ros.ros_environment import SOURCE_ROOT

pytestmark = pytest.mark.ros

IDLE = """
import sys
from rclpy.node import Node
from flashrt_ros.main import run_node

class Idle(Node):
    def stop(self, timeout_s):
        return True

def make(stop):
    node = Idle('idle')
    node.create_guard_condition(lambda: print('spun', flush=True)).trigger()
    return node

sys.exit(run_node(make))
"""


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_node_with_nothing_to_wait_for_ends_at_a_signal(number):
    lease = DomainLease()
    env = {**os.environ, 'PYTHONPATH': str(SOURCE_ROOT), 'ROS_DOMAIN_ID': str(lease.id)}
    process = subprocess.Popen([sys.executable, '-c', IDLE], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stdout.readline() == 'spun\n'
        time.sleep(1.0)  # until it waits again
        process.send_signal(number)
        _, told = process.communicate(timeout=60)
    finally:
        process.kill()
        lease.close()
    assert process.returncode == 0 and f'ending: {number.name}' in told
