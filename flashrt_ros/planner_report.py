"""What the planner tells /diagnostics: levels, counters and percentiles by component."""

from typing import Any

from flashrt_ros.capsule_services import add_store_usage
from flashrt_ros.diagnostics import Diagnostics
from flashrt_ros.diagnostics import ERROR
from flashrt_ros.diagnostics import FaultLog
from flashrt_ros.diagnostics import Section
from flashrt_ros.statistics import Counters


class PlannerReport:
    """Counters of one planner and the sections made of them."""

    def __init__(self, node: Any) -> None:
        """Create the updater.

        :param node: the planner node; read when a section is filled.
        """
        self._node = node
        self.counters = Counters()
        self.refusals = Counters()
        self.faults = FaultLog()
        self._diagnostics = Diagnostics(node, hardware_id='flashrt planner')
        for name, fill in (('state', self._state), ('plans', self._plans),
                           ('admission', self._admission), ('capsules', self._capsules),
                           ('refusals', self._refusals)):
            self._diagnostics.add(name, fill)

    def sections(self) -> dict[str, Section]:
        """Return every section as it is now."""
        return self._diagnostics.report()

    def refused(self, code: str) -> None:
        """Count a refusal by its error code."""
        self.refusals.declare([code])
        self.refusals.add(code)

    def qos_mismatch(self, topic: str, sentence: str) -> None:
        """Note an incompatible publisher or subscriber."""
        self.refused('qos_incompatible')
        if self.faults.set(f'qos {topic}', ERROR, sentence):
            self._node.get_logger().error(sentence)

    # -- sections, on the executor thread -------------------------------------------------------

    def _state(self, section: Section) -> None:
        node, engine = self._node, self._node.engine
        section.add('lifecycle', node.state_label)
        section.add('phase', node.phase)
        section.add('ready_after_s', node.ready_after_s)
        self.faults.fill(section)
        if node.last_transition_error:
            section.worsen(ERROR, node.last_transition_error)
        if engine is None:
            return
        section.add('link', node.link.kind)
        section.add('position', engine.session.position)
        section.add('context_tokens', engine.context_tokens)
        poisoned = engine.session.boundary.poisoned
        if poisoned:
            section.worsen(ERROR, f'session is poisoned: {poisoned}; ~/restore context')

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

    def _capsules(self, section: Section) -> None:
        if self._node.store is not None:
            add_store_usage(section, self._node.store)

    def _refusals(self, section: Section) -> None:
        section.add_counts(self.refusals.snapshot())
