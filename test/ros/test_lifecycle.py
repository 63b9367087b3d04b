"""The lifecycle node survives invalid transitions, exceptions and slow work."""

from collections.abc import Iterator
import threading

from _ros_fixtures import Graph
from _ros_fixtures import ros_graph
from _ros_fixtures import wait_until
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState
from lifecycle_msgs.srv import GetState
import pytest
from std_srvs.srv import Trigger

from flashrt_core.errors import ConfigError
from flashrt_ros.futures import run_in_thread
from flashrt_ros.lifecycle import SafeLifecycleNode

pytestmark = pytest.mark.ros


class Recorder(SafeLifecycleNode):
    """Notes what is called; ``fail`` makes configure raise, ``gate`` makes it wait."""

    def __init__(self, **kwargs: object) -> None:
        super().__init__('recorder', **kwargs)
        self.calls: list[str] = []
        self.fail: Exception | None = None
        self.gate: threading.Event | None = None

    def configure(self) -> None:
        self.calls.append('configure')
        if self.gate is not None:
            self.gate.wait(20)
        if self.fail is not None:
            raise self.fail

    def activate(self) -> None:
        self.calls.append('activate')

    def deactivate(self) -> None:
        self.calls.append('deactivate')

    def teardown(self) -> None:
        self.calls.append('teardown')


@pytest.fixture
def graph() -> Iterator[Graph]:
    with ros_graph() as made:
        yield made


def change(graph: Graph, node_name: str = 'recorder'):
    call = graph.client(graph.node('asker'), ChangeState, f'{node_name}/change_state')
    return lambda number: call(transition=Transition(id=number)).success


def test_an_invalid_transition_answers_false_and_the_node_lives(graph: Graph) -> None:
    node = graph.spin(Recorder(context=graph.context))
    ask = change(graph)
    assert ask(Transition.TRANSITION_ACTIVATE) is False
    assert ask(99) is False
    assert ask(Transition.TRANSITION_CONFIGURE) is True
    assert ask(Transition.TRANSITION_ACTIVATE) is True
    assert node.state_label == 'active'
    assert not graph.failures


def test_an_unknown_transition_label_answers_false(graph: Graph) -> None:
    graph.spin(Recorder(context=graph.context))
    call = graph.client(graph.node('asker'), ChangeState, 'recorder/change_state')
    assert call(transition=Transition(label='fly')).success is False
    assert call(transition=Transition(label='configure')).success is True


@pytest.mark.parametrize('error, code, traced', [
    (ConfigError('parameter x is 3; give 4'), 'config_invalid', False),
    (KeyError('parameter x is 3; give 4'), 'KeyError', True)])
def test_an_exception_in_configure_is_shown_traced_unless_named_and_runs_the_teardown(
        graph: Graph, capfd: pytest.CaptureFixture[str], error: Exception, code: str,
        traced: bool) -> None:
    node = Recorder(context=graph.context)
    node.fail = error
    graph.spin(node)
    ask = change(graph)
    assert ask(Transition.TRANSITION_CONFIGURE) is False
    assert node.state_label == 'unconfigured'
    assert node.calls == ['configure', 'teardown']
    written = ''.join(capfd.readouterr())
    assert 'parameter x is 3; give 4' in written
    assert ('Traceback' in written) is traced and code in written
    assert 'ros2 param set /recorder NAME VALUE' in written and 'start the node anew' in written
    assert 'ros2 lifecycle set /recorder configure, and activate' in written
    assert 'parameter x is 3' in node.last_transition_error
    node.fail = None
    assert ask(Transition.TRANSITION_CONFIGURE) is True
    assert node.last_transition_error == ''


def test_a_node_that_configures_for_long_still_answers(graph: Graph) -> None:
    node = Recorder(context=graph.context)
    node.gate = threading.Event()
    graph.spin(node)
    asker = graph.node('asker')
    state = graph.client(asker, GetState, 'recorder/get_state')
    call = graph.client(asker, ChangeState, 'recorder/change_state')
    worker = threading.Thread(target=lambda: call(
        transition=Transition(id=Transition.TRANSITION_CONFIGURE)))
    worker.start()
    wait_until(lambda: 'configure' in node.calls, 'configure to begin')
    assert state().current_state.label == 'configuring'
    second = call(transition=Transition(id=Transition.TRANSITION_CONFIGURE))
    assert second.success is False
    node.gate.set()
    worker.join(20)
    assert state().current_state.label == 'inactive'


def test_autostart_configures_and_activates_by_itself(graph: Graph) -> None:
    node = graph.spin(Recorder(context=graph.context))
    node.autostart().join(20)
    assert node.state_label == 'active'


def test_a_node_that_ends_while_it_configures_is_not_activated(
        graph: Graph, capfd: pytest.CaptureFixture[str]) -> None:
    node = Recorder(context=graph.context)
    node.gate = threading.Event()
    graph.spin(node)
    starting = node.autostart()
    wait_until(lambda: 'configure' in node.calls, 'the configure')
    node.ending = True
    node.gate.set()
    starting.join(20)
    assert node.calls == ['configure'] and 'refused' not in ''.join(capfd.readouterr())


def test_finish_deactivates_before_it_shuts_down(graph: Graph) -> None:
    node = graph.spin(Recorder(context=graph.context))
    node.autostart().join(20)
    assert node.finish(5.0)
    assert node.calls == ['configure', 'activate', 'deactivate', 'teardown']
    assert node.state_label == 'finalized'


def test_an_awaited_future_of_another_thread_wakes_a_node_without_timers(graph: Graph) -> None:
    node = graph.node('quiet')
    release = threading.Event()

    async def answer(request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        response.message = await run_in_thread(node, lambda: release.wait(20) and 'done', 'work')
        response.success = True
        return response

    node.create_service(Trigger, '~/work', answer)
    call = graph.client(graph.node('asker'), Trigger, 'quiet/work')
    threading.Timer(0.05, release.set).start()
    assert call(timeout_s=10).message == 'done'
