"""Pi0 checkpoints: three code bases' names, and every way a file can fail to fit."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
import json
import math
from pathlib import Path
import re

from _pi0 import bound
from _pi0 import observation
from _pi0 import SMALL
from _pi0_reference import reference_model
import numpy as np
import pytest
from safetensors.torch import save_file
import torch

from flashrt_core.checkpoints import check_keys
from flashrt_core.checkpoints import pi0_canonical
from flashrt_core.checkpoints import pi0_ignored
from flashrt_core.checkpoints import pi0_targets
from flashrt_core.checkpoints import SafetensorsReader
from flashrt_core.errors import ConfigError
from flashrt_core.policies.pi0 import Pi0Policy
from flashrt_core.policies.pi0.config import PI0
from flashrt_core.policies.pi0.weights import weight_specs
from flashrt_core.runtime import cpu_backend

EMBED = 'model.vlm.language_model.embed_tokens.weight'
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope='module')
def stored() -> Tensors:
    return {k: v.detach().contiguous() for k, v in reference_model(SMALL).state_dict().items()}


@pytest.fixture(scope='module')
def expected(stored: Tensors, tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    return actions_of(save(stored, tmp_path_factory.mktemp('expected')))


def save(tensors: Tensors, folder: Path, name: str = 'model.safetensors') -> Path:
    save_file(tensors, folder / name)
    return folder / name


def actions_of(path: Path) -> np.ndarray:
    with bound(cpu_backend(), weights=str(path), row_keys=(1,)) as session:
        return session.tick(observation()).actions


def renamed(tensors: Tensors, rename: Callable[[str], str]) -> Tensors:
    return {rename(name): value for name, value in tensors.items()}


def older_transformers(name: str) -> str:
    return name.replace('vision_tower.', 'vision_tower.vision_model.')


def openpi(name: str) -> str:
    name = re.sub(r'^embed_action_time\.', '', name)
    name = name.replace('model.vlm.', 'paligemma_with_expert.paligemma.model.')
    name = name.replace('vision_tower.', 'vision_tower.vision_model.')
    return name.replace('model.dit.', 'paligemma_with_expert.gemma_expert.model.')


def lerobot(name: str) -> str:
    return f'model.{openpi(name)}'


def early_lerobot(name: str) -> str:
    name = openpi(name).replace('model.language_model.', 'language_model.model.')
    return f"model.{name.replace('paligemma.model.', 'paligemma.')}"


@pytest.mark.parametrize('rename', [older_transformers, openpi, lerobot, early_lerobot])
def test_every_code_bases_names_load_the_same_weights(stored, expected, tmp_path, rename):
    assert set(renamed(stored, rename)) != set(stored)
    np.testing.assert_array_equal(actions_of(save(renamed(stored, rename), tmp_path)), expected)


def test_a_checkpoint_written_by_transformers_loads(expected, tmp_path):
    reference_model(SMALL).save_pretrained(tmp_path)
    np.testing.assert_array_equal(actions_of(tmp_path), expected)


def test_the_embedding_may_be_stored_as_the_tied_head_alone(stored, expected, tmp_path):
    tied = {**stored, 'paligemma_with_expert.paligemma.lm_head.weight': stored[EMBED]}
    del tied[EMBED]
    np.testing.assert_array_equal(actions_of(save(tied, tmp_path)), expected)


def test_shards_in_a_folder_load_as_one(stored, expected, tmp_path):
    names = sorted(stored)
    for i in range(2):
        save({n: stored[n] for n in names[i::2]}, tmp_path, f'model-{i}.safetensors')
    np.testing.assert_array_equal(actions_of(tmp_path), expected)


@pytest.mark.parametrize('config', [SMALL, PI0])
def test_the_key_map_names_every_weight_with_its_shape_once(config):
    targets, specs = pi0_targets(config), weight_specs(config)
    assert sorted(t.name for t in targets) == sorted(specs)
    for target in targets:
        rows = sum(source.shape[0] for source in target.sources)
        size = sum(int(np.prod(source.shape)) for source in target.sources)
        assert rows == specs[target.name].shape[0], target.name
        assert size == int(np.prod(specs[target.name].shape)), target.name


# -- what does not fit --------------------------------------------------------------------------


def load(tensors: Tensors) -> dict[str, str]:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return check_keys(
        pi0_targets(SMALL), shapes, pi0_canonical, partial(pi0_ignored, SMALL), 'the file')


def test_any_single_missing_key_is_named(stored):
    for target in pi0_targets(SMALL):
        for source in target.sources:
            name = next(n for n in stored if pi0_canonical(n) == source.key)
            with pytest.raises(ConfigError, match=f'{re.escape(source.key)}.* is missing'):
                load({k: v for k, v in stored.items() if k != name})


def test_a_key_left_over_is_named(stored):
    with pytest.raises(ConfigError, match=r"layers\.9\.mlp\.up_proj\.weight' is not part"):
        load({**stored, 'model.dit.layers.9.mlp.up_proj.weight': torch.zeros(1)})


def test_a_key_of_another_shape_is_named_with_both_shapes(stored):
    name = 'model.dit.layers.0.self_attn.q_proj.weight'
    with pytest.raises(ConfigError, match=rf'{name}.*\[3, 32\], need \[64, 32\]'):
        load({**stored, name: torch.zeros(3, 32)})


def test_one_weight_under_two_names_is_refused(stored):
    name = 'action_out_proj.bias'
    with pytest.raises(ConfigError, match='are the same weight'):
        load({**stored, f'model.{name}': stored[name]})


def test_many_problems_are_counted(stored):
    with pytest.raises(ConfigError, match=r'and \d+ more; give a checkpoint'):
        load({k: v for k, v in stored.items() if 'encoder' not in k})


def test_keys_that_inference_never_reads_may_be_there_or_not(stored):
    unused = [n for n in stored if pi0_ignored(SMALL, pi0_canonical(n))]
    assert 'model.dit.embed_tokens.weight' in unused
    assert 'model.vlm.language_model.layers.1.mlp.up_proj.weight' in unused
    load({k: v for k, v in stored.items() if k not in unused})


def test_an_ignored_key_never_hides_a_needed_one(stored):
    needed = {source.key for target in pi0_targets(SMALL) for source in target.sources}
    assert not [key for key in needed if pi0_ignored(SMALL, key)]


# -- files --------------------------------------------------------------------------------------


def test_files_that_are_not_safetensors_are_refused(tmp_path):
    pickled = tmp_path / 'model.safetensors'
    torch.save({'a': torch.zeros(1)}, pickled)
    for path, message in (
        (pickled, 'cannot be read as safetensors'), (tmp_path / 'none', 'do not exist')):
        with pytest.raises(ConfigError, match=message):
            SafetensorsReader(path)
    empty = tmp_path / 'empty'
    empty.mkdir()
    with pytest.raises(ConfigError, match=r'no \.safetensors'):
        SafetensorsReader(empty)


@pytest.mark.parametrize('cut', [0, 4, 8, 100, 2000, -1])
def test_a_truncated_file_is_refused(stored, tmp_path, cut):
    path = save(stored, tmp_path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ConfigError, match='cannot be read as safetensors'):
        Pi0Policy().bind(cpu_backend(), replace(SMALL, weights=str(path)))


def test_a_path_that_may_not_be_looked_at_is_refused(tmp_path, monkeypatch):
    def refuse(self):
        raise PermissionError(13, 'Permission denied')

    monkeypatch.setattr(Path, 'is_dir', refuse)
    with pytest.raises(ConfigError, match='Permission denied'):
        SafetensorsReader(tmp_path)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match='too long'):
        SafetensorsReader('x' * 5000)


@pytest.mark.parametrize('value', [math.nan, math.inf, -math.inf, 1e39])
def test_weights_that_are_not_finite_are_named(stored, tmp_path, value):
    damaged = stored['action_out_proj.weight'].double()
    damaged[1, 2] = value
    path = save({**stored, 'action_out_proj.weight': damaged}, tmp_path)
    with pytest.raises(ConfigError, match=r"'action_out_proj\.weight' hold NaN or infinity"):
        Pi0Policy().bind(cpu_backend(), replace(SMALL, weights=str(path)))


@pytest.mark.parametrize('dtype', [torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_weights_of_another_kind_are_not_cast(stored, tmp_path, dtype):
    path = save({**stored, 'action_out_proj.weight':
                 stored['action_out_proj.weight'].to(dtype)}, tmp_path)
    with pytest.raises(ConfigError, match=f'{dtype}.*float32'):
        Pi0Policy().bind(cpu_backend(), replace(SMALL, weights=str(path)))


def test_a_name_in_two_shards_is_refused(stored, tmp_path):
    for i in range(2):
        save({'a': torch.zeros(1)}, tmp_path, f'{i}.safetensors')
    with pytest.raises(ConfigError, match="'a' twice"):
        SafetensorsReader(tmp_path)


def sharded(stored: Tensors, folder: Path) -> list[Path]:
    """Write a checkpoint in two shards and the index that names them."""
    names = sorted(stored)
    files = [f'model-0000{i}-of-00002.safetensors' for i in (1, 2)]
    paths = [save({n: stored[n] for n in names[i::2]}, folder, f) for i, f in enumerate(files)]
    record = {'metadata': {}, 'weight_map': {n: files[i % 2] for i, n in enumerate(names)}}
    (folder / 'model.safetensors.index.json').write_text(json.dumps(record))
    return paths


def test_a_shard_that_the_index_names_and_nobody_copied_is_named(stored, expected, tmp_path):
    shards = sharded(stored, tmp_path)
    np.testing.assert_array_equal(actions_of(tmp_path), expected)
    shards[1].unlink()
    with pytest.raises(ConfigError, match=r"lack .*'model-00002-of-00002\.safetensors'.* index"):
        SafetensorsReader(tmp_path)


def test_an_index_of_shards_that_were_merged_since_does_not_matter(stored, expected, tmp_path):
    for shard in sharded(stored, tmp_path):
        shard.unlink()
    save(stored, tmp_path)
    np.testing.assert_array_equal(actions_of(tmp_path), expected)


@pytest.mark.parametrize('text', [b'{', b'[]', b'{}', b'{"weight_map": 3}',
                                  b'{"weight_map": {"a": 3}}'])
def test_an_index_that_is_none_is_refused(stored, tmp_path, text):
    save(stored, tmp_path)
    (tmp_path / 'model.safetensors.index.json').write_bytes(text)
    with pytest.raises(ConfigError, match=r'index\.json'):
        SafetensorsReader(tmp_path)


def test_a_pointer_that_git_left_in_a_files_place_is_called_so(tmp_path):
    path = tmp_path / 'model.safetensors'
    path.write_text('version https://git-lfs.github.com/spec/v1\noid sha256:a\nsize 5\n')
    with pytest.raises(ConfigError, match=r'a Git LFS pointer.*git lfs pull'):
        SafetensorsReader(tmp_path)


def test_a_folder_whose_weights_lie_further_down_says_where(stored, tmp_path):
    blob = save(stored, tmp_path, 'blob')
    snapshot = tmp_path / 'models--a--b' / 'snapshots' / 'abc'
    snapshot.mkdir(parents=True)
    (snapshot / 'model.safetensors').symlink_to(blob)
    assert set(SafetensorsReader(snapshot).shapes) == set(stored)
    with pytest.raises(ConfigError, match=rf'no \.safetensors file; give {snapshot}'):
        SafetensorsReader(tmp_path / 'models--a--b')


def test_a_session_whose_weights_do_not_fit_is_not_made(stored, tmp_path):
    path = save({k: v for k, v in stored.items() if k != 'action_out_proj.bias'}, tmp_path)
    with pytest.raises(ConfigError, match=r'has shape \[32\], need \[96\]'):
        Pi0Policy().bind(cpu_backend(), {'base': 'tiny', 'weights': str(path)})
    with pytest.raises(ConfigError, match=r"'action_out_proj\.bias' is missing"):
        with bound(cpu_backend(), weights=str(path)):
            pass
