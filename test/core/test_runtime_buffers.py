"""Buffers keep one address, small state lies in one arena, memory errors name the holders."""
from __future__ import annotations

import pytest
import torch

from flashrt_core.errors import AddressChanged
from flashrt_core.errors import ConfigError
from flashrt_core.errors import OutOfMemory
from flashrt_core.runtime import Backend
from flashrt_core.runtime import BufferSet
from flashrt_core.runtime import BufferSpec
from flashrt_core.runtime import Kind
from flashrt_core.runtime import pick_backend
from flashrt_core.runtime import Role
from flashrt_core.runtime.buffers import ALIGN

SPECS = (
    BufferSpec('image', Role.INPUT, torch.uint8, (5, 3)),
    BufferSpec('tick', Role.STATE, torch.int64, (), kind=Kind.META),
    BufferSpec('kv', Role.STATE, torch.bfloat16, (16, 2, 1, 8), kind=Kind.KV),
    BufferSpec('flags', Role.STATE, torch.bool, (3,), kind=Kind.QUEUE),
    BufferSpec('recurrent', Role.STATE, torch.float32, (7, 11), kind=Kind.RECURRENT),
    BufferSpec('weights', Role.CONSTANT, torch.float32, (4,), rows=False),
    BufferSpec('staging', Role.INPUT, torch.float32, (4,), host=True),
)


def make(backend: Backend, rows: int = 3) -> BufferSet:
    return BufferSet(backend, SPECS, rows=rows, name='session')


def test_a_row_axis_comes_first_except_where_it_is_refused(backend):
    buffers = make(backend)
    assert buffers['kv'].shape == (3, 16, 2, 1, 8)
    assert buffers['tick'].shape == (3,)
    assert buffers['weights'].shape == (4,)
    assert buffers['recurrent'].row(2).shape == (7, 11)


def test_buffers_start_zeroed_and_keep_declared_order(backend):
    buffers = make(backend)
    assert [b.name for b in buffers] == [s.name for s in SPECS]
    assert [b.name for b in buffers.state()] == ['tick', 'kv', 'flags', 'recurrent']
    assert all(not b.tensor.any() for b in buffers)


def test_a_row_of_small_state_is_one_contiguous_range_of_the_arena(backend):
    buffers = make(backend)
    base, row_bytes = buffers.arena.data_ptr(), buffers.arena.shape[1]
    assert buffers.arena.is_contiguous() and row_bytes % ALIGN == 0
    for name in ('tick', 'flags', 'recurrent'):
        offset, nbytes = buffers.slot(name)
        assert offset % ALIGN == 0
        for row in range(3):
            tensor = buffers[name].row(row)
            assert tensor.is_contiguous()
            assert tensor.data_ptr() == base + row * row_bytes + offset
            assert tensor.numel() * tensor.element_size() == nbytes


def test_slots_of_small_state_do_not_overlap(backend):
    buffers = make(backend)
    for value, name in enumerate(('tick', 'flags', 'recurrent'), start=1):
        buffers[name].tensor.fill_(value)
    assert buffers['tick'].tensor.tolist() == [1, 1, 1]
    assert buffers['flags'].tensor.all()
    assert buffers['recurrent'].tensor.eq(3).all()


def test_kv_and_constants_stay_out_of_the_arena(backend):
    buffers = make(backend)
    for name in ('kv', 'weights', 'image'):
        with pytest.raises(ConfigError, match=name):
            buffers.slot(name)
    assert buffers['kv'].tensor.is_contiguous()


def test_addresses_do_not_change_by_writing(backend):
    buffers = make(backend)
    before = buffers.addresses()
    for buffer in buffers:
        buffer.tensor.fill_(1)
    assert buffers.addresses() == before
    buffers.check_addresses()


def test_a_reshaped_tensor_at_the_same_address_is_noticed(backend):
    buffers = make(backend)
    tensor = buffers['kv'].tensor
    tensor.set_(tensor.untyped_storage(), 0, (tensor.numel(),), (1,))
    with pytest.raises(AddressChanged, match='kv'):
        buffers.check_addresses()


@pytest.mark.parametrize('exchange', ['storage', 'resize'])
def test_an_exchanged_storage_is_noticed_and_named(backend, exchange):
    buffers = make(backend)
    tensor = buffers['weights'].tensor
    if exchange == 'storage':
        tensor.data = tensor.clone()
    else:
        tensor.resize_(400)
    with pytest.raises(AddressChanged, match='weights'):
        buffers.check_addresses()


def test_a_buffer_cannot_be_pointed_elsewhere(backend):
    buffers = make(backend)
    with pytest.raises(AttributeError):
        buffers['image'].tensor = torch.zeros(1)
    with pytest.raises(AttributeError):
        buffers['image'].extra = 1


def test_a_row_that_does_not_exist_is_refused(backend):
    buffers = make(backend)
    for name, row in (('tick', 3), ('tick', -1), ('weights', 0)):
        with pytest.raises(ConfigError, match=name):
            buffers[name].row(row)


@pytest.mark.parametrize('change', [
    {'name': ''}, {'kind': None}, {'role': Role.INPUT}, {'shape': (0,)}, {'shape': (-1, 2)},
    {'kind': Kind.KV}, {'shape': (2.7,)}, {'shape': 2}, {'role': 'nothing'}, {'kind': 'nothing'},
])
def test_a_spec_that_says_nothing_sensible_is_refused(change):
    fields = {'name': 'x', 'role': Role.STATE, 'dtype': torch.float32, 'shape': (2,),
              'kind': Kind.META} | change
    with pytest.raises(ConfigError):
        BufferSpec(**fields)


def test_names_are_unique_and_rows_are_at_least_one(backend):
    spec = BufferSpec('x', Role.SCRATCH, torch.float32, (2,))
    with pytest.raises(ConfigError, match='x'):
        BufferSet(backend, [spec, spec])
    with pytest.raises(ConfigError, match='0 rows'):
        BufferSet(backend, [spec], rows=0)
    with pytest.raises(ConfigError, match='nothing'):
        BufferSet(backend, [spec])['nothing']


def test_out_of_memory_says_asked_free_and_who_holds_the_rest(backend):
    kept = BufferSet(backend, [BufferSpec('weights', Role.CONSTANT, torch.uint8, (1 << 20,))],
                     name='the planner')
    huge = backend.memory().total * 2
    before = backend.memory().total
    with pytest.raises(OutOfMemory) as caught:
        BufferSet(backend, [BufferSpec('kv', Role.SCRATCH, torch.uint8, (huge,))],
                  name='the executor')
    text = str(caught.value)
    assert 'the executor' in text and str(huge) in text and str(before) in text
    assert "'the planner' 1.0 MiB" in text and 'others' in text
    del kept


def test_a_collected_set_is_no_longer_named(backend):
    BufferSet(backend, [BufferSpec('x', Role.SCRATCH, torch.uint8, (8,))], name='gone')
    with pytest.raises(OutOfMemory) as caught:
        backend.reserve(1 << 60, 'much')
    assert "'gone'" not in str(caught.value)


@pytest.mark.parametrize('size', [1, 1000, (1 << 20) + 4])
def test_host_buffers_are_pinned_on_cuda_and_hold_what_is_written(backend, size):
    tensor = backend.empty((size,), torch.float32, host=True)
    assert tensor.device.type == 'cpu' and tensor.shape == (size,)
    assert tensor.is_pinned() == (backend.name == 'cuda')
    tensor.fill_(3.0)
    assert torch.equal(tensor.to(backend.device).cpu(), torch.full((size,), 3.0))


def test_a_backend_is_picked_by_name():
    assert pick_backend('cpu').name == 'cpu'
    assert pick_backend('auto').name in ('cpu', 'cuda')
    with pytest.raises(ConfigError, match='tpu'):
        pick_backend('tpu')


def test_asking_for_a_missing_cuda_device_says_so():
    from flashrt_core.runtime import cuda_backend
    with pytest.raises(ConfigError, match='CUDA device 99'):
        cuda_backend(99)


def test_memory_counts_what_can_still_be_had(backend):
    info = backend.memory()
    assert 0 < info.free <= info.total
    assert info.integrated or backend.name == 'cuda'
