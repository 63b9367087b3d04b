"""Bind Pi0: constants, buffers, graphs, plans, boundary; everything that can fail, fails here."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashrt_core.capsule import Boundary
from flashrt_core.capsule import Identity
from flashrt_core.capsule import numerics_of
from flashrt_core.capsule import weights_digest
from flashrt_core.checkpoints import assemble
from flashrt_core.checkpoints import check_keys
from flashrt_core.checkpoints import pi0_canonical
from flashrt_core.checkpoints import pi0_ignored
from flashrt_core.checkpoints import pi0_targets
from flashrt_core.checkpoints import SafetensorsReader
from flashrt_core.policies.pi0.config import load_config
from flashrt_core.policies.pi0.config import Pi0Config
from flashrt_core.policies.pi0.graphs import forward_of
from flashrt_core.policies.pi0.graphs import make_graphs
from flashrt_core.policies.pi0.layout import buffer_specs
from flashrt_core.policies.pi0.layout import STATE
from flashrt_core.policies.pi0.session import Pi0Session
from flashrt_core.policies.pi0.session import reset_state
from flashrt_core.policies.pi0.weights import random_weight
from flashrt_core.policies.pi0.weights import tables
from flashrt_core.policies.pi0.weights import weight_specs
from flashrt_core.policies.protocol import Progress
from flashrt_core.runtime import Backend
from flashrt_core.runtime import BufferSet
from flashrt_core.runtime import Lane
from flashrt_core.runtime import Plan
from flashrt_core.runtime import Role

LOADERS = 4


class Pi0Policy:
    """The Pi0 family."""

    name = 'pi0'

    def bind(self, backend: Backend, config: Any, progress: Progress | None = None) -> Pi0Session:
        """Return a session ready to tick; any thread, seconds to minutes.

        :param config: a Pi0Config, a name, a YAML path or a mapping (see ``load_config``).
        :param progress: told stage ('load', 'bind', 'capture', 'warm up') and fraction done.
        :raises ConfigError: the config or the weights do not fit.
        :raises OutOfMemory, CaptureFailed: the device refuses.
        """
        c = load_config(config)
        tell = progress or (lambda stage, fraction: None)
        buffers = BufferSet(backend, buffer_specs(c), rows=c.rows, name=self.name)
        digest = load_constants(c, buffers, lambda fraction: tell('load', fraction))
        backend.synchronize()  # zeroing ran on another stream than the captures will
        tell('bind', 0.0)
        lane = Lane(backend, self.name).start()
        try:
            use_threads(c, backend)
            lane.call(partial(use_threads, c, backend)).result()
            plans = capture_plans(c, buffers, lane, tell)
            for i, plan in enumerate(plans.values()):
                tell('warm up', i / len(plans))
                lane.run(plan).result()
            lane.call(lambda: reset_state(buffers, c)).result()
            lane.call(lane.commit).result()
            lane.seal()
            boundary = Boundary(
                buffers,
                lane.call(partial(make_identity, c, digest, backend)).result(),
                position=lambda: int(buffers['tick'].tensor[0]),
                order=STATE,
                session=self.name,
                lane=lane,
            )
        except BaseException:
            lane.close()
            raise
        tell('warm up', 1.0)
        return Pi0Session(c, buffers, lane, plans, boundary)


def make_identity(c: Pi0Config, digest: str, backend: Backend) -> Identity:
    """Return who a state belongs to: config and weights, device and libraries; lane thread."""
    layout = {'family': 'pi0', 'weights': digest, **c.layout()}
    forward = forward_of(c, backend.device).__name__.rsplit('.', 1)[-1]
    return Identity(layout, numerics_of(backend.device, {'forward': f'pi0.{forward}'}))


def use_threads(c: Pi0Config, backend: Backend) -> None:
    """Set torch's CPU threads, here and (as torch has it) partly for the whole process.

    Small matrices run fastest, and always with the same bits, on one thread.
    """
    if backend.name == 'cpu' and c.cpu_threads:
        torch.set_num_threads(c.cpu_threads)


def capture_plans(c: Pi0Config, buffers: BufferSet, lane: Lane, tell: Progress) -> dict[int, Plan]:
    """Capture every graph key and return one plan a row count: vision | prefix | denoise."""
    vision, prefix, denoise = make_graphs(c, buffers)
    views = len(c.views)
    plans: dict[int, Plan] = {}
    for i, rows in enumerate(c.row_keys):
        tell('capture', i / len(c.row_keys))
        plan = Plan(f'pi0 tick, {rows} rows')
        last: tuple[int, ...] = ()
        for graph, key in ((vision, (views,)), (prefix, (views,)), (denoise, (views, rows))):
            graph.capture(key, lane)
            last = (plan.add(graph, key, after=last),)
        plan.check()
        plans[rows] = plan
    tell('capture', 1.0)
    return plans


def load_constants(c: Pi0Config, buffers: BufferSet, tell: Callable[[float], None]) -> str:
    """Fill every CONSTANT buffer and return the digest of them all."""
    specs = weight_specs(c)
    jobs: list[tuple[str, Callable[[], Tensor]]] = [
        (name, tensor.clone) for name, tensor in tables(c).items()
    ]
    if not c.weights:
        jobs += [(n, partial(random_weight, n, specs[n], c.weight_seed)) for n in specs]
        _fill(buffers, jobs, tell)
    else:
        with SafetensorsReader(c.weights) as reader:
            targets = pi0_targets(c)
            names = check_keys(
                targets, reader.shapes, pi0_canonical, partial(pi0_ignored, c), str(reader.path)
            )
            jobs += [
                (t.name, partial(assemble, t, names, reader.read, specs[t.name].dtype))
                for t in targets
            ]
            _fill(buffers, jobs, tell)
    return weights_digest({b.name: b.tensor for b in buffers.by_role(Role.CONSTANT)})


def _fill(
    buffers: BufferSet,
    jobs: Sequence[tuple[str, Callable[[], Tensor]]],
    tell: Callable[[float], None],
) -> None:
    """Make every tensor and copy it to its buffer, a few at a time."""

    def fill(job: tuple[str, Callable[[], Tensor]]) -> None:
        buffers[job[0]].tensor.copy_(job[1]())

    with ThreadPoolExecutor(LOADERS, thread_name_prefix='load') as pool:
        for done, _ in enumerate(pool.map(fill, jobs), start=1):
            tell(done / len(jobs))
