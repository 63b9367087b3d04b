"""What the executor binds: config, checkpoint and robot, refused before anything is loaded."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from _fake_policy import FakePolicy
import pytest

from flashrt_core.checkpoints.published import PUBLISHED
from flashrt_core.errors import ConfigError
from flashrt_core.errors import OutOfMemory
from flashrt_core.policies import make_policy
from flashrt_core.policies import MemoryNeed
from flashrt_core.policies import POLICIES
from flashrt_core.policies.pi0 import load_config
from flashrt_core.runtime import cpu_backend
from flashrt_core.runtime import MemoryInfo
from flashrt_ros.embodiment import load_embodiment
from flashrt_ros.policy_source import check_fit
from flashrt_ros.policy_source import check_memory
from flashrt_ros.policy_source import DEFAULTS
from flashrt_ros.policy_source import policy_config

CONFIG = Path(__file__).resolve().parents[2] / 'config'
GIB = 1 << 30


def robot(name: str = 'tabletop') -> Any:
    return load_embodiment(CONFIG / f'embodiments/{name}.yaml')


def bound_with(policy: str = 'pi0', name: str = 'tabletop', **values: Any) -> Any:
    given = {**DEFAULTS, 'policy': policy, 'policy_config': 'tiny', **values}
    return policy_config(given, make_policy(policy), robot(name))


def test_what_is_not_set_leaves_the_config_as_it_is_named() -> None:
    assert bound_with() == 'tiny'
    assert bound_with(policy_config='pi0_tiny.yaml') == str(CONFIG / 'pi0_tiny.yaml')


def test_an_empty_config_is_the_file_of_the_policy() -> None:
    assert bound_with('pi05', policy_config='') == str(CONFIG / 'pi05.yaml')


def test_a_chunk_mode_is_laid_over_the_config() -> None:
    assert bound_with(chunk_mode='rtc') == {'base': 'tiny', 'chunk_mode': 'rtc'}


@pytest.mark.parametrize('policy', POLICIES)
@pytest.mark.parametrize(('checkpoint', 'says'), [('', 'no weights to run'),
                                                  ('~/no/such/pi0', 'does not exist'),
                                                  ('~nobody-here/pi0', 'does not exist'),
                                                  ('x' * 5000, 'does not exist')])
def test_without_a_checkpoint_the_refusal_says_what_to_download_and_how_to_go_on(
    policy: str, checkpoint: str, says: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        bound_with(policy, policy_config='', checkpoint=checkpoint)
    text = str(refused.value)
    assert says in text and f'{checkpoint!r:.200}' in text
    assert all(name in text for name in PUBLISHED[policy].repositories)
    assert 'hf download' in text and 'tokenizer.model' in text
    assert 'check the licence on the model page' in text
    assert 'checkpoint:=random' in text and 'checkpoint:=<folder' in text


def test_random_weights_are_asked_for_by_name_whatever_the_config_names() -> None:
    config = load_config(bound_with(checkpoint='random'))
    assert config == replace(load_config('tiny'), weights='')


def test_a_checkpoint_brings_the_tokenizer_that_lies_beside_it(tmp_path: Path) -> None:
    weights = tmp_path / 'model.safetensors'
    weights.touch()
    assert bound_with(checkpoint=str(weights)) == {'base': 'tiny', 'weights': str(weights)}
    beside = tmp_path / 'tokenizer.model'
    beside.touch()
    for named in (tmp_path, weights):
        given = bound_with(checkpoint=str(named))
        assert given == {'base': 'tiny', 'weights': str(named), 'tokenizer': str(beside)}
    other = bound_with(checkpoint=str(tmp_path), tokenizer='other.model')
    assert other['tokenizer'] == 'other.model'


def test_a_config_is_fitted_to_a_robot_of_fewer_joints_and_cameras() -> None:
    config = load_config(bound_with('pi05', 'so101', policy_config='pi05', fit_to_robot=True))
    assert (config.state_dim, config.action_dim) == (6, 6)
    assert config.views == ('base', 'left_wrist')
    assert (config.state_width, config.action_width) == (32, 32)


ROBOTS = sorted(file.stem for file in (CONFIG / 'embodiments').glob('*.yaml'))


@pytest.mark.parametrize('config', ['pi0', 'pi05', 'pi0_tiny', 'pi05_tiny'])
@pytest.mark.parametrize('name', ROBOTS)
def test_each_shipped_robot_goes_with_each_config_of_its_cameras(name: str, config: str) -> None:
    policy, policy_name = make_policy(config.split('_')[0]), config.split('_')[0]
    own = robot(name)

    def fitted(fit: bool) -> Any:
        given = bound_with(policy_name, name, policy_config=f'{config}.yaml', fit_to_robot=fit)
        check_fit(policy, given, own)
        return load_config(given)

    if name.startswith('tabletop') != config.endswith('tiny'):
        for fit in (True, False):
            with pytest.raises(ConfigError, match=r'is not a view of|joints lists'):
                fitted(fit)
        return
    c = fitted(True)
    assert c.state_dim == c.action_dim == len(own.joints)
    assert set(c.views) == set(own.views)
    assert fitted(False) == load_config(CONFIG / f'{config}.yaml')


def test_a_robot_whose_view_the_policy_has_not_is_refused_before_loading() -> None:
    for check in (lambda: bound_with(policy_config='pi0', fit_to_robot=True),
                  lambda: check_fit(make_policy('pi0'), 'pi0', robot())):
        with pytest.raises(ConfigError, match=r'views\.top is not a view of the policy'):
            check()


def test_a_robot_with_more_joints_than_the_policy_is_refused_before_loading() -> None:
    with pytest.raises(ConfigError, match='joints lists 14, the state of the policy has 4'):
        check_fit(FakePolicy(), 'tiny', robot('aloha'))


def backend_with(free: int, integrated: bool, name: str, monkeypatch: Any) -> Any:
    backend = cpu_backend()
    monkeypatch.setattr(backend, 'memory', lambda: MemoryInfo(8 * GIB, free, integrated))
    monkeypatch.setattr(backend, 'name', name)
    return backend


def test_what_will_be_allocated_and_what_is_free_is_said_with_figures(monkeypatch: Any) -> None:
    need = MemoryNeed(constants=2 * GIB, buffers=GIB // 2, pinned=GIB // 4)
    text = check_memory(need, GIB, backend_with(4 * GIB, False, 'cuda', monkeypatch))
    assert '2.00 GiB of weights and tables, 512.0 MiB of buffers, 256.0 MiB pinned' in text
    assert '1.00 GiB of capsules' in text and '4.00 GiB of 8.00 GiB are free' in text


@pytest.mark.parametrize(('free', 'integrated', 'fits'), [
    (14, False, True), (13, False, False), (15, True, True), (14, True, False)])
def test_what_does_not_fit_is_refused_pinned_memory_counting_where_it_is_the_devices(
    free: int, integrated: bool, fits: bool, monkeypatch: Any
) -> None:
    need = MemoryNeed(constants=2 * GIB, buffers=GIB // 2, pinned=GIB // 4)
    backend = backend_with(free * GIB // 4, integrated, 'cuda', monkeypatch)
    if fits:
        check_memory(need, GIB, backend)
        return
    with pytest.raises(OutOfMemory, match='do not fit, nothing was loaded'):
        check_memory(need, GIB, backend)


def test_the_full_size_needs_what_its_buffers_add_up_to() -> None:
    need = make_policy('pi0').memory('pi0')
    assert 5.8 < need.constants / GIB < 6.0
    assert need.buffers < 0.2 * GIB and 0 < need.pinned < 0.01 * GIB


def test_pi05_takes_its_own_config_only() -> None:
    for ask in (make_policy('pi05').memory, make_policy('pi05').ports):
        with pytest.raises(ConfigError, match="the policy is 'pi05'"):
            ask('pi0')
