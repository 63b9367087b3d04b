"""Graphs and plans: ports by name, variants by key, dependencies only on what came before."""
from __future__ import annotations

from _contract import Counter
import pytest
import torch

from flashrt_core.errors import CaptureFailed
from flashrt_core.errors import ConfigError
from flashrt_core.errors import ContractError
from flashrt_core.errors import MissingKey
from flashrt_core.errors import PlanInvalid
from flashrt_core.errors import UnboundPort
from flashrt_core.runtime import BufferSet
from flashrt_core.runtime import BufferSpec
from flashrt_core.runtime import Graph
from flashrt_core.runtime import Lane
from flashrt_core.runtime import Plan
from flashrt_core.runtime import Role


def double(ports, key):
    ports['y'].copy_(ports['x'] * key[-1])


@pytest.fixture
def buffers(backend):
    return BufferSet(backend, [
        BufferSpec('x', Role.INPUT, torch.float32, (4,)),
        BufferSpec('y', Role.OUTPUT, torch.float32, (4,)),
        BufferSpec('other', Role.INPUT, torch.float32, (4,)),
        BufferSpec('wide', Role.INPUT, torch.float32, (5,)),
        BufferSpec('half', Role.INPUT, torch.float16, (4,)),
    ])


@pytest.fixture
def graph(buffers):
    graph = Graph('double', double, ['x', 'y'])
    graph.bind('x', buffers['x'])
    graph.bind('y', buffers['y'])
    return graph


def test_each_key_is_a_variant_of_its_own(buffers, graph, lane):
    for key in ((2,), (3,)):
        graph.capture(key, lane)
    assert graph.keys == ((2,), (3,))
    for key, expected in (((3,), 15.0), ((2,), 10.0)):
        plan = Plan('p')
        plan.add(graph, key)
        lane.run(plan, before=lambda: buffers['x'].tensor.fill_(5.0)).result(20)
        assert buffers['y'].tensor.eq(expected).all()


def test_keys_are_compared_by_equality_only(graph, lane):
    graph.capture(('prefill', 16), lane)
    graph.check(tuple(['prefill', 8 * 2]))
    with pytest.raises(MissingKey):
        graph.check(('prefill', 17))


def test_an_unbound_port_is_named(buffers, lane):
    graph = Graph('double', double, ['x', 'y'])
    graph.bind('x', buffers['x'])
    with pytest.raises(UnboundPort, match=r"double.*\['y'\]"):
        graph.capture((2,), lane)


def test_a_missing_key_is_named_with_those_held(graph, lane):
    graph.capture((2,), lane)
    plan = Plan('p')
    plan.add(graph, (7,))
    with pytest.raises(MissingKey, match=r'\(7,\).*\(2,\)'):
        lane.run(plan)


def test_an_unknown_port_is_refused_with_the_known_ones(buffers, graph):
    with pytest.raises(ContractError, match=r"'z'.*\['x', 'y'\]"):
        graph.bind('z', buffers['x'])


def test_a_port_keeps_its_dtype_and_shape(buffers, graph):
    graph.bind('x', buffers['other'])
    for name in ('wide', 'half'):
        with pytest.raises(ContractError, match=name):
            graph.bind('x', buffers[name])


def test_a_captured_graph_is_not_bound_again(buffers, graph, lane):
    graph.capture((2,), lane)
    with pytest.raises(ContractError, match='before capture'):
        graph.bind('x', buffers['other'])


def test_a_port_is_declared_once():
    with pytest.raises(ConfigError, match='twice'):
        Graph('g', double, ['x', 'x'])


def test_a_sealed_lane_captures_nothing(graph, lane):
    graph.capture((2,), lane)
    lane.seal()
    with pytest.raises(CaptureFailed, match='sealed'):
        graph.capture((3,), lane)
    assert graph.keys == ((2,),)


def test_a_body_that_fails_in_capture_names_graph_and_key_and_leaves_the_lane(buffers, lane):
    def wrong(ports, key):
        ports['y'].copy_(ports['x'][:, :3])

    graph = Graph('wrong', wrong, ['x', 'y'])
    graph.bind('x', buffers['x'])
    graph.bind('y', buffers['y'])
    with pytest.raises(CaptureFailed, match=r"'wrong'.*\(2,\)"):
        graph.capture((2,), lane)
    assert graph.keys == () and lane.state == 'running'
    assert lane.call(lambda: 1).result(20) == 1


def test_a_graph_belongs_to_the_lane_it_was_captured_on(backend, graph, lane):
    graph.capture((2,), lane)
    with Lane(backend, 'second') as second:
        with pytest.raises(ContractError, match="'test'"):
            graph.capture((3,), second)
        with pytest.raises(ContractError, match='lane'):
            second.call(lambda: graph.replay((2,), second)).result(20)


def test_a_replay_off_the_lane_thread_is_refused(graph, lane):
    graph.capture((2,), lane)
    with pytest.raises(ContractError, match='thread'):
        graph.replay((2,), lane)


@pytest.mark.parametrize('after', [[0], [1], [7], [-1], ['double'], [True], [None]])
def test_a_dependency_on_itself_a_later_or_an_unknown_segment_is_refused(graph, after):
    plan = Plan('p')
    with pytest.raises(PlanInvalid, match="'p'"):
        plan.add(graph, (2,), after=after)
    assert plan.segments == ()


def test_a_second_segment_can_depend_on_the_first_but_not_on_itself(graph):
    plan = Plan('p')
    first = plan.add(graph, (2,))
    assert plan.add(graph, (2,), after=[first]) == 1
    with pytest.raises(PlanInvalid, match='0 to 1'):
        plan.add(graph, (2,), after=[2])
    assert [s.label for s in plan.segments] == ['double', 'double[1]']


def test_a_segment_added_to_a_checked_plan_is_checked_too(graph, lane):
    graph.capture((2,), lane)
    plan = Plan('p')
    plan.add(graph, (2,))
    plan.check()
    plan.add(graph, (7,))
    with pytest.raises(MissingKey, match=r'\(7,\)'):
        lane.run(plan)


def test_an_empty_plan_is_refused(lane):
    with pytest.raises(PlanInvalid, match='empty'):
        lane.run(Plan('empty'))


def test_a_plan_runs_its_segments_in_order_and_times_each(backend, lane):
    counter = Counter(backend, lane)
    result = counter.tick(step=5).result(20)
    assert result.value == 10 and result.plan == 'count'
    assert list(result.segments_us) == ['segment0', 'segment1', 'segment2']
    assert all(us > 0 for us in result.segments_us.values())
    assert result.total_us > 0


def test_capture_leaves_every_address(backend, lane):
    counter = Counter(backend, lane)
    before = counter.buffers.addresses()
    for _ in range(20):
        counter.tick().result(20)
    assert counter.buffers.addresses() == before
