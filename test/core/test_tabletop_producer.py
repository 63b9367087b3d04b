"""A training by the clock: other processes record, the policy drives, the rate ends at zero."""
from __future__ import annotations

from itertools import count
import json
from pathlib import Path
import time
from types import SimpleNamespace

import numpy as np
import pytest
from test_tabletop_train_policy import CPU
from test_tabletop_train_policy import shrink

from flashrt_core.errors import ConfigError
from flashrt_core.tabletop import dataset
from flashrt_core.tabletop import train_policy
from flashrt_core.tabletop.driver import Driver
from flashrt_core.tabletop.policy_learner import Shelf
from flashrt_core.tabletop.producer import produce
from flashrt_core.tabletop.training import Recipe


def test_the_oldest_samples_make_room_for_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)
    samples, frames = produce(4, 28)
    samples, frames = samples[:12], frames[:12]
    c = train_policy.with_statistics(train_policy.sizes(), produce(5, 28)[0])
    shelf = Shelf(c, 8, CPU)
    shelf.put(samples[:5], frames[:5])
    assert (shelf.held, shelf.given) == (5, 5)
    shelf.put(samples[5:], frames[5:])
    assert (shelf.held, shelf.given) == (8, 12)
    order = [8, 9, 10, 11, 4, 5, 6, 7]
    assert np.array_equal(shelf.parts['images'].numpy(), frames[order])
    assert np.array_equal(shelf.parts['text'].numpy(), samples.text[order])


def test_a_training_by_the_clock_lets_its_own_policy_drive(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)
    monkeypatch.setattr(train_policy, 'ROUND_S', 140.0)
    monkeypatch.setattr(train_policy, 'FIRST_SAMPLES', 50)
    # A clock that goes on as it is looked at: the number of steps is that of no machine.
    clock = SimpleNamespace(monotonic=count(0, 0.6).__next__, sleep=time.sleep)
    monkeypatch.setattr(train_policy, 'time', clock)
    recipe = Recipe(steps=1, batch=4, warmup=2)
    out = tmp_path / 'policy'
    done = train_policy.train_by_the_clock(out, recipe, CPU, 10.0, 1, 2000)
    record = json.loads((out / train_policy.TIMED / 'training.json').read_text())
    assert record['step'] == done > 3
    assert record['facts']['episodes']['expert'] > 0 and record['facts']['samples'] > 50
    own = sorted((out / 'own').iterdir())
    assert own and dataset.episode(2**30, Driver(own[-1] / 'policy.yaml').act)
    Driver(out / 'policy.yaml').close()
    with pytest.raises(ConfigError, match='holds a training already'):
        train_policy.train_by_the_clock(out, recipe, CPU, 0.5, 1, 2000)
