"""The world at one instant, as plain numbers that can be stored, compared and drawn again."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flashrt_core.errors import BadSize

COLOURS = ('red', 'orange', 'yellow', 'green', 'blue', 'purple')
MAX_BLOCKS = 3
MAX_ZONES = 3
BLOCK_SIDE_M = 0.06
ZONE_RADIUS_M = 0.066
IN_ZONE_M = 0.058  # a block lies in a zone when its centre is this close to the zone's
VECTOR_SIZE = 4 + 4 + 1 + 1 + 3 + 1 + 2 + MAX_BLOCKS * 4 + MAX_ZONES * 3


@dataclass(frozen=True, eq=False)
class WorldState:
    """All the physics depends on; ``to_vector`` and ``from_vector`` round-trip bit for bit.

    The arrays are not to be written to.
    """

    joints: NDArray[np.float64]  # [4] rad, gripper 0 open .. 1 closed
    velocities: NDArray[np.float64]  # [4] per second
    lift: float  # 1 fingers above the blocks, 0 on the table
    held: int  # index of the block in the gripper, -1 for none
    grip: NDArray[np.float64]  # [3] m, m, rad: pose of the held block in the tool's frame
    step: int  # control periods since the world was made
    blocks: NDArray[np.float64]  # [blocks, 3] x, y, angle
    block_colours: tuple[int, ...]
    zones: NDArray[np.float64]  # [zones, 2] x, y
    zone_colours: tuple[int, ...]

    @property
    def block_names(self) -> tuple[str, ...]:
        """Colour names of the blocks, by index."""
        return tuple(COLOURS[colour] for colour in self.block_colours)

    @property
    def zone_names(self) -> tuple[str, ...]:
        """Colour names of the zones, by index."""
        return tuple(COLOURS[colour] for colour in self.zone_colours)

    def block_index(self, name: str) -> int | None:
        """Return the index of the block of that colour, None if there is none."""
        return self.block_names.index(name) if name in self.block_names else None

    def zone_index(self, name: str) -> int | None:
        """Return the index of the zone of that colour, None if there is none."""
        return self.zone_names.index(name) if name in self.zone_names else None

    def to_vector(self) -> NDArray[np.float64]:
        """Return float64 ``[VECTOR_SIZE]``; unused block and zone slots are zero."""
        blocks = np.zeros((MAX_BLOCKS, 4))
        blocks[: len(self.blocks), :3] = self.blocks
        blocks[: len(self.blocks), 3] = self.block_colours
        zones = np.zeros((MAX_ZONES, 3))
        zones[: len(self.zones), :2] = self.zones
        zones[: len(self.zones), 2] = self.zone_colours
        scalars = [self.lift, self.held, *self.grip, self.step, len(self.blocks), len(self.zones)]
        return np.concatenate(
            [self.joints, self.velocities, scalars, blocks.ravel(), zones.ravel()]
        ).astype(np.float64)

    @staticmethod
    def from_vector(vector: NDArray[np.float64]) -> 'WorldState':
        """Return the state that ``to_vector`` wrote.

        :raises BadSize: the vector's shape, or a count or index in it, is not one of this world.
        """
        if vector.shape != (VECTOR_SIZE,) or not np.isfinite(vector).all():
            raise BadSize(
                f'world state vector of shape {vector.shape} is not {VECTOR_SIZE} finite numbers; '
                f'pass what to_vector returned'
            )
        lift, held, step = float(vector[8]), int(vector[9]), int(vector[13])
        block_count, zone_count = int(vector[14]), int(vector[15])
        blocks = vector[16 : 16 + MAX_BLOCKS * 4].reshape(MAX_BLOCKS, 4)[:block_count]
        zones = vector[16 + MAX_BLOCKS * 4 :].reshape(MAX_ZONES, 3)[:zone_count]
        block_colours = tuple(int(colour) for colour in blocks[:, 3])
        zone_colours = tuple(int(colour) for colour in zones[:, 2])
        if (
            not 0 <= block_count <= MAX_BLOCKS
            or not 0 <= zone_count <= MAX_ZONES
            or not -1 <= held < block_count
            or not all(0 <= c < len(COLOURS) for c in block_colours + zone_colours)
        ):
            raise BadSize(
                f'world state vector says {block_count} blocks, {zone_count} zones, held {held}; '
                f'up to {MAX_BLOCKS} blocks and {MAX_ZONES} zones exist'
            )
        return WorldState(
            joints=vector[0:4].copy(),
            velocities=vector[4:8].copy(),
            lift=lift,
            held=held,
            grip=vector[10:13].copy(),
            step=step,
            blocks=blocks[:, :3].copy(),
            block_colours=block_colours,
            zones=zones[:, :2].copy(),
            zone_colours=zone_colours,
        )
