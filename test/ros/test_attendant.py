"""A thread of its own for some entities of a node: taken at once, replied to from any thread."""

from collections.abc import Iterator
import threading
from typing import Any

from _ros_fixtures import Graph
from _ros_fixtures import ros_graph
from _ros_fixtures import wait_until
import pytest
from rclpy.node import Node
from std_msgs.msg import Int32
from std_srvs.srv import SetBool

from flashrt_ros import qos
from flashrt_ros.attendant import Attendant
from flashrt_ros.attendant import Reply

pytestmark = pytest.mark.ros


@pytest.fixture
def graph() -> Iterator[Graph]:
    with ros_graph() as made:
        yield made


class Attended:
    """A node nobody spins, one topic and one service attended to."""

    def __init__(self, graph: Graph) -> None:
        self.node = Node('attended', context=graph.context)
        self.messages: list[int] = []
        self.requests: list[tuple[Any, Reply]] = []
        self.attendant = Attendant(self.node, 'attendant')
        self.subscription = self.node.create_subscription(
            Int32, 'numbers', lambda _: None, qos.command())
        self.attendant.listen(self.subscription, self._take)
        service = self.node.create_service(SetBool, 'set', lambda *_: None)
        self.attendant.serve(service, lambda *taken: self.requests.append(taken))
        self.attendant.start()

    def _take(self, message: Int32) -> None:
        self.messages.append(message.data)
        if message.data < 0:
            raise ValueError('a callback failed')

    def close(self) -> None:
        self.attendant.close()
        self.node.destroy_node()


def publish(graph: Graph) -> Any:
    publisher = graph.node('talker').create_publisher(Int32, 'numbers', qos.command())
    wait_until(lambda: publisher.get_subscription_count() > 0, 'the subscription')
    return publisher


def test_messages_are_taken_without_the_nodes_executor_and_a_failing_callback_ends_nothing(
        graph: Graph) -> None:
    attended = Attended(graph)
    publisher = publish(graph)
    for number in (1, -1, 2):
        publisher.publish(Int32(data=number))
        wait_until(lambda n=number: attended.messages[-1:] == [n], f'message {number}')
    attended.close()


def test_the_nodes_executor_takes_nothing_that_is_attended_to(graph: Graph) -> None:
    attended = Attended(graph)
    graph.spin(attended.node)
    publisher = publish(graph)
    for number in range(20):
        publisher.publish(Int32(data=number))
        wait_until(lambda n=number: attended.messages[-1:] == [n], f'message {number}')
    assert attended.messages == list(range(20))
    attended.attendant.close()


def test_a_second_request_is_taken_while_the_first_waits_for_its_reply(graph: Graph) -> None:
    attended = Attended(graph)
    caller = graph.node('caller')
    client = caller.create_client(SetBool, 'set')
    wait_until(client.service_is_ready, 'the service')
    first = client.call_async(SetBool.Request(data=True))
    wait_until(lambda: len(attended.requests) == 1, 'the first request')
    second = client.call_async(SetBool.Request(data=False))
    wait_until(lambda: len(attended.requests) == 2, 'the second request')
    for request, reply in reversed(attended.requests):
        threading.Thread(
            target=reply, args=(SetBool.Response(message=str(request.data)),)).start()
    wait_until(lambda: first.done() and second.done(), 'both replies')
    assert (first.result().message, second.result().message) == ('True', 'False')
    attended.close()


def test_it_ends_by_close_twice_by_a_destroyed_node_and_with_its_context(graph: Graph) -> None:
    attended = Attended(graph)
    attended.attendant.close()
    attended.close()
    assert not attended.attendant._thread.is_alive()
    orphan = Attended(graph)
    orphan.node.destroy_node()
    wait_until(lambda: not orphan.attendant._thread.is_alive(), 'the thread of a destroyed node')
    reply = Attended(graph)
    graph.context.try_shutdown()
    wait_until(lambda: not reply.attendant._thread.is_alive(), 'the thread of a context shut down')
