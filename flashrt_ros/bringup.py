"""Executor and planner in one process on one device: the form without messages between them.

Both are configured before either is activated: a capture tolerates no other work on the device.
The planner's subgoals go into the executor's slot directly, its segments start only where they end
before the executor's next tick is due (admission.py), its stream is served after the executor's.
Parameters: ``/**/executor:`` and ``/**/planner:`` in one file, or ``-p executor:NAME:=VALUE``.
"""

if __name__ == '__main__':  # the imports take seconds
    from flashrt_core.starting import node_begins

    node_begins()

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from contextlib import contextmanager
from functools import partial
import sys
import threading
from typing import Any

from lifecycle_msgs.msg import Transition
from rclpy.parameter import Parameter

from flashrt_core.errors import WrongState
from flashrt_ros import executor_parameters
from flashrt_ros import planner_parameters
from flashrt_ros.config_files import parameters_in_any_namespace
from flashrt_ros.executor_node import ExecutorNode
from flashrt_ros.lifecycle import ACTIVE
from flashrt_ros.lifecycle import SafeLifecycleNode
from flashrt_ros.lifecycle import UNCONFIGURED
from flashrt_ros.main import run_nodes
from flashrt_ros.main import StopRequest
from flashrt_ros.parameters import ParameterSpec
from flashrt_ros.parameters import ParameterUnknown
from flashrt_ros.planner_node import PlannerNode


def bring_up(
    stop: StopRequest | None = None,
    *,
    executor_overrides: Sequence[Parameter] = (),
    planner_overrides: Sequence[Parameter] = (),
    **kwargs: Any,
) -> tuple[ExecutorNode, PlannerNode]:
    """Make both nodes, bound to each other; neither is configured yet.

    :param executor_overrides: parameters beside those of the command line.
    :param kwargs: of rclpy's Node, for both.
    :raises ConfigError: a parameter given at start is refused; no node is left.
    """
    with _named_for('planner', planner_parameters.SPECS):
        executor = ExecutorNode(stop, parameter_overrides=list(executor_overrides), **kwargs)
    try:
        with _named_for('executor', executor_parameters.SPECS):
            planner = PlannerNode(stop, executor=executor,
                                  parameter_overrides=list(planner_overrides), **kwargs)
    except BaseException:
        executor.stop(1.0)
        executor.destroy_node()
        raise
    for node, other in ((executor, planner), (planner, executor)):
        node.may_configure = partial(_refuse_beside, 'configure', other, ('activating', ACTIVE))
        node.may_activate = partial(_refuse_beside, 'activate', other, ('configuring',))
    return executor, planner


@contextmanager
def _named_for(other: str, specs: Iterable[ParameterSpec]) -> Iterator[None]:
    """Say of an unknown parameter how it is written for the other node, if it is one of its."""
    try:
        yield
    except ParameterUnknown as error:
        if error.name not in {spec.name for spec in specs}:
            raise
        raise ParameterUnknown(
            error.name, error.node, error.value, f'write {other}:{error.name}') from None


def autostart(executor: ExecutorNode, planner: PlannerNode) -> threading.Thread:
    """Configure both, then activate both, on a thread of its own.

    Where one of them cannot be configured none is activated: it says why, the other one waits.
    """
    thread = threading.Thread(
        target=start_together, args=(executor, planner), name='bringup', daemon=True)
    thread.start()
    return thread


def start_together(executor: ExecutorNode, planner: PlannerNode) -> bool:
    """Do what ``autostart`` does on the calling thread; False when not both are active."""
    for node in (executor, planner):
        if node.state_label == UNCONFIGURED and not node.transition(
                Transition.TRANSITION_CONFIGURE):
            if not node.ending:
                executor.get_logger().error(
                    f'{node.get_fully_qualified_name()} could not be configured, so nothing was '
                    'activated; when that is put right, ros2 lifecycle set NODE configure for '
                    'each that is unconfigured, then activate for both')
            return False
    if executor.ending or planner.ending:
        return False
    return all([node.transition(Transition.TRANSITION_ACTIVATE) for node in (executor, planner)])


def _refuse_beside(what: str, other: SafeLifecycleNode, states: tuple[str, ...]) -> None:
    """Refuse a capture while the other node works on the device, and work while it captures.

    Asked within the transition: of two at once each sees the other one.

    :raises WrongState: it is in one of ``states``.
    """
    state = other.state_label
    if state in states:
        remedy = ('wait until it has ended' if state == 'configuring'
                  else 'deactivate it first, activate it again afterwards')
        raise WrongState(f'{what} is refused while {other.get_fully_qualified_name()} is {state} '
                         f'on the same device; {remedy}')


def main(argv: Sequence[str] | None = None) -> int:
    """Run both nodes until SIGINT, SIGTERM or a lost device; returns the exit status."""
    def make(stop: StopRequest) -> tuple[ExecutorNode, PlannerNode]:
        nodes = bring_up(stop)
        if all(node.parameters['autostart'] for node in nodes):
            autostart(*nodes)
        return nodes

    arguments = parameters_in_any_namespace(
        sys.argv if argv is None else argv, 'executor', 'planner')
    return run_nodes(make, arguments, stop_timeout_s=10.0)


if __name__ == '__main__':
    sys.exit(main())
