"""A thread that attends to some subscriptions and services of a node by itself.

rclpy's executor builds a wait set of everything in its node around each callback: half a
millisecond of Python for a node of fifty entities, in which no other thread gets on. What must be
quick or must not wait for others is taken out of it and attended to here, with a small wait set.
"""

from collections.abc import Callable
from contextlib import ExitStack
import threading
import traceback
from typing import Any

from rclpy.callback_groups import CallbackGroup
from rclpy.exceptions import InvalidHandle
from rclpy.guard_condition import GuardCondition
from rclpy.impl.implementation_singleton import rclpy_implementation as _rclpy
from rclpy.node import Node
from rclpy.service import Service
from rclpy.subscription import Subscription

Reply = Callable[[Any], None]
_LOOK_NS = 100_000_000  # bounds how long a context that was shut down goes unseen


class _Apart(CallbackGroup):
    """Keeps the node's own executor from waiting for the entities in it."""

    def can_execute(self, entity: Any) -> bool:
        return False

    def beginning_execution(self, entity: Any) -> bool:
        return False

    def ending_execution(self, entity: Any) -> None:
        return None


class Attendant:
    """Make entities in ``group``, add them, ``start``; ``close`` before they are destroyed.

    A subscription's events are attended to as well: with Fast DDS they share one condition with
    its messages, so an executor that waited for the events only would spin while one lies there.
    """

    def __init__(self, node: Node, name: str, rest_s: float = 0.0) -> None:
        """Start with nothing to attend to.

        :param name: of the thread.
        :param rest_s: after each pass that took something, so that a flood costs a bounded share
            of the process; what a subscription of depth 1 keeps meanwhile is the newest.
        """
        self._node = node
        self.group: CallbackGroup = _Apart()  # the executor waits for nothing that is in it
        self._subscriptions: list[tuple[Subscription, Callable[[Any], None]]] = []
        self._services: list[tuple[Service, Callable[[Any, Reply], None]]] = []
        self._closing = False
        self._rest_s, self._ended = rest_s, threading.Event()
        self._guard = GuardCondition(None, None, context=node.context)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def listen(self, subscription: Subscription, callback: Callable[[Any], None]) -> None:
        """Take over a subscription made in ``group``."""
        self._subscriptions.append((subscription, callback))

    def serve(self, service: Service, callback: Callable[[Any, Reply], None]) -> None:
        """Take over a service made in ``group``.

        :param callback: called with a request and a function that sends its response, once, on
            any thread and at any later time.
        """
        self._services.append((service, callback))

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread; callable twice and from its own callbacks."""
        self._closing = True
        self._ended.set()
        try:
            self._guard.trigger()
        except InvalidHandle:
            return
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(5.0)
        self._guard.destroy()

    def _run(self) -> None:
        try:
            while not self._closing and self._node.context.ok():
                self._wait_once()
        except InvalidHandle:
            return  # the node was destroyed
        except Exception:
            if self._node.context.ok():
                raise

    def _wait_once(self) -> None:
        context = self._node.context.handle
        subscriptions = [subscription.handle for subscription, _ in self._subscriptions]
        services = [service.handle for service, _ in self._services]
        events = [event for subscription, _ in self._subscriptions
                  for event in subscription.event_handlers]
        with ExitStack() as held:
            # Held, so that none of them is destroyed under the wait.
            for handle in (context, self._guard.handle, *subscriptions, *services, *events):
                held.enter_context(handle)
            wait_set = _rclpy.WaitSet(
                len(subscriptions), 1, 0, 0, len(services), len(events), context)
            wait_set.clear_entities()
            wait_set.add_guard_condition(self._guard.handle)
            for handle in subscriptions:
                wait_set.add_subscription(handle)
            for handle in services:
                wait_set.add_service(handle)
            for event in events:
                event.add_to_wait_set(wait_set)
            wait_set.wait(_LOOK_NS)
            if self._closing:
                return
            messages = wait_set.get_ready_entities('subscription')
            requests = wait_set.get_ready_entities('service')
            for subscription, callback in self._subscriptions:
                if subscription.handle.pointer in messages:
                    taken = subscription.handle.take_message(
                        subscription.msg_type, subscription.raw)
                    if taken is not None:
                        self._call(callback, taken[0])
            for service, handler in self._services:
                if service.handle.pointer in requests:
                    request, header = service.handle.service_take_request(
                        service.srv_type.Request)
                    if header is not None:
                        self._call(handler, request, _Replier(service, header))

            for event in events:
                if event.is_ready(wait_set):
                    happened = event.take_data()
                    if happened is not None:
                        self._call(event.callback, happened)
        if self._rest_s and (messages or requests):
            self._ended.wait(self._rest_s)

    def _call(self, callback: Callable[..., None], *arguments: Any) -> None:
        try:
            callback(*arguments)
        except Exception:
            self._node.get_logger().error(traceback.format_exc())


class _Replier:
    """Sends the response of one request; a client or node that is gone is no error."""

    def __init__(self, service: Service, header: Any) -> None:
        self._service, self._header = service, header

    def __call__(self, response: Any) -> None:
        try:
            self._service.send_response(response, self._header)
        except InvalidHandle:
            return
