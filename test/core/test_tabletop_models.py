"""Finding the shipped models: whole, absent, or half there."""
from __future__ import annotations

from pathlib import Path

import pytest

from flashrt_core.errors import ConfigError
from flashrt_core.tabletop import models


@pytest.fixture
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installation without models, in place of this source tree."""
    monkeypatch.setattr(models, '__file__', str(tmp_path / 'a' / 'b' / 'models.py'))
    monkeypatch.setattr(models.sys, 'prefix', str(tmp_path / 'none'))
    monkeypatch.setenv('AMENT_PREFIX_PATH', str(tmp_path / 'ros'))
    return tmp_path / 'ros' / 'share' / 'flashrt_ros' / 'resource' / 'models'


def test_a_model_is_found_where_all_its_files_are(prefix: Path) -> None:
    assert models.trained('policy') is None
    with pytest.raises(ConfigError, match=r'no trained policy in .*train_policy all --out'):
        models.needed('policy')
    (prefix / 'policy').mkdir(parents=True)
    (prefix / 'policy' / 'policy.yaml').touch()
    with pytest.raises(ConfigError, match=r'lacks policy\.safetensors'):
        models.trained('policy')
    (prefix / 'policy' / 'policy.safetensors').touch()
    assert models.trained('policy') == models.needed('policy') == prefix / 'policy/policy.yaml'
    assert models.trained('planner') is None


def test_another_name_is_refused() -> None:
    with pytest.raises(ConfigError, match='there are policy, planner'):
        models.trained('arm')
