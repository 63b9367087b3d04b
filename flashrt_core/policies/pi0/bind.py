"""Bind Pi0 or Pi0.5: constants, buffers, graphs, plans, boundary; what can fail, fails here."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any

import torch

from flashrt_core.capsule import Boundary
from flashrt_core.capsule import Identity
from flashrt_core.capsule import numerics_of
from flashrt_core.checkpoints import pi0_check_settings
from flashrt_core.checkpoints import pi0_statistics
from flashrt_core.errors import ConfigError
from flashrt_core.errors import OutOfMemory
from flashrt_core.policies.normalise import affine
from flashrt_core.policies.pi0.config import load_config
from flashrt_core.policies.pi0.config import NAMED
from flashrt_core.policies.pi0.config import Pi0Config
from flashrt_core.policies.pi0.graphs import BEST
from flashrt_core.policies.pi0.graphs import forward_of
from flashrt_core.policies.pi0.graphs import make_graphs
from flashrt_core.policies.pi0.layout import buffer_specs
from flashrt_core.policies.pi0.layout import ports
from flashrt_core.policies.pi0.layout import state_names
from flashrt_core.policies.pi0.load import check_checkpoint
from flashrt_core.policies.pi0.load import Digests
from flashrt_core.policies.pi0.load import load_constants
from flashrt_core.policies.pi0.precision import check_precision
from flashrt_core.policies.pi0.session import Pi0Session
from flashrt_core.policies.pi0.session import reset_state
from flashrt_core.policies.prompts import make_prompts
from flashrt_core.policies.prompts import StateText
from flashrt_core.policies.protocol import MemoryNeed
from flashrt_core.policies.protocol import PortSpec
from flashrt_core.policies.protocol import Progress
from flashrt_core.policies.text import make_tokenizer
from flashrt_core.policies.text import Tokenizer
from flashrt_core.runtime import Backend
from flashrt_core.runtime import BufferSet
from flashrt_core.runtime import Lane
from flashrt_core.runtime import Plan


class Pi0Policy:
    """Pi0 and Pi0.5: ``family`` 'pi0' or 'pi05' takes configs of that one, empty takes either."""

    def __init__(self, family: str = '') -> None:
        self._family = family
        self.name = family or 'pi0'

    def _config(self, config: Any) -> Pi0Config:
        c = load_config(config)
        if self._family not in ('', c.family):
            own = sorted(name for name, one in NAMED.items() if one.family == self._family)
            raise ConfigError(
                f'the policy is {self._family!r}, its config is of the family {c.family!r}; give '
                f'one of {self._family!r} as its config, as {" or ".join(own)}, or set policy to '
                f'{c.family!r}'
            )
        return c

    def ports(self, config: Any) -> tuple[PortSpec, ...]:
        """Return the ports that a session of this config will have; raises as ``bind``."""
        return ports(self._config(config))

    def memory(self, config: Any) -> MemoryNeed:
        """Return what a session of this config will allocate; raises as ``bind``."""
        c = self._config(config)
        return MemoryNeed.of(buffer_specs(c), c.rows)

    def bind(self, backend: Backend, config: Any, progress: Progress | None = None) -> Pi0Session:
        """Return a session ready to tick; any thread, seconds to minutes.

        :param config: a Pi0Config, a name, a YAML path or a mapping (see ``load_config``).
        :param progress: told stage ('load', 'bind', 'capture', 'warm up') and fraction done.
        :raises ConfigError: the config or the weights do not fit.
        :raises OutOfMemory, CaptureFailed: the device refuses.
        """
        c = self._config(config)
        check_precision(c, backend)
        check_checkpoint(c)
        pi0_check_settings(c)
        c = pi0_statistics(c)
        prompts = make_prompts(c.tokenizer, c.family, c.vocab, bool(c.weights))
        state_text = state_text_of(c, prompts)
        tell = progress or (lambda stage, fraction: None)
        buffers = make_buffers(c, backend, self.name)
        ticks = [0] * c.rows  # of each row, on the host
        digests = load_constants(c, buffers, lambda fraction: tell('load', fraction))
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
                lane.call(partial(make_identity, c, digests, prompts, backend)).result(),
                position=lambda: ticks[0],
                order=state_names(c),
                session=self.name,
                lane=lane,
            )
        except BaseException:
            lane.close()
            raise
        tell('warm up', 1.0)
        return Pi0Session(c, buffers, lane, plans, boundary, ticks, prompts, state_text)


def make_buffers(c: Pi0Config, backend: Backend, name: str) -> BufferSet:
    """Return every buffer of a session, zeroed.

    :raises OutOfMemory: they cannot fit; said before anything is read, with the figures.
    """
    specs = buffer_specs(c)
    try:
        return BufferSet(backend, specs, rows=c.rows, name=name)
    except OutOfMemory as error:
        need = MemoryNeed.of(specs, c.rows)
        raise OutOfMemory(
            f'{error}; weights and tables take {need.constants / 2**30:.2f} GiB as {c.dtype}, '
            f'buffers {(need.buffers + need.pinned) / 2**30:.2f} GiB with {c.rows} rows, graphs '
            'and workspaces come on top'
        ) from error


def state_text_of(c: Pi0Config, prompts: Tokenizer | None) -> StateText | None:
    """Return what writes the state into Pi0.5's prompt; None for Pi0.

    :raises ConfigError: there is no tokenizer, or it does not serve.
    """
    if not c.modulated:
        return None
    if prompts is None:
        raise ConfigError(
            'Pi0.5 writes the state into its prompt and needs a tokenizer; set tokenizer to the '
            "path of PaliGemma's tokenizer.model"
        )
    scale = affine(c.statistics, 'state', c.normalised_by, c.state_dim)
    return StateText(make_tokenizer(c.tokenizer), scale, c.state_dim, c.state_tokens)


def make_identity(
    c: Pi0Config, digests: Digests, prompts: Tokenizer | None, backend: Backend
) -> Identity:
    """Return who a state belongs to: config and weights, device and libraries; lane thread.

    The tokenizer counts where a tick reads through it. What was derived from the weights at bind
    counts as numerics: another machine may round it differently.
    """
    layout = {'family': c.family, 'weights': digests.weights, **c.layout()}
    if digests.scales:
        layout['scales'] = digests.scales
    if c.modulated and prompts is not None:
        layout['tokenizer'] = prompts.identity
    forward = forward_of(c, backend.device).__name__.rsplit('.', 1)[-1]
    extra = {'forward': f'pi0.{forward}'}
    if c.reuse_vision:
        extra['vision'] = 'each view alone'
    if digests.derived:
        extra['modulation'] = digests.derived
    return Identity(layout, numerics_of(backend.device, extra))


def use_threads(c: Pi0Config, backend: Backend) -> None:
    """Set torch's CPU threads, here and (as torch has it) partly for the whole process.

    Small matrices run fastest, and always with the same bits, on one thread.
    """
    if backend.name == 'cpu' and c.cpu_threads:
        torch.set_num_threads(c.cpu_threads)


def capture_plans(
    c: Pi0Config, buffers: BufferSet, lane: Lane, tell: Progress
) -> dict[tuple[Hashable, ...], Plan]:
    """Capture every graph key; return plans vision | prefix | denoise by (rows,) or (n, BEST)."""
    vision, prefix, denoise = make_graphs(c, buffers)
    views = len(c.views)
    first = [(graph, (views // len(vision),)) for graph in vision]
    plans: dict[tuple[Hashable, ...], Plan] = {}
    wanted: list[tuple[Hashable, ...]] = [(rows,) for rows in c.row_keys]
    wanted += [(n, BEST) for n in c.best_of_keys]
    for i, kind in enumerate(wanted):
        tell('capture', i / len(wanted))
        plan = Plan(f'{c.family} tick, {kind[0]} {"candidates" if kind[1:] else "rows"}')
        last: tuple[int, ...] = ()
        for graph, key in [*first, (prefix, (views,)), (denoise, (views, *kind))]:
            graph.capture(key, lane)
            last = (plan.add(graph, key, after=last),)
        plan.check()
        plans[kind] = plan
    tell('capture', 1.0)
    return plans
