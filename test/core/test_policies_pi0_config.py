"""Pi0's config: names, files, overrides, and what is refused."""
from __future__ import annotations

from dataclasses import fields
from dataclasses import replace
import math
from pathlib import Path
import re
from typing import Any

from _pi0 import SMALL
import pytest
import yaml

from flashrt_core.errors import ConfigError
from flashrt_core.errors import OutOfMemory
from flashrt_core.nn import GemmaDims
from flashrt_core.policies.pi0 import load_config
from flashrt_core.policies.pi0 import Pi0Policy
from flashrt_core.policies.pi0 import Statistics
from flashrt_core.policies.pi0.config import NAMED
from flashrt_core.policies.pi0.config import PI0
from flashrt_core.policies.pi0.config import Pi0Config
from flashrt_core.policies.pi0.config import PI05
from flashrt_core.policies.pi0.modulation import source_specs
from flashrt_core.policies.pi0.modulation import table_spec
from flashrt_core.policies.pi0.weights import random_weight
from flashrt_core.policies.pi0.weights import weight_specs
from flashrt_core.runtime import cpu_backend
from flashrt_core.runtime import MemoryInfo

CONFIG = Path(__file__).parents[2] / 'config'


@pytest.mark.parametrize('name, file', [
    ('tiny', 'pi0_tiny'), ('pi0', 'pi0'), ('pi05_tiny', 'pi05_tiny'), ('pi05', 'pi05')])
def test_a_name_and_its_file_give_the_same_config(name, file):
    file = CONFIG / f'{file}.yaml'
    assert load_config(name) == load_config(file) == load_config(str(file)) == NAMED[name]


@pytest.mark.parametrize('file', ['pi0', 'pi05'])
def test_the_file_of_a_published_size_gives_every_setting_there_is(file):
    text = (CONFIG / f'{file}.yaml').read_text()
    uncommented = re.sub(r'^# (?=statistics:|  \w)', '', text, flags=re.M)
    given = yaml.safe_load(text) | yaml.safe_load(uncommented)
    named = {f.name for f in fields(Pi0Config)} - {'family'}  # the base's, checked against policy
    if file == 'pi0':
        named -= {'state_tokens'}  # none
    assert set(given) == named | {'policy', 'base'}
    for part in ('vision', 'prefix', 'expert', 'statistics'):
        assert set(given[part]) == {f.name for f in fields(getattr(PI0, part))}, part
    settings = [line for line in text.splitlines() if re.match(r'(# )? *\w+: ', line)]
    bare = [line for line in settings if '#' not in line[2:] and not line.startswith('#')]
    assert {line.split(':')[0] for line in bare} <= {
        'policy', 'vocab', 'action_width', 'max_period', 'vision', 'prefix', 'expert'}, bare


def test_a_mapping_overrides_single_values_of_its_base():
    config = load_config({
        'base': 'tiny', 'horizon': 16, 'vision': {'layers': 1}, 'views': ['top'],
        'statistics': {'state_mean': [1, 2, 3, 4]}})
    assert (config.horizon, config.vision.layers, config.views) == (16, 1, ('top',))
    assert config.statistics.state_mean == (1.0, 2.0, 3.0, 4.0)
    assert config.vision.width == NAMED['tiny'].vision.width


@pytest.mark.parametrize('record, message', [
    ({'base': 'huge'}, "'huge'.*pi0.*tiny"),
    ({'horizn': 3}, 'horizn.*horizon'),
    ({'vision': {'depth': 3}}, 'vision.depth'),
    ({'vision': 3}, 'vision is 3'),
    ({'horizon': 2.5}, 'horizon is 2.5'),
    ({'horizon': True}, 'horizon is True'),
    ({'horizon': '8'}, "horizon is '8'"),
    ({'views': 'top'}, "views is 'top'"),
    ({'views': ['top', 3]}, r'views\[1\] is 3'),
    ({'horizon': 0}, 'horizon is 0'),
    ({'views': []}, 'views'),
    ({'views': ['top', 'top']}, 'views'),
    ({'vision': {'image_size': 85}}, 'image_size 85'),
    ({'expert': {'layers': 2}}, 'layer by layer'),
    ({'state_dim': 9}, 'state_dim 9'),
    ({'blend_steps': 99}, 'blend_steps is 99'),
    ({'blend_steps': -1}, 'blend_steps is -1'),
    ({'relative': [4]}, 'relative'),
    ({'dtype': 'float16'}, 'float16'),
    ({'time_dtype': 'float16'}, 'float16'),
    ({'row_keys': [2]}, 'row_keys'),
    ({'row_keys': [1, 9]}, 'row_keys'),
    ({'seed': -1}, 'seed -1'),
    ({'statistics': {'state_std': [1.0]}}, 'state_std has 1'),
    ({'statistics': {'action_std': [1.0, 1.0, 0.0, 1.0]}}, 'above 0'),
    ({'units': ['rad']}, 'units'),
    ({'units': ['rad', 'deg C', '', 'probability']}, "'deg C'.*without spaces"),
    ({'views': ['top', 'state']}, 'another port'),
    ({'cpu_threads': -1}, 'cpu_threads'),
    ({'base': ['tiny']}, r"base \['tiny'\]"),
    ({'vision': {'patch_size': 0}}, 'vision.patch_size is 0'),
    ({'vision': {'image_size': -84}}, 'vision.image_size is -84'),
    ({'vision': {'heads': 0}}, 'vision.heads is 0'),
    ({'prefix': {'kv_heads': 0}, 'expert': {'kv_heads': 0}}, 'prefix.kv_heads is 0'),
    ({'prefix': {'layers': -1}, 'expert': {'layers': -1}}, 'prefix.layers is -1'),
    ({'prefix': {'eps': -1}}, 'prefix.eps is -1'),
    ({'prefix': {'rope_theta': math.inf}}, 'prefix.rope_theta is inf'),
    ({'min_period': math.nan}, 'min_period nan'),
    ({'min_period': 5.0, 'max_period': 4.0}, 'in this order'),
    ({'min_period': 10**400}, 'min_period is an integer that no float holds'),
    ({'statistics': {'state_mean': [math.nan, 0, 0, 0]}}, 'state_mean.*finite'),
    ({'statistics': {'action_std': [math.inf, 1, 1, 1]}}, 'action_std.*finite'),
    ({'views': ['a b']}, 'views.*characters'),
    ({'views': ['../top']}, 'views.*characters'),
    ({'flow_steps': 10**8}, 'flow_steps is 100000000'),
    ({'family': 'pi1'}, "family 'pi1'"),
    ({'family': 'pi05'}, 'state_tokens is 0'),
    ({'state_tokens': 9}, 'state_tokens is 9'),
    ({'policy': 'pi05'}, "policy 'pi05'.*'tiny'.*pi05_tiny"),
    ({'policy': 'pi0', 'base': 'pi05'}, "policy 'pi0'.*'pi05'"),
    ({'normalisation': 'minmax'}, "normalisation 'minmax'.*quantiles"),
    ({'normalisation': 'quantiles'}, 'hold no state_q01'),
    ({'base': 'pi05_tiny', 'normalisation': 'mean_std'}, 'hold no state_mean'),
    ({'base': 'pi05_tiny', 'statistics': {'state_q99': []}}, 'state_q01 and state_q99 go'),
    ({'base': 'pi05_tiny', 'statistics': {'state_q99': [1.0]}}, 'state_q99 has 1 values; give 4'),
    ({'base': 'pi05_tiny', 'statistics': {'action_q01': [0.25, 0, 0, 0]}}, 'above that of'),
])
def test_a_bad_config_is_refused_by_name(record: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        load_config(record)


def test_files_that_are_no_config_are_refused(tmp_path):
    with pytest.raises(ConfigError, match='neither a file'):
        load_config(tmp_path / 'none.yaml')
    for text, message in ((b'- 1', 'list'), (b'a: [', 'not valid YAML'), (b'', 'NoneType'),
                          (b'\xff\xfe\x00', 'not valid YAML'), (b'[' * 5000, 'not valid YAML'),
                          (b'a: !!python/object/apply:os.system [x]', 'not valid YAML')):
        path = tmp_path / 'bad.yaml'
        path.write_bytes(text)
        with pytest.raises(ConfigError, match=message):
            load_config(path)
    for source, message in (('x' * 5000, 'name too long'), (tmp_path, 'neither a file'),
                            (None, 'None'), (5, '5'), ('a\0b', 'neither a file')):
        with pytest.raises(ConfigError, match=message):
            load_config(source)


def test_sizes_beyond_any_memory_are_refused_without_allocating():
    with pytest.raises(OutOfMemory, match='asked for'):
        Pi0Policy().bind(cpu_backend(), replace(SMALL, horizon=10**12))


@pytest.mark.parametrize('name', ['pi0', 'pi05'])
def test_a_full_size_that_cannot_fit_is_refused_with_its_figures_before_it_is_read(
    name, monkeypatch
):
    backend = cpu_backend()
    free = MemoryInfo(total=4 << 30, free=2 << 30, integrated=True)
    monkeypatch.setattr(backend, 'memory', lambda: free)
    with pytest.raises(OutOfMemory, match=r'free 2048.*tables take 5\.8\d GiB as bfloat16, buff'):
        Pi0Policy().bind(backend, name)


def test_the_full_size_has_the_weights_that_pi0_has():
    specs = weight_specs(PI0)
    count = sum(math.prod(spec.shape) for spec in specs.values())
    # 3.24e9 used by Pi0, less the parts of the prefix' last layer that nothing reads.
    assert 3.10e9 < count < 3.24e9
    assert specs['prefix.embed'].shape == (257152, 2048)
    assert specs['expert.layers.17.qkv'].shape == (2560, 1024)
    assert 'prefix.layers.17.gate_up' not in specs


def test_the_full_pi05_stores_its_modulation_as_a_table_and_reads_200_language_tokens():
    specs, sources = weight_specs(PI05), source_specs(PI05)
    count = sum(math.prod(spec.shape) for spec in specs.values())
    assert 3.10e9 < count < 3.24e9
    assert not [name for name in specs if name.startswith(('time_mlp', 'state_in'))]
    # 37 norms of 1024 -> 3072, and the time MLP; the table is what they come to at ten times.
    assert sum(math.prod(s.shape) for s in sources.values()) == 37 * 3072 * 1025 + 2 * 1024 * 1025
    assert table_spec(PI05).shape == (10, 37, 3, 1024)
    assert PI05.text_tokens == 200 and PI05.prefix_tokens == 968 and PI05.suffix_tokens == 50


def test_random_weights_are_the_same_bits_in_any_order_and_everywhere():
    spec = weight_specs(SMALL)['expert.layers.0.down']
    values = random_weight('expert.layers.0.down', spec, 3)
    assert values.shape == spec.shape and abs(float(values.std()) - spec.scale) < 0.02
    assert [v.hex() for v in values.flatten()[:3].tolist()] == [
        '-0x1.35c5a80000000p-4', '0x1.966e600000000p-6', '0x1.8a52a00000000p-6']
    assert not values.equal(random_weight('expert.layers.0.down', spec, 4))
    assert not values.flatten()[:9].equal(random_weight('expert.norm', spec, 3).flatten()[:9])


def test_the_layout_fields_name_every_setting_that_changes_numbers():
    for change in (
        {'flow_steps': 5}, {'relative': (0,)}, {'statistics': Statistics()},
        {'time_dtype': 'float32'}, {'views': ('wrist', 'top')}, {'dtype': 'bfloat16'},
        {'expert': GemmaDims(64, 2, 4, 2, 16, 48)}, {'normalisation': 'identity'},
        {'family': 'pi05', 'state_tokens': 9, 'normalisation': 'mean_std'},
    ):
        assert replace(SMALL, **change).layout() != SMALL.layout(), change


def test_a_mapping_may_build_on_a_file_and_a_file_on_a_name_only(tmp_path):
    path = tmp_path / 'mine.yaml'
    path.write_text('base: tiny\nhorizon: 16\n')
    config = load_config({'base': str(path), 'chunk_mode': 'rtc'})
    assert (config.horizon, config.chunk_mode) == (16, 'rtc')
    assert load_config({'base': 'tiny', 'chunk_mode': 'sync'}).chunk_mode == 'sync'
    path.write_text(f'base: {path}\n')
    with pytest.raises(ConfigError, match=r'base .* is unknown'):
        load_config(path)
    with pytest.raises(ConfigError, match='neither a file'):
        load_config({'base': str(tmp_path / 'none.yaml')})


def test_a_config_without_its_weights_says_where_they_should_be(tmp_path: Path) -> None:
    config = tmp_path / 'mine.yaml'
    config.write_text('base: tiny\nweights: mine.safetensors\n')
    assert load_config(config).weights == str(tmp_path / 'mine.safetensors')
    config.write_text('base: tiny\ntokenizer: words\n')
    assert load_config(config).tokenizer == 'words'
    config.write_text('{{\n')
    with pytest.raises(ConfigError, match='is not valid YAML') as refused:
        load_config(config)
    assert len(str(refused.value).splitlines()) == 1


def test_a_file_below_the_home_may_be_named_by_a_tilde(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv('HOME', str(tmp_path))
    (tmp_path / 'model.safetensors').touch()
    config = tmp_path / 'mine.yaml'
    for name in ('model.safetensors', 'none.safetensors'):
        config.write_text(f'base: tiny\nweights: ~/{name}\n')
        assert load_config(config).weights == str(tmp_path / name)
