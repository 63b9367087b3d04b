"""Run the demo and end with it: ``ros2 launch flashrt_ros demo.launch.py episodes:=5``.

The demo starts the robot, and executor and planner in one process, on a domain of its own, because
in lock-step it is their clock; this file is the way in for those who launch everything.
"""

from launch.actions import Shutdown
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import Node

from flashrt_ros.launch_actions import declared
from flashrt_ros.launch_actions import described
from launch import LaunchDescription

ARGUMENTS = (
    ('episodes', '3', 'in lock-step: interrupt, the same again, retry, other tables', None),
    ('policy_config', '', 'name or file; empty: the trained policy, or an untrained one', None),
    ('planner_config', '', 'name or file; empty: the trained planner, or an untrained one', None),
    ('out', 'out/demo', 'folder of report and logs', None),
    ('device', 'auto', 'where the models run', ('auto', 'cpu', 'cuda')),
    ('python', '', 'interpreter that runs the demo; empty: the one on PATH', None),
)


def generate_launch_description() -> LaunchDescription:
    """Declare the arguments, run the demo, shut down when it has ended."""
    demo = Node(
        package='flashrt_ros',
        executable='demo',
        prefix=LaunchConfiguration('python'),
        arguments=[
            '--episodes',
            LaunchConfiguration('episodes'),
            ['--policy-config=', LaunchConfiguration('policy_config')],
            ['--planner-config=', LaunchConfiguration('planner_config')],
            '--out',
            LaunchConfiguration('out'),
            '--device',
            LaunchConfiguration('device'),
        ],
        output='screen',
        emulate_tty=True,
        on_exit=Shutdown(reason='the demo has ended'),
    )
    return described(__file__, *declared(ARGUMENTS), demo)
