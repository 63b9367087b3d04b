"""A client of one planner: instructions go out, plans are followed, outcomes are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rclpy.action import ActionClient
from rclpy.node import Node
from rclpy.qos import QoSProfile

from flashrt_ros import qos
from flashrt_ros.action import Plan
from flashrt_ros.msg import CapsuleInfo
from flashrt_ros.msg import PlannerStatus
from flashrt_ros.msg import SubgoalOutcome
from flashrt_ros.planner_action import FEEDBACK_DEPTH
from flashrt_ros.srv import ListCapsules

Wait = Callable[[Callable[[], Any], float, str], Any]  # condition, seconds, what is waited for


class PlanCall:
    """One goal of ``~/plan``: what was fed back so far, and its result once there is one."""

    def __init__(self, instruction: str) -> None:
        self.instruction = instruction
        self.feedback: list[Plan.Feedback] = []
        self.result: Plan.Result | None = None
        self.handle: Any = None

    @property
    def text(self) -> str:
        """What was decoded so far."""
        return ''.join(f.text for f in list(self.feedback) if f.phase == 'decode')

    @property
    def subgoals(self) -> dict[int, str]:
        """Texts of the subgoals that were written, by sequence."""
        return {int(f.sequence): f.subgoal for f in list(self.feedback) if f.sequence}

    @property
    def newest(self) -> int:
        """Highest sequence that was written; 0 before the first."""
        return max(self.subgoals, default=0)

    def settled(self, after: int) -> bool:
        """Whether it has ended, or waits for the outcome of a subgoal above ``after``."""
        if self.result is not None:
            return True
        phase = self.feedback[-1].phase if self.feedback else ''
        return phase == 'execute' and self.newest > after


class PlannerClient:
    """Speaks to the planner from a node that somebody else spins; ``wait`` is that one's.

    Methods block and belong to one thread.
    """

    def __init__(self, node: Node, name: str, wait: Wait, changed: Callable[[], None]) -> None:
        """Create the entities.

        :param name: of the planner, relative to the node's namespace or full.
        :param changed: called after each message, for those who wait.
        """
        self._node, self._wait, self._changed = node, wait, changed
        self._client = ActionClient(
            node, Plan, f'{name}/plan', feedback_sub_qos_profile=QoSProfile(depth=FEEDBACK_DEPTH))
        self._list = node.create_client(ListCapsules, f'{name}/list_capsules')
        self._outcomes = node.create_publisher(SubgoalOutcome, 'subgoal_outcome', qos.record())
        self.status: PlannerStatus | None = None
        node.create_subscription(PlannerStatus, f'{name}/status', self._on_status, qos.status())

    def close(self) -> None:
        """Destroy what the node does not: an action client keeps it on the domain."""
        self._client.destroy()

    @property
    def ready(self) -> bool:
        """Whether its action, its services and its ear for outcomes are discovered."""
        return bool(self._client.server_is_ready() and self._list.service_is_ready()
                    and self._outcomes.get_subscription_count() > 0)

    def plan(self, instruction: str, *, scene: str = '', priority: int = 0,
             preempt: bool = False, deadline_s: float = 0.0) -> PlanCall:
        """Send an instruction; the result comes when its last subgoal is done, or says why not."""
        call = PlanCall(instruction)

        def hear(message: Any) -> None:
            call.feedback.append(message.feedback)
            self._changed()

        goal = Plan.Goal(instruction=instruction, scene=scene, wait=True, priority=priority,
                         preempt=preempt, deadline_s=deadline_s)
        call.handle = self._answer(
            self._sent(lambda: self._client.send_goal_async(goal, feedback_callback=hear)),
            'the planner to take a goal')

        def end(future: Any) -> None:
            call.result = future.result().result
            self._changed()

        self._sent(call.handle.get_result_async).add_done_callback(end)
        return call

    def settle(self, call: PlanCall, after: int = 0, timeout_s: float = 60.0) -> int:
        """Wait until the plan needs nothing but time; return the newest sequence written."""
        self._wait(lambda: call.settled(after), timeout_s,
                   f'the plan for {call.instruction!r:.80} to go on or end')
        return call.newest

    def cancel(self, call: PlanCall) -> None:
        """End a plan that has not ended yet, and wait for its result."""
        if call.result is None:
            self._sent(call.handle.cancel_goal_async)
        self.wait_for_end(call)

    def wait_for_end(self, call: PlanCall, timeout_s: float = 20.0) -> None:
        """Wait for the result of a plan that something else ends."""
        self._wait(lambda: call.result is not None, timeout_s,
                   f'the plan for {call.instruction!r:.80} to end')

    def tell(self, sequence: int, outcome: int, message: str) -> None:
        """Publish what became of a subgoal; ``outcome`` as in SubgoalOutcome."""
        self._outcomes.publish(SubgoalOutcome(
            sequence=sequence, outcome=outcome, message=message))

    def capsules(self) -> list[CapsuleInfo]:
        """Return what the planner holds."""
        asked = self._list.call_async(ListCapsules.Request())
        return list(self._answer(asked, "the planner's capsules").capsules)

    def _sent(self, send: Callable[[], Any]) -> Any:
        """Send on the thread that spins: rclpy loses a reply that is there before it waits."""
        assert self._node.executor is not None
        return self._answer(self._node.executor.create_task(send), 'the spinning thread')

    def _answer(self, future: Any, what: str) -> Any:
        future.add_done_callback(lambda _: self._changed())
        self._wait(future.done, 20.0, what)
        return future.result()

    def _on_status(self, message: PlannerStatus) -> None:
        self.status = message
        self._changed()
