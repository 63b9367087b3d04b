"""Plans from outside: goals of the ~/plan action, which wait for a result, and ~/instruction."""

from collections.abc import Callable
from concurrent.futures import Future as Ended
from typing import Any

from rclpy.action import ActionServer
from rclpy.action import CancelResponse
from rclpy.action import GoalResponse
from rclpy.action.server import ServerGoalHandle
from rclpy.callback_groups import ReentrantCallbackGroup
from rclpy.impl.implementation_singleton import rclpy_implementation
from rclpy.qos import QoSProfile
from rclpy.task import Future

from flashrt_core.errors import FlashrtError
from flashrt_core.errors import ParameterInvalid
from flashrt_core.errors import WrongState
from flashrt_ros.action import Plan as PlanAction
from flashrt_ros.futures import run_in_thread
from flashrt_ros.futures import wake
from flashrt_ros.lifecycle import ACTIVE
from flashrt_ros.msg import Subgoal
from flashrt_ros.planner_plan import End
from flashrt_ros.planner_plan import Plan
from flashrt_ros.planner_plan import PlanRequest
from flashrt_ros.planner_plan import Told

RCLError = rclpy_implementation.RCLError
FEEDBACK_DEPTH = 256  # tokens that a slow client may lag behind; one that asks for 10 loses some


class PlanServer:
    """Serves goals on the node's executor; the plans themselves run on threads of the engine."""

    def __init__(self, node: Any) -> None:
        """Create the action server.

        :param node: the planner node: ``engine``, ``frame``, ``count_refusal``, ``now_text``,
            ``outputs``.
        """
        self._node = node
        self._plans: dict[bytes, Plan] = {}  # by goal
        self._server = ActionServer(
            node, PlanAction, '~/plan', self._execute, callback_group=ReentrantCallbackGroup(),
            feedback_pub_qos_profile=QoSProfile(depth=FEEDBACK_DEPTH),
            goal_callback=lambda request: GoalResponse.ACCEPT, cancel_callback=self._cancel)

    def _cancel(self, goal: ServerGoalHandle) -> CancelResponse:
        plan = self._plans.get(bytes(goal.goal_id.uuid))
        if plan is not None:
            plan.stop('cancelled', 'the client has cancelled the goal')
        return CancelResponse.ACCEPT

    async def _execute(self, goal: ServerGoalHandle) -> PlanAction.Result:
        key = bytes(goal.goal_id.uuid)
        try:
            self._node.frame.require((ACTIVE,), '~/plan')
            request = read_goal(goal.request)

            def begin() -> Plan:
                begun = self._plans[key] = self._begin(
                    request, lambda told: self._tell(goal, told), goal.request.preempt)
                # Cancelled while it waited for its turn: not only once this thread is heard.
                if goal.is_cancel_requested:
                    self._cancel(goal)
                return begun

            plan: Plan = await run_in_thread(self._node, begin, 'plan')
            if goal.is_cancel_requested:
                self._cancel(goal)
            await self._end_of(plan)
        except FlashrtError as error:
            self._node.count_refusal(error)
            goal.abort()
            return PlanAction.Result(code=error.code, message=f'{error}; {self._node.now_text()}')
        finally:
            self._plans.pop(key, None)
        return self._finish(goal, plan)

    async def instruct(self, text: str) -> None:
        """Begin a plan that nobody waits for, in the place of the one that runs.

        What comes of it is told by ~/status and ~/events, and so is a refusal.
        """
        def begin() -> Plan:
            self._node.frame.require((ACTIVE,), '~/instruction')
            return self._begin(PlanRequest(text), self._tell_status, preempt=True)

        try:
            await run_in_thread(self._node, begin, 'instruction')
        except FlashrtError as error:
            self._node.count_refusal(error)
            self._node.outputs.event('refused', 'instruction', {
                'code': error.code, 'message': f'{error}; {self._node.now_text()}'})

    def _begin(self, request: PlanRequest, tell: Callable[[Told], None], preempt: bool) -> Plan:
        engine = self._node.engine
        if engine is None:
            raise WrongState('a plan is refused: the planner is not configured; configure and '
                             'activate it first')
        plan: Plan = engine.start(request, tell, preempt)

        def ended(future: Ended[End]) -> None:
            end = future.result()
            self._node.outputs.event('plan', end.code, {
                'plan': plan.number, 'instruction': request.instruction, 'message': end.message,
                'subgoals': [item.text for item in plan.items], 'replans': plan.replans})

        plan.ended.add_done_callback(ended)
        return plan

    def _end_of(self, plan: Plan) -> Future:
        """Return what to await: the plan's end, or that it is decoded where nobody waits."""
        future = Future()

        def settle(_: object) -> None:
            if not future.done():
                future.set_result(None)
                wake(self._node)

        plan.ended.add_done_callback(settle)
        if not plan.request.wait:
            plan.decoded.add_done_callback(settle)
        return future

    def _finish(self, goal: ServerGoalHandle, plan: Plan) -> PlanAction.Result:
        end, times, items = plan.end_now(), plan.times, plan.items
        result = PlanAction.Result(
            success=end.code == 'ok', code=end.code,
            message=f'{end.message}; {self._node.now_text()}',
            subgoals=[item.text for item in items], sequences=[item.sequence for item in items],
            outcomes=[item.outcome for item in items], replans=plan.replans, **vars(times))
        if result.success:
            goal.succeed()
        elif goal.is_cancel_requested:
            goal.canceled()
        else:
            goal.abort()
        return result

    def _tell(self, goal: ServerGoalHandle, told: Told) -> None:
        engine = self._node.engine
        plan = None if engine is None else engine.plan
        self._tell_status(told)
        if told.phase == 'ready' or not goal.is_active:
            return
        item = told.item
        try:
            goal.publish_feedback(PlanAction.Feedback(
                plan=0 if plan is None else plan.number, phase=told.phase,
                tokens=0 if plan is None else plan.times.tokens, text=told.text,
                subgoal=item.text, sequence=item.sequence, outcome=item.outcome))
        except RCLError:
            pass  # the goal ended meanwhile

    def _tell_status(self, told: Told) -> None:
        if not told.text:
            self._node.outputs.publish_status()


def read_goal(goal: PlanAction.Goal) -> PlanRequest:
    """Check what does not depend on the planner.

    :raises ParameterInvalid: a priority or deadline out of range.
    """
    if goal.priority not in (Subgoal.PRIORITY_NORMAL, Subgoal.PRIORITY_INTERRUPT):
        raise ParameterInvalid(f'priority is {goal.priority}; give {Subgoal.PRIORITY_NORMAL} '
                               f'(normal) or {Subgoal.PRIORITY_INTERRUPT} (interrupt)')
    if not 0.0 <= goal.deadline_s < 86400.0:
        raise ParameterInvalid(
            f'deadline_s is {goal.deadline_s}; give 0 (the parameter) to 86400')
    return PlanRequest(goal.instruction, goal.scene, goal.dry_run, goal.wait, goal.priority,
                       goal.deadline_s)
