"""The capsule verbs on a live robot: reset, snapshot, restore, rollback and fork.

Every method blocks until its effect is there or refused, so each runs on a worker thread; what
touches live memory is posted to the session's lane. One verb at a time: a second answers ``busy``.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import replace
import itertools
import threading
from typing import Any
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
import torch

from flashrt_core.capsule import CapsuleInfo
from flashrt_core.capsule import CapsuleStore
from flashrt_core.capsule import RestoreReport
from flashrt_core.errors import DeviceLost
from flashrt_core.errors import LaneBusy
from flashrt_core.errors import ParameterInvalid
from flashrt_core.policies.protocol import Chunk
from flashrt_core.policies.selectors import select
from flashrt_ros.capsule_services import free_id
from flashrt_ros.capsule_services import tell_snapshot
from flashrt_ros.executor_engine import Engine
from flashrt_ros.executor_tick import Pending
from flashrt_ros.executor_tick import Prepared
from flashrt_ros.observations import first_error

T = TypeVar('T')
C0 = 'c0'
EVALUATE_ONLY = -1
COMMIT_SELECTED = -2


@dataclass(frozen=True)
class Branches:
    """What a fork found: one chunk per branch and which of them agrees best with the others."""

    actions: NDArray[np.float64]  # [n, horizon, joints], robot units, not limited
    scores: NDArray[np.float64]  # [n], minus the mean RMS distance to the other branches
    spread: float  # mean pairwise RMS distance
    selected: int
    committed: int  # -1: none
    chunk: Chunk
    prepared: Prepared


class Verbs:
    """Capsule verbs of one session."""

    def __init__(self, engine: Engine, store: CapsuleStore, parameters: Any,
                 in_force: Callable[[], Pending]) -> None:
        """Bind to an engine.

        :param in_force: what each reset hands to the policy anew: prompt and guidance.
        """
        self._engine = engine
        self._control = engine.control
        self._session = engine.session
        self._store = store
        self._parameters = parameters
        self._in_force = in_force
        self._one_at_a_time = threading.Lock()
        self._numbers = itertools.count(1)

    def reset(self, capsule_id: str, seed: int | None,
              begun: Callable[[], object] = lambda: None,
              prompt: Sequence[int] | None = None) -> RestoreReport:
        """Restore C0 or another capsule and begin an episode.

        :param begun: called in the new episode before anything is commanded in it; under the
            submit lock.
        :param prompt: token ids in place of the prompt in force.
        :raises FlashrtError: the state is as before, unless the session is poisoned.
        """
        if seed is not None and seed < 0:
            raise ParameterInvalid(f'seed is {seed}; give 0 to 2**63 - 1')
        pending = replace(self._in_force(), seed=seed)
        if prompt is not None:
            pending = replace(pending, prompt=tuple(prompt))
        detail = {name: value for name, value in vars(pending).items() if value is not None}
        return self._go_to(
            'reset', capsule_id or C0, self._session.lane.at_segment_end,
            lambda: self._restore(capsule_id or C0, 'same'), capsule=capsule_id or C0, reset=True,
            pending=pending, detail=detail, begun=begun)

    def restore(self, capsule_id: str, numerics: str) -> RestoreReport:
        """Restore a capsule within the episode; raises as ``reset``."""
        if numerics not in ('', 'same', 'any'):
            raise ParameterInvalid(f'numerics is {numerics!r}; give same or any')
        return self._go_to(
            'restore', capsule_id, self._session.lane.at_segment_end,
            lambda: self._restore(capsule_id, numerics or 'same'), capsule=capsule_id)

    def rollback(self, to: str, boundaries: int) -> RestoreReport:
        """Go back to a capsule or by a number of ticks; raises as ``reset``."""
        if bool(to) == bool(boundaries):
            raise ParameterInvalid(
                f'to is {to!r} and boundaries is {boundaries}; give exactly one of them')
        proof = self._parameters['capsule_proof']
        return self._go_to(
            'rollback', to or f'{boundaries} boundaries', self._session.lane.at_boundary,
            lambda: self._store.rollback(
                self._session.boundary, to or None, boundaries=boundaries or None, proof=proof),
            capsule=to)

    def snapshot(self, capsule_id: str, label: str, tier: str, pin: bool) -> CapsuleInfo:
        """Freeze the boundary after the running tick.

        :raises TierUnavailable: its file could not be written; it is kept in host memory.
        :raises FlashrtError: no capsule was made.
        """
        with self._verb('snapshot'):
            progress = self._control.progress
            name = capsule_id or free_id(
                self._store, self._session.boundary.session,
                f'e{progress.episode}-t{progress.tick}', self._numbers)
            info = self._on_lane(
                self._session.lane.at_boundary,
                lambda: self._store.snapshot(self._session.boundary, name, label=label,
                                             tier=tier or 'gpu', pin=pin), 'snapshot')
        return tell_snapshot(
            self._control.outputs, self._store, info, self._session.boundary.session, tier,
            self._parameters['verb_timeout_s'])

    def fork(self, capsule_id: str, n: int, seeds: Sequence[int], commit: int,
             observed_after_ns: int = 0) -> Branches:
        """Evaluate ``n`` branches on the current observation; optionally go on with one.

        :param commit: a branch, EVALUATE_ONLY or COMMIT_SELECTED.
        :param observed_after_ns: an observation not older than this is waited for.
        :raises FlashrtError: nothing was committed and the session is where it was.
        """
        self._check_fork(capsule_id, n, seeds, commit)
        with self._verb('fork'):
            if observed_after_ns:
                self._engine.observations.wait_for(
                    observed_after_ns, self._parameters['observation_timeout_s'])
            self._control.begin_change(hold=False)
            found: Branches | None = None
            restored = False

            def evaluated() -> None:
                if restored:
                    self._engine.restored()
                elif found is not None and found.committed >= 0:
                    # Before the next tick, which goes on from what this branch has committed.
                    row = found.committed
                    self._engine.play(
                        replace(found.chunk, actions=found.chunk.actions[row:row + 1]),
                        found.prepared)

            try:
                found = self._evaluate(capsule_id, n, seeds, commit)
                restored = bool(capsule_id) and found.committed >= 0
            finally:
                self._control.end_change(
                    restored, capsule=capsule_id, with_lock=evaluated,
                    bit_exact=self._session.boundary.bit_exact,
                    poisoned=self._session.boundary.poisoned is not None)
        self._control.outputs.event('fork', capsule_id, {
            'n': n, 'seeds': list(seeds), 'spread': found.spread, 'selected': found.selected,
            'committed': found.committed})
        return found

    # -- inside ---------------------------------------------------------------------------------

    def _restore(self, capsule_id: str, numerics: str) -> RestoreReport:
        return self._store.restore(self._session.boundary, capsule_id, numerics=numerics,
                                   proof=self._parameters['capsule_proof'])

    def _go_to(
        self, kind: str, name: str, post: Callable[..., Any], work: Callable[[], RestoreReport],
        *, capsule: str = '', reset: bool = False, pending: Pending | None = None,
        detail: dict[str, Any] | None = None, begun: Callable[[], object] = lambda: None,
    ) -> RestoreReport:
        with self._verb(kind):
            if capsule:
                # Found and read from disk before the robot is held for it.
                self._store.prefetch(capsule, self._session.boundary.session)
            self._control.begin_change(hold=True)
            report: RestoreReport | None = None

            def entered() -> None:
                engine, progress = self._engine, self._control.progress
                if report is None:
                    return
                dropped = engine.restored(pending)
                progress.tick = report.position
                self._control.outputs.event(kind, name, {
                    'restore_us': report.us, 'bytes': report.bytes, 'source': report.source,
                    'position': report.position, 'bit_exact': report.bit_exact,
                    **({'subgoal_dropped': dropped} if dropped else {}), **(detail or {})})
                begun()

            try:
                report = self._on_lane(post, work, kind)
            finally:
                self._control.end_change(
                    report is not None, capsule=report.id if report else '', reset=reset,
                    bit_exact=report.bit_exact if report else True, with_lock=entered,
                    poisoned=self._session.boundary.poisoned is not None)
        assert report is not None
        return report

    def _evaluate(self, capsule_id: str, n: int, seeds: Sequence[int], commit: int) -> Branches:
        session, engine, lane = self._session, self._engine, self._session.lane
        observation = engine.observations.newest()
        verdicts = engine.ages.judge(observation.stamps_ns, engine.reading(observation))
        error = first_error(verdicts)
        if error is not None:
            raise error
        here = self._on_lane(lane.at_boundary, self._mark_here, 'fork')
        engine.taken_in(self._parameters['verb_timeout_s'])
        try:
            if capsule_id:
                self._on_lane(lane.at_boundary, lambda: self._restore(capsule_id, 'same'), 'fork')
            seed = self._on_lane(lane.at_boundary, engine.seed_now, 'fork')
            rows = list(range(n))
            session.set_branches(rows, list(seeds) or [seed] * n, None if seeds else rows)
            prepared = engine.prepare_fork(observation, verdicts)
            chunk = self._wait(session.submit(replace(prepared.tick_input, rows=n)), 'fork')
            actions = np.stack([engine.book.robot_actions(chunk, prepared, row) for row in rows])
            found = select(torch.from_numpy(actions))
            selected = int(found.selected)
            chosen = selected if commit == COMMIT_SELECTED else commit
            if chosen >= 0:
                self._wait(session.commit_branch(chosen), 'fork')
                committed_seed = seeds[chosen] if seeds else seed
                prepared = replace(prepared, seed=lambda: committed_seed)
            branches = Branches(actions, found.scores.numpy(), float(found.spread), selected,
                                max(chosen, -1), chunk, prepared)
        except BaseException:
            self._back_to(here)
            raise
        if branches.committed < 0:
            self._back_to(here)
        return branches

    def _mark_here(self) -> Any:
        ring = self._session.boundary.ring
        position = self._session.boundary.position()
        if ring is not None and ring.marks and ring.marks[-1].position == position:
            return ring.marks[-1]
        return self._store.mark(self._session.boundary)

    def _back_to(self, mark: Any) -> None:
        self._on_lane(self._session.lane.at_boundary,
                      lambda: self._store.rollback(self._session.boundary, mark), 'fork')

    def _check_fork(self, capsule_id: str, n: int, seeds: Sequence[int], commit: int) -> None:
        held = sorted(self._session.plan_keys)
        if n not in self._session.plan_keys:
            raise ParameterInvalid(
                f'n is {n}; branch counts captured are {held}: use one of them, or add it to '
                'row_keys of the policy config')
        if seeds and len(seeds) != n:
            raise ParameterInvalid(f'seeds has {len(seeds)} values for n {n}; give n or none')
        if any(seed < 0 for seed in seeds):
            raise ParameterInvalid(f'seeds is {list(seeds)}; give 0 to 2**63 - 1 each')
        if not COMMIT_SELECTED <= commit < n:
            raise ParameterInvalid(
                f'commit_branch is {commit}; give 0 to {n - 1}, -1 to evaluate only or -2 to '
                'commit the selected one')
        if capsule_id and any(entry.tokens for entry in self._session.boundary.entries):
            raise ParameterInvalid(
                f'capsule_id is {capsule_id!r}: this policy keeps KV, whose marks would die; '
                '~/restore it first and fork with an empty capsule_id')

    @contextmanager
    def _verb(self, name: str) -> Iterator[None]:
        if not self._one_at_a_time.acquire(blocking=False):
            raise LaneBusy(f'{name} is refused: another capsule verb waits for the running '
                           'segment; try again when it has answered')
        try:
            yield
        finally:
            self._one_at_a_time.release()

    def _on_lane(self, post: Callable[..., Any], work: Callable[[], T], name: str) -> T:
        self._engine.settle(self._parameters['verb_timeout_s'])
        return self._wait(post(work, name), name)

    def _wait(self, future: Any, name: str) -> Any:
        limit = self._parameters['verb_timeout_s']
        try:
            return future.result(limit)
        except FutureTimeout:
            error = DeviceLost(f'{name} did not end within {limit:g} s; what it did is not known: '
                               'the process exits to be respawned')
            self._engine.fault(error)
            raise error from None
