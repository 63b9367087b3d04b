"""A planner with the fake model, alone or bound to the executor's rig, over real DDS."""

from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
import threading
from typing import Any
from unittest import mock

from _executor_rig import patient
from _executor_rig import Rig
from _fake_planner import FakePlanner
from _fake_policy import FakePolicy
from _ros_fixtures import Graph
from _ros_fixtures import ros_graph
from _ros_fixtures import wait_until
from rclpy.action import ActionClient
from rclpy.parameter import Parameter
from rclpy.qos import QoSProfile

from flashrt_ros import planner_action
from flashrt_ros import planner_node
from flashrt_ros import qos
from flashrt_ros import srv
from flashrt_ros.action import Plan
from flashrt_ros.main import StopRequest
from flashrt_ros.msg import Event
from flashrt_ros.msg import PlannerStatus
from flashrt_ros.msg import SubgoalOutcome
from flashrt_ros.planner_node import PlannerNode

TWO = 'put the red block in the blue zone, then go home'
EVERY_TOKEN = 5000  # feedback messages: a test that reads a plan must not miss one under load
FIRST, SECOND = 'put the red block in the blue zone', 'go home'


class Goal:
    """One goal sent to the planner."""

    def __init__(self, rig: 'PlannerRig', **fields: Any) -> None:
        self._rig = rig
        self.handle = _wait(self._sent(lambda: rig.client.send_goal_async(Plan.Goal(**fields))))
        self._result = self._sent(self.handle.get_result_async)

    @property
    def feedback(self) -> list[Plan.Feedback]:
        """Return all that was fed back so far.

        From the topic: rclpy tells no more once it has the result, whatever is still queued then.
        """
        ours = bytes(self.handle.goal_id.uuid)
        return [m.feedback for m in list(self._rig.fed_back) if bytes(m.goal_id.uuid) == ours]

    def _sent(self, send: Callable[[], Any]) -> Any:
        # On the spinning thread: rclpy loses a reply that comes before its request was noted.
        return _wait(self._rig.probe.executor.create_task(send))

    def result(self) -> Plan.Result:
        reply = _wait(self._result)
        self.status = reply.status
        return reply.result

    def cancel(self) -> None:
        _wait(self._sent(self.handle.cancel_goal_async))

    def until(self, phase: str) -> 'Goal':
        wait_until(lambda: any(f.phase == phase for f in self.feedback), f'phase {phase}')
        return self


def _wait(future: Any) -> Any:
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    assert done.wait(20)
    return future.result()


class PlannerRig:
    """A planner and a node that listens and calls."""

    def __init__(self, graph: Graph, model: FakePlanner | None, *, bind_to: Any = None,
                 namespace: str = '', wait: bool = True, **parameters: Any) -> None:
        given = {'planner': 'fake', 'device': 'cpu', 'capsule_gpu_bytes': 1 << 24,
                 'capsule_host_bytes': 1 << 24, **parameters}
        self.graph, self.model, self.stop_request = graph, model, StopRequest()
        make = planner_node.make_planner if model is None else lambda name: model
        if model is None:
            given.pop('planner')
        with mock.patch.object(planner_node, 'make_planner', make), \
                mock.patch.object(planner_action, 'FEEDBACK_DEPTH', EVERY_TOKEN):
            self.node: PlannerNode = graph.spin(PlannerNode(
                self.stop_request, executor=bind_to, context=graph.context, namespace=namespace,
                parameter_overrides=[Parameter(k, value=v) for k, v in given.items()]))
            self.started = self.node.autostart()
            if wait:
                self.started.join(30)
        self.prefix = f'/{namespace}/planner' if namespace else '/planner'
        self.probe = graph.node('planner_probe', namespace=namespace)
        self.events: list[Event] = []
        self.statuses: list[PlannerStatus] = []
        self.probe.create_subscription(
            Event, f'{self.prefix}/events', self.events.append, qos.record())
        self.probe.create_subscription(
            PlannerStatus, f'{self.prefix}/status', self.statuses.append, qos.status())
        self._outcomes = self.probe.create_publisher(
            SubgoalOutcome, 'subgoal_outcome', qos.record())
        self.client = ActionClient(self.probe, Plan, f'{self.prefix}/plan')
        self.fed_back: list[Any] = []
        heard = self.probe.create_subscription(
            Plan.Impl.FeedbackMessage, f'{self.prefix}/plan/_action/feedback',
            self.fed_back.append, QoSProfile(depth=EVERY_TOKEN))
        wait_until(self.client.server_is_ready, 'the action')
        wait_until(lambda: heard.get_publisher_count() > 0, 'its feedback')
        wait_until(lambda: self._outcomes.get_subscription_count() > 0, 'the planner to listen')
        self._clients: dict[str, Any] = {}

    @property
    def session(self) -> Any:
        return self.node.engine.session

    def goal(self, instruction: str = TWO, **fields: Any) -> Goal:
        return Goal(self, instruction=instruction, **fields)

    def outcome(self, sequence: int, outcome: int = SubgoalOutcome.DONE, **fields: Any) -> None:
        self._outcomes.publish(SubgoalOutcome(sequence=sequence, outcome=outcome, **fields))

    def call(self, name: str, **fields: Any) -> Any:
        if name not in self._clients:
            srv_type = getattr(srv, ''.join(part.title() for part in name.split('_')))
            self._clients[name] = self.graph.client(self.probe, srv_type, f'{self.prefix}/{name}')
        return self._clients[name](**fields)

    def counter(self, name: str) -> int:
        return self.node.report.counters[name]

    def close(self) -> None:
        if self.model is None:
            self.node.stop(10.0)
            return
        switches = self.model.switches
        switches.step_s = switches.chunk_s = 0.0
        if switches.gate is not None:
            switches.gate.set()
        self.node.stop(10.0)


@contextmanager
def planner_rig(folder: Path, model: FakePlanner | None = None, *, link: str = 'bound',
                real: bool = False, policy: FakePolicy | None = None,
                executor_parameters: Any = None, **parameters: Any
                ) -> Iterator[tuple[PlannerRig, Rig]]:
    """A planner bound to an executor (or over ROS to it), both active; the robot holds still.

    :param link: bound, or how subgoals go over ROS: topic, service.
    :param real: an untrained model of the real architecture instead of the fake.
    """
    with ros_graph() as graph, patient():
        robot = Rig(graph, folder, policy or FakePolicy(), **(executor_parameters or {}))
        made = None
        try:
            way = {'bind_to': robot.executor} if link == 'bound' else {'link': link}
            made = PlannerRig(
                graph, None if real else model or FakePlanner(), **way, **parameters)
            yield made, robot
        finally:
            if made is not None:
                made.close()
            robot.close()
        assert not graph.failures
