"""Pi0 and Pi0.5 in FP8: near the plain layers on frames that calibration never saw."""
from __future__ import annotations

from contextlib import closing
from dataclasses import replace
import math
from pathlib import Path
from typing import Any

from _pi0 import bound
from _pi0 import lived_in
from _pi0 import observation
from _pi0 import same_bits
from _pi0 import SMALL
from _pi0 import state_of
import numpy as np
import pytest
import torch

from flashrt_core.capsule import CapsuleStore
from flashrt_core.errors import ConfigError
from flashrt_core.errors import IdentityMismatch
from flashrt_core.nn import fp8
from flashrt_core.policies import TickInput
from flashrt_core.policies.calibration import load_scales
from flashrt_core.policies.calibration import save_scales
from flashrt_core.policies.pi0 import Pi0Config
from flashrt_core.policies.pi0 import Pi0Policy
from flashrt_core.policies.pi0 import Pi0Session
from flashrt_core.policies.pi0.calibration import calibrate
from flashrt_core.policies.pi0.config import load_config
from flashrt_core.policies.pi0.config import PI0
from flashrt_core.policies.pi0.config import PI05
from flashrt_core.policies.pi0.config import PI05_TINY
from flashrt_core.policies.pi0.config import TINY
from flashrt_core.policies.pi0.graphs import forward_of
from flashrt_core.policies.pi0.layout import buffer_specs
from flashrt_core.policies.pi0.weights import products
from flashrt_core.policies.pi0.weights import weight_specs
from flashrt_core.policies.protocol import MemoryNeed
from flashrt_core.runtime import Backend
from flashrt_core.runtime import cpu_backend
from flashrt_core.runtime import cuda_backend

SEEN, UNSEEN = range(1000, 1008), range(50)  # draws of observations


def look(c: Pi0Config, draw: int) -> TickInput:
    """Give a random observation whose chunk joins nothing before it."""
    return observation(c, draw, steps_executed=c.horizon, seed=draw)


def quantised(c: Pi0Config, folder: Path, backend: Backend | None = None) -> Pi0Config:
    """Give the config in FP8, calibrated on random frames."""
    backend = backend or cpu_backend()
    path = folder / f'{c.family}.json'
    save_scales(calibrate(backend, c, [look(c, draw) for draw in SEEN]), path)
    return replace(c, precision='fp8', scales=str(path))


def actions(backend: Backend, c: Pi0Config) -> list[np.ndarray]:
    with bound(backend, c) as session:
        return [session.tick(look(c, draw)).actions.astype(np.float64).ravel()
                for draw in UNSEEN]


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize('base', [TINY, PI05_TINY], ids=['pi0', 'pi05'])
def test_fifty_unseen_observations_act_as_in_float32_and_the_error_is_told_in_that_of_bf16(
        base: Pi0Config, tmp_path: Path) -> None:
    backend = cpu_backend()
    plain = replace(base, dtype='bfloat16', rows=1, row_keys=(1,), relative=())
    exact = actions(backend, replace(plain, dtype='float32'))
    found = {'bf16': actions(backend, plain),
             'fp8': actions(backend, quantised(plain, tmp_path))}
    error = {name: np.mean([np.linalg.norm(a - b) / np.linalg.norm(b)
                            for a, b in zip(made, exact, strict=True)])
             for name, made in found.items()}
    worst = min(cosine(a, b) for a, b in zip(found['fp8'], exact, strict=True))
    print(f'{base.family}: worst cosine {worst:.5f}, mean error of FP8 {error["fp8"]:.4f}, '
          f'{error["fp8"] / error["bf16"]:.1f} times that of bfloat16')
    assert worst >= 0.995
    assert error['fp8'] > 2 * error['bf16'], 'the products were not in FP8'


@pytest.fixture(scope='module')
def small(tmp_path_factory: pytest.TempPathFactory) -> Pi0Config:
    """Give the very small config in FP8."""
    return quantised(replace(SMALL, dtype='bfloat16'), tmp_path_factory.mktemp('scales'))


def test_the_prefix_weights_are_kept_once_in_half_the_bytes_the_rest_in_bfloat16(
        small: Pi0Config) -> None:
    # The scales of so small a model weigh too much: sizes nearer the published ones.
    wide = replace(TINY, dtype='bfloat16')
    plain = MemoryNeed.of(buffer_specs(wide), 1).constants
    packed = MemoryNeed.of(buffer_specs(replace(wide, precision='fp8', scales='x')), 1).constants
    specs = weight_specs(wide)
    matrices = sum(2 * math.prod(specs[name].shape) for name in products(wide))
    assert 0.45 * matrices < plain - packed < 0.5 * matrices
    with bound(cpu_backend(), small) as session:
        names = products(session.config)
        assert len(names) == 4 * 1 + 1
        held = {b.name: b.tensor.dtype for b in session.buffers}
        assert {name for name, dtype in held.items() if dtype == fp8.E4M3} == set(names)
        rest = [n for n, spec in weight_specs(small).items() if len(spec.shape) == 2
                and n.startswith(('vision.layers.', 'expert.layers.', 'projector.'))]
        assert len(rest) == 4 * 2 + 4 * 2 + 1
        assert all(held[name] == torch.bfloat16 for name in rest)
        assert session.buffers['prefix_kv'].tensor.dtype == torch.bfloat16


def test_a_restore_repeats_the_actions_and_the_identity_holds_precision_and_scales(
        backend: Backend, small: Pi0Config, tmp_path: Path) -> None:
    c = small if backend.name == 'cpu' else quantised(
        replace(SMALL, dtype='bfloat16'), tmp_path, backend)
    other = tmp_path / 'other.json'
    scales = calibrate(backend, c, [look(c, draw) for draw in range(2000, 2008)])
    save_scales(scales, other)
    store = CapsuleStore(backend, 8 << 20, 8 << 20)

    def restore(to: Pi0Session) -> None:
        to.lane.at_segment_end(lambda: store.restore(to.boundary, 'c0')).result()

    with bound(backend, c) as session, closing(store):
        lived_in(session)
        session.lane.at_boundary(lambda: store.snapshot(session.boundary, 'c0')).result()
        before = state_of(session)
        first = session.tick(observation(c, 9)).actions
        restore(session)
        after = state_of(session)
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert same_bits(session.tick(observation(c, 9)).actions, first)
        layout = session.boundary.identity.layout
        assert layout['config.precision'] == '"fp8"' and len(layout['scales']) == 64
        for foreign, field in ((replace(c, precision='', scales=''), 'config.precision'),
                               (replace(c, scales=str(other)), 'scales')):
            with bound(backend, foreign) as wrong:
                with pytest.raises(IdentityMismatch, match=field):
                    restore(wrong)


def test_scales_of_other_weights_are_refused(small: Pi0Config) -> None:
    with pytest.raises(ConfigError, match='calibrate again'):
        Pi0Policy().bind(cpu_backend(), replace(small, weight_seed=1))


def test_a_file_that_has_scales_of_the_expert_is_refused(
        small: Pi0Config, tmp_path: Path) -> None:
    scales = load_scales(small.scales, small.family, products(small))
    path = tmp_path / 'older.json'
    save_scales(replace(scales, largest={**scales.largest, 'expert.layers.0.qkv': 1.0}), path)
    with pytest.raises(ConfigError, match=r"expert\.layers\.0\.qkv'\] \(1\).*calibrate again"):
        Pi0Policy().bind(cpu_backend(), replace(small, scales=str(path)))


def test_a_device_without_fp8_is_told_to_take_bf16(
        small: Pi0Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, 'selected', lambda device: False)
    with pytest.raises(ConfigError, match=r'does not multiply E4M3.*set precision: bf16') as error:
        Pi0Policy().bind(cpu_backend(), small)
    assert error.value.code == 'config_invalid'


@pytest.mark.parametrize('change, message', [
    ({'precision': 'int8', 'scales': ''}, "precision 'int8' is unknown"),
    ({'scales': ''}, r'needs scales; make the file with python -m .*or set precision: bf16'),
    ({'precision': 'bf16', 'dtype': 'float32'}, 'set dtype: bfloat16'),
    ({'prefix': replace(SMALL.prefix, mlp=40)}, '16 divides'),
])
def test_a_precision_that_cannot_be_is_refused(
        small: Pi0Config, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(small, **change)


def test_a_missing_file_of_scales_is_refused_before_weights_are_read(small: Pi0Config) -> None:
    c = replace(small, scales='/nowhere/scales.json', weights='/nowhere/weights')
    with pytest.raises(ConfigError, match=r'scales /nowhere/scales\.json cannot be read'):
        Pi0Policy().bind(cpu_backend(), c)


def test_a_file_of_scales_may_lie_beside_the_config(tmp_path: Path) -> None:
    (tmp_path / 'scales.json').write_text('{}')
    (tmp_path / 'policy.yaml').write_text(
        'policy: pi0\nbase: tiny\nprecision: fp8\nscales: scales.json\n')
    assert load_config(tmp_path / 'policy.yaml').scales == str(tmp_path / 'scales.json')


def test_too_few_dark_and_constant_frames_are_refused() -> None:
    c = replace(SMALL, dtype='bfloat16')
    seen = [look(c, draw) for draw in SEEN]
    with pytest.raises(ConfigError, match='has 7 frames a view'):
        calibrate(cpu_backend(), c, seen[:7])
    for value, message in ((3, 'is dark'), (90, 'is nearly one colour')):
        images = {**seen[4].images, 'wrist': np.full((28, 28, 3), value, np.uint8)}
        with pytest.raises(ConfigError, match=f"frame 4 of view 'wrist' {message}"):
            calibrate(cpu_backend(), c, [*seen[:4], replace(seen[4], images=images), *seen[5:]])
    half = [replace(t, images={'top': t.images['top']}) for t in seen]
    with pytest.raises(ConfigError, match='give every view as many'):
        calibrate(cpu_backend(), c, half)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize('base', [PI0, PI05], ids=['pi0', 'pi05'])
def test_at_real_size_fifty_unseen_observations_act_as_in_float32(
        base: Pi0Config, tmp_path: Path) -> None:
    backend = cuda_backend()
    plain = replace(base, views=('a', 'b'), vocab=1000)
    packed = quantised(plain, tmp_path, backend)
    assert forward_of(packed, backend.device).__name__.endswith('fast')
    exact = actions(backend, replace(plain, dtype='float32'))
    worst = min(map(cosine, actions(backend, packed), exact))
    print(f'{base.family}: worst cosine {worst:.5f}')
    assert worst >= 0.995
