"""Fill a session's constants: weights from a checkpoint or at random, tables, modulation.

Workers read piece by piece straight into the buffers, so the weights are in memory once; beside
them a load holds a few pieces, and in Pi0.5 the sources of one norm a worker.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
import hashlib

import torch
from torch import Tensor

from flashrt_core.capsule import weights_digest
from flashrt_core.checkpoints import check_keys
from flashrt_core.checkpoints import pi0_canonical
from flashrt_core.checkpoints import pi0_check_family
from flashrt_core.checkpoints import pi0_ignored
from flashrt_core.checkpoints import pi0_targets
from flashrt_core.checkpoints import read_into
from flashrt_core.checkpoints import SafetensorsReader
from flashrt_core.checkpoints import Target
from flashrt_core.checkpoints.workers import in_parallel
from flashrt_core.nn.fp8 import input_scale
from flashrt_core.nn.fp8 import quantise_into
from flashrt_core.nn.fp8 import SCALES
from flashrt_core.policies.calibration import check_weights
from flashrt_core.policies.calibration import load_scales
from flashrt_core.policies.pi0.config import Pi0Config
from flashrt_core.policies.pi0.modulation import condition
from flashrt_core.policies.pi0.modulation import modulate
from flashrt_core.policies.pi0.modulation import modulated_norms
from flashrt_core.policies.pi0.modulation import MODULATION
from flashrt_core.policies.pi0.modulation import source_specs
from flashrt_core.policies.pi0.weights import products
from flashrt_core.policies.pi0.weights import random_weight
from flashrt_core.policies.pi0.weights import tables
from flashrt_core.policies.pi0.weights import weight_specs
from flashrt_core.policies.pi0.weights import WeightSpec
from flashrt_core.runtime import BufferSet
from flashrt_core.runtime import Role

Tell = Callable[[float], None]
Fill = Callable[[str, Tensor], None]  # weight by name -> into a tensor of its shape


@dataclass(frozen=True)
class Digests:
    """What tells two sessions' constants apart.

    ``weights``: of all that was given, whatever machine loaded it. ``derived``: of what this
    machine computed from it, which may differ by rounding on another; empty if nothing was.
    ``scales``: of the static scales of FP8, else empty.
    """

    weights: str
    derived: str = ''
    scales: str = ''


def load_constants(c: Pi0Config, buffers: BufferSet, tell: Tell) -> Digests:
    """Fill every CONSTANT buffer and return their digests; configure, any thread.

    :param tell: is told the fraction done.
    :raises ConfigError: the checkpoint does not fit the config, or the scales fit neither.
    """
    if not c.weights:
        specs = {**weight_specs(c), **(source_specs(c) if c.modulated else {})}
        return _load(c, buffers, partial(_fill_random, specs, c.weight_seed), tell)
    shared = buffers.backend.memory().integrated
    with SafetensorsReader(c.weights, drop_cache=shared) as reader:
        targets = pi0_targets(c)
        names = _names(c, targets, reader)
        by_name = {target.name: target for target in targets}

        def fill(name: str, into: Tensor) -> None:
            read_into(by_name[name], names, reader, into)

        return _load(c, buffers, fill, tell)


def check_checkpoint(c: Pi0Config) -> None:
    """Verify by names and shapes that the config's checkpoint and scales fit it; headers only.

    :raises ConfigError: it cannot be read, is of the other family, or keys are missing, left over
        or misshapen.
    """
    if c.quantised:
        load_scales(c.scales, c.family, products(c))
    if c.weights:
        with SafetensorsReader(c.weights) as reader:
            _names(c, pi0_targets(c), reader)


def _names(c: Pi0Config, targets: Sequence[Target], reader: SafetensorsReader) -> dict[str, str]:
    where = str(reader.path)
    pi0_check_family(c, reader.shapes, where)
    return check_keys(targets, reader.shapes, pi0_canonical, partial(pi0_ignored, c), where)


def _fill_random(specs: Mapping[str, WeightSpec], seed: int, name: str, into: Tensor) -> None:
    into.copy_(random_weight(name, specs[name], seed))


def _load(c: Pi0Config, buffers: BufferSet, fill: Fill, tell: Tell) -> Digests:
    for name, tensor in tables(c).items():
        buffers[name].tensor.copy_(tensor)
    scales = load_scales(c.scales, c.family, products(c)) if c.quantised else None
    names = list(weight_specs(c))
    norms = modulated_norms(c) if c.modulated else []
    total = len(names) + len(norms)
    plain: dict[str, str] = {}  # digests of the weights that are quantised

    def load(name: str) -> None:
        if scales is not None and name in scales.largest:
            plain[name] = _load_quantised(c, buffers, fill, name, scales.largest[name])
        else:
            fill(name, buffers[name].tensor)

    in_parallel(names, load, lambda done: tell(done / total))
    if scales is not None:
        check_weights(scales, plain_digest(c, buffers, plain))
    of_scales = '' if scales is None else scales.digest
    given = {b.name: b.tensor for b in buffers.by_role(Role.CONSTANT) if b.name != MODULATION}
    if not c.modulated:
        return Digests(weights_digest(given), scales=of_scales)

    specs, read = source_specs(c), {}
    table = buffers[MODULATION].tensor

    def source(name: str) -> Tensor:
        tensor = torch.empty(specs[name].shape, dtype=specs[name].dtype)
        fill(name, tensor)
        read[name] = weights_digest({name: tensor})
        return tensor

    given_condition = condition(tables(c)['table.time'], source)

    def modulate_norm(norm: str) -> None:
        table[:, norms.index(norm)].copy_(modulate(norm, given_condition, source))

    in_parallel(norms, modulate_norm, lambda done: tell((len(names) + done) / total))
    sources = ''.join(read[name] for name in sorted(read))
    weights = hashlib.sha256(f'{weights_digest(given)}{sources}'.encode()).hexdigest()
    return Digests(weights, weights_digest({MODULATION: table}), of_scales)


def _load_quantised(
    c: Pi0Config, buffers: BufferSet, fill: Fill, name: str, largest: float
) -> str:
    """Fill a quantised product's buffers; return the digest of the weight as it was given."""
    data, spec = buffers[name].tensor, weight_specs(c)[name]
    scale, of_input, both = (buffers[f'{name}.{kind}'].tensor for kind in SCALES)
    given = torch.empty(spec.shape, dtype=spec.dtype, device=data.device)
    fill(name, given)
    quantise_into(given, data, scale)
    of_input.fill_(input_scale(largest))
    torch.mul(scale, of_input, out=both)
    return weights_digest({name: given})


def plain_digest(c: Pi0Config, buffers: BufferSet, known: Mapping[str, str]) -> str:
    """Return the digest of the weights as given, equal in every precision; what scales belong to.

    :param known: digests of the weights that the buffers no longer hold as given.
    """
    each = [known.get(name) or weights_digest({name: buffers[name].tensor})
            for name in sorted(weight_specs(c))]
    return hashlib.sha256(''.join(each).encode()).hexdigest()
