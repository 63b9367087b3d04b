"""The executor's services: requests to verbs, results to replies."""

import time
from typing import Any

import numpy as np

from flashrt_core.capsule import check_id
from flashrt_core.errors import ActionJump
from flashrt_core.errors import LaneBusy
from flashrt_core.errors import ParameterInvalid
from flashrt_core.errors import WrongState
from flashrt_ros import srv
from flashrt_ros.capsule_services import CapsuleServices
from flashrt_ros.conversions import stamp_to_ns
from flashrt_ros.executor_episode import END
from flashrt_ros.executor_verbs import C0
from flashrt_ros.hold import Cause
from flashrt_ros.lifecycle import ACTIVE
from flashrt_ros.msg import Subgoal as SubgoalMessage
from flashrt_ros.service_frame import CONFIGURED
from flashrt_ros.service_frame import ServiceFrame

RESERVED_CAUSES = frozenset(
    value for name, value in vars(Cause).items() if name.isupper()) - {Cause.REQUEST} | {
        ActionJump.code, END}


class ExecutorServices:
    """Creates the services with the node; they answer ``wrong_state`` until it is configured."""

    def __init__(self, node: Any) -> None:
        """Create them.

        :param node: the executor node: ``engine``, ``control``, ``verbs``, ``store``,
            ``outputs``, ``tokenize``, ``parameters``, and what ``ServiceFrame`` and
            ``CapsuleServices`` ask of it.
        """
        self._node = node
        self._asked_holds: set[str] = set()
        self.frame = frame = ServiceFrame(node)
        frame.serve('reset', srv.Reset, self._reset, CONFIGURED, waits=True)
        CapsuleServices(frame, node, kept=C0, why_kept='~/reset restores', unit='tick')
        frame.serve('fork', srv.Fork, self._fork, (ACTIVE,), waits=True)
        frame.serve('step', srv.Step, self._step, (ACTIVE,), waits=True)
        frame.serve('set_subgoal', srv.SetSubgoal, self._set_subgoal, CONFIGURED, waits=False)
        frame.serve('hold', srv.Hold, self._hold, CONFIGURED, waits=False)
        frame.serve('resume', srv.Resume, self._resume, (ACTIVE,), waits=False)
        frame.start()

    def subgoal(self, message: SubgoalMessage, embedding: Any = None) -> int:
        """Admit a subgoal of the topic, the service or this process; returns its sequence.

        :param embedding: in the place of the message's, array or tensor float32 [n, width] on any
            device; see ``SubgoalSlot.admit``.
        :raises SubgoalRefused, ConfigError: and nothing has changed.
        """
        engine, node = self._node.engine, self._node
        progress = node.control.progress
        tokens = list(message.tokens)
        if embedding is None and message.embedding:
            embedding = np.asarray(message.embedding, dtype=np.float32)
        if embedding is None and not tokens and message.text.strip():
            tokens = node.tokenize(message.text, engine.ports.subgoal_tokens)
        accepted = engine.slot.admit(
            sequence=message.sequence, epoch=message.epoch, episode=message.episode,
            text=message.text, tokens=tokens,
            interrupt=message.priority >= SubgoalMessage.PRIORITY_INTERRUPT,
            deadline_s=message.deadline_s, embedding=embedding,
            current_epoch=progress.epoch, current_episode=progress.episode,
            now_ns=time.monotonic_ns())
        engine.announce(accepted)
        return accepted.sequence

    # -- the verbs ------------------------------------------------------------------------------

    def _reset(self, request: srv.Reset.Request, response: srv.Reset.Response) -> str:
        capsule = check_id(request.capsule_id) if request.capsule_id else ''
        progress = self._node.control.progress

        def begun() -> None:  # read there: another reset may come before this one's reply
            response.epoch, response.episode = progress.epoch, progress.episode

        report = self._node.verbs.reset(
            capsule, request.seed if request.set_seed else None, begun)
        response.restore_us = report.us
        return f'restored {report.id}; {self._node.now_text()}'

    def _fork(self, request: srv.Fork.Request, response: srv.Fork.Response) -> str:
        capsule = check_id(request.capsule_id) if request.capsule_id else ''
        found = self._node.verbs.fork(
            capsule, request.n, list(request.seeds), request.commit_branch,
            stamp_to_ns(request.observed_after))
        response.chunks = [
            self._node.outputs.chunk_message(
                actions, tick=found.chunk.tick, branch=branch, first_step=0,
                subgoal_sequence=found.chunk.subgoal_sequence)
            for branch, actions in enumerate(found.actions)]
        response.scores = [float(score) for score in found.scores]
        response.spread, response.selected = found.spread, found.selected
        done = ('evaluated only, the session is where it was' if found.committed < 0
                else f'branch {found.committed} goes on')
        return f'{request.n} branches, {done}; {self._node.now_text()}'

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
        latched = self._node.control.holds.latched  # by an earlier call, too
        leave = '~/resume' if latched else '~/resume, ~/reset or a restore'
        return f'holding for {cause}, leave it by {leave}; {self._node.now_text()}'

    def _resume(self, request: srv.Resume.Request, response: srv.Resume.Response) -> str:
        control = self._node.control
        asked = [cause for cause in control.holds.causes if cause in self._asked_holds]
        if control.holds.latched or not asked:
            control.resume()
        for cause in asked:
            control.clear(cause)
        self._asked_holds.clear()
        return f'resync begins; {self._node.now_text()}'

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
            response.subgoal_done = node.outputs.take_done()
            response.joint_names = list(engine.embodiment.names)
            response.positions = control.limiter.command.tolist()
        return f'step {response.step} of tick {response.tick}'
