"""The lane: one session's thread, stream, capture stream and pool; plans and verbs in order."""
from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Container
import threading
import time
from typing import Any
from typing import Protocol
from typing import TypeVar

import torch

from flashrt_core.errors import DeviceLost
from flashrt_core.errors import LaneBusy
from flashrt_core.errors import LaneClosed
from flashrt_core.errors import LaneError
from flashrt_core.errors import LaneTimeout
from flashrt_core.errors import TickDropped
from flashrt_core.runtime.backend import Backend
from flashrt_core.runtime.backend import Event
from flashrt_core.runtime.graph import Graph
from flashrt_core.runtime.graph import ShapeKey
from flashrt_core.runtime.jobs import Call
from flashrt_core.runtime.jobs import LaneFuture
from flashrt_core.runtime.jobs import LaneResult
from flashrt_core.runtime.jobs import reject
from flashrt_core.runtime.jobs import resolve
from flashrt_core.runtime.jobs import Run
from flashrt_core.runtime.jobs import Verb
from flashrt_core.runtime.plan import Plan
from flashrt_core.runtime.plan import Segment

T = TypeVar('T')

LEAD_S = 0.25e-3  # so long before the end of the running segment the next one is launched


class SegmentGate(Protocol):
    """Told of every segment of a lane, on its thread: may have one wait, measures them all."""

    def admit(self, segment: Segment) -> None:
        """Return when the segment may start; a wait must end by itself, whatever happens."""

    def done(self, segment: Segment) -> None:
        """The segment that was admitted last has ended."""


class Lane:
    """
    Runs one session's plans, and its verbs between them, on one thread.

    ``run`` and ``call`` queue in order. One *verb* (``at_segment_end`` or ``at_boundary``) may be
    pending and goes before the queue; a second raises LaneBusy at once. Work that raises fails its
    own future only. The lane itself ends as ``wedged`` (a segment missed its time limit) or
    ``lost`` (a sticky device error): then ``fault`` says why, everything pending fails with it and
    every later submission raises it; the process is to hold, exit and be respawned.

    The device does not wait for the host between two segments: the next one is launched LEAD_S
    before the running one is expected to end. A verb or ``cancel`` that comes after that waits for
    it too, so at most for LEAD_S and one segment. A lane with a gate launches nothing early.

    All methods may be called from any thread. Gradients are off on the lane thread.

    :param backend: the device.
    :param name: names the thread and the messages.
    :param priority: of the stream; a lower number is served first.
    :param timeout_s: limit for one segment, unless ``run`` gives another.
    """

    def __init__(self, backend: Backend, name: str, priority: int = 0,
                 timeout_s: float = 10.0) -> None:
        self.backend = backend
        self.name = name
        self.timeout_s = timeout_s
        self.stream = backend.stream(priority)
        self.capture_stream = backend.stream(priority)
        self.pool = backend.pool()
        self.gate: SegmentGate | None = None  # set it while the lane is idle
        self._condition = threading.Condition()
        self._queue: deque[Call | Run] = deque()
        self._verb: Verb | None = None
        self._verb_running = False
        self._current: LaneFuture[Any] | None = None
        self._state = 'new'
        self._closing = False
        self._sealed = False
        self._committed = True
        self._fault: LaneError | None = None
        self._events: list[tuple[Event, Event]] = []
        self._took_s: dict[tuple[Graph, ShapeKey], float] = {}  # the last run of each
        self._thread = threading.Thread(target=self._main, name=f'lane-{name}', daemon=True)

    # -- what it is -------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """Return 'new', 'running', 'wedged', 'lost' or 'closed'."""
        return self._state

    @property
    def fault(self) -> LaneError | None:
        """Return why the lane is wedged or lost, None while it works."""
        return self._fault

    @property
    def committed(self) -> bool:
        """
        Return whether the session's state is a boundary.

        False while a plan's segments run, and after the last one (the one that writes STATE)
        failed, until :meth:`commit` or the next complete plan.
        """
        return self._committed

    @property
    def sealed(self) -> bool:
        """Return whether captures are refused."""
        return self._sealed

    @property
    def on_thread(self) -> bool:
        """Return whether the caller is the lane's own thread."""
        return threading.current_thread() is self._thread

    @property
    def idle(self) -> bool:
        """Return whether nothing runs or waits."""
        with self._condition:
            return self._current is None and self._verb is None and not self._queue

    # -- life -------------------------------------------------------------------------------

    def start(self) -> Lane:
        """Start the thread and return the lane. Raises LaneClosed on a second start."""
        with self._condition:
            if self._state != 'new':
                raise LaneClosed(f'lane {self.name!r} is {self._state}; make a new one')
            self._state = 'running'
        self._thread.start()
        return self

    def seal(self) -> None:
        """End configure: from now on every capture on this lane is refused."""
        self._sealed = True

    def commit(self) -> None:
        """Declare the state a boundary after writing all of it; on the lane thread only."""
        if not self.on_thread:
            raise LaneError(f'commit of lane {self.name!r} belongs to its thread; use lane.call')
        self._committed = True

    def close(self, timeout_s: float = 10.0) -> None:
        """
        Drop the running plan at its segment's end, fail all that waits, end the thread.

        Every pending future raises LaneClosed. Closing twice is allowed; never hangs.

        :raises LaneTimeout: the thread did not end in ``timeout_s``; it is left behind.
        """
        with self._condition:
            self._closing = True
            if self._state == 'new':
                self._state = 'closed'
            self._condition.notify_all()
        if self._thread.ident is None or self.on_thread:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            error = LaneTimeout(
                f'lane {self.name!r} did not end within {timeout_s} s: its segment or verb still '
                'runs; end the process')
            self._fail('wedged', error)
            raise error

    def __enter__(self) -> Lane:
        """Start the lane."""
        return self.start()

    def __exit__(self, *exc: object) -> None:
        """Close the lane."""
        self.close()

    # -- submissions ------------------------------------------------------------------------

    def call(self, fn: Callable[[], T]) -> LaneFuture[T]:
        """
        Run ``fn`` on the lane thread in queue order, between plans (setup, capture).

        :raises LaneClosed: the lane is not running.
        """
        future: LaneFuture[T] = LaneFuture(self)
        with self._condition:
            self._refuse_if_not_running()
            self._queue.append(Call(fn, future))
            self._condition.notify_all()
        return future

    def run(self, plan: Plan, before: Callable[[], None] | None = None,
            after: Callable[[], T] | None = None,
            timeout_s: float | None = None,
            skip: Callable[[], Container[str]] | None = None) -> LaneFuture[LaneResult[T]]:
        """
        Queue one run of ``plan``: before(), every segment in order, after().

        ``before`` fills inputs, ``after`` reads outputs once the last segment is done; both run
        on the lane thread. ``future.cancel()`` before the last segment drops the rest.

        :param timeout_s: limit for one segment, ``lane.timeout_s`` if not given.
        :param skip: called after ``before``, there too: labels of segments that this run leaves
            out because what they would write is there already. The last one always runs.
        :raises PlanInvalid, UnboundPort, MissingKey: the plan cannot run.
        :raises LaneClosed: the lane is not running.
        """
        plan.check()
        future: LaneFuture[LaneResult[T]] = LaneFuture(self)
        limit = self.timeout_s if timeout_s is None else timeout_s
        with self._condition:
            self._refuse_if_not_running()
            self._queue.append(Run(plan, before, after, limit, future, skip))
            self._condition.notify_all()
        return future

    def at_segment_end(self, fn: Callable[[], T], name: str = 'at_segment_end') -> LaneFuture[T]:
        """
        Drop every plan submitted before, at the running segment's end, then run ``fn``.

        The running plan (unless its last segment is the running one, which completes) and those
        that wait raise TickDropped. ``fn`` runs on the lane thread: reset, restore, hold.

        :param name: of the verb, for messages.
        :raises LaneBusy: another verb is pending.
        :raises LaneClosed: the lane is not running.
        """
        return self._submit_verb(fn, name, cuts=True)

    def at_boundary(self, fn: Callable[[], T], name: str = 'at_boundary') -> LaneFuture[T]:
        """
        Run ``fn`` on the lane thread after the running plan: snapshot, fork, rollback.

        Plans that wait run after it. Raises as :meth:`at_segment_end`.
        """
        return self._submit_verb(fn, name, cuts=False)

    def _submit_verb(self, fn: Callable[[], T], name: str, cuts: bool) -> LaneFuture[T]:
        future: LaneFuture[T] = LaneFuture(self)
        with self._condition:
            self._refuse_if_not_running()
            if self._verb is not None:
                doing = 'runs' if self._verb_running else 'waits for the running segment'
                raise LaneBusy(
                    f'lane {self.name!r} is busy: {self._verb.name!r} {doing}, so {name!r} is '
                    'refused; try again when it has answered')
            verb = Verb(fn, future, name, cuts)
            if cuts:
                verb.dropped = [job for job in self._queue if isinstance(job, Run)]
                self._queue = deque(job for job in self._queue if isinstance(job, Call))
            self._verb = verb
            self._condition.notify_all()
        return future

    def _refuse_if_not_running(self) -> None:
        if self._fault is not None:
            raise self._fault
        if self._state != 'running' or self._closing:
            state = 'closing' if self._closing else self._state
            raise LaneClosed(f'lane {self.name!r} is {state}; start a lane before submitting')

    # -- the thread -------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            torch.set_grad_enabled(False)
            self.backend.enter_thread(self.stream)
            while self._fault is None:
                job = self._next()
                if job is None:
                    break
                if isinstance(job, Verb):
                    self._do_verb(job)
                elif isinstance(job, Run):
                    self._do_run(job)
                elif job.future.begin():
                    self._settle(job.future, job.fn)
                with self._condition:
                    self._current = None
        except BaseException as error:
            self._fail('lost', DeviceLost(f'lane {self.name!r} ended by {error!r}; restart'))
        finally:
            if self._fault is None:
                self._fail('closed', None)

    def _next(self) -> Call | Run | Verb | None:
        with self._condition:
            while not (self._verb or self._queue or self._closing):
                self._condition.wait()
            if self._closing:
                return None
            if self._verb is not None:
                self._verb_running = True
                self._current = self._verb.future
                return self._verb
            job = self._queue.popleft()
            self._current = job.future
            return job

    def _do_verb(self, verb: Verb) -> None:
        for job in verb.dropped:
            reject(job.future, TickDropped(
                f'plan {job.plan.name!r} was dropped before its first segment by {verb.name!r}'))
        if not verb.future.begin():
            self._free_verb()
            return
        self._settle(verb.future, verb.fn, self._free_verb)

    def _free_verb(self) -> None:
        with self._condition:
            self._verb = None
            self._verb_running = False

    def _do_run(self, job: Run) -> None:
        plan, started = job.plan, time.perf_counter()
        segments = plan.segments
        segments_us: dict[str, float] = {}
        launched = 0
        committed = None  # whether the state was a boundary when the first segment was due
        try:
            if job.before is not None and not job.future.cancelled():
                job.before()
            if job.skip is not None and not job.future.cancelled():
                left_out = job.skip()
                segments = (*(s for s in segments[:-1] if s.label not in left_out), segments[-1])
            committed = self._committed
            for index, segment in enumerate(segments):
                if self.gate is not None:
                    self.gate.admit(segment)
                if launched == index:
                    cut = self._cut_of(job)
                    if cut is not None:
                        self._committed = committed
                        reject(job.future, cut(f'{index} of {len(segments)} segments'))
                        return
                    launched += 1
                    self._launch(segment, index)
                took_s = self._took_s.get(_place(segment), 0.0)
                ends_at = time.perf_counter() + took_s
                if (took_s > 0.0 and index + 1 < len(segments) and self.gate is None
                        and self._runs_until(ends_at - LEAD_S, index)
                        and self._cut_of(job) is None):
                    launched += 1
                    self._launch(segments[index + 1], index + 1)
                segments_us[segment.label] = self._end_of(job, segment, index, ends_at)
                if self.gate is not None:
                    self.gate.done(segment)
            self._committed = True
            value = None if job.after is None else job.after()
        except BaseException as error:
            # Only the last segment writes STATE: a failure before it leaves the state as it was.
            if committed is not None and launched < len(segments):
                self._committed = committed
            reject(job.future, self._checked(error))
            return
        total_us = (time.perf_counter() - started) * 1e6
        result = LaneResult(plan.name, segments_us, total_us, value)
        resolve(job.future, result)

    def _cut_of(self, job: Run) -> Callable[[str], LaneError] | None:
        with self._condition:
            if self._closing:
                return lambda done: LaneClosed(
                    f'plan {job.plan.name!r} was dropped after {done}: lane {self.name!r} closes')
            verb = self._verb
            if verb is not None and verb.cuts:
                return lambda done: TickDropped(
                    f'plan {job.plan.name!r} was dropped after {done} by {verb.name!r}')
        if job.future.cancelled():
            return lambda done: TickDropped(f'plan {job.plan.name!r} was cancelled after {done}')
        return None

    def _launch(self, segment: Segment, index: int) -> None:
        while len(self._events) <= index:
            self._events.append((self.backend.event(), self.backend.event()))
        begin, end = self._events[index]
        self._committed = False
        begin.record(self.stream)
        segment.graph.replay(segment.key, self)
        end.record(self.stream)

    def _runs_until(self, at: float, index: int) -> bool:
        """Return True at that time if segment ``index`` still runs then, False once it ended."""
        left_s = max(at - time.perf_counter(), 0.0)
        return not self._events[index][1].wait(left_s, left_s + LEAD_S)

    def _end_of(self, job: Run, segment: Segment, index: int, ends_at: float) -> float:
        """Wait for the end of a launched segment and return its microseconds on the device."""
        begin, end = self._events[index]
        if not end.wait(job.timeout_s, max(ends_at - time.perf_counter(), 0.0)):
            error = LaneTimeout(
                f'segment {segment.label!r} of plan {job.plan.name!r} did not finish within '
                f'{job.timeout_s} s; lane {self.name!r} is wedged: hold and restart the process')
            self._fail('wedged', error)
            raise error
        elapsed_us = begin.elapsed_us(end)
        self._took_s[_place(segment)] = elapsed_us * 1e-6
        return elapsed_us

    # -- endings ----------------------------------------------------------------------------

    def _settle(self, future: LaneFuture[Any], fn: Callable[[], Any],
                first: Callable[[], None] | None = None) -> None:
        try:
            value = fn()
        except BaseException as error:
            final = self._checked(error)
            if first is not None:
                first()
            reject(future, final)
            return
        if first is not None:
            first()
        resolve(future, value)

    def _checked(self, error: BaseException) -> BaseException:
        """Return the error to report; marks the lane lost if the device no longer works."""
        if self._fault is not None:
            return error
        text = self.backend.fault()
        if text is None:
            return error
        lost = DeviceLost(
            f'lane {self.name!r} lost its device after {error!r}: {text}; hold, exit and restart')
        lost.__cause__ = error
        self._fail('lost', lost)
        return lost

    def _fail(self, state: str, fault: LaneError | None) -> None:
        """End the lane in ``state`` and fail all that is pending."""
        with self._condition:
            self._state = state
            self._fault = fault
            queue, self._queue = self._queue, deque()
            futures = [job.future for job in queue]
            if self._verb is not None:
                futures = [self._verb.future] + [j.future for j in self._verb.dropped] + futures
                self._verb = None
            if self._current is not None and not self.on_thread:
                futures.append(self._current)
        for future in futures:
            reject(future, fault or LaneClosed(f'lane {self.name!r} was closed'))


def _place(segment: Segment) -> tuple[Graph, ShapeKey]:
    return segment.graph, segment.key
