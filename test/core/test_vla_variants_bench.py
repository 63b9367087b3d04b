"""What the VLA bench says of guided ticks and of ticks that keep a camera's result."""
from __future__ import annotations

from dataclasses import replace

from _pi0 import observation
from _pi0 import SMALL
import numpy as np

from flashrt_core.bench._vla_variants import variant_rows
from flashrt_core.policies.pi0 import Pi0Session

CONFIG = replace(SMALL, rows=1, row_keys=(1,))
NOISE = np.ones((1, SMALL.horizon, SMALL.action_width), dtype=np.float32)
INPUTS = [observation(draw=i, steps_executed=SMALL.horizon, noise=NOISE) for i in range(5)]


def test_guided_ticks_and_kept_views_are_timed_and_give_what_encoding_all_gives(backend):
    rows = variant_rows(backend, CONFIG, INPUTS)
    assert [(row['what'], row['kept_views'], row['exact']) for row in rows] == [
        ('guided', 0, True), ('each view encoded apart, all new', 0, True),
        ('1 of 2 views kept', 1, True)]
    assert all(0 < row['p50_ms'] <= row['p99_ms'] for row in rows)
    assert {row['table'] for row in rows} == {'variants, 2 views'}


def test_a_view_that_is_kept_though_another_came_is_told(backend, monkeypatch):
    real = Pi0Session._frames
    monkeypatch.setattr(Pi0Session, '_frames', lambda self, t: {
        view: replace(frame, stamp_ns=0) for view, frame in real(self, t).items()})
    rows = {row['what']: row for row in variant_rows(backend, CONFIG, INPUTS)}
    assert not rows['each view encoded apart, all new']['exact']
