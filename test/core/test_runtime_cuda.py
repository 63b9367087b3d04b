"""What only a GPU can show: no allocation on the tick path, pools, waits, captures."""
from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time

from _contract import Counter
import pytest
import torch

from flashrt_core.errors import CaptureFailed
from flashrt_core.errors import OutOfMemory
from flashrt_core.runtime import BufferSet
from flashrt_core.runtime import BufferSpec
from flashrt_core.runtime import cuda_backend
from flashrt_core.runtime import Graph
from flashrt_core.runtime import Lane
from flashrt_core.runtime import Plan
from flashrt_core.runtime import Role

pytestmark = pytest.mark.gpu
WAIT_S = 60.0


@pytest.fixture
def gpu():
    return cuda_backend()


@pytest.fixture
def gpu_lane(gpu):
    with Lane(gpu, 'gpu') as lane:
        yield lane


def matmul_graph(gpu, lane, name='matmul', size=256, times=8):
    buffers = BufferSet(gpu, [
        BufferSpec('x', Role.INPUT, torch.float32, (size, size), rows=False),
        BufferSpec('y', Role.OUTPUT, torch.float32, (size, size), rows=False)], name=name)

    def body(ports, key):
        value = ports['x']
        for _ in range(times):
            value = torch.tanh(value @ ports['x'])
        ports['y'].copy_(value)

    graph = Graph(name, body, ['x', 'y'])
    graph.bind_all({'x': buffers['x'], 'y': buffers['y']})
    graph.capture((), lane)
    return graph, buffers


def test_the_tick_path_calls_no_allocator(gpu, gpu_lane, stress):
    counter = Counter(gpu, gpu_lane)
    graph, _ = matmul_graph(gpu, gpu_lane)
    counter.plan.add(graph, ())
    gpu_lane.run(counter.plan).result(WAIT_S)
    gpu_lane.at_boundary(lambda: None).result(WAIT_S)
    keys = ('allocation.all.allocated', 'segment.all.allocated', 'num_device_alloc')
    before = [torch.cuda.memory_stats().get(key) for key in keys]
    for _ in range(stress(2000)):
        gpu_lane.run(counter.plan).result(WAIT_S)
        gpu_lane.at_segment_end(lambda: None).result(WAIT_S)
    assert [torch.cuda.memory_stats().get(key) for key in keys] == before


def test_a_replay_equals_the_body_run_eagerly(gpu, gpu_lane):
    graph, buffers = matmul_graph(gpu, gpu_lane)
    value = torch.randn(256, 256, device='cuda') / 16
    torch.cuda.synchronize()
    plan = Plan('p')
    plan.add(graph, ())
    gpu_lane.run(plan, before=lambda: buffers['x'].tensor.copy_(value)).result(WAIT_S)
    replayed = buffers['y'].tensor.cpu()
    gpu_lane.call(lambda: graph._body(
        {'x': buffers['x'].tensor, 'y': buffers['y'].tensor}, ())).result(WAIT_S)
    torch.cuda.synchronize()
    assert torch.equal(buffers['y'].tensor.cpu(), replayed)


def test_dead_graphs_in_cycles_do_not_break_a_capture(gpu, gpu_lane):
    thresholds = gc.get_threshold()
    dead = []
    for number in range(4):
        graph, _ = matmul_graph(gpu, gpu_lane, f'dead{number}', size=32)
        dead.append(graph)
        graph.itself = graph
    del graph
    counter = torch.zeros(1, device='cuda')

    def body():
        if torch.cuda.is_current_stream_capturing():
            dead.clear()
            gc.set_threshold(1)  # the next allocations of Python objects collect
        counter.add_(len([[number] for number in range(1000)]))

    try:
        gpu.capture(body, gpu_lane.capture_stream, gpu_lane.pool)
    finally:
        gc.set_threshold(*thresholds)


def test_lanes_have_pools_streams_and_capture_streams_of_their_own(gpu):
    with Lane(gpu, 'one') as one, Lane(gpu, 'two') as two:
        streams = [s for lane in (one, two) for s in (lane.stream, lane.capture_stream)]
        assert len({s.cuda_stream for s in streams}) == 4 and one.pool != two.pool
        current = [lane.call(lambda: torch.cuda.current_stream().cuda_stream).result(WAIT_S)
                   for lane in (one, two)]
        assert current == [one.stream.cuda_stream, two.stream.cuda_stream]


def test_a_stream_is_never_lent_twice_while_it_is_held(gpu):
    held = [gpu.stream() for _ in range(20)]
    for _ in range(40):
        assert gpu.stream().cuda_stream not in {s.cuda_stream for s in held}


def test_a_process_that_held_streams_in_a_cycle_ends_without_a_crash():
    """A weak reference to a torch stream dangles after its end (pytorch#183403)."""
    code = ('from flashrt_core.runtime import cuda_backend, Lane\n'
            'held = []\n'
            'for name in "abc":\n'
            '    with Lane(cuda_backend(), name) as lane:\n'
            '        lane.call(lambda: None).result()\n'
            '    lane.self = lane\n'
            'held += [cuda_backend().stream(), held]\n')
    child = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True,
                           timeout=120, check=False)
    assert child.returncode == 0, child.stderr


def test_two_lanes_capture_and_replay_at_once_without_mixing(gpu, stress):
    errors = []

    def work(number):
        try:
            with Lane(gpu, f'lane{number}') as lane:
                counter = Counter(gpu, lane)
                for tick in range(stress(500)):
                    assert counter.tick(step=number).result(WAIT_S).value == (
                        2 * number * (tick + 1))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in (1, 3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert errors == []


def test_a_wait_ends_at_its_limit_while_the_device_is_busy(gpu):
    stream, event = gpu.stream(), gpu.event()
    with gpu.use(stream):
        torch.cuda._sleep(2_000_000_000)
    event.record(stream)
    assert not event.query()
    assert not event.wait(0.001)
    assert event.wait(WAIT_S) and event.query()


def test_a_wait_lets_other_threads_run(gpu):
    stream, event = gpu.stream(), gpu.event()
    counted = [0]
    stop = threading.Event()

    def count():
        while not stop.is_set():
            counted[0] += 1
            time.sleep(0)

    with gpu.use(stream):
        torch.cuda._sleep(500_000_000)
    event.record(stream)
    thread = threading.Thread(target=count)
    thread.start()
    event.wait(WAIT_S)
    stop.set()
    thread.join(WAIT_S)
    assert counted[0] > 100


def test_a_body_that_cannot_be_captured_is_named_and_the_lane_goes_on(gpu, gpu_lane):
    graph, buffers = matmul_graph(gpu, gpu_lane)
    wrong = Graph('reads back', lambda ports, key: ports['x'].sum().item(), ['x'])
    wrong.bind('x', buffers['x'])
    with pytest.raises(CaptureFailed, match='reads back'):
        wrong.capture((), gpu_lane)
    plan = Plan('p')
    plan.add(graph, ())
    gpu_lane.run(plan).result(WAIT_S)
    matmul_graph(gpu, gpu_lane, name='again')


def test_device_memory_that_is_not_there_is_refused_with_the_holders(gpu):
    kept = BufferSet(gpu, [BufferSpec('w', Role.CONSTANT, torch.uint8, (1 << 20,))], name='first')
    with pytest.raises(OutOfMemory, match="'first'"):
        gpu.empty((gpu.memory().total * 2,), torch.uint8)
    del kept


def test_pinned_pages_are_given_back(gpu):
    tensor = gpu.empty((4 << 20,), torch.uint8, host=True)
    address = tensor.data_ptr()
    view = tensor[100:]
    del tensor
    assert view.is_pinned()
    del view
    again = gpu.empty((4 << 20,), torch.uint8, host=True)
    assert again.is_pinned() and address


@pytest.mark.parametrize('refuses', ['by its attribute', 'when asked'])
def test_a_device_that_registers_no_pages_pins_through_torch(gpu, monkeypatch, refuses):
    if refuses == 'by its attribute':
        monkeypatch.setattr(gpu, '_registers', False)
    else:
        # A real refusal leaves an error behind that the next launch would report.
        monkeypatch.setattr('flashrt_core.runtime.cuda.mmap.PAGESIZE', 1 << 50)
        monkeypatch.setattr('flashrt_core.runtime.cuda._Pages', lambda fd, size: bytearray(4096))
    tensor = gpu.empty((3, 1 << 20), torch.float32, host=True)
    assert tensor.is_pinned() and tensor.shape == (3, 1 << 20)
    assert torch.ones(4, device=gpu.device).sum().item() == 4


def test_segment_times_grow_with_the_work(gpu, gpu_lane):
    small, _ = matmul_graph(gpu, gpu_lane, 'small', size=64, times=1)
    large, _ = matmul_graph(gpu, gpu_lane, 'large', size=4096, times=8)
    plan = Plan('p')
    plan.add(small, ())
    plan.add(large, ())
    gpu_lane.run(plan).result(WAIT_S)
    times = gpu_lane.run(plan).result(WAIT_S).segments_us
    assert times['large'] > times['small'] > 0


def test_a_wedged_segment_is_reported_and_close_returns(gpu):
    lane = Lane(gpu, 'wedged').start()
    graph, _ = matmul_graph(gpu, lane, size=4096, times=60)
    plan = Plan('p')
    plan.add(graph, ())
    from flashrt_core.errors import LaneTimeout
    with pytest.raises(LaneTimeout, match='wedged'):
        lane.run(plan, timeout_s=1e-5).result(WAIT_S)
    assert lane.state == 'wedged'
    lane.close()
    gpu.synchronize()
