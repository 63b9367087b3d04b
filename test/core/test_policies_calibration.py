"""Calibration: frames that can carry it, and the file of scales."""
from __future__ import annotations

from collections.abc import Callable
import json
from pathlib import Path

import cv2
import numpy as np
import pytest

from flashrt_core.errors import BadEncoding
from flashrt_core.errors import BadSize
from flashrt_core.errors import ConfigError
from flashrt_core.policies.calibration import check_frames
from flashrt_core.policies.calibration import check_weights
from flashrt_core.policies.calibration import load_scales
from flashrt_core.policies.calibration import read_frames
from flashrt_core.policies.calibration import save_scales
from flashrt_core.policies.calibration import Scales
from flashrt_core.policies.preprocess import letterbox


def frames(count: int = 8) -> dict[str, list[np.ndarray]]:
    rng = np.random.default_rng(3)
    return {view: [rng.integers(0, 256, (24, 32, 3), np.uint8) for _ in range(count)]
            for view in ('top', 'wrist')}


def test_good_frames_are_counted() -> None:
    assert check_frames(frames(9)) == 9


@pytest.mark.parametrize('change, message', [
    (lambda f: f['top'].__setitem__(3, f['top'][3] // 64), "frame 3 of view 'top' is dark: its"),
    (lambda f: f['wrist'].__setitem__(0, np.full((24, 32, 3), 90, np.uint8)),
     "frame 0 of view 'wrist' is nearly one colour"),
    (lambda f: f['wrist'].__setitem__(2, letterbox(np.full((24, 32, 3), 90, np.uint8), 32)),
     "frame 2 of view 'wrist' is nearly one colour"),  # whatever the bars around it
    (lambda f: f.__setitem__('top', [f['top'][0]] * 8), "all 8 frames of view 'top' are the same"),
    (lambda f: f['top'].pop(), 'give every view as many'),
    (lambda f: f.clear(), 'give every view as many'),
])
def test_frames_that_show_nothing_are_refused_by_name(
        change: Callable[[dict], object], message: str) -> None:
    given = frames()
    change(given)
    with pytest.raises(ConfigError, match=message):
        check_frames(given)


def test_too_few_frames_and_foreign_arrays_are_refused() -> None:
    with pytest.raises(ConfigError, match='has 7 frames a view; give at least 8'):
        check_frames(frames(7))
    given = frames()
    given['top'][1] = given['top'][1].astype(np.float32)
    with pytest.raises(BadEncoding, match="frame 1 of view 'top' is float32"):
        check_frames(given)
    given['top'][1] = given['wrist'][1].tolist()
    with pytest.raises(BadEncoding, match="frame 1 of view 'top' is a list"):
        check_frames(given)
    given['top'][1] = np.zeros((24, 32), np.uint8)
    with pytest.raises(BadSize, match="frame 1 of view 'top'"):
        check_frames(given)


def test_frames_are_read_from_a_folder_a_view_in_order(tmp_path: Path) -> None:
    for view, images in frames().items():
        (tmp_path / view).mkdir()
        for at, image in enumerate(images):
            cv2.imwrite(str(tmp_path / view / f'{at:03d}.png'), image[..., ::-1])
    found = read_frames(tmp_path, ('top', 'wrist'), 32)
    assert found['top'][5].shape == (32, 32, 3)
    np.testing.assert_array_equal(found['top'][5][4:28], frames()['top'][5])
    (tmp_path / 'top' / '999.png').write_bytes(b'no image')
    with pytest.raises(ConfigError, match=r'999\.png cannot be read as an image'):
        read_frames(tmp_path, ('top',), 32)
    with pytest.raises(ConfigError, match='left is no folder'):
        read_frames(tmp_path, ('left',), 32)
    (tmp_path / 'left').mkdir()
    with pytest.raises(ConfigError, match='left holds no image'):
        read_frames(tmp_path, ('left',), 32)


GOOD = Scales('pi0', 'ab' * 32, 12, {'a': 1.5, 'b': 0.25})


def test_scales_come_back_as_they_were_saved(tmp_path: Path) -> None:
    path = tmp_path / 'scales.json'
    save_scales(GOOD, path)
    assert load_scales(path, 'pi0', ('b', 'a')) == GOOD
    assert [p.name for p in tmp_path.iterdir()] == ['scales.json']
    with pytest.raises(ConfigError, match='cannot be written'):
        save_scales(GOOD, tmp_path / 'nowhere' / 'scales.json')


def test_scales_of_another_policy_are_refused(tmp_path: Path) -> None:
    path = tmp_path / 'scales.json'
    save_scales(GOOD, path)
    with pytest.raises(ConfigError, match="this policy is 'pi05'"):
        load_scales(path, 'pi05', ('a', 'b'))
    with pytest.raises(ConfigError, match='this policy has cdcdcdcdcdcd; calibrate again'):
        check_weights(GOOD, 'cd' * 32)
    check_weights(GOOD, 'ab' * 32)
    with pytest.raises(ConfigError, match=r"lack \['c'\].*have \['b'\]"):
        load_scales(path, 'pi0', ('a', 'c'))


@pytest.mark.parametrize('text, message', [
    ('{', 'are no JSON'),
    ('[]', '"format": 1'),
    ('{"format": 2}', '"format": 1'),
    ('{"format": 1, "family": "pi0"}', 'lack family, weights, frames or largest'),
    (json.dumps({'format': 1, 'family': 'pi0', 'weights': '', 'frames': 8, 'largest': {'a': 0}}),
     'a is 0; a number above 0'),
    (json.dumps({'format': 1, 'family': 'pi0', 'weights': '', 'frames': 8,
                 'largest': {'a': float('nan')}}), 'a is nan; a number above 0'),
    *((json.dumps({'format': 1, 'family': 'pi0', 'weights': '', 'frames': 8,
                   'largest': {'a': value}}), 'a is 1.*; a number above 0 that float32 holds')
      for value in (10**400, 1e300)),
])
def test_damaged_scales_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / 'scales.json'
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_scales(path, 'pi0', ('a',))
    with pytest.raises(ConfigError, match='cannot be read'):
        load_scales(tmp_path / 'none.json', 'pi0', ('a',))
