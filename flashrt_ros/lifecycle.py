"""A lifecycle node that survives what Jazzy's rclpy does not.

Three faults of rclpy 7.1 are covered: an invalid transition request raises out of the service
and ends the node (here it answers false), an exception in a transition callback is swallowed
(here it is logged, with its traceback unless it is a named refusal, and the teardown runs), and a
transition blocks the executor for as long as it takes (here it runs on a thread: a node that loads
a model still answers).
"""

import threading
import traceback
from typing import Any

from lifecycle_msgs.msg import Transition
import lifecycle_msgs.srv
from rclpy.callback_groups import ReentrantCallbackGroup
from rclpy.impl.implementation_singleton import rclpy_implementation
from rclpy.lifecycle import LifecycleNode
from rclpy.lifecycle import LifecycleState
from rclpy.lifecycle import TransitionCallbackReturn
from rclpy.lifecycle.node import LifecycleNodeMixin
from rclpy.node import Node

from flashrt_core.errors import FlashrtError
from flashrt_ros.futures import run_in_thread

RCLError = rclpy_implementation.RCLError

UNCONFIGURED = 'unconfigured'
INACTIVE = 'inactive'
ACTIVE = 'active'
FINALIZED = 'finalized'


class SafeLifecycleNode(LifecycleNode):
    """Lifecycle node whose work lies in ``configure``, ``activate``, ``deactivate``, ``teardown``.

    Subclasses override those four; each raises to refuse. ``teardown`` must be callable at any
    time and twice: it is the cleanup and it runs at shutdown and after any error. All four run on
    a transition thread, one transition at a time.
    """

    def __init__(self, name: str, **kwargs: Any) -> None:
        self._transition_lock = threading.Lock()
        self.ending = False  # set by who ends the node: nothing is begun any more
        self.last_transition_error = ''
        Node.__init__(self, name, **kwargs)
        # Reentrant: a pending transition must not keep ~/get_state from answering.
        LifecycleNodeMixin.__init__(self, callback_group=ReentrantCallbackGroup())

    def configure(self) -> None:
        """Load and prepare everything; raise to stay unconfigured."""

    def activate(self) -> None:
        """Start acting; raise to fail."""

    def deactivate(self) -> None:
        """Stop acting; raise to fail."""

    def teardown(self) -> None:
        """Free everything that ``configure`` made; callable at any time and twice."""

    def on_state_change(self) -> None:
        """Told after every transition, on the thread that made it."""

    @property
    def state_label(self) -> str:
        """Label of the lifecycle state now, e.g. ``inactive``; any thread."""
        return str(self._state_machine.current_state[1])

    def transition(self, transition_id: int) -> bool:
        """Make one transition on the calling thread; False when refused or failed, no exception.

        :param transition_id: a constant of lifecycle_msgs/Transition
        """
        if not self._transition_lock.acquire(blocking=False):
            self.get_logger().warning(
                f'transition {transition_id} refused: another one is running '
                f'({self.state_label}); ask again when it has ended')
            return False
        try:
            return self._transition_locked(transition_id)
        finally:
            self._transition_lock.release()

    def autostart(self, activate: bool = True) -> threading.Thread:
        """Configure, then activate, on a thread of its own; a failure leaves the node alive."""

        def body() -> None:
            configured = self.transition(Transition.TRANSITION_CONFIGURE)
            if configured and activate and not self.ending:
                self.transition(Transition.TRANSITION_ACTIVATE)

        thread = threading.Thread(target=body, name='autostart', daemon=True)
        thread.start()
        return thread

    def finish(self, timeout_s: float) -> bool:
        """Deactivate if active, then shut down; ``timeout_s`` is for a transition under way."""
        if not self._transition_lock.acquire(timeout=timeout_s):
            return False
        try:
            if self.state_label == ACTIVE:
                self._transition_locked(Transition.TRANSITION_DEACTIVATE)
            shutdown = {
                UNCONFIGURED: Transition.TRANSITION_UNCONFIGURED_SHUTDOWN,
                INACTIVE: Transition.TRANSITION_INACTIVE_SHUTDOWN,
                ACTIVE: Transition.TRANSITION_ACTIVE_SHUTDOWN,
            }.get(self.state_label)
            return shutdown is None or self._transition_locked(shutdown)
        finally:
            self._transition_lock.release()

    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Run ``configure``."""
        return self._guarded('configure', self.configure)

    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Run ``activate``."""
        return self._guarded('activate', self.activate)

    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Run ``deactivate``."""
        return self._guarded('deactivate', self.deactivate)

    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Run ``teardown``."""
        return self._guarded('cleanup', self.teardown)

    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Run ``teardown``."""
        return self._guarded('shutdown', self.teardown)

    def on_error(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Run ``teardown`` and go back to unconfigured, so that configure can be tried again."""
        return self._guarded('error processing', self.teardown)

    def _guarded(self, what: str, function: Any) -> TransitionCallbackReturn:
        try:
            function()
        except Exception as error:
            # A named refusal says what to correct; where it was raised would only hide that.
            code, trace = type(error).__name__, f'\n{traceback.format_exc()}'
            if isinstance(error, FlashrtError):
                code, trace = error.code, ''
            self.last_transition_error = f'{what} failed [{code}]: {error}'
            if self.ending and not trace:
                self.get_logger().info(str(error))
            else:
                self.get_logger().error(
                    f'{self.last_transition_error}{trace}\n{self._how_to_go_on(what)}')
            return TransitionCallbackReturn.ERROR
        if what != 'error processing':
            self.last_transition_error = ''
        return TransitionCallbackReturn.SUCCESS

    def _how_to_go_on(self, what: str) -> str:
        name = self.get_fully_qualified_name()
        if what in ('shutdown', 'error processing'):
            return 'start the node anew'
        return (f'unconfigured now; put right what it names. A parameter that is not read-only: '
                f'ros2 param set {name} NAME VALUE. Then ros2 lifecycle set {name} configure, and '
                'activate. A read-only parameter: start the node anew with another value')

    def _transition_locked(self, transition_id: int) -> bool:
        try:
            result = self._LifecycleNodeMixin__change_state(transition_id)
        except RCLError as error:
            reason = str(error).split(', at ')[0]
            self.get_logger().warning(
                f'transition {transition_id} refused in state {self.state_label}: {reason}')
            return False
        self.on_state_change()
        return result == TransitionCallbackReturn.SUCCESS

    async def _LifecycleNodeMixin__on_change_state(
        self,
        request: lifecycle_msgs.srv.ChangeState.Request,
        response: lifecycle_msgs.srv.ChangeState.Response,
    ) -> lifecycle_msgs.srv.ChangeState.Response:
        # Overrides rclpy's private callback by its mangled name: the only seam Jazzy offers.
        transition_id = request.transition.id
        if request.transition.label:
            try:
                transition_id = self._state_machine.get_transition_by_label(
                    request.transition.label)
            except RCLError:
                self.get_logger().warning(
                    f'transition {request.transition.label!r} refused in state {self.state_label}')
                response.success = False
                return response
        response.success = await run_in_thread(
            self, lambda: self.transition(transition_id), 'transition')
        return response
