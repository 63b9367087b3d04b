"""The arm: three joints in a plane seen from above, and a gripper.

Frame as in REP-103: x forward, y left, angles counter-clockwise, metres and radians. Joint order
everywhere is ``JOINT_NAMES``; the gripper runs from 0 (open) to 1 (closed). The elbow bends one
way only, so a tool pose has one solution.
"""

from collections.abc import Sequence
import math
from typing import NamedTuple

from flashrt_core.errors import ActionOutOfLimits

JOINT_NAMES = ('shoulder', 'elbow', 'wrist', 'gripper')
LINKS_M = (0.32, 0.30, 0.13)
LOWER_LIMITS = (-2.2, 0.0, -2.4, 0.0)  # rad, rad, rad, 1
UPPER_LIMITS = (2.2, 2.9, 1.6, 1.0)
MAX_VELOCITIES = (1.6, 1.6, 2.0, 3.0)  # per second
MAX_ACCELERATIONS = (16.0, 16.0, 20.0, 40.0)  # per second squared
OPEN_WIDTH_M = 0.12  # between the fingers at gripper 0; nothing at gripper 1
FINGER_RADIUS_M = 0.008


class ToolPose(NamedTuple):
    """Point between the finger tips (m) and the direction the tool points to (rad)."""

    x: float
    y: float
    yaw: float


def joint_points(joints: Sequence[float]) -> list[tuple[float, float]]:
    """Return base, elbow, wrist and tool point, in metres, for joints ``[>=3]`` in rad."""
    x = y = angle = 0.0
    points = [(0.0, 0.0)]
    for length, joint in zip(LINKS_M, joints, strict=False):
        angle += joint
        x += length * math.cos(angle)
        y += length * math.sin(angle)
        points.append((x, y))
    return points


def forward(joints: Sequence[float]) -> ToolPose:
    """Return the tool pose for joints ``[>=3]`` in rad."""
    x, y = joint_points(joints)[3]
    return ToolPose(x, y, joints[0] + joints[1] + joints[2])


def inverse(x: float, y: float, yaw: float | None = None) -> tuple[float, float, float]:
    """Return the joints that bring the tool point to ``(x, y)`` metres.

    :param yaw: direction of the tool in rad; by default it points away from the base.
    :raises ActionOutOfLimits: the point is out of reach or a joint would leave its limits.
    Law of cosines on the first two links, the wrist takes what is left of the yaw.
    """
    if yaw is None:
        yaw = math.atan2(y, x)
    upper, fore, hand = LINKS_M
    wrist_x = x - hand * math.cos(yaw)
    wrist_y = y - hand * math.sin(yaw)
    reach = math.hypot(wrist_x, wrist_y)
    if not abs(upper - fore) < reach <= upper + fore:
        raise ActionOutOfLimits(
            f'tool point ({x:.3f}, {y:.3f}) m at yaw {yaw:.2f} rad puts the wrist {reach:.3f} m '
            f'from the base; it reaches {abs(upper - fore):.2f} to {upper + fore:.2f} m'
        )
    elbow = math.acos(_unit((reach**2 - upper**2 - fore**2) / (2.0 * upper * fore)))
    inner = math.acos(_unit((reach**2 + upper**2 - fore**2) / (2.0 * reach * upper)))
    shoulder = math.atan2(wrist_y, wrist_x) - inner
    joints = (shoulder, elbow, wrap_angle(yaw - shoulder - elbow))
    for name, value, low, high in zip(
        JOINT_NAMES, joints, LOWER_LIMITS, UPPER_LIMITS, strict=False
    ):
        if not low <= value <= high:
            raise ActionOutOfLimits(
                f'tool point ({x:.3f}, {y:.3f}) m at yaw {yaw:.2f} rad needs {name} at '
                f'{value:.3f} rad; its limits are {low} to {high} rad'
            )
    return joints


def wrap_angle(angle: float) -> float:
    """Return the same direction within [-pi, pi)."""
    return (angle + math.pi) % (2.0 * math.pi) - math.pi


def _unit(value: float) -> float:
    return max(-1.0, min(1.0, value))


HOME = (*inverse(0.23, 0.0), 0.0)
