"""Contacts in the plane: square blocks against fingers (discs), against each other and the tray's
rim.

Quasi-static: whoever overlaps is moved apart by the shortest way, nothing slides on. A block is a
mutable ``[x, y, angle]`` list in metres and rad; all blocks have the same side.
"""

from collections.abc import Sequence
import math

from flashrt_core.tabletop.state import BLOCK_SIDE_M

TRAY_X_M = (0.24, 0.62)
TRAY_Y_M = (-0.34, 0.34)
HALF = BLOCK_SIDE_M / 2
_REACH = BLOCK_SIDE_M * math.sqrt(2.0)  # centres further apart than this cannot overlap
_TURN = 1.0 / (0.6 * BLOCK_SIDE_M) ** 2  # rad of turn per m of push and m of lever
_PASSES = 16

Block = list[float]
Disc = tuple[float, float, float]  # x, y, radius


def disc_overlap(block: Block, disc: Disc) -> tuple[float, float, float]:
    """Return how deep a disc lies in a block and the direction the block must move, ``(depth, nx,
    ny)``.
    """
    x, y, radius = disc
    dx, dy = x - block[0], y - block[1]
    if dx * dx + dy * dy > (_REACH / 2 + radius) ** 2:
        return 0.0, 0.0, 0.0
    cos, sin = math.cos(block[2]), math.sin(block[2])
    u, v = cos * dx + sin * dy, -sin * dx + cos * dy  # the disc in the block's frame
    if abs(u) < HALF and abs(v) < HALF:
        along_u = HALF - abs(u) < HALF - abs(v)
        depth = radius + HALF - (abs(u) if along_u else abs(v))
        nu, nv = (-math.copysign(1.0, u), 0.0) if along_u else (0.0, -math.copysign(1.0, v))
    else:
        gap_u, gap_v = max(-HALF, min(HALF, u)) - u, max(-HALF, min(HALF, v)) - v
        gap = math.hypot(gap_u, gap_v)
        depth = radius - gap
        if depth <= 0.0:
            return 0.0, 0.0, 0.0
        nu, nv = gap_u / gap, gap_v / gap
    return depth, cos * nu - sin * nv, sin * nu + cos * nv


def block_overlap(first: Block, second: Block) -> tuple[float, float, float]:
    """Return how deep two blocks overlap and the direction that moves ``second`` away.

    Separating axes of two squares: the axis of least overlap is the shortest way out.
    """
    dx, dy = second[0] - first[0], second[1] - first[1]
    if dx * dx + dy * dy > _REACH * _REACH:
        return 0.0, 0.0, 0.0
    turn = second[2] - first[2]
    extent = HALF * (1.0 + abs(math.cos(turn)) + abs(math.sin(turn)))
    best = (math.inf, 0.0, 0.0)
    for angle in (first[2], first[2] + math.pi / 2, second[2], second[2] + math.pi / 2):
        nx, ny = math.cos(angle), math.sin(angle)
        distance = dx * nx + dy * ny
        depth = extent - abs(distance)
        if depth <= 0.0:
            return 0.0, 0.0, 0.0
        if depth < best[0]:
            side = math.copysign(1.0, distance)
            best = (depth, nx * side, ny * side)
    return best


def push(block: Block, disc: Disc) -> None:
    """Move a block out of a disc; a push beside the centre turns it too."""
    depth, nx, ny = disc_overlap(block, disc)
    if depth <= 0.0:
        return
    lever_x, lever_y = disc[0] - block[0], disc[1] - block[1]
    block[0] += depth * nx
    block[1] += depth * ny
    turn = _TURN * depth * (lever_x * ny - lever_y * nx)
    block[2] += max(-0.2, min(0.2, turn))


def keep_in_tray(block: Block) -> None:
    """Move a block back inside the rim."""
    extent = HALF * (abs(math.cos(block[2])) + abs(math.sin(block[2])))
    block[0] = max(TRAY_X_M[0] + extent, min(TRAY_X_M[1] - extent, block[0]))
    block[1] = max(TRAY_Y_M[0] + extent, min(TRAY_Y_M[1] - extent, block[1]))


def settle(blocks: Sequence[Block], discs: Sequence[Disc] = (), free: Sequence[int] = ()) -> float:
    """Push blocks apart, out of the discs and into the tray; return the overlap that is left, in
    metres.

    :param free: indices of blocks that the discs do not touch. A left-over is a block squeezed
        between a disc and the rim: the caller then takes the disc back.
    """
    for _ in range(_PASSES):
        for index, block in enumerate(blocks):
            if index not in free:
                for disc in discs:
                    push(block, disc)
            keep_in_tray(block)
        for index, block in enumerate(blocks):
            for other in blocks[index + 1 :]:
                depth, nx, ny = block_overlap(block, other)
                if depth > 0.0:
                    block[0] -= 0.5 * depth * nx
                    block[1] -= 0.5 * depth * ny
                    other[0] += 0.5 * depth * nx
                    other[1] += 0.5 * depth * ny
                    keep_in_tray(block)
                    keep_in_tray(other)
        left = overlap_left(blocks, discs, free)
        if left < 1e-4:
            break
    return left


def overlap_left(blocks: Sequence[Block], discs: Sequence[Disc], free: Sequence[int]) -> float:
    """Return the deepest overlap among blocks and discs, in metres."""
    left = 0.0
    for index, block in enumerate(blocks):
        if index not in free:
            left = max([left, *(disc_overlap(block, disc)[0] for disc in discs)])
        left = max([left, *(block_overlap(block, other)[0] for other in blocks[index + 1 :])])
    return left
