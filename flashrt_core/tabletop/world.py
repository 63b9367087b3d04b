"""The built-in robot: an arm over a tray of coloured blocks and zones, stepped by control periods.

Joints are position servos with a velocity and an acceleration limit. To close the gripper is to
lower it: open fingers pass above the blocks, closing ones come down beside a block and take hold
of it, a held block is lifted and passes above the others, opening drops it. Closed empty fingers
push what they meet.

Scalar float64 arithmetic in a fixed order: the same seed and targets give the same bits.
"""

from collections.abc import Sequence
import math

import numpy as np
from numpy.typing import ArrayLike
from numpy.typing import NDArray

from flashrt_core.errors import ActionNonFinite
from flashrt_core.errors import BadJoints
from flashrt_core.errors import ParameterInvalid
from flashrt_core.tabletop import kinematics
from flashrt_core.tabletop.contacts import Block
from flashrt_core.tabletop.contacts import Disc
from flashrt_core.tabletop.contacts import HALF
from flashrt_core.tabletop.contacts import settle
from flashrt_core.tabletop.kinematics import FINGER_RADIUS_M
from flashrt_core.tabletop.kinematics import OPEN_WIDTH_M
from flashrt_core.tabletop.layout import draw_layout
from flashrt_core.tabletop.scene import render_state
from flashrt_core.tabletop.state import BLOCK_SIDE_M
from flashrt_core.tabletop.state import WorldState
from flashrt_core.tabletop.tasks import check_task
from flashrt_core.tabletop.tasks import format_task
from flashrt_core.tabletop.tasks import Goal
from flashrt_core.tabletop.tasks import parse_task
from flashrt_core.tabletop.tasks import task_solved

CONTROL_PERIOD_S = 0.02
SUBSTEPS = 4
FINGER_ALONG_M = (-0.014, 0.014)  # each finger is two discs along the tool
HOLD_GRIPPER = 1.0 - BLOCK_SIDE_M / OPEN_WIDTH_M  # a block stops the closing fingers here
JAW_DEPTH_M = 0.03  # how far off the tool point along the tool a block may lie and be gripped
_DT_S = CONTROL_PERIOD_S / SUBSTEPS
_SERVO_GAIN = 20.0  # 1/s
_BRAKE = 0.85  # share of the acceleration limit planned for stopping
_LIFT_RATE = 10.0  # 1/s
_RELEASE_GRIPPER = HOLD_GRIPPER - 0.06
_CLOSE_TO_LOWER = 0.2  # gripper targets above this lower the fingers
_STUCK_M = 1.5e-3


class World:
    """One robot and its table. Owned by one thread; nothing here blocks or allocates much."""

    def __init__(
        self, seed: int = 0, blocks: int = 1, task: str | None = None, *, zones: int = 2
    ) -> None:
        """Lay out a table.

        :param seed: 0 .. 2**64 - 1; decides positions, colours and, without ``task``, the task.
        :param blocks: 1..3 of distinct colours.
        :param task: text of the grammar in ``tasks``.
        :param zones: 1..3 of distinct colours.
        :raises ParameterInvalid: a number is out of range, or the task is not of this table.
        """
        state, drawn_goals = draw_layout(seed, blocks, zones)
        self.seed = seed
        self._goals = drawn_goals
        self._joints: list[float]
        self._velocities: list[float]
        self._held: int
        self._load(state)
        if task is not None:
            self.set_task(task)

    @property
    def joints(self) -> NDArray[np.float64]:
        """Measured joint positions, a new float64 ``[4]``: rad, rad, rad, gripper 0..1."""
        return np.array(self._joints)

    @property
    def joint_velocities(self) -> NDArray[np.float64]:
        """Measured joint velocities, a new float64 ``[4]``, per second."""
        return np.array(self._velocities)

    @property
    def resting_joints(self) -> NDArray[np.float64]:
        """Where the joints come to rest if they brake now, a new float64 ``[4]``."""
        velocities = np.array(self._velocities)
        limits = 2.0 * _BRAKE * np.array(kinematics.MAX_ACCELERATIONS)
        return np.array(self._joints) + velocities * np.abs(velocities) / limits

    @property
    def step_count(self) -> int:
        """Control periods since this world was made."""
        return self._step

    @property
    def task(self) -> str:
        """Text of the task."""
        return format_task(self._goals)

    @property
    def goals(self) -> tuple[Goal, ...]:
        """The task's goals in order."""
        return self._goals

    def set_task(self, task: str) -> None:
        """Give another task.

        :raises ParameterInvalid: it is not of the grammar, or names what is not on this table.
        """
        goals = parse_task(task)
        check_task(goals, self.snapshot())
        self._goals = goals

    def solved(self) -> bool:
        """Say whether the task is done in the present state."""
        return task_solved(self._goals, self.snapshot())

    def snapshot(self) -> WorldState:
        """Return the present state; it shares no memory with the world."""
        return WorldState(
            joints=np.array(self._joints),
            velocities=np.array(self._velocities),
            lift=self._lift,
            held=self._held,
            grip=np.array(self._grip),
            step=self._step,
            blocks=np.array(self._blocks, dtype=np.float64).reshape(-1, 3),
            block_colours=self._block_colours,
            zones=self._zones.copy(),
            zone_colours=self._zone_colours,
        )

    def restore(self, state: WorldState) -> None:
        """Go to a state taken earlier; the task stays.

        :raises ParameterInvalid: the task names what that table does not have.
        """
        check_task(self._goals, state)
        self._load(state)

    def render(self, view: str, size: int) -> NDArray[np.uint8]:
        """Return what camera ``view`` ('top' or 'wrist') sees: RGB ``[size, size, 3]``."""
        return render_state(self.snapshot(), view, size)

    def displace(self, joints: ArrayLike) -> None:
        """Put the arm elsewhere, at rest, as someone's hand would; a held block comes along.

        :raises BadJoints: not four numbers within the limits.
        """
        values = _four(joints)
        low, high = kinematics.LOWER_LIMITS, kinematics.UPPER_LIMITS
        if not ((values >= low) & (values <= high)).all():
            raise BadJoints(
                f'cannot displace the arm to {values.tolist()}; give {kinematics.JOINT_NAMES} '
                f'within {low} .. {high}'
            )
        self._joints = values.tolist()
        self._velocities = [0.0] * 4
        if self._held >= 0:
            self._joints[3] = min(self._joints[3], HOLD_GRIPPER)
            self._carry()

    def slip(self) -> int:
        """Let a held block fall where it is, the fingers staying as they are; return its index or
        -1.
        """
        held, self._held = self._held, -1
        settle(self._blocks)
        return held

    def move_block(self, name: str, x: float, y: float) -> None:
        """Move the block of that colour, as someone's hand would.

        :raises ParameterInvalid: there is no such block, or no such place.
        """
        index = self.snapshot().block_index(name)
        if index is None:
            raise ParameterInvalid(
                f'no {name} block to move; there are {", ".join(self.snapshot().block_names)}'
            )
        if not (math.isfinite(x) and math.isfinite(y)):
            raise ParameterInvalid(f'cannot move the {name} block to {x}, {y}; give numbers')
        if self._held == index:
            self._held = -1
        self._blocks[index][:2] = [float(x), float(y)]
        settle(self._blocks)

    def step(self, target: ArrayLike) -> None:
        """Advance one control period (20 ms) towards absolute joint targets, float64 ``[4]``.

        Targets beyond the limits are clipped to them.

        :raises BadJoints: not four numbers.
        :raises ActionNonFinite: NaN or infinity; the world does not move.
        """
        values = _four(target)
        if not np.isfinite(values).all():
            raise ActionNonFinite(
                f'joint target {values.tolist()} is not finite; give numbers'
            )
        clipped = [
            max(low, min(high, value))
            for value, low, high in zip(
                values.tolist(), kinematics.LOWER_LIMITS, kinematics.UPPER_LIMITS, strict=True
            )
        ]
        for _ in range(SUBSTEPS):
            self._substep(clipped)
        self._step += 1

    def _load(self, state: WorldState) -> None:
        self._joints = state.joints.tolist()
        self._velocities = state.velocities.tolist()
        self._lift = float(state.lift)
        self._held = int(state.held)
        self._grip: list[float] = state.grip.tolist()
        self._step = int(state.step)
        self._blocks: list[Block] = state.blocks.tolist()
        self._block_colours = state.block_colours
        self._zones = state.zones.copy()
        self._zone_colours = state.zone_colours

    def _substep(self, target: Sequence[float]) -> None:
        before = (list(self._joints), self._lift)
        self._servo(target)
        closing = target[3] > _CLOSE_TO_LOWER
        rate = _LIFT_RATE * _DT_S
        if self._held >= 0 or not closing:
            self._lift = min(1.0, self._lift + rate)
        else:
            self._lift = max(0.0, self._lift - rate)
        if self._held >= 0:
            self._hold(target)
        elif self._lift < 0.5:
            self._touch(before)

    def _servo(self, target: Sequence[float]) -> None:
        """Move each joint towards its target as fast as limits and braking distance allow."""
        for joint in range(4):
            error = target[joint] - self._joints[joint]
            limit = kinematics.MAX_ACCELERATIONS[joint]
            wanted = min(
                _SERVO_GAIN * abs(error),
                math.sqrt(2.0 * _BRAKE * limit * abs(error)),
                kinematics.MAX_VELOCITIES[joint],
            )
            wanted = math.copysign(wanted, error)
            change = limit * _DT_S
            velocity = self._velocities[joint]
            velocity += max(-change, min(change, wanted - velocity))
            position = self._joints[joint] + velocity * _DT_S
            low, high = kinematics.LOWER_LIMITS[joint], kinematics.UPPER_LIMITS[joint]
            if not low <= position <= high:
                position, velocity = max(low, min(high, position)), 0.0
            self._joints[joint], self._velocities[joint] = position, velocity

    def _hold(self, target: Sequence[float]) -> None:
        """Carry the held block, or drop it once the fingers have opened."""
        if self._joints[3] > HOLD_GRIPPER:
            self._joints[3], self._velocities[3] = HOLD_GRIPPER, 0.0
        along, across, turn = self._grip
        aligned = round(turn / (math.pi / 2)) * (math.pi / 2)
        self._grip = [along, 0.8 * across, turn + 0.2 * (aligned - turn)]
        self._carry()
        if self._lift < 0.5:
            others = [block for at, block in enumerate(self._blocks) if at != self._held]
            settle(others, finger_discs(kinematics.forward(self._joints), self._joints[3]))
        if self._joints[3] < _RELEASE_GRIPPER and target[3] < HOLD_GRIPPER:
            self._held = -1
            settle(self._blocks)

    def _carry(self) -> None:
        tool = kinematics.forward(self._joints)
        cos, sin = math.cos(tool.yaw), math.sin(tool.yaw)
        along, across, turn = self._grip
        block = self._blocks[self._held]
        block[0] = tool.x + cos * along - sin * across
        block[1] = tool.y + sin * along + cos * across
        block[2] = tool.yaw + turn

    def _touch(self, before: tuple[list[float], float]) -> None:
        """Let lowered fingers grip the block between them and push the others."""
        blocks_before = [list(block) for block in self._blocks]
        tool = kinematics.forward(self._joints)
        between = self._block_between(tool)
        if between >= 0:
            self._centre(between, tool)
        discs = finger_discs(tool, self._joints[3])
        free = () if between < 0 else (between,)
        if settle(self._blocks, discs, free) > _STUCK_M:
            # A block is squeezed against the rim: the arm stalls where it was.
            self._blocks = blocks_before
            self._joints, self._lift = before
            self._velocities = [0.0] * 4
            settle(self._blocks)
            return
        if between >= 0 and self._joints[3] >= HOLD_GRIPPER - 1e-9:
            self._grasp(between, tool)

    def _block_between(self, tool: kinematics.ToolPose) -> int:
        """Return the block that lies between the fingers and can still be gripped, or -1."""
        width = (1.0 - self._joints[3]) * OPEN_WIDTH_M
        if width < BLOCK_SIDE_M * 0.9:
            return -1
        best, best_distance = -1, math.inf
        for index in range(len(self._blocks)):
            along, across, _ = self._in_tool_frame(index, tool)
            room = 0.5 * (width - BLOCK_SIDE_M) + 0.006
            distance = math.hypot(along, across)
            if abs(along) <= JAW_DEPTH_M and abs(across) <= room and distance < best_distance:
                best, best_distance = index, distance
        return best

    def _in_tool_frame(
        self, index: int, tool: kinematics.ToolPose
    ) -> tuple[float, float, float]:
        x, y, angle = self._blocks[index]
        cos, sin = math.cos(tool.yaw), math.sin(tool.yaw)
        dx, dy = x - tool.x, y - tool.y
        return cos * dx + sin * dy, -sin * dx + cos * dy, angle - tool.yaw

    def _centre(self, index: int, tool: kinematics.ToolPose) -> None:
        """Keep a block between the closing fingers: they push it inwards and straighten it."""
        along, across, turn = self._in_tool_frame(index, tool)
        half_width = 0.5 * (1.0 - self._joints[3]) * OPEN_WIDTH_M
        aligned = round(turn / (math.pi / 2)) * (math.pi / 2)
        slack = max(0.0, half_width / HALF - 1.0)  # rad a block of so much room may be turned
        tilt = max(-slack, min(slack, turn - aligned))
        room = max(0.0, half_width - HALF * (math.cos(tilt) + abs(math.sin(tilt))))
        across = max(-room, min(room, across))
        turn = aligned + tilt
        self._grip = [along, across, turn]
        held, self._held = self._held, index
        self._carry()
        self._held = held

    def _grasp(self, index: int, tool: kinematics.ToolPose) -> None:
        self._grip = list(self._in_tool_frame(index, tool))
        self._held = index
        self._joints[3], self._velocities[3] = HOLD_GRIPPER, 0.0


def _four(joints: ArrayLike) -> NDArray[np.float64]:
    """Return four numbers as float64 ``[4]``; raises BadJoints."""
    try:
        values = np.asarray(joints, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        raise BadJoints(
            f'joints {joints!r:.80} are not numbers; give one for each of '
            f'{kinematics.JOINT_NAMES}'
        ) from None
    if values.shape != (4,):
        raise BadJoints(
            f'joints of shape {values.shape}; give one for each of {kinematics.JOINT_NAMES}'
        )
    return values


def finger_discs(tool: kinematics.ToolPose, gripper: float) -> list[Disc]:
    """Return the four discs of the two fingers on the table, x, y, radius in metres."""
    cos, sin = math.cos(tool.yaw), math.sin(tool.yaw)
    across = 0.5 * (1.0 - gripper) * OPEN_WIDTH_M + FINGER_RADIUS_M
    return [
        (tool.x + cos * along - sin * side, tool.y + sin * along + cos * side, FINGER_RADIUS_M)
        for side in (-across, across)
        for along in FINGER_ALONG_M
    ]
