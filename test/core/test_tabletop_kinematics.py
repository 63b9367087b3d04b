"""The arm's forward and inverse kinematics."""

import math

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import pytest

from flashrt_core.errors import ActionOutOfLimits
from flashrt_core.tabletop.contacts import TRAY_X_M
from flashrt_core.tabletop.contacts import TRAY_Y_M
from flashrt_core.tabletop.kinematics import forward
from flashrt_core.tabletop.kinematics import HOME
from flashrt_core.tabletop.kinematics import inverse
from flashrt_core.tabletop.kinematics import LOWER_LIMITS
from flashrt_core.tabletop.kinematics import UPPER_LIMITS
from flashrt_core.tabletop.kinematics import wrap_angle

MARGIN_M = 0.03


@settings(max_examples=200, deadline=None)
@given(
    st.floats(TRAY_X_M[0] + MARGIN_M, TRAY_X_M[1] - MARGIN_M),
    st.floats(TRAY_Y_M[0] + MARGIN_M, TRAY_Y_M[1] - MARGIN_M),
)
def test_every_point_a_block_can_lie_at_is_reached_pointing_outward(x, y):
    joints = inverse(x, y)
    tool = forward(joints)
    assert math.dist((tool.x, tool.y), (x, y)) < 1e-9
    assert abs(wrap_angle(tool.yaw - math.atan2(y, x))) < 1e-9
    for value, low, high in zip(joints, LOWER_LIMITS[:3], UPPER_LIMITS[:3], strict=True):
        assert low <= value <= high


def test_a_point_out_of_reach_is_refused_with_the_reach():
    with pytest.raises(ActionOutOfLimits, match=r'0\.62 m'):
        inverse(0.9, 0.0)


def test_a_pose_beyond_a_joint_limit_names_the_joint():
    with pytest.raises(ActionOutOfLimits, match='wrist'):
        inverse(0.5, 0.0, yaw=-2.9)


def test_home_is_ahead_of_the_base_with_the_gripper_open():
    tool = forward(HOME)
    assert (tool.x, tool.y) == pytest.approx((0.23, 0.0), abs=1e-9)
    assert HOME[3] == 0.0
