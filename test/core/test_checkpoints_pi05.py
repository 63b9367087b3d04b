"""Pi0.5 checkpoints: every layout loads to the same actions; another family is told by name."""
from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
import re

from _pi0 import SMALL
from _pi0_reference import reference_model
from _pi05 import bound05
from _pi05 import CONFIG
from _pi05 import lerobot_tensors
from _pi05 import save
from _pi05 import Tensors
from _pi05 import tick_input
import numpy as np
import pytest
from recipe import CASES
import torch

from flashrt_core.capsule import CapsuleStore
from flashrt_core.checkpoints import check_keys
from flashrt_core.checkpoints import pi0_canonical
from flashrt_core.checkpoints import pi0_check_family
from flashrt_core.checkpoints import pi0_ignored
from flashrt_core.checkpoints import pi0_targets
from flashrt_core.checkpoints import SafetensorsReader
from flashrt_core.errors import ConfigError
from flashrt_core.errors import IdentityMismatch
from flashrt_core.policies.pi0 import Pi0Policy
from flashrt_core.policies.pi0.config import PI05
from flashrt_core.policies.pi0.modulation import MODULATION
from flashrt_core.policies.pi0.modulation import source_specs
from flashrt_core.policies.pi0.weights import weight_specs
from flashrt_core.runtime import cpu_backend

EXPERT = 'paligemma_with_expert.gemma_expert.model'
CASE = CASES['three']


@pytest.fixture(scope='module')
def stored() -> Tensors:
    return lerobot_tensors()


def actions_of(path: Path, **changes: object) -> np.ndarray:
    with bound05(cpu_backend(), path, row_keys=(1,), **changes) as session:
        return session.tick(tick_input(session, CASE)).actions


@pytest.fixture(scope='module')
def expected(stored: Tensors, tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    return actions_of(save(stored, tmp_path_factory.mktemp('expected')))


def openpi(name: str) -> str:
    return name.removeprefix('model.')


def transformers_like(name: str) -> str:
    """Name a tensor as transformers' PI0 classes would."""
    name = openpi(name).replace('paligemma_with_expert.paligemma.model.', 'model.vlm.')
    name = name.replace(f'{EXPERT}.', 'model.dit.')
    name = name.replace('vision_tower.vision_model.', 'vision_tower.')
    return re.sub(r'^(action_in_proj|time_mlp_in|time_mlp_out)\.', r'embed_action_time.\1.', name)


@pytest.mark.parametrize('rename', [openpi, transformers_like])
def test_every_layout_loads_to_identical_actions(stored, expected, tmp_path, rename):
    renamed = {rename(name): value for name, value in stored.items()}
    assert set(renamed) != set(stored)
    np.testing.assert_array_equal(actions_of(save(renamed, tmp_path)), expected)


def test_the_golden_checkpoint_has_the_names_that_lerobot_writes(stored):
    assert f'model.{EXPERT}.layers.0.input_layernorm.dense.weight' in stored
    assert 'model.time_mlp_in.weight' in stored and 'model.state_proj.weight' not in stored


def test_what_inference_never_reads_may_be_missing(stored, expected, tmp_path):
    read = {n: v for n, v in stored.items() if not pi0_ignored(CONFIG, pi0_canonical(n))}
    assert len(read) < len(stored)
    np.testing.assert_array_equal(actions_of(save(read, tmp_path)), expected)


def test_a_folder_with_shards_and_lerobots_processor_files_loads(stored, expected, tmp_path):
    names = sorted(stored)
    for i in range(3):
        save({n: stored[n] for n in names[i::3]}, tmp_path, f'model-{i}.safetensors')
    save({'observation.state.mean': torch.zeros(4)}, tmp_path,
         'policy_preprocessor_step_2_normalizer_processor.safetensors')
    np.testing.assert_array_equal(actions_of(tmp_path), expected)


def test_half_precision_files_load(stored, tmp_path, expected):
    halved = {n: v.to(torch.bfloat16) for n, v in stored.items()}
    actions = actions_of(save(halved, tmp_path))
    a, b = actions.ravel(), expected.ravel()
    assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > 0.99


@pytest.mark.parametrize('config', [CONFIG, PI05])
def test_the_key_map_names_every_weight_and_every_source_of_the_modulation_once(config):
    targets, specs = pi0_targets(config), weight_specs(config) | source_specs(config)
    assert sorted(t.name for t in targets) == sorted(specs)
    for target in targets:
        size = sum(int(np.prod(source.shape)) for source in target.sources)
        assert size == int(np.prod(specs[target.name].shape)), target.name


def load(tensors: Tensors) -> dict[str, str]:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return check_keys(
        pi0_targets(CONFIG), shapes, pi0_canonical, partial(pi0_ignored, CONFIG), 'the file')


def test_any_single_missing_key_is_named(stored):
    for key in (s.key for t in pi0_targets(CONFIG) for s in t.sources):
        rest = {n: v for n, v in stored.items() if pi0_canonical(n) != key}
        if key == 'vlm.language_model.embed_tokens.weight':
            rest = {n: v for n, v in rest.items() if 'lm_head' not in n}
        with pytest.raises(ConfigError, match=f'{re.escape(key)}.* is missing'):
            load(rest)


def test_a_plain_norm_in_the_expert_is_left_over(stored):
    name = f'model.{EXPERT}.layers.0.input_layernorm.weight'
    with pytest.raises(ConfigError, match=r'input_layernorm\.weight.* is not part'):
        load({**stored, name: torch.zeros(32)})


def test_a_misshapen_modulation_is_named_with_both_shapes(stored):
    name = f'model.{EXPERT}.norm.dense.weight'
    with pytest.raises(ConfigError, match=r'norm\.dense\.weight.*\[32, 32\], need \[96, 32\]'):
        load({**stored, name: torch.zeros(32, 32)})


@pytest.mark.parametrize('name', [f'model.{EXPERT}.norm.dense.bias', 'model.time_mlp_in.weight'])
def test_a_source_of_the_modulation_that_is_not_finite_is_named(stored, tmp_path, name):
    damaged = stored[name].clone()
    damaged.view(-1)[3] = torch.nan
    path = save({**stored, name: damaged}, tmp_path)
    with pytest.raises(ConfigError, match=rf'{re.escape(name)}.*NaN'):
        actions_of(path)


# -- the other family ---------------------------------------------------------------------------


def test_a_pi05_checkpoint_in_a_pi0_config_is_refused_by_what_it_is(stored, tmp_path):
    path = save(stored, tmp_path)
    with pytest.raises(ConfigError, match=r'are of Pi0\.5 .*the config is of Pi0 .*base: pi05'):
        Pi0Policy().bind(cpu_backend(), replace(SMALL, weights=str(path)))


def test_a_pi0_checkpoint_in_a_pi05_config_is_refused_by_what_it_is(tmp_path):
    tensors = {k: v.contiguous() for k, v in reference_model(SMALL).state_dict().items()}
    path = save(tensors, tmp_path)
    with pytest.raises(ConfigError, match=r'are of Pi0 .*the config is of Pi0\.5 .*base: pi0,'):
        actions_of(path)


def test_a_checkpoint_that_does_not_fit_is_refused_before_anything_is_allocated(
    stored, tmp_path, monkeypatch
):
    monkeypatch.setattr('flashrt_core.policies.pi0.bind.BufferSet', None)
    path = save({n: v for n, v in stored.items() if 'action_in_proj' not in n}, tmp_path)
    with pytest.raises(ConfigError, match=r'action_in_proj\.weight.* is missing'):
        actions_of(path)
    with pytest.raises(ConfigError, match='do not exist'):
        actions_of(tmp_path / 'none.safetensors')


def test_a_single_key_tells_the_family():
    pi0_check_family(CONFIG, ['action_in_proj.weight'], 'x')  # of both
    for name in ('model.state_proj.bias', 'action_time_mlp_in.weight'):
        with pytest.raises(ConfigError, match='are of Pi0 '):
            pi0_check_family(CONFIG, [name], 'x')
    for name in ('time_mlp_out.bias', 'model.dit.layers.3.input_layernorm.dense.bias'):
        with pytest.raises(ConfigError, match=r'are of Pi0\.5 '):
            pi0_check_family(SMALL, [name], 'x')


def test_a_policy_refuses_a_config_of_the_other_family():
    with pytest.raises(ConfigError, match=r"policy is 'pi05', its config is of the family 'pi0'; "
                       "give one of 'pi05' as its config, as pi05 or pi05_tiny, or .* 'pi0'"):
        Pi0Policy('pi05').bind(cpu_backend(), SMALL)
    with pytest.raises(ConfigError, match=r"'pi0', its config is of the family 'pi05'; .*"
                       'as pi0 or tiny, or'):
        Pi0Policy('pi0').bind(cpu_backend(), CONFIG)


# -- identity -----------------------------------------------------------------------------------


def test_the_identity_covers_what_the_modulation_was_made_of(stored, tmp_path):
    name = f'model.{EXPERT}.layers.1.post_attention_layernorm.dense.bias'
    other = {**stored, name: stored[name] + 1}
    paths = [save(stored, tmp_path, 'a.safetensors'), save(other, tmp_path, 'b.safetensors')]
    store = CapsuleStore(cpu_backend(), 16 << 20, 16 << 20)
    with bound05(cpu_backend(), paths[0]) as a, bound05(cpu_backend(), paths[1]) as b:
        mine, theirs = a.boundary.identity, b.boundary.identity
        assert mine.layout['weights'] != theirs.layout['weights']
        assert mine.numerics['modulation'] != theirs.numerics['modulation']
        a.lane.call(lambda: store.snapshot(a.boundary, 'c0')).result()
        with pytest.raises(IdentityMismatch, match='weights'):
            b.lane.call(lambda: store.restore(b.boundary, 'c0')).result()
    store.close()


def test_a_table_rounded_elsewhere_is_other_numerics_and_the_same_layout(stored, tmp_path):
    path = save(stored, tmp_path)
    with bound05(cpu_backend(), path) as session:
        again = session.boundary.identity
    with pytest.MonkeyPatch.context() as patch:
        from flashrt_core.policies.pi0 import load as loading

        modulate = loading.modulate
        patch.setattr(loading, 'modulate', lambda *given: modulate(*given) * (1 + 1e-6))
        with bound05(cpu_backend(), path) as session:
            rounded = session.boundary.identity
            assert session.buffers[MODULATION].tensor.isfinite().all()
    assert rounded.layout_digest == again.layout_digest
    assert [field for _, field, *_ in rounded.diff(again)] == ['modulation']


# -- reading ------------------------------------------------------------------------------------


def test_a_tensor_is_read_in_pieces_of_a_bounded_size(stored, expected, tmp_path, monkeypatch):
    monkeypatch.setattr('flashrt_core.checkpoints.reader.PIECE_BYTES', 1000)
    path = save(stored, tmp_path)
    with SafetensorsReader(path) as reader:
        for name, tensor in stored.items():
            pieces = list(reader.pieces(name))
            row = tensor[:1].nbytes
            assert all(piece.nbytes <= max(1000, row) for _, piece in pieces)
            assert [at for at, _ in pieces] == list(range(0, len(tensor), max(1, 1000 // row)))
            assert torch.cat([piece for _, piece in pieces]).equal(tensor)
    np.testing.assert_array_equal(actions_of(path), expected)


def test_what_was_read_leaves_the_page_cache_where_memory_is_shared(stored, tmp_path, monkeypatch):
    path = save(stored, tmp_path)
    dropped = []
    monkeypatch.setattr('os.posix_fadvise', lambda *given: dropped.append(given[1:3]))
    with SafetensorsReader(path, drop_cache=True) as reader:
        for name in reader.shapes:
            reader.read(name)
        assert sum(size for _, size in dropped) == sum(t.nbytes for t in stored.values())
    assert dropped[-1] == (0, 0)  # the rest of the file
    dropped.clear()
    with SafetensorsReader(path) as reader:
        reader.read(next(iter(reader.shapes)))
    assert not dropped


def test_a_file_cut_after_it_was_opened_is_refused(stored, tmp_path):
    path = save(stored, tmp_path)
    with SafetensorsReader(path) as reader:
        with path.open('r+b') as file:
            file.truncate(path.stat().st_size // 2)
        last = max(reader.shapes, key=lambda name: reader._where[name].offset)
        with pytest.raises(ConfigError, match='ends early'):
            reader.read(last)
