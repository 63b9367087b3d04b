"""The planner's engine: a pinned context; one plan at a time: a restore, an append, a decode.

Free of ROS. ``start`` takes a plan; its worker thread decodes, writes subgoals and waits for what
becomes of them. A plan that is ended while it decodes stops at a token's boundary and is rolled
back to the mark taken before its first token.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
import threading
import time
from typing import Any
from typing import Protocol

from flashrt_core.capsule import CapsuleStore
from flashrt_core.capsule import Mark
from flashrt_core.errors import CapsuleError
from flashrt_core.errors import CapsuleNotFound
from flashrt_core.errors import DeviceLost
from flashrt_core.errors import FlashrtError
from flashrt_core.errors import LaneBusy
from flashrt_core.errors import LaneTimeout
from flashrt_core.errors import TickDropped
from flashrt_core.errors import WrongState
from flashrt_core.planners.protocol import Session
from flashrt_ros.planner_language import Language
from flashrt_ros.planner_plan import Base
from flashrt_ros.planner_plan import End
from flashrt_ros.planner_plan import Plan
from flashrt_ros.planner_plan import PlanRequest
from flashrt_ros.planner_plan import Times
from flashrt_ros.planner_plan import Told
from flashrt_ros.statistics import Counters
from flashrt_ros.statistics import Ring

CONTEXT = 'context'
COUNTERS = ('plans', 'plans_ok', 'plans_cannot', 'plans_cancelled', 'plans_superseded',
            'plans_failed', 'replans', 'subgoals_written', 'subgoals_refused', 'tokens',
            'capsule_misses', 'rollbacks')
STAGES = ('restore', 'append', 'ttft', 'token', 'write')
MARKS = 8
_WARM_UP_TOKENS = 4


class Link(Protocol):
    """The way to the executor."""

    def base(self) -> Base:
        """Return where the executor stands. :raises WrongState: it cannot take subgoals now."""
        ...

    def write(self, text: str, sequence: int, base: Base, priority: int,
              deadline_s: float, embedding: Any = None) -> None:
        """Give it a subgoal. :raises FlashrtError: it was not accepted, whatever the reason.

        :param base: what it was planned on.
        :param embedding: rows float32 [n, width] that the policy reads in the text's place.
        """
        ...

    def check(self, sequence: int) -> None:
        """Look after a subgoal that was accepted. :raises WrongState: nobody will tell of it."""
        ...


class PlannerEngine:
    """Drives one planner session."""

    def __init__(
        self,
        session: Session,
        store: CapsuleStore,
        language: Language,
        link: Link,
        parameters: Any,
        counters: Counters,
        lost: Callable[[FlashrtError], None],
        scene: Callable[[], str] = lambda: '',
    ) -> None:
        """Compose the parts; nothing runs yet.

        :param parameters: mapping of parameter names to values now (ParameterTable).
        :param lost: told when the device is lost.
        :param scene: the newest scene text, for plans that bring none.
        """
        counters.declare(COUNTERS)
        self.session, self.store, self.language = session, store, language
        self._link, self._parameters, self._counters = link, parameters, counters
        self._lost, self._scene = lost, scene
        self._lock = threading.Lock()  # of what follows
        self.plan: Plan | None = None  # the newest
        self._plans = 0
        self._worker: threading.Thread | None = None
        self._closed = False
        self._verb = threading.Lock()  # held by whoever changes the session's state
        self.context_tokens = 0
        self.epoch = 0  # restores and rollbacks asked for from outside
        self.active_capsule, self.bit_exact = '', True
        self.rings = {stage: Ring(warm_up=1) for stage in STAGES}

    # -- configure ------------------------------------------------------------------------------

    def read_context(self) -> None:
        """Prefill the context that all plans share and pin it as a capsule.

        :raises FlashrtError: it does not fit, or there is no room for its capsule.
        """
        self._prefill_context()
        boundary = self.session.boundary
        self.on_lane(lambda: self.store.snapshot(
            boundary, CONTEXT, label='system prompt and grammar', pin=True), 'snapshot')
        self.context_tokens = self.session.position

    def warm_up(self) -> None:
        """Run what a plan runs, so that no plan pays for a first launch and all is measured."""
        boundary, limit = self.session.boundary, self._parameters['plan_timeout_s']
        tokens = self.language.request('go home', '', (), '')
        self._wait(self.session.append(tokens), limit, 'the append of the warm-up')
        mark = self.on_lane(lambda: self.store.mark(boundary), 'mark')
        for _ in self.language.stream(self.session, _WARM_UP_TOKENS, self._parameters):
            pass
        self.on_lane(lambda: self.store.rollback(boundary, mark), 'rollback')
        self._restore_context(Times())
        for ring in self.rings.values():
            ring.clear()

    def _prefill_context(self) -> None:
        tokens = self.language.context()
        limit = self._parameters['plan_timeout_s']
        if not tokens:
            self._wait(self.session.reset(), limit, 'the reset of the state')
            return
        self._wait(self.session.prefill(tokens), limit, 'the prefill of the context')

    # -- plans ----------------------------------------------------------------------------------

    @property
    def plans(self) -> int:
        """Plans begun so far."""
        return self._plans

    @property
    def busy(self) -> str:
        """Why a plan that does not preempt is refused now, or ''."""
        plan = self.plan
        if plan is None or plan.ended.done():
            return ''
        if plan.decoding:
            return f'plan {plan.number} is being decoded'
        return f'plan {plan.number} is being carried out' if plan.request.wait else ''

    def start(self, request: PlanRequest, tell: Callable[[Told], None],
              preempt: bool = False) -> Plan:
        """Begin a plan; ends the one that is carried out. Any thread; waits for the old one's end.

        :raises LaneBusy: one runs and ``preempt`` is False, or a capsule verb does.
        :raises WrongState: the executor cannot take subgoals, or the planner was deactivated.
        :raises ParameterInvalid: an instruction that is empty or too long, or such a scene.
        """
        self.language.check(request.instruction, request.scene or self._scene())
        with self._lock:
            if self._closed:
                raise WrongState('a plan is refused: the planner is not active; activate it first')
            if self.busy and not preempt:
                raise LaneBusy(f'{self.busy}; wait for its result, cancel it, or ask with preempt')
            self._end_old('superseded', 'a newer plan has taken its place')
            base = Base(0, 0) if request.dry_run else self._link.base()
            self._plans += 1
            plan = self.plan = Plan(
                self._plans, request, self._write, tell, self._link.check)
            plan.base = base
            self._counters.add('plans')
            self._worker = threading.Thread(
                target=self._run, args=(plan,), name=f'plan-{plan.number}', daemon=True)
            self._worker.start()
            return plan

    def stop(self, code: str, message: str, *, decoding_only: bool = False) -> bool:
        """End the plan that runs, at a token's boundary; any thread, waits for nothing."""
        plan = self.plan
        if plan is None or (decoding_only and not plan.decoding):
            return False
        return plan.stop(code, message)

    def open(self) -> None:
        """Take plans again after ``close``."""
        self._closed = False

    def close(self) -> None:
        """End the plan that runs and wait for its worker; no other one begins."""
        with self._lock:
            self._closed = True
            self._end_old('cancelled', 'the node ends')

    def _end_old(self, code: str, message: str) -> None:
        plan, worker = self.plan, self._worker
        if plan is not None:
            plan.stop(code, message)
        if worker is None or worker is threading.current_thread():
            return
        worker.join(self._parameters['device_timeout_s'])
        if worker.is_alive():
            raise LaneBusy(f'plan {plan.number if plan else 0} has not come to a boundary yet; '
                           'try again')
        self._worker = None

    def _run(self, plan: Plan) -> None:
        end = End('internal', 'the plan ended unexpectedly')
        try:
            end = self._carry_out(plan)
        except FlashrtError as error:
            end = plan.stopped or End(error.code, str(error))
            self._judge(error)
        except Exception as error:
            end = End('internal', repr(error))
            raise
        finally:
            self._counters.add({'ok': 'plans_ok', 'cannot': 'plans_cannot',
                                'cancelled': 'plans_cancelled', 'superseded': 'plans_superseded',
                                }.get(end.code, 'plans_failed'))
            plan.ended.set_result(end)
            plan.complete()
            plan.enter('ready')

    def _carry_out(self, plan: Plan) -> End:
        done: list[str] = []
        failed = ''
        while True:
            with self._session_for('a plan'):
                why_not = self._decode(plan, done, failed)
            if why_not:
                more = (f'{len(done)} subgoals were done and {failed!r} was not' if plan.replans
                        else 'nothing was written')
                return End('cannot', f'the planner cannot do {plan.request.instruction!r:.200}: '
                           f'{why_not}; {more}')
            if plan.request.dry_run:
                return plan.stopped or End('ok', f'{len(plan.items)} subgoals, none written')
            plan.enter('execute')
            plan.complete()
            bad = plan.follow()
            if plan.stopped is not None:
                return plan.stopped
            if bad is None:
                return End('ok', f'{len(plan.items)} subgoals done')
            if plan.replans >= self._parameters['replan_limit']:
                return End('subgoal_' + bad.outcome,
                           f'subgoal {bad.sequence} {bad.text!r} {bad.outcome}: {bad.message}; '
                           f'{plan.replans} new plans were made for it (replan_limit)')
            done, failed = plan.begin_again()
            self._counters.add('replans')

    def _decode(self, plan: Plan, done: Sequence[str], failed: str) -> str:
        """Restore, append, decode; why not, when the planner says that it cannot, else ''.

        :raises TickDropped: the plan was ended; the state is that of its mark.
        """
        times = plan.times = Times(context_tokens=self.context_tokens)
        begun = time.perf_counter()
        plan.enter('restore')
        scene = plan.request.scene or self._scene()
        self.language.check(plan.request.instruction, scene)  # it may be a newer scene
        tokens = self.language.request(plan.request.instruction, scene, done, failed)
        times.prompt_tokens = len(tokens)
        try:
            self._take_in(tokens, plan, times)
        except TickDropped:
            self._restore_context(Times())
            raise
        times.append_us = max(0.0, (time.perf_counter() - begun) * 1e6 - times.restore_us)
        self.rings['append'].record(times.append_us)
        mark = self.on_lane(lambda: self.store.mark(self.session.boundary), 'mark')
        plan.enter('decode')
        try:
            able = self._stream(plan, times, begun)
        except BaseException:
            self._back_to(mark, plan)
            raise
        return '' if able else self.language.why_cannot(plan.request.instruction, scene)

    def _take_in(self, tokens: Sequence[int], plan: Plan, times: Times) -> None:
        """Append to the context's capsule; from host memory that runs beside the restore."""
        limit, what = self._parameters['plan_timeout_s'], 'the append of a plan'
        try:
            appending = self.session.restore_and_append(self.store, CONTEXT, tokens)
            plan.enter('append')
            plan.on_stop(appending.cancel)
            restored = self._wait(appending, limit, what).restored
            times.capsule_hit, times.restore_us = True, restored.us
            self.rings['restore'].record(restored.us)
        except CapsuleNotFound:
            self._restore_context(times)
            plan.enter('append')
            appending = self.session.append(tokens)
            plan.on_stop(appending.cancel)
            self._wait(appending, limit, what)

    def _stream(self, plan: Plan, times: Times, begun: float) -> bool:
        reader = self.language.reader()
        stream = self.language.stream(
            self.session, self._parameters['max_tokens'], self._parameters)
        plan.on_stop(stream.cancel)
        before = begun
        for token in stream:
            now = time.perf_counter()
            if not times.tokens:
                times.ttft_us = (now - begun) * 1e6
                self.rings['ttft'].record(times.ttft_us)
            else:
                self.rings['token'].record((now - before) * 1e6)
                times.decode_us += (now - before) * 1e6
            before = now
            times.tokens += 1
            self._counters.add('tokens')
            if plan.stopped is not None:
                stream.cancel()
                break
            plan.enter('decode', token.text)
            for text in reader.push(token.text):
                plan.add(text)
            plan.advance()
        if plan.stopped is not None:
            raise TickDropped(f'plan {plan.number} was ended after {times.tokens} tokens')
        for text in reader.finish():
            plan.add(text)
        self.on_lane(lambda: self.store.mark(self.session.boundary), 'mark')
        return not reader.cannot

    def _write(self, text: str, sequence: int, base: Base, priority: int,
               deadline_s: float) -> None:
        limit = deadline_s or self._parameters['subgoal_deadline_s']
        begun = time.perf_counter()
        try:
            self._link.write(text, sequence, base, priority, limit)
        except FlashrtError:
            self._counters.add('subgoals_refused')
            raise
        self.rings['write'].record((time.perf_counter() - begun) * 1e6)
        self._counters.add('subgoals_written')

    # -- the session's state --------------------------------------------------------------------

    @contextmanager
    def session_for(self, what: str) -> Iterator[None]:
        """Have the session's state for a verb.

        :raises LaneBusy: a plan is being decoded, or another verb is at work.
        """
        plan = self.plan
        if plan is not None and plan.decoding:
            raise LaneBusy(f'{what} is refused: plan {plan.number} is being decoded; cancel it '
                           'or wait for its result')
        with self._session_for(what):
            yield

    @contextmanager
    def _session_for(self, what: str) -> Iterator[None]:
        if not self._verb.acquire(timeout=0.0 if what != 'a plan'
                                  else self._parameters['verb_timeout_s']):
            raise LaneBusy(f'{what} is refused: a plan or capsule verb is at work; try again '
                           'when it has answered')
        try:
            yield
        finally:
            self._verb.release()

    def restored(self, capsule: str, bit_exact: bool) -> None:
        """Note a restore or rollback that was asked for from outside."""
        self.epoch += 1
        self.active_capsule, self.bit_exact = capsule, bit_exact

    def _restore_context(self, times: Times) -> None:
        begun = time.perf_counter()
        boundary = self.session.boundary
        try:
            self.on_lane(lambda: self.store.restore(boundary, CONTEXT), 'restore')
            times.capsule_hit = True
        except CapsuleNotFound:
            self._counters.add('capsule_misses')
            self._prefill_context()
        times.restore_us = (time.perf_counter() - begun) * 1e6
        self.rings['restore'].record(times.restore_us)

    def _back_to(self, mark: Mark, plan: Plan) -> None:
        plan.enter('rollback')
        self._counters.add('rollbacks')
        boundary = self.session.boundary
        try:
            self.on_lane(lambda: self.store.rollback(boundary, mark), 'rollback')
        except CapsuleError:
            self._restore_context(Times())  # the mark is dead: a restore came in between

    def on_lane(self, work: Callable[[], Any], what: str) -> Any:
        """Run a verb at the next boundary; one that another verb is in the way of waits for it."""
        limit = self._parameters['verb_timeout_s']
        deadline = time.monotonic() + limit
        pause = threading.Event()
        while True:
            try:
                return self._wait(self.session.lane.at_boundary(work, what), limit, what)
            except LaneBusy:
                if time.monotonic() > deadline:
                    raise
                pause.wait(0.001)

    def _wait(self, future: Any, limit: float, what: str) -> Any:
        try:
            return future.result(limit)
        except FutureTimeout:
            raise LaneTimeout(f'{what} did not end within {limit:g} s; the device may be wedged'
                              ) from None

    def _judge(self, error: FlashrtError) -> None:
        """Have the process end when the device is gone."""
        if isinstance(error, (DeviceLost, LaneTimeout)) or self.session.lane.fault is not None:
            self._lost(error)
