"""The poison finds what a session hides: attributes, closures, modules, frames; constants stay."""
from __future__ import annotations

import mmap
import types

from _contract import Counter
from _poison import poison
from _poison import reach
from _poison import reachable_tensors
import pytest
import torch

from flashrt_core.runtime import BufferSet
from flashrt_core.runtime import BufferSpec
from flashrt_core.runtime import philox
from flashrt_core.runtime import Role


class Hidden:
    """A session with one tensor in each kind of place; its lane is idle."""

    def __init__(self, backend, lane):
        def make(value):
            return torch.full((3,), float(value), device=backend.device)

        self.counter = Counter(backend, lane)
        self.attribute = make(1)
        self.nested = {'list': [(make(2),)]}
        closed, default = make(3), make(4)
        self.closure = lambda: closed
        self.default = lambda x=default: x
        self.module = torch.nn.BatchNorm1d(3).to(backend.device)
        self.partial = types.MappingProxyType({'proxy': make(5)})
        self.view = make(6)[1:]
        self.constants = BufferSet(backend, [
            BufferSpec('weights', Role.CONSTANT, torch.float32, (64,), rows=False)])
        self.constants['weights'].tensor.fill_(7)

    def hidden(self):
        return [self.attribute, self.nested['list'][0][0], self.closure(), self.default(),
                self.module.running_mean, self.module.weight, self.partial['proxy'], self.view]


@pytest.fixture
def session(backend, lane):
    return Hidden(backend, lane)


def test_every_hidden_tensor_is_found(session):
    found = {t.data_ptr() for t in reachable_tensors(session)}
    for tensor in session.hidden():
        assert tensor.data_ptr() in found
    for buffer in [*session.counter.buffers, *session.constants]:
        assert buffer.tensor.data_ptr() in found


def test_poison_destroys_all_but_constants(session):
    poisoned = poison(session)
    for tensor in session.hidden():
        assert tensor.isnan().all() and poisoned.covers(tensor)
    for buffer in session.counter.buffers:
        assert buffer.tensor.eq(-1).all()
    assert session.constants['weights'].tensor.eq(7).all()
    assert not poisoned.covers(session.constants['weights'].tensor)
    poisoned.check_constants()


def test_a_changed_constant_is_noticed(session):
    poisoned = poison(session)
    session.constants['weights'].tensor[0] = 8
    with pytest.raises(AssertionError, match='constants changed'):
        poisoned.check_constants()


def test_module_globals_count_as_constants(backend, session):
    table = philox.table_torch(backend.device)
    assert table.data_ptr() in {m.address for m in reach(session).constants}
    poison(session)
    assert table.isfinite().all()


def test_kept_objects_are_left_alone(session):
    session.store = Hidden(session.counter.lane.backend, session.counter.lane)
    poisoned = poison(session, keep=[session.store])
    assert not poisoned.covers(session.store.attribute)
    assert session.store.attribute.eq(1).all()
    assert session.attribute.isnan().all()


@pytest.mark.filterwarnings('ignore:The given buffer is not writable')
def test_memory_that_cannot_be_written_counts_as_constant(session, tmp_path):
    path = tmp_path / 'weights'
    path.write_bytes(bytes(8192))
    with path.open('rb') as file:
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    session.mapped = torch.frombuffer(pages, dtype=torch.uint8)
    poisoned = poison(session)
    assert session.mapped.eq(0).all()
    assert session.mapped.data_ptr() in {m.address for m in poisoned.constants}


def test_a_tick_after_poison_and_rewriting_its_state_is_right(session):
    counter = session.counter
    assert counter.tick(step=3).result(20).value == 6
    poisoned = poison(session)
    counter.lane.at_segment_end(lambda: counter.set(6)).result(20)
    assert counter.tick(step=3).result(20).value == 12
    poisoned.check_constants()


@pytest.mark.gpu
def test_the_segments_of_the_graph_pool_are_overwritten_on_cuda(backend, session):
    if backend.name != 'cuda':
        pytest.skip('a CPU lane has no pool')
    pool = [m for m in reach(session).writable if m.owner is None]
    assert pool and all(m.nbytes for m in pool)
    poison(session)
    session.counter.lane.at_segment_end(lambda: session.counter.set(0)).result(20)
    assert session.counter.tick().result(20).value == 2
