"""Plans: ordered segments of (graph, key), the unit that a lane runs and drops."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flashrt_core.errors import PlanInvalid
from flashrt_core.runtime.graph import Graph
from flashrt_core.runtime.graph import ShapeKey


@dataclass(frozen=True)
class Segment:
    """
    One node of a plan, and the unit of preemption.

    ``label`` names its time in a result; it is the graph's name, numbered from the second use on.
    """

    graph: Graph
    key: ShapeKey
    after: tuple[int, ...]
    label: str


class Plan:
    """
    An ordered list of segments; built in configure, run by a lane, never changed while it runs.

    Only the last segment may write STATE buffers (earlier ones write SCRATCH), so that a plan
    dropped between two segments leaves the boundary as it was.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._segments: list[Segment] = []
        self._checked = False

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Return the segments in the order they run."""
        return tuple(self._segments)

    def add(self, graph: Graph, key: ShapeKey, after: Iterable[int] = ()) -> int:
        """
        Append a segment and return its number.

        :param after: numbers of the segments it depends on, all added before.
        :raises PlanInvalid: a dependency on itself, a later or an unknown segment.
        """
        number = len(self._segments)
        needed = tuple(after)
        for other in needed:
            if isinstance(other, bool) or not isinstance(other, int) or not 0 <= other < number:
                held = f'0 to {number - 1}' if number else 'none yet'
                raise PlanInvalid(
                    f'segment {number} ({graph.name!r}) of plan {self.name!r} depends on '
                    f'{other!r}; it can depend on segments added before it ({held})')
        uses = sum(segment.graph is graph or segment.graph.name == graph.name
                   for segment in self._segments)
        label = f'{graph.name}[{uses}]' if uses else graph.name
        self._segments.append(Segment(graph, key, needed, label))
        self._checked = False
        return number

    def check(self) -> None:
        """
        Verify that the plan can run; a lane calls it once per change of the plan.

        :raises PlanInvalid: no segments.
        :raises UnboundPort: a graph with an unbound port.
        :raises MissingKey: a key that its graph holds no variant for.
        """
        if self._checked:
            return
        if not self._segments:
            raise PlanInvalid(f'plan {self.name!r} has no segments; add one')
        for segment in self._segments:
            segment.graph.check(segment.key)
        self._checked = True

    def __repr__(self) -> str:
        steps = ' -> '.join(f'{s.label}{s.key!r}' for s in self._segments)
        return f'Plan({self.name!r}: {steps})'
