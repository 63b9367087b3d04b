"""Helpers of the in-process ROS tests: an own domain, spinning nodes, deadlines."""

from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
import os
import threading
import time
from typing import Any
from typing import TypeVar

import rclpy
from rclpy.context import Context
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.signals import SignalHandlerOptions

from flashrt_ros.ros_environment import DomainLease

T = TypeVar('T')
DISCOVERY_S = 20.0


def wait_until(condition: Callable[[], T], what: str, timeout_s: float = DISCOVERY_S) -> T:
    """Poll until ``condition`` is truthy; fail naming ``what`` after the deadline."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f'waited {timeout_s:g} s in vain for {what}')
        pause.wait(0.002)


class Graph:
    """One rclpy context on its own domain; each added node is spun by a thread of its own."""

    def __init__(self, domain_id: int) -> None:
        self.domain_id = domain_id
        self.context = Context()
        rclpy.init(context=self.context, domain_id=domain_id,
                   signal_handler_options=SignalHandlerOptions.NO)
        self._running: list[tuple[SingleThreadedExecutor, threading.Thread, Node]] = []
        self.failures: list[BaseException] = []

    def spin(self, node: Node) -> Node:
        """Spin ``node`` on a thread until the graph closes."""
        executor = SingleThreadedExecutor(context=self.context)
        executor.add_node(node)

        def body() -> None:
            try:
                executor.spin()
            except rclpy.executors.ExternalShutdownException:
                pass
            except BaseException as error:
                self.failures.append(error)
                raise

        thread = threading.Thread(target=body, name=f'spin {node.get_name()}', daemon=True)
        thread.start()
        self._running.append((executor, thread, node))
        return node

    def node(self, name: str, **kwargs: Any) -> Node:
        """Return a plain node, spun."""
        return self.spin(Node(name, context=self.context, **kwargs))

    def client(self, node: Node, srv_type: Any, name: str) -> Callable[..., Any]:
        """Return ``call(timeout_s=20, **fields)`` of a service, once it is discovered."""
        client = node.create_client(srv_type, name)
        wait_until(client.service_is_ready, f'service {name}')

        def call(timeout_s: float = DISCOVERY_S, **fields: Any) -> Any:
            done = threading.Event()
            future = client.call_async(srv_type.Request(**fields))
            future.add_done_callback(lambda _: done.set())
            assert done.wait(timeout_s), f'no reply of {name} within {timeout_s:g} s'
            return future.result()

        return call

    def close(self) -> None:
        """End all spinning and shut the context down."""
        for executor, thread, _ in self._running:
            executor.shutdown(timeout_sec=0)
            thread.join(5)
        for _, _, node in self._running:
            node.destroy_node()
        rclpy.try_shutdown(context=self.context)


@contextmanager
def ros_graph() -> Iterator[Graph]:
    """A graph on a domain that nobody else on this machine uses."""
    os.environ['ROS_AUTOMATIC_DISCOVERY_RANGE'] = 'LOCALHOST'
    lease = DomainLease()
    graph = Graph(lease.id)
    try:
        yield graph
    finally:
        graph.close()
        lease.close()
