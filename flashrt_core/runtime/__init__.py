"""The execution contract: buffers, graphs, plans, lanes and events, on cpu and cuda."""
from flashrt_core.runtime.backend import Backend
from flashrt_core.runtime.backend import Captured
from flashrt_core.runtime.backend import cpu_backend
from flashrt_core.runtime.backend import cuda_backend
from flashrt_core.runtime.backend import Event
from flashrt_core.runtime.backend import MemoryInfo
from flashrt_core.runtime.backend import pick_backend
from flashrt_core.runtime.buffers import Buffer
from flashrt_core.runtime.buffers import BufferSet
from flashrt_core.runtime.buffers import BufferSpec
from flashrt_core.runtime.buffers import Kind
from flashrt_core.runtime.buffers import Role
from flashrt_core.runtime.graph import Graph
from flashrt_core.runtime.graph import ShapeKey
from flashrt_core.runtime.jobs import LaneFuture
from flashrt_core.runtime.jobs import LaneResult
from flashrt_core.runtime.lane import Lane
from flashrt_core.runtime.lane import SegmentGate
from flashrt_core.runtime.plan import Plan
from flashrt_core.runtime.plan import Segment

__all__ = [
    'Backend', 'Buffer', 'BufferSet', 'BufferSpec', 'Captured', 'Event', 'Graph', 'Kind', 'Lane',
    'LaneFuture', 'LaneResult', 'MemoryInfo', 'Plan', 'Role', 'Segment', 'SegmentGate', 'ShapeKey',
    'cpu_backend', 'cuda_backend', 'pick_backend',
]
