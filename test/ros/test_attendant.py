"""A thread of its own for some entities of a node: taken at once, replied to from any thread."""

from collections.abc import Callable
from collections.abc import Iterator
import threading
import time
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
        self.sentences: list[str] = []
        self.requests: list[tuple[Any, Reply]] = []
        self.attendant = Attendant(self.node, 'attendant')
        self.subscription = self.node.create_subscription(
            Int32, 'numbers', lambda _: None, qos.command(), callback_group=self.attendant.group,
            event_callbacks=qos.subscription_events('numbers', self._told))
        self.attendant.listen(self.subscription, self._take)
        service = self.node.create_service(
            SetBool, 'set', lambda *_: None, callback_group=self.attendant.group)
        self.attendant.serve(service, lambda *taken: self.requests.append(taken))
        self.attendant.start()

    def _take(self, message: Int32) -> None:
        self.messages.append(message.data)
        if message.data < 0:
            raise ValueError('a callback failed')

    def _told(self, topic: str, sentence: str) -> None:
        self.sentences.append(sentence)

    def close(self) -> None:
        self.attendant.close()
        self.node.destroy_node()


def wait_until_settled(value: Callable[[], int]) -> None:
    """Wait until a count stays as it is for a quarter of a second."""
    seen, since = value(), time.monotonic()

    def settled() -> bool:
        nonlocal seen, since
        if value() != seen:
            seen, since = value(), time.monotonic()
        return time.monotonic() - since > 0.25

    wait_until(settled, 'the executor to rest')


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


def test_the_nodes_executor_rests_while_messages_lie_there(graph: Graph) -> None:
    attended = Attended(graph)
    passes = 0
    can_execute = attended.attendant.group.can_execute

    def counted(entity: Any) -> bool:
        nonlocal passes
        passes += entity is attended.subscription
        return can_execute(entity)

    attended.attendant.group.can_execute = counted
    graph.spin(attended.node)
    publisher = publish(graph)
    wait_until(lambda: passes, 'the executor to wait')
    wait_until_settled(lambda: passes)
    before = passes
    for number in range(50):
        publisher.publish(Int32(data=number))
        wait_until(lambda n=number: attended.messages[-1:] == [n], f'message {number}')
    assert passes - before < 10
    attended.attendant.close()


def test_events_of_a_subscription_are_told(graph: Graph) -> None:
    attended = Attended(graph)
    graph.node('talker').create_publisher(Int32, 'numbers', qos.sensor())
    wait_until(lambda: attended.sentences, 'the incompatible publisher')
    assert 'disagree on reliability' in attended.sentences[0]
    attended.close()


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
