"""Cameras: a world state drawn with OpenCV, the same pixels for the same state.

'top' looks straight down at the whole table, base below, x up. 'wrist' looks down past the
fingers, the tool pointing up. Shapes are anti-aliased polygons with sub-pixel corners; shadows are
soft and fall to the lower right.
"""

from collections.abc import Sequence
from dataclasses import dataclass
import functools
import math

import cv2
import numpy as np
from numpy.typing import NDArray

from flashrt_core.errors import ParameterInvalid
from flashrt_core.tabletop import kinematics
from flashrt_core.tabletop.contacts import HALF
from flashrt_core.tabletop.contacts import TRAY_X_M
from flashrt_core.tabletop.contacts import TRAY_Y_M
from flashrt_core.tabletop.kinematics import FINGER_RADIUS_M
from flashrt_core.tabletop.kinematics import OPEN_WIDTH_M
from flashrt_core.tabletop.state import WorldState
from flashrt_core.tabletop.state import ZONE_RADIUS_M

VIEWS = ('top', 'wrist')
MIN_SIZE, MAX_SIZE = 16, 2048

Image = NDArray[np.uint8]  # [size, size, 3] RGB
Points = NDArray[np.float64]  # [n, 2] metres
Colour = tuple[int, int, int]

TABLE: Colour = (214, 207, 196)
RIM: Colour = (174, 164, 150)
TRAY: Colour = (243, 240, 233)
GRID: Colour = (229, 224, 213)
STEEL: Colour = (52, 60, 74)
STEEL_EDGE: Colour = (30, 35, 45)
STEEL_LIGHT: Colour = (92, 104, 124)
JOINT: Colour = (222, 227, 235)
FINGER: Colour = (38, 42, 52)
PAD: Colour = (120, 208, 205)
PAINT: tuple[Colour, ...] = (  # in the order of state.COLOURS
    (214, 45, 52),
    (246, 131, 24),
    (247, 208, 38),
    (38, 158, 80),
    (36, 106, 214),
    (137, 70, 178),
)
_SHIFT = 4  # sub-pixel bits of OpenCV coordinates
_SHADOW = 0.30
_TOP_SPAN_M, _TOP_CENTRE = 0.86, (0.28, 0.0)
_WRIST_SPAN_M, _WRIST_AHEAD_M = 0.30, 0.035


def _unit_circle(corners: int) -> Points:
    turns = np.linspace(0, 2 * math.pi, corners, endpoint=False).tolist()
    return np.array([(math.cos(angle), math.sin(angle)) for angle in turns])


_CIRCLE = _unit_circle(40)
_FINE_CIRCLE = _unit_circle(96)
_SQUARE = np.array([(-1.0, -1.0), (1.0, -1.0), (1.0, 1.0), (-1.0, 1.0)])


@dataclass(frozen=True)
class Camera:
    """An affine map from metres on the table to pixels: ``pixel = matrix @ (x, y, 1)``."""

    matrix: NDArray[np.float64]  # [2, 3]
    scale: float  # pixels per metre
    size: int

    def pixels(self, points: Points) -> NDArray[np.int32]:
        """Return the points in OpenCV's fixed-point coordinates."""
        at = points @ self.matrix[:, :2].T + self.matrix[:, 2]
        return np.rint(at * (1 << _SHIFT)).astype(np.int32)

    def metres(self, pixels: float) -> float:
        """Return the length of so many pixels."""
        return pixels / self.scale


def render_state(state: WorldState, view: str, size: int) -> Image:
    """Draw what a camera sees, RGB uint8 ``[size, size, 3]``. Any thread.

    :raises ParameterInvalid: an unknown view, or a size outside 16..2048 pixels.
    """
    if view not in VIEWS:
        raise ParameterInvalid(f'view is {view!r}; give one of {", ".join(VIEWS)}')
    if not isinstance(size, int | np.integer) or not MIN_SIZE <= size <= MAX_SIZE:
        raise ParameterInvalid(f'image size is {size!r}; give {MIN_SIZE} to {MAX_SIZE} pixels')
    if view == 'top':
        return _render_top(state, size)
    return _render_wrist(state, size)


def _render_top(state: WorldState, size: int) -> Image:
    zones = tuple(
        (float(x), float(y), colour)
        for (x, y), colour in zip(state.zones.tolist(), state.zone_colours, strict=True)
    )
    camera, table = _top_table(size, zones)
    image = table.copy()
    links = _links(state)
    shadow = np.zeros((size, size), np.uint8)
    offset = np.array((-0.022, -0.016))
    for outline in links:
        _fill(shadow, camera, outline + offset, 255)
    _blocks_shadow(shadow, camera, state)
    _darken(image, shadow, camera)
    _draw_blocks(image, camera, state, held=False)
    _draw_arm(image, camera, state, links)
    _draw_gripper(image, camera, state)
    return image


def _render_wrist(state: WorldState, size: int) -> Image:
    tool = kinematics.forward(state.joints.tolist())
    cos, sin = math.cos(tool.yaw), math.sin(tool.yaw)
    centre = (tool.x + _WRIST_AHEAD_M * cos, tool.y + _WRIST_AHEAD_M * sin)
    camera = _camera(centre, tool.yaw, _WRIST_SPAN_M, size)
    image = _bare_table(size).copy()
    _draw_table(image, camera)
    for (x, y), colour in zip(state.zones.tolist(), state.zone_colours, strict=True):
        _draw_zone(image, camera, x, y, colour)
    shadow = np.zeros((size, size), np.uint8)
    _blocks_shadow(shadow, camera, state)
    for outline in _finger_outlines(state, tool):
        _fill(shadow, camera, outline + np.array((-0.012, -0.009)) * (0.3 + state.lift), 255)
    _darken(image, shadow, camera)
    _draw_blocks(image, camera, state, held=False)
    _draw_gripper(image, camera, state)
    return image


@functools.lru_cache(maxsize=64)
def _top_table(size: int, zones: tuple[tuple[float, float, int], ...]) -> tuple[Camera, Image]:
    camera = _camera(_TOP_CENTRE, 0.0, _TOP_SPAN_M, size)
    image = _bare_table(size).copy()
    _draw_table(image, camera)
    for x, y, colour in zones:
        _draw_zone(image, camera, x, y, colour)
    image.flags.writeable = False
    return camera, image


@functools.lru_cache(maxsize=16)
def _bare_table(size: int) -> Image:
    image = np.empty((size, size, 3), np.uint8)
    image[:] = TABLE
    image.flags.writeable = False
    return image


def _camera(centre: tuple[float, float], yaw: float, span_m: float, size: int) -> Camera:
    """Return a camera over ``centre`` whose image goes up along ``yaw``."""
    scale = size / span_m
    cos, sin = scale * math.cos(yaw), scale * math.sin(yaw)
    x, y = centre
    middle = (size - 1) / 2
    matrix = np.array(
        [
            [sin, -cos, middle - sin * x + cos * y],
            [-cos, -sin, middle + cos * x + sin * y],
        ]
    )
    return Camera(matrix, scale, size)


def _fill(image: Image, camera: Camera, outline: Points, colour: Colour | int) -> None:
    cv2.fillConvexPoly(image, camera.pixels(outline), colour, cv2.LINE_AA, _SHIFT)


def _disc(x: float, y: float, radius: float) -> Points:
    return _FINE_CIRCLE * radius + (x, y)


def _square(x: float, y: float, angle: float, half: float) -> Points:
    cos, sin = math.cos(angle) * half, math.sin(angle) * half
    return _SQUARE @ np.array([[cos, sin], [-sin, cos]]) + (x, y)


def _rod(start: Sequence[float], end: Sequence[float], from_m: float, to_m: float) -> Points:
    """Return a tapered rod with round ends of radius ``from_m`` and ``to_m``."""
    angle = math.atan2(end[1] - start[1], end[0] - start[0])
    cos, sin = math.cos(angle), math.sin(angle)
    turned = _CIRCLE @ np.array([[cos, sin], [-sin, cos]])
    fore = _CIRCLE[:, 0] > 0
    radii = np.where(fore, to_m, from_m)[:, None]
    return turned * radii + np.where(fore[:, None], end, start)


def _mix(colour: Colour, other: Colour, share: float) -> Colour:
    red, green, blue = (round(a + share * (b - a)) for a, b in zip(colour, other, strict=True))
    return red, green, blue


def _draw_table(image: Image, camera: Camera) -> None:
    (low_x, high_x), (low_y, high_y) = TRAY_X_M, TRAY_Y_M
    corners = np.array([(low_x, low_y), (high_x, low_y), (high_x, high_y), (low_x, high_y)])
    outward = np.array([(-1, -1), (1, -1), (1, 1), (-1, 1)])
    _fill(image, camera, corners + outward * 0.014, RIM)
    _fill(image, camera, corners, TRAY)
    half = max(camera.metres(0.5), 0.0008)
    grid = GRID if camera.scale > 150 else _mix(GRID, TRAY, 0.6)
    for step in range(-3, 4):
        y = step * 0.1
        _fill(image, camera, _bar(low_x, high_x, y - half, y + half), grid)
    for x in (0.33, 0.43, 0.53):
        _fill(image, camera, _bar(x - half, x + half, low_y, high_y), grid)


def _bar(low_x: float, high_x: float, low_y: float, high_y: float) -> Points:
    return np.array([(low_x, low_y), (high_x, low_y), (high_x, high_y), (low_x, high_y)])


def _draw_zone(image: Image, camera: Camera, x: float, y: float, colour: int) -> None:
    """A ring of full colour around a pale floor."""
    paint = PAINT[colour]
    ring = max(0.011, camera.metres(1.6))
    _fill(image, camera, _disc(x, y, ZONE_RADIUS_M), paint)
    _fill(image, camera, _disc(x, y, ZONE_RADIUS_M - ring), _mix(TRAY, paint, 0.20))


def _blocks_shadow(shadow: Image, camera: Camera, state: WorldState) -> None:
    for index, (x, y, angle) in enumerate(state.blocks.tolist()):
        height = 1.0 + 2.0 * state.lift if index == state.held else 1.0
        away = 0.007 * height
        _fill(shadow, camera, _square(x - away, y - 0.7 * away, angle, HALF), 255)


def _darken(image: Image, shadow: Image, camera: Camera) -> None:
    """Multiply the image by one minus the blurred shadow."""
    width = max(3, round(camera.scale * 0.012)) | 1
    soft = cv2.blur(shadow, (width, width))
    light = cv2.convertScaleAbs(soft, alpha=-_SHADOW, beta=255.0)
    cv2.multiply(image, cv2.merge((light, light, light)), image, 1 / 255)


def _draw_blocks(image: Image, camera: Camera, state: WorldState, held: bool) -> None:
    for index, (x, y, angle) in enumerate(state.blocks.tolist()):
        if (index == state.held) is held:
            grown = 1.0 + (0.10 * state.lift if held else 0.0)
            _draw_block(image, camera, (x, y, angle), HALF * grown, state.block_colours[index])


def _draw_block(
    image: Image, camera: Camera, pose: tuple[float, float, float], half: float, colour: int
) -> None:
    """A solid cube from above: dark edge, full face, a lighter inset."""
    paint = PAINT[colour]
    _fill(image, camera, _square(*pose, half), _mix(paint, (0, 0, 0), 0.42))
    edge = max(0.0035, camera.metres(0.7))
    _fill(image, camera, _square(*pose, half - edge), paint)
    if half * camera.scale > 5:
        _fill(image, camera, _square(*pose, half * 0.48), _mix(paint, (255, 255, 255), 0.28))


def _links(state: WorldState) -> list[Points]:
    base, elbow, wrist, tool = kinematics.joint_points(state.joints.tolist())
    yaw = float(state.joints[:3].sum())
    palm = (tool[0] - 0.055 * math.cos(yaw), tool[1] - 0.055 * math.sin(yaw))
    return [
        _disc(0.0, 0.0, 0.062),
        _rod(base, elbow, 0.032, 0.025),
        _rod(elbow, wrist, 0.024, 0.019),
        _rod(wrist, palm, 0.018, 0.014),
    ]


def _draw_arm(image: Image, camera: Camera, state: WorldState, links: list[Points]) -> None:
    base, elbow, wrist, _ = kinematics.joint_points(state.joints.tolist())
    edge = max(0.003, camera.metres(0.6))
    _fill(image, camera, links[0], STEEL_EDGE)
    _fill(image, camera, _disc(0.0, 0.0, 0.062 - edge), STEEL_LIGHT)
    for outline, start, end, radius in (
        (links[3], None, None, 0.0),
        (links[2], elbow, wrist, 0.019),
        (links[1], base, elbow, 0.025),
    ):
        _fill(image, camera, outline, STEEL_EDGE)
        if start is not None and end is not None:
            _fill(image, camera, _rod(start, end, radius + 0.006 - edge, radius - edge), STEEL)
            _fill(image, camera, _rod(start, end, 0.35 * radius, 0.25 * radius), STEEL_LIGHT)
    for (x, y), radius in ((wrist, 0.019), (elbow, 0.024), (base, 0.030)):
        _fill(image, camera, _disc(x, y, radius), STEEL_EDGE)
        _fill(image, camera, _disc(x, y, radius * 0.68), JOINT)


def _finger_outlines(state: WorldState, tool: kinematics.ToolPose) -> list[Points]:
    """Return left finger, right finger and palm."""
    cos, sin = math.cos(tool.yaw), math.sin(tool.yaw)
    side = 0.5 * (1.0 - float(state.joints[3])) * OPEN_WIDTH_M + FINGER_RADIUS_M

    def at(along: float, across: float) -> tuple[float, float]:
        return tool.x + cos * along - sin * across, tool.y + sin * along + cos * across

    fingers = [_rod(at(-0.05, s), at(0.018, s), 0.009, 0.0085) for s in (side, -side)]
    return [*fingers, _rod(at(-0.055, side), at(-0.055, -side), 0.011, 0.011)]


def _draw_gripper(image: Image, camera: Camera, state: WorldState) -> None:
    tool = kinematics.forward(state.joints.tolist())
    _draw_blocks(image, camera, state, held=True)
    for outline in _finger_outlines(state, tool):
        _fill(image, camera, outline, FINGER)
    cos, sin = math.cos(tool.yaw), math.sin(tool.yaw)
    _fill(
        image, camera, _disc(tool.x - 0.055 * cos, tool.y - 0.055 * sin, 0.009), PAD
    )
