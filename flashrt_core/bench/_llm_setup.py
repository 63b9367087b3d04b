"""A bound planner with its stores, and the few things that every table of the bench does to it."""
from __future__ import annotations

import argparse
from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import replace
from functools import partial
import gc
import hashlib
import math
from pathlib import Path
import tempfile
import time
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from flashrt_core.bench._llm_work import Ceilings
from flashrt_core.bench._llm_work import Sizes
from flashrt_core.bench._progress import Clock
from flashrt_core.bench._report import Cell
from flashrt_core.bench._report import Report
from flashrt_core.capsule import CapsuleStore
from flashrt_core.capsule import RestoreReport
from flashrt_core.planners import Options
from flashrt_core.planners import Settings
from flashrt_core.planners.qwen3_5 import load_config
from flashrt_core.planners.qwen3_5 import NAMED
from flashrt_core.planners.qwen3_5 import QWEN3_5
from flashrt_core.planners.qwen3_5 import Qwen35Config
from flashrt_core.planners.qwen3_5.load import load_constants
from flashrt_core.planners.qwen3_5.weights import damped
from flashrt_core.planners.session import PlannerSession
from flashrt_core.policies.pi0.weights import WeightSpec
from flashrt_core.runtime import Backend
from flashrt_core.runtime import Role

T = TypeVar('T')

GREEDY = Options()
PREFIX = 'qwen3_5_'    # of the names of the config files, which this bench takes, too
OTHERS = 3             # contexts that run between two visits
MARKS = 2
NOT_RUN = 'not run: past --limit-s'
SLACK = 8 << 20        # bytes of a tier above its capsules: pages are rounded up


@dataclass(frozen=True)
class Rig:
    """What all sessions of one run of the bench share."""

    arguments: argparse.Namespace
    report: Report
    clock: Clock
    backend: Backend
    ceilings: Ceilings


class Bench:
    """One session, its stores and its ceilings; everything is called from the main thread.

    ``gpu`` keeps capsules on the device only, ``low`` in host memory and on disk only, so that a
    restore from a lower tier never finds its capsule promoted.

    :param before: ``device_bytes`` before the bind. :param gpu_bytes: asked for capsules.
    """

    def __init__(self, rig: Rig, session: PlannerSession, gpu: CapsuleStore, low: CapsuleStore,
                 folder: Path, before: dict[str, int], gpu_bytes: int) -> None:
        self.arguments, self.report, self.clock = rig.arguments, rig.report, rig.clock
        self.ceilings, self.session = rig.ceilings, session
        self.gpu, self.low, self.folder = gpu, low, folder
        self.c: Qwen35Config = session.config
        self.sizes = sizes_of(session)
        self.suffix = self.tokens(self.arguments.suffix, 1 << 20)
        self.before, self.gpu_bytes = before, gpu_bytes
        self.cold: dict[int, tuple[float, float]] = {}  # by length: milliseconds and MFU

    # -- rows -----------------------------------------------------------------------------------

    def attempt(self, table: str, label: dict[str, Cell], measure: Callable[[], None]) -> None:
        """Run one measurement; past the limit or after a failure its row says so."""
        if self.clock.over:
            self.report.add(table=table, **label, error=NOT_RUN)
            return
        what = ', '.join(f'{k} {v}' for k, v in label.items())
        self.clock.say(f'{table} {what}')
        try:
            measure()
        except Exception as error:  # what was measured before must reach the report
            self.clock.say(f'{table} {what}: {error!r}')
            self.report.add(table=table, **label, error=f'{type(error).__name__}: {error}'[:200])

    def samples(self, count: int, sample: Callable[[], T], warm: int = 1) -> list[T]:
        """Return so many samples, fewer (but one) where the limit passes meanwhile."""
        for _ in range(warm):
            sample()
        found = [sample()]
        while len(found) < count and not self.clock.over:
            found.append(sample())
        return found

    # -- the session ----------------------------------------------------------------------------

    def tokens(self, count: int, seed: int) -> list[int]:
        """Return random token ids, the same for the same seed."""
        return np.random.default_rng(seed).integers(0, self.c.vocab, count).tolist()

    def on_lane(self, fn: Callable[[], T]) -> T:
        """Run on the lane thread, wait and return."""
        return self.session.lane.at_segment_end(fn, 'bench').result()

    def snapshot(self, store: CapsuleStore, id: str, tier: str) -> int:
        """Keep the state of now; returns its bytes."""
        return self.on_lane(
            lambda: store.snapshot(self.session.boundary, id, tier=tier)).size_bytes

    def restore(self, store: CapsuleStore, id: str) -> RestoreReport:
        """Bring a capsule back."""
        return self.on_lane(lambda: store.restore(self.session.boundary, id))

    def drop_all(self) -> None:
        """Empty both stores but for what ``ready`` keeps."""
        for store in (self.gpu, self.low):
            for info in store.list():
                if not info.pinned:
                    store.drop(info.id, info.session)

    def ready(self, length: int) -> None:
        """Bring a prefilled context of that many tokens into the session; prefills it once."""
        id = f'ready-{length}'
        if id in {info.id for info in self.gpu.list('gpu')}:
            self.restore(self.gpu, id)
            return
        self.session.prefill(self.tokens(length, length)).result()
        self.snapshot(self.gpu, id, 'gpu')
        self.gpu.pin(id, session=self.session.boundary.session)

    def next_token(self) -> int:
        """Sample greedily what follows the state; one step."""
        return int(self.session.decode(GREEDY).result().tokens[0])

    def continue_with(self, suffix: list[int]) -> int:
        """Append and return the first token after it."""
        self.session.append(suffix).result()
        return self.next_token()

    def greedy(self, count: int) -> list[int]:
        """Decode so many tokens, one a step."""
        return [self.next_token() for _ in range(count)]

    def keep_others(self) -> None:
        """Make the contexts that run between two visits."""
        for i in range(OTHERS):
            self.session.prefill(self.tokens(min(self.arguments.lengths), 100 + i)).result()
            self.snapshot(self.gpu, f'other-{i}', 'gpu')

    def run_others(self) -> None:
        """Let each of them run: restored, extended, one token; then the device is idle."""
        for i in range(OTHERS):
            self.restore(self.gpu, f'other-{i}')
            self.continue_with(self.suffix)
        self.session.lane.backend.synchronize()

    def logits(self) -> Tensor:
        """Return float32 [vocab] on the CPU: what the state says about the next token."""
        buffers = self.session.buffers

        def compute() -> Tensor:
            b = {x.name: x.tensor[0] if x.spec.rows else x.tensor for x in buffers}
            forward = QWEN3_5.forward_of(self.c, self.session.lane.backend.device)
            found: Tensor = forward.head(self.c, b, b['hidden'][None])[0].float().cpu()
            return found

        return self.on_lane(compute)


def timed_ms(action: Callable[[], object]) -> float:
    """Return the wall milliseconds of an action."""
    begin = time.perf_counter()
    action()
    return (time.perf_counter() - begin) * 1e3


def device_bytes() -> dict[str, int]:
    """Return bytes in use on the CUDA device, by who counts; empty without one."""
    if not torch.cuda.is_available():
        return {}
    free, total = torch.cuda.mem_get_info()
    return {'allocated by torch': torch.cuda.memory_allocated(),
            'reserved by torch': torch.cuda.memory_reserved(),
            'in use, by the driver': total - free}


def configure(arguments: argparse.Namespace, mtp: bool = True,
              precision: str = '') -> tuple[Qwen35Config, Settings]:
    """Return the model and how the bench runs it: room for the longest prompt and what follows."""
    name = arguments.config
    short = name.removeprefix(PREFIX)
    c, s = load_config(short if short in NAMED else name)
    longest = max(arguments.lengths) + 2 * arguments.suffix + arguments.decode_tokens
    drafts = max(arguments.drafts, default=0) if c.mtp and mtp else 0
    context = -(-(longest + drafts + 1) // 64) * 64
    c = replace(c, context=context, tokenizer='', mtp=c.mtp and mtp,
                precision=precision or arguments.precision or c.precision)
    s = replace(s, branches=arguments.branches if mtp else 0, draft_tokens=drafts,
                tail_tokens=arguments.decode_tokens + 1, stop_ids=(), known_tokens=0,
                prefill_keys=tuple(k for k in s.prefill_keys if k <= context))
    return c, s


@contextmanager
def bound(rig: Rig, mtp: bool = True, precision: str = '') -> Iterator[Bench]:
    """Give a bench; its device memory is free again afterwards.

    :param mtp: False binds the model without its multi-token head, and without branches.
    :param precision: in place of the configured one.
    :raises OutOfMemory: it does not fit, with who holds what.
    """
    backend, cuda = rig.backend, rig.backend.name == 'cuda'
    c, s = configure(rig.arguments, mtp, precision)
    stages: set[str] = set()

    def progress(stage: str, fraction: float) -> None:
        if stage not in stages:
            stages.add(stage)
            rig.clock.say(f'bind {c.precision}{"" if c.mtp else " without MTP"}: {stage}')

    quantised = configure(rig.arguments)[0].precision != 'bf16'
    family = replace(QWEN3_5, load_constants=partial(load_constants, draw=partial(
        drawn, backend.device, quantised)))
    if cuda:
        torch.cuda.empty_cache()
    before = device_bytes()
    session = family.bind(backend, (c, s), progress)
    try:
        if cuda:
            torch.cuda.empty_cache()  # of what weights were drawn in
        with tempfile.TemporaryDirectory(dir=rig.arguments.disk, prefix='llm-bench-') as folder:
            held, below = budgets(rig.arguments, sizes_of(session))
            gpu = CapsuleStore(backend, held, 0)
            low = CapsuleStore(backend, 0, below, 2 * below, folder, True)
            session.lane.call(lambda: gpu.prepare(session.boundary, MARKS)).result()
            rig.clock.say('bound')
            yield Bench(rig, session, gpu, low, Path(folder), before, held)
            gpu.close()
            low.close()
    finally:
        try:
            session.close()
        finally:
            gpu = low = session = None  # type: ignore[assignment]
            gc.collect()
            if cuda:
                torch.cuda.empty_cache()


def sizes_of(session: PlannerSession) -> Sizes:
    """Return the sizes of a bound model."""
    return Sizes(session.config, [b.spec for b in session.buffers.by_role(Role.CONSTANT)])


def budgets(arguments: argparse.Namespace, sizes: Sizes) -> tuple[int, int]:
    """Return bytes for capsules on the device and in host memory: what the tables keep at once."""
    ready = [sizes.capsule(length) + SLACK for length in arguments.lengths]
    short, longest = min(ready), max(ready)
    return sum(ready) + max(longest + OTHERS * short, max(arguments.contexts) * short), longest


def drawn(device: torch.device, compared: bool, c: Qwen35Config, name: str,
          spec: WeightSpec) -> Tensor:
    """Draw a weight on its device: the spread of ``random_tensor``, not its bits.

    :param compared: two precisions are: of 64 layers of equal weight, logits tell nothing of them.
    """
    spec = damped(c, name, spec) if compared else spec
    seed = int.from_bytes(hashlib.sha256(f'{c.weight_seed}/{name}'.encode()).digest()[:7], 'big')
    generator = torch.Generator(device).manual_seed(seed)
    reach = spec.scale * math.sqrt(3.0)
    value = torch.empty(spec.shape, dtype=spec.dtype, device=device)
    return value.uniform_(spec.offset - reach, spec.offset + reach, generator=generator)
