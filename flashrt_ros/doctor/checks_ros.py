"""Checks of ROS 2, numpy beside it, and DDS for images."""

from __future__ import annotations

import os

from flashrt_ros.doctor.findings import fail
from flashrt_ros.doctor.findings import Finding
from flashrt_ros.doctor.findings import ok
from flashrt_ros.doctor.findings import Patient
from flashrt_ros.doctor.findings import warn
from flashrt_ros.doctor.machine import version_tuple

PROFILE = (
    'export FASTRTPS_DEFAULT_PROFILES_FILE='
    '$(ros2 pkg prefix flashrt_ros)/share/flashrt_ros/config/fastdds_shm.xml'
)
PROFILE_OF_CHECKOUT = (  # the wheels have no ros2
    'export FASTRTPS_DEFAULT_PROFILES_FILE=$PWD/config/fastdds_shm.xml   # in the checkout'
)
SOURCE = 'source /opt/ros/jazzy/setup.bash && source ~/ws/install/setup.bash'


def ros(p: Patient) -> Finding:
    """Jazzy, the interfaces of this package, and a numpy that fits."""
    answer = p.probe('ros', 15.0)
    wheels = not p.board['system_python']
    if 'error' in answer:
        remedy = 'make demo   # installs ROS 2 wheels into .venv' if wheels else SOURCE
        return fail(f'rclpy does not load: {answer["error"]}', remedy)
    apt = answer['rclpy'].startswith('/opt/ros/')
    distro = answer['distro'] or ('jazzy wheels' if not apt else answer['rclpy'].split('/')[3])
    found = f'ROS 2 {distro}, {answer.get("rmw", "rmw unknown")}, numpy {answer["numpy"]}'
    if 'jazzy' not in distro:
        return fail(f'{found}: not Jazzy', SOURCE)
    for key in ('interfaces', 'services'):
        if answer[key] is not True:
            remedy = (
                'make build'
                if not apt
                else f'colcon build --packages-select flashrt_ros && {SOURCE}'
            )
            return fail(f'{found}; flashrt_ros {key} do not load: {answer[key]}', remedy)
    if apt and version_tuple(answer['numpy'])[0] >= 2:
        return warn(
            f'{found}: cv_bridge and other apt modules want numpy 1.26',
            '~/flashrt_venv/bin/pip install -c ~/ws/src/flashrt_ros/constraints-jazzy.txt '
            "'numpy<2'",
        )
    folders = {os.path.dirname(path) for path in answer.get('opencv_libraries', [])}
    if len(folders) > 1:
        return warn(
            f'{found}; two OpenCVs in one process: {", ".join(sorted(folders))}',
            "pip uninstall opencv-python; pip install 'opencv-python-headless<4.12'",
        )
    return ok(f'{found}, interfaces load')


def dds(p: Patient) -> Finding:
    """Best-effort images between two processes: large ones need the shared-memory profile."""
    if 'error' in p.probe('ros', 15.0):
        return ok('skipped: no ROS (see the check above)')
    answer = p.probe('dds', 30.0)
    if 'error' in answer and not answer.get('received'):
        return fail(
            f'two processes on this host do not meet: {answer["error"]}',
            'ip link set lo multicast on; unset ROS_AUTOMATIC_DISCOVERY_RANGE',
        )
    sent = answer['sent']
    profile = PROFILE if p.board['system_python'] else PROFILE_OF_CHECKOUT
    found = ', '.join(f'{size}: {n} of {sent}' for size, n in answer['received'].items())
    small, large = answer['received'].get('224x224', 0), answer['received'].get('640x480', 0)
    if small == 0:
        return fail(f'{found}: no image arrives', 'ip link set lo multicast on')
    if small < sent:
        return warn(f'{found}', 'stop other load; ' + profile)
    if large < sent:
        return warn(f'{found}: frames above the shared-memory segment are dropped', profile)
    if 'FASTRTPS_DEFAULT_PROFILES_FILE' not in p.machine.env:
        found += ' with our profile; camera drivers started elsewhere need it too'
    return ok(found)


def domain(p: Patient) -> Finding:
    """Who else may talk to the robot."""
    env = p.machine.env
    found = f'ROS_DOMAIN_ID {env.get("ROS_DOMAIN_ID", "0 (default)")}'
    scope = env.get('ROS_AUTOMATIC_DISCOVERY_RANGE', 'SUBNET (default)')
    found += f', discovery {scope}'
    if env.get('ROS_SECURITY_ENABLE') == 'true':
        return ok(f'{found}, SROS2 on')
    if scope in ('LOCALHOST', 'OFF'):
        return ok(f'{found}, SROS2 off')
    return warn(
        f'{found}, SROS2 off: anyone on this network and domain can call ~/restore',
        'export ROS_AUTOMATIC_DISCOVERY_RANGE=LOCALHOST   # or SROS2, config/sros2_policy.xml',
    )
