"""Marks: small state copied to a ring at each boundary, to go back a few ticks at no cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from typing import TYPE_CHECKING

import torch

from ..errors import ContractError
from ..errors import MarkDead
from .boundary import Boundary

if TYPE_CHECKING:
    from ..runtime import Backend


@dataclass(eq=False)
class Mark:
    """One point of a session to roll back to; `dead` says why it no longer can be, or ''.

    Holds a slot of the session's ring: the ring reuses the oldest slot, and the mark dies. `notes`
    are those of its boundary then.
    """

    position: int
    extents: Mapping[str, int]
    parent: str
    bit_exact: bool
    lineage: int
    slot: int
    notes: Any = None
    dead: str = ''

    @property
    def id(self) -> str:
        """A name for reports."""
        return f'mark-{self.position}'


class MarkRing:
    """Slots for the small state of row 0: everything but KV, which marks leave in place.

    Allocated once; taking a mark is a few device copies on the current stream without waiting,
    ordered before the next tick by the lane's stream. Lane thread only.

    :param depth: marks held; the oldest leaves first.
    """

    def __init__(self, backend: Backend, boundary: Boundary, depth: int) -> None:
        self.depth = depth
        self._live = _small_views(boundary)
        sizes = [view.numel() for view in self._live]
        self.nbytes = sum(sizes)
        slots = backend.empty((depth, self.nbytes), torch.uint8)
        self._saved = [slot.split(sizes) for slot in slots]
        self._marks: list[Mark] = []
        self._free = list(range(depth))

    @property
    def marks(self) -> tuple[Mark, ...]:
        """Live marks, oldest first."""
        return tuple(self._marks)

    def take(self, boundary: Boundary) -> Mark:
        """Copy the small state now; the oldest mark dies if all slots are taken."""
        slot = self.claim()
        for saved, live in zip(self._saved[slot], self._live):
            saved.copy_(live)
        return self.note(boundary, slot)

    def claim(self) -> int:
        """Take a slot off the ring, for `note` or `give`; the oldest mark dies if none is free."""
        if not self._free:
            self._drop(self._marks[0], f'the ring holds {self.depth} marks and newer ones came')
        return self._free.pop()

    def give(self, slot: int) -> None:
        """Put a claimed slot back; its mark, if it was noted, is dead."""
        for mark in self._marks:
            if mark.slot == slot:
                self._drop(mark, 'what it would hold did not arrive')
                return
        self._free.append(slot)

    def place(self, slot: int, address: int) -> int:
        """The address in a slot where the small state at a live address is kept."""
        for saved, live in zip(self._saved[slot], self._live):
            if live.data_ptr() <= address < live.data_ptr() + live.numel():
                return saved.data_ptr() + address - live.data_ptr()
        raise ContractError(f'{address:#x} is no address of the small state')

    def note(self, boundary: Boundary, slot: int) -> Mark:
        """Make a claimed slot, which holds the small state of now or will, the newest mark."""
        mark = Mark(
            boundary.position(),
            boundary.extents(),
            boundary.parent,
            boundary.bit_exact,
            boundary.lineage,
            slot,
            boundary.notes(),
        )
        self._marks.append(mark)
        return mark

    def write_back(self, mark: Mark) -> None:
        """Copy a mark's state into the live buffers; marks taken after it die."""
        for saved, live in zip(self._saved[mark.slot], self._live):
            live.copy_(saved)

    def equals(self, mark: Mark) -> bool:
        """Whether the live small state is the mark's."""
        return all(map(torch.equal, self._saved[mark.slot], self._live))

    def forget_after(self, mark: Mark) -> None:
        """Drop the marks that a rollback to `mark` undid."""
        for later in self._marks[self._marks.index(mark) + 1 :]:
            self._drop(later, f'a rollback to position {mark.position} undid it')

    def check(self, mark: Mark) -> Mark:
        """Return the mark if it can be rolled back to, else raise MarkDead with the reason."""
        if mark.dead or mark not in self._marks:
            raise MarkDead(
                f'the mark at position {mark.position} is dead: '
                f'{mark.dead or "it belongs to another session"}; restore a capsule instead'
            )
        return mark

    def back(self, boundary: Boundary, boundaries: int) -> Mark:
        """The mark this many boundaries before the present one, within what was last restored.

        Of several marks of one boundary the last one counts.
        """
        here = boundary.position()
        held = list({
            mark.position: mark
            for mark in self._marks
            if mark.lineage == boundary.lineage and mark.position != here
        }.values())
        if not 1 <= boundaries <= len(held):
            raise MarkDead(
                f'cannot go back {boundaries} boundaries from position {here}: {len(held)} marks '
                f'are held since the last restore (ring of {self.depth}); restore a capsule'
            )
        return held[-boundaries]

    def kill_above(self, from_token: int) -> None:
        """Kill marks whose KV reaches beyond `from_token`, which is about to be rewritten."""
        for mark in list(self._marks):
            if mark.extents and max(mark.extents.values()) > from_token:
                self._drop(mark, f'KV from token {from_token} on was rewritten')

    def _drop(self, mark: Mark, reason: str) -> None:
        mark.dead = reason
        self._marks.remove(mark)
        self._free.append(mark.slot)


def _small_views(boundary: Boundary) -> list[torch.Tensor]:
    buffers = boundary.buffers
    views = [buffers.arena[0]] if buffers.arena.numel() else []
    for entry in boundary.entries:
        if entry.offset < 0 and not entry.tokens:
            views.append(buffers[entry.name].row(0).reshape(-1).view(torch.uint8))
    return views
