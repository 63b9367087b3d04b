"""What executor and planner share in /diagnostics: state, capsules, refusals, faults."""

from collections.abc import Callable
from typing import Any

from flashrt_ros.capsule_services import add_store_usage
from flashrt_ros.diagnostics import Diagnostics
from flashrt_ros.diagnostics import ERROR
from flashrt_ros.diagnostics import FaultLog
from flashrt_ros.diagnostics import Section
from flashrt_ros.statistics import Counters

Fill = Callable[[Section], None]


class SessionReport:
    """Counters of one node and the sections made of them; filled on the executor thread."""

    def __init__(self, node: Any, kind: str, remedy: str, **fills: Fill) -> None:
        """Create the updater.

        :param node: the session node; read when a section is filled.
        :param kind: executor or planner. :param remedy: the verbs that end a poisoned state.
        :param fills: what fills each section between ``state`` and ``capsules``.
        """
        self._node, self._remedy = node, remedy
        self.counters = Counters()
        self.refusals = Counters()
        self.faults = FaultLog()
        self._diagnostics = Diagnostics(node, hardware_id=f'flashrt {kind}')
        for name, fill in {'state': self._state, **fills, 'capsules': self._capsules,
                           'refusals': self._refusals}.items():
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

    # -- sections -------------------------------------------------------------------------------

    def _state(self, section: Section) -> None:
        node, engine = self._node, self._node.engine
        section.add('lifecycle', node.state_label)
        section.add('phase', node.phase)
        section.add('ready_after_s', node.ready_after_s)
        if node.last_transition_error:
            section.worsen(ERROR, node.last_transition_error)
        poisoned = '' if engine is None else engine.session.boundary.poisoned
        if poisoned:
            section.worsen(ERROR, f'session is poisoned: {poisoned}; {self._remedy}')

    def _capsules(self, section: Section) -> None:
        if self._node.store is not None:
            add_store_usage(section, self._node.store)

    def _refusals(self, section: Section) -> None:
        section.add_counts(self.refusals.snapshot())
