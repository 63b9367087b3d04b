"""The executor: a lifecycle node that runs a policy, plays its chunks and serves its capsules.

configure loads, binds, captures, warms up and snapshots C0; activate ticks and steps; deactivate
holds, then stops; cleanup frees the device. Exit status: see flashrt_ros/main.py.
"""

if __name__ == '__main__':  # the imports take seconds
    from flashrt_core.starting import node_begins

    node_begins()

from collections.abc import Mapping
from collections.abc import Sequence
import sys
import threading
from typing import Any

from rclpy.clock import JumpThreshold
from rclpy.duration import Duration

from flashrt_core.errors import CapsuleExists
from flashrt_core.errors import ConfigError
from flashrt_core.errors import FlashrtError
from flashrt_core.errors import ObservationError
from flashrt_core.errors import ParameterInvalid
from flashrt_core.policies import make_policy
from flashrt_core.policies import Modality
from flashrt_core.policies import Session
from flashrt_core.runtime import Backend
from flashrt_core.runtime import pick_backend
from flashrt_ros.action import RunEpisode
from flashrt_ros.admission import Admission
from flashrt_ros.clocks import RosClock
from flashrt_ros.config_files import find_embodiment
from flashrt_ros.control_loop import StepThread
from flashrt_ros.embodiment import load_embodiment
from flashrt_ros.executor_control import Control
from flashrt_ros.executor_control import Progress
from flashrt_ros.executor_control import Run
from flashrt_ros.executor_engine import Engine
from flashrt_ros.executor_episode import check_goal
from flashrt_ros.executor_episode import END
from flashrt_ros.executor_episode import EpisodeServer
from flashrt_ros.executor_inputs import ExecutorInputs
from flashrt_ros.executor_outputs import ExecutorOutputs
from flashrt_ros.executor_parameters import check_at_configure
from flashrt_ros.executor_parameters import executor_parameters
from flashrt_ros.executor_parameters import heartbeat_deadline_s
from flashrt_ros.executor_report import ExecutorReport
from flashrt_ros.executor_services import ExecutorServices
from flashrt_ros.executor_tick import Pending
from flashrt_ros.executor_verbs import C0
from flashrt_ros.executor_verbs import Verbs
from flashrt_ros.hold import Phase
from flashrt_ros.lifecycle import ACTIVE
from flashrt_ros.main import run_node
from flashrt_ros.main import StopRequest
from flashrt_ros.msg import ExecutorStatus
from flashrt_ros.policy_source import check_fit
from flashrt_ros.policy_source import check_memory
from flashrt_ros.policy_source import policy_config
from flashrt_ros.session_node import SessionNode

_PHASES = {Phase.RUN: 'ticking', Phase.HOLD: 'holding', Phase.RESYNC: 'resync',
           Phase.NEEDS_RESET: 'needs_reset'}
STILL_CLOCK_S = 1.0  # simulated time that stands longer holds the robot


class ExecutorNode(SessionNode):
    """One robot's policy as a node; see config/executor.yaml and doc/parameters.md."""

    def __init__(self, stop: StopRequest | None = None, **kwargs: Any) -> None:
        """Declare parameters, create publishers and services; nothing is loaded yet.

        :param stop: told when the device is lost; None in tests.
        :param kwargs: of rclpy's Node.
        :raises ConfigError: a parameter given at start is refused.
        """
        super().__init__('executor', stop, executor_parameters(), **kwargs)
        self.engine: Engine | None = None
        self.control: Control | None = None
        self.verbs: Verbs | None = None
        self.stepping = threading.Lock()
        self.step_thread: StepThread | None = None
        self._admission: Admission | None = None
        self._session: Session | None = None
        self._tokenizer: Any = None
        self._inputs = ExecutorInputs(self)
        self._kept_progress = Progress()
        self.report = ExecutorReport(self)
        self.outputs = ExecutorOutputs(
            self, self.report.qos_mismatch, self._fill_status, self._device_lost,
            heartbeat_deadline_s(self.parameters))
        self.services_made = ExecutorServices(self)
        self._episodes = EpisodeServer(self)
        self.parameters.add_check(self._check_prompt)
        self.parameters.add_check(self._check_best_of)
        self.parameters.add_check(self._check_guidance)
        self.parameters.on_change(self._parameter_changed)
        self.parameters.on_refusal(self.count_refusal)
        self._clock_reader = RosClock(
            self.now_ns, jump_back_tolerance_s=0.0 if self._simulated else 0.01,
            still_limit_s=STILL_CLOCK_S if self._simulated else 0.0)
        self._jump_handle = self.get_clock().create_jump_callback(
            JumpThreshold(min_forward=None, min_backward=Duration(nanoseconds=-1),
                          on_clock_change=True),
            post_callback=lambda jump: self._clock_reader.jumped())
        self.outputs.publish_status()

    # -- lifecycle, on the transition thread ----------------------------------------------------

    def load(self) -> str:
        """Load, bind, capture, warm up, snapshot C0."""
        check_at_configure(self.parameters)
        robot = load_embodiment(find_embodiment(self.parameters['embodiment']))
        backend = pick_backend(self.parameters['device'], self.parameters['stream_priority'])
        policy = make_policy(self.parameters['policy'])
        config = policy_config(self.parameters, policy, robot)
        check_fit(policy, config, robot)
        self.get_logger().info(check_memory(
            policy.memory(config), self._capsule_bytes(backend), backend))
        self._session = session = policy.bind(backend, config, self._told)
        self._warn_if_random('policy can be measured, and its actions',
                             'give checkpoint for trained ones')
        self._told('preparing capsules', 0.0)
        self._check_best_of(self.parameters)
        self._check_guidance(self.parameters)
        self._tokenizer = session.tokenizer
        store = self.open_store(backend, self.parameters['rollback_ticks'] + 1)
        kept = self._kept_progress  # of the session before: epoch, episode and step go on
        kept.tick, kept.active_capsule, kept.bit_exact = 0, '', True
        self.control = Control(robot, self.outputs, self.report.counters, self.parameters, kept)
        self.engine = Engine(
            session, robot, self.control, self.parameters, self._clock_reader,
            self.now_ns, self.report.counters, lambda: store.mark(session.boundary))
        self.engine.admission = self._admission
        self.outputs.bind(robot, self.engine.ports, self.control.progress)
        self.verbs = Verbs(self.engine, store, self.parameters, self._in_force)
        self.engine.write(guidance=self._in_force().guidance)
        session.lane.at_boundary(self._snapshot_c0).result(self.parameters['verb_timeout_s'])
        self._inputs.open(robot)
        self.step_thread = StepThread(
            robot.step_period_s, self.control.step,
            on_error=self.control.step_failed, fifo_priority=self.parameters['fifo_priority'])
        return (f'{self.parameters["policy"]} ({self.parameters["policy_config"]}) on '
                f'{backend.device}')

    def activate(self) -> None:
        """Begin to tick and to step."""
        assert self.engine is not None and self.step_thread is not None
        self.engine.start()
        if not self.engine.lock_step:
            self.step_thread.start()

    def deactivate(self) -> None:
        """Hold, then stop; the hold is acknowledged by whoever listens, or its time is up."""
        assert self.engine is not None and self.step_thread is not None
        self._episodes.abandon('held')
        self.engine.stop(self.parameters['device_timeout_s'])
        self.step_thread.stop()
        limit = self.parameters['shutdown_timeout_s']
        if not self.outputs.wait_for_acknowledgement(limit):
            self.get_logger().warning(
                f'the hold was not acknowledged within {limit:g} s; is the controller alive?')

    def teardown(self) -> None:
        """Free everything; callable at any time and twice."""
        self._episodes.abandon('held')
        if self.engine is not None and self.engine.active:
            self.engine.stop(1.0)
        if self.step_thread is not None:
            self.step_thread.stop()
        self._inputs.close()
        self.control = self.verbs = self.step_thread = self._tokenizer = None
        self.free()

    def stop(self, timeout_s: float) -> bool:
        """End in order; False when a transition did not end in time."""
        self.ending = True
        ended = self.finish(timeout_s + self.parameters['shutdown_timeout_s'])
        self.services_made.frame.close()
        self.outputs.close()
        return ended

    # -- what services and reports ask ----------------------------------------------------------

    @property
    def phase(self) -> str:
        """What the node does now, in the words of ~/status."""
        if self.configuring:
            return self.configuring
        control = self.control  # read once: a cleanup may run beside
        if control is None or self.state_label != ACTIVE:
            return 'ready' if control is not None else 'unconfigured'
        return _PHASES[control.holds.phase]

    @property
    def epoch(self) -> int:
        """Restores so far."""
        control = self.control
        return 0 if control is None else control.progress.epoch

    def expects_ticks(self) -> bool:
        """Whether the next tick comes by the clock; any thread."""
        engine = self.engine
        return engine is not None and engine.expects_ticks()

    def admit_through(self, admission: Admission | None) -> None:
        """Have ticks announced to a planner's admission; None ends it. Any thread."""
        old, self._admission = self._admission, admission
        engine = self.engine
        if engine is not None:
            engine.admission = admission
        if old is not None:
            old.tick_ended()

    def now_text(self) -> str:
        """Return in words where the node stands, the end of every reply."""
        control = self.control
        if control is None:
            return f'the node is {self.state_label}'
        progress, causes = control.progress, ', '.join(control.holds.causes)
        return (f'now {self.state_label}, {self.phase}, epoch {progress.epoch}, '
                f'episode {progress.episode}, tick {progress.tick}'
                + (f', held by {causes}' if causes else ''))

    def now_ns(self) -> int:
        """ROS time in nanoseconds; zero while simulated time has not begun."""
        return int(self.get_clock().now().nanoseconds)

    def tokenize(self, text: str, limit: int) -> list[int]:
        """Return the policy's token ids of a text.

        :raises ConfigError: it is too long, or the policy has no tokenizer.
        """
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise ConfigError(f'text {text!r:.60} cannot be tokenised: the policy config names no '
                              'tokenizer; send token ids')
        return list(tokenizer.encode(text, limit))

    def play_step(self, observed_after_ns: int) -> None:
        """Lock-step: tick if one is due, then play one step; worker thread.

        :raises FlashrtError: no step was played.
        """
        assert self.engine is not None and self.control is not None
        self.engine.tick_now(observed_after_ns, self.parameters['observation_timeout_s'])
        self.outputs.stamp_ns = self.engine.observations.newest().newest_stamp_ns
        if self.control.step() is None:
            raise ObservationError('no action is left to play; call ~/step again')

    async def begin_episode(self, request: RunEpisode.Goal) -> tuple[Control, Run]:
        """Check a goal, reset if asked, take over its prompt; return what it counts from.

        :raises FlashrtError: the goal is refused, and nothing has changed.
        """
        self.services_made.frame.require((ACTIVE,), '~/run_episode')
        check_goal(request)
        control, verbs, engine = self.control, self.verbs, self.engine
        assert control is not None and verbs is not None and engine is not None
        prompt, seed = request.prompt, int(request.seed) if request.set_seed else None
        tokens = self.tokenize(prompt, engine.ports.prompt_tokens) if prompt else None
        if request.reset:
            begun: list[Run] = []

            def begin() -> None:
                begun.append(control.begin_run_locked(request.max_steps, END))
                if tokens is not None:
                    self._tell_prompt(prompt, tokens)

            # Counted from within the reset: the robot may move before its reply is here.
            await self.services_made.frame.run(lambda: verbs.reset('', seed, begin, tokens))
            return control, begun[0]
        if tokens is not None:
            self._take_prompt(engine, prompt, tokens)
        if seed is not None:
            engine.write(seed=seed)
            self.outputs.event('seed', str(seed), {'seed': seed})
        return control, control.begin_run(request.max_steps, END)

    # -- parameters -----------------------------------------------------------------------------

    def _check_best_of(self, values: Mapping[str, Any]) -> None:
        session = self._session  # read once here and below: a cleanup may run beside
        if session is not None:
            n, held = values['best_of'], sorted(session.best_of_keys)
            if n > 1 and n not in held:
                raise ParameterInvalid(
                    f'parameter best_of is {n}; captured are {held}: give one of them or 1, or '
                    "add it to best_of_keys of the policy's config")

    def _check_guidance(self, values: Mapping[str, Any]) -> None:
        session = self._session
        if session is not None and values['guidance'] != 1.0 and not any(
                port.modality is Modality.GUIDANCE for port in session.ports):
            raise ParameterInvalid(
                f'parameter guidance is {values["guidance"]:g}; the policy was bound without it: '
                'give 1, or set guidance: true in its config')

    def _check_prompt(self, values: Mapping[str, Any]) -> None:
        engine = self.engine
        if values['prompt'] and engine is not None:
            try:
                self.tokenize(values['prompt'], engine.ports.prompt_tokens)
            except ConfigError as error:
                raise ParameterInvalid(f'parameter prompt: {error}') from None

    def _in_force(self) -> Pending:
        """Return what a fresh episode begins with; raises ConfigError for the prompt."""
        assert self.engine is not None
        prompt, ports = self._prompt or self.parameters['prompt'], self.engine.ports
        return Pending(
            prompt=tuple(self.tokenize(prompt, ports.prompt_tokens)) if prompt else None,
            guidance=self.parameters['guidance'] if ports.guidance else None)

    _prompt = ''  # of the newest episode goal, until the parameter is set

    def _take_prompt(self, engine: Engine, text: str, tokens: Sequence[int]) -> None:
        engine.write(prompt=tuple(tokens))
        self._tell_prompt(text, tokens)

    def _tell_prompt(self, text: str, tokens: Sequence[int]) -> None:
        self._prompt = text
        self.outputs.event('prompt', text, {'text': text, 'tokens': list(tokens)})

    def _parameter_changed(self, name: str, old: Any, new: Any) -> None:
        engine = self.engine  # read once: a cleanup may run beside
        if name == 'prompt':
            if engine is not None:
                self._take_prompt(engine, new, self.tokenize(new, engine.ports.prompt_tokens)
                                  if new else [])
            self._prompt = ''
            return
        if engine is not None:
            engine.parameters_changed()
            if name == 'guidance' and engine.ports.guidance:
                engine.write(guidance=new)
        self.outputs.event('parameter', name, {'old': old, 'new': new})

    # -- inside ---------------------------------------------------------------------------------

    def _capsule_bytes(self, backend: Backend) -> int:
        """Budgets of the tiers that lie in the device's memory."""
        budgets = [int(self.parameters[f'capsule_{tier}_bytes']) for tier in ('gpu', 'host')]
        return sum(budgets if backend.memory().integrated else budgets[:1])

    def _snapshot_c0(self) -> None:
        assert self.store is not None and self._session is not None
        boundary = self._session.boundary
        try:
            self.store.snapshot(boundary, C0, label='fresh session', pin=True)
        except CapsuleExists:
            self.store.pin(C0, False, boundary.session)
            self.store.drop(C0, boundary.session)
            self.store.snapshot(boundary, C0, label='fresh session', pin=True)
        self.store.mark(boundary)

    def _fill_status(self, message: ExecutorStatus) -> None:
        message.state, message.phase = self.state_label, self.phase
        message.progress = self.progress
        message.policy = self.parameters['policy']
        control, engine, session = self.control, self.engine, self._session
        if control is None or engine is None or session is None:
            return
        progress = control.progress
        message.device = str(session.lane.backend.device)
        message.epoch, message.episode = progress.epoch, progress.episode
        message.tick, message.step = progress.tick, progress.step
        message.active_capsule, message.bit_exact = progress.active_capsule, progress.bit_exact
        message.holding = control.holds.holding
        message.hold_cause = ', '.join(control.holds.causes)
        message.latched = control.holds.latched
        message.poisoned = session.boundary.poisoned or ''
        message.subgoal_requested = engine.slot.requested
        message.subgoal_latched = engine.slot.latched

    def _device_lost(self, error: FlashrtError) -> None:
        self.outputs.wait_for_acknowledgement(self.parameters['shutdown_timeout_s'])
        super()._device_lost(error)

    @property
    def _simulated(self) -> bool:
        return bool(self.get_parameter('use_sim_time').value)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the executor until SIGINT, SIGTERM or a lost device; returns the exit status."""
    def make(stop: StopRequest) -> ExecutorNode:
        node = ExecutorNode(stop)
        if node.parameters['autostart']:
            node.autostart()
        return node

    return run_node(make, argv)


if __name__ == '__main__':
    sys.exit(main())
