"""Operations: what a session does for one call, as plans in a row on its lane."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import field
from functools import partial
import threading
from typing import Any
from typing import Generic
from typing import Protocol
from typing import TYPE_CHECKING
from typing import TypeVar

import numpy as np

from flashrt_core.errors import BranchesLive
from flashrt_core.errors import CapsuleError
from flashrt_core.errors import LaneBusy
from flashrt_core.errors import NotAtBoundary
from flashrt_core.errors import TickDropped
from flashrt_core.planners.followed import Followed
from flashrt_core.planners.followed import NONE
from flashrt_core.planners.layout import MTP_KV
from flashrt_core.runtime import LaneFuture

if TYPE_CHECKING:
    from torch import Tensor

    from flashrt_core.capsule import Arrival
    from flashrt_core.capsule import Boundary
    from flashrt_core.capsule import Mark
    from flashrt_core.capsule import RestoreReport
    from flashrt_core.capsule.marks import MarkRing
    from flashrt_core.planners.grammar import Matcher
    from flashrt_core.planners.options import Options
    from flashrt_core.runtime import Lane
    from flashrt_core.runtime import Plan

T = TypeVar('T')


@dataclass
class Mirror:
    """What the host knows of the state without asking the device; written on the lane thread.

    ``epoch`` counts restores, rollbacks and resets: operations begun before one end with it.
    """

    position: int = 0
    pending: int | None = None
    followed: Followed = field(default_factory=Followed)
    epoch: int = 0

    def return_to(self, mark: Mark) -> None:
        """Know what was known at a mark, which keeps the boundary's notes."""
        self.position = mark.position
        self.pending, self.followed = mark.notes

    def extents(self, kv: Sequence[str]) -> dict[str, int]:
        """Return the valid tokens of the KV buffers; MTP's pair of the last token needs a next."""
        return {
            name: max(0, self.position - 1) if name == MTP_KV else self.position for name in kv
        }


@dataclass
class Inputs:
    """Of one decode step. ``masks``: int32 ``[rows, words]``, None: all open, as are rows behind.

    ``limit``: tokens given out at most. ``words``: of the grammar that takes them, ``followed``.
    """

    options: Options | None
    limit: int
    masks: Tensor | None
    drafts: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    words: tuple[int, ...] = NONE

    def keep_to(self, matcher: Matcher) -> None:
        """Take the masks of the drafts; give out no more tokens than there are masks.

        A draft that the grammar refuses is masked where it is verified, and so not accepted.
        """
        self.masks = matcher.masks(self.drafts.tolist())
        if self.drafts.size:
            self.limit = min(self.drafts.size + 1, len(self.masks))


@dataclass(frozen=True)
class Job:
    """One plan of an operation: ``fill`` writes its inputs, ``land`` reads its outputs.

    Without a plan ``land`` itself is what is done between the plans. ``restore`` begins a restore
    that the plan goes on from.
    """

    plan: Plan | None
    fill: Callable[[], None]
    land: Callable[[], Any]
    restore: Callable[[], Arrival] | None = None


class Tenant(Protocol):
    """Branches, as far as they keep the trunk still."""

    count: int

    @property
    def live(self) -> bool:
        """Whether they do."""


class Operation(LaneFuture[T], Generic[T]):
    """The future of one operation.

    ``cancel()`` lets the running plan end, drops the rest and answers True; the future then raises
    TickDropped once the lane has stopped, so that whoever waited may start the next operation.
    Callbacks run on the lane thread; waiting for it there raises LaneError.
    """

    def __init__(self, lane: Lane, name: str, plans: int, epoch: int) -> None:
        super().__init__(lane)
        self.set_running_or_notify_cancel()
        self.name = name
        self.plans = plans
        self.epoch = epoch
        self.results: list[Any] = []
        self.restored: RestoreReport | None = None
        self.error: BaseException | None = None
        self._lock = threading.Lock()
        self._left = plans
        self._cancel_asked = False

    def cancel(self) -> bool:
        """Ask for an end at the running plan's end; any thread."""
        if self.done():
            return False
        self._cancel_asked = True
        return True

    def check(self) -> None:
        """Raise TickDropped if the next plan must not start."""
        done = f'after {len(self.results)} of {self.plans} plans'
        if self._cancel_asked:
            raise TickDropped(f'{self.name} was cancelled {done}; the state is a boundary')
        if self.error is not None:
            raise TickDropped(f'{self.name} failed {done}; the state is the last boundary')

    def note(self, result: Any, error: BaseException | None, plans: int) -> bool:
        """Record the end of plans, the first error stays; True when all have ended."""
        with self._lock:
            if error is not None:
                self.error = self.error or error
            else:
                self.results.append(result)
            self._left -= plans
            return self._left == 0


class Runner:
    """Runs one operation at a time; keeps what a failed plan needs to be undone.

    :param undo: a ring of one mark. On the cpu backend each plan fills it before it runs, because
        an eager body can fail half-way; a captured replay cannot without losing its device.
    """

    def __init__(self, lane: Lane, boundary: Boundary, mirror: Mirror, undo: MarkRing) -> None:
        self.lane = lane
        self.boundary = boundary
        self.mirror = mirror
        self.undo = undo
        self.point: Mark | None = None
        self.tenant: Tenant | None = None
        self._undo_always = lane.backend.name == 'cpu'
        self._lock = threading.RLock()
        self._operation: Operation[Any] | None = None
        self._arrival: Arrival | None = None

    @property
    def busy(self) -> str:
        """What runs now, or ''."""
        operation = self._operation
        return '' if operation is None else operation.name

    @contextmanager
    def starting(self, tenant: Tenant | None = None, restores: bool = False) -> Iterator[int]:
        """Hold the lock to begin an operation of the trunk, or of its live ``tenant``.

        Gives the epoch, to be read before the mirror: an operation made of what a restore is just
        changing carries the old one and is dropped. One that ``restores`` may begin whatever the
        state is, and ends the branches.

        :raises LaneBusy: something runs. :raises BranchesLive: others have the trunk.
        :raises SessionPoisoned: a restore failed half-way.
        """
        with self._lock:
            epoch = self.mirror.epoch
            if not restores:
                self.boundary.check_usable()
            if self._operation is not None:
                raise LaneBusy(
                    f'the session is busy with {self.busy}; wait for its future or cancel it'
                )
            held = self.tenant
            if held is not None and held.live and held is not tenant and not restores:
                raise BranchesLive(
                    f'{held.count} branches are live and the trunk stands still; commit one of '
                    'them or drop them first'
                )
            yield epoch

    def launch(
        self,
        name: str,
        jobs: Sequence[Job],
        epoch: int,
        finish: Callable[[Operation[Any]], Any],
        failed: Callable[[BaseException], None] = lambda error: None,
    ) -> Operation[Any]:
        """Queue the plans; the operation is over when the last of them has ended.

        Called within ``starting``. ``epoch``: the one it goes on from; a plan that meets another
        raises TickDropped. ``finish`` gives its result, ``failed`` is told its error.
        """
        operation: Operation[Any] = Operation(self.lane, name, len(jobs), epoch)
        self._operation = operation
        ended = partial(self._ended, operation, finish, failed)
        for i, job in enumerate(jobs):
            before = partial(self._before, operation, job)
            after = partial(self._after, operation, job)
            run: Future[Any]
            try:
                if job.plan is None:
                    run = self.lane.call(partial(_do, before, after))
                else:
                    run = self.lane.run(job.plan, before, after)
            except BaseException as error:
                if i == 0:
                    self._operation = None
                    raise
                run = Future()
                run.set_exception(error)
                ended(run, len(jobs) - i)
                break
            run.add_done_callback(ended)
        return operation

    def take(self) -> None:
        """Keep the small state of now; lane thread."""
        self.point = self.undo.take(self.boundary)

    def go_back(self, point: Mark) -> None:
        """Return to where a plan began; lane thread. KV beyond the extent is never read."""
        self.undo.write_back(point)
        self.mirror.return_to(point)

    def new_epoch(self) -> None:
        """End what was begun before; lane thread."""
        self.mirror.epoch += 1
        self.point = None

    def _before(self, operation: Operation[Any], job: Job) -> None:
        """Admit one plan; lane thread."""
        operation.check()
        if operation.epoch != self.mirror.epoch:
            raise TickDropped(f'{operation.name} ended: the state was restored or reset meanwhile')
        if job.restore is not None:
            self._arrival = job.restore()
            operation.epoch = self.mirror.epoch  # of the restored state
        else:
            self.boundary.check_usable()
        if not self.lane.committed:
            raise NotAtBoundary(
                f'{operation.name} is refused: an earlier plan failed while it wrote the state; '
                'restore a capsule or reset'
            )
        job.fill()
        self.boundary.note_kv_rewrite(self.mirror.position)
        if self._undo_always:
            self.take()

    def _after(self, operation: Operation[Any], job: Job) -> Any:
        """Take what one plan gave; lane thread. Its end was the arrival of what it restored."""
        self._arrive(operation)
        return job.land()

    def _arrive(self, operation: Operation[Any]) -> None:
        """End a restore that was begun, so that the session is usable again."""
        arrival, self._arrival = self._arrival, None
        if arrival is not None:
            operation.restored = arrival.finish()

    def _ended(
        self,
        operation: Operation[Any],
        finish: Callable[[Operation[Any]], Any],
        failed: Callable[[BaseException], None],
        run: Future[Any],
        plans: int = 1,
    ) -> None:
        """Note the end of plans, on the lane thread (or that of a close)."""
        error = run.exception()
        if error is not None:
            try:
                self._arrive(operation)  # of a plan that did not come to its end
            except CapsuleError as poisoned:
                error = error if self.lane.fault is not None else poisoned
            if not self.lane.committed:
                self._recover()
        if not operation.note(None if error else run.result(), error, plans):
            return
        with self._lock:
            if self._operation is operation:
                self._operation = None
        if operation.error is not None:
            failed(operation.error)
            operation.set_exception(operation.error)
        else:
            operation.set_result(finish(operation))

    def _recover(self) -> None:
        """Return to the boundary before the plan that failed while it wrote; lane thread."""
        point = self.point
        if self._undo_always and point and self.lane.on_thread and self.lane.fault is None:
            self.go_back(point)
            self.lane.commit()


def _do(before: Callable[[], None], land: Callable[[], Any]) -> Any:
    before()
    return land()
