"""The planner: a lifecycle node that turns instructions into subgoals for an executor.

configure loads, binds, captures, reads the context that all plans share and pins it as a capsule;
activate takes goals of ~/plan; deactivate ends the plan that runs. Exit status: see main.py.
"""

if __name__ == '__main__':  # the imports take seconds
    from flashrt_core.starting import node_begins

    node_begins()

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import sys
from typing import Any

from rclpy.callback_groups import MutuallyExclusiveCallbackGroup
from std_msgs.msg import String

from flashrt_core.planners import make_planner
from flashrt_core.planners import Planner
from flashrt_core.runtime import pick_backend
from flashrt_ros import qos
from flashrt_ros.admission import Admission
from flashrt_ros.capsule_parameters import budgets_of
from flashrt_ros.capsule_services import CapsuleServices
from flashrt_ros.config_files import here_or_below_config
from flashrt_ros.executor_services import RESERVED_CAUSES
from flashrt_ros.main import run_node
from flashrt_ros.main import StopRequest
from flashrt_ros.msg import PlannerStatus
from flashrt_ros.msg import SubgoalOutcome
from flashrt_ros.planner_action import PlanServer
from flashrt_ros.planner_engine import CONTEXT
from flashrt_ros.planner_engine import MARKS
from flashrt_ros.planner_engine import PlannerEngine
from flashrt_ros.planner_language import find_grammar
from flashrt_ros.planner_language import Language
from flashrt_ros.planner_link import BoundLink
from flashrt_ros.planner_link import RosLink
from flashrt_ros.planner_outputs import PlannerOutputs
from flashrt_ros.planner_parameters import check_at_configure
from flashrt_ros.planner_parameters import planner_parameters
from flashrt_ros.planner_report import PlannerReport
from flashrt_ros.planner_verbs import PlannerVerbs
from flashrt_ros.service_frame import ServiceFrame
from flashrt_ros.session_node import SessionNode
from flashrt_ros.subgoals import OUTCOMES

_OUTCOMES = {getattr(SubgoalOutcome, name.upper()): name for name in OUTCOMES}
_TRAINED = ('for trained ones give planner_config a file whose weights: names some, as '
            'resource/models/planner/planner.yaml does')


class PlannerNode(SessionNode):
    """One planner for one executor; see config/planner.yaml and doc/planner_parameters.md."""

    def __init__(self, stop: StopRequest | None = None, *, executor: Any = None,
                 **kwargs: Any) -> None:
        """Declare parameters, create publishers, services and the action; nothing is loaded yet.

        :param stop: told when the device is lost; None in tests.
        :param executor: the executor node of this process to bind to; None: over ROS.
        :param kwargs: of rclpy's Node.
        :raises ConfigError: a parameter given at start is refused.
        """
        super().__init__('planner', stop, planner_parameters(), **kwargs)
        self.parameters.on_refusal(self.count_refusal)
        self.engine: PlannerEngine | None = None
        self.verbs: PlannerVerbs | None = None
        self.admission: Admission | None = None
        # Gives the family; a bench gives one whose random weights are drawn on the device.
        self.make_planner: Callable[[str], Planner] = make_planner
        self._scene = ''
        self._last_code = ''
        self.report = PlannerReport(self)
        self.outputs = PlannerOutputs(self, self.report.qos_mismatch, self._fill_status)
        self.link: BoundLink | RosLink = (
            RosLink(self, self._heard) if executor is None else BoundLink(executor, self._heard))
        self._executor = executor
        self.frame = ServiceFrame(self)
        CapsuleServices(self.frame, self, kept=CONTEXT, why_kept='every plan begins from',
                        unit='token')
        self.frame.start()
        self._plan_server = PlanServer(self)
        group = MutuallyExclusiveCallbackGroup()
        self._listen(SubgoalOutcome, 'subgoal_outcome', self._on_outcome, qos.record(), group)
        self._listen(String, 'scene', self._on_scene, qos.command(), group)
        # Of its own: the next instruction is taken when this one's plan has begun.
        self._listen(String, '~/instruction', self._on_instruction, qos.command(),
                     MutuallyExclusiveCallbackGroup())
        self.outputs.publish_status()

    # -- lifecycle, on the transition thread ----------------------------------------------------

    def load(self) -> str:
        """Load, bind, capture, read and pin the context."""
        of = self.parameters
        check_at_configure(of)
        grammar = find_grammar(of['grammar'])
        backend = pick_backend(of['device'], of['stream_priority'])
        self._session = session = self.make_planner(of['planner']).bind(
            backend, here_or_below_config(of['planner_config']), self._told)
        self._warn_if_random('planner can be measured, and its plans', _TRAINED)
        room = budgets_of(of, session.memory(), session.config.context, backend)
        store = self.open_store(backend, MARKS, room)
        language = Language(session, grammar, form=of['prompt_form'],
                            system_prompt=of['system_prompt'])
        engine = PlannerEngine(session, store, language, self.link, of, self.report.counters,
                               self._device_lost, lambda: self._scene)
        if self._executor is not None:
            self.admission = Admission(
                self.report.counters, expects_ticks=self._executor.expects_ticks,
                margin_s=of['admission_margin_s'])
            session.lane.gate = self.admission
        self._told('reading context', 0.0)
        engine.read_context()
        engine.warm_up()
        self.engine, self.verbs = engine, PlannerVerbs(engine, store, of, self.outputs)
        return (f'{of["planner"]} ({of["planner_config"]}) on {backend.device}, '
                f'{engine.context_tokens} tokens of context pinned, {room.text}, subgoals out by '
                f'{self.link.kind}')

    def activate(self) -> None:
        """Take goals; between the executor's ticks from now on."""
        assert self.engine is not None
        self.engine.open()
        if self._executor is not None:
            self._executor.admit_through(self.admission)

    def deactivate(self) -> None:
        """End the plan that runs."""
        if self._executor is not None:
            self._executor.admit_through(None)
        if self.engine is not None:
            self.engine.close()

    def teardown(self) -> None:
        """Free everything; callable at any time and twice."""
        if self._executor is not None:
            self._executor.admit_through(None)
        if self._session is not None:
            self._session.lane.gate = None
        if self.engine is not None:
            self.engine.close()
        self.verbs = self.admission = None
        self.free()

    def stop(self, timeout_s: float) -> bool:
        """End in order; False when a transition did not end in time."""
        self.ending = True
        engine = self.engine
        if engine is not None:
            engine.stop('cancelled', 'the node ends')
        ended = self.finish(timeout_s + self.parameters['shutdown_timeout_s'])
        self.frame.close()
        self.link.close()
        return ended

    # -- what services and reports ask ----------------------------------------------------------

    @property
    def phase(self) -> str:
        """What the node does now, in the words of ~/status."""
        if self.configuring:
            return self.configuring
        engine = self.engine
        if engine is None:
            return 'unconfigured'
        plan = engine.plan
        return 'ready' if plan is None or plan.ended.done() else plan.phase

    @property
    def epoch(self) -> int:
        """Restores and rollbacks that were asked for."""
        engine = self.engine  # read once: a cleanup may run beside
        return 0 if engine is None else engine.epoch

    def now_text(self) -> str:
        """Return in words where the node stands, the end of every reply."""
        engine = self.engine
        if engine is None:
            return f'the node is {self.state_label}'
        return (f'now {self.state_label}, {self.phase}, plan {engine.plans}, '
                f'{engine.session.position} tokens in the state')

    # -- what is heard --------------------------------------------------------------------------

    def _heard(self, kind: str, name: str, detail: Mapping[str, Any]) -> None:
        """Take an event of the executor, in order; it may end the plan or a subgoal of it."""
        engine = self.engine
        plan = None if engine is None else engine.plan
        if engine is None or plan is None or plan.ended.done() or plan.request.dry_run:
            return
        if kind == 'subgoal':
            sequence = int(detail.get('sequence', 0))
            if not plan.is_own(sequence):
                what = 'an interrupt' if detail.get('interrupt') else 'a subgoal of somebody else'
                plan.stop('superseded', f'{what}, subgoal {sequence}, has taken its place')
        elif kind in ('reset', 'restore', 'rollback', 'fork'):
            if int(detail['epoch']) <= plan.base.epoch:
                return  # heard late: the plan began after it; or a fork that has restored nothing
            plan.stop('superseded', f'the executor was put back ({kind} {name})')
        elif (outcome := kind.removeprefix('subgoal_')) in OUTCOMES:
            plan.outcome(int(name), 0, outcome, str(detail.get('message', '')))
        elif kind == 'hold' and name not in RESERVED_CAUSES:
            engine.stop('superseded', f'the robot was held ({name})', decoding_only=True)

    def _on_outcome(self, message: SubgoalOutcome) -> None:
        engine = self.engine
        plan = None if engine is None else engine.plan
        outcome = _OUTCOMES.get(message.outcome)
        if plan is None or outcome is None or not plan.outcome(
                message.sequence, message.episode, outcome, message.message):
            self.report.refused('outcome_unexpected')

    def _on_scene(self, message: String) -> None:
        self._scene = message.data

    async def _on_instruction(self, message: String) -> None:
        await self._plan_server.instruct(message.data)

    def _listen(self, message_type: Any, topic: str, callback: Any, profile: Any,
                group: Any) -> None:
        self.create_subscription(
            message_type, topic, callback, profile, callback_group=group,
            event_callbacks=qos.subscription_events(
                self.resolve_topic_name(topic), self.report.qos_mismatch),
            qos_overriding_options=qos.overridable())

    # -- inside ---------------------------------------------------------------------------------

    def _fill_status(self, message: PlannerStatus) -> None:
        of, engine = self.parameters, self.engine
        message.state, message.phase = self.state_label, self.phase
        message.progress = self.progress
        message.planner, message.link = f'{of["planner"]} ({of["planner_config"]})', self.link.kind
        if engine is None:
            return
        session, plan = engine.session, engine.plan
        message.device = str(session.lane.backend.device)
        message.position, message.context_tokens = session.position, engine.context_tokens
        message.active_capsule, message.bit_exact = engine.active_capsule, engine.bit_exact
        message.poisoned = session.boundary.poisoned or ''
        if plan is not None:
            message.plan, message.instruction = plan.number, plan.request.instruction
            message.subgoals = [item.text for item in plan.items]
            message.current, message.sequence = plan.current, plan.sequence
            if plan.ended.done():
                self._last_code = plan.ended.result().code
        message.code = self._last_code


def main(argv: Sequence[str] | None = None) -> int:
    """Run the planner until SIGINT, SIGTERM or a lost device; returns the exit status."""
    def make(stop: StopRequest) -> PlannerNode:
        node = PlannerNode(stop)
        if node.parameters['autostart']:
            node.autostart()
        return node

    return run_node(make, argv)


if __name__ == '__main__':
    sys.exit(main())
