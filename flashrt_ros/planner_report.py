"""What the planner tells /diagnostics: levels, counters and percentiles by component."""

from typing import Any

from flashrt_ros.diagnostics import Section
from flashrt_ros.session_report import SessionReport


class PlannerReport(SessionReport):
    """Counters of one planner and the sections made of them."""

    def __init__(self, node: Any) -> None:
        """Create the updater.

        :param node: the planner node; read when a section is filled.
        """
        super().__init__(node, 'planner', '~/restore context', plans=self._plans,
                         admission=self._admission)

    # -- sections, on the executor thread -------------------------------------------------------

    def _state(self, section: Section) -> None:
        super()._state(section)
        self.faults.fill(section)
        engine = self._node.engine
        if engine is None:
            return
        section.add('link', self._node.link.kind)
        section.add('position', engine.session.position)
        section.add('context_tokens', engine.context_tokens)

    def _plans(self, section: Section) -> None:
        engine = self._node.engine
        section.add_counts(self.counters.snapshot())
        if engine is not None:
            section.add_stages({name: ring.summary() for name, ring in engine.rings.items()})

    def _admission(self, section: Section) -> None:
        gate = self._node.admission
        if gate is None:
            return
        section.add_stages({'wait': gate.waits.summary()})
        for name, p99_us in gate.p99_us().items():
            section.add(f'{name} p99_us', round(p99_us, 1))
