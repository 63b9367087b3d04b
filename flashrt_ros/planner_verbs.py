"""The capsule verbs of a planner: snapshot, restore and rollback between its plans."""

import itertools
from typing import Any

from flashrt_core.capsule import CapsuleInfo
from flashrt_core.capsule import CapsuleStore
from flashrt_core.capsule import RestoreReport
from flashrt_core.errors import ParameterInvalid
from flashrt_ros.capsule_services import free_id
from flashrt_ros.capsule_services import tell_snapshot
from flashrt_ros.planner_engine import PlannerEngine


class PlannerVerbs:
    """Every method blocks until its effect is there or refused; worker threads.

    None acts on a plan that is being decoded: it is refused as busy. The next plan begins from the
    pinned context, whatever was restored.
    """

    def __init__(self, engine: PlannerEngine, store: CapsuleStore, parameters: Any,
                 outputs: Any) -> None:
        self._engine, self._store = engine, store
        self._parameters, self._outputs = parameters, outputs
        self._boundary = engine.session.boundary
        self._numbers = itertools.count(1)

    def snapshot(self, capsule_id: str, label: str, tier: str, pin: bool) -> CapsuleInfo:
        """Freeze the state.

        :raises TierUnavailable: its file could not be written; it is kept in host memory.
        :raises FlashrtError: no capsule was made.
        """
        with self._engine.session_for('~/snapshot'):
            name = capsule_id or free_id(self._store, self._boundary.session,
                                         f'p{self._engine.plans}', self._numbers)
            info: CapsuleInfo = self._engine.on_lane(
                lambda: self._store.snapshot(self._boundary, name, label=label,
                                             tier=tier or 'gpu', pin=pin), 'snapshot')
        return tell_snapshot(self._outputs, self._store, info, self._boundary.session, tier,
                             self._parameters['verb_timeout_s'])

    def restore(self, capsule_id: str, numerics: str) -> RestoreReport:
        """Copy a capsule back. Raises FlashrtError: the state is as before, unless poisoned."""
        if numerics not in ('', 'same', 'any'):
            raise ParameterInvalid(f'numerics is {numerics!r}; give same or any')
        with self._engine.session_for('~/restore'):
            self._store.prefetch(capsule_id, self._boundary.session)
            return self._done('restore', self._engine.on_lane(
                lambda: self._store.restore(
                    self._boundary, capsule_id, numerics=numerics or 'same',
                    proof=self._parameters['capsule_proof']), 'restore'))

    def rollback(self, to: str, boundaries: int) -> RestoreReport:
        """Go back to a capsule, or by marks: a plan leaves one before its first token, one after
        its last.

        :raises FlashrtError: as ``restore``.
        """
        if bool(to) == bool(boundaries):
            raise ParameterInvalid(
                f'to is {to!r} and boundaries is {boundaries}; give exactly one of them')
        with self._engine.session_for('~/rollback'):
            return self._done('rollback', self._engine.on_lane(
                lambda: self._store.rollback(
                    self._boundary, to or None, boundaries=boundaries or None,
                    proof=self._parameters['capsule_proof']), 'rollback'))

    def _done(self, kind: str, report: RestoreReport) -> RestoreReport:
        self._engine.restored(report.id, report.bit_exact)
        self._outputs.event(kind, report.id, {
            'restore_us': report.us, 'bytes': report.bytes, 'source': report.source,
            'position': report.position, 'bit_exact': report.bit_exact})
        self._outputs.publish_status()
        return report
