"""The executor's services: requests to verbs, results to replies.

A reply never says success for a partial effect and carries the code of the error otherwise;
nothing raises out of here. Requests are taken by a thread of their own; verbs that touch the
device run on worker threads, which send their replies themselves.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
import time
import traceback
from typing import Any

from flashrt_core.capsule import CapsuleInfo
from flashrt_core.capsule import check_id
from flashrt_core.errors import ActionJump
from flashrt_core.errors import FlashrtError
from flashrt_core.errors import LaneBusy
from flashrt_core.errors import ParameterInvalid
from flashrt_core.errors import WrongState
from flashrt_ros import srv
from flashrt_ros.attendant import Attendant
from flashrt_ros.attendant import Reply
from flashrt_ros.conversions import fill_stamp
from flashrt_ros.conversions import stamp_to_ns
from flashrt_ros.executor_episode import END
from flashrt_ros.executor_verbs import C0
from flashrt_ros.futures import run_in_pool
from flashrt_ros.hold import Cause
from flashrt_ros.lifecycle import ACTIVE
from flashrt_ros.lifecycle import INACTIVE
from flashrt_ros.msg import CapsuleInfo as CapsuleInfoMessage
from flashrt_ros.msg import Subgoal as SubgoalMessage

CONFIGURED = (INACTIVE, ACTIVE)
RESERVED_CAUSES = frozenset(
    value for name, value in vars(Cause).items() if name.isupper()) - {Cause.REQUEST} | {
        ActionJump.code, END}
_WORKERS = 4


class ExecutorServices:
    """Creates the services with the node; they answer ``wrong_state`` until it is configured."""

    def __init__(self, node: Any) -> None:
        """Create them.

        :param node: the executor node: ``engine``, ``control``, ``verbs``, ``store``,
            ``state_label``, ``outputs``, ``tokenize``, ``count_refusal``, ``parameters``.
        """
        self._node = node
        self._pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix='verb')
        self._asked_holds: set[str] = set()
        self._attendant = Attendant(node, 'services')
        self._serve('reset', srv.Reset, self._reset, CONFIGURED, waits=True)
        self._serve('snapshot', srv.Snapshot, self._snapshot, CONFIGURED, waits=True)
        self._serve('restore', srv.Restore, self._restore, CONFIGURED, waits=True)
        self._serve('rollback', srv.Rollback, self._rollback, CONFIGURED, waits=True)
        self._serve('fork', srv.Fork, self._fork, (ACTIVE,), waits=True)
        self._serve('list_capsules', srv.ListCapsules, self._list, CONFIGURED, waits=True)
        self._serve('pin', srv.Pin, self._pin, CONFIGURED, waits=True)
        self._serve('drop', srv.Drop, self._drop, CONFIGURED, waits=True)
        self._serve('move', srv.Move, self._move, CONFIGURED, waits=True)
        self._serve('step', srv.Step, self._step, (ACTIVE,), waits=True)
        self._serve('set_subgoal', srv.SetSubgoal, self._set_subgoal, CONFIGURED, waits=False)
        self._serve('hold', srv.Hold, self._hold, CONFIGURED, waits=False)
        self._serve('resume', srv.Resume, self._resume, (ACTIVE,), waits=False)
        self._attendant.start()

    def close(self) -> None:
        """Take no more requests and let the workers end."""
        self._attendant.close()
        self._pool.shutdown(wait=False)

    def run(self, function: Callable[[], Any]) -> Any:
        """Run a blocking verb on a worker; returns what to await."""
        return run_in_pool(self._node, self._pool, function)

    def require(self, states: tuple[str, ...], what: str) -> None:
        """Refuse outside the given lifecycle states.

        :raises WrongState: naming the state and the remedy.
        """
        state = self._node.state_label
        if state not in states or self._node.engine is None:
            raise WrongState(f'{what} is refused in state {state}; bring the node to '
                             f'{" or ".join(states)} (lifecycle configure, activate)')

    def subgoal(self, message: SubgoalMessage) -> int:
        """Admit a subgoal of the topic or the service; returns its sequence.

        :raises SubgoalRefused, ConfigError: and nothing has changed.
        """
        engine, node = self._node.engine, self._node
        tokens = list(message.tokens)
        if not tokens and message.text:
            tokens = node.tokenize(message.text, engine.ports.subgoal_tokens)
        accepted = engine.slot.admit(
            sequence=message.sequence, episode=message.episode, text=message.text, tokens=tokens,
            interrupt=message.priority >= SubgoalMessage.PRIORITY_INTERRUPT,
            deadline_s=message.deadline_s, current_episode=node.control.progress.episode,
            now_ns=time.monotonic_ns())
        engine.announce(accepted)
        return accepted.sequence

    # -- the frame of every reply ---------------------------------------------------------------

    def _serve(self, name: str, srv_type: Any, handler: Callable[[Any, Any], str],
               states: tuple[str, ...], waits: bool) -> None:
        def answer(request: Any, reply: Reply, begun: float) -> None:
            response = srv_type.Response()
            try:
                self.require(states, f'~/{name}')
                response.message = handler(request, response)
                response.success, response.code = True, 'ok'
            except Exception as error:
                response = self._failed(name, srv_type.Response(), error)
            response.duration_us = (time.perf_counter() - begun) * 1e6
            reply(response)

        def take(request: Any, reply: Reply) -> None:
            begun = time.perf_counter()
            if waits:
                self._pool.submit(answer, request, reply, begun)
            else:
                answer(request, reply, begun)

        service = self._node.create_service(
            srv_type, f'~/{name}', lambda *_: None, callback_group=self._attendant.group)
        self._attendant.serve(service, take)

    def _failed(self, name: str, response: Any, error: Exception) -> Any:
        response.success = False
        if isinstance(error, FlashrtError):
            response.code = error.code
            response.message = f'{error}; {self._now_text()}'
        else:
            response.code = 'internal'
            response.message = f'~/{name} failed unexpectedly: {error!r}; {self._now_text()}'
            self._node.get_logger().error(traceback.format_exc())
        self._node.count_refusal(error)
        self._node.outputs.event('refused', f'~/{name}', {
            'code': response.code, 'message': response.message})
        return response

    def _now_text(self) -> str:
        control = self._node.control
        if control is None:
            return f'the node is {self._node.state_label}'
        progress = control.progress
        causes = ', '.join(control.holds.causes)
        return (f'now {self._node.state_label}, {self._node.phase}, epoch {progress.epoch}, '
                f'episode {progress.episode}, tick {progress.tick}'
                + (f', held by {causes}' if causes else ''))

    # -- the verbs ------------------------------------------------------------------------------

    def _reset(self, request: srv.Reset.Request, response: srv.Reset.Response) -> str:
        capsule = check_id(request.capsule_id) if request.capsule_id else ''
        report = self._node.verbs.reset(capsule, request.seed if request.set_seed else None)
        self._epochs(response, report.us)
        response.episode = self._node.control.progress.episode
        return f'restored {report.id}; {self._now_text()}'

    def _restore(self, request: srv.Restore.Request, response: srv.Restore.Response) -> str:
        report = self._node.verbs.restore(check_id(request.id), request.numerics)
        self._epochs(response, report.us)
        response.bit_exact = report.bit_exact
        exact = '' if report.bit_exact else ' (not bit-exact)'
        return f'restored {report.id}{exact}; {self._now_text()}'

    def _rollback(self, request: srv.Rollback.Request, response: srv.Rollback.Response) -> str:
        to = check_id(request.to) if request.to else ''
        report = self._node.verbs.rollback(to, request.boundaries)
        self._epochs(response, report.us)
        response.tick = report.position
        return f'rolled back to {report.id} at tick {report.position}; {self._now_text()}'

    def _epochs(self, response: Any, restore_us: float) -> None:
        response.restore_us = restore_us
        response.epoch = self._node.control.progress.epoch

    def _snapshot(self, request: srv.Snapshot.Request, response: srv.Snapshot.Response) -> str:
        name = check_id(request.id) if request.id else ''
        info = self._node.verbs.snapshot(name, request.label, request.tier, request.pin)
        response.info = info_message(info)
        where = f'{info.tier} and in its file' if request.tier == 'disk' else info.tier
        return f'{info.id} holds tick {info.position}, {info.size_bytes} bytes on {where}'

    def _fork(self, request: srv.Fork.Request, response: srv.Fork.Response) -> str:
        capsule = check_id(request.capsule_id) if request.capsule_id else ''
        found = self._node.verbs.fork(
            capsule, request.n, list(request.seeds), request.commit_branch)
        response.chunks = [
            self._node.outputs.chunk_message(
                actions, tick=found.chunk.tick, branch=branch, first_step=0,
                subgoal_sequence=found.chunk.subgoal_sequence)
            for branch, actions in enumerate(found.actions)]
        response.scores = [float(score) for score in found.scores]
        response.spread, response.selected = found.spread, found.selected
        done = ('evaluated only, the session is where it was' if found.committed < 0
                else f'branch {found.committed} goes on')
        return f'{request.n} branches, {done}; {self._now_text()}'

    def _list(self, request: srv.ListCapsules.Request,
              response: srv.ListCapsules.Response) -> str:
        store = self._node.store
        infos = store.list(request.tier or None, self._session)
        response.capsules = [info_message(info) for info in infos]
        for tier, use in store.usage().items():
            setattr(response, f'{tier}_used_bytes', use.used_bytes)
            setattr(response, f'{tier}_budget_bytes', use.budget_bytes)
        return f'{len(infos)} capsules'

    def _pin(self, request: srv.Pin.Request, response: srv.Pin.Response) -> str:
        if not request.pinned:
            _refuse_c0(request.id)
        info = self._node.store.pin(check_id(request.id), request.pinned, self._session)
        response.info = info_message(info)
        return f'{info.id} is {"pinned" if info.pinned else "not pinned"}'

    def _drop(self, request: srv.Drop.Request, response: srv.Drop.Response) -> str:
        _refuse_c0(request.id)
        self._node.store.drop(check_id(request.id), self._session)
        return f'{request.id} is gone'

    def _move(self, request: srv.Move.Request, response: srv.Move.Response) -> str:
        info = self._node.store.move(check_id(request.id), request.tier, self._session)
        response.info = info_message(info)
        return f'{info.id} is on {info.tier}'

    def _set_subgoal(self, request: srv.SetSubgoal.Request,
                     response: srv.SetSubgoal.Response) -> str:
        if (request.subgoal.priority >= SubgoalMessage.PRIORITY_INTERRUPT
                and self._node.engine.interrupted):
            raise LaneBusy('an interrupt is being answered by the tick that runs; call again once '
                           'its chunk is out, or publish on the topic, of which the newest counts')
        response.sequence = self.subgoal(request.subgoal)
        return f'subgoal {response.sequence} is latched by the next tick'

    def _hold(self, request: srv.Hold.Request, response: srv.Hold.Response) -> str:
        cause = request.cause or Cause.REQUEST
        if cause in RESERVED_CAUSES or len(cause) > 64 or not cause.isprintable():
            raise ParameterInvalid(
                f'cause is {cause!r:.80}; give up to 64 printable characters that are none of the '
                f'executor\'s own causes {", ".join(sorted(RESERVED_CAUSES))}')
        self._asked_holds.add(cause)
        self._node.control.hold(cause, latch=request.latch)
        leave = '~/resume' if request.latch else '~/resume or ~/reset'
        return f'holding for {cause}, leave it by {leave}; {self._now_text()}'

    def _resume(self, request: srv.Resume.Request, response: srv.Resume.Response) -> str:
        control = self._node.control
        asked = self._asked_holds & set(control.holds.causes)
        self._asked_holds.clear()
        if asked and not control.holds.latched:
            for cause in asked:
                control.clear(cause)
        else:
            control.resume()
        return f'resync begins; {self._now_text()}'

    def _step(self, request: srv.Step.Request, response: srv.Step.Response) -> str:
        node, engine, control = self._node, self._node.engine, self._node.control
        if not engine.lock_step:
            raise WrongState('~/step is refused: the step thread plays in real time; '
                             'start the node with lock_step:=true')
        with node.stepping:
            before = control.ticks_played
            node.play_step(stamp_to_ns(request.observed_after))
            response.ticked = control.ticks_played > before
            response.tick, response.step = control.progress.tick, control.progress.step
            response.epoch = control.progress.epoch
            response.joint_names = list(engine.embodiment.names)
            response.positions = control.limiter.command.tolist()
        return f'step {response.step} of tick {response.tick}'

    @property
    def _session(self) -> str:
        return str(self._node.engine.session.boundary.session)


def _refuse_c0(capsule: str) -> None:
    if capsule == C0:
        raise ParameterInvalid(f'capsule {C0!r} stays and stays pinned: it is what ~/reset '
                               'restores; it goes with the cleanup transition')


def info_message(info: CapsuleInfo) -> CapsuleInfoMessage:
    """Return a capsule's record as a message."""
    message = CapsuleInfoMessage(
        id=info.id, label=info.label, tier=info.tier, parent=info.parent,
        layout_digest=info.layout_digest, numerics_digest=info.numerics_digest,
        position=info.position, size_bytes=info.size_bytes, pinned=info.pinned,
        bit_exact=info.bit_exact)
    fill_stamp(message.created, created_ns(info.created))
    return message


def created_ns(text: str) -> int:
    """Return an ISO 8601 time of a capsule as nanoseconds."""
    return int(datetime.fromisoformat(text).timestamp() * 1e6) * 1000
